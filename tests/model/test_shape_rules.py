"""The shape rules of all operators, beside what onnx's reference writes in its node tests, or onnxruntime's kernels."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from memonger.ir.model import Model
from memonger.ir.names import name_nodes
from memonger.ir.operators import OPERATORS, facts, facts_of
from memonger.shapes.shaping import shape_rule
from memonger.shapes.sizes import Sizes, SizesError
from memonger.shapes.traced_sizes import Dim, Tape
from tests.support import networks
from tests.support.backend_cases import made_quickly

Arrays = Mapping[str, np.ndarray]


def _operators_of_the_standard() -> set[str]:
    schemas = (s for s in onnx.defs.get_all_schemas() if s.domain in ("", "ai.onnx.ml") and not s.deprecated)
    return {f"{s.domain}::{s.name}" if s.domain else s.name for s in schemas}


def test_every_standard_operator_has_a_rule_or_is_one_whose_sizes_a_run_decides() -> None:
    def has_rule(name: str) -> bool:
        with pytest.raises(ValueError, match="has a shape rule already"):
            shape_rule(name)(lambda site: lambda shapes, contents: shapes)
        return True

    left = {name for name in _operators_of_the_standard() if facts_of(name).sized_at_run_time}
    assert left == {name for name in OPERATORS if facts_of(name).sized_at_run_time and "com.microsoft" not in name}
    assert all(has_rule(name) for name in _operators_of_the_standard() - left)


def _decided(model: ir.Model, feeds: Mapping[str, Any]) -> None:
    """Make the inputs that decide sizes initializers."""
    deciding = {
        str(value.name)
        for node in model.graph
        for place in facts(node).sized_by
        if place < len(node.inputs) and (value := node.inputs[place]) is not None and value.is_graph_input()
    }
    for value in [value for value in model.graph.inputs if value.name in deciding]:
        value.const_value = ir.tensor(np.asarray(feeds[str(value.name)]), name=value.name)
        model.graph.inputs.remove(value)
        model.graph.initializers[str(value.name)] = value


def _array(proto: Any) -> Any:
    return onnx.numpy_helper.to_array(proto) if isinstance(proto, onnx.TensorProto) else proto


def _traced(rules: Sizes, shapes: Mapping[str, tuple[int, ...]]) -> list[Any] | None:
    """What the rules give for dimensions that note what is done with them; None where they need plain numbers."""
    tape = Tape([dim for shape in shapes.values() for dim in shape])
    dims = iter(range(len(tape.values)))
    try:
        found = rules.at({name: tuple(Dim(tape, next(dims)) for _ in shape) for name, shape in shapes.items()})
    except SizesError:
        return None
    return [s and tuple(tape.values[d.place] if isinstance(d, Dim) else d for d in s) for s in found]


@pytest.mark.filterwarnings("ignore")
def test_rules_give_what_the_reference_writes_in_every_node_test() -> None:
    with made_quickly(), warnings.catch_warnings(action="ignore"):
        from onnx.backend.test.case.node import collect_testcases

        cases = [case for case in collect_testcases(None) if case.model is not None]
    known, operators, traced = 0, set[str](), 0
    for case in cases:
        (inputs, outputs), model = case.data_sets[0], ir.from_proto(case.model)
        name_nodes(Model(model, "test"))
        feeds = {str(v.name): _array(fed) for v, fed in zip(model.graph.inputs, inputs, strict=False)}
        _decided(model, feeds)
        rules = Sizes(model)
        shapes = {
            str(v.name): np.shape(feeds[str(v.name)])
            for v in model.graph.inputs
            if isinstance(feeds.get(str(v.name)), np.ndarray | np.generic)
        }
        found = rules.at(shapes)
        for value, written in zip(model.graph.outputs, map(_array, outputs), strict=True):
            shape = dict(zip(rules.names, found, strict=True)).get(str(value.name))
            if shape is not None and isinstance(written, np.ndarray | np.generic):
                assert shape == np.shape(written), (case.name, value.name)
                known += 1
                operators |= {node.op_type for node in model.graph} if len(model.graph) == 1 else set()
        noted = _traced(rules, shapes)
        if noted is not None:
            assert noted == list(found), case.name
            traced += 1
    assert known > 2100
    assert len(operators) > 170
    assert traced > 1500


Case = Callable[[int, int], tuple[str, Arrays, Arrays]]
"""Of sizes b and s: a node as onnx's text has it, its inputs, and its initializers."""

_rng = np.random.default_rng(0)


def _f(*shape: int) -> np.ndarray:
    return _rng.standard_normal(shape, np.float32)


def _i(*shape: int, kind: Any = np.int64) -> np.ndarray:
    return np.zeros(shape, kind)


def _u(*shape: int) -> np.ndarray:
    return _rng.integers(0, 255, shape, np.uint8)


_SCALE, _ZERO = np.float32(0.1), np.uint8(3)
_Q = {"c": np.array(_SCALE), "o": np.array(_ZERO)}


def _attention24(b: int, s: int) -> tuple[str, Arrays, Arrays]:
    cache = {"pk": _f(b, 2, 5, 8), "pv": _f(b, 2, 5, 4)}
    q = {"q": _f(b, s, 32), "k": _f(b, s, 16), "v": _f(b, s, 8)}
    return "y, ky, vy = Attention<q_num_heads=4, kv_num_heads=2>(q, k, v, , pk, pv)", {**q, **cache}, {}


def _gqa(past: int, total: Callable[[int], int], packed: bool = False) -> Case:
    def made(b: int, s: int) -> tuple[str, Arrays, Arrays]:
        b, so_far = 1 if s > 1 else b, total(s)  # the kernel takes a past of several only for single tokens
        inputs = {"q": _f(b, s, 64 if packed else 32), "n": np.full(b, so_far - 1, np.int32)}
        inputs |= {"pk": _f(b, 2, past, 8), "pv": _f(b, 2, past, 8)}
        inputs |= {} if packed else {"k": _f(b, s, 16), "v": _f(b, s, 16)}
        keys = ", " if packed else "k, v"
        text = f"y, ky, vy = com.microsoft.GroupQueryAttention<num_heads=4, kv_num_heads=2>(q, {keys}, pk, pv, n, t)"
        return text, inputs, {"t": np.array(so_far, np.int32)}

    return made


def _like(text: str, **more: np.ndarray) -> Case:
    return lambda b, s: (f"y = com.microsoft.{text}", {"x": _f(b, s, 16)}, more)


MICROSOFT: dict[str, Case] = {
    "attention with a past": _attention24,
    "grouped, into a buffer": _gqa(24, lambda s: s + 3),
    "grouped, into a packed buffer": _gqa(24, lambda s: s + 3, packed=True),
    "grouped, that grows": _gqa(3, lambda s: s + 3),
    "projecting": lambda b, s: (
        "y, z = com.microsoft.Attention<num_heads=2>(x, w, v, , p)",
        {"x": _f(b, s, 16), "p": _f(2, b, 2, 5, 8)}, {"w": _f(16, 48), "v": _f(48)},
    ),
    "projecting, widths": lambda b, s: (
        "y, z = com.microsoft.Attention<num_heads=2, qkv_hidden_sizes=[16, 16, 16]>(x, w, v)",
        {"x": _f(b, s, 16)}, {"w": _f(16, 48), "v": _f(48)},
    ),
    "many heads": lambda b, s: (
        "y, ky, vy = com.microsoft.MultiHeadAttention<num_heads=2>(q, k, v, , , , pk, pv)",
        {"q": _f(b, s, 16), "k": _f(b, s, 16), "v": _f(b, s, 16), "pk": _f(b, 2, 5, 8), "pv": _f(b, 2, 5, 8)}, {},
    ),
    "many heads, cached keys": lambda b, s: (
        "y = com.microsoft.MultiHeadAttention<num_heads=2>(q, k, v)",
        {"q": _f(b, s, 16), "k": _f(b, 2, 7, 8), "v": _f(b, 2, 7, 8)}, {},
    ),
    "decoding": lambda b, s: (
        "y, ky, vy = com.microsoft.DecoderMaskedMultiHeadAttention<num_heads=2, past_present_share_buffer=1>"
        "(q, k, v, , , pk, pv, n)",
        {"q": _f(b, 1, 16), "k": _f(b, 1, 16), "v": _f(b, 1, 16), "pk": _f(b, 2, s, 8), "pv": _f(b, 2, s, 8)},
        {"n": np.array([0], np.int32)},
    ),
    "linear attention": lambda b, s: (
        'y, z = com.microsoft.LinearAttention<q_num_heads=2, kv_num_heads=2, update_rule="linear">(q, k, v)',
        {"q": _f(b, s, 16), "k": _f(b, s, 16), "v": _f(b, s, 8)}, {},
    ),
    "causal convolution": lambda b, s: (
        "y, z = com.microsoft.CausalConvWithState(x, w)", {"x": _f(b, 6, s)}, {"w": _f(6, 1, 4)},
    ),
    "int4": lambda b, s: (
        "y = com.microsoft.MatMulNBits<K=32, N=24, bits=4, block_size=32>(x, w, c)",
        {"x": _f(b, s, 32)}, {"w": _u(24, 1, 16), "c": _f(24)},
    ),
    "int4 rows": lambda b, s: (
        "y = com.microsoft.GatherBlockQuantized<bits=4, block_size=32, gather_axis=0, quantize_axis=1>(d, x, c)",
        {"x": _i(b, s)}, {"d": _u(20, 32), "c": _f(20, 2)},
    ),
    "experts": lambda b, s: (
        'y = com.microsoft.MoE<k=2, activation_type="relu">(x, r, w, , u)',
        {"x": _f(b, s, 16), "r": _f(b * s, 4)}, {"w": _f(4, 32, 16), "u": _f(4, 16, 32)},
    ),
    "quantized experts": lambda b, s: (
        'y = com.microsoft.QMoE<k=2, activation_type="relu", expert_weight_bits=8>(x, r, w, c, , u, d)',
        {"x": _f(b, s, 32), "r": _f(b * s, 4)},
        {"w": _u(4, 64, 32), "c": abs(_f(4, 64)), "u": _u(4, 32, 64), "d": abs(_f(4, 32))},
    ),
    "distances": lambda b, s: (
        'y = com.microsoft.CDist<metric="euclidean">(x, z)', {"x": _f(b, 4), "z": _f(s, 4)}, {},
    ),
    "crops": lambda b, s: (
        "y = com.microsoft.CropAndResize(x, r, i, k)",
        {"x": _f(b, 3, s, s), "r": _f(5, 4), "i": _i(5, kind=np.int32)}, {"k": np.array([4, 6], np.int32)},
    ),
    "unfolded": lambda b, s: (
        "y = com.microsoft.UnfoldTensor<dim=1, size=3, step=2>(x)", {"x": _f(b, s + 3, 4)}, {},
    ),
    "transposed product": lambda b, s: (
        "y = com.microsoft.TransposeMatMul<transA=1>(x, z)", {"x": _f(b, s, 4), "z": _f(b, s, 6)}, {},
    ),
    "masked pooling": lambda b, s: (
        "y = com.microsoft.MaxpoolWithMask<kernel_shape=[2, 2], strides=[2, 2]>(x, m)",
        {"x": _f(b, 3, s + 2, s + 2), "m": np.ones((b, 3, s + 2, s + 2), np.int32)}, {},
    ),
    "transposed convolution": lambda b, s: (
        "y = com.microsoft.ConvTransposeWithDynamicPads<strides=[2, 2], kernel_shape=[3, 3]>(x, w, p)",
        {"x": _f(b, 3, s + 1, s + 1)}, {"w": _f(3, 2, 3, 3), "p": np.array([1, 0, 1, 1])},
    ),
    "quantized embeddings": lambda b, s: (
        "y, z = com.microsoft.QEmbedLayerNormalization(x, , w, p, , g, g, , c, c, , c, c, o, o, , o, o)",
        {"x": _i(b, s, kind=np.int32)}, {"w": _u(9, 16), "p": _u(32, 16), "g": _u(16), **_Q},
    ),
    "quantized choice": lambda b, s: (
        "y = com.microsoft.QLinearWhere(m, x, c, o, z, c, o, c, o)",
        {"m": np.ones((b, 1), bool), "x": _u(b, s), "z": _u(1, s)}, _Q,
    ),
    "words": lambda b, s: (
        "y = com.microsoft.WordConvEmbedding(x, w, v, e)",
        {"x": np.ones((s, 8), np.int32)}, {"w": _f(6, 1, 3, 4), "v": _f(6), "e": _f(9, 4)},
    ),
    "repeated words": lambda b, s: (
        "y = com.microsoft.NGramRepeatBlock<ngram_size=2>(i, x)", {"i": _i(b, s + 2), "x": _f(b, 9)}, {},
    ),
    "by number": lambda b, s: ("y = com.microsoft.GatherND(x, i)", {"x": _f(5, 4), "i": _i(b, s, 1)}, {}),
    "from a grid": lambda b, s: (
        "y = com.microsoft.GridSample(x, g)", {"x": _f(b, 3, 4, 4), "g": _f(b, s, 5, 2)}, {},
    ),
    "hashes": lambda b, s: ("y = com.microsoft.MurmurHash3(x)", {"x": _i(b, s, kind=np.int32)}, {}),
    "inverses": lambda b, s: (
        "y = com.microsoft.Inverse(x)", {"x": np.broadcast_to(np.eye(4, dtype=np.float32), (b, s, 4, 4)).copy()}, {},
    ),
    "gated": _like("GatedRMSNorm(x, g, x)", g=_f(16)),
    "in branches": _like("BranchwiseRMSNorm<num_branches=2>(x, g)", g=_f(16)),
}  # fmt: skip

LEARNERS: dict[str, Case] = {
    "linear classes": lambda b, s: (
        "y, z = ai.onnx.ml.LinearClassifier<classlabels_ints=[0, 1, 2], coefficients=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6], "
        "intercepts=[0.0, 0.1, 0.2]>(x)", {"x": _f(b, 2)}, {},
    ),
    "two classes of one row": lambda b, s: (
        "y, z = ai.onnx.ml.LinearClassifier<classlabels_ints=[0, 1], coefficients=[0.1, 0.2], intercepts=[0.0]>(x)",
        {"x": _f(b, 2)}, {},
    ),
    "a line": lambda b, s: (
        "y = ai.onnx.ml.LinearRegressor<targets=2, coefficients=[0.1, 0.2, 0.3, 0.4], intercepts=[0.0, 0.0]>(x)",
        {"x": _f(b, 2)}, {},
    ),
    "trees": lambda b, s: (
        "y, z = ai.onnx.ml.TreeEnsembleClassifier<classlabels_int64s=[0, 1, 2], nodes_treeids=[0, 0, 0], "
        "nodes_nodeids=[0, 1, 2], nodes_featureids=[0, 0, 0], nodes_values=[0.5, 0.0, 0.0], nodes_hitrates=[1.0, 1.0, "
        '1.0], nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"], nodes_truenodeids=[1, 0, 0], nodes_falsenodeids=[2, 0, 0], '
        "nodes_missing_value_tracks_true=[0, 0, 0], class_treeids=[0, 0], class_nodeids=[1, 2], class_ids=[0, 2], "
        "class_weights=[1.0, 1.0]>(x)", {"x": _f(b, 2)}, {},
    ),
    "trees that add up": lambda b, s: (
        "y = ai.onnx.ml.TreeEnsembleRegressor<n_targets=1, nodes_treeids=[0, 0, 0], nodes_nodeids=[0, 1, 2], "
        "nodes_featureids=[0, 0, 0], nodes_values=[0.5, 0.0, 0.0], nodes_hitrates=[1.0, 1.0, 1.0], "
        'nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"], nodes_truenodeids=[1, 0, 0], nodes_falsenodeids=[2, 0, 0], '
        "nodes_missing_value_tracks_true=[0, 0, 0], target_treeids=[0, 0], target_nodeids=[1, 2], target_ids=[0, 0], "
        "target_weights=[1.0, 2.0]>(x)", {"x": _f(b, 2)}, {},
    ),
    "support vectors": lambda b, s: (
        "y, z = ai.onnx.ml.SVMClassifier<classlabels_ints=[0, 1, 2], coefficients=[1.0, 1.0, 1.0, 1.0, 1.0, 1.0], "
        'kernel_params=[0.1, 0.0, 3.0], kernel_type="RBF", prob_a=[0.1, 0.1, 0.1], prob_b=[0.1, 0.1, 0.1], '
        "rho=[0.1, 0.1, 0.1], support_vectors=[0.0, 0.1, 0.2, 0.3, 0.4, 0.5], vectors_per_class=[1, 1, 1]>(x)",
        {"x": _f(b, 2)}, {},
    ),
    "support vectors, a number": lambda b, s: (
        'y = ai.onnx.ml.SVMRegressor<coefficients=[1.0, 1.0], kernel_params=[0.1, 0.0, 3.0], kernel_type="RBF", '
        "n_supports=2, rho=[0.1], support_vectors=[0.0, 0.1, 0.2, 0.3]>(x)", {"x": _f(b, 2)}, {},
    ),
    "categories": lambda b, s: (
        "y = ai.onnx.ml.OneHotEncoder<cats_int64s=[0, 1, 2, 3], zeros=1>(x)", {"x": _i(b, s)}, {},
    ),
    "features": lambda b, s: (
        "y = ai.onnx.ml.FeatureVectorizer<inputdimensions=[3, 2]>(x, z)", {"x": _f(b, 3), "z": _f(b, 2)}, {},
    ),
    "picked": lambda b, s: ("y = ai.onnx.ml.ArrayFeatureExtractor(x, i)", {"x": _f(b, 4), "i": _i(1, s)}, {}),
    "picked by rows": lambda b, s: ("y = ai.onnx.ml.ArrayFeatureExtractor(x, i)", {"x": _f(b, 4), "i": _i(s, 1)}, {}),
    "one picked": lambda b, s: (
        "y = ai.onnx.ml.ArrayFeatureExtractor(x, i)", {"x": _f(b, 4)}, {"i": np.array(1, np.int64)},
    ),
    "normalized": lambda b, s: ('y = ai.onnx.ml.Normalizer<norm="L2">(x)', {"x": _f(b, 4)}, {}),
    "scaled": lambda b, s: ("y = ai.onnx.ml.Scaler<offset=[0.5], scale=[2.0]>(x)", {"x": _f(b, 4)}, {}),
    "filled": lambda b, s: ("y = ai.onnx.ml.Imputer<imputed_value_floats=[0.5]>(x)", {"x": _f(b, 4)}, {}),
    "halves": lambda b, s: ("y = ai.onnx.ml.Binarizer<threshold=0.5>(x)", {"x": _f(b, 4)}, {}),
    "labels": lambda b, s: (
        "y = ai.onnx.ml.LabelEncoder<keys_int64s=[0, 1], values_floats=[0.5, 1.0]>(x)", {"x": _i(b, s)}, {},
    ),
    "counts": lambda b, s: (
        'y = TfIdfVectorizer<max_gram_length=2, max_skip_count=0, min_gram_length=1, mode="TF", ngram_counts=[0, 2], '
        "ngram_indexes=[0, 1, 2], pool_int64s=[1, 2, 3, 4]>(x)", {"x": _i(b, s + 1)}, {},
    ),
}  # fmt: skip


def _model_of(text: str, inputs: Arrays, held: Arrays) -> onnx.ModelProto:
    sets = '"": 23, "com.microsoft": 1, "ai.onnx.ml": 3'
    model = onnx.parser.parse_model(f"<ir_version: 10, opset_import: [{sets}]> g () => () {{ {text} }}")
    for name, array in inputs.items():
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        model.graph.input.append(helper.make_tensor_value_info(name, kind, [None] * array.ndim))
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in held.items())
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in model.graph.node[0].output)
    return model


@pytest.mark.parametrize("name", [*MICROSOFT, *LEARNERS])
def test_rules_of_other_domains_give_what_the_kernels_write(name: str) -> None:
    case = {**MICROSOFT, **LEARNERS}[name]
    for b, s in ((2, 6), (1, 3), (3, 1)):
        text, inputs, held = case(b, s)
        model = _model_of(text, inputs, held)
        loaded = ir.from_proto(model)
        name_nodes(Model(loaded, "test"))
        rules = Sizes(loaded)
        found = dict(zip(rules.names, rules.at({key: array.shape for key, array in inputs.items()}), strict=True))
        written = networks.run_stock(networks.stock(model, "ORT_DISABLE_ALL"), dict(inputs))
        assert found == {key: np.shape(array) for key, array in written.items()}


CONTENTS = (
    "s = ReduceProd<keepdims=0>(n) m = Reshape(s, m1)", "s = ReduceSum<keepdims=0>(n) m = Unsqueeze(s, nought)",
    "s = ReduceMax<keepdims=0>(n) m = Reshape(s, m1)", "s = ReduceMin<keepdims=0>(n) m = Reshape(s, m1)",
    "s = Size(x) m = Reshape(s, m1)", "m = Max(n, m1)", "m = Min(n, seven)", "m = Mod(n, seven)", "m = Div(n, two)",
    "s = Squeeze(n) t = Gather(n, nought) u = Mul(s, t) m = Abs(u)", "e = Equal(n, seven) m = Where(e, two, n)",
    "c = Concat<axis=0>(n, n) u = CumSum(c, zero) m = Slice(u, one, two)", "l = Less(n, seven) m = Where(l, n, seven)",
    "s = Sub(n, seven) t = Neg(s) u = Abs(t) m = Add(u, one)", "t = Expand(n, one) m = Tile(t, one)",
    "c = Cast<to=6>(n) m = Cast<to=7>(c)", "t = Transpose(n) m = Clip(t, zero)",
)  # fmt: skip


@pytest.mark.parametrize("text", CONTENTS)
def test_sizes_computed_from_sizes_are_the_same_noted_and_as_run(text: str) -> None:
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]> g (float[b,s] x) => (float[k] y) {{
            n = Shape<start=1>(x) {text} y = ConstantOfShape(m) }}"""
    )
    numbers = {"m1": [-1], "nought": [0], "one": [1], "two": [2], "seven": [7], "zero": 0}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.array(n), name) for name, n in numbers.items())
    loaded = ir.from_proto(model)
    name_nodes(Model(loaded, "test"))
    rules, stock = Sizes(loaded), networks.stock(model, "ORT_DISABLE_ALL")
    for shape in ((2, 5), (3, 7), (1, 11)):
        (written,) = networks.run_stock(stock, {"x": _f(*shape)}).values()
        found = rules.at({"x": shape})
        assert found[-1] == written.shape
        assert _traced(rules, {"x": shape}) in (None, list(found))


Shapes = Mapping[str, tuple[int, ...]]

DOCUMENTED: tuple[tuple[str, Shapes, Shapes], ...] = (
    (
        "y, k2, v2 = com.microsoft.PagedAttention<num_heads=4, kv_num_heads=2>(q, k, v, kc, vc, n, p, t)",
        {"q": (7, 32), "k": (7, 16), "v": (7, 16), "kc": (9, 16, 2, 8), "vc": (9, 16, 2, 8), "n": (3,), "p": (2,),
         "t": (2, 4)},
        {"y": (7, 32), "k2": (9, 16, 2, 8), "v2": (9, 16, 2, 8)},
    ),
    (
        "y, k2, v2 = com.microsoft.SparseAttention<num_heads=4, kv_num_heads=2, sparse_block_size=16>"
        "(q, , , kc, vc, r, c, t, n)",
        {"q": (2, 5, 64), "kc": (2, 2, 32, 8), "vc": (2, 2, 32, 8), "r": (1, 3), "c": (1, 4), "t": (), "n": (2,)},
        {"y": (2, 5, 32), "k2": (2, 2, 32, 8), "v2": (2, 2, 32, 8)},
    ),
    (
        "q, k, v = com.microsoft.MatMulNBitsQkv<K=32, Nq=64, Nkv=16, bits=4, block_size=32>(x, , g, a, b)",
        {"x": (2, 5, 32), "g": (32,), "a": (64, 1, 16), "b": (64,)},
        {"q": (2, 5, 64), "k": (2, 5, 16), "v": (2, 5, 16)},
    ),
    ("y = com.microsoft.GemmFastGelu(x, w)", {"x": (2, 5, 8), "w": (8, 3)}, {"y": (2, 5, 3)}),
    ("y = com.microsoft.BiasSplitGelu(x, b)", {"x": (2, 5, 8), "b": (8,)}, {"y": (2, 5, 4)}),
    (
        "y, s = com.microsoft.SkipGroupNorm(x, g, g, z)", {"x": (2, 3, 3, 8), "g": (8,), "z": (2, 3, 3, 8)},
        {"y": (2, 3, 3, 8), "s": (2, 3, 3, 8)},
    ),
    ("y = com.microsoft.NhwcConv<pads=[1,1,1,1]>(x, w)", {"x": (2, 7, 9, 4), "w": (6, 4, 3, 3)}, {"y": (2, 7, 9, 6)}),
    (
        "y = com.microsoft.QLinearReduceMean<axes=[1], keepdims=0>(x, c, o, c, o)",
        {"x": (2, 5, 8), "c": (), "o": ()}, {"y": (2, 8)},
    ),
    ("y = com.microsoft.Rfft<signal_ndim=1, normalized=0, onesided=1>(x)", {"x": (2, 8)}, {"y": (2, 5, 2)}),
    ("y = com.microsoft.Irfft<signal_ndim=1, normalized=0, onesided=1>(x)", {"x": (2, 5, 2)}, {"y": (2, 8)}),
    ("y = com.microsoft.TorchEmbedding(w, i)", {"w": (9, 4), "i": (2, 5)}, {"y": (2, 5, 4)}),
    ("y = com.microsoft.MulInteger(x, , z)", {"x": (2, 1, 4), "z": (5, 4)}, {"y": (2, 5, 4)}),
    ("y = com.microsoft.SwiGLU(x)", {"x": (2, 5, 8)}, {"y": (2, 5, 4)}),
    ("y = com.microsoft.GatherPacked<K=64>(d, i)", {"d": (9, 36), "i": (2, 5)}, {"y": (2, 5, 64)}),
    (
        "y = com.microsoft.GatedRelativePositionBias<num_heads=2>(q, b, p, w, c, e)",
        {"q": (3, 5, 16), "b": (16,), "p": (1, 2, 5, 5), "w": (8, 8), "c": (8,), "e": (1, 2, 1, 1)},
        {"y": (3, 2, 5, 5)},
    ),
)  # fmt: skip
"""Operators that aren't run here, most without a kernel on the CPU: a node, inputs' shapes, outputs' by its schema."""


@pytest.mark.parametrize(("text", "shapes", "expected"), DOCUMENTED)
def test_rules_of_operators_that_are_not_run_here_give_what_their_schemas_say(
    text: str, shapes: Shapes, expected: Shapes
) -> None:
    loaded = ir.from_proto(_model_of(text, {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, {}))
    name_nodes(Model(loaded, "test"))
    rules = Sizes(loaded)
    assert dict(zip(rules.names, rules.at(shapes), strict=True)) == expected


def test_outputs_whose_size_an_unknown_content_does_not_decide_are_told() -> None:
    text = "y, ky, vy = com.microsoft.GroupQueryAttention<num_heads=4, kv_num_heads=2>(q, k, v, pk, pv, n, t)"
    _, inputs, held = _gqa(3, lambda s: s + 3)(1, 4)
    loaded = ir.from_proto(_model_of(text, {**inputs, **held}, {}))
    name_nodes(Model(loaded, "test"))
    rules = Sizes(loaded)
    shapes = {name: array.shape for name, array in {**inputs, **held}.items()}
    assert dict(zip(rules.names, rules.at(shapes), strict=True)) == {"y": (1, 4, 32), "ky": None, "vy": None}
