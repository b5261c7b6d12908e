"""The CPU form of a training model: the same bits with fewer Transposes."""

from collections import Counter
from functools import partial

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import memonger
from memonger.lowering.cpu import fuse_products
from tests.support import networks
from tests.support.passes import after

INEXACT = partial(fuse_products, exact=False)


def _attention(rows: int, width: int) -> memonger.Model:
    text = f"""<ir_version: 10, opset_import: ["": 20]>
    g (float[2,3,{rows},{width}] q, float[2,3,{rows},{width}] k, float[2,3,{rows},{width}] v)
    => (float[2,3,{rows},{width}] y)
    {{ t = Transpose <perm=[0,1,3,2]> (k) s = MatMul(q, t) p = Softmax(s) y = MatMul(p, v) }}"""
    return memonger.differentiate(onnx.parser.parse_model(text), wrt=["q", "k", "v"])


def _run(model: ir.Model) -> list[np.ndarray]:
    proto = ir.to_proto(model)
    generator = np.random.default_rng(0)
    feeds = {
        v.name: generator.standard_normal([d.dim_value for d in v.type.tensor_type.shape.dim]).astype(np.float32)
        for v in proto.graph.input
    }
    return networks.stock(proto, "ORT_DISABLE_ALL").run(None, feeds)


@pytest.mark.parametrize(("rows", "width", "left"), [(16, 16, 0), (5, 33, 0), (128, 128, 0), (130, 130, 2)])
def test_products_of_transposed_stacks_give_the_same_bits(rows: int, width: int, left: int) -> None:
    model = _attention(rows, width)
    written = after(fuse_products, model)
    found = Counter(node.op_type for node in written.graph)
    assert found["FusedMatMul"] > 0
    assert found["Transpose"] == left
    assert [v.name for v in written.graph.outputs] == [v.name for v in model.graph.outputs]
    for mine, theirs in zip(_run(written.ir), _run(model.ir), strict=True):
        np.testing.assert_array_equal(mine.view(np.uint32), theirs.view(np.uint32))


def test_stacks_of_small_matrices_are_transposed_by_products() -> None:
    text = """<ir_version: 10, opset_import: ["": 20]>
    g (float[2,32,6,5] x, float[32,8,3,3] w) => (float[2,32,6,5] y)
    { y = Conv <group=4, pads=[1,1,1,1]> (x, w) }"""
    model = memonger.differentiate(onnx.parser.parse_model(text), wrt=["x", "w"])
    written = after(INEXACT, model)
    found = Counter(node.op_type for node in written.graph)
    assert found["FusedMatMul"] == 2  # 32 matrices of 9 x 8, and the turned weight; of images 8 of 8 x 30 stay
    assert sum(node.op_type == "FusedMatMul" for node in after(fuse_products, model).graph) == 1
    for mine, theirs in zip(_run(written.ir), _run(model.ir), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_long_sum_over_a_left_operand_is_transposed_where_last_bits_may_differ() -> None:
    written = after(INEXACT, _attention(130, 130))
    assert sum(node.op_type == "Transpose" for node in written.graph) == 0


def test_a_product_of_single_rows_stays() -> None:
    model = _attention(1, 4)
    assert after(fuse_products, model) is model


def test_a_transposed_stack_that_is_read_otherwise_stays() -> None:
    text = """<ir_version: 10, opset_import: ["": 20]>
    g (float[2,4,3] a, float[2,5,3] b) => (float[2,4,5] y, float[2,3,5] z)
    { t = Transpose <perm=[0,2,1]> (b) y = MatMul(a, t) z = Neg(t) }"""
    model = memonger.differentiate(onnx.parser.parse_model(text), wrt=["b"])
    writer = {v.name: node for node in after(fuse_products, model).graph for v in node.outputs}
    assert writer["y"].op_type == "MatMul"
    assert writer["t"].op_type == "Transpose"


def test_attention_is_planned_without_a_transpose() -> None:
    plan = memonger.search_plan(_attention(16, 16), mode="training", device="cpu")
    kinds = Counter(node.op_type for node in plan.model.graph)
    assert kinds["FusedMatMul"] == 4
    assert not kinds["Transpose"]


def test_rows_are_added_up_with_the_same_bits_in_each_run() -> None:
    text = """<ir_version: 10, opset_import: ["": 20]>
    g (float[300,64] table, int64[40,50] words) => (float[40,50,64] y) { y = Gather(table, words) }"""
    model = memonger.differentiate(onnx.parser.parse_model(text), wrt=["table"])
    written = after(fuse_products, model)
    counts = Counter(node.op_type for node in written.graph)
    assert counts["ScatterND"] == 8
    assert counts["ScatterElements"] == counts["Expand"] == 0
    generator = np.random.default_rng(0)
    feeds = {
        "table": np.zeros((300, 64), np.float32),
        "words": generator.integers(-2, 3, (40, 50)),  # each many times, some from the end
        "y.grad": generator.standard_normal((40, 50, 64)).astype(np.float32),
    }
    (expected,), *found = (_gradients(m, feeds, runs) for m, runs in ((model.ir, 1), (written.ir, 5)))
    for gradient in found[0]:
        np.testing.assert_array_equal(gradient, expected)


def _gradients(model: ir.Model, feeds: dict[str, np.ndarray], runs: int) -> list[np.ndarray]:
    session = networks.stock(ir.to_proto(model), "ORT_DISABLE_ALL", threads=4)
    return [session.run(["table.grad"], feeds)[0] for _ in range(runs)]


@pytest.mark.parametrize("function", ["Relu", "Sigmoid", "Tanh"])
def test_functions_of_products_give_the_same_bits(function: str) -> None:
    text = f"""<ir_version: 10, opset_import: ["": 20]>
    g (float[7,33] a, float[40,33] b, float[40] c) => (float[7,40] y)
    {{ p = Gemm <transB=1> (a, b, c) y = {function}(p) }}"""
    model = memonger.differentiate(onnx.parser.parse_model(text), wrt=["a", "b", "c"])
    written = after(fuse_products, model)
    counts = Counter(node.op_type for node in written.graph)
    assert counts["FusedGemm"] == 1
    assert counts[function] == 0
    for mine, theirs in zip(_run(written.ir), _run(model.ir), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_product_that_is_read_otherwise_keeps_its_result() -> None:
    text = """<ir_version: 10, opset_import: ["": 20]>
    g (float[7,33] a, float[40,33] b) => (float[7,40] y, float[7,40] p)
    { p = Gemm <transB=1> (a, b) y = Tanh(p) }"""
    model = memonger.differentiate(onnx.parser.parse_model(text), wrt=["a"])
    assert after(fuse_products, model) is model


@pytest.mark.parametrize(("group", "inputs", "outputs"), [(1, 5, 64), (4, 12, 8)])
def test_turned_weights_are_read_as_they_stand_with_the_same_bits(group: int, inputs: int, outputs: int) -> None:
    text = f"""<ir_version: 10, opset_import: ["": 20]>
    g (float[2,{inputs},6,5] x, float[{outputs},{inputs // group},3,3] w) => (float[2,{outputs},6,5] y)
    {{ y = Conv <group={group}, pads=[1,1,1,1]> (x, w) }}"""
    model = memonger.differentiate(onnx.parser.parse_model(text), wrt=["x"])
    written = after(fuse_products, model)
    (turned,) = (node for node in written.graph if node.op_type == "FusedMatMul")
    assert turned.attributes["transBatchA"].value == 1
    moved = [tuple(node.attributes["perm"].value) for node in written.graph if node.op_type == "Transpose"]
    assert moved == ([(1, 0, 2)] if group > 1 else [])  # whole matrices
    for mine, theirs in zip(_run(written.ir), _run(model.ir), strict=True):
        np.testing.assert_array_equal(mine.view(np.uint32), theirs.view(np.uint32))
