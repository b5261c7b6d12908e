"""A plan as a ``networkx.DiGraph``."""

from typing import Any

import networkx as nx
import pytest

import memonger
from memonger.graph.liveness import live_bytes
from tests.planner.test_networkx_graph import _chain
from tests.support.planning_models import chain, plan


@pytest.fixture(scope="module")
def planned() -> memonger.Plan:
    return plan(chain(), strategy="log")


def test_steps_are_nodes_in_the_planned_order(planned: memonger.Plan) -> None:
    steps = planned.to_networkx()
    assert list(steps) == list(planned.graph.nodes) == list(nx.get_node_attributes(steps, "step"))
    assert [data["step"] for _, data in steps.nodes(data=True)] == list(range(len(planned.graph.nodes)))
    assert [data["op"] for _, data in steps.nodes(data=True)] == list(planned.graph.ops)
    assert [data["cost"] for _, data in steps.nodes(data=True)] == list(planned.graph.costs)
    assert all(steps.nodes[a]["step"] < steps.nodes[b]["step"] for a, b in steps.edges)
    figures = {"arena_bytes": planned.arena_bytes, "alignment": 64, "peak_bytes": planned.peak_bytes}
    assert steps.graph == figures


def test_recomputations_name_the_node_they_run_again(planned: memonger.Plan) -> None:
    steps = planned.to_networkx()
    again = [data for _, data in steps.nodes(data=True) if data["recomputed"]]
    assert len(again) == len(planned.recomputed) > 0
    for data in again:
        first = steps.nodes[data["node"]]
        assert (first["node"], first["recomputed"], first["op"]) == (data["node"], False, data["op"])
        assert first["step"] < data["step"]
    assert {data["node"] for _, data in steps.nodes(data=True)} == {name for name in steps if ".recompute" not in name}


def test_edges_are_what_a_step_reads_of_another(planned: memonger.Plan) -> None:
    steps, graph = planned.to_networkx(), planned.graph
    number = {name: value for value, name in enumerate(graph.values)}
    for step, name in enumerate(graph.nodes):
        read = {value for _, _, values in steps.in_edges(name, data="values") for value in values}
        written = {value for writes in graph.writes[:step] for value in writes}
        assert {number[value] for value in read} == written & set(graph.reads[step])
    for before, _, data in steps.edges(data=True):
        assert set(data["values"]) <= set(steps.nodes[before]["values"])
        for value, offset in zip(data["values"], data["offsets"], strict=True):
            assert planned.offsets.get(number[value]) == offset
        assert data["bytes"] == sum(graph.sizes[number[v]] for v in data["values"] if number[v] in planned.offsets)


def test_values_that_the_runtime_keeps_have_no_offset() -> None:
    pytest.importorskip("onnxruntime")
    found = plan(chain(), optimizer=memonger.SGD(), strategy="none")
    updates = [data for _, data in found.to_networkx().nodes(data=True) if data["offsets"] == (None,)]
    assert updates
    assert {data["bytes"] for data in updates} == {0}


def _of_graph(graph: "nx.DiGraph[Any]", **options: Any) -> memonger.GraphPlan:
    found = memonger.search_plan(graph, **options)
    assert isinstance(found, memonger.GraphPlan)
    return found


def test_the_plan_of_a_graph_keeps_its_names_of_the_nodes() -> None:
    graph = nx.relabel_nodes(_chain(), lambda name: (name[0], int(name[1:])))
    found = _of_graph(graph, budget=700, effort=20_000)
    steps = found.to_networkx()
    assert [data["node"] for _, data in steps.nodes(data=True)] == list(found.schedule)
    assert len(steps) == len(found.schedule) > len(graph)
    assert {(steps.nodes[a]["node"], steps.nodes[b]["node"]) for a, b in steps.edges} == set(graph.edges)
    assert all(data["bytes"] == 100 for _, _, data in steps.edges(data=True))


def test_what_comes_out_can_go_in_again() -> None:
    found = _of_graph(_chain(), budget=700, effort=20_000)
    again = _of_graph(found.to_networkx(), strategy="none", order="file")
    assert again.peak_bytes == found.peak_bytes
    assert max(live_bytes(again.storage.buffers, len(again.schedule))) == found.peak_bytes
    assert memonger.search_plan(plan(chain()).to_networkx(), strategy="none").arena_bytes > 0
