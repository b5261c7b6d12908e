"""Values side by side: gradients of a training step in one range, and groups that can't be."""

import dataclasses
import re

import numpy as np
import onnx
import pytest
from onnx import helper

import memonger
from memonger.allocation import allocate
from memonger.errors import PlanError, VerificationError
from memonger.graph.graph import Graph
from memonger.graph.liveness import assign_storage, in_buckets, places
from memonger.graph.verify import verify
from memonger.plan import Plan
from memonger.schedule.solution import _offsets
from tests.support import networks
from tests.support.one_node_executor import run_poisoned


def _model() -> onnx.ModelProto:
    """Values of 400, 80, 400, 200, 400 and 200 bytes: c may be computed over a, e over c, and f is a view of d."""
    nodes = [
        helper.make_node("Exp", ["x"], ["a"], name="exp"),
        helper.make_node("MatMul", ["x", "k"], ["b"], name="product"),
        helper.make_node("Relu", ["a"], ["c"], name="relu"),
        helper.make_node("MatMul", ["c", "h"], ["d"], name="half"),
        helper.make_node("Sin", ["c"], ["e"], name="sine"),
        helper.make_node("Flatten", ["d"], ["f"], name="view"),
    ]
    weights = {"k": np.ones((10, 2), np.float32), "h": np.ones((10, 5), np.float32)}
    outputs = {"b": [10, 2], "e": [10, 10], "f": [10, 5]}
    return networks.model_of(nodes, {"x": [10, 10]}, outputs, **weights)


def _plan() -> Plan:
    return memonger.search_plan(_model(), device="none", mode="inference", order="file")


def _numbers(graph: Graph, names: str) -> list[int]:
    return [graph.values.index(name) for name in names]


def test_groups_lie_in_the_order_in_which_they_are_given_and_run_right() -> None:
    plan = _plan()
    graph, feeds = plan.graph, {"x": np.random.default_rng(0).standard_normal((10, 10), np.float32)}
    b, d, e, c = _numbers(graph, "bdec")
    storage = assign_storage(graph, groups=[(b, d, e)])
    layout = allocate(storage.buffers)
    offsets = _offsets(storage, layout)
    assert (offsets[d] - offsets[b], offsets[e] - offsets[b]) == (128, 384)  # 80 and 200 bytes, aligned
    assert storage.buffers[storage.of_value[b]].size == 384 + 400
    assert storage.of_value[c] == storage.of_value[e]  # e is computed over c, at its place in the group
    verify(graph, offsets, layout.size, plan.alignment, [(b, d, e)])
    grouped = dataclasses.replace(plan, offsets=offsets, arena_bytes=layout.size)
    expected = networks.run_stock(networks.stock(_model(), "ORT_DISABLE_ALL"), feeds)
    assert networks.same_bits(run_poisoned(grouped, feeds), expected)
    assert networks.same_bits(memonger.Session(grouped).run(feeds), expected)
    with pytest.raises(VerificationError, match=r"'d' at byte .* isn't right behind 'b', which ends at"):
        verify(graph, plan.offsets, plan.arena_bytes, plan.alignment, [(b, d)])
    with pytest.raises(VerificationError, match="'x' is in a group, but isn't kept in the arena"):
        verify(graph, offsets, layout.size, plan.alignment, [(graph.values.index("x"),)])


def test_buckets_are_full_in_the_order_in_which_they_are_written() -> None:
    graph = _plan().graph
    a, b, c, d, e = _numbers(graph, "abcde")
    assert in_buckets(graph, {e, d, c, b, a}, 400, 500) == ((a,), (b, c, d), (e,))
    assert in_buckets(graph, (), 1, 1) == ()
    assert places(graph, (d, b), 64) == {d: 0, b: 256}


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        (["bd", "be"], "value 'b' is twice in groups: it has one place."),
        (["bb"], "value 'b' is twice in groups: it has one place."),
        (["bx"], "value 'x' is in a group, but isn't kept in the arena."),
        (["b", ""], "a group has no values: give each at least one."),
        (["df"], "value 'd' can't be side by side with others in a group: it shares its bytes with 'f'."),
    ],
)
def test_groups_that_cannot_be_contiguous_are_refused(groups: list[str], words: str) -> None:
    graph = _plan().graph
    with pytest.raises(PlanError, match=re.escape(words)):
        assign_storage(graph, groups=[_numbers(graph, names) for names in groups])
    with pytest.raises(PlanError, match="a group has value 99, and the graph has"):
        assign_storage(graph, groups=[(99,)])


def test_a_part_at_its_place_in_another_value_is_in_no_group() -> None:
    nodes = [helper.make_node("Exp", ["x"], ["a"], name="exp"), helper.make_node("Neg", ["x"], ["b"], name="neg")]
    nodes.append(helper.make_node("Concat", ["a", "b"], ["j"], name="join", axis=0))
    nodes.append(helper.make_node("Sin", ["j"], ["y"], name="sine"))
    model = networks.model_of(nodes, {"x": [4, 16]}, {"y": [8, 16]})
    graph = memonger.search_plan(model, device="none", mode="inference").graph
    a, b, j, y = _numbers(graph, "abjy")
    assert assign_storage(graph, groups=[(a, b)]).of_value[a] != assign_storage(graph, groups=[(a, b)]).of_value[j]
    with pytest.raises(PlanError, match=r"'a' can't be side by side .* shares its bytes with 'j'"):
        assign_storage(graph, subviews=range(len(graph.nodes)), groups=[(a, y)])
