"""Parts of values inside them: which nodes have them, and plans of marked models run as stock runs the models."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

import memonger
import models
from memonger.graph.aliasing import CUDA, windows
from memonger.graph.graph import Graph
from memonger.graph.liveness import Sharing, Storage, assign_storage
from memonger.ir.marks import WINDOW
from memonger.planner import search_plan as planner
from memonger.report.view import View
from memonger.schedule import solution
from tests.support import networks
from tests.support.one_node_executor import run_poisoned

ROWS = {f"i{row}": np.array([row], np.int64) for row in range(17)}


def _marked(op: str, reads: list[str], written: str, **attributes: Any) -> onnx.NodeProto:
    node = helper.make_node(op, reads, [written], name=f"make_{written}", **attributes)
    node.metadata_props.add(key=WINDOW, value="1")
    return node


def _slice(source: str, begin: int, end: int, written: str) -> onnx.NodeProto:
    return _marked("Slice", [source, f"i{begin}", f"i{end}", "i0"], written)


def _images() -> onnx.ModelProto:
    """Four images one by one through Conv and Relu, joined in pairs and then all: e and j are 3 KiB each."""
    nodes = [helper.make_node("Exp", ["x"], ["e"], name="exp")]
    for i in range(4):
        nodes.append(_slice("e", i, i + 1, f"e{i}"))
        nodes.append(helper.make_node("Conv", [f"e{i}", "k"], [f"c{i}"], name=f"conv{i}", pads=[1] * 4))
        nodes.append(helper.make_node("Relu", [f"c{i}"], [f"r{i}"], name=f"relu{i}"))
        if i % 2:
            nodes.append(_marked("Concat", [f"r{i - 1}", f"r{i}"], f"j{i // 2}", axis=0))
    nodes.append(_marked("Concat", ["j0", "j1"], "j", axis=-4))
    nodes.append(helper.make_node("ReduceMax", ["j"], ["m"], name="max"))
    nodes.append(helper.make_node("Sub", ["j", "m"], ["y"], name="sub"))
    kernel = np.random.default_rng(0).standard_normal((3, 3, 3, 3), np.float32)
    return networks.model_of(nodes, {"x": [4, 3, 8, 8]}, {"y": [4, 3, 8, 8]}, k=kernel, **ROWS)


def _feeds(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    return {"x": np.random.default_rng(1).standard_normal(shape, np.float32)}


def _inside(graph: Graph, offsets: Any) -> dict[str, str]:
    """For each part that lies inside its whole, by the offsets, that whole."""
    found = (window for each in graph.subviews for window in each)
    return {graph.values[p]: graph.values[w] for p, w, byte in found if offsets[p] == offsets[w] + byte}


def test_slices_and_nested_joins_of_a_model_need_no_second_buffer(tmp_path: Path) -> None:
    model = _images()
    feeds, expected = _feeds(model), networks.run_stock(networks.stock(model, "ORT_DISABLE_ALL"), _feeds(model))
    plan = memonger.search_plan(model, device="none", mode="inference")
    assert len(_inside(plan.graph, plan.offsets)) == 10
    assert plan.arena_bytes == plan.peak_bytes == plan.lower_bound_bytes == 2 * 3072
    assert networks.same_bits(run_poisoned(plan, feeds), expected)
    plan.save(tmp_path / "plan.onnx")
    loaded = memonger.Plan.load(tmp_path / "plan.onnx")
    assert loaded.graph.subviews == plan.graph.subviews
    for each in (plan, loaded):
        assert networks.same_bits(memonger.Session(each).run(feeds), expected)
    assert {each.name for each in View("", plan).arena} == {"e", "j", "m"}


def test_device_plans_have_them_too(monkeypatch: pytest.MonkeyPatch) -> None:
    lower = planner._lower

    def marking(*given: Any) -> Any:
        lowered, ranges = lower(*given)
        for node in lowered.model.graph:
            node.metadata_props[WINDOW] = "1"
        return lowered, ranges

    monkeypatch.setattr(planner, "_lower", marking)
    model = _images()
    feeds = _feeds(model)
    plan = memonger.search_plan(model, device="cpu", mode="inference")
    expected = networks.run_stock(networks.stock(model), feeds)
    assert any(op.startswith("com.microsoft.nchwc::") for op in plan.graph.ops)
    assert len(_inside(plan.graph, plan.offsets)) == 10  # the slices have become Splits
    assert networks.same_bits(memonger.Session(plan).run(feeds), expected)
    assert networks.same_bits(run_poisoned(plan, feeds), expected)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("marked", [True, False])
def test_random_models_run_as_stock_runs_them(seed: int, marked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 16 numbers, 64 bytes: cut, joined, looked at under another shape, and changed in place.

    Every window is taken, also where that needs more.
    """
    monkeypatch.setattr(solution, "storages", _with_all_windows)
    model = _random_rows(seed, marked)
    feeds, plan = _feeds(model), memonger.search_plan(model, device="none", mode="inference", order="file")
    assert any(plan.graph.subviews)
    expected = networks.run_stock(networks.stock(model), feeds)
    assert networks.same_bits(run_poisoned(plan, feeds), expected)
    assert networks.same_bits(memonger.Session(plan).run(feeds), expected)


def _with_all_windows(graph: Graph, sharing: Sharing, alignment: int) -> tuple[Storage, ...]:
    return (assign_storage(graph, sharing, alignment, subviews=range(len(graph.nodes))),)


def _random_rows(seed: int, marked: bool) -> onnx.ModelProto:
    rng = np.random.default_rng(seed)
    nodes, rows = [helper.make_node("Neg", ["x"], ["v0"], name="first")], {"v0": 4}
    for number in range(1, 16):
        name, chosen = f"v{number}", [str(v) for v in rng.permutation(sorted(rows))[:3]]
        kind = rng.integers(0, 4 if marked else 5)
        rows[name] = rows[chosen[0]]
        if kind == 0 and sum(rows[v] for v in chosen) <= 16 and len(chosen) > 1:
            nodes.append(_marked("Concat", chosen, name, axis=0))
            rows[name] = sum(rows[v] for v in chosen)
        elif kind == 1 and rows[name] > 1:
            begin, end = sorted(rng.choice(rows[name] + 1, 2, replace=False).tolist())
            nodes.append(_slice(chosen[0], begin, end, name))
            rows[name] = end - begin
        elif kind == 2:
            nodes.append(helper.make_node("Squeeze", [chosen[0]], [f"{name}_flat"], name=f"flat{number}"))
            nodes.append(helper.make_node("Reshape", [f"{name}_flat", "shape"], [name], name=f"node{number}"))
        elif kind == 4 and rows[name] % 2 == 0:
            rows[name] = rows[f"{name}_rest"] = rows[name] // 2
            split = [name, f"{name}_rest"]
            nodes.append(helper.make_node("Split", [chosen[0]], split, name=f"split{number}", axis=-2, num_outputs=2))
        else:
            nodes.append(helper.make_node("Sin", [chosen[0]], [name], name=f"node{number}"))
    read = {v for node in nodes for v in node.input}
    outputs = {v: [rows[v], 16] for v in rows if v not in read}
    for node in nodes if not marked else ():
        del node.metadata_props[:]
    return networks.model_of(nodes, {"x": [4, 16]}, outputs, shape=np.array([-1, 16], np.int64), **ROWS)


def _dense_block(layers: int, channels: int = 8) -> onnx.ModelProto:
    """Each layer's input is all that came before, joined anew; at the end all of them are joined and read."""
    nodes, features, weights = [helper.make_node("Exp", ["x"], ["f0"], name="exp")], ["f0"], {}
    for layer in range(1, layers + 1):
        source = features[0]
        if layer > 1:
            source = f"c{layer}"
            nodes.append(helper.make_node("Concat", features, [source], name=f"join{layer}", axis=1))
        weights[f"k{layer}"] = np.random.default_rng(layer).random((channels, layer * channels, 1, 1), np.float32)
        nodes.append(helper.make_node("Conv", [source, f"k{layer}"], [f"f{layer}"], name=f"conv{layer}"))
        features.append(f"f{layer}")
    nodes.append(helper.make_node("Concat", features, ["all"], name="join", axis=1))
    nodes.append(helper.make_node("ReduceMax", ["all"], ["m"], name="max"))
    nodes.append(helper.make_node("Sub", ["all", "m"], ["y"], name="sub"))
    shape = [1, channels, 8, 8]
    return networks.model_of(nodes, {"x": shape}, {"y": [1, (layers + 1) * channels, 8, 8]}, **weights)


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_features_of_a_dense_block_grow_in_one_buffer(device: str) -> None:
    model, layers = _dense_block(4), 5 * 2048
    feeds, expected = _feeds(model), networks.run_stock(networks.stock(model, "ORT_DISABLE_ALL"), _feeds(model))
    plan = memonger.search_plan(model, device=device, mode="inference", level="basic" if device == "cpu" else None)
    assert plan.arena_bytes == layers + 4
    assert networks.same_bits(run_poisoned(plan, feeds), expected)
    assert networks.same_bits(memonger.Session(plan).run(feeds), expected)
    without = memonger.search_plan(model, device="none", mode="inference", sharing=Sharing(windows=False))
    assert without.arena_bytes == 2 * layers


def test_steps_with_windows_are_steps_without_to_the_bit() -> None:
    model = models.build_ir("densenet_bc100", batch=1, training=True, blocks=(3,), growth=8, image=8)
    training = memonger.differentiate(model, loss="loss", optimizer=memonger.SGD(lr=0.1, momentum=0.9))
    without, made = (
        memonger.search_plan(training, device="none", strategy="cheap", sharing=Sharing(windows=windows))
        for windows in (False, True)
    )
    assert made.arena_bytes < without.arena_bytes
    x = np.random.default_rng(2).standard_normal((1, 3, 8, 8), np.float32)
    trainers = [memonger.TrainingSession(plan) for plan in (without, made)]
    for _ in range(2):
        assert len({trainer.step({"image": x, "labels": np.zeros(1, np.int64)}) for trainer in trainers}) == 1
    states = [trainer.state_dict() for trainer in trainers]
    assert all(states[0][name].tobytes() == array.tobytes() for name, array in states[1].items())


def test_what_the_model_returns_or_joins_twice_is_copied() -> None:
    nodes = [helper.make_node("Exp", ["x"], ["a"], name="exp"), helper.make_node("Neg", ["x"], ["b"], name="neg")]
    nodes.append(_marked("Concat", ["a", "b"], "j", axis=0))
    nodes.append(_marked("Concat", ["b", "a"], "k", axis=0))
    nodes.append(_marked("Concat", ["b", "b"], "l", axis=0))
    outputs = {"a": [4, 16], "j": [8, 16], "k": [8, 16], "l": [8, 16]}
    model = networks.model_of(nodes, {"x": [4, 16]}, outputs)
    plan = memonger.search_plan(model, device="none", mode="inference")
    assert _inside(plan.graph, plan.offsets) in ({"b": "j"}, {"b": "k"})
    assert networks.same_bits(
        run_poisoned(plan, _feeds(model)), networks.run_stock(networks.stock(model), _feeds(model))
    )


def test_marks_alone_make_no_window() -> None:
    value = {name: ir.Value(name=name, const_value=ir.tensor(np.array(given, np.int64))) for name, given in (
        ("0", [0]), ("1", [1]), ("2", [2]), ("-2", [-2]), ("4", [4]), ("8", [8]), ("-1", [-1]), ("99", [99]),
        ("0,1", [0, 1]),
    )}  # fmt: skip
    graph = ir.Graph([], [], nodes=[], initializers=list(value.values()), name="g")
    assert len(graph.initializers) == len(value)
    value["fed"] = ir.Value(name="fed")
    half = ir.Value(name="half", shape=ir.Shape([1, 4, 16]), type=ir.TensorType(ir.DataType.FLOAT))
    whole = ir.Value(name="whole", shape=ir.Shape([1, 8, 16]), type=ir.TensorType(ir.DataType.FLOAT))
    packed = ir.Value(name="packed", shape=ir.Shape([1, 8, 16]), type=ir.TensorType(ir.DataType.INT4))

    def found(op: str, inputs: list[ir.Value], shape: list[int], mark: str = "1", domain: str = "", **axis: int) -> Any:
        attributes = [ir.AttrInt64(name, number) for name, number in axis.items()]
        node = ir.Node(domain, op, inputs, attributes, num_outputs=1, metadata_props={WINDOW: mark})
        node.outputs[0].shape, node.outputs[0].type = ir.Shape(shape), ir.TensorType(ir.DataType.FLOAT)
        assert not windows(node, CUDA)
        return [(part.name, whole.name, byte) for part, whole, byte in windows(node)]

    def cut(*bounds: str, source: ir.Value = whole, shape: tuple[int, ...] = (1, 4, 16), **changes: str) -> Any:
        return [byte for *_, byte in found("Slice", [source, *(value[b] for b in bounds)], list(shape), **changes)]

    assert cut("4", "8", "1") == cut("4", "8", "1", "1") == [256]
    assert cut("0", "1", "0", shape=(1, 8, 16)) == [0]
    assert cut("-1", "8", "1", shape=(1, 1, 16)) == [448]  # from the end
    assert cut("4", "99", "-2") == [256]  # to beyond the end
    for bounds, shape in (
        (("0", "8", "1", "2"), (1, 4, 16)),  # in steps
        (("4", "8", "-1"), (1, 8, 4)),  # along the last axis
        (("4", "8", "2"), (1, 8, 4)),  # along an inner axis
        (("4", "8", "99"), (1, 4, 16)),  # along none
        (("0,1", "8", "1"), (1, 4, 16)),  # of several axes
        (("fed", "8", "1"), (1, 4, 16)),  # from a place that the run decides
        (("4", "8"), (1, 4, 16)),  # along the first axis, which has less
        (("4", "8", "1"), (1, 3, 16)),  # of another size than the file says
    ):
        assert cut(*bounds, shape=shape) == []
    assert cut("4", "8", "1", mark="0") == [256]  # whether it is taken is then a choice
    assert cut("4", "8", "1", domain="other") == cut("4", "8", "1", source=packed) == []

    assert found("Concat", [half, whole], [1, 12, 16], axis=1) == [("half", None, 0), ("whole", None, 256)]
    assert found("Concat", [half, whole, half], [1, 16, 16], axis=-2) == [("whole", None, 256)]
    for inputs, shape, axis in (
        ([half, half], [1, 4, 32], 2),  # along an inner axis
        ([half, whole], [1, 13, 16], 1),  # of another size than the file says
        ([half, whole], [2, 8, 16], 0),  # of parts that don't fit
        ([half], [1, 4, 16], 1),  # a view
        ([half, value["fed"]], [1, 12, 16], 1),  # of unknown parts
        ([half, whole], [1, 12, 16], 7),  # along none
    ):
        assert found("Concat", inputs, shape, axis=axis) == []
    assert found("Split", [whole], [1, 8, 16], axis=1) == [(None, "whole", 0)]
    assert found("Add", [whole, whole], [1, 8, 16]) == found("Split", [whole], [1, 4, 16], axis=1) == []
