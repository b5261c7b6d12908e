"""Repeated blocks: a deep network contracted is the same network of fewer layers, and what few recompute, all do."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memonger.schedule import portfolio
from memonger.schedule.effort import Effort
from memonger.schedule.on_demand import in_time, recompute_on_demand
from memonger.schedule.portfolio import PortfolioSearch, Tuning
from memonger.schedule.problem import Problem, check, peak
from memonger.schedule.repeats import KEPT, Contraction, Repetition, broadcast, repetitions

FEW = KEPT + 2
"""The first and the last layer have neighbours of their own, and stay as they are."""


def network(layers: int, *, wide: int = 400, head: int = 150) -> Problem:
    """Pre-norm layers with a skip connection: norm, product, activation, product, sum; a head; the backward pass."""
    reads: list[tuple[int, ...]] = [()]
    sizes, costs = [100], [1.0]

    def node(size: int, cost: float, *values: int) -> int:
        reads.append(values)
        sizes.append(size)
        costs.append(cost)
        return len(sizes) - 1

    x, kept = 0, []
    for _ in range(layers):
        normed = node(100, 2.0, x)
        hidden = node(wide, 40.0, normed)
        active = node(wide, 3.0, hidden)
        out = node(100, 40.0, active)
        kept.append((x, normed, hidden, active))
        x = node(100, 1.0, x, out)
    scores = node(head, 30.0, x)
    forward = len(sizes)
    gradient = node(100, 30.0, scores)
    for x, normed, hidden, active in reversed(kept):
        node(40, 40.0, gradient, active)
        inner = node(wide, 3.0, node(wide, 40.0, gradient), hidden)
        node(40, 40.0, inner, normed)
        gradient = node(100, 3.0, gradient, node(100, 40.0, inner), x)
    nodes = len(sizes)
    return Problem(
        costs=tuple(costs),
        reads=tuple(reads),
        writes=tuple((value,) for value in range(nodes)),
        sizes=tuple(sizes),
        forward=tuple(number < forward for number in range(nodes)),
    )


@pytest.mark.parametrize("layers", [FEW + 1, 24, 61])
def test_contracted_network_is_one_of_fewer_layers(layers: int) -> None:
    contraction = Contraction(network(layers))
    assert replace(contraction.problem, names=()) == network(FEW)
    assert contraction.share == FEW / layers


def test_few_layers_or_none_alike_are_not_contracted() -> None:
    for problem in (network(FEW), Problem.from_edges([1.0] * 40, list(range(40)), [(a, a + 1) for a in range(39)])):
        assert Contraction(problem).problem.nodes == problem.nodes
        assert broadcast(problem, 0, _never) == []


def _never(*_: object) -> tuple[int, ...]:
    raise AssertionError("nothing is there to solve")


def test_what_runs_again_in_few_layers_runs_again_in_all() -> None:
    whole, again = network(40), {"normed": 1, "active": 3}
    layers = {number: [1 + 5 * layer + number - 1 for layer in range(40)] for number in again.values()}

    def solve(problem: Problem, budget: int) -> tuple[int, ...]:
        assert problem.lower_bound <= budget < peak(problem, problem.schedule)
        repeated = [5 * layer + number for layer in range(FEW) for number in again.values()]
        first = problem.forward.index(False)
        return (*range(first), *repeated, *range(first, problem.nodes))

    (schedule, *_) = broadcast(whole, int(0.9 * peak(whole, whole.schedule)), solve)
    check(whole, schedule)
    twice = {node for node, runs in Counter(schedule).items() if runs > 1}
    assert twice == {node for nodes in layers.values() for node in nodes}


def test_a_second_try_saves_more_where_the_first_is_above_the_budget() -> None:
    whole, targets = network(40), list[int]()

    def solve(problem: Problem, budget: int) -> tuple[int, ...]:
        targets.append(budget)
        return problem.schedule

    budget = int(0.8 * peak(whole, whole.schedule))
    assert broadcast(whole, budget, solve) == [whole.schedule] * 2
    assert targets[1] < targets[0]


@pytest.mark.parametrize("seed", range(25))
def test_schedules_are_valid_whatever_repeats(seed: int) -> None:
    rng = random.Random(seed)
    whole = _of_random_blocks(rng)

    def solve(problem: Problem, _: int) -> tuple[int, ...]:
        may = (node for node in range(problem.nodes) if problem.forward[node] and problem.recomputable[node])
        dropped = [node for node in may if rng.random() < 0.5]
        schedule = recompute_on_demand(problem, in_time(problem, problem.deadline, dropped))
        check(problem, schedule)
        return schedule

    schedules = broadcast(whole, int(0.7 * peak(whole, whole.schedule)), solve)
    assert schedules
    for schedule in schedules:
        check(whole, schedule)
        assert len(schedule) > whole.nodes


def _of_random_blocks(rng: random.Random) -> Problem:
    """A block of random nodes, forty times one after the other, and a backward pass that reads what was written."""
    reads: list[tuple[int, ...]] = [()]
    writes: list[tuple[int, ...]] = [(0,)]
    sizes = [10]

    def node(sources: list[int], count: int, size: int) -> int:
        reads.append(tuple(dict.fromkeys(sources)))
        writes.append(tuple(range(len(sizes), len(sizes) + count)))
        sizes.extend([size] * count)
        return writes[-1][0]

    block = [(rng.sample(range(1, 13), rng.randint(1, 3)), rng.randint(1, 2), rng.choice((10, 20, 30)))
             for _ in range(rng.randint(3, 7))]  # fmt: skip
    for back, count, size in block * 40:
        node([max(0, len(sizes) - far) for far in back], count, size)
    forward, kept = len(reads), rng.choice((10, 20, 30))
    gradient = node([len(sizes) - 1], 1, 10)
    for number in reversed(range(1, forward)):
        value = writes[number][0]
        gradient = node([gradient, reads[number][0], value], 1, sizes[value])
        if sizes[value] == 20:
            node([gradient], 1, 5)
    return Problem(
        costs=tuple(float(1 + number % 5) for number in range(len(reads))),
        reads=tuple(reads),
        writes=tuple(writes),
        sizes=tuple(sizes),
        recomputable=tuple(sizes[values[0]] != kept for values in writes),
        inplace=tuple(tuple(value for value in values[:1] if sizes[value] == 10) for values in reads),
        forward=tuple(number < forward for number in range(len(reads))),
    )


def test_deep_network_recomputes_less_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = network(90)
    budget = int(0.3 * peak(whole, whole.schedule))
    search = PortfolioSearch(whole, Effort(5_000), tuning=Tuning(large=500))  # as if its 992 nodes were many
    result = search.cheapest(budget)
    check(whole, result.schedule)
    assert result.peak <= budget
    monkeypatch.setattr(portfolio, "broadcast", lambda *_: [])
    assert result.cost < replace(search, effort=Effort(5_000)).cheapest(budget).cost


@given(st.lists(st.integers(0, 3), max_size=5), st.integers(3, 6), st.integers(KEPT + 1, 14), st.integers(0, 5))
def test_repetitions_are_found_between_other_nodes(before: list[int], length: int, count: int, behind: int) -> None:
    block = list(range(10, 10 + length))
    sequence = [*before, *block * count, *range(50, 50 + behind)]
    assert list(repetitions(sequence)) == [Repetition(len(before), length, count)]


@given(st.lists(st.integers(0, 2), max_size=200))
def test_any_repetition_repeats(sequence: list[int]) -> None:
    for start, length, count in repetitions(sequence):
        block = sequence[start : start + length]
        assert sequence[start : start + length * count] == block * count
