"""The sweep of thresholds around the square root."""

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memonger.errors import PlanError
from memonger.schedule.checkpoints import MirrorStage, marked, narrow, structural
from memonger.schedule.on_demand import in_time, recompute_on_demand
from memonger.schedule.problem import Problem, check, cost, peak
from memonger.schedule.sweep import PeakOf, Sweep, sweep
from tests.support.recompute_problems import chain, dense, drawn_drops, training, trainings, u_net


def stages_of(of: Problem) -> dict[str, tuple[MirrorStage, ...]]:
    return {"structural": structural(of), "narrow": narrow(of)}


def swept(of: Problem, trials: int = 6) -> Sweep:
    return sweep(of, stages_of(of), trials)


@settings(max_examples=40, deadline=None)
@given(trainings(), st.data())
def test_the_fast_peak_is_the_peak(problem: Problem, data: st.DataObject) -> None:
    dropped = drawn_drops(problem, data)
    dropped = in_time(problem, problem.deadline, dropped)
    schedule = recompute_on_demand(problem, dropped)
    assert PeakOf(problem)(schedule) == peak(problem, schedule)


def test_values_that_nobody_writes_are_free_in_the_fast_peak() -> None:
    problem = Problem((1, 1), ((0,), (0, 1)), ((1,), (2,)), (5, 7, 9), workspace=(100, 0), base=1000)
    assert PeakOf(problem)((0, 1)) == peak(problem, (0, 1)) == 1107


@settings(max_examples=40, deadline=None)
@given(trainings(), st.integers(0, 4))
def test_a_sweep_is_valid_and_never_worse_than_nothing(problem: Problem, trials: int) -> None:
    found = swept(problem, trials)
    check(problem, found.schedule)
    energies = [(each.peak, each.overhead) for each in found.candidates]
    assert found.candidates[0].source == "none"
    assert found.candidates[0].overhead == 0
    assert energies[0] == (peak(problem, problem.schedule), 0)
    extra = cost(problem, found.schedule) / (cost(problem, problem.schedule) or 1) - 1
    assert peak(problem, found.schedule) == min(energies)[0]
    assert min(energies)[1] == pytest.approx(extra if cost(problem, problem.schedule) else 0)
    again = [node for node in range(problem.nodes) if found.schedule.count(node) > 1]
    assert set(again) <= set(found.mirror.dropped)


def test_the_peak_of_a_chain_grows_with_its_square_root() -> None:
    short, long = (peak(chain(n), swept(chain(n)).schedule) for n in (64, 256))
    assert 1.7 < long / short < 2.3
    assert short < 0.45 * peak(chain(64), chain(64).schedule)
    assert long <= 2.5 * math.sqrt(256) * 1000


def test_a_swept_chain_runs_its_forward_pass_less_than_twice() -> None:
    of = chain(256)
    found = swept(of)
    assert 0 < cost(of, found.schedule) - cost(of, of.schedule) < 256


@pytest.mark.parametrize(
    ("of", "most"), [(u_net(8), 0.85), (dense(6, 6), 0.6), (chain(100), 0.3)], ids=["u-net", "dense", "chain"]
)
def test_graphs_without_marks_are_helped_by_their_structure(of: Problem, most: float) -> None:
    found = swept(of)
    assert peak(of, found.schedule) < most * peak(of, of.schedule)


def test_the_same_arguments_give_the_same_sweep() -> None:
    assert swept(dense(4, 5)) == swept(dense(4, 5))


def test_a_time_limit_ends_the_trials() -> None:
    of = chain(400)
    assert [each.source for each in sweep(of, stages_of(of), 6, time_limit=0).candidates] == ["none"]
    begin = time.monotonic()
    found = sweep(of, stages_of(of), 10**6, time_limit=0.3)
    assert time.monotonic() - begin < 10
    assert 1 < len(found.candidates) < 10**6
    assert sweep(of, stages_of(of), 6, time_limit=1000) == swept(of)


def test_thresholds_are_those_of_memonger() -> None:
    of = chain(128)
    found = sweep(of, {"marks": marked(dict.fromkeys(range(128), "True"))}, 5)
    thresholds = [each.threshold for each in found.candidates[1:]]
    assert thresholds[:2] == [0, math.isqrt(128_000 * 1000 // 2)]  # all kept, segments of one node
    # Segments of 8 nodes then: 16 kept.
    assert thresholds[2] == math.isqrt(16_000 * 8000 // 2)
    step = (math.isqrt(16_000 * 8000 // 2) * math.sqrt(2) - 1000) / 5
    assert thresholds[3:] == [int(1000 + step * trial) for trial in range(1, 6)]
    assert {each.source for each in found.candidates[1:]} == {"marks"}


@pytest.mark.parametrize("trials", [0, 1, 9])
def test_every_set_of_stages_is_swept(trials: int) -> None:
    of = chain(64)
    sources = [each.source for each in swept(of, trials).candidates]
    assert sources == ["none"] + ["structural"] * (3 + trials) + ["narrow"] * (3 + trials)


def test_negative_trials_are_refused() -> None:
    with pytest.raises(PlanError, match="-1 trials"):
        swept(chain(3), -1)


def test_forced_nodes_are_recomputed_or_kept_whatever_is_best() -> None:
    of = chain(64)
    found = sweep(of, stages_of(of), 6, {60: True, 5: False, 6: False})
    counts = [found.schedule.count(node) for node in (60, 5, 6)]
    assert counts == [2, 1, 1]
    assert found.candidates[0].overhead > 0
    alone = sweep(of, {}, 6, {60: True})
    assert [node for node in range(128) if alone.schedule.count(node) > 1] == [60]


def test_progress_ends_at_the_whole() -> None:
    of = chain(30)
    told: list[float] = []
    sweep(of, stages_of(of), 6, progress=told.append)
    assert told == sorted(told)
    assert told[0] > 0
    assert told[-1] == 1


def test_a_sweep_takes_time_in_proportion_to_the_nodes() -> None:
    def seconds(n: int) -> float:
        of = training([[i - 1] + ([i - 4] if i % 4 == 0 else []) if i else [] for i in range(n)])
        begin = time.process_time()
        swept(of)
        return time.process_time() - begin

    assert seconds(4000) < 12 * max(seconds(1000), 0.02)
