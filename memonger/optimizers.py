"""Optimizers that are written into a training model: updates that lie over what they update."""

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from memonger.gradients.emitter import Emitter


@dataclass(frozen=True, slots=True)
class SGD:
    """Stochastic gradient descent as ``torch.optim.SGD`` has it.

    Attributes:
        lr: Learning rate: the default of the input ``learning_rate``.
    """

    lr: float = 0.01


Optimizer = SGD


class Updater:
    """Writes the updates of parameters while the backward pass is written.

    Attributes:
        updates: Persistent input → its new content.
        state: Inputs for the optimizer's tensors.
        accumulated: Parameter → input for its summed gradient.
    """

    def __init__(
        self, op: Emitter, loss: ir.Value | None, optimizer: Optimizer | None, clip_norm: float | None, accumulate: str
    ) -> None:
        self.op, self.loss, self.optimizer = op, loss, optimizer
        self.updates: dict[ir.Value, ir.Value] = {}
        self.state: list[ir.Value] = []
        self.accumulated: dict[ir.Value, ir.Value] = {}

    def statistics(self, model: ir.Model, updates: Mapping[str, str]) -> None:
        """Keep running statistics as they were where the loss isn't finite."""

    def finished(self, value: ir.Value, gradient: ir.Value) -> None:
        """A gradient is whole: write what follows from it."""
        if self.optimizer is None:
            return
        op = self.op
        rate = op.scalar("learning_rate", ir.DataType.FLOAT)
        self.updates[value] = op.Sub(value, op.Mul(gradient, rate))

    def close(self) -> None:
        """All gradients are whole: write what waited for that."""
