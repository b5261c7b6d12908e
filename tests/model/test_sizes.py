"""The shapes that rules give, beside those that onnxruntime's kernels write, at several sizes of the inputs."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import memonger
from memonger.ir.model import Model
from memonger.ir.names import name_nodes
from memonger.ir.values import static_shape
from memonger.shapes.ranges import DimRange, shapes_at
from memonger.shapes.sizes import Sizes, SizesError
from memonger.shapes.traced_sizes import TracedSizes
from tests.support import networks

POINTWISE = """
    a0 = Relu(t) a1 = Add(t, u) a2 = Where(cond, t, u) a3 = Cast<to=7>(t) a4 = Max(t, u, u)
    a5 = LayerNormalization(t, w, w) a6 = Softmax(t) a7 = Mod<fmod=1>(t, u) a8, a9 = Dropout(t) a10 = Clip(t)
"""
PRODUCTS = """
    p0 = MatMul(t, m) p1 = Gemm<transB=1>(g, n) p2 = Einsum<equation="bsd,de->bse">(t, m) p3 = MatMul(t, v)
    p4 = com.microsoft.FusedMatMul<transA=1>(t, t) p5 = com.microsoft.FusedMatMul<transBatchA=1, transBatchB=1>(t, tt)
    p6 = com.microsoft.FusedGemm<transA=1, activation="Relu">(g, g)
"""
IMAGES = """
    i0 = Conv<pads=[1,1,1,1], strides=[2,2]>(x, k) i1 = Conv<auto_pad="SAME_UPPER", strides=[2,2]>(x, k)
    i2 = Conv<dilations=[2,2]>(x, k) i3 = MaxPool<kernel_shape=[3,3], strides=[2,2], ceil_mode=1>(x)
    i4 = AveragePool<kernel_shape=[2,2], strides=[3,3], ceil_mode=1, pads=[1,1,1,1]>(x) i5 = GlobalAveragePool(x)
    i6 = ConvTranspose<strides=[2,2], output_padding=[1,1]>(x, kt) i7 = Resize<mode="nearest">(x, , scales)
    i8 = ConvTranspose<auto_pad="SAME_LOWER", strides=[2,2]>(x, kt) i9 = Resize<mode="nearest">(x, , , sizes)
    i10 = DepthToSpace<blocksize=2>(i0) i11 = MaxPool<kernel_shape=[2,2], strides=[2,2], ceil_mode=1, pads=[0,0,1,1]>(x)
    i12 = AveragePool<kernel_shape=[40,40], strides=[40,40], ceil_mode=1, count_include_pad=1>(x)
"""
MOVEMENT = """
    b = Shape<start=0, end=1>(t) s = Shape<start=1, end=2>(t)
    target = Concat<axis=0>(b, two, m1) r0 = Reshape(t, target) r1 = Flatten(t) r2 = Transpose<perm=[1,0,2]>(t)
    r3 = Unsqueeze(t, one) r4 = Squeeze(r3, one) r5 = Concat<axis=1>(t, t, t) r6, r7 = Split<axis=2, num_outputs=2>(t)
    long = Add(s, two) half = Div(s, two) r8 = Slice(t, half, s, one)
    r9 = Slice(t, back, ten, one) r10 = Slice(t, ten, back, one, m1) grown = Concat<axis=0>(two, b, s, one)
    r11 = Expand(m1, grown) r12 = Tile(t, reps) pads = Concat<axis=0>(zero, half, zero, zero, s, zero)
    r13 = Pad(t, pads) none = Sub(ten, s) r14 = ConstantOfShape(none) end = Squeeze(s) r15 = Range(start, end, step)
    r16 = Gather<axis=1>(t, rows) r17 = GatherND<batch_dims=1>(t, at) r18 = OneHot(rows, end, values)
    r19, r20 = TopK<axis=1>(t, half) fs = Cast<to=1>(s) f2 = Mul(fs, scale) fl = Floor(f2) fi = Cast<to=7>(fl)
    r21 = ConstantOfShape(fi) biggest = Max(s, two) both = Concat<axis=0>(biggest, half) r22 = ConstantOfShape(both)
    r23 = Trilu(t) r24 = ScatterElements<axis=1>(t, at3, up) lot = ReduceProd<keepdims=1>(target) neg = Abs(lot)
    r25 = ConstantOfShape(neg) dims = Shape(t) d0, d1, d2 = Split<num_outputs=3>(dims) r26 = ConstantOfShape(d1)
    d3, d4 = Split(dims, parts) flat = Flatten<axis=0>(d3) row = Squeeze(flat, zero) r27 = ConstantOfShape(row)
    power = Pow(two, two) put = ScatterND(grown, last, power) r28 = ConstantOfShape(put)
"""
REDUCTIONS = """
    e0 = ReduceMean(t, m1) e1 = ReduceSum<keepdims=0>(t, one) e2 = ReduceMax(t) e3 = ArgMax<axis=1, keepdims=0>(t)
    e4 = ReduceSum<noop_with_empty_axes=1>(t)
"""
FUSED = """
    f0, , , f3 = com.microsoft.SkipLayerNormalization(t, t, w, w) f4 = com.microsoft.BiasGelu(t, w)
    f5 = com.microsoft.QuickGelu(t) f6 = com.microsoft.Attention<num_heads=2>(t, qkv, qkvb)
    words = ReduceMax<keepdims=0>(at3, m1) short = Cast<to=6>(words)
    f7, f8 = com.microsoft.EmbedLayerNormalization(short, , table, table, , w, w)
    f9 = com.microsoft.FusedConv<activation="Relu", strides=[2,2]>(x, k) f10 = com.microsoft.ExpandDims(t, axis)
"""
SEQUENCES = """
    l0, l1, l2 = LSTM<hidden_size=3, direction="bidirectional">(t, lw, lr) q0, q1 = GRU<hidden_size=3>(t, gw, gr)
"""

NEEDS_NUMBERS = ("i7 = Resize", "fs = Cast", "f2 = Mul", "fl = Floor", "fi = Cast", "r21 = ConstantOfShape")
"""What computes sizes in floats, so that its rules have to run at every size."""

_HEAD = """<ir_version: 10, opset_import: ["": 20, "com.microsoft": 1]>
rules (float[b,s,4] t, float[b,1,4] u, float[4,s,b] tt, float[b,4] g, float[b,3,h,h] x, bool[b,1,1] cond,
       int64[s] rows, int64[b,1] at, int64[b,s,4] at3, float[b,s,4] up) => () {"""


def _model() -> onnx.ModelProto:
    text = _HEAD + "".join((MOVEMENT, POINTWISE, PRODUCTS, IMAGES, REDUCTIONS, SEQUENCES, FUSED)) + "}"
    lines = "\n".join(line.replace(")  ", ") ") for line in text.splitlines())
    model = onnx.parser.parse_model(lines)
    rng = np.random.default_rng(0)
    shapes = {
        "w": (4,), "m": (4, 5), "v": (4,), "n": (6, 4), "k": (8, 3, 3, 3), "kt": (3, 2, 3, 3), "lw": (2, 12, 4),
        "lr": (2, 12, 3), "gw": (1, 9, 4), "gr": (1, 9, 3),
        "qkv": (4, 12), "qkvb": (12,), "table": (20, 4),
    }  # fmt: skip
    arrays = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    arrays |= {
        "scales": np.array([1, 1, 1.5, 0.7], np.float32), "sizes": np.array([2, 3, 5, 9], np.int64),
        "reps": np.array([1, 2, 3], np.int64), "start": np.array(1, np.int64), "step": np.array(2, np.int64),
        "one": np.array([1]), "ten": np.array([10]), "m1": np.array([-1]), "zero": np.array([0]), "two": np.array([2]),
        "back": np.array([-3]), "axis": np.array(-1, np.int32), "values": np.array([0, 1], np.float32),
        "scale": np.array(0.3, np.float32), "last": np.array([[3]]), "parts": np.array([2, 1]),
    }  # fmt: skip
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, name) for name, a in arrays.items())
    model.graph.output.extend(
        onnx.ValueInfoProto(name=each) for node in model.graph.node for each in node.output if each
    )
    return model


def _feeds(b: int, s: int, h: int) -> dict[str, np.ndarray]:
    shapes = {"t": (b, s, 4), "u": (b, 1, 4), "tt": (4, s, b), "g": (b, 4), "x": (b, 3, h, h), "up": (b, s, 4)}
    feeds = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    zeros = {"rows": (s,), "at": (b, 1), "at3": (b, s, 4)}
    return feeds | {"cond": np.ones((b, 1, 1), bool)} | {n: np.zeros(shape, np.int64) for n, shape in zeros.items()}


@pytest.mark.parametrize("sizes", [(4, 10, 16), (1, 2, 5), (4, 7, 9), (3, 3, 12)])
def test_shapes_are_those_of_the_kernels(sizes: tuple[int, int, int]) -> None:
    model = _model()
    feeds = _feeds(*sizes)
    loaded = ir.from_proto(model)
    name_nodes(Model(loaded, "test"))
    rules = Sizes(loaded)
    found = dict(zip(rules.names, rules.at({name: feed.shape for name, feed in feeds.items()}), strict=True))
    written = networks.run_stock(networks.stock(model, "ORT_DISABLE_ALL"), feeds)
    assert len(written) > 80
    assert {name: shape for name, shape in found.items() if name} == {n: array.shape for n, array in written.items()}


def test_noted_rules_give_at_other_sizes_what_the_rules_give() -> None:
    model = _model()
    kept = [n for n in model.graph.node if not f"{n.output[0]} = {n.op_type}".startswith(NEEDS_NUMBERS)]
    assert len(kept) == len(model.graph.node) - len(NEEDS_NUMBERS)
    del model.graph.node[:], model.graph.output[:]
    model.graph.node.extend(kept)
    loaded = ir.from_proto(model)
    name_nodes(Model(loaded, "test"))
    rules, noted_from = Sizes(loaded), []
    at, axes = rules.at, {11: "b", 12: "s", 13: "h"}
    rules.at = lambda inputs: noted_from.append(inputs) or at(inputs)  # type: ignore[assignment,func-returns-value]
    largest = {name: feed.shape for name, feed in _feeds(*axes).items()}
    places = {
        letter: tuple(f"{n}[{axis}]" for n, shape in largest.items() for axis, dim in enumerate(shape) if dim == size)
        for size, letter in axes.items()
    }
    ranges = {letter: DimRange(1, most, 1, places[letter]) for letter, most in zip("bsh", (4, 10, 40), strict=True)}
    traced, rng = TracedSizes(rules, rules.names, largest, ranges), np.random.default_rng(0)
    for _ in range(80):
        sizes = rng.integers((1, 2, 5), (5, 11, 41)).tolist()
        wanted = list(at(shapes_at(largest, ranges, dict(zip(ranges, sizes, strict=True)))))
        assert traced.at(sizes).of_each() == wanted
    assert len(noted_from) < 60


def test_what_the_inputs_hold_is_unknown_and_all_that_follows() -> None:
    model = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["": 20]>
        g (float[n] x, int64[1] k) => (float[m] y) {
            i = NonZero(x) j = Relu(x) r = ConstantOfShape(k) y = Gather(x, i)
        }"""
    )
    name_nodes(Model(model, "test"))
    rules = Sizes(model)
    assert dict(zip(rules.names, rules.at({"x": (3,), "k": (1,)}), strict=True)) == {
        "i": None, "j": (3,), "r": None, "y": None
    }  # fmt: skip


def test_an_operator_without_a_rule_is_left_to_the_run_and_named() -> None:
    model = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["": 20, "else": 1]>
        g (float[n,2] x) => (float[n,2] z) { [odd] y = else.Odd(x) z = Relu(y) }"""
    )
    rules = Sizes(model)
    assert rules.open_nodes == {"odd": "else::Odd"}
    assert rules.at({"x": (3, 2)}) == (None, None)


@pytest.mark.parametrize(("m", "k"), [(3, 5), (4, 4)])
def test_a_contradiction_names_the_node(m: int, k: int) -> None:
    model = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["": 20]>
        g (float[n,m] x, float[k] w) => (float[n,m] y) { [sum] y = Add(x, w) }"""
    )
    rules = Sizes(model)
    if m == k:
        assert rules.at({"x": (2, m), "w": (k,)}) == ((2, m),)
        return
    with pytest.raises(SizesError, match=r"node 'sum' \(Add\)"):
        rules.at({"x": (2, m), "w": (k,)})


def test_a_branch_whose_shapes_do_not_go_together_gives_none() -> None:
    model = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["": 20]> g (float[n,s] x, bool c, float[3,3] w) => (float[n,s] y) {
            y = If(c) <then_branch = t () => (float[n,s] u) { u = MatMul(x, w) },
                       else_branch = e () => (float[n,s] v) { v = Relu(x) }> }"""
    )
    name_nodes(Model(model, "test"))
    rules = Sizes(model)
    assert rules.at({"x": (2, 3), "c": (), "w": (3, 3)}) == ((2, 3),)
    assert rules.at({"x": (2, 4), "c": (), "w": (3, 3)}) == (None,)


@pytest.mark.parametrize(
    ("opset", "nodes", "shape"),
    [
        (9, "s = Shape(x) b = Slice<starts=[0], ends=[1]>(s) t = Concat<axis=0>(b, m1) y = Reshape(x, t)", (2, 12)),
        (20, "s = Shape(x) a, b, c = Split<num_outputs=3>(s) t = Concat<axis=0>(c, m1) y = Reshape(x, t)", (4, 6)),
        (20, "s = Shape(x) n = Neg(s) k = Max(n, s) t = Concat<axis=0>(k, one) y = Expand(x3, t)", (2, 3, 4, 1)),
        (20, "d = DequantizeLinear(q, u) s = Shape(d) t = Concat<axis=0>(m1, s) y = Reshape(x, t)", (4, 6)),
    ],
)
def test_shape_arithmetic_is_folded(opset: int, nodes: str, shape: tuple[int, ...]) -> None:
    text = f"""<ir_version: 10, opset_import: ["": {opset}]>
        g (float[2,3,4] x, float[4,1] x3, uint8[6] q, float u) => (float[n] y)
        <int64[1] m1 = {{-1}}, int64[1] one = {{1}}> {{
            {nodes} }}"""
    loaded = memonger.load(onnx.parser.parse_model(text))
    node = loaded.graph.node(-1)
    assert static_shape(node.outputs[0]) == shape
    assert node.inputs[1] is not None
    assert node.inputs[1].is_initializer()
    assert not any(each.op_type == "Shape" for each in loaded.graph)
