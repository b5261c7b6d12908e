"""BatchNormalization in training form: the provider refuses it, and the whole model with it.

The batch's statistics are written in reductions, and the output as the inference form with those for running ones: one
kernel. The variance is the mean of the squared distances from the mean, in two passes over x. That takes one value of
the size of x more for two steps (the squares lie where the distances lay), but what would do without is wrong where a
channel's mean is large against its deviation: mean square less squared mean, in float32, is off by 3 % of the variance
at a ratio of 1,000 and can be negative, where two passes are right to 1e-6. A shift that is known beforehand (the first
element of each channel) takes the same memory: a kernel that squares while it sums, ReduceSumSquare, writes the squares
into scratch of that size itself.

Sums go over each image first, then over the batch: of both kinds the provider has kernels of its own; what mixes them
is left to cuDNN, which takes a workspace.
"""

import math
from collections.abc import Sequence

import onnx_ir as ir

from memonger.cuda_form.rules import Written, is_used, rule
from memonger.gradients.emitter import Emitter

_HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@rule("BatchNormalization")
def _batch_normalization(op: Emitter, node: ir.Node) -> Written:
    x, scale, bias, *running = (op.given(node, i) for i in range(5))
    epsilon = float(op.attribute(node, "epsilon", 1e-5))
    if op.attribute(node, "training_mode", 0):
        mean, variance = batch_statistics(op, x)
        updated = [
            _moved(op, old, new, op.attribute(node, "momentum", 0.9)) if is_used(output) else None
            for old, new, output in zip(running, (mean, variance), node.outputs[1:], strict=False)
        ]
        return normalized(op, x, scale, bias, mean, variance, epsilon), *updated
    if len({value.dtype for value in (x, scale, bias, *running)}) == 1:
        return None
    return (normalized(op, x, scale, bias, running[0], running[1], epsilon),)


def _moved(op: Emitter, old: ir.Value, batch: ir.Value, momentum: float) -> ir.Value:
    """The new running statistic, in the old one's type. With momentum 0 what is in the old one doesn't count."""
    if momentum == 0.0:
        return op.cast(batch, old.dtype) if batch.dtype != old.dtype else op.Identity(batch)
    kept = op.cast(op.Mul(op.cast(old, batch.dtype), momentum), batch.dtype)
    return op.cast(op.Add(kept, op.Mul(batch, 1.0 - momentum)), old.dtype)


def batch_statistics(op: Emitter, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Mean and population variance of each channel of ``[N, C, ...]``: vectors, of float32 at least."""
    wide = op.cast(x, ir.DataType.FLOAT) if x.dtype in _HALF else x
    mean = channel_mean(op, wide)
    distance = op.Sub(wide, op.reshape(mean, (op.size(mean), *[1] * (len(op.dims(x)) - 2))))
    return mean, channel_mean(op, op.Mul(distance, distance))


def channel_mean(op: Emitter, x: ir.Value) -> ir.Value:
    """The mean of each channel of ``[N, C, ...]``: over each image, then over the batch."""
    batch, channels, *image = op.dims(x)
    if math.prod(image) != 1:
        x = _mean(op, x, range(2, 2 + len(image)))
    x = op.reshape(x, (batch, channels))
    return op.reshape(x, (channels,)) if batch == 1 else _mean(op, x, [0])


def _mean(op: Emitter, x: ir.Value, axes: Sequence[int]) -> ir.Value:
    found: ir.Value = op.ReduceMean(x, op.ints(*axes), keepdims=0)
    return found


def normalized(
    op: Emitter, x: ir.Value, scale: ir.Value, bias: ir.Value, mean: ir.Value, variance: ir.Value, epsilon: float
) -> ir.Value:
    """The inference form. The provider's kernel takes everything in x's type.

    Where that is half precision and the statistics are not, all that is rounded is a factor (which the output's own
    rounding hides) and a shift: what the mean loses by being rounded is made good in the shift.
    """
    settings = (scale, bias, mean, variance)
    y: ir.Value
    if all(value.dtype == x.dtype for value in settings):
        y = op.BatchNormalization(x, *settings, epsilon=epsilon)
        return y
    scale, bias, mean, variance = (op.cast(value, ir.DataType.FLOAT) for value in settings)
    factor = op.Div(scale, op.Sqrt(op.Add(variance, epsilon)))
    center = op.cast(mean, x.dtype)
    shift = op.Sub(bias, op.Mul(op.Sub(mean, op.cast(center, ir.DataType.FLOAT)), factor))
    one = op.constant([1.0] * op.size(mean), x.dtype)
    y = op.BatchNormalization(x, op.cast(factor, x.dtype), op.cast(shift, x.dtype), center, one, epsilon=0.0)
    return y
