"""Pools over sliding windows and over whole images."""

import math

import numpy as np
import onnx_ir as ir

from memonger.autodiff.registry import Gradient, expansion, gradient
from memonger.autodiff.rules.movement import pad, zeros
from memonger.ir.emitter import Emitter
from memonger.ir.windows import Windows, windows_of

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
