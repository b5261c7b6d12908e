"""Convolutions, and pools over sliding windows and over whole images.

Which formulation is fastest depends on the shape: the bounds here were measured on onnxruntime's CPU kernels.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import onnx_ir as ir

from memonger.autodiff.registry import Gradient, expansion, gradient
from memonger.autodiff.rules.movement import pad, zeros
from memonger.ir.emitter import Attribute, Emitter
from memonger.ir.marks import TURNED_WEIGHT, DepthwiseWeight
from memonger.ir.values import is_swapped
from memonger.ir.windows import Windows, windows_of

SMALL_BATCH = (
    2  # a pointwise image gradient is transposed, not the weight, at this many outputs for each of its columns
)
LARGE_IMAGE = 784  # elements of a channel from which a pointwise weight's gradient is a product for each image,
SMALL_WEIGHT = (
    3  # as where an image and its gradient are so many times as large as the weight: less is written than moved
)
WINDOWS = 2  # for each output: windows of all images up to which a weight's gradient is one product with them


@gradient("Conv")
def _conv(op: Emitter, node: ir.Node, dy: ir.Value) -> tuple[Gradient, ...]:
    x, w = node.inputs[:2]
    kernel = op.dims(w)[2:]
    at = windows_of(node, op.dims(x)[2:], op.dims(node.outputs[0])[2:], kernel)
    group = op.attribute(node, "group", 1)
    dx = _image_gradient(op, dy, w, at, group) if op.wants(0) and x is not None and w is not None else None
    dw = _weight_gradient(op, x, dy, at, group) if op.wants(1) and x is not None else None
    return dx, dw, _bias_gradient(op, dy) if op.wants(2) else None


@gradient("ConvTranspose")
def _conv_transpose(op: Emitter, node: ir.Node, dy: ir.Value) -> tuple[Gradient, ...]:
    x, w = node.inputs[:2]
    kernel = op.dims(w)[2:]
    at = windows_of(node, op.dims(node.outputs[0])[2:], op.dims(x)[2:], kernel, up=True)
    group = op.attribute(node, "group", 1)
    db = _bias_gradient(op, dy) if op.wants(2) else None
    dw = _weight_gradient(op, dy, x, at, group) if op.wants(1) and x is not None else None
    dx = None
    if op.wants(0):
        settings = _settings(at, group, at.begin, [max(0, excess) for excess in at.excess])
        dx = op.Conv(_read_part(op, dy, at), w, **settings)
    return dx, dw, db


def _settings(at: Windows, group: int, begin: Sequence[int], end: Sequence[int]) -> dict[str, Attribute]:
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
        return op.reshape(pointwise_image(op, dy, op.reshape(w, (channels, inner))), (batch, inner, *at.image))
    if at.is_dense and all(_border(at, a) for a in range(at.rank)):
        return _by_flipped_weight(op, dy, w, at, group)
    # Its output ends with the image where the padding at the end is what the last windows reach beyond it.
    extra = [max(0, -excess) for excess in at.excess]
    settings = _settings(at, group, at.begin, [max(0, excess) for excess in at.excess])
    return op.ConvTranspose(dy, w, output_padding=extra if any(extra) else None, **settings)


def pointwise_image(op: Emitter, dy: ir.Value, w: ir.Value) -> ir.Value:
    """The gradient ``[N, C, P]`` of an image under a 1×1 weight ``[K, C]``: the smaller is transposed, the weight, or
    the gradients' images and channels."""
    (batch, outputs), channels = op.dims(dy)[:2], op.dims(w)[1]
    size = math.prod(op.dims(dy)[2:])
    if outputs < SMALL_BATCH * batch * size:
        return op.MatMul(op.transpose(w, (1, 0)), op.reshape(dy, (batch, outputs, size)))
    return _batch_second(op, op.reshape(op.Gemm(w, _columns(op, dy), transA=1), (channels, batch, size)), 1)


def _columns(op: Emitter, x: ir.Value) -> ir.Value:
    """An image ``[N, C, ...]`` as the matrix ``[C, N·P]``."""
    batch, channels, *image = op.dims(x)
    return op.reshape(_batch_second(op, x, 1), (channels, batch * math.prod(image)))


def _border(at: Windows, axis: int) -> bool:
    """Whether padding is narrower than the window, so that a convolution's own padding can undo it."""
    return at.begin[axis] < at.extent[axis] and at.excess[axis] < at.extent[axis] and at.excess[axis] >= 0


def _by_flipped_weight(op: Emitter, dy: ir.Value, w: ir.Value, at: Windows, group: int) -> ir.Value:
    """A convolution of dy, padded to the windows that hold each element, with the weight transposed and flipped."""
    outer, inner, size = op.dims(w)[0] // group, op.dims(w)[1], math.prod(at.kernel)
    if 1 in (outer, inner):
        turned = op.reshape(w, (group, inner, outer, size))
    elif group == 1:
        turned = op.transpose(op.reshape(w, (outer, inner, size)), (1, 0, 2))
    else:
        turned = op.transpose(op.reshape(w, (group, outer, inner, size)), (0, 2, 1, 3))
    weight = op.MatMul(turned, op.constant(np.eye(size)[::-1].tolist(), w.dtype))  # flips, and moves whole rows
    begin = [e - 1 - p for e, p in zip(at.extent, at.begin, strict=True)]
    end = [e - 1 - p for e, p in zip(at.extent, at.excess, strict=True)]
    weight = op.reshape(weight, (group * inner, outer, *at.kernel))
    dx = op.Conv(dy, weight, **_settings(at, group, begin, end))
    node = dx.producer()
    if group == 1 and node is not None:
        node.metadata_props[TURNED_WEIGHT] = str(w.name)
    return dx


def _swapped(op: Emitter, x: ir.Value) -> ir.Value:
    """A stack of matrices ``[B, m, n]``, each transposed: the kind of Transpose that is fast. A view of a vector."""
    b, m, n = op.dims(x)
    if m == 1 or n == 1:
        return op.reshape(x, (b, n, m))
    made = op.transpose(x, (0, 2, 1))
    return op.composite("SwappedMatrices", made) if is_swapped(made) else made


def _flip(op: Emitter, x: ir.Value, rank: int) -> ir.Value:
    """``rank`` axes from the second on, backwards."""
    axes = [a for a in range(1, rank + 1) if op.dims(x)[a] > 1]
    if not axes:
        return x
    starts, stops = [op.dims(x)[a] - 1 for a in axes], [-op.dims(x)[a] - 1 for a in axes]
    return op.Slice(x, op.ints(*starts), op.ints(*stops), op.ints(*axes), op.ints(*[-1 for _ in axes]))


# The gradient of the weight: the sum over batch and windows of what a window reads times the window's gradient.


def _weight_gradient(op: Emitter, x: ir.Value, dy: ir.Value, at: Windows, group: int) -> ir.Value:
    channels, outputs = op.dims(x)[1], op.dims(dy)[1]
    if group == 1 and at.is_pointwise:
        return op.reshape(_pointwise_weight(op, x, dy, at), (outputs, channels, *at.kernel))
    if group == channels:
        dw = (_depthwise_by_columns if at.rank < 3 and at.is_dense else _depthwise_by_images)(op, x, dy, at)
        return _depthwise(op, dw, x, dy, at) if at.rank == 2 and outputs == channels else dw
    if group == 1 and _windows_pay(op.dims(x)[0], outputs, at):
        return _weight_by_windows(op, x, dy, at)
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
    (batch, channels), outputs, size = op.dims(x)[:2], op.dims(dy)[1], math.prod(at.count)
    if size < LARGE_IMAGE and SMALL_WEIGHT * outputs * channels > size * (outputs + channels):
        return op.Gemm(_columns(op, dy), _columns(op, x), transB=1)
    x, dy = op.reshape(x, (batch, channels, size)), op.reshape(dy, (batch, outputs, size))
    if outputs >= channels:
        return _sum_batch(op, products_by_rows(op, dy, x))
    return op.transpose(_sum_batch(op, products_by_rows(op, x, dy)), (1, 0))


def products_by_rows(op: Emitter, a: ir.Value, b: ir.Value) -> ir.Value:
    """a·bᵀ for stacks of matrices ``[G, m, P]`` and ``[G, n, P]``: ``[G, m, n]``.

    As a convolution whose windows are rows of b: onnxruntime's CPU kernel runs it as one product for each matrix that
    reads b transposed, without a copy of either.
    """
    (count, m, size), n = op.dims(a), op.dims(b)[1]
    rows = op.Conv(op.reshape(b, (1, count, n, size)), op.reshape(a, (count * m, 1, 1, size)), group=count)
    return op.reshape(op.composite("RowProducts", rows), (count, m, n))


def _sum_batch(op: Emitter, products: ir.Value) -> ir.Value:
    batch, *rest = op.dims(products)
    return op.reshape(products, rest) if batch == 1 else op.sum(products, [0])


def _batch_second(op: Emitter, x: ir.Value, group: int) -> ir.Value:
    """``[N, g·C, ...]`` as ``[g, N, C·...]``, or for one group as ``[C, N, ...]``; whole blocks moved."""
    batch, channels, *image = op.dims(x)
    parts = op.reshape(x, (batch, group, channels // group * math.prod(image))) if group > 1 else x
    b, g, *rest = op.dims(parts)
    return op.reshape(parts, (g, b, *rest)) if 1 in (b, g) else op.transpose(parts, (1, 0, *range(2, 2 + len(rest))))


def _rows(op: Emitter, x: ir.Value, group: int) -> ir.Value:
    """An image ``[N, g·C, ..., W]`` with the batch as channels and the channels along the last axis.

    Returns: ``[1, g·N, ..., W·C]``.
    """
    batch, channels, *image = op.dims(x)
    inner = channels // group
    blocks = x if group == 1 else _batch_second(op, x, group)
    last = _swapped(op, op.reshape(blocks, (group * batch, inner, math.prod(image))))
    return op.reshape(last, (1, group * batch, *image[:-1], image[-1] * inner))


def _as_weight(op: Emitter, x: ir.Value) -> ir.Value:
    """``[N, C, ...]`` as the weight ``[C, N, ...]``."""
    return _batch_second(op, x, 1)


def _windows_pay(batch: int, outputs: int, at: Windows) -> bool:
    """Whether the windows are smaller than the weight, or not much larger, and cutting them out takes little."""
    return batch * math.prod(at.count) <= WINDOWS * outputs and 4 * batch * math.prod(at.kernel) <= outputs


def _weight_by_windows(op: Emitter, x: ir.Value, dy: ir.Value, at: Windows) -> ir.Value:
    """One product of dy with the windows of x, which leaves the weight in its own layout: nothing of its size moves.

    The windows are cut out by a convolution with ones and zeros, an output channel for each place in a window and each
    image.
    """
    (batch, channels), outputs, size = op.dims(x)[:2], op.dims(dy)[1], math.prod(at.kernel)
    places = np.eye(size * batch).reshape(size, batch, size, batch).transpose(0, 1, 3, 2)
    places = places.reshape(size * batch, batch, *at.kernel)
    settings = _settings(at, 1, at.begin, [max(0, excess) for excess in at.excess])
    windows = op.Conv(_as_weight(op, _read_part(op, x, at)), op.constant(places.tolist(), x.dtype), **settings)
    windows = op.reshape(windows, (channels * size, batch * math.prod(at.count)))
    return op.reshape(op.Gemm(_columns(op, dy), windows, transB=1), (outputs, channels, *at.kernel))


def _weight_by_rows_of_x(op: Emitter, x: ir.Value, dy: ir.Value, at: Windows, group: int) -> ir.Value:
    """A convolution of x, its channels along the last axis, with dy as the weight.

    Strides become dilations and dilations strides, the last axis' excepted: its dilation is cut out of the result.
    """
    outputs, inner = op.dims(dy)[1], op.dims(x)[1] // group
    end = [max(0, excess) for excess in at.excess]
    result = op.Conv(
        _rows(op, x, group),
        _as_weight(op, dy),
        strides=[*at.dilations[:-1], 1],
        dilations=[*at.strides[:-1], at.strides[-1] * inner],
        pads=[*at.begin[:-1], at.begin[-1] * inner, *end[:-1], end[-1] * inner],
        group=group,
    )
    op.composite("WeightProducts", result)
    result = op.reshape(result, (outputs, *at.kernel[:-1], at.extent[-1], inner))
    if at.dilations[-1] > 1:
        result = op.slice(result, at.rank, 0, at.extent[-1], at.dilations[-1])
    last = _swapped(op, op.reshape(result, (outputs, math.prod(at.kernel), inner)))
    return op.reshape(last, (outputs, inner, *at.kernel))


def _weight_by_rows_of_dy(op: Emitter, x: ir.Value, dy: ir.Value, at: Windows, group: int) -> ir.Value:
    """With x and dy in exchanged roles: less work where dy has fewer channels. The weight comes out flipped."""
    outputs, inner = op.dims(dy)[1] // group, op.dims(x)[1] // group
    begin = [k - 1 - p for k, p in zip(at.kernel, at.begin, strict=True)]
    end = [k - 1 - p for k, p in zip(at.kernel, at.excess, strict=True)]
    result = op.Conv(
        _rows(op, dy, group),
        _as_weight(op, x),
        dilations=[*[1] * (at.rank - 1), outputs],
        pads=[*begin[:-1], begin[-1] * outputs, *end[:-1], end[-1] * outputs],
        group=group,
    )
    op.composite("WeightProducts", result)
    result = _flip(op, op.reshape(result, (group * inner, *at.kernel, outputs)), at.rank)
    last = _swapped(op, op.reshape(result, (group, inner * math.prod(at.kernel), outputs)))
    return op.reshape(last, (group * outputs, inner, *at.kernel))


def _weight_by_depth(op: Emitter, x: ir.Value, dy: ir.Value, at: Windows, group: int) -> ir.Value:
    """A convolution of one rank more: x with the batch as channels and the channels as depth, dy as the weight."""
    (batch, channels), outputs = op.dims(x)[:2], op.dims(dy)[1]
    blocks = x if group == 1 else _batch_second(op, x, group)
    result = op.Conv(
        op.reshape(blocks, (1, group * batch, channels // group, *op.dims(x)[2:])),
        op.reshape(_as_weight(op, dy), (outputs, batch, 1, *at.count)),
        strides=[1, *at.dilations],
        dilations=[1, *at.strides],
        pads=[0, *at.begin, 0, *(max(0, excess) for excess in at.excess)],
        group=group,
    )
    return op.reshape(result, (outputs, channels // group, *at.kernel))


def _depthwise(op: Emitter, dw: ir.Value, x: ir.Value, dy: ir.Value, at: Windows) -> ir.Value:
    """The gradient with what it is computed from, for a lowering that has a kernel for the whole of it."""
    mark = DepthwiseWeight(str(x.name), str(dy.name), at.begin, at.strides, at.dilations)
    node = op.composite(DepthwiseWeight.NAME, dw).producer()
    assert node is not None
    node.metadata_props[DepthwiseWeight.KEY] = json.dumps(asdict(mark))
    return dw


def _depthwise_by_images(op: Emitter, x: ir.Value, dy: ir.Value, at: Windows) -> ir.Value:
    """A convolution of x by dy, every channel of every image a group."""
    x = _read_part(op, x, at)
    (batch, channels), outputs = op.dims(x)[:2], op.dims(dy)[1]
    result = op.Conv(
        op.reshape(x, (1, batch * channels, *op.dims(x)[2:])),
        op.reshape(dy, (batch * outputs, 1, *at.count)),
        strides=at.dilations,
        dilations=at.strides,
        pads=[*at.begin, *(max(0, excess) for excess in at.excess)],
        group=batch * channels,
    )
    op.composite("DepthwiseProducts", result)
    return op.reshape(_sum_batch(op, op.reshape(result, (batch, outputs, *at.kernel))), (outputs, 1, *at.kernel))


def _depthwise_by_columns(op: Emitter, x: ir.Value, dy: ir.Value, at: Windows) -> ir.Value:
    """The same at strides 1, for each column of the kernel the columns of x it reads.

    Then dy is as wide as the image, where onnxruntime's CPU kernel multiplies without a copy of the windows.
    """
    (batch, channels), outputs = op.dims(x)[:2], op.dims(dy)[1]
    image, count = (1, *op.dims(x)[2:])[-2:], (1, *at.count)[-2:]
    (height, width), (begin, end) = (1, *at.kernel)[-2:], ((0, *pads)[-2:] for pads in (at.begin, at.excess))
    extent, dilation = (1, *at.extent)[-2:], (1, *at.dilations)[-2:]
    planes = op.reshape(x, (batch, channels, *image))
    if any(begin) or any(end):
        planes = op.Pad(planes, op.ints(0, 0, *begin, 0, 0, *end))
    weight, groups = op.reshape(dy, (batch * outputs, 1, *count)), batch * channels
    columns = []
    for j in range(width):
        column = op.slice(planes, 3, j * dilation[1], j * dilation[1] + count[1]) if width > 1 else planes
        result = op.Conv(op.reshape(column, (1, groups, count[0] + extent[0] - 1, count[1])), weight, group=groups)
        if extent[0] == 1 and outputs == channels:
            op.composite("ChannelSums", result)
        elif count[0] == 1:
            op.composite("RowProducts", result)
        else:
            op.composite("DepthwiseProducts", result)
        if dilation[0] > 1:
            result = op.slice(result, 2, 0, extent[0], dilation[0])
        columns.append(op.reshape(result, (batch, outputs, height, 1)))
    whole = columns[0] if width == 1 else op.Concat(*columns, axis=3)
    return op.reshape(_sum_batch(op, whole), (outputs, 1, *at.kernel))


TINY = 1e-30  # below any norm that isn't zero in float32, and above zero there


@expansion("GlobalMaxPool")
def _global_max_pool(op: Emitter, node: ir.Node) -> tuple[ir.Value, ...]:
    """A pool with one window, which can tell where the largest element is."""
    x = node.inputs[0]
    return (op.MaxPool(x, kernel_shape=op.dims(x)[2:]),)


@gradient("MaxPool")
def _max_pool(op: Emitter, node: ir.Node, dy: Gradient, *_: object) -> Gradient:
    if dy is None:
        return None
    x = op.given(node, 0)
    settings = {name: attribute.value for name, attribute in node.attributes.items() if name != "storage_order"}
    own = op.attribute(node, "storage_order", 0) == 0  # else the node's indices are in column-major order
    indices = op.add_output(node, 1, "indices") if own else None
    small = ir.DataType.INT32 if op.size(x) < 2**31 else None  # what is kept takes half the memory then
    if small is not None or indices is None:
        with op.behind(node):
            indices = op.several("MaxPool", 2, x, **settings)[1] if indices is None else indices
            indices = op.cast(indices, small)
    return op.reshape(add_at(op, dy, indices, op.size(x)), op.dims(x))


def add_at(op: Emitter, numbers: ir.Value, places: ir.Value, size: int) -> ir.Value:
    """A vector of ``size`` zeros, with the numbers added at their places. In float32 at least: half has no kernel."""
    single = op.cast(numbers, ir.DataType.FLOAT) if numbers.dtype != ir.DataType.DOUBLE else numbers
    count = (op.size(numbers),)
    flat, updates = op.reshape(places, count), op.reshape(single, count)
    into = zeros(op, (size,), single.dtype)
    return op.cast(op.ScatterElements(into, flat, updates, axis=0, reduction="add"), numbers.dtype)


def _map(op: Emitter, content: np.ndarray, like: ir.Value) -> ir.Value:
    """A constant array of another value's type."""
    return op.constant(content.astype((like.dtype or ir.DataType.FLOAT).numpy()))


@gradient("GlobalAveragePool")
def _global_average_pool(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    dims = op.dims(node.inputs[0])
    return op.Mul(dy, _map(op, np.full(dims[2:], 1.0 / math.prod(dims[2:])), dy))


@expansion("GlobalLpPool")
def _global_lp_pool(op: Emitter, node: ir.Node) -> tuple[ir.Value, ...]:
    x = op.given(node, 0)
    return (op.LpPool(x, kernel_shape=op.dims(x)[2:], p=op.attribute(node, "p", 2)),)


@gradient("MaxUnpool")
def _max_unpool(op: Emitter, node: ir.Node, dy: ir.Value) -> tuple[Gradient, ...]:
    """Its indices are those of a flat tensor, of the size that the pool's attributes give where none is said."""
    x, indices = op.given(node, 0), op.given(node, 1)
    strides = op.attribute(node, "strides", []) or [1] * (len(op.dims(x)) - 2)
    kernel: list[int] = op.attribute(node, "kernel_shape", [])
    pads = op.attribute(node, "pads", []) or [0] * 2 * len(strides)
    around = [pads[a] + pads[a + len(strides)] for a in range(len(strides))]
    given = [(n - 1) * s + k - p for n, s, k, p in zip(op.dims(x)[2:], strides, kernel, around, strict=True)]
    spare = [n - g for n, g in zip(op.dims(dy)[2:], given, strict=True)]
    if any(spare):
        dy = pad(op, dy, [0] * len(op.dims(dy)), [0, 0, *(-n for n in spare)])
    flat = op.Gather(op.reshape(dy, (op.size(dy),)), op.reshape(indices, (op.size(x),)))
    return op.reshape(flat, op.dims(x)), None


@gradient("AveragePool")
def _average_pool(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    at = _windows(op, node)
    counts = _counts(at, bool(op.attribute(node, "count_include_pad", 0)))
    if counts.min() == counts.max():
        return _spread(op, dy, at, 1.0 / float(counts.max()))
    return _spread(op, op.Mul(dy, _map(op, 1.0 / counts, dy)), at, 1.0)


@gradient("LpPool")
def _lp_pool(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    x, y, p = node.inputs[0], node.outputs[0], op.attribute(node, "p", 2)
    at = _windows(op, node)
    if p == 1:
        return op.Mul(_spread(op, dy, at, 1.0), op.Sign(x))
    if p == 2:
        return op.Mul(_spread(op, op.Div(dy, op.Max(y, TINY)), at, 1.0), x)
    spread = _spread(op, op.Div(dy, op.Pow(op.Max(y, TINY), float(p - 1))), at, 1.0)
    return op.Mul(op.Mul(spread, op.Sign(x)), op.Pow(op.Abs(x), float(p - 1)))


def _windows(op: Emitter, node: ir.Node) -> Windows:
    image, count = op.dims(node.inputs[0])[2:], op.dims(node.outputs[0])[2:]
    return windows_of(node, image, count, op.attribute(node, "kernel_shape", []))


def _counts(at: Windows, include_pad: bool) -> np.ndarray:
    """How many elements each window averages. Padding counts as far as it was asked for, not what ceil_mode adds."""
    counts = np.ones((), np.float64)
    for a in range(at.rank):
        first = np.arange(at.count[a])[:, None] * at.strides[a] - at.begin[a]
        place = first + np.arange(at.kernel[a]) * at.dilations[a]
        low, high = (-at.begin[a], at.image[a] + at.end[a]) if include_pad else (0, at.image[a])
        counts = np.multiply.outer(counts, ((place >= low) & (place < high)).sum(1))
    return counts


def _spread(op: Emitter, dy: ir.Value, at: Windows, factor: float) -> ir.Value:
    """Each window's number, times ``factor``, added to every element of the window.

    Networks whose images shrink below a pool's window are common: what never reads the image is left out first, as
    ConvTranspose would compute it (a window of 1280 × 1280 on an image of 2 × 2 took 6.6 s for 5120 planes).
    """
    at = at.within_image()
    if all(c == 1 for c in at.count) and at.kernel == at.image:
        return op.Mul(dy, _map(op, np.full(at.image, factor), dy))
    if at.kernel == at.strides == at.extent and not any(at.begin) and not any(at.excess):
        scaled = dy if factor == 1.0 else op.Mul(dy, factor)
        scales = op.constant([1.0, 1.0, *at.kernel])
        return op.Resize(scaled, None, scales, coordinate_transformation_mode="asymmetric", nearest_mode="floor")
    planes = op.size(dy) // math.prod(at.count)
    extra = [max(0, -excess) for excess in at.excess]
    spread = op.ConvTranspose(
        op.reshape(dy, (planes, 1, *at.count)),
        _map(op, np.full((1, 1, *at.kernel), factor), dy),
        strides=at.strides,
        dilations=at.dilations,
        pads=[*at.begin, *(max(0, excess) for excess in at.excess)],
        output_padding=extra if any(extra) else None,
    )
    return op.reshape(spread, (*op.dims(dy)[:2], *at.image))
