"""Softmax, its logarithm, and the cross-entropy of class scores against class numbers."""

import math

import onnx_ir as ir

from memonger.autodiff.losses.common import class_indices
from memonger.autodiff.registry import Gradient, expansion, gradient
from memonger.ir.emitter import Emitter
from memonger.ir.values import input_at


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


@expansion("SoftmaxCrossEntropyLoss")
def _softmax_cross_entropy(op: Emitter, node: ir.Node) -> tuple[ir.Value, ...]:
    """The gradient by the scores is written in three passes over them: see LogSoftmax's rule."""
    log_prob = op.LogSoftmax(op.given(node, 0), axis=1)
    return _loss(op, node, log_prob), log_prob


@expansion("NegativeLogLikelihoodLoss")
def _negative_log_likelihood(op: Emitter, node: ir.Node) -> tuple[ir.Value, ...]:
    return (_loss(op, node, op.given(node, 0)),)


def _loss(op: Emitter, node: ir.Node, log_prob: ir.Value) -> ir.Value:
    """The loss of logarithms of probabilities ``[N, C, ...]``, of a node with class numbers and a factor for each."""
    labels, weights = op.given(node, 1), input_at(node, 2)
    dims, ignore_index = op.dims(labels), op.attribute(node, "ignore_index", None)
    classes, kept_labels = class_indices(op, labels, labels, op.dims(log_prob)[1], ignore_index)
    picked = op.GatherElements(log_prob, op.reshape(classes, (dims[0], 1, *dims[1:])), axis=1)
    counted = None if weights is None else op.cast(op.Gather(weights, classes), log_prob.dtype)
    if kept_labels is not None:
        kept = op.cast(kept_labels, log_prob.dtype)
        counted = kept if counted is None else op.Mul(counted, kept)
    return _reduced(op, op.reshape(picked, dims), counted, op.attribute(node, "reduction", "mean"))


def _reduced(op: Emitter, picked: ir.Value, counted: ir.Value | None, reduction: str) -> ir.Value:
    axes = range(len(op.dims(picked)))
    if counted is not None:
        picked = op.Mul(picked, counted)
    if reduction == "none":
        return op.Neg(picked)
    if reduction == "sum":
        return op.Neg(op.sum(picked, axes))
    weight = -float(math.prod(op.dims(picked))) if counted is None else op.Neg(op.sum(counted, axes))
    return op.Div(op.sum(picked, axes), weight)
