"""Softmax and its logarithm."""

import onnx_ir as ir

from memonger.autodiff.registry import Gradient, gradient
from memonger.ir.emitter import Emitter


@gradient("Softmax")
def _softmax(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    y, axis = node.outputs[0], op.attribute(node, "axis", -1)
    weighted = op.Mul(dy, y)
    return op.Sub(weighted, op.Mul(y, op.sum(weighted, [axis], keepdims=True)))


@gradient("LogSoftmax")
def _log_softmax(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    y, axis = node.outputs[0], op.attribute(node, "axis", -1)
    few = _scattered(dy, axis, len(op.dims(y)))
    if few is None:
        return op.Sub(dy, op.Mul(op.Exp(y), op.sum(dy, [axis], keepdims=True)))
    # The gradient of a loss that reads a few of each row's numbers: they are added to the rest, which is dense.
    indices, numbers = few
    rest = op.Mul(op.Exp(y), op.Neg(op.sum(numbers, [axis], keepdims=True)))
    return op.ScatterElements(rest, indices, numbers, axis=axis, reduction="add")


def _scattered(dy: ir.Value, axis: int, rank: int) -> tuple[ir.Value, ir.Value] | None:
    """Indices and numbers where dy is a few numbers scattered along ``axis`` over zeros: a gather's gradient."""
    node = dy.producer()
    if node is None or node.op_type != "ScatterElements" or node.attributes.get_string("reduction", "none") != "add":
        return None
    zeros, indices, numbers = node.inputs
    made = zeros.producer() if zeros is not None else None
    along = node.attributes.get_int("axis", 0)
    if made is None or made.op_type != "ConstantOfShape" or indices is None or numbers is None:
        return None
    value = made.attributes.get("value")
    nought = value is None or not value.as_tensor().numpy().any()
    same_rows = zeros is not None and _rows(zeros, axis % rank) == _rows(numbers, axis % rank)
    return (indices, numbers) if nought and along % rank == axis % rank and same_rows else None


def _rows(value: ir.Value, axis: int) -> list[object] | None:
    return None if value.shape is None else [dim for i, dim in enumerate(value.shape) if i != axis]
