"""Chunks that were measured to take longer than they may: coarser ones, or none; and what counts as measured."""

from collections.abc import Iterator
from types import SimpleNamespace

import onnx
import pytest
from onnx import helper

import memonger
from memonger.ir.marks import CHUNK
from memonger.planner import chunk_timing, search_plan
from memonger.runtime.pairs import Pairs
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


def _alike(ratio: float | None) -> Pairs | None:
    """Pairs of one ratio each, beside what 0.5 allows."""
    return None if ratio is None else Pairs(1.53, 5, [ratio] * 5)


def _planned(monkeypatch: pytest.MonkeyPatch, *ratios: float | None) -> memonger.Plan:
    """A few convolutions at batch 64, with these for measured ratios."""
    given: Iterator[float | None] = iter(ratios)
    monkeypatch.setattr(chunk_timing.ChunkTimer, "pairs", lambda *_: _alike(next(given)))
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
    monkeypatch.setattr(chunk_timing.ChunkTimer, "pairs", lambda *_: _alike(0.1))
    chunked = memonger.search_plan(model, device="cpu", mode="inference", max_overhead=2.0, weights="mapped")
    monkeypatch.setattr(chunk_timing.ChunkTimer, "pairs", lambda *_: _alike(4.0))
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


def test_two_plans_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real thing, where the machine is taken for quiet: a ratio of inference, and of training steps."""
    monkeypatch.setattr(chunk_timing, "BUSY", 1e9)
    monkeypatch.setattr(chunk_timing, "PAUSE", 0.0)
    keywords = (
        {"device": "cpu", "mode": "inference"},
        {"device": "cpu", "loss": "mean_squared_error", "optimizer": memonger.SGD()},
    )
    for given in keywords:
        plan = memonger.search_plan(PERCEPTRON, batch=8, **given)
        pairs = chunk_timing.ChunkTimer(plan, 0.01, 2.0, None).pairs(plan)
        assert pairs is not None
        assert 0.01 < pairs.ratio < 100
    assert chunk_timing.ChunkTimer(plan, 1e-3, 2.0, None).pairs(plan) is None
    monkeypatch.setattr(chunk_timing, "BUSY", -1.0)
    assert chunk_timing.ChunkTimer(plan, 0.01, 2.0, None).pairs(plan) is None
    assert chunk_timing.ChunkTimer(plan, 5.0, 2.0, None).pairs(plan) is None


COLD = ["whole 9", "whole 1", "9"]
"""The first run of each doesn't count; the first two without chunks say whether others are running."""


def _pairs(*ratios: float) -> list[str]:
    """Pairs of runs, of which those without chunks take a second; the machine is half as fast in every third."""
    runs = list[str]()
    for number, ratio in enumerate(ratios):
        slow = 1 + (number % 3 == 2)
        pair = [f"{slow * ratio}", f"whole {slow}"]
        runs += pair if number % 2 == 0 else pair[::-1]
    return runs


TIMES = {
    # seconds of a run about; of each plan in turn the runs (seconds, in chunks or not, busy or not), what is measured,
    # and whether that is too slow
    "short: three pairs are enough": (0.1, [[*COLD, *_pairs(*[1.02] * 3)]], [(1.02, False)]),
    "short: five that say that it is too slow": (0.1, [[*COLD, *_pairs(*[1.3] * 5)]], [(1.3, True)]),
    "short: a slow one of five counts little": (0.1, [[*COLD, *_pairs(1.3, *[1.02] * 5)]], [(1.02, False)]),
    "short: a fast one of eight likewise": (0.1, [[*COLD, *_pairs(1.3, 1.0, *[1.3] * 6)]], [(1.3, True)]),
    "a second: the median of five": (1.0, [[*COLD, *_pairs(1.3, 1.0, 1.1, 1.0, 1.2)]], [(1.1, True)]),
    "a second: three of five are enough": (1.0, [[*COLD, *_pairs(1.3, 1.0, 1.1, 1.2)]], [(1.15, True)]),
    "short: others are running": (0.1, [[*COLD, *_pairs(1.0), "busy whole 1", "1"]], [None]),
    "short: from the first": (0.1, [["busy whole 9", "whole 9"]], [None]),
    "two plans": (1.0, [[*COLD, *_pairs(*[1.3] * 3)], ["9", *_pairs(1.2, 1.0, 1.0, 1.0)]], [(1.3, True), (1.0, False)]),
    "long: two of three": (5.0, [_pairs(1.01, 1.02)], [(1.015, False)]),
    "long: three where they disagree": (5.0, [_pairs(1.2, 1.0, 1.1)], [(1.1, True)]),
    "long: two are too slow": (5.0, [_pairs(1.1, 1.2), _pairs(1.0, 1.0)], [(1.15, True), (1.0, False)]),
    "long: others are running": (5.0, [["busy 9", "whole 4.0"]], [None]),
}  # fmt: skip


@pytest.mark.parametrize(("seconds", "plans", "expected"), TIMES.values(), ids=TIMES)
def test_pairs_are_compared_until_it_is_clear_on_which_side_of_the_limit_they_are(
    seconds: float, plans: list[list[str]], expected: list[tuple[float, bool] | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine has slow phases, and each pair is of one. Of long runs there are few."""
    left = list[str]()

    def timed(name: str) -> tuple[float, float]:
        run = left.pop(0).split()
        assert ("whole" in run) == (name == "whole")
        return float(run[-1]), float(run[-1]) * ("busy" in run) * 2

    class Run(str):
        def __call__(self) -> None:
            timed(self)

    monkeypatch.setattr(chunk_timing, "_timed", timed)
    whole = SimpleNamespace(parameter_bytes=0)
    timer = chunk_timing.ChunkTimer(whole, seconds, 1.05, None)  # type: ignore[arg-type]
    monkeypatch.setattr(chunk_timing, "_runner", lambda plan, _: Run("whole" if plan is whole else plan))
    for number, (runs, wanted) in enumerate(zip(plans, expected, strict=True)):
        left += runs
        pairs = timer.pairs(str(number))  # type: ignore[arg-type]
        assert not left
        assert (pairs is None) == (wanted is None)
        if pairs is not None and wanted is not None:
            assert pairs.ratio == pytest.approx(wanted[0])
            assert pairs.is_too_slow == wanted[1]
