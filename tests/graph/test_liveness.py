"""Graphs, lifetimes and storage on small models whose peaks are counted by hand. Every value is 1 KiB."""

import numpy as np
from onnx import TensorProto, helper

import memonger
from memonger.graph.graph import Graph, from_model
from memonger.graph.liveness import Sharing, assign_storage, live_bytes, peak_bytes
from memonger.lowering.lowered import portable
from memonger.model.load import load
from tests.support import networks

KIB = 1024
SHAPE = [256]
NOTHING = Sharing(inplace=False, views=False)


def _graph(nodes: list[tuple[str, list[str], list[str]]], outputs: list[str], **attributes: int) -> Graph:
    made = [helper.make_node(op, ins, outs, name=f"{op}_{outs[0]}") for op, ins, outs in nodes]
    model = networks.model_of(made, {"x": SHAPE}, dict.fromkeys(outputs, SHAPE))
    return from_model(portable(load(model)).model)


def _peak(graph: Graph, sharing: Sharing | None = None) -> int:
    return peak_bytes(assign_storage(graph, sharing).buffers, len(graph.nodes))


def test_a_chain_needs_two_values_and_in_place_one() -> None:
    graph = _graph([("Relu", ["x"], ["a"]), ("Exp", ["a"], ["b"]), ("Neg", ["b"], ["y"])], ["y"])
    assert _peak(graph, NOTHING) == 2 * KIB
    assert _peak(graph) == KIB


def test_a_value_read_later_is_not_overwritten() -> None:
    nodes = [("Relu", ["x"], ["a"]), ("Exp", ["a"], ["b"]), ("Add", ["a", "b"], ["y"])]
    graph = _graph(nodes, ["y"])
    storage = assign_storage(graph)
    number = {name: value for value, name in enumerate(graph.values)}
    assert storage.of_value[number["a"]] != storage.of_value[number["b"]]
    assert _peak(graph) == 2 * KIB


def test_a_graph_output_lives_to_the_end_and_is_not_overwritten() -> None:
    graph = _graph([("Relu", ["x"], ["a"]), ("Exp", ["a"], ["b"]), ("Neg", ["b"], ["y"])], ["a", "y"])
    assert _peak(graph) == 2 * KIB
    assert _peak(graph, NOTHING) == 3 * KIB


def test_inputs_and_weights_are_not_in_the_arena() -> None:
    nodes = [helper.make_node("Add", ["x", "w"], ["y"], name="add")]
    model = networks.model_of(nodes, {"x": SHAPE}, {"y": SHAPE}, w=np.zeros(256, np.float32))
    graph = from_model(portable(load(model)).model)
    assert [graph.values[v] for v, planned in enumerate(graph.planned) if planned] == ["y"]
    assert _peak(graph) == KIB


def test_views_share_bytes_until_the_last_of_them_dies() -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name="relu"),
        helper.make_node("Reshape", ["a", "shape"], ["v"], name="view"),
        helper.make_node("Exp", ["v"], ["b"], name="exp"),
        helper.make_node("Neg", ["a"], ["c"], name="neg"),
        helper.make_node("Flatten", ["b"], ["d"], name="flat", axis=0),
        helper.make_node("Flatten", ["c"], ["e"], name="flat2", axis=0),
        helper.make_node("Add", ["d", "e"], ["y"], name="add"),
    ]
    model = networks.model_of(nodes, {"x": SHAPE}, {"y": [1, 256]}, shape=np.array([16, 16], np.int64))
    graph = from_model(portable(load(model)).model)
    storage = assign_storage(graph)
    number = {name: value for value, name in enumerate(graph.values)}
    of = {name: storage.of_value[number[name]] for name in "avbcdey"}
    assert of["a"] == of["v"]
    assert of["b"] != of["v"], "exp may not overwrite the view: neg still reads what it views"
    assert of["c"] == of["a"], "neg may: nobody reads those bytes any more"
    assert _peak(graph) == 2 * KIB
    assert _peak(graph, NOTHING) == 3 * KIB


def test_without_reuse_every_storage_lives_throughout() -> None:
    graph = _graph([("Relu", ["x"], ["a"]), ("Exp", ["a"], ["b"]), ("Neg", ["b"], ["y"])], ["y"])
    assert _peak(graph, Sharing(inplace=False, reuse=False)) == 3 * KIB


def test_what_a_subgraph_captures_stays_alive_through_it() -> None:
    def branch(op: str, name: str) -> "helper.GraphProto":  # type: ignore[name-defined]
        node = helper.make_node(op, ["a"], [name], name=f"inner_{name}")
        return helper.make_graph([node], name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, SHAPE)])

    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name="relu"),
        helper.make_node("Exp", ["x"], ["b"], name="exp"),
        helper.make_node("ReduceSum", ["b"], ["s"], name="sum", keepdims=0),
        helper.make_node("Greater", ["s", "zero"], ["c"], name="greater"),
        helper.make_node("If", ["c"], ["y"], name="if", then_branch=branch("Neg", "t"), else_branch=branch("Abs", "e")),
    ]
    model = networks.model_of(nodes, {"x": SHAPE}, {"y": SHAPE}, zero=np.float32(0).reshape(()))
    graph = from_model(portable(load(model)).model)
    number = {name: value for value, name in enumerate(graph.values)}
    assert number["a"] in graph.reads[-1]
    storage = assign_storage(graph)
    assert storage.buffers[storage.of_value[number["a"]]].stop == len(graph.nodes)
    plan = memonger.search_plan(model, device="cpu", mode="inference")
    x = np.linspace(-1, 1, 256, dtype=np.float32)
    expected = networks.run_stock(networks.stock(model), {"x": x})
    assert networks.same_bits(memonger.Session(plan).run({"x": x}), expected)


def test_live_bytes_are_counted_step_by_step() -> None:
    graph = _graph([("Relu", ["x"], ["a"]), ("Exp", ["a"], ["b"]), ("Add", ["a", "b"], ["y"])], ["y"])
    storage = assign_storage(graph, NOTHING)
    assert live_bytes(storage.buffers, 3).tolist() == [KIB, 2 * KIB, 3 * KIB]


def test_unused_outputs_take_room_only_while_they_are_written() -> None:
    nodes = [
        helper.make_node("Split", ["x"], ["a", "b"], name="split", num_outputs=2),
        helper.make_node("Exp", ["a"], ["y"], name="exp"),
    ]
    model = networks.model_of(nodes, {"x": [512]}, {"y": SHAPE})
    graph = from_model(portable(load(model)).model)
    assert live_bytes(assign_storage(graph, NOTHING).buffers, 2).tolist() == [2 * KIB, 2 * KIB]
    assert live_bytes(assign_storage(graph).buffers, 2).tolist() == [2 * KIB, KIB]
