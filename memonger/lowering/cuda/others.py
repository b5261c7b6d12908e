"""Operators that the provider has no kernel for, or refuses with some settings, as what they mean."""

import itertools
import math

import onnx_ir as ir

from memonger.ir.emitter import Emitter
from memonger.lowering.cuda.rules import Written, rule


def _has_no_middle(op: Emitter, node: ir.Node) -> bool:
    return op.attribute(node, "size", 1) % 2 == 0


@rule("LRN", when=_has_no_middle)
def _lrn(op: Emitter, node: ir.Node) -> Written:
    """cuDNN has a middle channel, so an even number of them is refused.

    The mean is that of a pool over neighbouring channels, whose padding, unequal at its ends, is written before it.
    """
    x, size = op.given(node, 0), op.attribute(node, "size", 1)
    batch, channels = op.dims(x)[:2]
    before = (size - 1) // 2
    squares = op.reshape(op.Mul(x, x), (batch, 1, channels, -1))
    padded = op.Pad(squares, op.ints(0, 0, before, 0, 0, 0, size - 1 - before, 0))
    mean = op.reshape(op.AveragePool(padded, kernel_shape=[size, 1]), op.dims(x))
    base = op.Add(op.Mul(mean, op.attribute(node, "alpha", 1e-4)), op.attribute(node, "bias", 1.0))
    return (op.Mul(x, op.Pow(base, -op.attribute(node, "beta", 0.75))),)


@rule("Mean")
def _mean(op: Emitter, node: ir.Node) -> Written:
    values = [op.given(node, i) for i in range(len(node.inputs))]
    total = op.Sum(*values) if len(values) > 1 else values[0]
    return (op.Div(total, float(len(values))),)


@rule("LpNormalization")
def _lp_normalization(op: Emitter, node: ir.Node) -> Written:
    """Where all numbers are 0, so is the result."""
    x, axis = op.given(node, 0), op.attribute(node, "axis", -1)
    reduce = op.ReduceL1 if op.attribute(node, "p", 2) == 1 else op.ReduceL2
    norm = reduce(x, op.ints(axis), keepdims=1)
    return (op.Div(x, op.Where(op.Equal(norm, 0.0), op.constant(1.0, x.dtype), norm)),)


@rule("Celu")
def _celu(op: Emitter, node: ir.Node) -> Written:
    alpha = op.attribute(node, "alpha", 1.0)
    return (op.Mul(op.Elu(op.Div(op.given(node, 0), alpha)), alpha),)


def _split_sizes(op: Emitter, node: ir.Node) -> list[int]:
    axis = op.attribute(node, "axis", 0)
    return [op.dims(value)[axis] if value.name else 0 for value in node.outputs]


def _copies_sizes(op: Emitter, node: ir.Node) -> bool:
    """Parts of several sizes along any axis but the last: the kernel is told of them by four copies from the host."""
    axis = op.attribute(node, "axis", 0) % len(op.dims(node.inputs[0]))
    after = math.prod(op.dims(node.inputs[0])[axis + 1 :])
    return after > 1 and all(v.name for v in node.outputs) and len(set(_split_sizes(op, node))) > 1


@rule("Split", when=_copies_sizes, raises_opset=False)
def _split(op: Emitter, node: ir.Node) -> Written:
    """Slices: a CUDA graph would hold the addresses that are copied from."""
    x, axis = op.given(node, 0), op.attribute(node, "axis", 0) % len(op.dims(node.inputs[0]))
    sizes = _split_sizes(op, node)
    stops = list(itertools.accumulate(sizes))
    return tuple(op.slice(x, axis, stop - size, stop) for stop, size in zip(stops, sizes, strict=True))
