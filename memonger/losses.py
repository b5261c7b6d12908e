"""Losses that are written into a training model. Each adds its target as a graph input, and the scalar output ``loss``."""

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from memonger.errors import PlanError
from memonger.gradients.emitter import Emitter

Reduction = str
"""``mean`` or ``sum``."""


@dataclass(frozen=True, slots=True)
class SoftmaxCrossEntropy:
    """Softmax cross-entropy of class scores against class numbers (PyTorch's ``cross_entropy``).

    Attributes:
        output: Scores ``[N, C, ...]``; None: the model's only floating-point output. Of an output that a Softmax
            computes, its input is taken.
        labels: Name of the new input, int64 ``[N, ...]``.
        reduction: ``mean`` or ``sum``.
    """

    output: str | None = None
    labels: str = "labels"
    reduction: Reduction = "mean"

    def build(self, op: Emitter, scores: ir.Value) -> ir.Value:
        """Emit the loss of ``scores``."""
        dims = op.dims(scores)
        labels = op.input(self.labels, ir.DataType.INT64, (dims[0], *dims[2:]))
        log = op.LogSoftmax(scores, axis=1)
        picked = op.GatherElements(log, op.Unsqueeze(labels, op.ints(1)), axis=1)
        reduce = op.ReduceMean if self.reduction == "mean" else op.ReduceSum
        return op.Neg(reduce(picked, keepdims=0))


Loss = SoftmaxCrossEntropy

NAMES: dict[str, Any] = {"softmax_cross_entropy": SoftmaxCrossEntropy}


def attach(op: Emitter, model: ir.Model, name: str, loss: str | Loss) -> ir.Value:
    """The scalar to differentiate: the model's own, or a loss emitted behind the model, made the output ``loss``.

    Raises:
        PlanError: no such loss or output; the output isn't a floating-point scalar, or isn't what the loss takes.
    """
    outputs = {str(v.name): v for v in model.graph.outputs}
    if isinstance(loss, str) and loss in outputs:
        return _own(op, outputs[loss], name)
    if isinstance(loss, str) and loss not in NAMES:
        raise PlanError(
            f"{name}: there is no loss '{loss}': it can be {', '.join(NAMES)}, or an output: {', '.join(outputs)}."
        )
    chosen = NAMES[loss]() if isinstance(loss, str) else loss
    with op.at("loss"):
        value: ir.Value = chosen.build(op, outputs[chosen.output] if chosen.output else next(iter(outputs.values())))
    value.name = op.fresh("loss")
    model.graph.outputs.append(value)
    return value


def _own(op: Emitter, value: ir.Value, name: str) -> ir.Value:
    if op.size(value) != 1 or value.dtype is None or not value.dtype.is_floating_point():
        raise PlanError(f"{name}: output '{value.name}' can't be the loss: it is not one floating-point number.")
    return value
