"""Cases for gradients of onnxruntime's own operators, whose tests onnx's suite doesn't have."""

from collections.abc import Iterator, Mapping

import numpy as np
import onnx

from tests.support.node_cases import Case, is_floating

PACKED = "float[2,3,8] x, float[8,24] w, float[24] b"
QKV = "float[2,3,8] q, float[2,3,8] k, float[2,3,8] v"
PAST = "float[2,2,2,4] pk, float[2,2,2,4] pv"
IMAGE = "float[1,2,5,5] x, float[3,2,3,3] w, float[3] b"
SKIPPED = "float[2,3,4] x, float[2,3,4] s, float[4] g, float[4] c"

TEXTS: Mapping[str, str] = {
    "gelu": "(float[3,4] x) => (float[3,4] y) {y = X.Gelu(x)}",
    "bias_gelu": "(float[3,4] x, float[4] b) => (float[3,4] y) {y = X.BiasGelu(x, b)}",
    "fast_gelu": "(float[3,4] x) => (float[3,4] y) {y = X.FastGelu(x)}",
    "fast_gelu_bias": "(float[3,4] x, float[4] b) => (float[3,4] y) {y = X.FastGelu(x, b)}",
    "quick_gelu": "(float[3,4] x) => (float[3,4] y) {y = X.QuickGelu<alpha = 1.5>(x)}",
    "fused_matmul": "(float[2,4,3] x, float[2,5,4] w) => (float[2,3,5] y)"
    "{y = X.FusedMatMul<transA = 1, transB = 1, alpha = 0.5>(x, w)}",
    "fused_matmul_batches": "(float[3,2,4] x, float[2,4,5] w) => (float[2,3,5] y)"
    "{y = X.FusedMatMul<transBatchA = 1>(x, w)}",
    "fused_gemm": "(float[3,4] x, float[5,4] w, float[5] b) => (float[3,5] y)"
    '{y = X.FusedGemm<transB = 1, alpha = 0.5, activation = "LeakyRelu", activation_alpha = 0.3>(x, w, b)}',
    "fused_conv": f"({IMAGE}, float[1,3,5,5] z) => (float[1,3,5,5] y)"
    '{y = X.FusedConv<pads = [1,1,1,1], kernel_shape = [3,3], activation = "Relu">(x, w, b, z)}',
    "fused_conv_leaky": f"({IMAGE}) => (float[1,3,5,5] y)"
    '{y = X.FusedConv<pads = [1,1,1,1], activation = "LeakyRelu", activation_params = [0.3]>(x, w, b)}',
    "skip_layer_normalization": f"({SKIPPED}, float[4] d) => (float[2,3,4] y, float[2,3,4] z)"
    "{y, m, i, z = X.SkipLayerNormalization<epsilon = 0.001>(x, s, g, c, d)}",
    "skip_simplified_layer_normalization": f"({SKIPPED}) => (float[2,3,4] y, float[2,3,4] z)"
    "{y, m, i, z = X.SkipSimplifiedLayerNormalization<epsilon = 0.001>(x, s, g, c)}",
    "simplified_layer_normalization": "(float[2,3,4] x, float[4] c) => (float[2,3,4] y)"
    "{h = SimplifiedLayerNormalization<axis = -1, epsilon = 0.001>(x, c) y = Identity(h)}",
    "simplified_layer_normalization_axes": "(float[2,3,4] x, float[3,4] c) => (float[2,3,4] y, float[2,1,1] i)"
    "{y, i = SimplifiedLayerNormalization<axis = 1, epsilon = 0.001>(x, c)}",
    "rotary": "(float[2,3,8] x, int64[2,3] p, float[6,2] c, float[6,2] s) => (float[2,3,8] y)"
    "{y = X.RotaryEmbedding(x, p, c, s)}",
    "rotary_interleaved": "(float[2,2,3,4] x, int64[1] p, float[6,2] c, float[6,2] s) => (float[2,2,3,4] y)"
    "{y = X.RotaryEmbedding<interleaved = 1>(x, p, c, s)}",
    "attention": f"({PACKED}) => (float[2,3,8] y){{y = X.Attention<num_heads = 2, unidirectional = 1>(x, w, b)}}",
    "attention_mask": f"({PACKED}, int32[2,3] m) => (float[2,3,8] y){{y = X.Attention<num_heads = 2>(x, w, b, m)}}",
    "attention_bias": f"({PACKED}, int32[2,3,3] m, float[2,2,3,3] a) => (float[2,3,8] y)"
    "{y = X.Attention<num_heads = 2, scale = 0.3>(x, w, b, m, , a)}",
    "attention_past": f"({PACKED}, float[2,2,2,3,4] a) => (float[2,3,8] y, float[2,2,2,6,4] n)"
    "{y, n = X.Attention<num_heads = 2>(x, w, b, , a)}",
    "multi_head": "(float[2,3,8] q, float[2,4,8] k, float[2,4,8] v, float[24] b, int32[2,4] m, float[1,2,3,4] a)"
    "=> (float[2,3,8] y) {y = X.MultiHeadAttention<num_heads = 2>(q, k, v, b, m, a)}",
    "multi_head_causal": f"({QKV}) => (float[2,3,8] y)"
    "{y = X.MultiHeadAttention<num_heads = 2, unidirectional = 1>(q, k, v)}",
    "multi_head_heads": "(float[2,3,8] q, float[2,2,5,4] k, float[2,2,5,4] v) => (float[2,3,8] y)"
    "{y = X.MultiHeadAttention<num_heads = 2>(q, k, v)}",
    "multi_head_past": f"({QKV}, {PAST}) => (float[2,3,8] y, float[2,2,5,4] nk, float[2,2,5,4] nv)"
    "{y, nk, nv = X.MultiHeadAttention<num_heads = 2>(q, k, v, , , , pk, pv)}",
    "group_query": f"({QKV}, {PAST}, int32[2] n, int32 t) => (float[2,3,8] y, float[2,2,5,4] nk, float[2,2,5,4] nv)"
    "{y, nk, nv = X.GroupQueryAttention<num_heads = 2, kv_num_heads = 2>(q, k, v, pk, pv, n, t)}",
}
"""Models by name, ``X`` for com.microsoft. Whole numbers are positions, lengths, and masks."""

WHOLE: Mapping[str, object] = {
    "rotary.p": [[0, 1, 2], [2, 3, 4]], "rotary_interleaved.p": [1], "attention_mask.m": [[1, 1, 0], [1, 1, 1]],
    "attention_bias.m": [[[1, 1, 0], [1, 1, 1], [1, 0, 1]]] * 2, "multi_head.m": [[1, 1, 0, 1], [1, 1, 1, 1]],
    "group_query.n": [4, 4], "group_query.t": 5,
}  # fmt: skip


def fused_cases() -> Iterator[Case]:
    """A case for each of `TEXTS`, in float32: most of these operators take nothing wider."""
    for name, text in TEXTS.items():
        head = '<ir_version: 10, opset_import: ["": 20, "com.microsoft": 1]>\n'
        model = onnx.parser.parse_model(f"{head}{name} {text.replace('X.', 'com.microsoft.')}")
        generator, feeds, wrt = np.random.default_rng(0), {}, []
        for value in model.graph.input:
            kind = value.type.tensor_type.elem_type
            shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
            drawn = WHOLE.get(f"{name}.{value.name}", generator.standard_normal(shape))
            feeds[value.name] = np.asarray(drawn, onnx.helper.tensor_dtype_to_np_dtype(kind))
            wrt += [value.name] if is_floating(kind) else []
        yield Case(f"com.microsoft {name}", _operator(model.graph.node[0]), model, feeds, tuple(wrt))


def _operator(node: onnx.NodeProto) -> str:
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type
