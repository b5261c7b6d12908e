"""Masks of zeros and ones in floating point, each in the fewest passes over memory that onnxruntime's CPU has.

In float32 ``HardSigmoid`` with a huge slope is a comparison and its Cast in one parallel, vectorized node: it gives
max(0, min(1, STEEP * x)), which is 1 for every x above 3.4e-39. ``Sign`` runs on one thread there, and ``Where`` takes
twice as long as a product with a mask. Other types have no such kernel or no room for the slope: they take comparisons.
"""

import numpy as np
import onnx_ir as ir

from memonger.ir.emitter import Emitter

STEEP = 3e38


def positive(op: Emitter, x: ir.Value) -> ir.Value:
    """1 where x > 0, else 0."""
    if x.dtype == ir.DataType.FLOAT:
        return op.HardSigmoid(x, alpha=STEEP, beta=0.0)
    return op.cast(op.Greater(x, 0.0), x.dtype)


def inside(op: Emitter, y: ir.Value, low: float | None, high: float | None) -> ir.Value | None:
    """1 where low < y < high, else 0; None where there are no bounds. ``y`` is known to be no farther out than they."""
    low = None if low is None or low <= -STEEP else low
    high = None if high is None or high >= STEEP else high
    if low is not None and high is not None and y.dtype != ir.DataType.FLOAT:
        return op.cast(op.And(op.Greater(y, low), op.Less(y, high)), y.dtype)
    above = None if low is None else (y if low == 0 else op.Sub(y, low))
    below = None if high is None else op.Sub(high, y)
    if above is None or below is None:
        bound = below if above is None else above
        return None if bound is None else positive(op, bound)
    return positive(op, op.Mul(above, below))  # one of them is at least half the range: no underflow


def share_of_greater(op: Emitter, a: ir.Value, b: ir.Value) -> ir.Value:
    """1 where a > b, ½ where they are equal, else 0."""
    if a.dtype == ir.DataType.FLOAT and (_is_finite(op, a) or _is_finite(op, b)):  # or inf - inf would be NaN
        return op.HardSigmoid(op.Sub(a, b), alpha=STEEP, beta=0.5)
    wins, ties = op.cast(op.Greater(a, b), a.dtype), op.cast(op.GreaterOrEqual(a, b), a.dtype)
    return op.Mul(op.Add(wins, ties), 0.5)


def equal(op: Emitter, a: ir.Value, b: ir.Value) -> ir.Value:
    """1 where a = b, else 0."""
    return op.cast(op.Equal(a, b), a.dtype)


def sign(op: Emitter, x: ir.Value) -> ir.Value:
    """-1, 0 or 1."""
    if x.dtype == ir.DataType.FLOAT:
        return op.Clip(op.Mul(x, STEEP), op.constant(-1.0), op.constant(1.0))
    return op.Sign(x)


def _is_finite(op: Emitter, value: ir.Value) -> bool:
    content = op.content(value)
    return content is not None and bool(np.isfinite(content).all())
