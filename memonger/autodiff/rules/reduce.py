"""Reductions over axes."""

import onnx_ir as ir

from memonger.autodiff.registry import Gradient, gradient
from memonger.autodiff.rules import masks
from memonger.autodiff.rules.movement import constants
from memonger.ir.emitter import Emitter


def _axes(op: Emitter, node: ir.Node) -> tuple[int, ...]:
    """The axes that are reduced, in order. None are where ``noop_with_empty_axes`` stands: what is done to each element
    still is."""
    rank = len(op.dims(node.inputs[0]))
    axes = constants(op, node, 1, "axes")
    if not axes:
        return () if op.attribute(node, "noop_with_empty_axes", 0) else tuple(range(rank))
    return tuple(sorted(axis % rank for axis in axes))


def _with_reduced_axes(op: Emitter, node: ir.Node, *values: ir.Value) -> tuple[ir.Value, ...]:
    """Values of the output's shape, with the reduced axes as axes of size 1."""
    axes = _axes(op, node)
    dims = [1 if axis in axes else size for axis, size in enumerate(op.dims(node.inputs[0]))]
    return tuple(op.reshape(value, dims) for value in values)


def _spread(op: Emitter, node: ir.Node, dy: ir.Value) -> ir.Value:
    return op.expand(_with_reduced_axes(op, node, dy)[0], op.dims(node.inputs[0]))


@gradient("ReduceSum")
def _sum(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    return _spread(op, node, dy)


@gradient("ReduceMean")
def _mean(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    count = op.size(node.inputs[0]) / max(op.size(dy), 1)
    return _spread(op, node, dy if count == 1 else op.Mul(dy, 1.0 / count))


@gradient("ReduceMax", "ReduceMin")
def _extremum(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    """Equal elements share the gradient evenly, as with torch.amax."""
    dy, y = _with_reduced_axes(op, node, dy, node.outputs[0])
    mask = masks.equal(op, op.given(node, 0), y)
    return op.Mul(mask, op.Div(dy, op.sum(mask, _axes(op, node), keepdims=True)))


@gradient("ReduceProd")
def _prod(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    """The product of the others, zeros among them or not: of one zero among the factors the gradient is the product of
    the rest, and there is none elsewhere; of two, there is none at all."""
    axes = _axes(op, node)
    x = op.given(node, 0)
    zero = masks.equal(op, x, op.constant(0.0, x.dtype))
    factors = op.Add(x, zero)
    rest = op.Mul(
        _with_reduced_axes(op, node, dy)[0], op.ReduceProd(factors, op.ints(*axes), keepdims=1) if axes else factors
    )
    return op.Mul(op.Div(rest, factors), masks.equal(op, op.sum(zero, axes, keepdims=True), zero))


@gradient("ReduceL1")
def _l1(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    return op.Mul(masks.sign(op, op.given(node, 0)), _with_reduced_axes(op, node, dy)[0])


@gradient("ReduceL2")
def _l2(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    """x / y, and 0 where y is."""
    dy, y = _with_reduced_axes(op, node, dy, node.outputs[0])
    safe = op.Add(y, masks.equal(op, y, op.constant(0.0, y.dtype)))
    return op.Mul(node.inputs[0], op.Div(dy, safe))


@gradient("ReduceLogSum")
def _log_sum(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    return _spread(op, node, op.Mul(dy, op.Exp(op.Neg(node.outputs[0]))))


@gradient("ReduceLogSumExp")
def _log_sum_exp(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    dy, y = _with_reduced_axes(op, node, dy, node.outputs[0])
    return op.Mul(op.Exp(op.Sub(node.inputs[0], y)), dy)


@gradient("ReduceSumSquare")
def _sum_square(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    return op.Mul(node.inputs[0], _with_reduced_axes(op, node, op.Mul(dy, 2.0))[0])
