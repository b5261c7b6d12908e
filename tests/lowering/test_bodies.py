"""Operators without a kernel in onnxruntime are their function bodies in portable plans, which it runs as planned."""

from collections import defaultdict

import onnx
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as native

import memonger
from memonger.lowering.lowered import _WITHOUT_KERNEL
from tests.support.networks import run_stock, same_bits, stock
from tests.support.stock import normal, parse

LAST = 2**31 - 1  # a kernel of versions up to this is for the first of them alone

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
    "Attention": "(float[N, 8] x) => (float[N, 8] y) { s = Constant<value_ints = [0, 2, 2, 2]>() r = Reshape(x, s) "
    "a = Attention <left_window_size = 1> (r, r, r) y = Flatten(a) }",
    "ReduceLogSumExp": "(float[N, 8] x) => (float[N, 1] y) { k = Constant<value_ints = [1]>() "
    "y = ReduceLogSumExp(x, k) }",
    "in branches": "(float[N, 8] x) => (float[N, 8] y) <float z = {0}> { m = ReduceSum <keepdims = 0> (x) "
    "c = Greater(m, z) y = If <then_branch = t () => (float[N, 8] a) { h = HardSwish(x) a = Neg(h) }, "
    "else_branch = e () => (float[N, 8] b) { b = Mish(x) }> (c) }",
    "SequenceMap": "(float[N, 8] x) => (float[M, 8] y) <float[8] w = {1, 2, 3, 4, 5, 6, 7, 8}, int64 one = {1}> "
    "{ s = SplitToSequence (x, one) q, t = SequenceMap <body = b (float[1, 8] e, float[8] v) => (float[1, 8] n, "
    "float[1, 8] r) { n = Neg(e) m = Mul(n, v) r = Add(m, w) }> (s, w) y = ConcatFromSequence <axis = 0> (t) }",
}


OPSETS = {"Attention": 25, "ReduceLogSumExp": 28}  # of the first versions without a kernel


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sizes", [4, (1, 4)])
def test_portable_plans_have_the_bits_of_what_the_runtime_inlines(name: str, sizes: int | tuple[int, int]) -> None:
    model = parse(f"g {MODELS[name]}", opset=OPSETS.get(name, 22))
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
    kernels, bodies = defaultdict[str, set[tuple[int, int]]](set), defaultdict[str, dict[int, bool]](dict)
    for kernel in native.get_all_opkernel_def():
        if kernel.domain == "" and kernel.provider == "CPUExecutionProvider":
            kernels[kernel.op_name].add(kernel.version_range)
    for each in onnx.defs.get_all_schemas_with_history():
        if each.domain == "":
            bodies[each.name][each.since_version] = each.has_function or each.has_context_dependent_function
    found = {"SequenceMap": 1}
    for name, versions in bodies.items():
        have = {v for v in versions if any(v == a or a <= v <= b < LAST for a, b in kernels[name])}
        if versions[max(versions)] and max(versions) not in have:
            found[name] = min(v for v in versions if v > max(have)) if have else 1
    assert found == {"SequenceMap": 1, **_WITHOUT_KERNEL}
