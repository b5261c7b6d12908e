"""The bound on every schedule's arena, against every schedule of small graphs."""

import itertools

import networkx
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memonger
import models
from memonger.options import Options
from memonger.planner import search_plan as planner
from memonger.planner.networkx_graph import from_networkx
from memonger.schedule.every_schedule import least_arena
from memonger.schedule.problem import Problem, peak
from tests.support.brute_force import cheapest


@st.composite
def _graphs(draw: st.DrawFn, most: int = 6) -> "networkx.DiGraph[int]":
    graph: networkx.DiGraph[int] = networkx.DiGraph()
    for node in range(draw(st.integers(2, most))):
        graph.add_node(node, bytes=draw(st.integers(1, 9)), cost=1)
        graph.add_edges_from((before, node) for before in range(node) if draw(st.booleans()))
    return graph


@settings(deadline=None, max_examples=40)
@given(_graphs())
def test_it_is_the_least_that_any_schedule_needs(graph: "networkx.DiGraph[int]") -> None:
    """With enough effort the bound of a graph with one sink is exact; of several it is no more than that."""
    problem = Problem.from_networkx(graph)
    least = next(budget for budget in itertools.count(1) if cheapest(problem, budget, given_order=False) is not None)
    bound = least_arena(from_networkx(graph)[0])
    assert bound <= least
    assert least_arena(from_networkx(graph)[0], effort=0) <= bound
    if all(networkx.has_path(graph, node, len(graph) - 1) for node in graph):
        assert bound == least


@settings(deadline=None, max_examples=40)
@given(_graphs())
def test_without_repeats_it_holds_for_every_order(graph: "networkx.DiGraph[int]") -> None:
    problem = Problem.from_networkx(graph)
    orders = (
        order
        for order in itertools.permutations(range(problem.nodes))
        if all(order.index(problem.producer[v]) < order.index(n) for n in order for v in problem.reads[n])
    )
    least = min(peak(problem, order) for order in orders)
    once = least_arena(from_networkx(graph)[0], again=False)
    assert least_arena(from_networkx(graph)[0]) <= once <= least


@pytest.mark.parametrize("name", ["resnet18", "unet"])
def test_plans_of_networks_for_inference_are_as_small_as_any_can_be(name: str) -> None:
    job = planner.prepare(models.build_ir(name, batch=2), Options(mode="inference", device="none"))
    plan = memonger.search_plan(models.build_ir(name, batch=2), mode="inference", device="none", chunks="off")
    assert least_arena(job.request.graph) == plan.arena_bytes


def test_views_and_overwritten_inputs_count_once() -> None:
    text = """<ir_version: 10, opset_import: ["": 20]>
    g (float[8,16] x) => (float[128] y) {
        a = Exp(x)
        b = Neg(a)
        c = Flatten(b)
        d = Relu(c)
        s = Constant<value = int64[1] {-1}>()
        y = Reshape(d, s)
    }"""
    job = planner.prepare(onnx.parser.parse_model(text), Options(mode="inference", device="none"))
    assert least_arena(job.request.graph) == 8 * 16 * 4
    separate = Options(mode="inference", device="none", sharing=memonger.Sharing(inplace=False, views=False))
    assert least_arena(job.request.graph, separate.sharing) == 2 * 8 * 16 * 4
