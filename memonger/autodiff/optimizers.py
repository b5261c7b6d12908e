"""Optimizers that are written into a training model, by the formulas of ``torch.optim``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import onnx_ir as ir

from memonger.autodiff.updates import Optimizer, Scaled, Step
from memonger.errors import PlanError
from memonger.ir import names
from memonger.ir.emitter import Emitter

BLOCK = 2048
SMALLEST = 4096  # elements
_CELLS = 16_384
_LEAST = 1e-38  # in place of the largest magnitude of a block of zeros
_FLOAT = ir.DataType.FLOAT


@cache
def dynamic_map(*, signed: bool) -> np.ndarray:
    """What each code stands for, ascending: ``float32[256]``.

    The decade below 10^-k, k from 0 to 6, is cut into 2^(6-k) equal parts (2^(7-k) without signs), of which the middles
    stand in the map; and 0 and 1.
    """
    numbers = [0.0, 1.0]
    for decade in range(7):
        edges = np.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1)
        middles = 10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2
        numbers += [*middles, *(-middles if signed else ())]
    return np.sort(np.array(numbers)).astype(np.float32)


@cache
def _codes(*, signed: bool) -> np.ndarray:
    """The code at each step of the fourth root, from -1 (or 0) to 1. What is below zero never gets the code of 0."""
    numbers = dynamic_map(signed=signed).astype(np.float64)
    roots = np.arange(-_CELLS if signed else 0, _CELLS + 1) / _CELLS
    middles = (numbers[:-1] + numbers[1:]) / 2
    if signed:
        middles[np.searchsorted(numbers, 0) - 1] = -1e-30
    return np.searchsorted(middles, np.sign(roots) * roots**4).astype(np.uint8)


def adam_in_eight_bits(step: Step, p: ir.Value, g: Scaled, betas: tuple[float, float], eps: float) -> ir.Value:
    """The change that Adam subtracts, as `Step.adam`, its moments kept in 8 bits an element, by blocks.

    Dettmers et al. 2022, https://arxiv.org/abs/2110.02861. A moment is kept as codes, uint8, of its elements divided by
    the largest magnitude of their block of 2,048, which is kept in float32. What a code stands for says the dynamic
    map: seven decades, each cut twice as finely as the one below. Codes and map are bitsandbytes'; so is that
    parameters of fewer than 4,096 elements keep float32 moments. A code is looked up in a table by the fourth root of
    what it stands for, rounded to 1/16,384: it is the nearest code, except within 2 % of a code's width of the middle
    between two.
    """
    op = step.op
    blocks = -(-op.size(p) // BLOCK)
    mean, square = (_SavedValue(step, p, name, blocks) for name in ("exp_avg", "exp_avg_sq"))
    value, size = op.cast(g.value, _FLOAT), op.size(g.value)
    if blocks * BLOCK > size:  # rows of a block each, the last filled up with zeros
        value = op.Pad(op.reshape(value, (size,)), op.ints(0, blocks * BLOCK - size))
    flat = Scaled(op.reshape(value, (blocks, BLOCK)), g.factors)
    m, v = step.moments(mean.read(op, signed=True), square.read(op, signed=False), flat, betas)
    mean.write(step, m, signed=True)
    square.write(step, v, signed=False)
    change = op.reshape(step.adam_change(m, v, betas, eps), (blocks * BLOCK,))
    if blocks * BLOCK > op.size(p):
        change = op.slice(change, 0, 0, op.size(p))
    return op.cast(op.reshape(change, op.dims(p)), p.dtype)


def takes_eight_bits(op: Emitter, p: ir.Value) -> bool:
    """Whether a parameter is large enough."""
    return op.size(p) >= SMALLEST


class _SavedValue:
    """A moment between steps: codes, and the largest magnitude of each block."""

    def __init__(self, step: Step, p: ir.Value, name: str, blocks: int) -> None:
        self.codes = step.state(p, name, ir.DataType.UINT8, (blocks, BLOCK))
        self.largest = step.state(p, f"{name}.largest", _FLOAT, (blocks, 1))

    def read(self, op: Emitter, *, signed: bool) -> ir.Value:
        """The moment, ``float32[blocks, 2048]``."""
        numbers = op.constant(dynamic_map(signed=signed))
        return op.Mul(op.Gather(numbers, op.Cast(self.codes, to=int(ir.DataType.INT32))), self.largest)

    def write(self, step: Step, moment: ir.Value, *, signed: bool) -> None:
        """Its new content."""
        op = step.op
        size = op.Abs(moment) if signed else moment
        largest = op.ReduceMax(size, op.ints(1), keepdims=1)
        scale = op.Div(float(_CELLS) ** 2, op.Sqrt(op.Max(largest, _LEAST)))
        cell = op.Sqrt(op.Mul(op.Sqrt(size), scale))
        if signed:
            cell = op.Add(op.Mul(cell, op.Sign(moment)), float(_CELLS))
        cell = op.Cast(op.Add(cell, 0.5), to=int(ir.DataType.INT32))
        codes = _codes(signed=signed)
        cell = op.Clip(cell, op.constant(0, cell.dtype), op.constant(len(codes) - 1, cell.dtype))  # NaN is any number
        step.updates[self.codes] = op.Gather(op.constant(codes), cell)
        step.updates[self.largest] = largest


LARGEST = 3.4028234663852886e38  # that float32 can hold: settings are scalars of a float32 model


@dataclass(frozen=True, slots=True)
class SGD:
    """Stochastic gradient descent as ``torch.optim.SGD`` has it.

    Attributes:
        lr: Learning rate: the default of the input ``learning_rate``.
        momentum: What is kept of the earlier steps' direction.
        dampening: What is left out of the gradient where there is momentum, the first step left out.
        nesterov: Nesterov's momentum.
        weight_decay: L2 penalty.
        no_decay: Names or glob patterns of parameters without it.
        maximize: Make the loss larger.
    """

    lr: float = 0.01
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    no_decay: Sequence[str] = ()
    maximize: bool = False

    def __post_init__(self) -> None:
        _check_range(self, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        if self.nesterov and not (self.momentum > 0 and self.dampening == 0):
            raise PlanError("SGD(nesterov=True) needs a momentum above 0 and no dampening.")

    def update(self, step: Step, p: ir.Value, g: Scaled) -> None:
        """Emit the new content of ``p`` and of its state."""
        op, g = step.op, _penalized(self, step, p, _directed(self, step, g))
        if self.momentum:
            v = step.state(p, "momentum")
            left = step.first_dampening(self.dampening)
            fresh = step.times(Scaled(g.value, (*g.factors, *left)))
            new = op.Add(op.Mul(v, self.momentum), fresh)
            step.updates[v] = new
            g = Scaled(op.Add(fresh, op.Mul(new, self.momentum)) if self.nesterov else new)
        change = step.times(Scaled(g.value, (*g.factors, step.rate())))
        step.updates[p] = op.Sub(p, change)


@dataclass(frozen=True, slots=True)
class Adam:
    """Adam (Kingma & Ba 2015) as ``torch.optim.Adam`` has it.

    Attributes:
        lr: Learning rate: the default of the input ``learning_rate``.
        betas: What is kept of the means of gradients and of their squares.
        eps: Added to the root of the mean square.
        weight_decay: L2 penalty.
        no_decay: Names or glob patterns of parameters without it.
        bits: Of an element of the two means: 32, or 8 as bitsandbytes has it, see `memonger.autodiff.optimizers`.
        amsgrad: Divide by the largest mean square so far (Reddi et al. 2018); with 32 bits only.
        maximize: Make the loss larger.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    no_decay: Sequence[str] = ()
    bits: int = 32
    amsgrad: bool = False
    maximize: bool = False

    def __post_init__(self) -> None:
        _check_range(self, lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)
        _check_betas(self.betas)
        if self.bits not in (8, 32):
            raise PlanError(f"bits must be 32 or 8, not {self.bits!r}.")
        if self.amsgrad and self.bits == 8:
            raise PlanError("amsgrad needs bits=32: the largest mean squares are not kept in 8.")

    def update(self, step: Step, p: ir.Value, g: Scaled) -> None:
        """Emit the new content of ``p`` and of its state."""
        g = _penalized(self, step, p, _directed(self, step, g))
        step.updates[p] = step.op.Sub(p, _adam(self, step, p, g))


@dataclass(frozen=True, slots=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019) as ``torch.optim.AdamW`` has it; see `Adam`.

    Attributes:
        weight_decay: Share of a parameter, times the learning rate, that a step takes from it.
    """

    weight_decay: float = 0.01

    def update(self, step: Step, p: ir.Value, g: Scaled) -> None:
        """Emit the new content of ``p`` and of its state."""
        change, decay = _adam(self, step, p, _directed(self, step, g)), _decay(self, p)
        base = step.op.Mul(p, step.remaining(decay, p.dtype)) if decay else p
        step.updates[p] = step.op.Sub(base, change)


@dataclass(frozen=True, slots=True)
class Lion:
    """Lion (Chen et al. 2023, https://arxiv.org/abs/2302.06675): the sign of a mean of gradients; half Adam's state.

    Attributes:
        lr: Learning rate: the default of the input ``learning_rate``.
        betas: What is kept of the mean of gradients where its sign is taken, and from step to step.
        weight_decay: Share of a parameter, times the learning rate, that a step takes from it.
        no_decay: Names or glob patterns of parameters without it.
        maximize: Make the loss larger.
    """

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    no_decay: Sequence[str] = ()
    maximize: bool = False

    def __post_init__(self) -> None:
        _check_range(self, lr=self.lr, weight_decay=self.weight_decay)
        _check_betas(self.betas)

    def update(self, step: Step, p: ir.Value, g: Scaled) -> None:
        """Emit the new content of ``p`` and of its state."""
        op, decay = step.op, _decay(self, p)
        gradient, m = step.times(_directed(self, step, g)), step.state(p, "exp_avg")
        near, far = (op.Add(op.Mul(m, beta), op.Mul(gradient, 1.0 - beta)) for beta in self.betas)
        step.updates[m] = far
        base = op.Mul(p, step.remaining(decay, p.dtype)) if decay else p
        step.updates[p] = op.Sub(base, step.times(Scaled(op.Sign(near), (step.rate(),))))


NAMES: dict[str, Callable[..., Optimizer]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW, "lion": Lion}
"""What the command line calls them; a test compares the choices of ``--optimizer``."""


def _adam(optimizer: Adam, step: Step, p: ir.Value, g: Scaled) -> ir.Value:
    """The change Adam subtracts, its means kept in as many bits as asked for."""
    betas, eps = optimizer.betas, optimizer.eps
    if optimizer.bits == 8 and takes_eight_bits(step.op, p):
        return adam_in_eight_bits(step, p, g, betas, eps)
    return step.adam(p, g, betas, eps, amsgrad=optimizer.amsgrad)


def _check_range(optimizer: object, **settings: float) -> None:
    for name, value in settings.items():
        if not 0 <= value <= LARGEST:
            raise PlanError(
                f"{type(optimizer).__name__}: {name} must be a number from 0 to float32's largest, not {value}."
            )


def _check_betas(betas: tuple[float, float]) -> None:
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise PlanError(f"betas must be two numbers, at least 0 and below 1, not {betas}.")


def _directed(optimizer: SGD | Adam | Lion, step: Step, g: Scaled) -> Scaled:
    """The gradient of what becomes smaller."""
    return Scaled(g.value, (*g.factors, step.op.constant(-1.0, ir.DataType.DOUBLE))) if optimizer.maximize else g


def _decay(optimizer: Optimizer, p: ir.Value) -> float:
    return 0.0 if matches(str(p.name), optimizer.no_decay) else optimizer.weight_decay


def _penalized(optimizer: Optimizer, step: Step, p: ir.Value, g: Scaled) -> Scaled:
    """The gradient with the L2 penalty's."""
    decay = _decay(optimizer, p)
    return Scaled(step.op.Add(step.times(g), step.op.Mul(p, decay))) if decay else g


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether one of the patterns is the name, or fits it as a glob pattern."""
    patterns = [patterns] if isinstance(patterns, str) else patterns
    return any(names.matches([name], pattern) for pattern in patterns)
