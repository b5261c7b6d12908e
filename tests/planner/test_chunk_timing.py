"""Chunks that were measured to take longer than they may: coarser ones, or none; and what counts as measured."""

from collections.abc import Iterator
from types import SimpleNamespace

import onnx
import pytest
from onnx import helper

import memonger
from memonger.ir.marks import CHUNK
from memonger.planner import chunk_timing, search_plan
from tests.support.networks import model_of
from tests.support.stock import normal
from tests.tiling.test_chunking import convolutions

PERCEPTRON = onnx.parser.parse_model(
    """<ir_version: 10, opset_import: ["": 20]> g (float[n, 4] x) => (float[n, 4] y)
    <float[4, 4] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}> { h = MatMul(x, w) y = Relu(h) }"""
)


@pytest.fixture(autouse=True)
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short runs are timed here."""
    monkeypatch.setattr(chunk_timing, "SHORTEST", 2e-3)


def _copies(plan: memonger.Plan) -> int:
    return sum(CHUNK in node.metadata_props for node in plan.model.graph)


def _planned(monkeypatch: pytest.MonkeyPatch, *ratios: float | None) -> memonger.Plan:
    """A few convolutions at batch 64, with these for measured ratios."""
    given: Iterator[float | None] = iter(ratios)
    monkeypatch.setattr(chunk_timing.ChunkTimer, "ratio", lambda *_: next(given))
    monkeypatch.setattr(chunk_timing, "SHORTEST", 0.0)
    return memonger.search_plan(convolutions(64), device="cpu", mode="inference", max_overhead=0.5)


def test_chunks_that_take_too_long_become_coarser_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    unmeasured, fast = _planned(monkeypatch, None), _planned(monkeypatch, 1.51)
    assert _copies(unmeasured) == _copies(fast) > 0
    assert unmeasured.arena_bytes == fast.arena_bytes
    assert (unmeasured.spent.ratio, fast.spent.ratio) == (None, 1.51)  # type: ignore[union-attr]
    coarser = _planned(monkeypatch, 2.0, 1.0)
    assert 0 < _copies(coarser) <= _copies(fast) // 2
    assert fast.arena_bytes < coarser.arena_bytes
    whole = _planned(monkeypatch, *[2.0] * search_plan.COARSER)
    assert not whole.chunks
    assert _copies(whole) == 0
    assert any("measured to take longer than max_overhead=0.5 allows" in note for note in whole.notes)


def test_chunks_that_take_too_long_leave_weights_that_are_mapped_in_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of 1 MiB each: of the plan in chunks, and of the one without that takes its place."""
    layers = range(3)
    nodes = [helper.make_node("MatMul", [f"x{n}", f"w{n}"], [f"x{n + 1}"]) for n in layers]
    weights = {f"w{n}": normal(n, 512, 512) for n in layers}
    model = model_of(nodes, {"x0": [2048, 512]}, {"x3": [2048, 512]}, **weights)
    monkeypatch.setattr(chunk_timing, "SHORTEST", 0.0)
    monkeypatch.setattr(chunk_timing.ChunkTimer, "ratio", lambda *_: 0.0)
    chunked = memonger.search_plan(model, device="cpu", mode="inference", max_overhead=2.0, weights="mapped")
    monkeypatch.setattr(chunk_timing.ChunkTimer, "ratio", lambda *_: 4.0)
    whole = memonger.search_plan(model, device="cpu", mode="inference", max_overhead=2.0, weights="mapped")
    assert chunked.chunks
    assert not whole.chunks
    for plan in (chunked, whole):
        assert plan.window is not None
        assert len(plan.window.weights) == len(layers)


def test_what_is_asked_for_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_timing, "ChunkTimer", None)  # none is made
    monkeypatch.setattr(chunk_timing, "SHORTEST", 0.0)
    model = convolutions(64)
    plan = memonger.search_plan(model, device="cpu", mode="inference", chunks=4)
    assert plan.chunks
    budget = plan.total_bytes
    assert memonger.search_plan(model, device="cpu", mode="inference", budget=budget).total_bytes <= budget


Timed = tuple[float, float]
"""Seconds of a run, and what part of them its threads waited."""


def test_two_plans_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real thing, where the machine is taken for quiet: a ratio of inference, and of training steps."""
    monkeypatch.setattr(chunk_timing, "QUIET", 1e9)
    monkeypatch.setattr(chunk_timing, "PAUSE", 0.0)
    keywords = (
        {"device": "cpu", "mode": "inference"},
        {"device": "cpu", "loss": "mean_squared_error", "optimizer": memonger.SGD()},
    )
    for given in keywords:
        plan = memonger.search_plan(PERCEPTRON, batch=8, **given)
        ratio = chunk_timing.ChunkTimer(plan, 0.01, 2.0, None).ratio(plan)
        assert ratio is not None
        assert 0.01 < ratio < 100
    assert chunk_timing.ChunkTimer(plan, 1e-3, 2.0, None).ratio(plan) is None
    monkeypatch.setattr(chunk_timing, "QUIET", -1.0)
    assert chunk_timing.ChunkTimer(plan, 0.01, 2.0, None).ratio(plan) is None
    assert chunk_timing.ChunkTimer(plan, 5.0, 2.0, None).ratio(plan) is None


COLD = ["whole 9", "whole 1.1", "9"]
"""The first run of each isn't counted; the second without chunks says whether the machine is quiet, too."""

TIMES = {
    # seconds of a run about; plans in turn, of each the runs (seconds, in chunks or not, busy or not), what is measured
    "short: three of each hold": (0.1, [[*COLD, "1.1", "1.2", "whole 1", "1.02", "whole 1.1"]], [1.02]),
    "short: the fastest of each": (
        0.1, [[*COLD, "1.3", "1.3", "whole 1.1", "1.3", "whole 1.1", "1.02"]], [1.02 / 1.1]
    ),
    "short: nine of each don't": (0.1, [[*COLD, "1.3", *["1.3", "whole 1.2"] * 7, "1.3"]], [1.3 / 1.1]),
    "short: a busy run doesn't count": (0.1, [[*COLD, "busy 0.5", "1.1", "1.1", "whole 1", "1", "whole 1"]], [1.0]),
    "short: the machine is busy": (0.1, [[*COLD, *["busy 0.5"] * 4]], [None]),
    "short: it is busy from the first": (0.1, [["busy whole 9", "busy whole 9"]], [None]),
    "a second of each": (1.0, [[*COLD, "1.3"], ["9", "1.2"]], [1.3 / 1.1, 1.2 / 1.1]),
    "long: one of each": (5.0, [["4.1", "whole 4.0"]], [4.1 / 4.0]),
    "long: coarser ones are run once": (5.0, [["4.4", "whole 4.0"], ["4.3"], ["4.2"]], [1.1, 4.3 / 4.0, 4.2 / 4.0]),
    "long: a busy run doesn't count": (5.0, [["busy 9", "4.1", "whole 4.0"]], [4.1 / 4.0]),
    "long: nor one without chunks": (5.0, [["4.1", "busy whole 9", "whole 4.0"]], [4.1 / 4.0]),
    "long: the machine is busy": (5.0, [["busy 9", "busy 9"]], [None]),
    "long: too few runs count": (5.0, [["4.1", "busy whole 9", "busy whole 9"]], [None]),
}  # fmt: skip


@pytest.mark.parametrize(("seconds", "plans", "expected"), TIMES.values(), ids=TIMES)
def test_the_fastest_runs_are_compared_until_they_hold_the_limit(
    seconds: float, plans: list[list[str]], expected: list[float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others make runs slower, never faster: slow ones decide nothing where a fast one is among them.

    Of long runs one of each is timed, and one of each coarser plan.
    """
    left = list[str]()

    def timed(name: str) -> Timed:
        run = left.pop(0).split()
        assert ("whole" in run) == (name == "whole")
        return float(run[-1]), float("busy" in run)

    class Run(str):
        def __call__(self) -> None:
            timed(self)

    monkeypatch.setattr(chunk_timing, "_timed", timed)
    whole = SimpleNamespace(parameter_bytes=0)
    timer = chunk_timing.ChunkTimer(whole, seconds, 1.05, None)  # type: ignore[arg-type]
    monkeypatch.setattr(chunk_timing, "_runner", lambda plan, _: Run("whole" if plan is whole else plan))
    for number, (runs, ratio) in enumerate(zip(plans, expected, strict=True)):
        left += runs
        assert timer.ratio(str(number)) == (None if ratio is None else pytest.approx(ratio))  # type: ignore[arg-type]
        assert not left
