"""Schedules without a search: one segment a stage, sqrt(n), O(log n)."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memonger.errors import PlanError
from memonger.schedule.checkpoints import MirrorStage, narrow, structural
from memonger.schedule.problem import Problem, check, cost, peak
from memonger.schedule.segments import block, logarithmic, square_root
from tests.support.recompute_problems import chain, dense, trainings, u_net

LEVELS = [block, square_root, logarithmic]


def at(level: Callable[..., tuple[int, ...]], of: Problem) -> tuple[int, ...]:
    return level(of, structural(of))


def forward_runs(of: Problem, schedule: tuple[int, ...]) -> int:
    return sum(of.forward[node] for node in schedule)


@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=40, deadline=None)
@given(problem=trainings(), data=st.data())
def test_every_level_is_valid_on_any_graph(
    level: Callable[..., tuple[int, ...]], problem: Problem, data: st.DataObject
) -> None:
    places = [node for node in range(problem.nodes) if problem.forward[node]]
    sets = [structural(problem), narrow(problem), ()]
    if places:
        drawn = data.draw(st.sets(st.sampled_from(places)))
        sets.append(tuple(MirrorStage((node,), str(node)) for node in sorted(drawn)))
    may = [node for node in places if problem.recomputable[node]]
    forced = data.draw(st.dictionaries(st.sampled_from(may), st.booleans(), max_size=2)) if may else {}
    for stages in sets:
        schedule = level(problem, stages, forced)
        check(problem, schedule)
        again = [node for node in range(problem.nodes) if schedule.count(node) > 1]
        assert all(problem.forward[node] and problem.recomputable[node] for node in again)
        assert not [node for node in again if forced.get(node) is False]
        most = 1 if level is not logarithmic else max(1, math.ceil(math.log2(len(stages) + 1)))
        assert all(schedule.count(node) <= 1 + most for node in again)
        assert cost(problem, schedule) == pytest.approx(
            cost(problem, problem.schedule) + sum((schedule.count(n) - 1) * problem.costs[n] for n in again)
        )


@pytest.mark.parametrize("level", LEVELS)
def test_without_stages_nothing_but_what_is_forced_runs_again(level: Callable[..., tuple[int, ...]]) -> None:
    of = chain(9)
    assert level(of, ()) == of.schedule
    schedule = level(of, (), {3: True})
    assert [node for node in range(18) if schedule.count(node) > 1] == [3]


@pytest.mark.parametrize("level", LEVELS)
def test_a_node_that_can_not_be_forced_is_named(level: Callable[..., tuple[int, ...]]) -> None:
    of = chain(9)
    with pytest.raises(PlanError, match="node 12 is to be recomputed"):
        level(of, structural(of), {12: True})


def test_block_keeps_every_stage_and_recomputes_what_lies_between() -> None:
    of = chain(9)
    stages = structural(of)[2::3]
    assert block(of, stages) == (
        *range(9), 6, 7, 9, 10, 11, 3, 4, 12, 13, 14, 0, 1, 15, 16, 17,
    )  # fmt: skip


def test_square_root_keeps_the_root_of_the_stages_evenly() -> None:
    of = chain(99)
    again = [node for node in range(99) if at(square_root, of).count(node) == 2]
    kept = [node for node in range(99) if node not in again]
    assert kept == [*range(8, 90, 9), *range(90, 99)]  # ten stages, and what comes after the last


def test_the_square_root_level_grows_with_the_square_root() -> None:
    short, long = (peak(chain(n), at(square_root, chain(n))) for n in (64, 256))
    assert 1.7 < long / short < 2.3


def test_the_logarithmic_level_of_eight_layers_is_the_recursion() -> None:
    of = chain(8)
    # Checkpoints before 4, 6 and 7: nodes 3, 5, 6. Node 4 comes back from 3, and 0 … 2 with their own in the middle.
    assert at(logarithmic, of) == (*range(8), 8, 9, 4, 10, 11, 0, 1, 2, 12, 13, 14, 15)


def test_the_logarithmic_level_halves_what_it_recomputes() -> None:
    schedule = at(logarithmic, chain(16))
    # For the last half of the gradients 0 … 6 come back, and 2, 4, 5, 6 stay of them. Then 3 comes back from 2, and at
    # last 0 and 1.
    assert schedule[-18:] == (0, 1, 2, 3, 4, 5, 6, 24, 25, 26, 3, 27, 28, 0, 1, 29, 30, 31)


def test_the_peak_of_the_logarithmic_level_grows_with_the_logarithm() -> None:
    peaks = {n: peak(chain(n), at(logarithmic, chain(n))) for n in (64, 256, 1024)}
    assert peaks[256] - peaks[64] <= 4000  # two more halvings, with two values each
    assert peaks[1024] - peaks[256] <= 4000
    assert peaks[1024] < 30_000


def test_the_logarithmic_level_keeps_what_can_not_run_before_each_step_that_needs_it() -> None:
    # Node 4 writes over what 0 and 1 read; 5, after it, needs node 0 once more.
    edges = [(0, 1), (0, 5), (1, 2), (1, 4), (2, 3), (4, 5)]
    plain = Problem.from_edges([1] * 6, [10] * 6, edges, forward=(True,) * 4 + (False,) * 2)
    problem = replace(plain, recomputable=(True, True, True, True, False, True), deadline=(4, 4, 6, 6, 6, 6))
    assert logarithmic(plain, structural(plain)) == (0, 1, 2, 3, 4, 0, 5)
    assert logarithmic(problem, structural(problem)) == (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize("n", [16, 64, 256, 1000])
def test_the_logarithmic_level_runs_the_forward_pass_log_n_times(n: int) -> None:
    of = chain(n)
    runs = forward_runs(of, at(logarithmic, of))
    assert n * math.log2(n) / 4 < runs <= n * (1 + math.ceil(math.log2(n)))
    assert runs > 1.5 * forward_runs(of, at(square_root, of)) or n < 64


@pytest.mark.parametrize("of", [u_net(8), dense(6, 6), chain(120)], ids=["u-net", "dense", "chain"])
@pytest.mark.parametrize("level", LEVELS[1:])
def test_levels_lower_the_peak(level: Callable[..., tuple[int, ...]], of: Problem) -> None:
    stages = narrow(of)
    schedule = level(of, stages)
    check(of, schedule)
    assert peak(of, schedule) < 0.9 * peak(of, of.schedule)


def test_the_same_arguments_give_the_same_schedule() -> None:
    for level in LEVELS:
        assert at(level, u_net(6)) == at(level, u_net(6))
