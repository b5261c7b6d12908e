"""What is written out for CUDA is the same model: run on the CPU, beside the one it was made from, and float64."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

import memonger
import models
from memonger import cuda_form, marks
from memonger.cuda_form import normalization, rules
from memonger.gradients import random
from memonger.gradients.emitter import Emitter
from tests.gradient_checks import Arrays, parse, run

REFUSED = {"BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Celu", "LpNormalization", "Mean"}
"""Operators that onnxruntime's CUDA provider has no kernel for (1.31.1)."""


def written(model: onnx.ModelProto | str) -> onnx.ModelProto:
    """What is written out of a model, checked: a valid one that the provider runs, with the outputs' names."""
    source = parse(model, "float", 20) if isinstance(model, str) else model
    made = ir.to_proto(cuda_form.write_out(memonger.load(source)).ir)
    onnx.checker.check_model(made, full_check=True)
    assert [v.name for v in made.graph.output] == [v.name for v in source.graph.output]
    assert not list(unsupported(made))
    names = [node.name for node in made.graph.node if node.name]
    assert len(names) == len(set(names))
    return made


def unsupported(model: onnx.ModelProto) -> Iterator[str]:
    """The nodes that the CUDA provider would refuse or leave to the CPU."""
    for node in model.graph.node:
        settings = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type in REFUSED or (node.op_type == "BatchNormalization" and settings.get("training_mode")):
            yield node.name
        if node.op_type == "LRN" and settings["size"] % 2 == 0:
            yield node.name
        if node.op_type == "ConvTranspose":
            pads, extra = settings.get("pads", []), settings.get("output_padding", [])
            strides = settings.get("strides", [1] * len(extra))
            if pads[: len(pads) // 2] != pads[len(pads) // 2 :] or "output_shape" in settings:
                yield node.name
            if settings.get("auto_pad", b"NOTSET").startswith(b"SAME") or any(map(int.__ge__, extra, strides)):
                yield node.name


def assert_close(found: np.ndarray, wanted: np.ndarray, tolerance: float) -> None:
    """Relative to the largest number, or to 1 where that is below."""
    assert found.shape == wanted.shape
    error = np.abs(found.astype(np.float64) - wanted).max(initial=0.0) / max(1.0, np.abs(wanted).max(initial=0.0))
    assert error <= tolerance, f"off by {error}"


# BatchNormalization.

SHAPES = [(4, 3), (1, 2, 5), (2, 3, 4), (2, 3, 4, 5), (1, 3, 4, 5), (2, 3, 2, 3, 4), (3, 2, 1, 1)]


def batch_normalization(shape: tuple[int, ...], outputs: str, settings: str) -> str:
    dims, c = ", ".join(map(str, shape)), shape[1]
    given = outputs.replace("nm", f"FLOAT[{c}] nm").replace("nv", f"FLOAT[{c}] nv").replace("y", f"FLOAT[{dims}] y")
    return (
        f"g (FLOAT[{dims}] x, FLOAT[{c}] s, FLOAT[{c}] b, FLOAT[{c}] m, FLOAT[{c}] v) => ({given}) "
        f"{{ {outputs} = BatchNormalization <training_mode=1, {settings}> (x, s, b, m, v) }}"
    )


def normalization_feeds(shape: tuple[int, ...], dtype: Any = np.float32, ratio: float = 0.0) -> Arrays:
    generator = np.random.default_rng(0)
    feeds = {"x": generator.standard_normal(shape) + ratio}
    feeds |= {name: generator.uniform(0.5, 2.0, shape[1]) for name in "sbmv"}
    return {name: array.astype(dtype) for name, array in feeds.items()}


def batch_statistics(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    axes = tuple(axis for axis in range(x.ndim) if axis != 1)
    wide = x.astype(np.float64)
    return wide.mean(axes), wide.var(axes)


def normalized(feeds: Arrays, epsilon: float) -> np.ndarray:
    x, s, b = (feeds[name].astype(np.float64) for name in "xsb")
    mean, variance = batch_statistics(x)
    column = (-1, *[1] * (x.ndim - 2))
    scale = s / np.sqrt(variance + epsilon)
    return np.asarray((x - mean.reshape(column)) * scale.reshape(column) + b.reshape(column))


@pytest.fixture(params=["two passes", "from images"])
def statistics(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models too by either form of the statistics."""
    monkeypatch.setattr(normalization, "LARGE", 1 if request.param == "from images" else 1 << 40)


@pytest.mark.usefixtures("statistics")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("momentum", [0.0, 0.75, 1.0])
def test_batch_normalization_is_what_the_standard_says(shape: tuple[int, ...], momentum: float) -> None:
    text = batch_normalization(shape, "y, nm, nv", f"momentum={momentum}, epsilon=0.01")
    feeds = normalization_feeds(shape)
    found = run(written(text), feeds)
    mean, variance = batch_statistics(feeds["x"])
    assert_close(found["y"], normalized(feeds, 0.01), 1e-6)
    assert_close(found["nm"], feeds["m"].astype(np.float64) * momentum + mean * (1 - momentum), 1e-6)
    assert_close(found["nv"], feeds["v"].astype(np.float64) * momentum + variance * (1 - momentum), 1e-6)


@pytest.mark.usefixtures("statistics")
def test_batch_normalization_is_what_the_cpu_kernel_gives() -> None:
    text = batch_normalization((4, 3, 6, 6), "y, nm, nv", "momentum=0.5").replace(", FLOAT[3] nm, FLOAT[3] nv)", ")")
    feeds = normalization_feeds((4, 3, 6, 6))
    assert_close(run(written(text), feeds)["y"], run(parse(text, "float", 20), feeds)["y"].astype(np.float64), 1e-6)


@pytest.mark.usefixtures("statistics")
@pytest.mark.parametrize("ratio", [1.0, 100.0, 1000.0])
def test_a_variance_does_not_cancel_against_a_large_mean(ratio: float) -> None:
    text = batch_normalization((4, 8, 16, 16), "y, nm, nv", "momentum=0.0")
    feeds = normalization_feeds((4, 8, 16, 16), ratio=ratio)
    found = run(written(text), feeds)
    _, variance = batch_statistics(feeds["x"])
    assert float(np.abs(found["nv"] / variance - 1).max()) < 2e-6
    assert_close(found["y"], normalized(feeds, 1e-5), 1e-6 * ratio)  # the mean's own rounding


@pytest.mark.usefixtures("statistics")
def test_channels_of_one_number_have_no_variance() -> None:
    text = batch_normalization((2, 3, 4, 4), "y, nm, nv", "momentum=0.0")
    feeds = normalization_feeds((2, 3, 4, 4)) | {"x": np.full((2, 3, 4, 4), 7.3, np.float32)}
    found = run(written(text), feeds)
    assert found["nv"].min() >= 0.0
    assert found["nv"].max() < 1e-10
    assert_close(found["y"], np.broadcast_to(feeds["b"].reshape(1, 3, 1, 1), (2, 3, 4, 4)), 1e-3)


@pytest.mark.usefixtures("statistics")
def test_float64_keeps_its_precision() -> None:
    text = batch_normalization((2, 3, 4, 5), "y, nm, nv", "momentum=0.5")
    feeds = normalization_feeds((2, 3, 4, 5), np.float64, 100.0)
    found = run(written(parse(text, "double", 20)), feeds)
    assert found["nv"].dtype == np.float64
    assert_close(found["y"], normalized(feeds, float(np.float32(1e-5))), 1e-12)


class LayerNormalization(OpRun):
    """In float32 from half precision, as `stash_type` says; onnx.reference gives the statistics in half."""

    op_domain = ""

    def _run(self, x, scale, axis=-1, epsilon=1e-5, stash_type=1):  # type: ignore[no-untyped-def]
        wide = x.astype(np.float32)
        mean = wide.mean(axis, keepdims=True, dtype=np.float64).astype(np.float32)
        inverse = 1 / np.sqrt(np.mean((wide - mean) ** 2, axis, keepdims=True) + np.float32(epsilon))
        return ((wide - mean) * inverse * scale).astype(x.dtype), mean, inverse


@pytest.mark.usefixtures("statistics")
@pytest.mark.parametrize("statistics_type", ["float16", "float"])
@pytest.mark.parametrize("ratio", [0.0, 50.0])
def test_half_precision_is_summed_in_float32(statistics_type: str, ratio: float) -> None:
    """On the reference evaluator: the CPU has no such kernels. At a mean of 50, float16 is in steps of 1/32."""
    shape, wide = (8, 3, 24, 24), np.float16 if statistics_type == "float16" else np.float32
    text = batch_normalization(shape, "y, nm, nv", "momentum=0.0")
    text = text.replace("FLOAT[3]", f"{statistics_type}[3]")
    feeds = normalization_feeds(shape, wide, ratio)
    feeds["x"] = feeds["x"].astype(np.float16)
    model = written(parse(text, "float16", 20))
    y, mean, variance = ReferenceEvaluator(model, new_ops=[LayerNormalization]).run(None, feeds)
    wanted_mean, wanted = batch_statistics(feeds["x"])
    assert (y.dtype, mean.dtype, variance.dtype) == (np.float16, wide, wide)
    assert_close(mean, wanted_mean, 1e-3 if wide is np.float16 else 1e-6)
    assert_close(variance, wanted, 1e-3 if wide is np.float16 else 1e-5)
    assert_close(y, normalized(feeds, 1e-5), 2e-3)


def test_an_inference_form_of_mixed_types_is_brought_to_one() -> None:
    text = (
        "g (float16[2,3,8] x, float[3] s, float[3] b, float[3] m, float[3] v) => (float16[2,3,8] y) "
        "{ y = BatchNormalization <epsilon=0.001> (x, s, b, m, v) }"
    )
    feeds = normalization_feeds((2, 3, 8), ratio=50.0) | {"m": np.array([49.99, 50.01, 50.003], np.float32)}
    feeds["x"] = feeds["x"].astype(np.float16)
    model = written(text)
    (node,) = (n for n in model.graph.node if n.op_type == "BatchNormalization")
    types = {v.name: v.type.tensor_type.elem_type for v in (*model.graph.value_info, *model.graph.input)}
    assert {types.get(name, onnx.TensorProto.FLOAT16) for name in node.input} == {onnx.TensorProto.FLOAT16}
    x, s, b, m, v = (feeds[name].astype(np.float64) for name in "xsbmv")
    wanted = (x - m[:, None]) * (s / np.sqrt(v + 0.001))[:, None] + b[:, None]
    assert_close(ReferenceEvaluator(model).run(None, feeds)[0], wanted, 2e-3)


def test_what_is_in_inference_form_stays() -> None:
    text = (
        "g (FLOAT[2,3,8] x, FLOAT[3] s, FLOAT[3] b, FLOAT[3] m, FLOAT[3] v) => (FLOAT[2,3,8] y) "
        "{ y = BatchNormalization(x, s, b, m, v) }"
    )
    model = memonger.load(parse(text, "float", 20))
    assert cuda_form.write_out(model) is model


def test_an_older_operator_set_is_raised() -> None:
    text = batch_normalization((2, 3, 4), "y, nm, nv", "momentum=0.5")
    feeds = normalization_feeds((2, 3, 4))
    found = run(written(parse(text, "float", 15)), feeds)
    assert_close(found["y"], normalized(feeds, 1e-5), 1e-6)


# ConvTranspose.


def transposed(draw: st.DrawFn, rank: int) -> tuple[str, Arrays]:
    """A ConvTranspose with any padding, and its inputs."""
    sizes = {name: [draw(st.integers(1, top)) for _ in range(rank)] for name, top in (("n", 5), ("k", 3))}
    strides, dilations = ([draw(st.integers(1, 3)) for _ in range(rank)] for _ in range(2))
    pads = [draw(st.integers(0, 3)) for _ in range(2 * rank)]
    extra = [draw(st.integers(0, s - 1)) for s in strides]
    full = [
        (n - 1) * s + (k - 1) * d + 1 + e
        for n, s, k, d, e in zip(sizes["n"], strides, sizes["k"], dilations, extra, strict=True)
    ]
    image = [size - a - b for size, a, b in zip(full, pads[:rank], pads[rank:], strict=True)]
    assume(min(image) > 0)
    group, inner, outer = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    form = draw(st.sampled_from(["pads", "SAME_UPPER", "SAME_LOWER", "output_shape"]))
    assume(form != "output_shape" or all(size >= n for size, n in zip(image, sizes["n"], strict=True)))
    padding = {"pads": f"pads={pads}, ", "output_shape": f"output_shape={image}, "}.get(form, f'auto_pad="{form}", ')
    if form.startswith("SAME"):
        image = [n * s for n, s in zip(sizes["n"], strides, strict=True)]
        extra = [0] * rank
    shapes = {"x": (2, group * inner, *sizes["n"]), "w": (group * inner, outer, *sizes["k"])}
    if draw(st.booleans()):
        shapes["b"] = (group * outer,)
    generator = np.random.default_rng(draw(st.integers(0, 99)))
    feeds = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    inputs = ", ".join(f"FLOAT[{', '.join(map(str, shape))}] {name}" for name, shape in shapes.items())
    text = (
        f"g ({inputs}) => (FLOAT[2, {group * outer}, {', '.join(map(str, image))}] y) {{ y = ConvTranspose <{padding}"
        f"strides={strides}, dilations={dilations}, output_padding={extra}, group={group}> ({', '.join(shapes)}) }}"
    )
    return text, feeds


@given(data=st.data(), rank=st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_transposed_convolutions_are_the_same_with_symmetric_padding(data: st.DataObject, rank: int) -> None:
    text, feeds = data.draw(st.composite(transposed)(rank))
    source = parse(text, "float", 20)
    assert_close(run(written(source), feeds)["y"], run(source, feeds)["y"].astype(np.float64), 1e-5)


def test_a_transposed_convolution_that_cuda_runs_stays() -> None:
    text = (
        "g (FLOAT[1,2,4,4] x, FLOAT[2,3,3,3] w) => (FLOAT[1,3,8,8] y) "
        "{ y = ConvTranspose <strides=[2,2], pads=[1,1,1,1], output_padding=[1,1]> (x, w) }"
    )
    model = memonger.load(parse(text, "float", 20))
    assert cuda_form.write_out(model) is model


def test_the_padding_of_a_stride_costs_no_node() -> None:
    """As ResNet's strided convolutions have it on the way back."""
    text = (
        "g (FLOAT[1,2,7,7] x, FLOAT[2,3,3,3] w) => (FLOAT[1,3,14,14] y) "
        "{ y = ConvTranspose <strides=[2,2], pads=[1,1,0,0]> (x, w) }"
    )
    (node,) = written(text).graph.node
    found = {a.name: list(a.ints) for a in node.attribute if a.ints}
    assert (found["pads"], found["output_padding"]) == ([1, 1, 1, 1], [1, 1])


# Bits.

NUMBERS = np.random.default_rng(0).integers(0, 2**64, (5, 7), np.uint64, endpoint=False)
EDGES = np.array([0, 1, 255, 256, 2**16 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1], np.uint64)


@pytest.mark.parametrize("kind", ["uint32", "uint64"])
@pytest.mark.parametrize("operator", ["BitwiseAnd", "BitwiseOr", "BitwiseXor"])
@pytest.mark.parametrize("right", ["tensor", "row", "scalar", "1", "255", "65537"])
def test_bitwise_operators_are_the_same_bits(kind: str, operator: str, right: str) -> None:
    a = np.concatenate([NUMBERS.reshape(-1), EDGES]).reshape(4, 11).astype(kind)
    b = {"tensor": a[::-1].copy(), "row": a[2].copy(), "scalar": a[0, 0]}.get(right)
    if b is None:
        text = f"g ({kind}[4,11] a) => ({kind}[4,11] y) <{kind} b = {{{right}}}> {{ y = {operator}(a, b) }}"
        b = np.array(int(right), kind)
    else:
        dims = f"[{','.join(map(str, b.shape))}]" if b.shape else ""
        text = f"g ({kind}[4,11] a, {kind}{dims} b) => ({kind}[4,11] y) {{ y = {operator}(b, a) }}"
    wanted = {"BitwiseAnd": np.bitwise_and, "BitwiseOr": np.bitwise_or, "BitwiseXor": np.bitwise_xor}[operator](a, b)
    found = run(written(text), {"a": a, "b": np.asarray(b)})["y"]
    assert found.dtype == np.dtype(kind)
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize("direction", ["LEFT", "RIGHT"])
@pytest.mark.parametrize(
    ("kind", "by"), [("uint8", 0), ("uint8", 7), ("uint32", 1), ("uint32", 31), ("uint64", 32), ("uint64", 63)]
)
def test_shifts_are_the_same_bits(kind: str, direction: str, by: int) -> None:
    a = np.concatenate([NUMBERS.reshape(-1), EDGES]).astype(kind)
    text = (
        f'g ({kind}[44] a) => ({kind}[44] y) <{kind} b = {{{by}}}> {{ y = BitShift <direction="{direction}"> (a, b) }}'
    )
    wanted = a << np.array(by, kind) if direction == "LEFT" else a >> np.array(by, kind)
    assert np.array_equal(run(written(text), {"a": a})["y"], wanted)


def test_signed_integers_and_moving_shifts_are_left_alone() -> None:
    text = (
        "g (int32[4] a, uint32[4] b) => (int32[4] y, uint32[4] z) "
        '{ y = BitwiseXor(a, a) z = BitShift <direction="LEFT"> (b, b) }'
    )
    model = memonger.load(parse(text, "float", 20))
    assert cuda_form.write_out(model) is model


def hashes(salts: Mapping[str, tuple[tuple[int, ...], bool]]) -> onnx.ModelProto:
    """A model of random bits: name → dims, and whether the upper bits are all that counts."""
    graph = ir.Graph([], [], nodes=[], opset_imports={"": 20}, name="hashes")
    op = Emitter(ir.Model(graph, ir_version=10))
    for number, (name, (dims, upper)) in enumerate(salts.items()):
        with op.at(name):
            value = random.hashed(op, dims, number, upper=upper)
        value.name = name
        graph.outputs.append(value)
    graph.extend(op.nodes)
    return ir.to_proto(ir.Model(graph, ir_version=10))


@pytest.mark.parametrize("key", [0, 12345, 2**32 - 1])
def test_random_bits_are_the_same_on_every_device(key: int) -> None:
    source = hashes({"a": ((3, 40), True), "b": ((64,), False), "c": ((2, 8, 5, 9), True), "d": ((70, 70), False)})
    for step in (0, 1, 10**9):
        feeds = {"random_key": np.array(key, np.uint32), "step": np.array(step, np.int64)}
        wanted, found = run(source, feeds), run(written(source), feeds)
        assert all(np.array_equal(found[name], bits) for name, bits in wanted.items())


def test_all_random_bits_are_mixed_at_once() -> None:
    dims = ((30, 40), True)
    one, many = (written(hashes({f"r{k}": dims for k in range(count)})) for count in (1, 8))
    counts = [sum(node.op_type == "Mod" for node in model.graph.node) for model in (one, many)]
    assert counts[0] == counts[1]
    read = {name for node in many.graph.node for name in node.input}
    assert not [t.name for t in many.graph.initializer if t.dims == [140] and t.name not in read]
    assert len(many.graph.node) < len(one.graph.node) + 7 * 16


def test_a_chain_that_is_read_on_the_way_is_merged_too() -> None:
    text = (
        "g (uint32 k) => (uint32[3] u, uint32[5] v, uint32[3] y, uint32[5] z) "
        "<uint32[3] a = {1, 2, 3}, uint32[5] b = {4, 5, 6, 7, 4000000000}, uint32 c = {77}> {"
        "p = Mul(a, k) q = Mul(b, k) u = Identity(p) v = Identity(q) r = BitwiseXor(p, c) s = BitwiseXor(q, c) "
        "y = Identity(r) z = Identity(s) }"
    )
    feeds = {"k": np.array(3000000019, np.uint32)}
    wanted, found = run(parse(text, "float", 20), feeds), run(written(text), feeds)
    assert all(np.array_equal(found[name], bits) for name, bits in wanted.items())


# Sums of products.


@pytest.mark.parametrize("image", [(5,), (3, 4), (2, 3, 4)])
def test_a_sum_over_each_channel_is_no_convolution(image: tuple[int, ...]) -> None:
    dims = ",".join(map(str, image))
    text = (
        f"g (FLOAT[2,6,{dims}] x, FLOAT[6,1,{dims}] v) => (FLOAT[2,6,{','.join('1' * len(image))}] y) "
        "{ w = Neg(v) y = Conv <group=6> (x, w) }"
    )
    generator = np.random.default_rng(0)
    x, v = generator.standard_normal((2, 6, *image)), generator.standard_normal((6, 1, *image))
    model, feeds = written(text), {"x": x.astype(np.float32), "v": v.astype(np.float32)}
    assert "Conv" not in {node.op_type for node in model.graph.node}
    wanted = -(x * v[:, 0]).sum(tuple(range(2, x.ndim)), keepdims=True)
    assert_close(run(model, feeds)["y"], wanted, 1e-6)


def test_a_convolution_of_rows_is_a_product_of_matrices() -> None:
    text = "g (FLOAT[1,4,3,9] x, FLOAT[20,1,1,9] v) => (FLOAT[1,20,3,1] y) { w = Neg(v) y = Conv <group=4> (x, w) }"
    generator = np.random.default_rng(0)
    x, v = generator.standard_normal((4, 3, 9)), generator.standard_normal((4, 5, 9))
    model = written(text)
    feeds = {"x": x[None].astype(np.float32), "v": v.reshape(20, 1, 1, 9).astype(np.float32)}
    assert {"MatMul"} == {node.op_type for node in model.graph.node} & {"Conv", "MatMul"}
    wanted = -(v @ x.transpose(0, 2, 1)).reshape(1, 20, 3, 1)
    assert_close(run(model, feeds)["y"], wanted, 1e-6)


@pytest.mark.parametrize(
    ("weight", "settings"),
    [
        ("6,1,3,4", "group=6, pads=[1,0,0,0]"),
        ("6,1,2,4", "group=6"),
        ("12,1,3,4", "group=6"),
        ("6,1,1,4", "group=6, strides=[2,1]"),
        ("6,3,3,4", "group=2"),
    ],
)
def test_other_convolutions_stay(weight: str, settings: str) -> None:
    nodes = f"w = Neg(v) z = Conv <{settings}> (x, w) y = Size(z)"
    text = f"g (FLOAT[2,6,3,4] x, FLOAT[{weight}] v) => (int64 y) {{ {nodes} }}"
    model = memonger.load(parse(text, "float", 20))
    assert cuda_form.write_out(model) is model


def test_a_convolution_with_a_parameter_stays() -> None:
    text = "g (FLOAT[2,6,3,4] x, FLOAT[6,1,3,4] w) => (FLOAT[2,6,1,1] y) { y = Conv <group=6> (x, w) }"
    model = memonger.load(parse(text, "float", 13))
    assert cuda_form.write_out(model) is model


# Other operators.


@pytest.mark.parametrize(
    ("node", "tolerance"),
    [
        ("Mean(x)", 0.0),
        ("Mean(x, x2, x)", 1e-6),
        ("LpNormalization <axis=1, p=1> (x)", 1e-6),
        ("LpNormalization <axis=-1, p=2> (x)", 1e-6),
        ("Celu <alpha=0.7> (x)", 1e-6),
    ],
)
def test_other_operators_mean_the_same(node: str, tolerance: float) -> None:
    generator = np.random.default_rng(0)
    feeds = {name: generator.standard_normal((2, 7, 3, 4)).astype(np.float32) for name in ("x", "x2")}
    feeds["x"][0, :, 1] = 0.0
    text = f"g (FLOAT[2,7,3,4] x, FLOAT[2,7,3,4] x2) => (FLOAT[2,7,3,4] y) {{ y = {node} }}"
    wanted = run(parse(text, "float", 20), feeds)["y"].astype(np.float64)
    assert_close(run(written(text), feeds)["y"], wanted, tolerance)


@pytest.mark.parametrize("axis", [1, -1, 2])
def test_parts_of_several_sizes_are_cut_out(axis: int) -> None:
    dims = {1: ["2,3,4", "2,1,4", "2,2,4"], 2: ["2,6,1", "2,6,2", "2,6,1"]}[axis % 3]
    text = (
        f"g (FLOAT[2,6,4] x) => (FLOAT[{dims[0]}] a, FLOAT[{dims[1]}] b, FLOAT[{dims[2]}] c) "
        f"<int64[3] s = {{{','.join(d.split(',')[axis] for d in dims)}}}> {{ a, b, c = Split <axis={axis}> (x, s) }}"
    )
    feeds = {"x": np.random.default_rng(0).standard_normal((2, 6, 4)).astype(np.float32)}
    model = written(text)
    assert {node.op_type for node in model.graph.node} == {"Slice"}
    wanted, found = run(parse(text, "float", 20), feeds), run(model, feeds)
    assert all(np.array_equal(found[name], part) for name, part in wanted.items())


@pytest.mark.parametrize("split", ["axis=0> (x, s)", "axis=1, num_outputs=2> (x)"])
def test_other_splits_stay(split: str) -> None:
    text = f"g (FLOAT[4,6] x) => (FLOAT[M,N] a) <int64[2] s = {{1,3}}> {{ a, b = Split <{split} }}"
    model = memonger.load(parse(text, "float", 20))
    assert cuda_form.write_out(model) is model


@pytest.mark.parametrize("size", [2, 4])
def test_an_even_number_of_neighbouring_channels(size: int) -> None:
    """Which the CPU's kernel refuses too."""
    x = np.random.default_rng(0).standard_normal((2, 7, 3, 4)).astype(np.float32)
    text = f"g (FLOAT[2,7,3,4] x) => (FLOAT[2,7,3,4] y) {{ y = LRN <size={size}, alpha=0.3, beta=0.6, bias=1.5> (x) }}"
    wide, before = x.astype(np.float64), (size - 1) // 2
    sums = [(wide[:, max(0, c - before) : c + size - before] ** 2).sum(1) for c in range(7)]
    wanted = wide / (1.5 + 0.3 / size * np.stack(sums, 1)) ** 0.6
    assert_close(run(written(text), {"x": x})["y"], wanted, 1e-6)


# The model around.


def marked() -> memonger.Model:
    """BatchNormalization between two nodes, with marks and a name of its own."""
    text = (
        "g (FLOAT[2,3,4] x, FLOAT[3] s, FLOAT[3] b, FLOAT[3] m, FLOAT[3] v) => (FLOAT[2,3,4] z, FLOAT[3] nm) "
        "{ h = Relu(x) y, nm, nv = BatchNormalization <training_mode=1> (h, s, b, m, v) z = Relu(y) }"
    )
    model = memonger.load(parse(text, "float", 20))
    (node,) = (n for n in model.ir.graph if n.op_type == "BatchNormalization")
    node.metadata_props.update({marks.STAGE: "second", marks.FORCE: "True"})
    return model


def test_marks_and_names_survive() -> None:
    model = marked()
    made = cuda_form.write_out(model).ir
    producers = {str(v.name): node for node in made.graph for v in node.outputs}
    assert {"h", "y", "nm", "z"} <= set(producers)
    assert producers["y"].op_type == "BatchNormalization"
    assert producers["y"].metadata_props[marks.STAGE] == "second"
    parts = [node for node in made.graph if node.metadata_props.get(marks.PART) == "y"]
    assert len(parts) > 3
    assert all(node.metadata_props[marks.FORCE] == "True" for node in parts)
    assert not any(marks.STAGE in node.metadata_props for node in parts)


def test_the_model_given_is_not_changed() -> None:
    model = marked()
    before = ir.to_proto(model.ir).SerializeToString(deterministic=True)
    assert cuda_form.write_out(model) is not model
    assert ir.to_proto(model.ir).SerializeToString(deterministic=True) == before


def test_nodes_of_unknown_shape_stay() -> None:
    text = (
        "g (FLOAT[2,3,4] x, FLOAT[3] w) => (FLOAT[N, 3] y) "
        "{ i = NonZero(x) j = Transpose(i) k = Cast <to=1> (j) y = Mean(k, w) }"
    )
    model = memonger.load(parse(text, "float", 20))
    assert cuda_form.write_out(model) is model


def test_a_second_rule_for_an_operator_is_refused() -> None:
    with pytest.raises(ValueError, match="BitShift has a rule already"):
        rules.rule("BitShift")(lambda op, node: None)


# Training steps.

NETWORKS = {
    "mobilenet_v2": {"image": 64, "width": 0.1, "classes": 10},
    "resnet18": {"image": 32, "width": 0.07, "classes": 10},
    "gpt": {"num_layers": 2, "width": 16, "seq_len": 8, "vocabulary": 20, "dropout": 0.2},
    "lstm": {"seq_len": 3, "num_hidden": 8, "vocabulary": 20, "dropout": 0.2},
    "unet": {"image": 32, "width": 0.1},
}


def training_step(name: str) -> memonger.Model:
    model = memonger.load(models.build_ir(name, batch=4, training=True, **NETWORKS[name]))
    return memonger.differentiate(model, loss="loss", optimizer=memonger.SGD(lr=0.01, momentum=0.9), clip_norm=1.0)


def step_feeds(model: onnx.ModelProto) -> Arrays:
    """Data, state and parameters; initializers are defaults."""
    generator, defaults = np.random.default_rng(1), {t.name for t in model.graph.initializer}
    feeds: Arrays = {}
    for value in model.graph.input:
        dims = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        if value.name not in defaults:
            whole = generator.integers(0, 2, dims).astype(dtype)
            feeds[value.name] = generator.standard_normal(dims).astype(dtype) if dtype == np.float32 else whole
    return feeds


@pytest.mark.parametrize("name", NETWORKS)
def test_a_training_step_is_the_same(name: str) -> None:
    """Float32 against float32, whose own error is that large: gradients pass up to 50 normalizations over 4 images."""
    source = ir.to_proto(training_step(name).ir)
    made = written(source)
    feeds = step_feeds(source)
    wanted, found = run(source, feeds), run(made, feeds)
    assert list(found) == list(wanted)
    assert np.isfinite(found["loss"]).all()
    assert_close(found["loss"], wanted["loss"].astype(np.float64), 1e-5)
    for key, array in wanted.items():
        assert_close(found[key], array.astype(np.float64), 1e-3)


def test_a_plan_is_found_for_what_is_written_out() -> None:
    model = training_step("resnet18")
    plan = memonger.search_plan(cuda_form.write_out(model), device="none", mode="training", strategy="none")
    source = memonger.search_plan(model, device="none", mode="training", strategy="none")
    assert plan.peak_bytes < 1.3 * source.peak_bytes
