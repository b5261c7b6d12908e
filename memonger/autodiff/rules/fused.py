"""Operators of onnxruntime that its optimizer and exporters write, as the standard operators they stand for."""

from collections.abc import Sequence

import onnx_ir as ir

from memonger.autodiff.registry import expansion
from memonger.ir.emitter import Emitter
from memonger.ir.values import input_at

ACTIVATIONS = {
    "Relu": (), "Tanh": (), "Sigmoid": (), "LeakyRelu": ("alpha",), "HardSigmoid": ("alpha", "beta"),
    "Clip": ("min", "max"),
}  # fmt: skip


@expansion("com.microsoft::Gelu", "com.microsoft::BiasGelu")
def _gelu(op: Emitter, node: ir.Node) -> tuple[ir.Value, ...]:
    return (op.Gelu(_with_bias(op, node)),)


@expansion("com.microsoft::FastGelu")
def _fast_gelu(op: Emitter, node: ir.Node) -> tuple[ir.Value, ...]:
    return (op.Gelu(_with_bias(op, node), approximate="tanh"),)


def _with_bias(op: Emitter, node: ir.Node) -> ir.Value:
    x, bias = op.given(node, 0), input_at(node, 1)
    return x if bias is None else op.Add(x, bias)


@expansion("com.microsoft::QuickGelu")
def _quick_gelu(op: Emitter, node: ir.Node) -> tuple[ir.Value, ...]:
    x = op.given(node, 0)
    return (op.Mul(x, op.Sigmoid(op.Mul(x, op.attribute(node, "alpha", 1.702)))),)


@expansion("com.microsoft::FusedMatMul", "com.microsoft::TransposeMatMul")
def _fused_matmul(op: Emitter, node: ir.Node) -> tuple[ir.Value, ...] | None:
    if op.attribute(node, "transBatchA", 0) or op.attribute(node, "transBatchB", 0):
        return None
    a, b = (
        _swapped(op, op.given(node, i)) if op.attribute(node, name, 0) else op.given(node, i)
        for i, name in enumerate(("transA", "transB"))
    )
    alpha = op.attribute(node, "alpha", 1.0)
    product = op.MatMul(a, b)
    return (product if alpha == 1 else op.Mul(product, alpha),)


def _swapped(op: Emitter, x: ir.Value) -> ir.Value:
    rank = len(op.dims(x))
    return x if rank < 2 else op.transpose(x, (*range(rank - 2), rank - 1, rank - 2))


@expansion("com.microsoft::FusedGemm")
def _fused_gemm(op: Emitter, node: ir.Node) -> tuple[ir.Value, ...] | None:
    names = ("alpha", "beta", "transA", "transB")
    y = op.Gemm(*node.inputs, **{k: a.value for k, a in node.attributes.items() if k in names})
    numbers = [op.attribute(node, f"activation_{name}", 0.0) for name in ("alpha", "beta", "gamma")]
    return _activated(op, node, y, numbers)


@expansion("com.microsoft::FusedConv")
def _fused_conv(op: Emitter, node: ir.Node) -> tuple[ir.Value, ...] | None:
    names = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    y = op.Conv(*node.inputs[:3], **{k: a.value for k, a in node.attributes.items() if k in names})
    added = input_at(node, 3)
    y = y if added is None else op.Add(y, added)
    return _activated(op, node, y, op.attribute(node, "activation_params", []))


def _activated(op: Emitter, node: ir.Node, y: ir.Value, numbers: Sequence[float]) -> tuple[ir.Value, ...] | None:
    """The activation of that name, with its numbers in the order of its attributes."""
    name = op.attribute(node, "activation", "")
    if not name:
        return (y,)
    if name not in ACTIVATIONS:
        return None
    if name == "Clip":
        return (op.Clip(y, *(op.constant(number, y.dtype) for number in numbers[:2])),)
    return (op.emit(name, y, **dict(zip(ACTIVATIONS[name], numbers, strict=False))),)


@expansion("com.microsoft::SkipLayerNormalization")
def _skip_layer_normalization(op: Emitter, node: ir.Node) -> tuple[ir.Value | None, ...]:
    total = _skipped(op, node, input_at(node, 4))
    inputs = [total, op.given(node, 2), input_at(node, 3)]
    y, mean, inverse = op.several("LayerNormalization", 3, *inputs, epsilon=_epsilon(op, node))
    return (y, mean, inverse, total)[: len(node.outputs)]


@expansion("SimplifiedLayerNormalization")
def _simplified(op: Emitter, node: ir.Node) -> tuple[ir.Value, ...] | None:
    """Where the second output, 1 / the root of the mean square, is read too; else there is a rule."""
    if len(node.outputs) < 2 or not node.outputs[1].name:
        return None
    x = op.given(node, 0)
    axes = range(op.attribute(node, "axis", -1) % len(op.dims(x)), len(op.dims(x)))
    mean = op.ReduceMean(op.Mul(x, x), op.ints(*axes), keepdims=1)
    inverse = op.Reciprocal(op.Sqrt(op.Add(mean, op.attribute(node, "epsilon", 1e-5))))
    return op.Mul(op.Mul(x, inverse), op.given(node, 1)), inverse


@expansion("com.microsoft::SkipSimplifiedLayerNormalization")
def _skip_rms(op: Emitter, node: ir.Node) -> tuple[ir.Value | None, ...]:
    total = _skipped(op, node, input_at(node, 3))
    mean = op.ReduceMean(op.Mul(total, total), op.ints(-1), keepdims=1)
    inverse = op.Reciprocal(op.Sqrt(op.Add(mean, _epsilon(op, node))))
    y = op.Mul(op.Mul(total, inverse), op.given(node, 2))
    return (y, mean, inverse, total)[: len(node.outputs)]


def _epsilon(op: Emitter, node: ir.Node) -> float:
    return op.attribute(node, "epsilon", 1e-12)


def _skipped(op: Emitter, node: ir.Node, bias: ir.Value | None) -> ir.Value:
    total = op.Add(op.given(node, 0), op.given(node, 1))
    return total if bias is None else op.Add(total, bias)


@expansion("com.microsoft::RotaryEmbedding")
def _rotary(op: Emitter, node: ir.Node) -> tuple[ir.Value, ...] | None:
    """Pairs of elements, turned by angles whose cosines and sines stand in tables by position (Su et al. 2021)."""
    x, positions, cos, sin = (op.given(node, i) for i in range(4))
    shape = op.dims(x)
    half = op.dims(cos)[1]
    heads, turned = op.attribute(node, "num_heads", 0), op.attribute(node, "rotary_embedding_dim", 0)
    if op.attribute(node, "is_packed_batching", 0) or turned or op.attribute(node, "scale", 1.0) != 1.0:
        return None
    if len(shape) == 3:
        x = op.transpose(op.reshape(x, (*shape[:2], heads or shape[2] // (2 * half), 2 * half)), (0, 2, 1, 3))
    batch, _, length, width = op.dims(x)
    if width != 2 * half:
        return None
    if op.size(positions) == 1 and length * batch != 1:
        positions = op.Add(op.reshape(positions, (1, 1)), op.ints(*range(length)))
    tables = [op.Gather(table, positions) for table in (cos, sin)]
    c, s = (op.reshape(table, (op.dims(table)[0], 1, length, half)) for table in tables)
    interleaved = bool(op.attribute(node, "interleaved", 0))
    if interleaved:
        pairs = op.reshape(x, (*op.dims(x)[:3], half, 2))
        a, b = (op.reshape(part, (*op.dims(x)[:3], half)) for part in op.split(pairs, [1, 1], 4))
    else:
        a, b = op.split(x, [half, half], 3)
    first, second = op.Sub(op.Mul(a, c), op.Mul(b, s)), op.Add(op.Mul(a, s), op.Mul(b, c))
    if interleaved:
        each = [op.reshape(part, (*op.dims(part), 1)) for part in (first, second)]
        y = op.reshape(op.Concat(*each, axis=4), op.dims(x))
    else:
        y = op.Concat(first, second, axis=3)
    return (op.reshape(op.transpose(y, (0, 2, 1, 3)), shape) if len(shape) == 3 else y,)
