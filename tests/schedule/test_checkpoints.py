"""Stages, what a threshold keeps of them, and the schedule that brings the rest back."""

import math
from dataclasses import replace

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memonger.errors import PlanError
from memonger.graph.graph import Graph
from memonger.schedule.cheap import cheap
from memonger.schedule.checkpoints import ForwardWalk, marked, narrow, structural
from memonger.schedule.on_demand import forward_pass, in_time, recompute_on_demand
from memonger.schedule.problem import Problem, check, peak
from tests.support.recompute_problems import chain, dense, drawn_drops, trainings, u_net


def test_a_dropped_chain_comes_back_before_the_first_step_that_needs_it() -> None:
    of = chain(4)  # gradients 4 … 7, of the nodes 3 … 0
    assert recompute_on_demand(of, [1, 2]) == (0, 1, 2, 3, 1, 2, 4, 5, 6, 7)
    assert recompute_on_demand(of, [0]) == (0, 1, 2, 3, 4, 5, 0, 6, 7)


def test_what_no_backward_step_needs_does_not_run_again() -> None:
    problem = Problem.from_edges([1] * 4, [1] * 4, [(0, 1), (1, 2), (2, 3)], forward=(True, True, True, False))
    assert recompute_on_demand(problem, [0, 1]) == (0, 1, 2, 3)


@settings(max_examples=40, deadline=None)
@given(trainings(), st.data())
def test_dropped_nodes_that_come_in_time_make_a_valid_schedule(problem: Problem, data: st.DataObject) -> None:
    dropped = drawn_drops(problem, data)
    kept_in_time = in_time(problem, problem.deadline, dropped)
    schedule = recompute_on_demand(problem, kept_in_time)
    check(problem, schedule)
    assert max(map(schedule.count, range(problem.nodes))) <= 2
    assert {node for node in kept_in_time if schedule.count(node) == 1} == {
        node for node in kept_in_time if not needed_by_backward(problem, node, kept_in_time)
    }
    for late in sorted(set(dropped) - set(kept_in_time)):  # each of them alone would break its deadline
        after = sorted({late, *(node for node in kept_in_time if node > late)})
        with pytest.raises(PlanError, match="after node"):
            check(problem, recompute_on_demand(problem, after))


def needed_by_backward(of: Problem, node: int, dropped: list[int]) -> bool:
    readers = [r for r, reads in enumerate(of.reads) if set(reads) & set(of.writes[node])]
    return any(
        not of.forward[reader] or (reader in dropped and needed_by_backward(of, reader, dropped)) for reader in readers
    )


def test_a_node_whose_input_is_overwritten_before_it_could_run_again_is_kept() -> None:
    of = chain(3)
    # The first gradient, node 3, writes over what node 0 reads; node 0 is needed before node 4.
    late = replace(of, recomputable=tuple(node != 3 for node in range(6)), deadline=(3, 6, 6, 6, 6, 6))
    assert in_time(late, late.deadline, [0]) == []
    assert in_time(late, late.deadline, [0, 1]) == [0, 1]  # node 1 is needed by node 3, and brings node 0 with it
    assert in_time(late, late.deadline, [0, 1], every_reader=True) == [1]


def test_updates_of_running_statistics_are_no_backward_pass() -> None:
    # 0 → 1 → 2, statistics 3 of 0 and 4 of 1 in between; backward 5 … 7.
    reads = ((), (0,), (0,), (2,), (1,), (1, 4), (5, 0), (6,))
    marked_forward = (True, True, False, False, True, False, False, False)
    problem = Problem((1.0,) * 8, reads, tuple((i,) for i in range(8)), (1,) * 8, forward=marked_forward)
    assert forward_pass(problem) == (True,) * 5 + (False,) * 3
    assert forward_pass(replace(problem, forward=(True,) * 8)) == (True,) * 8


def test_cheap_nodes_do_not_run_again_for_the_running_statistics() -> None:
    # x → Conv → BatchNormalization (y, mean) → Relu; Mul of the mean is the new running mean; gradients.
    reads = ((0,), (1,), (3,), (2,), (4,), (5, 2), (6, 3), (7, 1))
    writes = ((1,), (2, 3), (4,), (5,), (6,), (7,), (8,), (9,))
    n, values = len(reads), 10
    graph = Graph(
        nodes=tuple(f"n{i}" for i in range(n)),
        ops=("Conv", "BatchNormalization", "Mul", "Relu", "Conv", "Mul", "Mul", "Conv"),
        values=tuple(f"v{i}" for i in range(values)),
        sizes=(100,) * values,
        planned=(False,) + (True,) * 9,
        reads=reads,
        writes=writes,
        outputs=(4, 9),
        forward=(True, True, False, True, True, False, False, False),
        costs=(1.0,) * n,
        workspace=(0,) * n,
    )  # fmt: skip
    assert cheap(graph) == (0, 1, 2, 3, 4, 1, 3, 5, 6, 7)


def test_cheap_nodes_that_write_an_output_are_kept() -> None:
    graph = Graph(
        nodes=("a", "b", "c"), ops=("Relu", "Relu", "Mul"), values=("x", "u", "v", "w"), sizes=(4,) * 4,
        planned=(False, True, True, True), reads=((0,), (1,), (1, 2)), writes=((1,), (2,), (3,)), outputs=(2, 3),
        forward=(True, True, False),
        costs=(1.0,) * 3, workspace=(0,) * 3,
    )  # fmt: skip
    assert cheap(graph) == (0, 1, 0, 2)


def test_true_marks_are_stages_of_their_own_and_names_are_shared() -> None:
    stages = marked({5: "True", 1: "a", 2: "True", 7: "a", 3: "b"})
    assert [stage.nodes for stage in stages] == [(2,), (3,), (5,), (1, 7)]
    assert [stage.name for stage in stages] == ["2", "b", "5", "a"]
    assert marked({}) == ()


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 12), st.data())
def test_structural_stages_are_the_dominators_of_the_last_node(n: int, data: st.DataObject) -> None:
    reads = [
        sorted(data.draw(st.sets(st.integers(max(0, node - 3), node - 1), min_size=1, max_size=3))) if node else []
        for node in range(n)
    ]
    edges = [(source, node) for node, sources in enumerate(reads) for source in sources]
    problem = Problem.from_edges([1] * n, [1] * n, edges)
    stages = [stage.nodes[0] for stage in structural(problem)]
    above = nx.immediate_dominators(nx.DiGraph(edges), 0)
    found = [stages[-1]]
    while found[-1] != 0:
        found.append(above[found[-1]])
    assert stages == found[::-1]
    upstream = nx.DiGraph(edges).subgraph({*nx.ancestors(nx.DiGraph(edges), stages[-1]), stages[-1]})
    assert nx.dag_longest_path_length(upstream) == nx.dag_longest_path_length(nx.DiGraph(edges))


def test_side_branches_and_skips_leave_the_nodes_that_all_pass() -> None:
    # 0 → 1 → 3 → 4 → 5 with a skip 1 → 4, and 2 (a mask) read by 3 and 5; 6 is backward.
    problem = Problem.from_edges(
        [1] * 7,
        [1] * 7,
        [(0, 1), (1, 3), (2, 3), (3, 4), (1, 4), (4, 5), (2, 5), (5, 6), (3, 6)],
        forward=(True,) * 6 + (False,),
    )
    stages = structural(problem)
    assert [stage.nodes for stage in stages] == [(0,), (1,), (4,), (5,)]


def test_a_graph_without_paths_has_no_structural_stages() -> None:
    problem = Problem.from_edges([1] * 3, [1] * 3, [])
    assert structural(problem) == ()
    assert structural(replace(problem, forward=(False,) * 3)) == ()
    assert narrow(problem) == ()


@settings(max_examples=40, deadline=None)
@given(trainings())
def test_narrow_stages_wrote_what_crosses_where_least_does(problem: Problem) -> None:
    biggest = max(
        (problem.sizes[v] for n in range(problem.nodes) if problem.forward[n] for v in problem.writes[n]), default=0
    )

    def leads(node: int) -> bool:
        after = [n for n in range(problem.nodes) if set(problem.writes[node]) & set(problem.reads[n])]
        return problem.recomputable[node] or any(not problem.forward[n] or leads(n) for n in after)

    places = [node for node in range(problem.nodes) if problem.forward[node] and leads(node)]

    def crossing(place: int) -> tuple[int, ...]:
        early = [n for n in places if n <= place and problem.recomputable[n]]
        later = {value for n in places if n > place for value in problem.reads[n]}
        return tuple(
            n for n in early
            if set(problem.writes[n]) & later and sum(problem.sizes[v] for v in problem.writes[n]) > biggest / 1024
        )  # fmt: skip

    amount = [sum(problem.sizes[v] for n in crossing(place) for v in problem.writes[n]) for place in places]
    around = [0, *amount, 0]
    expected = [
        crossing(place)
        for index, place in enumerate(places)
        if amount[index]
        and (index == 0 or around[index] >= amount[index])
        and (index == len(places) - 1 or around[index + 2] >= amount[index])
    ]
    assert [stage.nodes for stage in narrow(problem)] == expected


def test_narrow_stages_have_no_more_nodes_together_than_is_linear() -> None:
    # 200 values that cross every one of 200 places after them, all equally wide.
    early, late = 200, 200
    edges = [(node, node + 1) for node in range(early + late)] + [(node, early + late) for node in range(early)]
    n = early + late + 1
    problem = Problem.from_edges([1] * n, [1] * n, sorted(set(edges)))
    stages = narrow(problem)
    assert len(stages[-1].nodes) == early + 1
    assert 15 * n < sum(len(stage.nodes) for stage in stages) <= 16 * n


def test_threshold_zero_keeps_every_candidate_and_infinity_none() -> None:
    of = chain(12)
    stages = structural(of)[2::3]
    every = ForwardWalk(of).mirror(stages, 0)
    assert set(every.kept) == {2, 5, 8, 11}
    assert every.dropped == (0, 1, 3, 4, 6, 7, 9, 10)
    assert (every.segments, every.largest, every.saved) == (4, 3000, 4000)
    nothing = ForwardWalk(of).mirror(stages, math.inf)
    assert nothing.kept == ()
    assert nothing.dropped == tuple(range(12))
    assert (nothing.segments, nothing.largest, nothing.saved) == (1, 12_000, 0)


def test_a_stage_is_kept_as_soon_as_the_threshold_is_reached() -> None:
    of = chain(12)
    mirror = ForwardWalk(of).mirror(structural(of), 5000)
    assert mirror.dropped == (0, 1, 2, 3, 5, 6, 7, 8)  # 4 and 9 are kept, and what comes after
    assert (mirror.segments, mirror.largest, mirror.saved) == (3, 5000, 2000)


def test_nodes_of_one_name_share_the_decision() -> None:
    of = chain(12)
    stages = marked({2: "a", 4: "True", 7: "a", 9: "b", 10: "b"})
    seen = set()
    for threshold in range(0, 13_000, 500):
        kept = set(ForwardWalk(of).mirror(stages, threshold).dropped)
        gone = {name: {node in kept for node in nodes} for name, nodes in (("a", (2, 7)), ("b", (9, 10)))}
        assert all(len(each) == 1 for each in gone.values())
        seen.add(frozenset(kept))
    assert len(seen) > 2


def test_forced_decisions_win() -> None:
    of = chain(12)
    stages = structural(of)[2::3]
    mirror = ForwardWalk(of, {5: True, 6: False, 11: True}).mirror(stages, 0)
    assert mirror.dropped == (0, 1, 3, 4, 5, 7, 9, 10, 11)


def test_nodes_that_write_next_to_nothing_or_may_run_once_are_kept() -> None:
    of = chain(6)
    sizes = tuple(0 if v == 1 else size for v, size in enumerate(of.sizes))
    free = tuple(node != 3 for node in range(12))
    problem = replace(of, sizes=sizes, recomputable=free)
    assert ForwardWalk(problem).mirror((), 0).dropped == (0, 2, 4, 5)
    assert ForwardWalk(problem, {1: True}).mirror((), 0).dropped == (0, 1, 2, 4, 5)
    for node in (3, 7, 99, -1):
        with pytest.raises(PlanError, match=f"node {node} is to be recomputed"):
            ForwardWalk(problem, {node: True}).mirror((), 0)


@pytest.mark.parametrize("threshold", [-1, -0.5, math.nan])
def test_a_threshold_below_zero_is_refused(threshold: float) -> None:
    with pytest.raises(PlanError, match="at least 0"):
        ForwardWalk(chain(2)).mirror((), threshold)


def test_skips_that_cross_a_narrow_stage_are_kept_with_it() -> None:
    of = u_net(4)
    stages = narrow(of)
    assert max(len(stage.nodes) for stage in stages) > 2
    for stage in stages:
        assert set(ForwardWalk(of).mirror([stage], 0).kept).issuperset(stage.nodes)


@pytest.mark.parametrize("of", [u_net(4), dense(3, 5)], ids=["u-net", "dense"])
def test_narrow_stages_lower_the_peak(of: Problem) -> None:
    schedule = recompute_on_demand(of, ForwardWalk(of).mirror(narrow(of), 4000).dropped)
    assert peak(of, schedule) < peak(of, of.schedule)
