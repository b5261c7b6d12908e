"""``memonger inspect`` and ``memonger diff``: what a model holds node by node, and in what two differ."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

import memonger
from memonger.ir.modules import SCOPES, module_of
from tests.support.command_line import invoke
from tests.support.planning_models import network
from tests.support.stock import normal, parse

SCOPE = "['', 'layers', 'layers.0', 'layers.0.conv', 'conv2d']"


def _json(*arguments: object) -> Any:
    result = invoke(*arguments, "--json")
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


def _text(*arguments: object) -> str:
    """What is printed, as one line."""
    return " ".join(invoke(*arguments).stdout.split())


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A convolution of a module's, an activation and a product, with an open batch; in the working directory."""
    monkeypatch.chdir(tmp_path)
    proto = parse(
        "g (float[batch, 3, 8, 8] x) => (float[batch, 5] y) { a = Conv <pads = [1, 1, 1, 1]> (x, w)  b = Relu(a)"
        "  c = Flatten(b)  y = MatMul(c, v) }"
    )
    proto.producer_name, proto.producer_version = "pytorch", "2.9"
    proto.graph.initializer.extend(
        [numpy_helper.from_array(normal(0, 4, 3, 3, 3), "w"), numpy_helper.from_array(normal(1, 256, 5), "v")]
    )
    for node, name in zip(proto.graph.node, ("first", "/layers/layers.1/act/Relu", "third", "fourth"), strict=True):
        node.name = name
    proto.graph.node[0].metadata_props.add(key=SCOPES, value=SCOPE)
    return _write(proto, "model.onnx")


def _write(proto: onnx.ModelProto, name: str) -> Path:
    Path(name).write_bytes(proto.SerializeToString())
    return Path(name)


def _edited(model: Path, change: Callable[[onnx.ModelProto], object]) -> Path:
    proto = onnx.load(model)
    change(proto)
    return _write(proto, "edited.onnx")


def test_a_models_facts(model: Path) -> None:
    record = _json("inspect", model)
    assert record["opsets"] == {"ai.onnx": onnx.load(model).opset_import[0].version}
    assert (record["producer"], record["nodes"], record["ir_version"]) == (
        "pytorch 2.9",
        4,
        onnx.load(model).ir_version,
    )
    assert (record["parameters"], record["parameter_bytes"]) == (4 * 27 + 256 * 5, 4 * (4 * 27 + 256 * 5))
    assert record["operators"] == {"Conv": 1, "Flatten": 1, "MatMul": 1, "Relu": 1}
    assert record["inputs"] == [{"name": "x", "type": "FLOAT", "shape": ["batch", 3, 8, 8]}]
    assert "layers" not in record
    text = _text("inspect", model)
    assert "model.onnx: 4 nodes, 1,388 parameters (5.42 KiB)." in text
    assert "by pytorch 2.9" in text


def test_every_operator_is_listed(model: Path) -> None:
    ops = "Abs Acos Asin Atan Ceil Cos Cosh Elu Erf Exp Floor Log Neg".split()  # noqa: SIM905
    body = "".join(f" v{i + 1} = {op}(v{i})" for i, op in enumerate(ops))
    text = _text("inspect", _write(parse(f"g (float[2] v0) => (float[2] v{len(ops)}) {{{body} }}"), "many.onnx"))
    assert all(f"│ {op} " in text for op in ops)


def test_layers_with_open_sizes_and_with_a_batch(model: Path) -> None:
    convolution, relu, _, product = _json("inspect", model, "--layers")["layers"]
    assert (convolution["node"], convolution["op"]) == ("first", "Conv")
    assert convolution["shapes"] == [["batch", 4, 8, 8]]
    assert (convolution["bytes"], convolution["flops"], convolution["seconds"]) == (None, None, None)
    assert (convolution["module"], relu["module"], product["module"]) == ("layers.0.conv", "layers.1.act", None)
    assert "[batch, 4, 8, 8]" in _text("inspect", model, "--layers")
    convolution, _, _, product = _json("inspect", model, "--layers", "--batch", 2)["layers"]
    assert (convolution["shapes"], convolution["bytes"]) == ([[2, 4, 8, 8]], 2 * 4 * 64 * 4)
    assert convolution["flops"] == 2 * 27 * 2 * 4 * 64
    assert product["flops"] == 2 * 2 * 256 * 5
    assert _json("inspect", model, "--layers", "--dim", "batch=3")["layers"][0]["shapes"] == [[3, 4, 8, 8]]


def test_layers_of_a_malformed_model_are_shown_all_the_same(model: Path) -> None:
    """A product of a scalar, and an attribute of another type than the operator's."""

    def spoil(proto: onnx.ModelProto) -> None:
        proto.graph.node[3].op_type = "Gemm"
        proto.graph.node[3].attribute.add(name="transA", s=b"yes", type=onnx.AttributeProto.STRING)
        del proto.graph.initializer[1].dims[:]
        proto.graph.initializer[1].raw_data = b"four"

    layers = _json("inspect", _edited(model, spoil), "--layers")["layers"]
    assert [layer["op"] for layer in layers] == ["Conv", "Relu", "Flatten", "Gemm"]
    assert layers[3]["flops"] is None


def test_layers_are_timed_where_that_is_asked_for(model: Path) -> None:
    pytest.importorskip("onnxruntime")
    layers = _json("inspect", model, "--layers", "--batch", 2, "--time")["layers"]
    assert all(0 < layer["seconds"] < 1 for layer in layers)
    assert "│ ms │" in _text("inspect", model, "--layers", "--batch", 2, "--time").replace("┃", "│")


def test_layers_of_a_plan_say_what_is_kept_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = memonger.search_plan(network("gpt"), device="none", strategy="cheap")
    plan.save("planned.onnx")
    layers = _json("inspect", "planned.onnx", "--layers")["layers"]
    assert [layer["node"] for layer in layers] == list(plan.graph.nodes)
    runs = {layer["node"]: layer["runs"] for layer in layers}
    again = [plan.graph.nodes[step] for step in plan.recomputed]
    assert again == [name for name in runs if runs[name] == "again"]
    assert {name for name in runs if runs[name] == "recomputed"} == {name.rpartition(".recompute")[0] for name in again}
    assert all(runs[name] is None for name, forward in zip(plan.graph.nodes, plan.graph.forward, strict=True)
               if not forward and name not in again)  # fmt: skip
    offsets = {plan.graph.values[value]: offset for value, offset in plan.offsets.items()}
    first = next(iter(plan.model.graph)).outputs[0].name
    assert layers[0]["offset"] == offsets[first]


def test_flags_that_need_layers_say_so(model: Path) -> None:
    for flags in (("--batch", 2), ("--time",)):
        result = invoke("inspect", model, *flags)
        assert result.exit_code == 2
        assert "--layers" in result.stderr
    memonger.search_plan(model, mode="inference", batch=2, device="none").save("planned.onnx")
    assert invoke("inspect", "planned.onnx", "--layers", "--batch", 3).exit_code == 2


@pytest.mark.parametrize(
    ("scopes", "name", "module"),
    [
        (None, "/stem/Conv", "stem"),
        (None, "/Conv", None),
        (None, "node_conv2d", None),
        ("['', 'conv2d']", "/a/b", None),
        ("not a list", "x", None),
        ("[" * 500, "x", None),
        ("7", "x", None),
    ],
)
def test_the_module_of_a_node(scopes: str | None, name: str, module: str | None) -> None:
    props = {} if scopes is None else {SCOPES: scopes}
    assert module_of(ir.Node("", "Conv", [], name=name, metadata_props=props)) == module


def test_modules_are_found_in_what_onnxruntimes_optimizer_made(model: Path) -> None:
    pytest.importorskip("onnxruntime")
    scoped = _edited(model, lambda proto: proto.graph.node[1].metadata_props.add(key=SCOPES, value=SCOPE))
    memonger.search_plan(scoped, mode="inference", batch=2, device="cpu").save("planned.onnx")
    layers = _json("inspect", "planned.onnx", "--layers")["layers"]
    assert "layers.0.conv" in [layer["module"] for layer in layers if layer["op"].endswith("Conv")]


def test_a_model_is_the_same_as_itself(model: Path) -> None:
    result = invoke("diff", model, model)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "are the same" in result.stdout
    assert _json("diff", model, model)["same"] is True


def _set_weight(proto: onnx.ModelProto) -> None:
    proto.graph.initializer[1].CopyFrom(numpy_helper.from_array(np.zeros((256, 5), np.float32), "v"))


def _set_attribute(proto: onnx.ModelProto) -> None:
    proto.graph.node[0].attribute.add(name="group", i=1, type=onnx.AttributeProto.INT)


def _swap_input(proto: onnx.ModelProto) -> None:
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 7


@pytest.mark.parametrize(
    ("change", "part", "difference", "words"),
    [
        (lambda proto: proto.opset_import.__getitem__(0).__setattr__("version", 18), "facts",
         {"operator set ai.onnx": [20, 18]}, "operator set ai.onnx: 20 -> 18"),
        (_set_weight, "weights", {"removed": [], "added": [], "changed": ["v"]}, "weights that differ: 1 (v)"),
        (_set_attribute, "changed_nodes", ["first"], "nodes that differ: 1 (first)"),
        (_swap_input, "facts", {"input x": ["float[batch, 3, 8, 8]", "float[7, 3, 8, 8]"]}, "float[7, 3, 8, 8]"),
        (lambda proto: proto.graph.node[1].__setattr__("op_type", "Tanh"), "operators",
         {"Relu": [1, 0], "Tanh": [0, 1]}, "Tanh: 0 -> 1 nodes"),
        (lambda proto: proto.graph.node[2].__setattr__("name", "new"), "added_nodes", ["new"],
         "nodes only in edited.onnx: 1 (new)"),
    ],
)  # fmt: skip
def test_each_difference_is_told(
    model: Path, change: Callable[[onnx.ModelProto], object], part: str, difference: object, words: str
) -> None:
    base = _edited(model, lambda proto: proto.opset_import[0].__setattr__("version", 20))
    base = base.rename("base.onnx")
    other = _edited(base, change)
    record = _json("diff", base, other)
    assert record["same"] is False
    assert record[part] == difference
    result = invoke("diff", base, other)
    assert (result.exit_code, result.stderr) == (1, "")
    assert words in " ".join(result.stdout.split())


def test_two_plans_differ_in_their_totals_and_in_what_is_recomputed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    source = network("gpt")
    plans = [memonger.search_plan(source, device="none", strategy=strategy) for strategy in ("none", "cheap")]
    for plan, name in zip(plans, ("a.onnx", "b.onnx"), strict=True):
        plan.save(name)
    record = _json("diff", "a.onnx", "b.onnx")
    assert record["totals"]["arena_bytes"] == [plan.arena_bytes for plan in plans]
    assert record["totals"]["total_bytes"] == [plan.total_bytes for plan in plans]
    assert "parameter_bytes" not in record["totals"]
    assert record["recomputed"]["only_in_first"] == []
    again = {plans[1].graph.nodes[step].rpartition(".recompute")[0] for step in plans[1].recomputed}
    assert set(record["recomputed"]["only_in_second"]) == again
    assert (record["removed_nodes"], record["added_nodes"], record["changed_nodes"]) == ([], [], [])
    assert record["overhead"] == [0.0, plans[1].overhead]
    steps, nodes = record["first_other_step"].values()
    assert all(plan.graph.nodes[step] == node for plan, step, node in zip(plans, steps, nodes, strict=True))
    assert plans[0].graph.nodes[: steps[0]] == plans[1].graph.nodes[: steps[1]]
    text = _text("diff", "a.onnx", "b.onnx")
    assert f"recomputed only in b.onnx: {len(again)}" in text
    percent = f"{plans[1].arena_bytes / plans[0].arena_bytes - 1:+.1%}"
    assert percent in text


def test_trouble_has_a_status_of_its_own(model: Path) -> None:
    result = invoke("diff", model, "nowhere.onnx")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "nowhere.onnx: no such file" in result.stderr
