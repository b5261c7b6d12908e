"""Measuring processes: what they answer, and what the parent says of those that don't."""

import time
from pathlib import Path

import pytest

from memonger.runtime.worker import Worker, WorkerError, reason

TIMED = """
from memonger.runtime import worker
print("a line of a compiler's")
worker.say({"ready": True})
worker.serve_times(lambda: None)
"""


def test_a_worker_answers_in_lines_of_json_whatever_else_is_printed(tmp_path: Path) -> None:
    (tmp_path / "timed.py").write_text(TIMED)
    environment = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    with Worker("timed", [], tmp_path / "a.err", environment) as worker:
        assert worker.read(60.0) == {"ready": True}
        assert len(worker.times(3)) == 3
        begin = time.monotonic()
        assert all(seconds > 0 for seconds in worker.times(1, seconds=0.05))
        assert time.monotonic() - begin > 0.05
    assert worker.process.poll() == 0


def test_a_worker_that_is_silent_or_ends_has_failed(tmp_path: Path) -> None:
    with (
        Worker("json.tool", [], tmp_path / "a.err") as worker,
        pytest.raises(WorkerError, match=r"within 0\.2 s"),
    ):
        worker.read(0.2)
    missing = [str(tmp_path / "missing.json")]
    with Worker("json.tool", missing, tmp_path / "b.err") as worker:
        with pytest.raises(WorkerError, match=r"missing\.json"):
            worker.read(60.0)
        assert worker.process.wait() != 0


def test_an_error_becomes_one_line() -> None:
    assert reason(ValueError("\n too large\nby far")) == "ValueError: too large"
    assert reason(KeyError()) == "KeyError: no message"
