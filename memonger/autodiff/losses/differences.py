"""Losses of what outputs differ by, from a target or from each other."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from memonger.autodiff.losses.common import (
    FLOAT,
    Built,
    Reduction,
    check_reduction,
    computed_in,
    described,
    of_elements,
)
from memonger.errors import PlanError
from memonger.ir.emitter import Emitter


@dataclass(frozen=True, slots=True)
class _ToTarget:
    """What the losses of a difference from a target are told."""

    output: str | None = None
    target: str = "target"
    reduction: Reduction = "mean"
    sample_weights: str | None = None

    def __post_init__(self) -> None:
        check_reduction(self.reduction)


@dataclass(frozen=True, slots=True)
class MeanSquaredError(_ToTarget):
    """Squared difference from a target (PyTorch's ``mse_loss``).

    Attributes:
        output: Any shape; None: the model's only floating-point output.
        target: Name of the new input, of the output's shape and type.
        reduction: ``mean`` or ``sum``.
        sample_weights: See `SoftmaxCrossEntropy`.
    """

    def build(self, op: Emitter, output: ir.Value, name: str) -> Built:
        """Emit the loss of ``output``."""
        difference = _difference(op, output, self.target)
        if self.sample_weights is not None:
            return of_elements(op, self, output, op.Mul(difference, difference), op.Mul(difference, 2.0))
        share = 1.0 if self.reduction == "sum" else 1.0 / max(op.size(output), 1)
        loss = op.Mul(op.ReduceSumSquare(difference, keepdims=0), share)
        return Built(loss, {output: op.cast(op.Mul(difference, 2.0 * share), output.dtype)})


@dataclass(frozen=True, slots=True)
class MeanAbsoluteError(_ToTarget):
    """Magnitude of the difference from a target (PyTorch's ``l1_loss``).

    Attributes:
        output: Any shape; None: the model's only floating-point output.
        target: Name of the new input, of the output's shape and type.
        reduction: ``mean`` or ``sum``.
        sample_weights: See `SoftmaxCrossEntropy`.
    """

    def build(self, op: Emitter, output: ir.Value, name: str) -> Built:
        """Emit the loss of ``output``."""
        difference = _difference(op, output, self.target)
        return of_elements(op, self, output, op.Abs(difference), op.Sign(difference))


@dataclass(frozen=True, slots=True)
class HuberLoss:
    """Squared near the target, linear further off (PyTorch's ``huber_loss``, ``smooth_l1_loss``).

    Attributes:
        output: Any shape; None: the model's only floating-point output.
        target: Name of the new input, of the output's shape and type.
        delta: The difference at which it becomes linear, with this slope.
        smooth_l1: Divided by ``delta``, so that the slope is 1: PyTorch's ``smooth_l1_loss`` with ``beta=delta``.
        reduction: ``mean`` or ``sum``.
        sample_weights: See `SoftmaxCrossEntropy`.
    """

    output: str | None = None
    target: str = "target"
    delta: float = 1.0
    smooth_l1: bool = False
    reduction: Reduction = "mean"
    sample_weights: str | None = None

    def __post_init__(self) -> None:
        check_reduction(self.reduction)
        if not 0 < self.delta < math.inf:
            raise PlanError(f"delta must be a finite number above 0, not {self.delta}.")

    def build(self, op: Emitter, output: ir.Value, name: str) -> Built:
        """Emit the loss of ``output``."""
        difference = _difference(op, output, self.target)
        slope = op.Max(op.Min(difference, self.delta), -self.delta)
        each = op.Mul(slope, op.Sub(difference, op.Mul(slope, 0.5)))
        if self.smooth_l1:
            each, slope = op.Div(each, self.delta), op.Div(slope, self.delta)
        return of_elements(op, self, output, each, slope)


@dataclass(frozen=True, slots=True)
class TripletMarginLoss:
    """How much nearer than a negative an anchor's positive is, up to a margin (PyTorch's ``triplet_margin_loss``, p 2).

    Attributes:
        anchor: Output ``[N, ..., D]``; None: the first of the model's three floating-point outputs.
        positive: Output of the same shape; None: the second.
        negative: Likewise, the third.
        margin: Nothing is lost where the negative is further away by that.
        reduction: ``mean`` or ``sum``.
    """

    anchor: str | None = None
    positive: str | None = None
    negative: str | None = None
    margin: float = 1.0
    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        check_reduction(self.reduction)

    def build(self, op: Emitter, outputs: Sequence[ir.Value], name: str) -> Built:
        """Emit the loss of the three outputs."""
        if len({(value.dtype, op.dims(value)) for value in outputs}) > 1 or not op.dims(outputs[0]):
            raise PlanError(f"{name}: the outputs of a triplet differ: {', '.join(map(described, outputs))}.")
        anchor, positive, negative = (op.cast(value, computed_in(value)) for value in outputs)
        near, near_slope = self._distance(op, anchor, positive)
        far, far_slope = self._distance(op, anchor, negative)
        excess = op.Add(op.Sub(near, far), self.margin)
        share = 1.0 if self.reduction == "sum" else 1.0 / max(op.size(excess), 1)
        loss = op.Mul(op.ReduceSum(op.Max(excess, 0.0), keepdims=0), share)
        counted = op.Mul(op.cast(op.GreaterOrEqual(excess, 0.0), excess.dtype), share)
        near_slope, far_slope = op.Mul(near_slope, counted), op.Mul(far_slope, counted)
        slopes = (op.Sub(near_slope, far_slope), op.Neg(near_slope), far_slope)
        return Built(loss, {v: op.cast(slope, v.dtype) for v, slope in zip(outputs, slopes, strict=True)})

    def _distance(self, op: Emitter, a: ir.Value, b: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The distance along the last axis, and its gradient by ``a``. PyTorch adds 1e-6 to each difference."""
        difference = op.Add(op.Sub(a, b), 1e-6)
        distance = op.ReduceL2(difference, op.ints(len(op.dims(a)) - 1), keepdims=1)
        return distance, op.Div(difference, op.Max(distance, 1e-30))


def _difference(op: Emitter, output: ir.Value, target: str) -> ir.Value:
    """What an output differs by from a new input."""
    value = op.input(target, output.dtype or FLOAT, op.dims(output))
    return op.Sub(op.cast(output, computed_in(output)), op.cast(value, computed_in(output)))
