"""Nodes of 16 bits on the CPU: the roundings that the model says, which stock onnxruntime leaves out."""

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

import memonger
from memonger.errors import PlanError
from memonger.lowering.cpu_narrow import widen_narrow_nodes
from memonger.model.load import load
from tests.support import networks
from tests.support.passes import after

TYPES: dict[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.mark.parametrize("kind", TYPES)
def test_results_are_rounded_as_the_model_says(kind: str) -> None:
    """Elementwise, where there is one right rounding; moved elements stay in 16 bits."""
    number = int(onnx.helper.np_dtype_to_tensor_dtype(np.dtype(TYPES[kind])))
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]>
        g (float[5,7] x) => (float[7,10] y, {kind}[7,5] t) {{
            a = Cast<to={number}>(x)
            b = Mul(a, a)  c = Add(b, a)  d = Mul(c, third)  e = Relu(d)
            t = Transpose(e)  f = Concat<axis=1>(t, t)  y = Cast<to=1>(f)
        }}"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0.333, TYPES[kind]), "third"))
    feeds = {"x": np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)}
    written = after(widen_narrow_nodes, load(model))
    (found,) = networks.stock(written.proto, "ORT_DISABLE_ALL").run(["y"], feeds)
    wanted = ReferenceEvaluator(model).run(["y"], feeds)[0]
    np.testing.assert_array_equal(found, wanted)
    types = {node.op_type: node.outputs[0].dtype for node in written.graph}
    assert {types["Transpose"].name.lower(), types["Concat"].name.lower()} == {kind}  # type: ignore[union-attr]
    assert {types[name].name for name in ("Mul", "Add", "Relu")} == {"FLOAT"}  # type: ignore[union-attr]


def test_a_model_of_float32_is_returned_as_it_is() -> None:
    model = load(
        onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 20]>
        g (float[2] x) => (float[2] y) { y = Relu(x) }""")
    )
    assert after(widen_narrow_nodes, model) is model


def test_bfloat16_at_another_level_says_which_runs() -> None:
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 20]>
        g (bfloat16[2] x) => (bfloat16[2] y) { a = Tanh(x) y = Tanh(a) }""")
    with pytest.raises(PlanError, match="next to no kernels in bfloat16: level='rewrite' computes in float32"):
        memonger.search_plan(model, device="cpu", level="disable")
    x = np.array([0.5, -1], ml_dtypes.bfloat16)
    (y,) = memonger.Session(memonger.search_plan(model, device="cpu", level="rewrite")).run({"x": x}).values()
    np.testing.assert_array_equal(y, ReferenceEvaluator(model).run(None, {"x": x})[0])


def test_a_portable_plan_in_16_bits_says_where_it_does_not_run() -> None:
    """Nodes that compute nothing run in any type."""
    text = """<ir_version: 10, opset_import: ["": 20]>
        g (float16[2,3] x) => (float16[3,2] y) { t = Transpose<perm=[1,0]>(x)  y = OP(t) }"""
    computing, moving = (
        memonger.search_plan(onnx.parser.parse_model(text.replace("OP", op)), device="none", mode="inference")
        for op in ("Relu", "Identity")
    )
    assert any("(Relu) computes in 16 bits" in note and "device='cpu'" in note for note in computing.notes)
    x = {"x": np.ones((2, 3), np.float16)}
    with pytest.raises(memonger.SessionError, match="no kernels"):
        memonger.Session(computing).run(x)
    assert not any("16 bits" in note for note in moving.notes)
    memonger.Session(moving).run(x)


def test_what_a_product_reads_transposed_is_cast_before() -> None:
    """Else nothing of memonger's reads it as it lies, and onnxruntime's optimizer ends the process (1.31.1)."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 20]>
        g (float16[2,3,4] x, float16[2,3,5] z) => (float16[2,4,5] y) {
            t = Transpose<perm=[0,2,1]>(x)  y = MatMul(t, z)
        }""")
    written = after(widen_narrow_nodes, load(model))
    (transpose,) = [node for node in written.graph if node.op_type == "Transpose"]
    assert transpose.outputs[0].dtype == ir.DataType.FLOAT
    assert [reader.op_type for reader, _ in transpose.outputs[0].uses()] == ["MatMul"]
