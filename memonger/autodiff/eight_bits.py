"""Adam's moments in 8 bits an element, by blocks (Dettmers et al. 2022, https://arxiv.org/abs/2110.02861).

A moment is kept as codes, uint8, of its elements divided by the largest magnitude of their block of 2,048, which is
kept in float32. What a code stands for says the dynamic map: seven decades, each cut twice as finely as the one below.
Codes and map are bitsandbytes'; so is that parameters of fewer than 4,096 elements keep float32 moments. A code is
looked up in a table by the fourth root of what it stands for, rounded to 1/16,384: it is the nearest code, except
within 2 % of a code's width of the middle between two.
"""

from functools import cache

import numpy as np
import onnx_ir as ir

from memonger.autodiff.updates import Scaled, Step
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


def adam(step: Step, p: ir.Value, g: Scaled, betas: tuple[float, float], eps: float) -> ir.Value:
    """The change that Adam subtracts, as `Step.adam`, its moments kept in 8 bits."""
    op = step.op
    blocks = -(-op.size(p) // BLOCK)
    mean, square = (_SavedValue(step, p, name, blocks) for name in ("exp_avg", "exp_avg_sq"))
    flat = Scaled(_in_blocks(op, g.value, blocks), g.factors)
    m, v = step.moments(mean.read(op, signed=True), square.read(op, signed=False), flat, betas)
    mean.write(step, m, signed=True)
    square.write(step, v, signed=False)
    change = op.reshape(step.adam_change(m, v, betas, eps), (blocks * BLOCK,))
    if blocks * BLOCK > op.size(p):
        change = op.slice(change, 0, 0, op.size(p))
    return op.cast(op.reshape(change, op.dims(p)), p.dtype)


def takes(op: Emitter, p: ir.Value) -> bool:
    """Whether a parameter is large enough."""
    return op.size(p) >= SMALLEST


def _in_blocks(op: Emitter, g: ir.Value, blocks: int) -> ir.Value:
    """A gradient in float32 as rows of a block each, the last filled up with zeros."""
    size, whole = op.size(g), blocks * BLOCK
    flat = op.cast(g, _FLOAT)
    if whole > size:
        flat = op.Pad(op.reshape(flat, (size,)), op.ints(0, whole - size))
    return op.reshape(flat, (blocks, BLOCK))


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
