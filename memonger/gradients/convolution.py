"""Convolutions. Which formulation is fastest hangs on the shape; the bounds here were measured on onnxruntime's CPU kernels."""

from collections.abc import Sequence

import onnx_ir as ir

from memonger.gradients.emitter import Emitter
from memonger.gradients.registry import Gradient, gradient
from memonger.gradients.windows import Windows, windows_of

SMALL_IMAGE = 196  # elements of a channel up to which a pointwise weight gradient is one product over the whole batch
LARGE_IMAGE = 784  # elements of a channel from which a convolution with the flipped weight beats ConvTranspose


@gradient("Conv")
def _conv(op: Emitter, node: ir.Node, dy: ir.Value) -> tuple[Gradient, ...]:
    x, w = node.inputs[:2]
    kernel = op.dims(w)[2:]
    at = windows_of(op, node, op.dims(x)[2:], op.dims(node.outputs[0])[2:], kernel)
    group = op.attribute(node, "group", 1)
    dx = _image_gradient(op, dy, w, at, group) if op.wants(0) and x is not None and w is not None else None
    dw = _weight_gradient(op, x, dy, at, group) if op.wants(1) and x is not None else None
    return dx, dw, _bias_gradient(op, dy) if op.wants(2) else None


@gradient("ConvTranspose")
def _conv_transpose(op: Emitter, node: ir.Node, dy: ir.Value) -> tuple[Gradient, ...]:
    x, w = node.inputs[:2]
    kernel = op.dims(w)[2:]
    at = windows_of(op, node, op.dims(node.outputs[0])[2:], op.dims(x)[2:], kernel, up=True)
    group = op.attribute(node, "group", 1)
    db = _bias_gradient(op, dy) if op.wants(2) else None
    dw = _weight_gradient(op, dy, x, at, group) if op.wants(1) and x is not None else None
    dx = None
    if op.wants(0):
        settings = _settings(at, group, at.begin, [max(0, excess) for excess in at.excess])
        dx = op.Conv(_read_part(op, dy, at), w, **settings)
    return dx, dw, db


def _settings(at: Windows, group: int, begin: Sequence[int], end: Sequence[int]) -> dict[str, object]:
    return {"strides": at.strides, "dilations": at.dilations, "pads": [*begin, *end], "group": group}


def _bias_gradient(op: Emitter, dy: ir.Value) -> ir.Value:
    return op.sum(dy, [0, *range(2, len(op.dims(dy)))])


def _read_part(op: Emitter, x: ir.Value, at: Windows) -> ir.Value:
    """The image as far as the last windows reach."""
    axes = [a for a in range(at.rank) if at.excess[a] < 0]
    if not axes:
        return x
    stops = [at.image[a] + at.excess[a] for a in axes]
    return op.Slice(x, op.ints(*[0 for _ in axes]), op.ints(*stops), op.ints(*[a + 2 for a in axes]))


# The gradient of the image: each window's gradient times the weight, added at the window's place.


def _image_gradient(op: Emitter, dy: ir.Value, w: ir.Value, at: Windows, group: int) -> ir.Value:
    batch, channels = op.dims(dy)[:2]
    inner = op.dims(w)[1]
    if group == 1 and at.is_pointwise and at.is_dense:
        matrix = op.transpose(op.reshape(w, (channels, inner)), (1, 0))
        return op.reshape(op.MatMul(matrix, op.reshape(dy, (batch, channels, -1))), (batch, inner, *at.image))
    if at.is_dense and _size(at.image) >= LARGE_IMAGE and all(_border(at, a) for a in range(at.rank)):
        return _by_flipped_weight(op, dy, w, at, group)
    # Its output ends with the image where the padding at the end is what the last windows reach beyond it.
    extra = [max(0, -excess) for excess in at.excess]
    settings = _settings(at, group, at.begin, [max(0, excess) for excess in at.excess])
    return op.ConvTranspose(dy, w, output_padding=extra if any(extra) else None, **settings)


def _size(dims: Sequence[int]) -> int:
    size = 1
    for dim in dims:
        size *= dim
    return size


def _border(at: Windows, axis: int) -> bool:
    """Whether padding is narrower than the window, so that a convolution's own padding can undo it."""
    return at.begin[axis] < at.extent[axis] and at.excess[axis] < at.extent[axis] and at.excess[axis] >= 0


def _by_flipped_weight(op: Emitter, dy: ir.Value, w: ir.Value, at: Windows, group: int) -> ir.Value:
    """A convolution of dy, padded to the windows that hold each element, with the weight transposed and flipped."""
    outer, inner = op.dims(w)[:2]
    axes = range(2, 2 + at.rank)
    flipped = w
    if inner > 1:
        parts = op.reshape(w, (group, outer // group, inner, *at.kernel))
        flipped = op.Transpose(parts, perm=[0, 2, 1, *(a + 1 for a in axes)])
    flipped = _flip(op, op.reshape(flipped, (group * inner, outer // group, *at.kernel)), axes)
    begin = [e - 1 - p for e, p in zip(at.extent, at.begin, strict=True)]
    end = [e - 1 - p for e, p in zip(at.extent, at.excess, strict=True)]
    return op.Conv(dy, flipped, **_settings(at, group, begin, end))


def _flip(op: Emitter, x: ir.Value, axes: Sequence[int]) -> ir.Value:
    axes = [a for a in axes if op.dims(x)[a] > 1]
    if not axes:
        return x
    starts, stops = [op.dims(x)[a] - 1 for a in axes], [-op.dims(x)[a] - 1 for a in axes]
    return op.Slice(x, op.ints(*starts), op.ints(*stops), op.ints(*axes), op.ints(*[-1 for _ in axes]))


# The gradient of the weight: the sum over batch and windows of what a window reads times the window's gradient.


def _weight_gradient(op: Emitter, x: ir.Value, dy: ir.Value, at: Windows, group: int) -> ir.Value:
    channels, outputs = op.dims(x)[1], op.dims(dy)[1]
    if group == 1 and at.is_pointwise:
        return op.reshape(_pointwise_weight(op, x, dy, at), (outputs, channels, *at.kernel))
    x = _read_part(op, x, at)
    if at.dilations[-1] > 1 and at.rank < 3:
        return _weight_by_depth(op, x, dy, at, group)
    undilated = all(d == 1 for d in at.dilations)
    if at.is_dense and undilated and outputs < channels and all(_border(at, a) for a in range(at.rank)):
        return _weight_by_rows_of_dy(op, x, dy, at, group)
    return _weight_by_rows_of_x(op, x, dy, at, group)


def _pointwise_weight(op: Emitter, x: ir.Value, dy: ir.Value, at: Windows) -> ir.Value:
    """The gradient of a 1×1 weight, as a matrix ``[K, C]``."""
    if not at.is_dense:
        axes = op.ints(*range(2, 2 + at.rank))
        starts, stops = op.ints(*[0] * at.rank), op.ints(*at.image)
        x = op.Slice(x, starts, stops, axes, op.ints(*at.strides))
    (batch, channels), outputs, size = op.dims(x)[:2], op.dims(dy)[1], _size(at.count)
    x, dy = op.reshape(x, (batch, channels, size)), op.reshape(dy, (batch, outputs, size))
    if batch > 1 and (size <= SMALL_IMAGE or not at.is_dense):
        rows = op.reshape(op.Transpose(dy, perm=[1, 0, 2]), (outputs, batch * size))
        return op.MatMul(rows, op.reshape(op.Transpose(x, perm=[0, 2, 1]), (batch * size, channels)))
    if outputs >= channels:
        return _sum_batch(op, op.MatMul(dy, op.Transpose(x, perm=[0, 2, 1])))
    return op.Transpose(_sum_batch(op, op.MatMul(x, op.Transpose(dy, perm=[0, 2, 1]))), perm=[1, 0])


def _sum_batch(op: Emitter, products: ir.Value) -> ir.Value:
    batch, *rest = op.dims(products)
    return op.reshape(products, rest) if batch == 1 else op.sum(products, [0])


def _rows(op: Emitter, x: ir.Value, group: int) -> ir.Value:
    """An image ``[N, g·C, ..., W]`` with the batch as channels and the channels along the last axis.

    Returns: ``[1, g·N, ..., W·C]``.
    """
    batch, channels, *image = op.dims(x)
    inner = channels // group
    axes = range(3, 3 + len(image))
    last = op.transpose(op.reshape(x, (batch, group, inner, *image)), (1, 0, *axes, 2))
    return op.reshape(last, (1, group * batch, *image[:-1], image[-1] * inner))


def _as_weight(op: Emitter, x: ir.Value) -> ir.Value:
    """``[N, C, ...]`` as the weight ``[C, N, ...]``."""
    batch, channels, *image = op.dims(x)
    if batch == 1:
        return op.reshape(x, (channels, 1, *image))
    return op.Transpose(x, perm=[1, 0, *range(2, 2 + len(image))])


def _weight_by_rows_of_x(op: Emitter, x: ir.Value, dy: ir.Value, at: Windows, group: int) -> ir.Value:
    """A convolution of x, its channels along the last axis, with dy as the weight.

    Strides become dilations and dilations strides, the last axis' excepted: its dilation is cut out of the result.
    """
    outputs, inner = op.dims(dy)[1], op.dims(x)[1] // group
    end = [max(0, excess) for excess in at.excess]
    found = op.Conv(
        _rows(op, x, group),
        _as_weight(op, dy),
        strides=[*at.dilations[:-1], 1],
        dilations=[*at.strides[:-1], at.strides[-1] * inner],
        pads=[*at.begin[:-1], at.begin[-1] * inner, *end[:-1], end[-1] * inner],
        group=group,
    )
    found = op.reshape(found, (outputs, *at.kernel[:-1], at.extent[-1], inner))
    if at.dilations[-1] > 1:
        found = op.slice(found, at.rank, 0, at.extent[-1], at.dilations[-1])
    return op.transpose(found, (0, at.rank + 1, *range(1, at.rank + 1)))


def _weight_by_rows_of_dy(op: Emitter, x: ir.Value, dy: ir.Value, at: Windows, group: int) -> ir.Value:
    """The same with the roles of x and dy exchanged: less work where dy has fewer channels. The weight comes out flipped."""
    outputs, inner = op.dims(dy)[1] // group, op.dims(x)[1] // group
    begin = [k - 1 - p for k, p in zip(at.kernel, at.begin, strict=True)]
    end = [k - 1 - p for k, p in zip(at.kernel, at.excess, strict=True)]
    found = op.Conv(
        _rows(op, dy, group),
        _as_weight(op, x),
        dilations=[*[1] * (at.rank - 1), outputs],
        pads=[*begin[:-1], begin[-1] * outputs, *end[:-1], end[-1] * outputs],
        group=group,
    )
    found = op.reshape(found, (group, inner, *at.kernel, outputs))
    found = op.transpose(found, (0, at.rank + 2, 1, *range(2, at.rank + 2)))
    return _flip(op, op.reshape(found, (group * outputs, inner, *at.kernel)), range(2, at.rank + 2))


def _weight_by_depth(op: Emitter, x: ir.Value, dy: ir.Value, at: Windows, group: int) -> ir.Value:
    """A convolution of one rank more: x with the batch as channels and the channels as depth, dy as the weight."""
    (batch, channels), outputs = op.dims(x)[:2], op.dims(dy)[1]
    image = op.dims(x)[2:]
    parts = op.reshape(x, (batch, group, channels // group, *image))
    if group > 1:
        parts = op.Transpose(parts, perm=[1, 0, *range(2, at.rank + 3)])
    weight = op.reshape(_as_weight(op, dy), (outputs, batch, 1, *at.count))
    found = op.Conv(
        op.reshape(parts, (1, group * batch, channels // group, *image)),
        weight,
        strides=[1, *at.dilations],
        dilations=[1, *at.strides],
        pads=[0, *at.begin, 0, *(max(0, excess) for excess in at.excess)],
        group=group,
    )
    return op.reshape(found, (outputs, channels // group, *at.kernel))
