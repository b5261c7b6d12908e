"""Updates: new contents for parameters, optimizer state, running statistics and summed gradients.

Nothing here asks whether the loss is finite: a step is run in two partitions, and the second, with all updates in it,
only where the loss, and the gradients' norm where there is one, are (`memonger.runtime.training_plans`). There is one
where gradients are clipped by it, and where the loss is scaled: gradients that overflowed make it infinite or NaN.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import onnx_ir as ir

from memonger.autodiff.over_ranks import over_ranks
from memonger.ir.emitter import Emitter

_DOUBLE = ir.DataType.DOUBLE
_FLOAT = ir.DataType.FLOAT

LOSS_SCALE = 2.0**16  # of the first step, as torch.amp.GradScaler has it
CLIP_EPSILON = 1e-6  # of torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True, slots=True)
class Scaled:
    """A gradient, and float64 scalars it is still to be multiplied by: a pass over memory less."""

    value: ir.Value
    factors: tuple[ir.Value, ...] = ()


@dataclass(slots=True)
class Step:
    """What the updates of one training step share: scalars, each emitted once.

    Attributes:
        op: Where nodes go.
        lr: Default of the learning rate.
        updates: Persistent input → its new content.
        states: Inputs for the optimizer's tensors.
    """

    op: Emitter
    lr: float
    updates: dict[ir.Value, ir.Value]
    states: list[ir.Value]
    _known: dict[object, ir.Value] = field(default_factory=dict)

    def times(self, x: Scaled) -> ir.Value:
        """``x`` multiplied by its factors, in one pass."""
        if not x.factors:
            return x.value
        op = self.op

        def multiplied() -> ir.Value:
            factor = x.factors[0]
            for other in x.factors[1:]:
                factor = op.Mul(factor, other)
            return op.cast(factor, x.value.dtype)

        return op.Mul(x.value, self._once((x.factors, x.value.dtype), multiplied))

    def state(
        self, p: ir.Value, name: str, dtype: ir.DataType | None = None, dims: Sequence[int] | None = None
    ) -> ir.Value:
        """The input ``<parameter>.<name>``, a tensor like the parameter where nothing else is said."""
        value = self.op.input(f"{p.name}.{name}", dtype or p.dtype or _FLOAT, self.op.dims(p) if dims is None else dims)
        self.states.append(value)
        return value

    def rate(self) -> ir.Value:
        """The learning rate."""
        return self._once("rate", lambda: self.op.cast(learning_rate(self.op, self.lr), _DOUBLE))

    def remaining(self, decay: float, dtype: ir.DataType | None) -> ir.Value:
        """What decoupled weight decay leaves of a parameter."""
        op = self.op
        return self._once(("remaining", decay, dtype), lambda: op.cast(op.Sub(1.0, op.Mul(self.rate(), decay)), dtype))

    def first_dampening(self, dampening: float) -> tuple[ir.Value, ...]:
        """The factor of a gradient that is added to momentum: the first step's is whole."""
        if not dampening:
            return ()
        op = self.op
        first = self._once("first", lambda: op.Equal(op.scalar("step", ir.DataType.INT64), 0))
        return (self._once("dampened", lambda: op.Where(first, _double(op, 1.0), _double(op, 1.0 - dampening))),)

    def correction(self, beta: float) -> ir.Value:
        """Adam's bias correction 1 - beta^t, t counted from 1."""
        op = self.op

        def corrected() -> ir.Value:
            t = op.Add(op.cast(op.scalar("step", ir.DataType.INT64), _DOUBLE), 1.0)
            return op.Sub(1.0, op.Pow(_double(op, beta), t))

        return self._once(("correction", beta), corrected)

    def adam(
        self, p: ir.Value, g: Scaled, betas: tuple[float, float], eps: float, *, amsgrad: bool = False
    ) -> ir.Value:
        """The change Adam subtracts."""
        m, v = self.state(p, "exp_avg"), self.state(p, "exp_avg_sq")
        self.updates[m], self.updates[v] = mean, square = self.moments(m, v, g, betas)
        if amsgrad:
            most = self.state(p, "max_exp_avg_sq")
            self.updates[most] = square = self.op.Max(most, square)
        return self.adam_change(mean, square, betas, eps)

    def average(self, p: ir.Value, new: ir.Value, decay: float) -> ir.Value:
        """The input ``<parameter>.ema``, that from the first step on averages what ``p`` becomes."""
        op = self.op
        first = self._once("first", lambda: op.Equal(op.scalar("step", ir.DataType.INT64), 0))
        kept = self._once("kept", lambda: op.Where(first, _double(op, 0.0), _double(op, decay)))
        rest = self._once("rest", lambda: op.Sub(1.0, kept))
        average = self.state(p, "ema")
        self.updates[average] = op.Add(self.times(Scaled(average, (kept,))), self.times(Scaled(new, (rest,))))
        return average

    def moments(self, m: ir.Value, v: ir.Value, g: Scaled, betas: tuple[float, float]) -> tuple[ir.Value, ir.Value]:
        """The new means of gradients and of their squares."""
        op = self.op
        first, second = (_double(op, 1.0 - beta) for beta in betas)
        mean = op.Add(op.Mul(m, betas[0]), self.times(Scaled(g.value, (first, *g.factors))))
        square = self.times(Scaled(op.Mul(g.value, g.value), (second, *g.factors, *g.factors)))
        return mean, op.Add(op.Mul(v, betas[1]), square)

    def adam_change(self, m: ir.Value, v: ir.Value, betas: tuple[float, float], eps: float) -> ir.Value:
        """The change, of the new means.

        With the corrections c₁ and c₂ it is lr/c₁·m / (√(v/c₂) + eps), here lr·√c₂/c₁ · m / (√v + eps·√c₂).
        """
        op, dtype = self.op, m.dtype
        root = self._once("root", lambda: op.Sqrt(self.correction(betas[1])))
        floor = self._once(("floor", dtype), lambda: op.cast(op.Mul(root, eps), dtype))
        scale = self._once("adam", lambda: op.Div(op.Mul(self.rate(), root), self.correction(betas[0])))
        return self.times(Scaled(op.Div(m, op.Add(op.Sqrt(v), floor)), (scale,)))

    def _once(self, key: object, make: Callable[[], ir.Value]) -> ir.Value:
        if key not in self._known:
            with self.op.at("update"):
                self._known[key] = make()
        return self._known[key]


def _double(op: Emitter, number: float) -> ir.Value:
    return op.constant(number, _DOUBLE)


def learning_rate(op: Emitter, default: float) -> ir.Value:
    """The float32 scalar input ``learning_rate``, with its default."""
    return op.scalar("learning_rate", _FLOAT, default)


def loss_scale(op: Emitter, terms: int = 1) -> ir.Value:
    """The float32 scalar input ``loss_scale``, with its default: less where a loss isn't divided by up to ``terms``."""
    return op.scalar("loss_scale", _FLOAT, LOSS_SCALE / 2.0 ** (terms - 1).bit_length())


@runtime_checkable
class Optimizer(Protocol):
    """What writes the update of a parameter: one of `memonger.autodiff.optimizers`, or a class of your own."""

    @property
    def lr(self) -> float:
        """Default of the learning rate."""

    @property
    def weight_decay(self) -> float:
        """How much of a parameter's content counts as gradient, or is taken away, as the optimizer has it."""

    @property
    def no_decay(self) -> Sequence[str]:
        """Names or glob patterns of parameters without weight decay."""

    def update(self, step: Step, p: ir.Value, g: Scaled) -> None:
        """Emit the new content of ``p`` and of its state into ``step.updates``."""


class Updater:
    """Writes the updates while the backward pass is written, each as soon as its gradient is whole.

    Gradients of a loss with a ``weight`` are those of its sum: the update divides them by the weights of all
    micro-batches, of all ranks, so that a step is that of one batch with all of their labels.

    Attributes:
        updates: Persistent input → its new content.
        state: Inputs for the optimizer's tensors.
        accumulated: Parameter → input for its summed gradient.
        whole: Parameter → its gradient, summed over micro-batches, as its update reads it.
        averages: Parameter → input for its average over the steps.
        norm: The gradients' global norm, where they are clipped by it, or the loss is scaled.
        updating: Whether anything is updated at all; without, gradients are outputs.
        waits: Whether updates wait for the norm, and so for every gradient.
    """

    def __init__(
        self,
        op: Emitter,
        loss: ir.Value | None,
        optimizer: Optimizer | None,
        clip_norm: float | None,
        accumulate: str,
        ema: float | None = None,
        weight: ir.Value | None = None,
    ) -> None:
        self.op, self.optimizer, self.accumulate, self.ema = op, optimizer, accumulate, ema
        self.clip_norm = None if accumulate == "add" else clip_norm
        self.waits = accumulate != "add" and (clip_norm is not None or "loss_scale" in op.scalars)
        self.updates: dict[ir.Value, ir.Value] = {}
        self.state: list[ir.Value] = []
        self.accumulated: dict[ir.Value, ir.Value] = {}
        self.whole: dict[ir.Value, ir.Value] = {}
        self.averages: dict[ir.Value, ir.Value] = {}
        self.norm: ir.Value | None = None
        self._waiting: list[tuple[ir.Value, ir.Value]] = []
        self._scale: tuple[ir.Value, ...] = ()
        self._step: Step | None = None
        self.updating = loss is not None and (optimizer is not None or accumulate != "no")
        if not self.updating or loss is None:
            return
        with op.at("update"):
            lr = 0.0 if optimizer is None else optimizer.lr
            self._step = Step(op, lr, self.updates, self.state)
            if accumulate == "apply" and weight is not None:
                total = op.Add(op.scalar("accumulated_weight", _DOUBLE), op.cast(weight, _DOUBLE))
                self._scale = (op.Div(1.0, over_ranks(op, total)),)
            elif accumulate == "apply":
                self._scale = (op.cast(op.scalar("accumulation_scale", _FLOAT), _DOUBLE),)
            if self.waits and "loss_scale" in op.scalars:
                self._scale = (*self._scale, op.Div(1.0, op.cast(loss_scale(op), _DOUBLE)))

    def finished(self, value: ir.Value, gradient: ir.Value) -> None:
        """A gradient is whole: write what follows from it."""
        op, step = self.op, self._step
        if step is None:
            return
        with op.at(f"update/{value.name}"):
            if self.accumulate != "no":
                total = op.input(f"{value.name}.accumulated", value.dtype or _FLOAT, op.dims(value))
                self.accumulated[value] = total
                if self.accumulate == "add":
                    self.updates[total] = op.Add(total, gradient)
                    return
                gradient = op.Add(total, gradient)
            if self.waits:
                gradient = _before_widening(gradient)
            self.whole[value] = gradient
            if self.waits:
                self._waiting.append((value, gradient))
            else:
                self._update(value, gradient)

    def _update(self, value: ir.Value, gradient: ir.Value) -> None:
        assert self.optimizer is not None
        assert self._step is not None
        self.optimizer.update(self._step, value, Scaled(self.op.cast(gradient, value.dtype), self._scale))
        if self.ema is not None:
            self.averages[value] = self._step.average(value, self.updates[value], self.ema)

    def close(self) -> None:
        """All gradients are whole: write what waited for that."""
        if not self.waits or self._step is None:
            return
        with self.op.at("update/clip"):
            # The global norm of the gradients
            op = self.op
            squares = [op.ReduceSumSquare(op.cast(gradient, _FLOAT), keepdims=0) for _, gradient in self._waiting]
            norm = op.Sqrt(op.Sum(*squares))
            for factor in self._scale:
                norm = op.Mul(norm, op.cast(factor, _FLOAT))
            self.norm = norm
            if self.clip_norm is not None:
                # min(1, largest / (norm + 1e-6)), as ``torch.nn.utils.clip_grad_norm_`` has it
                norm = op.Add(op.cast(self.norm, _DOUBLE), CLIP_EPSILON)
                self._scale = (*self._scale, op.Min(op.Div(self.clip_norm, norm), 1.0))
        for value, gradient in self._waiting:
            with self.op.at(f"update/{value.name}"):
                self._update(value, gradient)


def _before_widening(gradient: ir.Value) -> ir.Value:
    """A gradient as it was before it was cast to its parameter's type: that takes less while it waits."""
    node = gradient.producer()
    source = None if node is None or node.op_type != "Cast" else node.inputs[0]
    if source is None or source.dtype is None or gradient.dtype is None:
        return gradient
    return source if source.dtype.bitwidth < gradient.dtype.bitwidth else gradient
