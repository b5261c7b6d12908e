"""Operators without a kernel in onnxruntime are their function bodies in portable plans, which it runs as planned."""

import onnx
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as native

import memonger
from memonger.lowering.lowered import _WITHOUT_KERNEL
from tests.support.networks import run_stock, same_bits, stock
from tests.support.stock import normal, parse

MODELS = {
    "HardSwish": "(float[N, 8] x) => (float[N, 8] y) { y = HardSwish(x) }",
    "Mish": "(float[N, 8] x) => (float[N, 8] y) { y = Mish(x) }",
    "GroupNormalization": "(float[N, 8] x) => (float[N, 8] y) <float[8] s = {1, 2, 3, 4, 5, 6, 7, 8}> "
    "{ y = GroupNormalization <num_groups = 2> (x, s, s) }",
    "CastLike": "(float[N, 8] x) => (double[N, 8] y) <double z = {1}> { y = CastLike(x, z) }",
    "CenterCropPad": "(float[N, 8] x) => (float[N, 10] y) <int64[1] s = {10}> "
    "{ y = CenterCropPad <axes = [1]> (x, s) }",
    "SoftmaxCrossEntropyLoss": "(float[N, 8] x) => (float[N] y) { i = ArgMax <axis = 1, keepdims = 0> (x) "
    'y = SoftmaxCrossEntropyLoss <reduction = "none"> (x, i) }',
    "SequenceMap": "(float[N, 8] x) => (float[M, 8] y) <float[8] w = {1, 2, 3, 4, 5, 6, 7, 8}, int64 one = {1}> "
    "{ s = SplitToSequence (x, one) q, t = SequenceMap <body = b (float[1, 8] e, float[8] v) => (float[1, 8] n, "
    "float[1, 8] r) { n = Neg(e) m = Mul(n, v) r = Add(m, w) }> (s, w) y = ConcatFromSequence <axis = 0> (t) }",
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sizes", [4, (1, 4)])
def test_portable_plans_have_the_bits_of_what_the_runtime_inlines(name: str, sizes: int | tuple[int, int]) -> None:
    model = parse(f"g {MODELS[name]}", opset=22)
    plan = memonger.search_plan(model, mode="inference", device="none", dims={"N": sizes})
    session = memonger.Session(plan)
    for rows in (4,) if isinstance(sizes, int) else sizes:
        feed = {"x": normal(rows, rows, 8)}
        assert same_bits(session.run(feed), run_stock(stock(model, "ORT_DISABLE_ALL"), feed))


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_a_deprecated_operator_runs_whose_body_the_runtime_inlines(device: str) -> None:
    text = "<float[2] s = {1, 2}> { y = GroupNormalization <num_groups = 2> (x, s, s) }"
    model, feed = parse(f"g (float[2, 8] x) => (float[2, 8] y) {text}", opset=18), {"x": normal(0, 2, 8)}
    session = memonger.Session(memonger.search_plan(model, mode="inference", device=device))
    assert same_bits(session.run(feed), run_stock(stock(model), feed))


def test_the_list_is_of_what_has_a_body_and_no_kernel() -> None:
    """The body of `SequenceMap` holds the node's own: it is a loop."""
    kernels = {each.op_name for each in native.get_all_opkernel_def() if each.domain == ""}
    bodies = {
        each.name
        for each in onnx.defs.get_all_schemas()
        if each.domain == "" and (each.has_function or each.has_context_dependent_function)
    }
    assert bodies - kernels - {"SequenceMap"} == _WITHOUT_KERNEL
