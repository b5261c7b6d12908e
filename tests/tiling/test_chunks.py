"""Models that run in chunks give what the whole gives, on stock onnxruntime; what can't be cut is named."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

pytest.importorskip("onnxruntime")

from memonger.devices import parse_device
from memonger.ir.marks import CHUNK, WINDOW
from memonger.lowering.device_form import device_form
from memonger.lowering.lowered import portable
from memonger.model.load import load
from memonger.tiling.axes import axes_of
from memonger.tiling.slices import Band, SliceStage, emission
from memonger.tiling.stages import ranges_in_order
from memonger.tiling.writer import in_slices
from tests.support import networks
from tests.support.stock import normal, parse

Feeds = Mapping[str, np.ndarray]

FIRST: Mapping[str, int] = {"x": 0}


def _weights(model: onnx.ModelProto, **arrays: np.ndarray) -> onnx.ModelProto:
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    return model


def _run(model: ir.Model, feeds: Feeds) -> dict[str, np.ndarray]:
    return networks.run_stock(networks.stock(_proto(model), "ORT_DISABLE_ALL"), dict(feeds))


def _proto(model: ir.Model) -> onnx.ModelProto:
    """The model with all weights in it."""
    copy = model.clone()
    for value in copy.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            value.const_value = ir.Tensor(value.const_value.numpy().copy())
    return ir.to_proto(copy)


def _feeds(model: ir.Model) -> Feeds:
    return {str(v.name): normal(n, *map(int, v.shape or ())) for n, v in enumerate(model.graph.inputs)}


def _names(model: ir.Model, key: str) -> list[str]:
    return [node.metadata_props[key] for node in model.graph if key in node.metadata_props]


def _in_slices(model: ir.Model, bands: Sequence[Band], seeds: Mapping[str, int]) -> ir.Model:
    """The model with its nodes in bands cut from these axes of values on."""
    return in_slices(model, bands, axes_of(model, seeds).nodes).model


def _check(model: ir.Model, bands: Sequence[Band], seeds: Mapping[str, int] = FIRST) -> ir.Model:
    """The model in chunks: it gives the same bits, is valid, and every value has a shape that is right."""
    feeds, made = _feeds(model), _in_slices(model, bands, seeds)
    assert [v.name for v in made.graph.inputs] == [v.name for v in model.graph.inputs]
    assert networks.same_bits(_run(made, feeds), _run(model, feeds))
    assert all(v.shape is not None and v.type is not None for node in made.graph for v in node.outputs if v.name)
    if not any(node.domain for node in made.graph):
        onnx.checker.check_model(_proto(made), full_check=True)
    return made


def _stages(bounds: Sequence[int], slices: Sequence[Sequence[int]]) -> tuple[SliceStage, ...]:
    return tuple(SliceStage(a, b, tuple(each)) for (a, b), each in zip(pairwise(bounds), slices, strict=True))


def _unet() -> ir.Model:
    """Two levels down and up, with skips: 9 nodes, batch 6."""
    text = """g (float[6, 2, 8, 8] x) => (float[6, 2, 8, 8] y, float[6, 4, 2, 2] bottom) {
        a = Conv <pads = [1, 1, 1, 1]> (x, wa) p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (a)
        b = Conv <pads = [1, 1, 1, 1]> (p, wb) q = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (b)
        bottom = Relu (q)
        u = ConvTranspose <strides = [2, 2]> (bottom, wu) c = Concat <axis = 1> (u, b)
        v = ConvTranspose <strides = [2, 2]> (c, wv) y = Add (v, a) }"""
    weights = {"wa": (2, 2, 3, 3), "wb": (4, 2, 3, 3), "wu": (4, 4, 2, 2), "wv": (8, 2, 2, 2)}
    arrays = {name: normal(n, *dims) for n, (name, dims) in enumerate(weights.items())}
    return portable(load(_weights(parse(text), **arrays))).model


SIXTHS, THIRDS, UNEVEN, HALVES, WHOLE = (0, 1, 2, 3, 4, 5, 6), (0, 2, 4, 6), (0, 1, 4, 6), (0, 3, 6), (0, 6)


@pytest.mark.parametrize(
    "slices",
    [
        (SIXTHS, THIRDS, SIXTHS),
        (SIXTHS, WHOLE, SIXTHS),
        (UNEVEN, HALVES, THIRDS),
        (WHOLE, UNEVEN, HALVES),
        (HALVES, SIXTHS, WHOLE),
        (THIRDS, UNEVEN, UNEVEN),
    ],
    ids=str,
)
def test_stages_finer_and_coarser_give_the_same_bits(slices: tuple[tuple[int, ...], ...]) -> None:
    model = _unet()
    _check(model, [Band(_stages((0, 2, 7, 9), slices))])


def test_chunks_run_as_late_as_they_may() -> None:
    order = list(emission(_stages((0, 1, 2, 3), ((0, 1, 2, 3, 4), (0, 3, 4), (0, 2, 4)))))
    assert order == [
        (0, 0, 1), (0, 1, 2), (0, 2, 3), (1, 0, 3), (2, 0, 2), (0, 3, 4), (1, 3, 4), (2, 2, 4)
    ]  # fmt: skip


def test_copies_are_marked_and_named_and_the_joined_value_keeps_its_name() -> None:
    text = """g (float[4, 3] x, float[3] c) => (float[4, 3] y) { a = Relu (x) y = Mul (a, d) d = Abs (c) }"""
    model = parse(text)
    model.graph.node.insert(0, model.graph.node.pop())  # a node that doesn't depend on the batch, amid those that do
    lowered = portable(load(model)).model
    lowered.graph.node(1).metadata_props["key"] = "kept"
    made = _check(lowered, [Band(_stages((0, 2, 3), ((0, 1, 4), (0, 4))))])
    assert [node.name for node in made.graph] == [
        "Abs_d", "x.chunk0_1/Slice", "Relu_a.chunk0_1", "x.chunk1_4/Slice", "Relu_a.chunk1_4", "a.chunk0_4/Concat",
        "Mul_y"
    ]  # fmt: skip
    assert _names(made, CHUNK) == ["0.0.0.1", "0.0.1.4"]
    assert _names(made, "key") == ["kept", "kept"]
    assert _names(made, WINDOW) == ["1"] * 3
    joined = _in_slices(lowered, [Band(_stages((0, 2), ((0, 1, 4),)))], FIRST)
    assert [(node.name, node.outputs[0].name) for node in joined.graph][-2:] == [
        ("a.chunk0_4/Concat", "a"),
        ("Mul_y", "y"),
    ]
    assert lowered.graph.num_nodes() == 3


def test_a_node_that_only_told_a_shape_is_gone() -> None:
    """The copies are told theirs: nothing reads the whole one any more."""
    text = """g (float[4, 6] x, float[4, 2, 3] like) => (float[4, 2, 3] y) {
        s = Shape (like) a = Relu (x) b = Reshape (a, s) y = Tanh (b) }"""
    lowered = ir.from_proto(onnx.shape_inference.infer_shapes(parse(text)))
    for node in lowered.graph:
        node.name = f"{node.op_type}_{node.outputs[0].name}"
        node.outputs[0].shape = node.outputs[0].shape if node.op_type in ("Shape", "Relu") else ir.Shape([4, 2, 3])
    made = _check(lowered, [Band(_stages((1, 4), ((0, 2, 4),)))])
    assert "Shape" not in {node.op_type for node in made.graph}
    assert "Shape" in {node.op_type for node in lowered.graph}


def _block(batch: int, tokens: int) -> ir.Model:
    """A transformer block."""
    width, heads = 8, 2
    sequence, scores = f"float[{batch}, {tokens}, 8]", f"float[1, 1, {tokens}, {tokens}]"
    text = f"""g ({sequence} x, {scores} mask) => ({sequence} y) {{
        n = LayerNormalization <axis = -1> (x, s, b) qkv = MatMul (n, wqkv)
        q, k, v = Split <axis = 2, num_outputs = 3> (qkv)
        q4 = Reshape (q, split) k4 = Reshape (k, split) qt = Transpose <perm = [0, 2, 1, 3]> (q4)
        kt = Transpose <perm = [0, 2, 3, 1]> (k4) v4 = Reshape (v, split) vt = Transpose <perm = [0, 2, 1, 3]> (v4)
        scores = MatMul (qt, kt) m = Add (scores, mask)
        p = Softmax <axis = -1> (m) o = MatMul (p, vt) ot = Transpose <perm = [0, 2, 1, 3]> (o)
        o3 = Reshape (ot, joined)
        a = MatMul (o3, wo) ap = Add (a, positions) r = Add (x, ap)
        f = MatMul (r, w1) g = Relu (f) h = MatMul (g, w2) y = Add (r, h) }}"""
    arrays = {
        "s": normal(1, width), "b": normal(2, width), "wqkv": normal(3, width, 24), "wo": normal(4, width, width),
        "w1": normal(5, width, 16), "w2": normal(6, 16, width), "positions": normal(7, 1, tokens, width),
        "split": np.array([0, 0, heads, width // heads]), "joined": np.array([batch, tokens, width]),
    }  # fmt: skip
    model = _weights(parse(text, opset=20, ir_version=10), **arrays)
    return portable(load(model)).model


def test_a_transformer_block_by_rows_reads_keys_and_values_whole() -> None:
    model = _block(1, 16)
    end = [str(node.name) for node in model.graph].index("MatMul_scores")
    bands = [
        Band((SliceStage(0, end, (0, 8, 16)),)),
        Band(_stages((end, end + 6, 22), ((0, 4, 8, 12, 16), (0, 8, 16)))),
    ]
    made = _check(model, bands, {"x": 1})
    assert "positions" not in made.graph.initializers
    assert "positions.chunk8_16" in made.graph.initializers


def test_rows_of_each_sequence_of_a_batch_in_turn() -> None:
    by_batch = _check(_block(2, 16), [Band((SliceStage(0, 22, (0, 1, 2)),))])
    names = [str(node.name) for node in by_batch.graph]
    first = names.index("MatMul_f.chunk1_2")
    made = _check(by_batch, [Band((SliceStage(first, first + 4, (0, 4, 16)),))], {"r.chunk1_2": 1})
    assert "MatMul_f.chunk1_2.chunk4_16" in [node.name for node in made.graph]


def test_the_device_form_in_blocked_layout_gives_the_same_bits() -> None:
    text = """g (float[6, 3, 8, 8] x) => (float[6, 10] y) {
        a = Conv <pads = [1, 1, 1, 1]> (x, w1) ra = Relu (a) b = Conv <pads = [1, 1, 1, 1]> (ra, w2) s = Add (b, ra)
        rb = Relu (s) m = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (rb) c = Conv (m, w3)
        t = GlobalAveragePool (c) f = Flatten (t) y = Gemm <transB = 1> (f, w4) }"""
    arrays = [normal(1, 16, 3, 3, 3), normal(2, 16, 16, 3, 3), normal(3, 32, 16, 1, 1), normal(4, 10, 32)]
    proto = _weights(parse(text), **{f"w{n + 1}": array for n, array in enumerate(arrays)})
    form = device_form(load(proto), parse_device("cpu"))
    assert any(node.domain == "com.microsoft.nchwc" for node in form.model.graph)
    count = form.model.graph.num_nodes()
    bounds = (0, count // 2, count - 1, count)  # the last product by itself: for few rows its kernel takes other ways
    _check(form.model, [Band(_stages(bounds, (SIXTHS, THIRDS, WHOLE)))])


def test_constants_in_files_are_sliced_in_place(tmp_path: object) -> None:
    text = "g (float[4, 6, 2] x) => (float[4, 6, 2] y) { y = Add (x, table) }"
    proto = _weights(parse(text), table=normal(1, 1, 6, 2))
    path = f"{tmp_path}/model.onnx"
    onnx.save(proto, path, save_as_external_data=True, size_threshold=0, location="data")
    model = portable(load(path)).model
    made = _check(model, [Band((SliceStage(0, 1, (0, 2, 6)),))], {"x": 1})
    assert all(isinstance(v.const_value, ir.ExternalTensor) for n, v in made.graph.initializers.items() if "table" in n)


class _Random:
    """A random model of operators whose sums are exact: small integers as floats."""

    def __init__(self, data: st.DataObject) -> None:
        self.data, self.nodes, self.constants = data, [], {}
        self.shapes: dict[str, tuple[int, ...]] = {"x": (4, 6, 4)}

    def integer(self, limit: int) -> int:
        return self.data.draw(st.integers(0, limit - 1))

    def constant(self, array: np.ndarray) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = array
        return name

    def emit(self, op: str, inputs: list[str], shape: Sequence[int], **attributes: object) -> None:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name, **attributes))
        self.shapes[name] = tuple(shape)

    def grow(self) -> None:
        """Add a node that reads a value drawn from all there are."""
        x = self.data.draw(st.sampled_from(list(self.shapes)))
        dims = self.shapes[x]
        axis = self.integer(len(dims))
        kind = self.data.draw(st.sampled_from(["Relu", "Add", "MatMul", "Transpose", "Reshape", "Reduce", "CumSum",
                                               "Concat", "Gather", "Unsqueeze", "Products", "Table"]))  # fmt: skip
        draw = np.random.default_rng(len(self.nodes))
        same = [name for name, shape in self.shapes.items() if shape == dims]
        if kind == "Relu":
            self.emit("Relu", [x], dims)
        elif kind in ("Add", "Concat"):
            other = self.data.draw(st.sampled_from(same))
            joined = [2 * n if a == axis else n for a, n in enumerate(dims)]
            self.emit("Max", [x, other], dims) if kind == "Add" else self.emit("Concat", [x, other], joined, axis=axis)
        elif kind == "Table":
            table = [n if self.integer(2) else 1 for n in dims[self.integer(len(dims)) :]]
            self.emit("Add", [x, self.constant(draw.integers(-1, 2, table).astype(np.float32))], dims)
        elif kind == "MatMul":
            weight = self.constant(draw.integers(-1, 2, (dims[-1], 3)).astype(np.float32))
            self.emit("MatMul", [x, weight], (*dims[:-1], 3))
        elif kind == "Products" and len(dims) == 3:
            self.emit("Transpose", [x], (dims[0], dims[2], dims[1]), perm=[0, 2, 1])
            self.emit("MatMul", [x, f"v{len(self.nodes) - 1}"], (dims[0], dims[1], dims[1]))
        elif kind == "Transpose":
            perm = self.data.draw(st.permutations(range(len(dims))))
            self.emit("Transpose", [x], [dims[a] for a in perm], perm=perm)
        elif kind == "Reshape":
            merged = [*dims[:axis], -1, *dims[axis + 2 :]]
            self.emit("Reshape", [x, self.constant(np.array(merged))], _resolved(merged, dims))
        elif kind == "Reduce" and len(dims) > 1:
            keep = self.integer(2)
            left = [1 if a == axis else n for a, n in enumerate(dims) if keep or a != axis]
            self.emit("ReduceMax", [x, self.constant(np.array([axis]))], left, keepdims=keep)
        elif kind == "CumSum":
            self.emit("CumSum", [x, self.constant(np.array(axis))], dims)
        elif kind == "Gather":
            indices = self.constant(draw.integers(0, dims[axis], 2))
            self.emit("Gather", [x, indices], (*dims[:axis], 2, *dims[axis + 1 :]), axis=axis)
        elif kind == "Unsqueeze":
            self.emit("Unsqueeze", [x, self.constant(np.array([axis]))], (*dims[:axis], 1, *dims[axis:]))

    def model(self) -> ir.Model:
        """What was drawn; the values that nobody reads are outputs, and one more."""
        read = {name for node in self.nodes for name in node.input}
        results = [n for n in self.shapes if n not in read or n == f"v{len(self.nodes) // 2}"]
        values = {n: helper.make_tensor_value_info(n, TensorProto.FLOAT, dims) for n, dims in self.shapes.items()}
        weights = [numpy_helper.from_array(array, name) for name, array in self.constants.items()]
        graph = helper.make_graph(self.nodes, "g", [values["x"]], [values[n] for n in results if n != "x"], weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
        return portable(load(model)).model


def _resolved(target: list[int], dims: Sequence[int]) -> list[int]:
    rest = int(np.prod([n for n in target if n > 0]))
    return [int(np.prod(dims)) // rest if n < 0 else n for n in target]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_random_models_in_random_chunks_give_the_same_bits(data: st.DataObject) -> None:
    drawn = _Random(data)
    for _ in range(data.draw(st.integers(3, 9))):
        drawn.grow()
    if not drawn.nodes:
        return
    model = drawn.model()
    seeds = {"x": drawn.integer(3)}
    order, ranges = ranges_in_order(model, axes_of(model, seeds))
    nodes = list(model.graph)
    model.graph.remove(nodes)
    model.graph.extend(nodes[step] for step in order)
    axes, bands = axes_of(model, seeds), []
    for begin, end in ranges:
        cuts = sorted({begin, end, *data.draw(st.lists(st.integers(begin, end), max_size=2))})
        bounds = [{0, axes.size, *data.draw(st.lists(st.integers(1, axes.size), max_size=3))} for _ in cuts[1:]]
        bands.append(Band(_stages(cuts, [sorted(each) for each in bounds])))
    feeds = {"x": np.random.default_rng(0).integers(-1, 2, (4, 6, 4)).astype(np.float32)}
    made = in_slices(model, bands, axes.nodes).model
    onnx.checker.check_model(_proto(made), full_check=True)
    assert networks.same_bits(_run(made, feeds), _run(model, feeds))
