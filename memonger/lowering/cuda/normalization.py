"""BatchNormalization in training form, which the provider refuses, and the whole model with it.

The output is the inference form with the batch's statistics for running ones: one kernel. The variance is the mean of
the squared distances from the mean. That takes, for a step or two, one value more of the size of x; what would do
without it is not as exact. Mean square less squared mean was off by 19 % of the variance in float32 where a channel's
mean is 1,000 times its deviation, and negative at 10,000; both forms below were within 1e-6 of float64's there
(onnxruntime 1.31.1 on the CPU, 8 x 16 x 28 x 28). Distances from another number of the channel take the same memory,
and cancel too where that number is far off. ReduceSumSquare writes the squares into workspace of that size itself.

- Two passes: the mean, the distances, and their squares' mean; the squares lie where the distances lay.
- From a LayerNormalization of each image's channels, whose second and third output are their means and deviations,
  found in one pass by Welford's updates (Welford 1962). A channel's variance is the mean of theirs and the variance of
  their means (Chan, Golub & LeVeque 1979). The first output is for nothing, but written: x is read twice and written
  once, where two passes read it four times and write twice. It takes more steps on short vectors, and is for large x.

Sums go over each image first, then over the batch: of both kinds the provider has kernels of its own; what mixes them
is left to cuDNN, which takes a workspace.
"""

import math
from collections.abc import Sequence

import onnx_ir as ir

from memonger.ir.emitter import Emitter
from memonger.ir.values import NARROW
from memonger.lowering.cuda.rules import Written, is_used, rule

LARGE = 1 << 20  # elements from which passes over x cost more than steps on vectors; by count, not measured


def _is_refused(op: Emitter, node: ir.Node) -> bool:
    """Training form, or types that the kernel takes as one and aren't."""
    types = {op.given(node, i).dtype for i in range(5)}
    return bool(op.attribute(node, "training_mode", 0)) or len(types) > 1


@rule("BatchNormalization", when=_is_refused)
def _batch_normalization(op: Emitter, node: ir.Node) -> Written:
    x, scale, bias, *running = (op.given(node, i) for i in range(5))
    epsilon = op.attribute(node, "epsilon", 1e-5)
    if op.attribute(node, "training_mode", 0):
        mean, variance = batch_statistics(op, x, epsilon)
        updated = [
            _moved(op, old, new, op.attribute(node, "momentum", 0.9)) if is_used(output) else None
            for old, new, output in zip(running, (mean, variance), node.outputs[1:], strict=False)
        ]
        return normalized(op, x, scale, bias, mean, variance, epsilon), *updated
    return (normalized(op, x, scale, bias, running[0], running[1], epsilon),)


def _moved(op: Emitter, old: ir.Value, batch: ir.Value, momentum: float) -> ir.Value:
    """The new running statistic, in the old one's type. With momentum 0 what is in the old one doesn't count."""
    if momentum == 0.0:
        return op.cast(batch, old.dtype)
    kept = op.cast(op.Mul(op.cast(old, batch.dtype), momentum), batch.dtype)
    return op.cast(op.Add(kept, op.Mul(batch, 1.0 - momentum)), old.dtype)


def batch_statistics(op: Emitter, x: ir.Value, epsilon: float) -> tuple[ir.Value, ir.Value]:
    """Mean and population variance of each channel of ``[N, C, ...]``: vectors, of float32 at least.

    The variance may be off by a few roundings of ``epsilon``, which is added to it where it is used.
    """
    image = math.prod(op.dims(x)[2:])
    if image > 1 and op.size(x) >= LARGE and x.dtype != ir.DataType.DOUBLE:  # that would be rounded to float32
        return from_images(op, x, epsilon)
    return in_two_passes(op, x)


def in_two_passes(op: Emitter, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Mean, and the mean of squared distances from it."""
    wide = op.cast(x, ir.DataType.FLOAT) if x.dtype in NARROW else x
    mean = channel_mean(op, wide)
    distance = op.Sub(wide, op.reshape(mean, (op.size(mean), *[1] * (len(op.dims(x)) - 2))))
    return mean, channel_mean(op, op.Mul(distance, distance))


def from_images(op: Emitter, x: ir.Value, epsilon: float) -> tuple[ir.Value, ir.Value]:
    """The statistics of each image's channels, put together."""
    batch, channels, *image = op.dims(x)
    size = math.prod(image)
    rows = op.reshape(x, (batch * channels, size))
    _, means, inverses = op.several(
        "LayerNormalization", 3, rows, op.constant([1.0] * size, x.dtype), axis=1, epsilon=epsilon, stash_type=1
    )
    spread = op.reshape(op.Reciprocal(op.Mul(inverses, inverses)), (batch, channels))  # the variance and epsilon
    means = op.reshape(means, (batch, channels))
    mean = channel_mean(op, means)
    if batch > 1:
        distance = op.Sub(means, mean)
        spread = op.Add(spread, op.Mul(distance, distance))
    return mean, op.Max(op.Sub(channel_mean(op, spread), epsilon), 0.0)


def channel_mean(op: Emitter, x: ir.Value) -> ir.Value:
    """The mean of each channel of ``[N, C, ...]``: over each image, then over the batch."""
    batch, channels, *image = op.dims(x)
    if math.prod(image) != 1:
        x = _mean(op, x, range(2, 2 + len(image)))
    x = op.reshape(x, (batch, channels))
    return op.reshape(x, (channels,)) if batch == 1 else _mean(op, x, [0])


def _mean(op: Emitter, x: ir.Value, axes: Sequence[int]) -> ir.Value:
    return op.ReduceMean(x, op.ints(*axes), keepdims=0)


def normalized(
    op: Emitter, x: ir.Value, scale: ir.Value, bias: ir.Value, mean: ir.Value, variance: ir.Value, epsilon: float
) -> ir.Value:
    """The inference form. The provider's kernel takes everything in x's type.

    Where that is half precision and the statistics are not, all that is rounded is a factor (which the output's own
    rounding hides) and a shift: what the mean loses by being rounded is made good in the shift.
    """
    settings = (scale, bias, mean, variance)
    if all(value.dtype == x.dtype for value in settings):
        return op.BatchNormalization(x, *settings, epsilon=epsilon)
    scale, bias, mean, variance = (op.cast(value, ir.DataType.FLOAT) for value in settings)
    factor = op.Div(scale, op.Sqrt(op.Add(variance, epsilon)))
    center = op.cast(mean, x.dtype)
    shift = op.Sub(bias, op.Mul(op.Sub(mean, op.cast(center, ir.DataType.FLOAT)), factor))
    one = op.constant([1.0] * op.size(mean), x.dtype)
    return op.BatchNormalization(x, op.cast(factor, x.dtype), op.cast(shift, x.dtype), center, one, epsilon=0.0)
