"""Models that fuzzers found: each was a traceback, or a file that onnx's checker refuses."""

from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

import memonger
from memonger.model import forward_model
from tests.support.stock import parse


@pytest.mark.parametrize("shape", ["9,8", "9,k", "0,8"])
def test_an_output_of_a_size_that_only_the_run_can_tell_keeps_its_rank(tmp_path: Path, shape: str) -> None:
    model = parse(
        f"g (int32 n, int32 l, int32 r, float a, float b) => (float[{shape}] y)"
        " { y = MelWeightMatrix(n, l, r, a, b) }",
        opset=17,
    )
    onnx.checker.check_model(model)
    memonger.search_plan(model, mode="inference", device="none").save(tmp_path / "planned.onnx")
    planned = onnx.load(tmp_path / "planned.onnx")
    onnx.checker.check_model(planned)
    assert len(planned.graph.output[0].type.tensor_type.shape.dim) == 2


def test_a_forward_model_that_cannot_be_written_is_malformed() -> None:
    model = ir.from_proto(parse("g (float[2] x) => (float[2] y) { y = Relu(x) }", opset=18))
    model.graph[0].attributes["alpha"] = ir.Attr("alpha", ir.AttributeType.UNDEFINED, 1)
    with pytest.raises(memonger.PlanError, match=r"g: the forward model in its metadata .* is malformed: "):
        forward_model.packed(model)


@pytest.mark.parametrize("in_function", [False, True])
@pytest.mark.parametrize("kind", [onnx.TensorProto.STRING, onnx.TensorProto.UNDEFINED])
def test_what_has_no_size_cannot_be_external_data(tmp_path: Path, in_function: bool, kind: int) -> None:
    model = parse("g (float[2] x) => (float[2] y) { y = Relu(x) }", opset=18)
    tensor = onnx.TensorProto(name="words", data_type=kind, dims=[2], data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="words.bin")
    (tmp_path / "words.bin").write_bytes(bytes(8))
    if in_function:
        constant = onnx.helper.make_node("Constant", [], ["c"], value=tensor)
        model.functions.append(onnx.helper.make_function("f", "f", [], ["c"], [constant], model.opset_import))
    else:
        model.graph.initializer.append(tensor)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(memonger.LoadError, match="words"):
        memonger.load(tmp_path / "model.onnx")
    with pytest.raises(memonger.LoadError, match="words"):
        memonger.load((model, {"words.bin": bytes(8)}))
