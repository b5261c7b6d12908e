"""Normalizations over a batch, an image, a group of channels, rows and neighbouring channels."""

import math

import numpy as np
import onnx_ir as ir

from memonger.autodiff.registry import Gradient, expansion, gradient
from memonger.ir.emitter import Emitter

LARGE_IMAGE = 784  # elements of a channel from which a depthwise convolution is the fastest sum of products

# Over the batch: BatchNormalization, and what is written as one.


@expansion("BatchNormalization")
def _expand_batch(op: Emitter, node: ir.Node) -> tuple[ir.Value | None, ...] | None:
    """In training mode with momentum 0: then its second and third output are the batch's own mean and variance."""
    x, scale, bias, *running = (op.given(node, i) for i in range(5))
    if not op.attribute(node, "training_mode", 0) or _is_batch_form(node):
        return None
    y, *batch = _training(op, x, scale, bias, running[0], _epsilon(op, node))
    momentum = op.attribute(node, "momentum", 0.9)
    updated = [
        op.Add(op.Mul(old, momentum), op.Mul(new, 1.0 - momentum)) if used.uses() or used.is_graph_output() else None
        for old, new, used in zip(running, batch, node.outputs[1:], strict=False)
    ]
    return y, *updated


def _is_batch_form(node: ir.Node) -> bool:
    """Whether `_training` wrote it."""
    mean = node.inputs[3].producer() if node.inputs[3] is not None else None
    return mean is not None and mean.op_type == "Neg" and node.attributes.get_float("momentum", 0.9) == 0.0


def _training(
    op: Emitter, x: ir.Value, scale: ir.Value, bias: ir.Value, vector: ir.Value, epsilon: float
) -> tuple[ir.Value, ...]:
    """x normalized by channel, scaled and shifted; the batch's mean and variance.

    onnxruntime's kernel writes the new running statistics over the old ones, even where those are graph inputs,
    constants, or read by others (measured on 1.31.1). So it is given two vectors that nobody else reads afterwards;
    with momentum 0 what is in them doesn't count.
    """
    first = op.Neg(vector)
    second = op.Neg(first)
    return op.several(
        "BatchNormalization", 3, x, scale, bias, first, second, epsilon=epsilon, momentum=0.0, training_mode=1
    )


@expansion("InstanceNormalization")
def _expand_instance(op: Emitter, node: ir.Node) -> tuple[ir.Value, ...]:
    """Every channel of every image is a channel of one image."""
    x, scale, bias = (op.given(node, i) for i in range(3))
    batch, channels, *image = op.dims(x)
    planes = op.reshape(x, (1, batch * channels, *image))
    return (op.reshape(_normalized(op, planes, scale, bias, batch, _epsilon(op, node)), op.dims(x)),)


@expansion("GroupNormalization")
def _expand_group(op: Emitter, node: ir.Node) -> tuple[ir.Value, ...]:
    """Every group of channels of every image is a channel of one image. From opset 21 on scales are the channels'."""
    x, scale, bias = (op.given(node, i) for i in range(3))
    batch, channels, *image = op.dims(x)
    groups, epsilon = op.attribute(node, "num_groups", 1), _epsilon(op, node)
    planes = op.reshape(x, (1, batch * groups, channels // groups * math.prod(image)))
    if op.dims(scale) == (groups,) and op.opset < 21:
        return (op.reshape(_normalized(op, planes, scale, bias, batch, epsilon), op.dims(x)),)
    one, zero = _filled(op, scale, groups, 1.0), _filled(op, scale, groups, 0.0)
    normal = op.reshape(_normalized(op, planes, one, zero, batch, epsilon), op.dims(x))
    return (_affine(op, normal, scale, bias),)


def _normalized(op: Emitter, planes: ir.Value, scale: ir.Value, bias: ir.Value, batch: int, epsilon: float) -> ir.Value:
    """``[1, N·C, ...]`` normalized by channel; scale and bias ``[C]``."""
    rows = op.reshape(planes, (*op.dims(planes)[:2], -1))
    vector = op.reshape(op.slice(rows, 2, 0, 1), (op.dims(planes)[1],))
    return _training(op, planes, _tiled(op, scale, batch), _tiled(op, bias, batch), vector, epsilon)[0]


def _tiled(op: Emitter, vector: ir.Value, times: int) -> ir.Value:
    content = op.content(vector)
    if content is not None:
        return op.constant(np.tile(content, times))
    return vector if times == 1 else op.Tile(vector, op.ints(times))


def _filled(op: Emitter, like: ir.Value, count: int, number: float) -> ir.Value:
    return op.constant([number] * count, like.dtype or ir.DataType.FLOAT)


def _affine(op: Emitter, x: ir.Value, scale: ir.Value, bias: ir.Value, mean: ir.Value | None = None) -> ir.Value:
    """``(x - mean) * scale + bias`` by channel, in one pass."""
    count = op.dims(x)[1]
    zero, one = _filled(op, scale, count, 0.0), _filled(op, scale, count, 1.0)
    return op.BatchNormalization(x, scale, bias, zero if mean is None else mean, one, epsilon=0.0)


def _epsilon(op: Emitter, node: ir.Node) -> float:
    return op.attribute(node, "epsilon", 1e-5)


@gradient("BatchNormalization")
def _batch_normalization(op: Emitter, node: ir.Node, dy: Gradient, *_: object) -> tuple[Gradient, ...]:
    if dy is None:
        return ()
    if op.attribute(node, "training_mode", 0):
        return _batch_statistics(op, node, dy)
    x, scale, _bias, mean, variance = (op.given(node, i) for i in range(5))
    inverse = _inverse(op, variance, _epsilon(op, node))
    factor = op.Mul(op.cast(scale, inverse.dtype), inverse)
    dx = op.Mul(dy, op.cast(_column(op, factor, dy), dy.dtype)) if op.wants(0) else None
    if not any(op.wants(i) for i in range(1, 5)):
        return (dx,)
    total = op.cast(_total(op, dy), mean.dtype)
    if not any(op.wants(i) for i in (1, 4)):
        return dx, None, total, op.Neg(op.Mul(factor, total))
    dscale = op.Mul(inverse, op.Sub(op.cast(_dot(op, dy, x), mean.dtype), op.Mul(mean, total)))
    dvariance = op.Mul(op.Mul(op.Mul(factor, inverse), dscale), -0.5)
    return dx, dscale, total, op.Neg(op.Mul(factor, total)), dvariance


def _batch_statistics(op: Emitter, node: ir.Node, dy: ir.Value) -> tuple[Gradient, ...]:
    """Through the batch's own mean and variance (Ioffe & Szegedy 2015), in sums over each channel."""
    x, scale, bias = (op.given(node, i) for i in range(3))
    mean, variance = op.add_output(node, 1, "mean"), op.add_output(node, 2, "variance")
    inverse = _inverse(op, variance, _epsilon(op, node))
    total = op.cast(_total(op, dy), mean.dtype)
    normal = _is_constant(op, scale, 1.0) and _is_constant(op, bias, 0.0)
    # Where the output is the normalized x itself, that is read in x's place, which then needn't be kept.
    source, center = (node.outputs[0], None) if normal else (x, mean)
    dot = op.cast(_dot(op, dy, source), mean.dtype)
    dscale = dot if center is None else op.Mul(inverse, op.Sub(dot, op.Mul(center, total)))
    if not op.wants(0):
        return None, dscale, total
    count = op.size(x) // op.dims(x)[1]
    factor = op.Mul(op.cast(scale, inverse.dtype), inverse)
    share = op.Mul(factor, -1.0 / count)
    slope = op.Mul(share, dscale if center is None else op.Mul(inverse, dscale))
    rest = _affine(op, source, slope, op.Mul(share, total), center)
    return op.Add(op.Mul(dy, op.cast(_column(op, factor, dy), dy.dtype)), rest), dscale, total


def _is_constant(op: Emitter, value: ir.Value, number: float) -> bool:
    content = op.content(value)
    return content is not None and bool((content == number).all())


def _inverse(op: Emitter, variance: ir.Value, epsilon: float) -> ir.Value:
    return op.Reciprocal(op.Sqrt(op.Add(variance, epsilon)))


def _column(op: Emitter, vector: ir.Value, like: ir.Value) -> ir.Value:
    """A number for each channel, to be broadcast over images."""
    rank = len(op.dims(like)) - 2
    return op.reshape(vector, (op.size(vector), *[1] * rank))


def _total(op: Emitter, x: ir.Value) -> ir.Value:
    """The sum of each channel."""
    return op.sum(x, [0, *range(2, len(op.dims(x)))])


def _dot(op: Emitter, a: ir.Value, b: ir.Value) -> ir.Value:
    """The sum of a·b over each channel."""
    batch, channels, *image = op.dims(a)
    if math.prod(image) < LARGE_IMAGE:
        return _total(op, op.Mul(a, b))
    count, last = batch * channels, image[-1]
    planes = op.reshape(a, (1, count, math.prod(image[:-1]), last))
    weights = op.reshape(b, (count, 1, math.prod(image[:-1]), last))
    sums = op.reshape(op.composite("ChannelSums", op.Conv(planes, weights, group=count)), (batch, channels))
    return op.reshape(sums, (channels,)) if batch == 1 else op.sum(sums, [0])


# Over rows.


@gradient("LayerNormalization")
def _layer_normalization(
    op: Emitter, node: ir.Node, dy: Gradient, dmean: Gradient = None, dinverse: Gradient = None
) -> tuple[Gradient, ...]:
    dx, *rest = _of_rows(op, node, dy) if dy is not None else (None,)
    if op.wants(0) and not (dmean is None and dinverse is None):
        of_statistics = op.cast(_of_statistics(op, node, dmean, dinverse), op.given(node, 0).dtype)
        dx = of_statistics if dx is None else op.Add(dx, of_statistics)
    return dx, *rest


def _of_statistics(op: Emitter, node: ir.Node, dmean: Gradient, dinverse: Gradient) -> ir.Value:
    """What comes to x from the mean of each row, 1 / size each, and from 1 / deviation, -(x - mean) / deviation³."""
    mean, inverse = op.add_output(node, 1, "mean"), op.add_output(node, 2, "inverse")
    share = 1.0 / _matrix_dims(op, node)[1]
    x = op.cast(op.given(node, 0), mean.dtype)
    parts = [] if dmean is None else [op.expand(op.Mul(dmean, share), op.dims(x))]
    if dinverse is not None:
        cubed = op.Mul(inverse, op.Mul(inverse, inverse))
        parts.append(op.Mul(op.Sub(x, mean), op.Mul(op.Mul(dinverse, cubed), -share)))
    return op.Sum(*parts)


def _of_rows(op: Emitter, node: ir.Node, dy: ir.Value) -> tuple[Gradient, ...]:
    """As for a batch, each row a channel. Sums are products with vectors: those are the fastest."""
    x, scale = op.given(node, 0), op.given(node, 1)
    rows, size, samples = _matrix_dims(op, node)
    mean, inverse = (
        op.reshape(op.cast(op.add_output(node, i, name), dy.dtype), (rows, 1))
        for i, name in ((1, "mean"), (2, "inverse"))
    )
    gradient_rows = op.reshape(dy, (rows, size))
    dbias = op.reshape(op.weighted_rows(None, gradient_rows, samples=samples), op.dims(scale)) if op.wants(2) else None
    if not op.wants(0) and not op.wants(1):
        return None, None, dbias
    product = op.Mul(gradient_rows, op.reshape(x, (rows, size)))
    dscale = None
    if op.wants(1):
        moved = op.weighted_rows(op.Mul(inverse, mean), gradient_rows, samples=samples)
        dscale = op.Sub(op.weighted_rows(inverse, product, samples=samples), moved)
        dscale = op.reshape(dscale, op.dims(scale))
    if not op.wants(0):
        return None, dscale, dbias
    column = op.reshape(op.cast(scale, dy.dtype), (size, 1))
    level = op.MatMul(gradient_rows, column)
    along = op.Mul(op.Sub(op.MatMul(product, column), op.Mul(mean, level)), inverse)
    share = op.Mul(inverse, -1.0 / size)
    slope, shift = op.Mul(op.Mul(share, inverse), along), op.Mul(share, level)
    flat = [op.reshape(v, (rows,)) for v in (slope, shift, mean)]
    rest = op.reshape(_affine(op, op.reshape(x, (1, rows, size)), *flat), (rows, size))
    scaled = op.Mul(op.Mul(gradient_rows, op.reshape(column, (size,))), inverse)
    return op.reshape(op.Add(scaled, rest), op.dims(x)), dscale, dbias


def _matrix_dims(op: Emitter, node: ir.Node) -> tuple[int, int, int]:
    """How many rows a node normalizes, of which size, and of how many samples."""
    dims = op.dims(node.inputs[0])
    first = op.attribute(node, "axis", -1) % len(dims)
    return math.prod(dims[:first]), math.prod(dims[first:]), dims[0] if first else 1


@gradient("RMSNormalization", "SimplifiedLayerNormalization")
def _rms_normalization(op: Emitter, node: ir.Node, dy: ir.Value) -> tuple[Gradient, ...]:
    x, scale = op.given(node, 0), op.given(node, 1)
    rows, size, samples = _matrix_dims(op, node)
    matrix, gradient_rows = op.reshape(x, (rows, size)), op.reshape(dy, (rows, size))
    square = op.ReduceMean(op.Mul(matrix, matrix), op.ints(1), keepdims=1)
    inverse = _inverse(op, square, _epsilon(op, node))
    product = op.Mul(gradient_rows, matrix)
    dscale = op.reshape(op.weighted_rows(inverse, product, samples=samples), op.dims(scale)) if op.wants(1) else None
    if not op.wants(0):
        return None, dscale
    column = op.reshape(op.cast(scale, dy.dtype), (size, 1))
    along = op.Mul(op.MatMul(product, column), op.Mul(op.Mul(inverse, inverse), 1.0 / size))
    direct = op.Mul(gradient_rows, op.reshape(column, (size,)))
    dx = op.Mul(op.Sub(direct, op.Mul(matrix, along)), inverse)
    return op.reshape(dx, op.dims(x)), dscale


@gradient("LpNormalization")
def _lp_normalization(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    x, y = op.given(node, 0), node.outputs[0]
    axis, p = op.attribute(node, "axis", -1), op.attribute(node, "p", 2)
    norm = (op.ReduceL1 if p == 1 else op.ReduceL2)(x, op.ints(axis), keepdims=1)
    along = op.sum(op.Mul(dy, y), [axis], keepdims=True)
    return op.Div(op.Sub(dy, op.Mul(op.Sign(x) if p == 1 else y, along)), norm)


@expansion("MeanVarianceNormalization")
def _mean_variance(op: Emitter, node: ir.Node) -> tuple[ir.Value, ...]:
    x, axes = op.given(node, 0), op.ints(*op.attribute(node, "axes", [0, 2, 3]))
    centered = op.Sub(x, op.ReduceMean(x, axes, keepdims=1))
    variance = op.ReduceMean(op.Mul(centered, centered), axes, keepdims=1)
    return (op.Div(centered, op.Add(op.Sqrt(variance), 1e-9)),)


# Over neighbouring channels.


@gradient("LRN")
def _lrn(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    """y = x / s^β where s = bias + α · the mean of x² over ``size`` channels (Krizhevsky et al. 2012)."""
    x, y, size = op.given(node, 0), node.outputs[0], op.attribute(node, "size", 1)
    alpha, beta = op.attribute(node, "alpha", 1e-4), op.attribute(node, "beta", 0.75)
    before = (size - 1) // 2
    mean = _channel_mean(op, op.Mul(x, x), size, before)
    s = op.Add(op.Mul(mean, alpha), op.attribute(node, "bias", 1.0))
    direct = op.Mul(dy, op.Pow(s, -beta))
    spread = _channel_mean(op, op.Div(op.Mul(dy, y), s), size, size - 1 - before)
    return op.Sub(direct, op.Mul(x, op.Mul(spread, 2.0 * alpha * beta)))


def _channel_mean(op: Emitter, x: ir.Value, size: int, before: int) -> ir.Value:
    """The sum over ``size`` channels around each, divided by ``size``."""
    batch, channels, *image = op.dims(x)
    planes = op.reshape(x, (batch, 1, channels, math.prod(image)))
    pads = [before, 0, size - 1 - before, 0]
    return op.reshape(op.AveragePool(planes, kernel_shape=[size, 1], pads=pads, count_include_pad=1), op.dims(x))
