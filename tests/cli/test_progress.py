"""What commands say while they work: a line every few seconds where there is no terminal."""

import time

import pytest

from memonger.cli import output
from memonger.cli.output import done_of, progress_bar


def test_a_line_every_few_seconds_says_what_is_done_now(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "LINE_SECONDS", 0.02)
    with progress_bar(False, "Planning m.onnx") as tell:
        tell("load")
        tell("search: attempt 1 of at most 6, 37%, best +5.20%, about 12 s left")
        time.sleep(0.2)
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) > 1
    assert set(lines) == {
        "Planning m.onnx: search: attempt 1 of at most 6, 37%, best +5.20%, about 12 s left (0 s)"
    }  # and nothing of what took less
    time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_a_point_of_a_frontier_is_a_line_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(False, "Planning m.onnx") as tell:
        tell("search: found point 1 of 3: 56.6 MiB in total, +111.9%")
        tell("verify")
    assert capsys.readouterr().err == "Planning m.onnx: point 1 of 3: 56.6 MiB in total, +111.9% (0 s)\n"


def test_nothing_is_said_where_nothing_is_to_be_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "LINE_SECONDS", 0.01)
    with progress_bar(True, "Planning m.onnx") as tell:
        tell("search: found point 1 of 3: 1 MiB in total, +1%")
        time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_parts_that_are_alike_tell_how_long_the_others_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 130.0)
    assert done_of(0, 100, "runs", 130.0) == "0 of 100 runs done"
    assert done_of(20, 100, "runs", 120.0) == "20 of 100 runs done, about 40 s left"
