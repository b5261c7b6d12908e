"""Scaled dot-product attention, the standard's and onnxruntime's, written out (Vaswani et al. 2017).

Rows whose every key is masked attend nowhere: they give zeros, and no gradient.
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from memonger.autodiff.registry import expansion
from memonger.autodiff.rules.movement import zeros
from memonger.ir.emitter import Emitter
from memonger.ir.values import input_at


@expansion("Attention")
def _attention(op: Emitter, node: ir.Node) -> tuple[ir.Value | None, ...]:
    q, k, v = (op.given(node, i) for i in range(3))
    batch, flat = op.dims(q)[0], len(op.dims(q)) == 3
    if flat:
        of_q, of_k = op.attribute(node, "q_num_heads", 1), op.attribute(node, "kv_num_heads", 1)
        q, k, v = _heads(op, q, of_q), _heads(op, k, of_k), _heads(op, v, of_k)
    past = [input_at(node, i) for i in (4, 5)]
    if past[0] is not None and past[1] is not None:
        k, v = op.Concat(past[0], k, axis=2), op.Concat(past[1], v, axis=2)
    scale = op.attribute(node, "scale", op.dims(q)[3] ** -0.5)
    logits = op.MatMul(op.Mul(q, scale), op.transpose(_repeated(op, k, q), (0, 1, 3, 2)))
    softcap = op.attribute(node, "softcap", 0.0)
    capped = op.Mul(op.Tanh(op.Mul(logits, 1 / softcap)), softcap) if softcap else logits
    bias = _bias(op, node, batch, op.dims(q)[2], op.dims(k)[2], 0 if past[0] is None else op.dims(past[0])[2])
    shares, biased = _shares(op, capped, bias, op.attribute(node, "softmax_precision", 0))
    y = op.MatMul(shares, _repeated(op, v, q))
    mode = op.attribute(node, "qk_matmul_output_mode", 0)
    results = (_joined(op, y) if flat else y, k, v, (logits, capped, biased, shares)[mode])
    return results[: len(node.outputs)]


def _heads(op: Emitter, x: ir.Value, heads: int) -> ir.Value:
    """``[B, S, N·D]`` as ``[B, N, S, D]``."""
    batch, length, width = op.dims(x)
    return op.transpose(op.reshape(x, (batch, length, heads, width // heads)), (0, 2, 1, 3))


def _joined(op: Emitter, y: ir.Value) -> ir.Value:
    """``[B, N, S, D]`` as ``[B, S, N·D]``."""
    batch, heads, length, width = op.dims(y)
    return op.reshape(op.transpose(y, (0, 2, 1, 3)), (batch, length, heads * width))


def _repeated(op: Emitter, x: ir.Value, q: ir.Value) -> ir.Value:
    """Keys or values, each head as often as queries share it."""
    batch, heads, length, width = op.dims(x)
    times = op.dims(q)[1] // heads
    if times == 1:
        return x
    spread = op.expand(op.reshape(x, (batch, heads, 1, length, width)), (batch, heads, times, length, width))
    return op.reshape(spread, (batch, heads * times, length, width))


def _bias(op: Emitter, node: ir.Node, batch: int, queries: int, keys: int, past: int) -> ir.Value | None:
    """What is added to the logits: the mask, and -inf where causality, a window or padding forbids a key."""
    dtype, mask, lengths = op.given(node, 0).dtype, input_at(node, 3), input_at(node, 6)
    if mask is not None and op.dims(mask)[-1] < keys:
        nothing = op.constant(False if mask.dtype == ir.DataType.BOOL else -np.inf, mask.dtype)
        rest = op.Expand(nothing, op.ints(*op.dims(mask)[:-1], keys - op.dims(mask)[-1]))
        mask = op.Concat(mask, rest, axis=-1)
    left, right = op.attribute(node, "left_window_size", -1), op.attribute(node, "right_window_size", -1)
    least = 0 if op.attribute(node, "is_causal", 0) else (-keys - queries if right < 0 else -right)
    most = left if left >= 0 else keys + queries
    ahead = np.subtract.outer(np.arange(queries), np.arange(keys)) + past  # from a key to a query
    allowed: ir.Value | None = None
    if lengths is not None:  # the last query is at the end of as many keys
        column = op.reshape(lengths, (batch, 1, 1, 1))
        distance = op.Add(op.Sub(column, queries), op.constant(ahead.reshape(1, 1, queries, keys)))
        within = op.And(op.GreaterOrEqual(distance, least), op.LessOrEqual(distance, most))
        allowed = op.And(op.Less(op.constant(np.arange(keys).reshape(1, 1, 1, keys)), column), within)
    elif ahead.min() < least or ahead.max() > most:
        allowed = op.constant((ahead >= least) & (ahead <= most))
    if mask is not None and mask.dtype == ir.DataType.BOOL:
        allowed, mask = mask if allowed is None else op.And(allowed, mask), None
    if allowed is None:
        return mask
    hidden = op.Where(allowed, op.constant(0.0, dtype), op.constant(-np.inf, dtype))
    return hidden if mask is None else op.Add(mask, hidden)


def _shares(op: Emitter, logits: ir.Value, bias: ir.Value | None, precision: int = 0) -> tuple[ir.Value, ir.Value]:
    """What each query takes of each key, and the logits with the bias."""
    dtype = logits.dtype
    if bias is None:
        return op.cast(op.Softmax(_precise(op, logits, precision), axis=-1), dtype), logits
    nowhere = op.Equal(op.ReduceMax(bias, op.ints(-1), keepdims=1), op.constant(-np.inf, dtype))
    nought = op.constant(0.0, dtype)
    safe = op.Where(nowhere, nought, bias)
    shares = op.cast(op.Softmax(_precise(op, op.Add(logits, safe), precision), axis=-1), dtype)
    return op.Where(nowhere, nought, shares), op.Add(logits, bias)


def _precise(op: Emitter, x: ir.Value, precision: int) -> ir.Value:
    return op.cast(x, ir.DataType(precision)) if precision else x


@expansion("com.microsoft::MultiHeadAttention")
def _multi_head(op: Emitter, node: ir.Node) -> tuple[ir.Value | None, ...] | None:
    """With queries ``[B, S, N·D]``, keys and values likewise or ``[B, N, L, D]``; a mask of keys ``[B, L]``."""
    inputs = [input_at(node, i) for i in range(8)]
    q, k, v, bias, mask = inputs[:5]
    if q is None or k is None or v is None or len(op.dims(q)) != 3 or len(node.inputs) > 8:
        return None
    if mask is not None and len(op.dims(mask)) != 2:
        return None
    heads = op.attribute(node, "num_heads", 1)
    if bias is not None:
        widths = [op.dims(x)[-1] * (heads if len(op.dims(x)) == 4 else 1) for x in (q, k, v)]
        of_q, of_k, of_v = op.split(bias, widths, 0)
        q = op.Add(q, of_q)
        k, v = (op.Add(x, b) if len(op.dims(x)) == 3 else x for x, b in ((k, of_k), (v, of_v)))
    q, k, v = (_heads(op, x, heads) if len(op.dims(x)) == 3 else x for x in (q, k, v))
    if inputs[6] is not None and inputs[7] is not None:
        k, v = op.Concat(inputs[6], k, axis=2), op.Concat(inputs[7], v, axis=2)
    y = _fused(op, node, (q, k, v), None if mask is None else _key_mask(op, node, mask), inputs[5])
    return (_joined(op, y), k, v)[: len(node.outputs)]


@expansion("com.microsoft::Attention")
def _packed(op: Emitter, node: ir.Node) -> tuple[ir.Value | None, ...] | None:
    """One product gives queries, keys and values. Masks are ``[B, L]`` or ``[B, S, L]``: 1 where a key counts."""
    x, weight = op.given(node, 0), op.given(node, 1)
    bias, mask, past, added = (input_at(node, i) for i in (2, 3, 4, 5))
    ragged = mask is not None and len(op.dims(mask)) not in (2, 3)
    if past is not None or len(node.outputs) > 1 or ragged or op.attribute(node, "do_rotary", 0):
        return None
    heads, width = op.attribute(node, "num_heads", 1), op.dims(weight)[1]
    sizes: Sequence[int] = op.attribute(node, "qkv_hidden_sizes", []) or [width // 3] * 3
    product = op.MatMul(x, weight)
    product = product if bias is None else op.Add(product, bias)
    q, k, v = (_heads(op, part, heads) for part in op.split(product, sizes, 2))
    return (_joined(op, _fused(op, node, (q, k, v), None if mask is None else _key_mask(op, node, mask), added)),)


def _key_mask(op: Emitter, node: ir.Node, mask: ir.Value) -> ir.Value:
    """-10,000, or what the node says, where a key doesn't count."""
    dims, dtype = op.dims(mask), op.given(node, 0).dtype
    counts = op.reshape(mask, (dims[0], 1, 1, dims[1]) if len(dims) == 2 else (dims[0], 1, *dims[1:]))
    low = op.attribute(node, "mask_filter_value", -10000.0)
    return op.Where(op.Greater(counts, 0), op.constant(0.0, dtype), op.constant(low, dtype))


def _fused(
    op: Emitter, node: ir.Node, parts: tuple[ir.Value, ...], mask: ir.Value | None, added: ir.Value | None
) -> ir.Value:
    q, k, v = parts
    scale = op.attribute(node, "scale", 0.0) or op.dims(q)[3] ** -0.5
    logits = op.MatMul(op.Mul(q, scale), op.transpose(k, (0, 1, 3, 2)))
    queries, keys = op.dims(q)[2], op.dims(k)[2]
    if op.attribute(node, "unidirectional", 0):
        allowed = np.subtract.outer(np.arange(queries), np.arange(keys)) + keys - queries >= 0
        low = op.constant(-np.inf, q.dtype)
        causal = op.Where(op.constant(allowed), zeros(op, (), q.dtype), low)
        mask = causal if mask is None else op.Add(mask, causal)
    for each in (added, mask):
        logits = logits if each is None else op.Add(logits, each)
    return op.MatMul(op.Softmax(logits, axis=-1), v)
