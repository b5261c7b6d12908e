"""Losses of class scores and of yes-or-no scores."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from memonger.autodiff.losses.common import (
    FLOAT,
    Built,
    Reduction,
    check_reduction,
    class_indices,
    computed_in,
    described,
    input_of,
    of_elements,
    sample_factors,
)
from memonger.errors import PlanError
from memonger.ir.emitter import Emitter

_LOWEST_LOG = -100.0  # where torch.nn.functional.binary_cross_entropy cuts logarithms off
_LEAST_VARIANCE = 1e-12  # and what it divides its gradient by at least


@dataclass(frozen=True, slots=True)
class SoftmaxCrossEntropy:
    """Softmax cross-entropy of class scores against class numbers (PyTorch's ``cross_entropy``).

    Attributes:
        output: Scores ``[N, C, ...]``; None: the model's only floating-point output. Of an output that a Softmax
            or LogSoftmax over the classes computes, its input is taken.
        labels: Name of the new input, int64, of the scores' shape without the classes: ``[N, ...]``. They are 0 to
            C - 1 or ``ignore_index``; a training session refuses others.
        reduction: ``mean`` or ``sum``.
        ignore_index: A label that counts for nothing, in the mean neither.
        label_smoothing: Share of each label that is spread evenly over the classes.
        axis: Of the classes: -1 for scores ``[N, tokens, C]``.
        class_weights: A factor for each class, as PyTorch's ``weight``: the mean is then over the labels' factors.
        sample_weights: Name of a new input ``[N]``, float32, that each sample's loss is multiplied by; the mean is over
            what it would be over without them.
    """

    output: str | None = None
    labels: str = "labels"
    reduction: Reduction = "mean"
    ignore_index: int | None = None
    label_smoothing: float = 0.0
    axis: int = 1
    class_weights: Sequence[float] | None = None
    sample_weights: str | None = None

    def __post_init__(self) -> None:
        check_reduction(self.reduction)
        if self.class_weights is not None and not all(0 <= weight < math.inf for weight in self.class_weights):
            raise PlanError(f"class_weights must be finite numbers, 0 or more, not {self.class_weights}.")
        if not 0 <= self.label_smoothing < 1:
            raise PlanError(f"label_smoothing must be at least 0 and below 1, not {self.label_smoothing}.")

    def build(self, op: Emitter, output: ir.Value, name: str, *, apart: bool = False) -> Built:
        """Emit the loss of ``output``; with ``apart`` a sum and its divisor, where labels say what the mean is over.

        Raises:
            PlanError: it has no such axis.
        """
        scores = self._scores(op, output, name)
        dims, axis = list(op.dims(scores)), self.axis % len(op.dims(scores))
        labels = op.input(self.labels, ir.DataType.INT64, dims[:axis] + dims[axis + 1 :])
        dims[axis] = 1
        numbers, x = op.reshape(labels, dims), op.cast(scores, computed_in(scores))
        indices, counted = class_indices(op, labels, numbers, op.dims(scores)[axis], self.ignore_index)
        factors = self._factors(op, x, axis, name)
        own = None if factors is None else self._label_factors(op, factors, indices)
        share, weight = self._share(op, counted, own, op.size(indices), x.dtype or FLOAT, apart)
        if self.sample_weights is not None:
            share = op.Mul(share, sample_factors(op, self.sample_weights, x))
        shifted = op.Sub(x, op.ReduceMax(x, op.ints(axis), keepdims=1))
        grown = op.Exp(shifted)
        sums = op.ReduceSum(grown, op.ints(axis), keepdims=1)
        each = self._each(op, shifted, op.Log(sums), indices, factors, own)
        if counted is not None:
            each = op.Where(counted, each, op.constant(0.0, x.dtype or FLOAT))
        loss = op.ReduceSum(op.Mul(each, share), keepdims=0)
        gradients = {scores: op.cast(self._gradient(op, grown, sums, indices, share, factors, own), scores.dtype)}
        if weight is None:
            return Built(loss, gradients)
        return Built(op.Div(loss, weight), gradients, loss, weight, op.size(indices))

    def _factors(self, op: Emitter, x: ir.Value, axis: int, name: str) -> ir.Value | None:
        """The classes' factors, along their axis."""
        if self.class_weights is None:
            return None
        dims = [size if k == axis else 1 for k, size in enumerate(op.dims(x))]
        if len(self.class_weights) != dims[axis]:
            raise PlanError(f"{name}: class_weights are {len(self.class_weights)}, the classes {dims[axis]}.")
        return op.constant(np.array(self.class_weights, (x.dtype or FLOAT).numpy()).reshape(dims))

    def _label_factors(self, op: Emitter, factors: ir.Value, indices: ir.Value) -> ir.Value:
        """The factor of each label's class."""
        count = op.size(factors)
        return op.Gather(op.reshape(factors, (count,)), op.Min(indices, op.constant(count - 1, indices.dtype)))

    def _scores(self, op: Emitter, output: ir.Value, name: str) -> ir.Value:
        """The scores that the loss is computed from: those a Softmax at ``output`` reads, else ``output``."""
        rank = len(op.dims(output))
        if rank < 2 or not -rank <= self.axis < rank:
            raise PlanError(
                f"{name}: output '{output.name}' is {described(output)}: softmax_cross_entropy takes class scores "
                f"[N, C, ...] with the classes on axis {self.axis}. Name another output or axis "
                "(memonger.SoftmaxCrossEntropy(output=..., axis=...))."
            )
        node = output.producer()
        if node is None or node.op_type not in ("Softmax", "LogSoftmax"):
            return output
        same = op.attribute(node, "axis", -1) % rank == self.axis % rank
        return input_of(output, name) if same else output

    def _share(
        self, op: Emitter, counted: ir.Value | None, own: ir.Value | None, count: int, dtype: ir.DataType, apart: bool
    ) -> tuple[ir.Value, ir.Value | None]:
        """What the loss of each label is multiplied by, its class' factor left out, and what divides their sum.

        The latter is None where nothing is left to divide by.
        """
        weight = None if counted is None else op.cast(counted, dtype)
        if self.reduction == "sum":
            return op.constant(1.0, dtype) if weight is None else weight, None
        over = own if weight is None else weight if own is None else op.Mul(weight, own)
        if over is None:
            return op.constant(1.0 / max(count, 1), dtype), None
        total = op.ReduceSum(over, keepdims=0)
        if apart:
            return op.constant(1.0, dtype) if weight is None else weight, total
        return op.Div(1.0 if weight is None else weight, total), None

    def _each(
        self, op: Emitter, shifted: ir.Value, log_sums: ir.Value, indices: ir.Value,
        factors: ir.Value | None, own: ir.Value | None,
    ) -> ir.Value:  # fmt: skip
        """The loss of each label."""
        axis = self.axis % len(op.dims(shifted))
        each = op.Sub(log_sums, op.GatherElements(shifted, indices, axis=axis))
        if own is not None:
            each = op.Mul(each, own)
        if not self.label_smoothing:
            return each
        if factors is None:
            even = op.Sub(log_sums, op.ReduceMean(shifted, op.ints(axis), keepdims=1))
        else:
            even = op.ReduceMean(op.Mul(op.Sub(log_sums, shifted), factors), op.ints(axis), keepdims=1)
        return op.Add(op.Mul(each, 1.0 - self.label_smoothing), op.Mul(even, self.label_smoothing))

    def _gradient(
        self, op: Emitter, grown: ir.Value, sums: ir.Value, indices: ir.Value, share: ir.Value,
        factors: ir.Value | None, own: ir.Value | None,
    ) -> ir.Value:  # fmt: skip
        """(t * softmax - (1 - s) * w_y * one-hot - s / C * w) * share: s the smoothing, w the factors, t the sum."""
        dims, axis, smoothing = op.dims(grown), self.axis % len(op.dims(grown)), self.label_smoothing
        total = own = share if own is None else op.Mul(share, own)
        if factors is not None and smoothing:
            even = smoothing * float(np.mean(np.asarray(self.class_weights)))
            total = op.Add(op.Mul(own, 1.0 - smoothing), op.Mul(share, even))
        result = op.Mul(grown, op.Div(total, sums))
        if smoothing:
            part = op.Mul(share, smoothing / dims[axis])
            result = op.Sub(result, part if factors is None else op.Mul(part, factors))
        return op.ScatterElements(
            result, indices, op.expand(op.Mul(own, smoothing - 1.0), op.dims(indices)), axis=axis, reduction="add"
        )


@dataclass(frozen=True, slots=True)
class BinaryCrossEntropy:
    """Cross-entropy of yes-or-no scores (PyTorch's ``binary_cross_entropy_with_logits``) or of probabilities.

    Attributes:
        output: Scores or probabilities, of any shape; None: the model's only floating-point output.
        target: Name of the new input, of the output's shape and type.
        logits: Whether the output is scores; False: probabilities. None: scores, or where a Sigmoid computes
            the output its probabilities. In place of a Sigmoid's probabilities its input is taken, as scores.
        reduction: ``mean`` or ``sum``.
        sample_weights: See `SoftmaxCrossEntropy`.
    """

    output: str | None = None
    target: str = "target"
    logits: bool | None = None
    reduction: Reduction = "mean"
    sample_weights: str | None = None

    def __post_init__(self) -> None:
        check_reduction(self.reduction)

    def build(self, op: Emitter, output: ir.Value, name: str) -> Built:
        """Emit the loss of ``output``."""
        node = output.producer()
        sigmoid = node is not None and node.op_type == "Sigmoid" and not self.logits
        scores = input_of(output, name) if sigmoid else output
        given = op.input(self.target, scores.dtype or FLOAT, op.dims(scores))
        x, t = op.cast(scores, computed_in(scores)), op.cast(given, computed_in(scores))
        if self.logits is False and not sigmoid:
            each, slope = self._of_probabilities(op, x, t)
        else:
            each, slope = op.Sub(_softplus(op, x), op.Mul(x, t)), op.Sub(op.Sigmoid(x), t)
        return of_elements(op, self, scores, each, slope)

    def _of_probabilities(self, op: Emitter, p: ir.Value, t: ir.Value) -> tuple[ir.Value, ir.Value]:
        rest = op.Sub(1.0, p)
        yes, no = (op.Max(op.Log(x), _LOWEST_LOG) for x in (p, rest))
        loss = op.Neg(op.Add(op.Mul(t, yes), op.Mul(op.Sub(1.0, t), no)))
        return loss, op.Div(op.Sub(p, t), op.Max(op.Mul(p, rest), _LEAST_VARIANCE))


def _softplus(op: Emitter, x: ir.Value) -> ir.Value:
    """log(1 + exp(x)). onnxruntime has no kernel of its own for float64."""
    if x.dtype != ir.DataType.DOUBLE:
        return op.Softplus(x)
    return op.Add(op.Max(x, 0.0), op.Log(op.Add(op.Exp(op.Neg(op.Abs(x))), 1.0)))
