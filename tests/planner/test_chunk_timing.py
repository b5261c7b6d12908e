"""Chunks that were measured to take longer than they may: coarser ones, or none; and what counts as measured."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import onnx
import pytest

import memonger
import models
from memonger.ir.marks import CHUNK
from memonger.planner import chunk_timing, search_plan

PERCEPTRON = onnx.parser.parse_model(
    """<ir_version: 10, opset_import: ["": 20]> g (float[n, 4] x) => (float[n, 4] y)
    <float[4, 4] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}> { h = MatMul(x, w) y = Relu(h) }"""
)


def _copies(plan: memonger.Plan) -> int:
    return sum(CHUNK in node.metadata_props for node in plan.model.graph)


def _planned(monkeypatch: pytest.MonkeyPatch, *ratios: float | None) -> memonger.Plan:
    """MobileNet-v2 at batch 32, with these for measured ratios."""
    given: Iterator[float | None] = iter(ratios)
    monkeypatch.setattr(chunk_timing.ChunkTimer, "ratio", lambda *_: next(given))
    model = models.build("mobilenet_v2", batch=32, image=96)
    return memonger.search_plan(model, device="cpu", mode="inference")


def test_chunks_that_take_too_long_become_coarser_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    unmeasured, fast = _planned(monkeypatch, None), _planned(monkeypatch, 1.04)
    assert _copies(unmeasured) == _copies(fast) > 0
    assert unmeasured.arena_bytes == fast.arena_bytes
    assert (unmeasured.spent.ratio, fast.spent.ratio) == (None, 1.04)  # type: ignore[union-attr]
    coarser = _planned(monkeypatch, 1.4, 1.0)
    assert 0 < _copies(coarser) <= _copies(fast) // 2
    assert fast.arena_bytes < coarser.arena_bytes
    whole = _planned(monkeypatch, *[1.4] * search_plan.COARSER)
    assert not whole.chunks
    assert _copies(whole) == 0
    assert any("measured to take longer than max_overhead=0.02 allows" in note for note in whole.notes)


def test_what_is_asked_for_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_timing, "ChunkTimer", None)  # none is made
    model = models.build("mobilenet_v2", batch=32, image=96)
    plan = memonger.search_plan(model, device="cpu", mode="inference", chunks=4)
    assert plan.chunks
    budget = plan.total_bytes
    assert memonger.search_plan(model, device="cpu", mode="inference", budget=budget).total_bytes <= budget


def _runs(monkeypatch: pytest.MonkeyPatch, *pairs: tuple[tuple[float, float], tuple[float, float]]) -> list[int]:
    """Runs that take so many seconds, with chunks and without, and wait for such a part; counts pairs."""
    given, count = iter(pairs), [0]

    def timed(run: Callable[[], object]) -> tuple[float, float]:
        if run is int:
            count[0] += 1
            _runs.pair = next(given)  # type: ignore[attr-defined]
        return _runs.pair[run is float]  # type: ignore[attr-defined, no-any-return]

    monkeypatch.setattr(chunk_timing, "_timed", timed)
    return count


def test_only_runs_that_had_the_processor_count(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet, busy = ((1.5, 0.0), (1.0, 0.01)), ((9.0, 0.8), (1.0, 0.0))
    count = _runs(monkeypatch, quiet, busy, quiet, quiet)
    assert chunk_timing._compared(int, float, 1.05) == 1.5
    assert count == [4]
    count = _runs(monkeypatch, *[busy] * 9)
    assert chunk_timing._compared(int, float, 1.05) is None
    assert count == [4]


def test_pairs_that_disagree_go_on_until_the_median_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fast = ((1.1, 0.0), (1.0, 0.0)), ((1.0, 0.0), (1.0, 0.0))
    count = _runs(monkeypatch, slow, fast, fast, fast, slow, fast, fast, slow, fast)
    assert chunk_timing._compared(int, float, 1.05) == 1.0
    assert count == [chunk_timing.MOST_PAIRS]


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
    assert chunk_timing.ChunkTimer(plan, chunk_timing.SHORTEST / 2, 2.0, None).ratio(plan) is None
    monkeypatch.setattr(chunk_timing, "QUIET", -1.0)
    assert chunk_timing.ChunkTimer(plan, 0.01, 2.0, None).ratio(plan) is None
    assert chunk_timing.ChunkTimer(plan, 5.0, 2.0, None).ratio(plan) is None


def test_of_long_runs_the_best_of_two_counts_where_the_first_is_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those without chunks are timed once or twice for all plans."""
    times = {"whole": iter([5.0, 4.0]), "slow": iter([6.0, 4.4]), "fast": iter([4.1])}
    monkeypatch.setattr(chunk_timing, "_timed", lambda name: (next(times[name]), 0.0))
    whole = SimpleNamespace(parameter_bytes=0)
    timer = chunk_timing.ChunkTimer(whole, 5.0, 1.05, None)  # type: ignore[arg-type]
    monkeypatch.setattr(chunk_timing, "_runner", lambda plan, _: "whole" if plan is whole else plan)
    assert timer.ratio("slow") == 1.1  # type: ignore[arg-type]
    assert timer.ratio("fast") == 4.1 / 4.0  # type: ignore[arg-type]
