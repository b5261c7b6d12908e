"""Losses that are written into a training model. Each adds its target as a graph input, and the scalar output ``loss``.

Values and gradients are those of PyTorch's functions. The gradient is written by the loss itself, in fewer passes over
memory than its nodes' rules would take. Outputs of 16 bits are taken in float32, and so is the loss.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from memonger.autodiff.rules.crossentropy import class_indices
from memonger.errors import PlanError
from memonger.model.emitter import Emitter
from memonger.model.model import Model
from memonger.model.values import all_values, is_floating
from memonger.words import did_you_mean, option

logger = logging.getLogger(__name__)

Reduction = Literal["mean", "sum"]

_FLOAT = ir.DataType.FLOAT
_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
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
    """

    output: str | None = None
    labels: str = "labels"
    reduction: Reduction = "mean"
    ignore_index: int | None = None
    label_smoothing: float = 0.0
    axis: int = 1

    def __post_init__(self) -> None:
        _check_reduction(self.reduction)
        if not 0 <= self.label_smoothing < 1:
            raise PlanError(f"label_smoothing must be at least 0 and below 1, not {self.label_smoothing}.")

    def build(self, op: Emitter, output: ir.Value, name: str) -> "Built":
        """Emit the loss of ``output``.

        Raises:
            PlanError: it has no such axis.
        """
        scores = self._scores(op, output, name)
        dims, axis = list(op.dims(scores)), self.axis % len(op.dims(scores))
        labels = op.input(self.labels, ir.DataType.INT64, dims[:axis] + dims[axis + 1 :])
        dims[axis] = 1
        numbers, x = op.reshape(labels, dims), op.cast(scores, _dtype(scores))
        indices, counted = class_indices(op, labels, numbers, op.dims(scores)[axis], self.ignore_index)
        share = self._share(op, counted, op.size(indices), x.dtype or _FLOAT)
        shifted = op.Sub(x, op.ReduceMax(x, op.ints(axis), keepdims=1))
        grown = op.Exp(shifted)
        sums = op.ReduceSum(grown, op.ints(axis), keepdims=1)
        each = self._each(op, shifted, op.Log(sums), indices)
        if counted is not None:
            each = op.Where(counted, each, op.constant(0.0, x.dtype or _FLOAT))
        loss = op.ReduceSum(op.Mul(each, share), keepdims=0)
        return Built(loss, scores, op.cast(self._gradient(op, grown, sums, indices, share), scores.dtype))

    def _scores(self, op: Emitter, output: ir.Value, name: str) -> ir.Value:
        """The scores that the loss is computed from: those a Softmax at ``output`` reads, else ``output``."""
        rank = len(op.dims(output))
        if rank < 2 or not -rank <= self.axis < rank:
            raise PlanError(
                f"{name}: output '{output.name}' is {_described(output)}: softmax_cross_entropy takes class scores "
                f"[N, C, ...] with the classes on axis {self.axis}. Name another output or axis "
                "(memonger.SoftmaxCrossEntropy(output=..., axis=...))."
            )
        node = output.producer()
        if node is None or node.op_type not in ("Softmax", "LogSoftmax"):
            return output
        same = op.attribute(node, "axis", -1) % rank == self.axis % rank
        return _input_of(output, name) if same else output

    def _share(self, op: Emitter, counted: ir.Value | None, count: int, dtype: ir.DataType) -> ir.Value:
        """What the loss of each label is multiplied by."""
        if counted is None:
            return op.constant(1.0 if self.reduction == "sum" else 1.0 / max(count, 1), dtype)
        weight = op.cast(counted, dtype)
        return weight if self.reduction == "sum" else op.Div(weight, op.ReduceSum(weight, keepdims=0))

    def _each(self, op: Emitter, shifted: ir.Value, log_sums: ir.Value, indices: ir.Value) -> ir.Value:
        """The loss of each label."""
        axis = self.axis % len(op.dims(shifted))
        own = op.Sub(log_sums, op.GatherElements(shifted, indices, axis=axis))
        if not self.label_smoothing:
            return own
        even = op.Sub(log_sums, op.ReduceMean(shifted, op.ints(axis), keepdims=1))
        return op.Add(op.Mul(own, 1.0 - self.label_smoothing), op.Mul(even, self.label_smoothing))

    def _gradient(self, op: Emitter, grown: ir.Value, sums: ir.Value, indices: ir.Value, share: ir.Value) -> ir.Value:
        """(softmax - (1 - s) * one-hot - s / C) * share, s the smoothing."""
        dims, axis = op.dims(grown), self.axis % len(op.dims(grown))
        result = op.Mul(grown, op.Div(share, sums))
        if self.label_smoothing:
            result = op.Sub(result, op.Mul(share, self.label_smoothing / dims[axis]))
        own = op.expand(op.Mul(share, self.label_smoothing - 1.0), op.dims(indices))
        return op.ScatterElements(result, indices, own, axis=axis, reduction="add")


@dataclass(frozen=True, slots=True)
class BinaryCrossEntropy:
    """Cross-entropy of yes-or-no scores (PyTorch's ``binary_cross_entropy_with_logits``) or of probabilities.

    Attributes:
        output: Scores or probabilities, of any shape; None: the model's only floating-point output.
        target: Name of the new input, of the output's shape and type.
        logits: Whether the output is scores; False: probabilities. None: scores, or where a Sigmoid computes
            the output its probabilities. In place of a Sigmoid's probabilities its input is taken, as scores.
        reduction: ``mean`` or ``sum``.
    """

    output: str | None = None
    target: str = "target"
    logits: bool | None = None
    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        _check_reduction(self.reduction)

    def build(self, op: Emitter, output: ir.Value, name: str) -> "Built":
        """Emit the loss of ``output``."""
        node = output.producer()
        sigmoid = node is not None and node.op_type == "Sigmoid" and not self.logits
        scores = _input_of(output, name) if sigmoid else output
        given = op.input(self.target, scores.dtype or _FLOAT, op.dims(scores))
        x, t = op.cast(scores, _dtype(scores)), op.cast(given, _dtype(scores))
        if self.logits is False and not sigmoid:
            each, slope = self._of_probabilities(op, x, t)
        else:
            each, slope = op.Sub(_softplus(op, x), op.Mul(x, t)), op.Sub(op.Sigmoid(x), t)
        if self.reduction == "sum":
            return Built(op.ReduceSum(each, keepdims=0), scores, op.cast(slope, scores.dtype))
        slope = op.Mul(slope, 1.0 / max(op.size(x), 1))
        return Built(op.ReduceMean(each, keepdims=0), scores, op.cast(slope, scores.dtype))

    def _of_probabilities(self, op: Emitter, p: ir.Value, t: ir.Value) -> tuple[ir.Value, ir.Value]:
        rest = op.Sub(1.0, p)
        yes, no = (op.Max(op.Log(x), _LOWEST_LOG) for x in (p, rest))
        loss = op.Neg(op.Add(op.Mul(t, yes), op.Mul(op.Sub(1.0, t), no)))
        return loss, op.Div(op.Sub(p, t), op.Max(op.Mul(p, rest), _LEAST_VARIANCE))


@dataclass(frozen=True, slots=True)
class MeanSquaredError:
    """Squared difference from a target (PyTorch's ``mse_loss``).

    Attributes:
        output: Any shape; None: the model's only floating-point output.
        target: Name of the new input, of the output's shape and type.
        reduction: ``mean`` or ``sum``.
    """

    output: str | None = None
    target: str = "target"
    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        _check_reduction(self.reduction)

    def build(self, op: Emitter, output: ir.Value, name: str) -> "Built":
        """Emit the loss of ``output``."""
        target = op.input(self.target, output.dtype or _FLOAT, op.dims(output))
        difference = op.Sub(op.cast(output, _dtype(output)), op.cast(target, _dtype(output)))
        share = 1.0 if self.reduction == "sum" else 1.0 / max(op.size(output), 1)
        loss = op.Mul(op.ReduceSumSquare(difference, keepdims=0), share)
        return Built(loss, output, op.cast(op.Mul(difference, 2.0 * share), output.dtype))


Loss = SoftmaxCrossEntropy | BinaryCrossEntropy | MeanSquaredError

NAMES: dict[str, type[Loss]] = {
    "softmax_cross_entropy": SoftmaxCrossEntropy,
    "binary_cross_entropy": BinaryCrossEntropy,
    "mean_squared_error": MeanSquaredError,
}


@dataclass(frozen=True, slots=True)
class Built:
    """A loss that was written.

    Attributes:
        loss: The scalar.
        start: The value the backward pass begins at.
        gradient: The loss's gradient by that value.
    """

    loss: ir.Value
    start: ir.Value
    gradient: ir.Value


def attach(op: Emitter, model: Model, loss: str | Loss, outputs: Sequence[str]) -> Built:
    """The loss to differentiate: an output of the model, or one emitted behind the model, made the output ``loss``.

    Args:
        op: Where it goes.
        model: The forward model.
        loss: See `memonger.differentiate`.
        outputs: The model's outputs that a loss may take.

    Raises:
        PlanError: no such loss or output; the output isn't a floating-point scalar, or isn't what the loss takes; the
            name of the loss's input is taken.
    """
    name = model.name
    output_of = {str(v.name): v for v in model.graph.outputs if v.name in outputs}
    if isinstance(loss, str) and loss in output_of:
        value = _own(op, output_of[loss], name)
        return Built(value, value, op.constant(np.ones(op.dims(value), (value.dtype or _FLOAT).numpy())))
    if isinstance(loss, str) and loss not in NAMES:
        numbers = {key: value for key, value in output_of.items() if op.size(value) == 1 and is_floating(value)}
        raise PlanError(
            f"{name}: there is no loss '{loss}': it can be {', '.join(NAMES)}, or an output that is one number "
            f"({_listed(numbers) if numbers else 'it has none'}).{did_you_mean(loss, [*NAMES, *numbers])}"
        )
    chosen = NAMES[loss]() if isinstance(loss, str) else loss
    if not isinstance(chosen, Loss):
        raise PlanError(
            f"{name}: {option('loss', loss)} is no loss: it can be {', '.join(NAMES)}, or one of memonger's classes."
        )
    _check_free(model, chosen)
    with op.at("loss"):
        built = chosen.build(op, _output(output_of, chosen, name), name)
    built.loss.name = op.fresh("loss")
    model.graph.outputs.append(built.loss)
    return built


def _own(op: Emitter, value: ir.Value, name: str) -> ir.Value:
    if op.size(value) != 1 or not is_floating(value):
        raise PlanError(
            f"{name}: output '{value.name}' can't be the loss: it is {_described(value)}, not one floating-point "
            f"number. A loss of it can be {', '.join(NAMES)}."
        )
    return value


def _output(known: dict[str, ir.Value], loss: Loss, name: str) -> ir.Value:
    """The output that ``loss`` is of."""
    floats = {key: v for key, v in known.items() if is_floating(v)}
    which = f"memonger.{type(loss).__name__}(output=...)"
    if loss.output is not None:
        if loss.output not in floats:
            what = "is no floating-point output" if loss.output in known else "is no output"
            near = did_you_mean(loss.output, floats)
            raise PlanError(f"{name}: '{loss.output}' {what}; a loss can be of {_listed(floats)}.{near}")
        return floats[loss.output]
    if len(floats) != 1:
        raise PlanError(f"{name} has {len(floats)} floating-point outputs ({_listed(floats)}): name one, {which}.")
    return next(iter(floats.values()))


def _check_free(model: Model, loss: Loss) -> None:
    role = "labels" if isinstance(loss, SoftmaxCrossEntropy) else "target"
    wanted = loss.labels if isinstance(loss, SoftmaxCrossEntropy) else loss.target
    if not wanted or any(value.name == wanted for value in all_values(model.graph)):
        raise PlanError(
            f"{model.name}: the loss's input can't be called '{wanted}': the model has a value of that name. Choose "
            f"another, memonger.{type(loss).__name__}({role}=...)."
        )


def _input_of(output: ir.Value, name: str) -> ir.Value:
    node = output.producer()
    assert node is not None
    source = node.inputs[0]
    assert source is not None
    logger.info(
        "%s: the loss is of '%s', which %s makes '%s' of: it is exact where probabilities are 0 or 1.",
        name, source.name, node.op_type, output.name,
    )  # fmt: skip
    return source


def _softplus(op: Emitter, x: ir.Value) -> ir.Value:
    """log(1 + exp(x)). onnxruntime has no kernel of its own for float64."""
    if x.dtype != ir.DataType.DOUBLE:
        return op.Softplus(x)
    return op.Add(op.Max(x, 0.0), op.Log(op.Add(op.Exp(op.Neg(op.Abs(x))), 1.0)))


def _check_reduction(reduction: str) -> None:
    if reduction not in ("mean", "sum"):
        raise PlanError(f"reduction must be 'mean' or 'sum', not {reduction!r}.")


def _dtype(value: ir.Value) -> ir.DataType:
    """What is computed in."""
    return _FLOAT if value.dtype is None or value.dtype in _NARROW else value.dtype


def _described(value: ir.Value) -> str:
    dims = "?" if value.shape is None else ", ".join(map(str, value.shape))
    return f"{value.dtype.name.lower() if value.dtype else 'no tensor'}[{dims}]"


def _listed(values: dict[str, ir.Value]) -> str:
    return ", ".join(f"'{name}'" for name in values) or "none"
