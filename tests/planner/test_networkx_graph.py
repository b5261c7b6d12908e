"""Plans for graphs without a model, given as a ``networkx.DiGraph``."""

import json
import os
import subprocess
import sys
from typing import Any

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memonger
from memonger.errors import BudgetError, PlanError


def _chain(layers: int = 12, size: int = 100) -> "nx.DiGraph[Any]":
    """A forward pass, and a backward pass whose every step reads the forward value across."""
    graph: nx.DiGraph[Any] = nx.DiGraph()
    for i in range(layers):
        graph.add_node(f"f{i}", bytes=size, cost=1.0)
    for i in reversed(range(layers)):
        graph.add_node(f"b{i}", bytes=size, cost=2.0, forward=False)
    nx.add_path(graph, [f"f{i}" for i in range(layers)] + [f"b{i}" for i in reversed(range(layers))])
    graph.add_edges_from((f"f{i}", f"b{i}") for i in range(layers))
    return graph


def _check(graph: "nx.DiGraph[Any]", plan: memonger.GraphPlan) -> None:
    """Check the schedule and the layout anew, from the graph and the plan's JSON alone."""
    names = {str(name): name for name in graph}
    record = json.loads(plan.to_json())
    steps = [names[str(step["node"])] for step in record["steps"]]
    assert set(steps) == set(graph)
    last: list[int] = list(range(len(steps)))  # the last step that reads what a step wrote
    latest: dict[object, int] = {}
    for step, name in enumerate(steps):
        for source in graph.predecessors(name):
            assert source in latest, f"step {step}, {name}, reads {source}, which hasn't run"
            last[latest[source]] = step
        latest[name] = step
    live = [0] * len(steps)
    places = []
    for step, (name, written) in enumerate(zip(steps, record["steps"], strict=True)):
        assert written["bytes"] == graph.nodes[name]["bytes"]
        for when in range(step, last[step] + 1):
            live[when] += written["bytes"]
        if written["bytes"]:
            assert 0 <= written["offset"] <= record["arena_bytes"] - written["bytes"]
            places.append((step, last[step], written["offset"], written["offset"] + written["bytes"]))
        else:
            assert written["offset"] is None
    for i, (begin, end, low, high) in enumerate(places):
        for other_begin, other_end, other_low, other_high in places[:i]:
            assert end < other_begin or other_end < begin or high <= other_low or other_high <= low
    assert record["peak_bytes"] == max(live)
    cost = sum(graph.nodes[name]["cost"] for name in steps)
    once = sum(graph.nodes[name]["cost"] for name in graph)
    assert record["overhead"] == pytest.approx(cost / once - 1 if once else 0.0)
    assert record["recomputed_nodes"] == len(steps) - len(graph)


def test_a_budget_is_held_and_the_schedule_is_valid() -> None:
    graph = _chain()
    plain = memonger.search_plan(graph, strategy="none")
    assert plain.peak_bytes == plain.peak_before_bytes
    _check(graph, plain)
    budget = plain.peak_bytes * 6 // 10
    plan = memonger.search_plan(graph, budget=budget, effort=20_000)
    assert plan.arena_bytes <= budget
    assert plan.overhead > 0
    _check(graph, plan)


@st.composite
def _graphs(draw: st.DrawFn) -> "nx.DiGraph[Any]":
    graph: nx.DiGraph[Any] = nx.DiGraph()
    n = draw(st.integers(1, 10))
    for node in range(n):
        graph.add_node(node, bytes=draw(st.integers(0, 50)), cost=draw(st.integers(0, 5)))
        sources = draw(st.sets(st.integers(0, node - 1), max_size=3)) if node else set()
        graph.add_edges_from((source, node) for source in sorted(sources))
    return graph


@settings(max_examples=40, deadline=None)
@given(_graphs(), st.floats(0.5, 1.2))
def test_random_graphs_get_valid_plans(graph: "nx.DiGraph[Any]", part: float) -> None:
    plain = memonger.search_plan(graph)
    _check(graph, plain)
    budget = int(plain.peak_bytes * part)
    try:
        plan = memonger.search_plan(graph, budget=budget, effort=2000)
    except BudgetError as error:
        assert error.budget == budget < error.smallest  # noqa: PT017
        plan, budget = memonger.search_plan(graph, budget=error.smallest, effort=2000), error.smallest
    assert plan.arena_bytes <= budget
    _check(graph, plan)


def test_the_sweep_is_the_default_where_there_is_a_backward_pass() -> None:
    graph = _chain(24)
    plan = memonger.search_plan(graph)
    assert plan.strategy == "sweep"
    assert plan.peak_before_bytes is not None
    assert plan.peak_bytes < plan.peak_before_bytes / 1.5
    assert plan.outcome is not None
    assert len(plan.outcome.candidates) > 3
    _check(graph, plan)
    for _, node in graph.nodes(data=True):
        node.pop("forward", None)
    assert memonger.search_plan(graph).strategy == "none"


@pytest.mark.parametrize(
    ("strategy", "recomputes"),
    [
        ("block", False),
        ("sqrt", True),
        ("log", True),
        ("sweep", True),
        ("none", False),
    ],  # a chain: each node is a block
)
def test_every_strategy_that_needs_no_model_gives_a_valid_plan(strategy: str, recomputes: bool) -> None:
    graph = _chain(16)
    plan = memonger.search_plan(graph, strategy=strategy)
    assert plan.strategy == strategy
    assert (plan.overhead > 0) == recomputes
    _check(graph, plan)


def test_names_may_be_anything_hashable() -> None:
    graph: nx.DiGraph[Any] = nx.DiGraph()
    names = [1, "1", (1, 2), frozenset({3}), "x.recompute1", None.__class__]
    for name in names:
        graph.add_node(name, bytes=64, cost=1)
    nx.add_path(graph, names)
    plan = memonger.search_plan(graph)
    assert plan.schedule == tuple(names)
    assert plan.recomputed == ()
    assert plan.overhead == 0
    assert plan.activation_bytes == 64 * len(names)
    assert [step["bytes"] for step in json.loads(plan.to_json())["steps"]] == [64] * len(names)


def test_json_says_what_was_asked_for_and_decided() -> None:
    graph = _chain()
    record = json.loads(memonger.search_plan(graph, budget=800, effort=20_000).to_json())
    assert record["budget_bytes"] == 800
    assert record["strategy"] == "budget"
    assert record["peak_bytes"] <= record["lower_bound_bytes"] <= record["arena_bytes"]
    assert record["arena_bytes"] <= 800  # sizes count as they are, not rounded up
    assert record["schedule"] == [step["node"] for step in record["steps"]]


def test_the_frontier_falls_in_total_and_rises_in_cost() -> None:
    graph = _chain()
    plans = memonger.pareto(graph, points=4, effort=5000)
    totals, overheads = [plan.arena_bytes for plan in plans], [plan.overhead for plan in plans]
    assert len(plans) > 2
    assert totals == sorted(set(totals), reverse=True)
    assert overheads == sorted(set(overheads))
    assert overheads[0] == 0
    for plan in plans:
        assert isinstance(plan, memonger.GraphPlan)
        _check(graph, plan)


def _broken(**change: Any) -> "nx.DiGraph[Any]":
    graph = _chain(3)
    graph.nodes["f1"].update({key: value for key, value in change.items() if value is not None})
    for key, value in change.items():
        if value is None:
            del graph.nodes["f1"][key]
    return graph


def _cyclic() -> "nx.DiGraph[Any]":
    graph = _chain(3)
    graph.add_edge("b0", "f0")
    return graph


@pytest.mark.parametrize(
    ("graph", "words"),
    [
        (nx.DiGraph(), "empty"),
        (_cyclic(), "cycle.*'f0'"),
        (_broken(bytes=None), "'f1' has no 'bytes'"),
        (_broken(cost=None), "'f1' has no 'cost'"),
        (_broken(bytes=1.5), "'f1' has a bad .* 'bytes'"),
        (_broken(bytes="64"), "'f1' has a bad .* 'bytes'"),
        (_broken(bytes=-1), "'f1' writes -1 bytes"),
        (_broken(cost=-1), "cost of node 'f1' is -1"),
        (_broken(cost=float("nan")), "cost of node 'f1' is nan"),
        (_broken(bytes=2**62), "'f1' has 4611686018427387904"),
        (_broken(bytes=2**200), "at most 2\\*\\*62 can be planned"),
        (_broken(cost=1e308), "'f1' costs 1e\\+308"),
        (nx.Graph([(0, 1)]), "Graph can't be planned: give a networkx.DiGraph"),
        (nx.MultiDiGraph([(0, 1)]), "MultiDiGraph can't be planned"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("function", [memonger.search_plan, memonger.pareto])
def test_a_graph_that_cannot_be_planned_is_refused(graph: Any, words: str, function: Any) -> None:
    with pytest.raises(PlanError, match=words):
        function(graph)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss": "x"}, "loss is for models"),
        ({"mirror": ["f*"]}, "mirror is for models"),
        ({"device": "cpu"}, "device is for models"),
        ({"batch": 3}, "batch is for models"),
        ({"strategy": "marks"}, "'marks' needs a model"),
        ({"strategy": "cheap"}, "'cheap' needs a model"),
        ({"strategy": "fast"}, "strategy must be .* not 'fast'"),
        ({"strategy": "budget"}, "needs a budget"),
        ({"order": "random"}, "order must be .* not 'random'"),
    ],
)
def test_options_that_only_a_model_has_a_use_for_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        memonger.search_plan(_chain(3), **options)


def test_a_budget_nothing_holds_names_one_that_works() -> None:
    graph = _chain()
    with pytest.raises(BudgetError) as caught:
        memonger.search_plan(graph, budget=150, effort=20_000)
    assert caught.value.lower_bound == 300  # a backward step reads two values and writes one
    assert f"{caught.value.smallest} bytes" in str(caught.value)
    plan = memonger.search_plan(graph, budget=caught.value.smallest, effort=20_000)
    assert plan.arena_bytes <= caught.value.smallest


def test_the_same_graph_gives_the_same_plan_in_another_process() -> None:
    code = (
        "import memonger; from tests.planner.test_networkx_graph import _chain;"
        "print(memonger.search_plan(_chain(), budget=700, effort=20_000).to_json())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == memonger.search_plan(_chain(), budget=700, effort=20_000).to_json()


@pytest.mark.parametrize(("size", "smallest"), [(5, 2005), (50, 2000)])
def test_without_a_backward_pass_less_than_a_hundredth_is_not_looked_for(size: int, smallest: int) -> None:
    """What the first node writes can be computed again behind the largest step, which saves its bytes there."""
    graph: nx.DiGraph[Any] = nx.DiGraph()
    for name, nbytes in (("again", size), ("small", 1), ("large", 1000), ("larger", 1000), ("last", 1)):
        graph.add_node(name, bytes=nbytes, cost=1.0)
    graph.add_edges_from(
        [("again", "small"), ("small", "large"), ("large", "larger"), ("larger", "last"), ("again", "last")]
    )
    with pytest.raises(BudgetError) as refused:
        memonger.search_plan(graph, budget=smallest - 1, effort=2_000)
    assert refused.value.smallest == smallest
    assert memonger.search_plan(graph, budget=smallest, effort=2_000).arena_bytes == smallest
