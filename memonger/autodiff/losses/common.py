"""What losses share: what each gives back, reductions, weights of samples."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import onnx_ir as ir

from memonger.errors import PlanError
from memonger.ir.emitter import Emitter
from memonger.ir.values import NARROW
from memonger.words import check_choice

logger = logging.getLogger(__name__)

Reduction = Literal["mean", "sum"]

FLOAT = ir.DataType.FLOAT


@dataclass(frozen=True, slots=True)
class Built:
    """A loss that was written.

    Attributes:
        loss: The scalar.
        gradients: The values the backward pass begins at, each with the loss's gradient by it; by ``sum`` where there
            is one.
        sum: Where micro-batches are added up and labels say what the mean is over: the loss before it is divided.
        weight: What that is divided by.
        terms: How many labels the weight is at most the sum of; 1 without.
    """

    loss: ir.Value
    gradients: Mapping[ir.Value, ir.Value]
    sum: ir.Value | None = None
    weight: ir.Value | None = None
    terms: int = 1


def of_elements(op: Emitter, loss: Any, start: ir.Value, each: ir.Value, slope: ir.Value) -> Built:
    """The mean, or the sum, of each element's loss, with its gradient."""
    if loss.sample_weights is not None:
        factors = sample_factors(op, loss.sample_weights, each)
        each, slope = op.Mul(each, factors), op.Mul(slope, factors)
    if loss.reduction == "sum":
        return Built(op.ReduceSum(each, keepdims=0), {start: op.cast(slope, start.dtype)})
    slope = op.Mul(slope, 1.0 / max(op.size(each), 1))
    return Built(op.ReduceMean(each, keepdims=0), {start: op.cast(slope, start.dtype)})


def sample_factors(op: Emitter, name: str, x: ir.Value) -> ir.Value:
    """A new input of a factor for each sample of ``x``, to multiply it by."""
    count, *others = op.dims(x) or (1,)
    factors = op.cast(op.input(name, FLOAT, (count,)), x.dtype)
    return op.reshape(factors, (count, *(1 for _ in others)))


def input_of(output: ir.Value, name: str) -> ir.Value:
    """What the node that computes an output reads: scores before a Softmax or Sigmoid."""
    node = output.producer()
    assert node is not None
    source = node.inputs[0]
    assert source is not None
    logger.info(
        "%s: the loss is of '%s', which %s makes '%s' of: it is exact where probabilities are 0 or 1.",
        name, source.name, node.op_type, output.name,
    )  # fmt: skip
    return source


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


def check_reduction(reduction: str) -> None:
    """Refuse what is no reduction.

    Raises:
        PlanError: it is neither ``mean`` nor ``sum``.
    """
    check_choice("reduction", reduction, get_args(Reduction), PlanError)


def computed_in(value: ir.Value) -> ir.DataType:
    """What is computed in."""
    return FLOAT if value.dtype is None or value.dtype in NARROW else value.dtype


def described(value: ir.Value) -> str:
    """Type and shape, as ``float[2, 3]``."""
    dims = "?" if value.shape is None else ", ".join(map(str, value.shape))
    return f"{value.dtype.name.lower() if value.dtype else 'no tensor'}[{dims}]"
