"""A model in loops keeps what it was made from, without weights that it holds itself."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

import memonger
from memonger.errors import PlanError
from memonger.ir.save import save_model
from memonger.loops.writer import with_loops
from memonger.model import original_model
from memonger.model.load import load, load_as_is
from memonger.tiling.axes import axes_of
from memonger.tiling.slices import Band, SliceStage
from tests.support.command_line import invoke
from tests.support.stock import normal, parse


def _original() -> onnx.ModelProto:
    model = parse(
        """g (float[n, 16] x) => (float[n, 16] y) {
            flat = Constant <value_ints = [-1, 16]> ()  a = MatMul (x, w)  b = Relu (a)  c = Add (b, bias)
            d = MatMul (c, w)  y = Reshape (d, flat)
        }""",
        opset=17,
    )
    arrays = {"w": normal(0, 16, 16), "bias": normal(1, 16)}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    model.doc_string, model.producer_name = "a model", "a tool"
    model.metadata_props.add(key="author", value="someone")
    model.graph.node[1].name = "first product"
    return model


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """The file in a loop of four slices that keeps its original, weights beside it."""
    loaded = load(_original(), batch=4).ir
    axes = axes_of(loaded, {"x": 0})
    made = with_loops(loaded, axes, [Band((SliceStage(0, len(axes.nodes), (0, 1, 2, 3, 4)),))])
    original_model.embed(made, load_as_is(_original()).ir)
    save_model(made, tmp_path / "small.onnx", limit=0)
    return tmp_path / "small.onnx"


def test_unplan_gives_the_original_back(small: Path) -> None:
    assert "Scan" in {node.op_type for node in onnx.load(small).graph.node}
    done = invoke("unplan", small, "-o", small.with_name("again.onnx"))
    assert done.exit_code == 0, done.output
    again, was = onnx.load(small.with_name("again.onnx")), _original()
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in again.graph.initializer}
    assert {name: array.tobytes() for name, array in arrays.items()} == {
        tensor.name: numpy_helper.to_array(tensor).tobytes() for tensor in was.graph.initializer
    }
    for model in (again, was):
        for node in model.graph.node:
            node.ClearField("domain")  # empty, or left out
    assert list(again.graph.node) == list(was.graph.node)
    assert (again.graph.input, again.graph.output) == (was.graph.input, was.graph.output)
    assert (again.doc_string, again.producer_name) == (was.doc_string, was.producer_name)
    assert list(again.metadata_props) == list(was.metadata_props)


def test_a_weight_is_in_the_file_once(small: Path) -> None:
    text = {entry.key: entry.value for entry in onnx.load(small, load_external_data=False).metadata_props}
    message = onnx.ModelProto.FromString(original_model.from_text(text[original_model.KEY]))
    external = [tensor for tensor in message.graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL]
    assert [tensor.name for tensor in external] == []  # 16 × 16 float32 are 1 KiB: small
    large = _original()
    large.graph.initializer[0].CopyFrom(numpy_helper.from_array(normal(0, 16, 20), "w"))
    made = load_as_is(large).ir
    original_model.embed(made, load_as_is(large).ir)
    message = onnx.ModelProto.FromString(original_model.from_text(made.metadata_props[original_model.KEY]))
    assert [t.name for t in message.graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL] == ["w"]
    found = original_model.extract(made, "it")
    assert found is not None
    weight = found.graph.initializers["w"].const_value
    assert weight is not None
    np.testing.assert_array_equal(weight.numpy(), normal(0, 16, 20))
    made.graph.initializers["w"].const_value = ir.tensor(normal(3, 16, 20), name="w")
    with pytest.raises(PlanError, match=r"it: the model in its metadata 'memonger\.original' is malformed: .* no more"):
        original_model.extract(made, "it")


def test_weights_of_equal_bytes_keep_their_types() -> None:
    original = parse("g (float[512] x) => (float[512] y) { a = Add (x, w)  k = Cast <to = 1> (i)  y = Add (a, k) }")
    zeros = {"w": np.zeros(512, np.float32), "i": np.zeros(512, np.int32)}
    original.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in zeros.items())
    made = load_as_is(original).ir
    original_model.embed(made, load_as_is(original).ir)
    found = original_model.extract(made, "it")
    assert found is not None
    there = {name: value.const_value for name, value in found.graph.initializers.items()}
    assert {name: one.numpy().dtype for name, one in there.items() if one} == {
        name: array.dtype for name, array in zeros.items()
    }


def test_a_matrix_that_is_held_transposed_is_found() -> None:
    original = _original()
    original.graph.initializer[0].CopyFrom(numpy_helper.from_array(normal(0, 16, 20), "w"))
    made = load_as_is(original).ir
    made.graph.initializers["w"].const_value = ir.tensor(normal(0, 16, 20).T.copy(), name="w.transposed")
    original_model.embed(made, load_as_is(original).ir)
    assert len(made.metadata_props[original_model.KEY]) < 16 * 20 * 4
    found = original_model.extract(made, "it")
    assert found is not None
    weight = found.graph.initializers["w"].const_value
    assert weight is not None
    np.testing.assert_array_equal(weight.numpy(), normal(0, 16, 20))


def test_what_holds_other_weights_keeps_no_original(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(original_model, "MOST", 1000)
    monkeypatch.setattr(original_model, "SMALL", 1000)
    made, other = load_as_is(_original()).ir, load_as_is(_original()).ir
    other.graph.initializers["w"].const_value = ir.tensor(normal(3, 16, 16), name="w")
    original_model.embed(made, other)
    assert original_model.KEY not in made.metadata_props


@pytest.mark.parametrize("text", ["", "no base64 .", "AAAA", memonger.__name__])
def test_a_malformed_original_is_refused(text: str) -> None:
    made = load_as_is(_original()).ir
    made.metadata_props[original_model.KEY] = text
    with pytest.raises(PlanError, match=r"the model in its metadata 'memonger\.original' is malformed"):
        original_model.extract(made, "it")
