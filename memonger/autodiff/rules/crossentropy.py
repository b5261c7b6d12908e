"""Cross-entropy of class scores against class numbers, in operators that have a kernel and a rule."""

import math

import onnx_ir as ir

from memonger.autodiff.registry import expansion
from memonger.ir.emitter import Emitter
from memonger.ir.values import input_at


@expansion("SoftmaxCrossEntropyLoss")
def _softmax_cross_entropy(op: Emitter, node: ir.Node) -> tuple[ir.Value, ...]:
    """The gradient by the scores is written in three passes over them: see LogSoftmax's rule."""
    log_prob = op.LogSoftmax(op.given(node, 0), axis=1)
    return _loss(op, node, log_prob), log_prob


@expansion("NegativeLogLikelihoodLoss")
def _negative_log_likelihood(op: Emitter, node: ir.Node) -> tuple[ir.Value, ...]:
    return (_loss(op, node, op.given(node, 0)),)


def class_indices(
    op: Emitter, labels: ir.Value, numbers: ir.Value, classes: int, ignore_index: int | None
) -> tuple[ir.Value, ir.Value | None]:
    """Indices of the classes, and which labels count (None: all).

    A label below zero becomes an index that isn't there: the runtime would count it from the last class. Where labels
    are an input of the model, what they may be is noted for whoever feeds it.

    Args:
        op: Where it goes.
        labels: What the labels were before they got the shape they are used in.
        numbers: The labels in that shape, integers.
        classes: How many there are.
        ignore_index: The label that counts for nothing.
    """
    if labels.is_graph_input():
        op.classes[str(labels.name)] = (classes, ignore_index)
    counted = None
    if ignore_index is not None:
        ignored = op.Equal(numbers, ignore_index)
        numbers = op.Where(ignored, op.constant(0, numbers.dtype), numbers)
        counted = op.Not(ignored)
    return op.Where(op.Less(numbers, 0), op.constant(classes, numbers.dtype), numbers), counted


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
