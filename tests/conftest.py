"""The counts of the backend suite at the end of a run, gathered from all worker processes."""

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print N of N for onnx's backend test suite."""
    reports = [report for status in ("passed", "failed") for report in terminalreporter.stats.get(status, ())]
    counts = [value for report in reports for key, value in report.user_properties if key == "backend_suite"]
    if counts:
        total = {key: sum(count[key] for count in counts) for key in counts[0]}
        terminalreporter.write_line(
            f"onnx backend suite: of {total['all']} tests stock onnxruntime passes {total['of']}; planned, "
            f"{total['passed']} of {total['of']} pass, {total['arenas']} of them with a non-empty arena"
        )
