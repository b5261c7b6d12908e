"""What all tests may use, and the counts of the backend suite at the end of a run."""

import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.bad_input import Place


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A folder to work in and a folder for temporary files, both empty."""
    for name in ("work", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return Place(tmp_path / "work", tmp_path / "temporary")


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
