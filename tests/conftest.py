"""What all tests may use, and the counts of the backend suite at the end of a run."""

import gc
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


@pytest.hookimpl(tryfirst=True)  # before the plugin that reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one network run in one process: what they make of it, exports from PyTorch above all, is made once."""
    for item in items:
        network = getattr(item, "callspec", None) and item.callspec.params.get("name")  # type: ignore[attr-defined]
        suite = item.path.stem if item.path.stem == "test_backend_suite" else None
        if suite or isinstance(network, str):
            item.add_marker(pytest.mark.xdist_group(suite or network))


def pytest_collection_finish() -> None:
    """Garbage collections needn't look through what the imports made: that stays (a third of the suite's time)."""
    gc.collect()
    gc.freeze()


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
