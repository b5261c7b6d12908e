"""Convolutions of a training step as the CPU runs them."""

import json

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

import memonger
from memonger.devices import CPU
from memonger.ir.marks import TURNED_WEIGHT, DepthwiseWeight
from memonger.ir.model import Model
from memonger.lowering.cpu_convolutions import DOMAIN, block_convolutions, block_size
from memonger.lowering.device_form import forms
from tests.support import networks
from tests.support.passes import after

BLOCK = block_size()

Sizes = tuple[int, int, int, int, int]  # batch, channels, side, kernel, stride


def forward(sizes: Sizes, bias: bool) -> onnx.ModelProto:
    batch, channels, side, kernel, stride = sizes
    pad = kernel // 2
    out = (side + 2 * pad - kernel) // stride + 1
    given, more = (f", FLOAT[{channels}] b", ", b") if bias else ("", "")
    text = f"""<ir_version: 10, opset_import: ["": 20]>
        g (FLOAT[{batch},{channels},{side},{side}] x, FLOAT[{channels},1,{kernel},{kernel}] w{given})
        => (FLOAT[{batch},{channels},{out},{out}] y) {{
            y = Conv <group={channels}, pads=[{pad},{pad},{pad},{pad}], strides=[{stride},{stride}]> (x, w{more}) }}"""
    return onnx.parser.parse_model(text.replace("FLOAT", "float"))


def dense(batch: int, channels: int, outputs: int, side: int, kernel: int, stride: int, pad: int) -> onnx.ModelProto:
    out = (side + 2 * pad - kernel) // stride + 1
    text = f"""<ir_version: 10, opset_import: ["": 20]>
        g (float[{batch},{channels},{side},{side}] x,
           float[{outputs},{channels},{kernel},{kernel}] w, float[{outputs}] b)
        => (float[{batch},{outputs},{out},{out}] y) {{
            y = Conv <pads=[{pad},{pad},{pad},{pad}], strides=[{stride},{stride}]> (x, w, b) }}"""
    return onnx.parser.parse_model(text)


def results(model: Model) -> dict[str, np.ndarray]:
    session = networks.stock(ir.to_proto(model.ir), "ORT_DISABLE_ALL")
    generator = np.random.default_rng(0)
    feeds = {v.name: generator.standard_normal(v.shape).astype(np.float32) for v in session.get_inputs()}
    return networks.run_stock(session, feeds)


def blocked_operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph if node.domain == DOMAIN]


@pytest.mark.skipif(BLOCK == 1, reason="this machine has no blocked layout")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("sizes", "convolutions"),
    [
        ((2, 32, 9, 3, 1), 3),
        ((2, 32, 9, 3, 2), 3),
        ((1, 16, 10, 5, 2), 3),
        ((2, 48, 4, 7, 1), 3),
        ((2, 32, 14, 3, 5), 3),  # no window reads the image's end
        ((2, 32, 13, 3, 3), 2),  # with zeros between, dy is larger than the image: its gradient stays
        ((16, 3, 8, 3, 1), 1),  # only batch and channels together fill blocks
        ((3, 5, 8, 3, 1), 0),
    ],
)
def test_numbers_are_those_of_the_rules(sizes: Sizes, convolutions: int, bias: bool) -> None:
    model = memonger.differentiate(forward(sizes, bias), wrt=["x", "w"])
    written = after(block_convolutions, model)
    assert blocked_operators(written.ir).count("Conv") == convolutions
    expected, found = results(model), results(written)
    assert expected.keys() == found.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, atol=2e-6 * np.abs(array).max(), rtol=0, err_msg=name)


@pytest.mark.skipif(BLOCK == 1, reason="this machine has no blocked layout")
@pytest.mark.parametrize(
    ("model", "convolutions"),
    [
        (dense(2, 32, 48, 9, 3, 1, 1), 2),
        (dense(2, 32, 48, 9, 5, 1, 2), 2),
        (dense(2, 32, 48, 9, 3, 2, 1), 1),  # at strides the image's gradient isn't a convolution
        (dense(2, 3, 32, 16, 7, 2, 3), 1),  # an image of fewer channels than a block stays as it is
        (dense(2, 32, 3, 16, 3, 1, 1), 1),  # and so does dy, whose weight is turned as the rule turned it
        (dense(2, 32, 20, 9, 3, 1, 1), 0),  # neither a block nor less than one
        (dense(2, 32, 48, 9, 1, 1, 0), 0),  # a product of matrices
        (dense(1, 512, 16, 3, 3, 1, 1), 1),  # of nine windows 16 outputs, but not a gradient of 512
    ],
)
def test_convolutions_of_all_channels_have_the_numbers_of_the_rules(model: onnx.ModelProto, convolutions: int) -> None:
    trained = memonger.differentiate(model, wrt=["x", "w", "b"])
    written = after(block_convolutions, trained)
    assert blocked_operators(written.ir).count("Conv") == convolutions
    for name, array in results(trained).items():
        np.testing.assert_allclose(results(written)[name], array, atol=4e-6 * np.abs(array).max(), rtol=0, err_msg=name)


@pytest.mark.skipif(BLOCK == 1, reason="this machine has no blocked layout")
@pytest.mark.parametrize("mark", ["", "x", "no such value"])
def test_a_turned_weight_that_does_not_fit_is_turned_as_written(mark: str) -> None:
    model = memonger.differentiate(dense(2, 32, 48, 9, 3, 1, 1), wrt=["x"])
    node = next(n for n in model.graph if TURNED_WEIGHT in n.metadata_props)
    node.metadata_props[TURNED_WEIGHT] = mark
    found, expected = results(after(block_convolutions, model))["x.grad"], results(model)["x.grad"]
    np.testing.assert_allclose(found, expected, atol=4e-6 * np.abs(expected).max(), rtol=0)


@pytest.mark.skipif(BLOCK == 1, reason="this machine has no blocked layout")
def test_a_depthwise_convolution_reads_another_convolution() -> None:
    text = """<ir_version: 10, opset_import: ["": 20]>
        g (float[2,32,10,10] x, float[32,32,3,3] v, float[32,1,3,3] w, float[32,32,3,3] u) => (float[2,32,10,10] y) {
            a = Conv <pads=[1,1,1,1]> (x, v)
            b = Conv <group=32, pads=[1,1,1,1]> (a, w)
            y = Conv <pads=[1,1,1,1]> (b, u) }"""
    trained = memonger.differentiate(onnx.parser.parse_model(text), wrt=["x", "u", "v", "w"])
    written = after(block_convolutions, trained).clone()  # a clone holds what reads what is in no graph to be wrong
    assert blocked_operators(written.ir).count("Conv") == 7
    for name, array in results(trained).items():
        np.testing.assert_allclose(results(written)[name], array, atol=4e-6 * np.abs(array).max(), rtol=0, err_msg=name)


@pytest.mark.parametrize(
    ("side", "kernel", "stride", "pad", "products"),
    [(4, 3, 2, 1, 1), (5, 3, 2, 1, 1), (4, 2, 2, 0, 1), (5, 1, 2, 0, 1), (6, 1, 2, 0, 1), (9, 3, 2, 1, 0)],
)
def test_small_images_of_many_channels_are_products(
    side: int, kernel: int, stride: int, pad: int, products: int
) -> None:
    out = (side + 2 * pad - kernel) // stride + 1
    text = f"""<ir_version: 10, opset_import: ["": 20]>
        g (float[2,3,{side},{side}] x, float[40,3,{kernel},{kernel}] w) => (float[2,40,{out},{out}] y) {{
            y = Conv <pads=[{pad},{pad},{pad},{pad}], strides=[{stride},{stride}]> (x, w) }}"""
    model = memonger.differentiate(onnx.parser.parse_model(text), wrt=["x"])
    written = after(block_convolutions, model)
    assert [node.op_type for node in written.graph].count("Col2Im") == products
    for name, array in results(model).items():
        found = results(written)[name]
        np.testing.assert_allclose(found, array, atol=2e-6 * np.abs(array).max(), rtol=0, err_msg=name)


def test_a_forward_model_and_one_without_convolutions_stay() -> None:
    model = memonger.load(forward((2, 32, 9, 3, 1), False))
    assert block_convolutions not in forms(model, CPU, "rewrite")
    dense = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20]> g (float[2,3] a, float[3,2] b) => (float[2,2] y) { y = MatMul(a, b) }'
    )
    trained = memonger.differentiate(dense, wrt=["b"])
    assert after(block_convolutions, trained) is trained


@pytest.mark.parametrize("mark", ["", "[]", '{"x": "x"}', None])
def test_a_mark_that_does_not_fit_is_no_reason_to_fail(mark: str | None) -> None:
    model = memonger.differentiate(forward((2, 32, 9, 3, 1), False), wrt=["w"])
    node = next(n for n in model.graph if DepthwiseWeight.KEY in n.metadata_props)
    if mark is None:  # names another image
        fields = json.loads(node.metadata_props[DepthwiseWeight.KEY])
        mark = json.dumps({**fields, "x": "w"})
    node.metadata_props[DepthwiseWeight.KEY] = mark
    np.testing.assert_array_equal(results(after(block_convolutions, model))["w.grad"], results(model)["w.grad"])


@pytest.mark.skipif(BLOCK == 1, reason="this machine has no blocked layout")
def test_plans_run_it_unless_a_level_is_asked_for() -> None:
    model = memonger.differentiate(forward((2, 32, 9, 3, 1), False), wrt=["x", "w"])
    plan = memonger.search_plan(model, device="cpu", mode="training", strategy="none")
    assert blocked_operators(plan.model)
    generator = np.random.default_rng(0)
    feeds = {
        str(v.name): generator.standard_normal(v.shape.numpy()).astype(np.float32) for v in plan.model.graph.inputs
    }
    found = memonger.Session(plan).run(feeds)
    stock = memonger.search_plan(model, device="cpu", mode="training", strategy="none", level="disable")
    assert not blocked_operators(stock.model)
    for name, array in memonger.Session(stock).run(feeds).items():
        np.testing.assert_allclose(found[name], array, atol=2e-6 * np.abs(array).max(), rtol=0, err_msg=name)


@pytest.mark.skipif(BLOCK == 1, reason="this machine has no blocked layout")
@pytest.mark.parametrize(("group", "inner"), [(32, 1), (1, 32)])
def test_what_is_recomputed_has_the_same_bits(group: int, inner: int) -> None:
    layers = "".join(
        f"a{i} = Conv <group={group}, pads=[1,1,1,1]> (b{i}, w{i}) b{i + 1} = Tanh(a{i}) " for i in range(6)
    )
    weights = ", ".join(f"float[32,{inner},3,3] w{i}" for i in range(6))
    text = f"""<ir_version: 10, opset_import: ["": 20]> g (float[2,32,8,8] b0, {weights}) => (float l) {{
        {layers} l = ReduceSumSquare <keepdims=0> (b6) }}"""
    model = memonger.differentiate(onnx.parser.parse_model(text), loss="l", wrt=["w*"])
    kept, recomputed = (
        memonger.search_plan(model, device="cpu", mode="training", strategy=strategy) for strategy in ("none", "log")
    )
    generator = np.random.default_rng(0)
    feeds = {v.name: generator.standard_normal(v.shape.numpy()).astype(np.float32) for v in kept.model.graph.inputs}
    found = memonger.Session(recomputed).run(feeds)
    assert blocked_operators(recomputed.model).count("Conv") > blocked_operators(kept.model).count("Conv")
    for name, array in memonger.Session(kept).run(feeds).items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
