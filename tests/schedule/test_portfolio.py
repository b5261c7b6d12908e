"""Recomputation under a budget: problems, timelines, the search, the exact strategy."""

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planning.remat import problem_of
from memonger.errors import PlanError, RuntimeUnavailableError
from memonger.schedule import greedy, portfolio
from memonger.schedule import timeline as timelines
from memonger.schedule.cp_sat import ExactOptions, solve
from memonger.schedule.effort import EFFORT, Effort, Progress
from memonger.schedule.greedy import GreedyOptions, excess, fit_budget, remove_redundant
from memonger.schedule.neighbourhood import improve, reorder
from memonger.schedule.portfolio import PortfolioSearch, Tuning, search
from memonger.schedule.problem import Problem, check, cost, memory, peak
from memonger.schedule.timeline import Timeline
from tests.support.brute_force import cheapest, slow_memory
from tests.support.recompute_problems import problems

DATA = Path(__file__).parents[1] / "data" / "remat"


def load(name: str) -> Problem:
    return problem_of(DATA / f"{name}.json")


def training_chain(layers: int, seed: int = 1, skip: int = 0) -> Problem:
    """A forward chain and its backward pass; with ``skip`` a U-Net's connections."""
    rng = random.Random(seed)
    costs = [float(rng.randint(1, 20)) for _ in range(layers)]
    sizes = [rng.randint(1, 50) * 1000 for _ in range(layers)]
    edges = [(i, i + 1) for i in range(layers - 1)]
    edges += [(i, layers - 1 - i) for i in range(1, layers // 2, skip or layers)]
    for i in reversed(range(layers)):
        node = 2 * layers - 1 - i
        costs.append(2 * costs[i])
        sizes.append(sizes[i])
        edges += [(node - 1, node), (i, node)] + ([(i - 1, node)] if i else [])
    return Problem.from_edges(costs, sizes, [(a, b) for a, b in edges if a < b])


@settings(max_examples=40, deadline=None)
@given(problems(), st.randoms(use_true_random=False))
def test_memory_is_what_the_definition_says(problem: Problem, rng: random.Random) -> None:
    timeline = Timeline(problem)
    states = [(timeline.mark(), timeline.schedule())]
    for _ in range(15):
        node = rng.randrange(problem.nodes)
        anchor = rng.choice(timeline.labels)
        runnable = all(timeline.source(v, anchor) >= 0 for v in timeline.inputs[node])
        kind = rng.random()
        if kind < 0.6 and not timeline.fixed[node] and timeline.copies[node][0] < anchor <= timeline.limit(node):
            if runnable:
                timeline.add(anchor, [node])
        elif kind < 0.85 and timeline.copies[timeline.node[anchor]][0] != anchor:
            timeline.remove(anchor)
        else:
            mark, schedule = states.pop(rng.randrange(len(states)))
            states = [state for state in states if state[0].changes < mark.changes]
            timeline.rollback(mark)
            assert timeline.schedule() == schedule
            states = states or [(timeline.mark(), schedule)]
        schedule = timeline.schedule()
        assert timeline.memory.tolist() == memory(problem, schedule)
        states.append((timeline.mark(), schedule))
    assert memory(problem, schedule) == slow_memory(problem, schedule)


@settings(max_examples=40, deadline=None)
@given(problems(), st.integers(0, 60))
def test_a_timeline_goes_back_to_where_it_was(problem: Problem, budget: int) -> None:
    timeline = Timeline(problem)
    mark = timeline.mark()
    fit_budget(timeline, budget, GreedyOptions(), lambda: False)
    schedule = timeline.schedule()
    assert timeline.memory.tolist() == slow_memory(problem, schedule)
    assert timeline.cost == pytest.approx(cost(problem, schedule))
    timeline.rollback(mark)
    assert timeline.schedule() == problem.schedule
    assert timeline.memory.tolist() == memory(problem, problem.schedule)


@settings(max_examples=40, deadline=None)
@given(problems(), st.floats(0.4, 1.0))
def test_a_found_schedule_is_valid_and_no_better_than_brute_force(problem: Problem, fraction: float) -> None:
    budget = int(peak(problem, problem.schedule) * fraction)
    best = cheapest(problem, budget, given_order=False)
    found = search(problem, budget, effort=3000)
    if found.peak > budget:
        return
    assert best is not None
    check(problem, found.schedule)
    assert max(slow_memory(problem, found.schedule)) == found.peak <= budget
    assert found.cost == cost(problem, found.schedule) >= cost(problem, best)


def test_the_search_finds_nearly_all_optima_of_small_problems() -> None:
    rng = random.Random(5)
    hit = feasible = 0
    for turn in range(40):
        problem = training_chain(4, seed=turn)
        if turn % 2:
            n = rng.randint(5, 8)
            edges = [(i, j) for j in range(n) for i in range(j) if rng.random() < 0.3]
            problem = Problem.from_edges(
                [rng.randint(1, 9) for _ in range(n)], [rng.randint(1, 9) for _ in range(n)], edges
            )
        budget = (peak(problem, problem.schedule) + problem.lower_bound) // 2
        best = cheapest(problem, budget, given_order=False)
        if best is None:
            continue
        feasible += 1
        found = search(problem, budget, effort=5000)
        hit += found.peak <= budget and found.cost <= cost(problem, best)
    assert feasible > 20
    assert hit >= 0.95 * feasible


@settings(max_examples=15, deadline=None)
@given(problems(most=6), st.floats(0.5, 1.0), st.booleans())
def test_exact_equals_brute_force(problem: Problem, fraction: float, free: bool) -> None:
    pytest.importorskip("ortools")
    budget = int(peak(problem, problem.schedule) * fraction)
    best = cheapest(problem, budget, given_order=not free)
    found = solve(
        problem, budget, ExactOptions(copies=3, order="free" if free else "given", time_limit=600), problem.schedule
    )
    assert found.proven
    if best is None:
        assert found.result is None
    elif max(best.count(node) for node in best) <= 3:
        assert found.result is not None
        assert found.result.peak <= budget
        assert found.result.cost == pytest.approx(cost(problem, best))
        assert found.bound == pytest.approx(found.result.cost)
    else:
        assert found.result is None or found.result.cost >= cost(problem, best)


def test_plain_greedy_and_tidying_reach_the_published_optimum() -> None:
    problem = load("fcn8_vgg")
    timeline = Timeline(problem)
    budget = peak(problem, problem.schedule) * 8 // 10
    assert fit_budget(timeline, budget, GreedyOptions(plain=True), lambda: False)
    remove_redundant(timeline, budget, lambda: False)
    assert timeline.memory.max() <= budget
    assert timeline.cost / cost(problem, problem.schedule) - 1 == pytest.approx(0.0013611, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "percent", "most"),
    [("vgg16", 90, 0.0197), ("mobilenet", 80, 0.0038), ("mobilenet", 30, 0.0445), ("random_n250", 80, 0.004)],
)
def test_search_is_near_the_best_known(name: str, percent: int, most: float) -> None:
    problem = load(name)
    budget = peak(problem, problem.schedule) * percent // 100
    found = search(problem, budget, effort=60_000)
    assert found.peak <= budget
    assert found.overhead <= most


def random_problem(nodes: int, window: int, most: int, seed: int) -> Problem:
    """Every node reads up to ``most`` of the ``window`` before it."""
    rng = random.Random(seed)
    edges = {(rng.randrange(max(0, i - window), i), i) for i in range(1, nodes) for _ in range(rng.randint(1, most))}
    sizes = [rng.randint(1, 1000) for _ in range(nodes)]
    return Problem.from_edges([float(rng.randint(1, 100)) for _ in range(nodes)], sizes, sorted(edges))


def plain_greedy(problem: Problem, budget: int) -> tuple[int, ...] | None:
    """The plain greedy algorithm, on schedules alone. None: it gets stuck above the budget.

    Of all values that lie unread at the worst step it computes that one again, right before its next use, that takes
    away the most bytes × steps for what it costs. At last it removes each run that isn't needed, the dearest first.
    """
    steps = list(range(problem.nodes))
    while excess_of(problem, steps, budget):
        best: tuple[float, list[int]] | None = None
        for tried in recomputed_at(problem, steps):
            gain = excess_of(problem, steps, budget) - excess_of(problem, tried, budget)
            score = gain / max(1e-9, cost(problem, tried) - cost(problem, steps))
            if gain > 0 and (best is None or score > best[0]):
                best = score, tried
        if best is None:
            return None
        steps = best[1]
    for at in sorted(range(len(steps)), key=lambda at: -problem.costs[steps[at]]):
        fewer = [node for turn, node in enumerate(steps) if turn != at and node >= 0]
        if steps[at] in steps[:at] and peak(problem, fewer) <= budget:
            steps[at] = -1
    return tuple(node for node in steps if node >= 0)


def excess_of(problem: Problem, steps: list[int], budget: int) -> int:
    """Bytes above the budget, summed over the steps."""
    return sum(max(0, each - budget) for each in slow_memory(problem, tuple(steps)))


def recomputed_at(problem: Problem, steps: list[int]) -> Iterator[list[int]]:
    """The schedules in which one value that lies unread at the worst step is computed again before its next use."""
    used = slow_memory(problem, tuple(steps))
    worst = used.index(max(used))
    for node in sorted(set(steps[:worst]) - {steps[worst]} - set(problem.reads[steps[worst]])):
        stop = next((at for at in range(worst + 1, len(steps)) if node in (*problem.reads[steps[at]], steps[at])), None)
        if stop is not None and steps[stop] != node:
            again, pending = {node}, [node]
            while pending:
                for source in problem.reads[pending.pop()]:
                    last = max(at for at in range(stop) if steps[at] == source)
                    ends = next((at for at in range(last + 1, len(steps)) if steps[at] == source), len(steps))
                    if source not in again and not any(source in problem.reads[each] for each in steps[stop:ends]):
                        again.add(source)
                        pending.append(source)
            yield without_unread(problem, [*steps[:stop], *sorted(again), *steps[stop:]])


def without_unread(problem: Problem, steps: list[int]) -> list[int]:
    """The steps without runs, other than a node's first, that nobody reads."""
    for at in reversed(range(len(steps))):
        ends = next((turn for turn in range(at + 1, len(steps)) if steps[turn] == steps[at]), len(steps))
        if steps[at] in steps[:at] and not any(steps[at] in problem.reads[each] for each in steps[at + 1 : ends]):
            return without_unread(problem, steps[:at] + steps[at + 1 :])
    return steps


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.booleans(), st.sampled_from([0.9, 0.8, 0.7, 0.6]))
def test_no_result_is_above_the_plain_greedy_algorithm(seed: int, is_chain: bool, part: float) -> None:
    problem = training_chain(8, seed) if is_chain else random_problem(14, 6, 3, seed)
    budget = int(part * peak(problem, problem.schedule))
    schedule = plain_greedy(problem, budget)
    found = search(problem, budget, effort=1)
    if schedule is not None:
        assert max(slow_memory(problem, schedule)) <= budget
        assert found.peak <= budget
        assert found.cost <= cost(problem, schedule)


def test_a_greedy_variant_that_falls_too_slowly_gives_up() -> None:
    problem = random_problem(120, 12, 4, 1)
    budget = peak(problem, problem.schedule) * 6 // 10
    work = list[float]()
    for most in (2, 1_000):
        tuning = Tuning(greedy=(GreedyOptions(bulk=True),), first_work=most, few=1)
        searching = PortfolioSearch(problem, Effort(10**6), tuning=tuning)
        assert searching._greedy_from_given(budget)[0].excess
        work.append(searching.effort.used)
    assert 2 * work[0] < work[1]


@pytest.mark.parametrize("options", [GreedyOptions(bulk=True), GreedyOptions(), GreedyOptions(plain=True)])
@pytest.mark.parametrize(("seed", "percent"), [(1, 60), (2, 75), (3, 60)])
def test_no_move_that_helps_is_left_untried(
    monkeypatch: pytest.MonkeyPatch, options: GreedyOptions, seed: int, percent: int
) -> None:
    problem = random_problem(60, 20, 3, seed)
    budget, found = peak(problem, problem.schedule) * percent // 100, []
    for many in (1, 10**9):  # nodes from which on a recomputation is judged before it is tried
        monkeypatch.setattr(greedy, "_MANY", many)
        timeline = Timeline(problem)
        fit_budget(timeline, budget, options, lambda timeline=timeline: timeline.work > 50_000)
        found.append(timeline.schedule())
    assert found[0] == found[1]


@pytest.mark.parametrize("problem", [training_chain(40), training_chain(60, skip=2)], ids=["chain", "u-net"])
def test_training_graphs_run_in_little_memory(problem: Problem) -> None:
    full = peak(problem, problem.schedule)
    for percent in (80, 50, 30):
        if full * percent // 100 >= problem.lower_bound * 1.2:
            found = search(problem, full * percent // 100, effort=20_000)
            assert found.peak <= full * percent // 100
            assert found.overhead < 0.7


def test_crossing_edges_leave_a_better_order() -> None:
    problem = load("random_n250")
    budget = peak(problem, problem.schedule) * 8 // 10
    timeline = Timeline(problem)
    before = excess(timeline, budget)
    left = reorder(timeline, budget, 1, lambda: timeline.work / 15_000)
    assert sorted(timeline.schedule()) == list(range(problem.nodes))
    assert sum(max(0, held - budget) for held in memory(problem, timeline.schedule())) == left < before / 4


@given(problems(), st.integers(0, 40))
def test_a_reordered_problem_is_valid(problem: Problem, budget: int) -> None:
    timeline = Timeline(problem)
    reorder(timeline, budget, 1, lambda: timeline.work / 100)
    assert sorted(timeline.schedule()) == list(range(problem.nodes))
    assert timeline.memory.tolist() == memory(problem, timeline.schedule())


def test_the_same_arguments_give_the_same_schedule() -> None:
    problem = load("random_n100")
    budget = peak(problem, problem.schedule) * 7 // 10
    assert search(problem, budget, effort=20_000) == search(problem, budget, effort=20_000)


def test_labels_may_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timelines, "_SPACE", 16)
    problem = load("mobilenet")
    timeline = Timeline(problem)
    for _ in range(4):
        timeline.add(timeline.labels[50], [3])
    with pytest.raises(timelines.CrowdedError):
        timeline.add(timeline.labels[50], [3] * 16)
    budget = peak(problem, problem.schedule) * 3 // 10
    assert search(problem, budget, effort=10_000).peak <= budget


def test_no_time_still_gives_a_valid_plan() -> None:
    problem = load("mobilenet")
    budget = peak(problem, problem.schedule) // 2
    found = search(problem, budget, time_limit=0)
    assert peak(problem, found.schedule) == found.peak <= budget


def test_a_budget_that_is_too_small_names_one_that_is_not() -> None:
    problem = load("vgg16")
    named = search(problem, problem.lower_bound - 1, effort=5000)
    assert named.peak > problem.lower_bound - 1
    assert named == search(problem, 0, effort=5000)
    assert search(problem, named.peak, effort=5000).peak <= named.peak


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(PlanError, match="-1 bytes"):
        solve(load("vgg16"), -1)


def test_progress_ends_at_the_cost_of_the_plan() -> None:
    problem = load("mobilenet")
    told: list[Progress] = []
    found = search(problem, peak(problem, problem.schedule) // 2, effort=20_000, progress=told.append)
    assert told[-1].cost == pytest.approx(found.cost)
    assert told[-1].excess == 0
    assert all(0 <= each.done <= 1 for each in told)


def test_where_nothing_is_within_the_budget_the_same_schedule_is_found_for_every_budget() -> None:
    problem = load("mobilenet")
    least = search(problem, 0, effort=5000)
    for budget in (0, problem.lower_bound - 1, problem.lower_bound, (problem.lower_bound + least.peak) // 2):
        found = search(problem, budget, effort=5000)
        assert found == least or found.peak <= budget
        assert found == least or budget >= problem.lower_bound


def test_the_smallest_budget_is_the_same_whatever_a_node_costs() -> None:
    problem = training_chain(20, skip=2)
    least = search(problem, 0, effort=5000)
    for seed in range(2):
        costs = random.Random(seed)
        other = replace(problem, costs=tuple(costs.uniform(0.5, 2) * each for each in problem.costs))
        assert search(other, 0, effort=5000).schedule == least.schedule
        assert search(other, least.peak, effort=5000).peak <= least.peak


def test_less_memory_is_looked_for_no_longer_than_the_nodes_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[int]()

    def counted(timeline: Timeline, *arguments: Any) -> tuple[int, float]:
        energy = improve(timeline, *arguments)
        tried.append(timeline.work)
        return energy

    monkeypatch.setattr(portfolio, "improve", counted)
    problem = training_chain(8, skip=2)
    least = search(problem, 0, effort=EFFORT)
    most = Tuning().smallest_work * problem.nodes
    assert most < EFFORT / 8
    assert 0 < sum(tried) < 2 * most  # a repair that has begun is finished
    tuned = PortfolioSearch(problem, Effort(EFFORT), tuning=replace(Tuning(), smallest_work=EFFORT))
    assert tuned.smallest().peak == least.peak


def test_nodes_that_may_run_once_do() -> None:
    chain = training_chain(20)
    free = tuple(i % 3 != 0 for i in range(chain.nodes))
    problem = Problem(chain.costs, chain.reads, chain.writes, chain.sizes, recomputable=free)
    found = search(problem, 0, effort=20_000)
    assert found.peak < peak(problem, problem.schedule)
    assert all(found.schedule.count(i) == 1 for i in range(problem.nodes) if not free[i])


def test_nothing_runs_after_its_deadline() -> None:
    chain = training_chain(20)
    update = chain.nodes - 10
    free = tuple(i != update for i in range(chain.nodes))
    deadline = tuple(update if i in (3, 4, 5) else chain.nodes for i in range(chain.nodes))
    problem = Problem(chain.costs, chain.reads, chain.writes, chain.sizes, recomputable=free, deadline=deadline)
    found = search(problem, 0, effort=20_000)
    after = found.schedule[found.schedule.index(update) :]
    assert not {3, 4, 5} & set(after)


def graph_of(nodes: dict[str, dict[str, Any]], *edges: tuple[str, str]) -> Any:
    graph = nx.DiGraph()
    graph.add_nodes_from(nodes.items())
    graph.add_edges_from(edges)
    return graph


def test_networkx_graphs_are_problems() -> None:
    good = {"bytes": 4, "cost": 1.5}
    problem = Problem.from_networkx(graph_of({"b": good, "a": good, "c": good}, ("a", "b"), ("b", "c")))
    assert problem.names == ("a", "b", "c")
    assert problem.reads == ((), (0,), (1,))
    assert problem.costs == (1.5, 1.5, 1.5)


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (graph_of({}), "empty"),
        (graph_of({"a": {"cost": 1}}), "'a' has no 'bytes'"),
        (graph_of({"a": {"bytes": 1}}), "'a' has no 'cost'"),
        (graph_of({"a": {"bytes": 1.5, "cost": 1}}), "'a' has a bad"),
        (graph_of({"a": {"bytes": -1, "cost": 1}}), "'a' writes -1 bytes"),
        (graph_of({"a": {"bytes": 1, "cost": -1}}), "cost of node 'a' is -1"),
        (graph_of({"a": {"bytes": 1, "cost": float("nan")}}), "cost of node 'a' is nan"),
        (graph_of({"a": {}, "b": {}}, ("a", "b"), ("b", "a")), "cycle through node 'a'"),
    ],
)
def test_bad_networkx_graphs_are_named(graph: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Problem.from_networkx(graph)


def test_a_node_overwrites_what_it_reads_last() -> None:
    reads = ((), (0,), (1,), (0, 2), ())
    problem = Problem((1.0,) * 5, reads, tuple((i,) for i in range(5)), (8, 8, 8, 8, 0), inplace=((), *reads[1:]))
    assert memory(problem, (0, 1, 2, 3, 4)) == [8, 16, 16, 16, 0]
    assert memory(problem, (0, 1, 2, 0, 3, 4)) == [8, 8, 8, 16, 16, 0]
    assert problem.lower_bound == 16
    pinned = Problem(problem.costs, reads, problem.writes, problem.sizes, inplace=problem.inplace, pinned=(0, 2))
    assert memory(pinned, (0, 1, 2, 3, 4)) == [8, 16, 16, 24, 16]


def test_only_what_a_node_reads_may_be_overwritten() -> None:
    with pytest.raises(PlanError, match="node 1 may overwrite value 1"):
        Problem((1.0, 1.0), ((), (0,)), ((0,), (1,)), (1, 1), inplace=((), (1,)))


def test_bad_schedules_are_named() -> None:
    problem = Problem.from_edges([1, 1], [1, 1], [(0, 1)], ["a", "b"])
    with pytest.raises(PlanError, match="step 0, node 'b', reads what node 'a'"):
        check(problem, (1, 0))
    with pytest.raises(PlanError, match="node 'b' doesn't run"):
        memory(problem, (0,))


def test_without_ortools_the_exact_strategy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(RuntimeUnavailableError, match="pip install ortools"):
        solve(load("vgg16"), 1)


@pytest.mark.parametrize(("seed", "percent"), [(56, 70), (89, 60), (97, 70)])
def test_a_node_is_not_moved_before_what_it_reads(seed: int, percent: int) -> None:
    rng = random.Random(seed)
    edges = [(rng.randrange(0, i), i) for i in range(1, 10) for _ in range(rng.randint(1, 3))]
    costs, sizes = [float(rng.randint(1, 100)) for _ in range(10)], [rng.randint(1, 1000) for _ in range(10)]
    problem = Problem.from_edges(costs, sizes, sorted(set(edges)))
    found = search(problem, peak(problem, problem.schedule) * percent // 100, effort=3000)
    check(problem, found.schedule)
