"""Images read at computed places: GridSample, AffineGrid, DeformConv, RoiAlign, as gathers of the pixels around each.

Gradients of the image and of the places follow from those of gathers and of the weights. Resize is linear in the image,
so its gradient is the transposed interpolation, one axis at a time.
"""

import math
from collections.abc import Sequence
from functools import reduce
from itertools import product

import numpy as np
import onnx_ir as ir

from memonger.autodiff.registry import Gradient, expansion, gradient
from memonger.autodiff.rules.movement import constants
from memonger.errors import PlanError
from memonger.ir.emitter import Emitter
from memonger.ir.values import input_at

CUBIC = -0.75  # the coefficient of the cubic convolution (Keys 1981), as in PyTorch


@expansion("GridSample")
def _grid_sample(op: Emitter, node: ir.Node) -> tuple[ir.Value, ...]:
    x, grid = op.given(node, 0), op.given(node, 1)
    batch, channels, *image = op.dims(x)
    count = math.prod(op.dims(grid)[1:-1])
    aligned = bool(op.attribute(node, "align_corners", 0))
    mode = op.attribute(node, "mode", "linear").removeprefix("bi")
    padding = op.attribute(node, "padding_mode", "zeros")
    flat = op.reshape(grid, (batch, count, len(image)))
    places = []
    for part, size in zip(op.split(flat, [1] * len(image), 2)[::-1], image, strict=True):
        unit = op.Add(op.reshape(part, (batch, count)), 1.0)
        place = op.Mul(unit, (size - 1) / 2) if aligned else op.Sub(op.Mul(unit, size / 2), 0.5)
        if padding == "border" and mode != "cubic":
            place = op.Clip(place, op.constant(0.0, place.dtype), op.constant(size - 1.0, place.dtype))
        if padding == "reflection" and mode != "cubic":
            place = _reflected(op, place, size, aligned)
        places.append(op.cast(place, x.dtype))
    pixels = op.reshape(x, (batch, channels, math.prod(image)))
    sampled = sample(op, pixels, image, places, mode, padding, aligned=aligned)
    return (op.reshape(sampled, (batch, channels, *op.dims(grid)[1:-1])),)


def _reflected(op: Emitter, place: ir.Value, size: int, aligned: bool) -> ir.Value:
    """Places beyond an edge, turned back at it as often as it takes; edges are middles of pixels if ``aligned``."""
    low, high = (0.0, size - 1.0) if aligned else (-0.5, size - 0.5)
    span = high - low
    if span == 0:
        return op.Mul(place, 0.0)
    away = op.Abs(op.Sub(place, low))
    times = op.Floor(op.Div(away, span))
    rest = op.Sub(away, op.Mul(times, span))
    odd = op.Sub(times, op.Mul(op.Floor(op.Mul(times, 0.5)), 2.0))
    return op.Add(op.Add(rest, low), op.Mul(odd, op.Sub(span, op.Mul(rest, 2.0))))


def sample(
    op: Emitter,
    pixels: ir.Value,
    image: Sequence[int],
    places: Sequence[ir.Value],
    mode: str = "linear",
    padding: str = "zeros",
    *,
    aligned: bool = False,
) -> ir.Value:
    """Images read between their pixels.

    Args:
        op: Where it goes.
        pixels: ``[N, C, H·W]``.
        image: Its sizes ``H, W``; any number of axes.
        places: For each axis where to read, in pixels: ``[N, P]``.
        mode: ``linear``, ``nearest`` or ``cubic``.
        padding: What stands outside: ``zeros``, ``border`` or ``reflection``.
        aligned: Reflection is at the middles of the outermost pixels.

    Returns: ``[N, C, P]``.
    """
    (batch, channels, _), count = op.dims(pixels), op.dims(places[0])[1]
    axes = [
        [_pixel(op, at, weight, size, padding, aligned) for at, weight in _around(op, place, mode)]
        for place, size in zip(places, image, strict=True)
    ]
    total: ir.Value | None = None
    for corner in product(*axes):
        index = corner[0][0]
        for (at, _), size in zip(corner[1:], image[1:], strict=True):
            index = op.Add(op.Mul(index, size), at)
        indices = op.expand(op.reshape(index, (batch, 1, count)), (batch, channels, count))
        read = op.GatherElements(pixels, indices, axis=2)
        weights = [weight for _, weight in corner if weight is not None]
        if weights:
            read = op.Mul(read, op.reshape(reduce(op.Mul, weights), (batch, 1, count)))
        total = read if total is None else op.Add(total, read)
    assert total is not None
    return total


def _around(op: Emitter, place: ir.Value, mode: str) -> list[tuple[ir.Value, ir.Value | None]]:
    """The pixels around a place along one axis, with their weights; None where that is 1."""
    if mode == "nearest":
        return [(op.Round(place), None)]
    first = op.Floor(place)
    part = op.Sub(place, first)
    if mode == "linear":
        return [(first, op.Sub(1.0, part)), (op.Add(first, 1.0), part)]
    found: list[tuple[ir.Value, ir.Value | None]] = []
    for offset in (-1, 0, 1, 2):
        far = op.Abs(op.Sub(part, float(offset)))
        if offset in (0, 1):
            factor = op.Sub(op.Mul(far, CUBIC + 2), CUBIC + 3)
            weight = op.Add(op.Mul(op.Mul(far, far), factor), 1.0)
        else:
            factor = op.Add(op.Mul(op.Sub(op.Mul(far, CUBIC), 5 * CUBIC), far), 8 * CUBIC)
            weight = op.Sub(op.Mul(factor, far), 4 * CUBIC)
        found.append((op.Add(first, float(offset)), weight))
    return found


def _pixel(
    op: Emitter, at: ir.Value, weight: ir.Value | None, size: int, padding: str, aligned: bool
) -> tuple[ir.Value, ir.Value | None]:
    """The index of a pixel that there is, and the weight, 0 for zeros outside."""
    if padding == "zeros":
        last = op.constant(size - 1.0, at.dtype)
        inside = op.cast(op.And(op.GreaterOrEqual(at, op.constant(0.0, at.dtype)), op.LessOrEqual(at, last)), at.dtype)
        weight = inside if weight is None else op.Mul(weight, inside)
    elif padding == "reflection":
        at = _reflected(op, at, size, aligned)
    within = op.Clip(at, op.constant(0.0, at.dtype), op.constant(size - 1.0, at.dtype))
    return op.cast(within, ir.DataType.INT64), weight


@expansion("AffineGrid")
def _affine_grid(op: Emitter, node: ir.Node) -> tuple[ir.Value, ...] | None:
    theta, size = op.given(node, 0), constants(op, node, 1, "sizes")
    batch, *image = [n for axis, n in enumerate(size or ()) if axis != 1]
    aligned = bool(op.attribute(node, "align_corners", 0))
    lines = [np.linspace(-1, 1, n) if aligned else (2 * np.arange(n) + 1) / n - 1 for n in image]
    meshed = np.meshgrid(*lines, indexing="ij")[::-1]
    base = np.stack([*meshed, np.ones(image)], -1).reshape(-1, len(image) + 1)
    made = op.MatMul(op.constant(base.tolist(), theta.dtype), op.transpose(theta, (0, 2, 1)))
    return (op.reshape(made, (batch, *image, len(image))),)


@expansion("DeformConv")
def _deform_conv(op: Emitter, node: ir.Node) -> tuple[ir.Value, ...] | None:
    """The windows' pixels read where offsets say, then a product with the weight (Dai et al. 2017, Zhu et al. 2019)."""
    x, w, offset = (op.given(node, i) for i in range(3))
    bias, mask = input_at(node, 3), input_at(node, 4)
    (batch, channels, *image), (outputs, inner, *kernel) = op.dims(x), op.dims(w)
    if len(image) != 2:
        return None
    count, parts = op.dims(offset)[2:], op.attribute(node, "offset_group", 1)
    strides, dilations = (op.attribute(node, name, [1, 1]) for name in ("strides", "dilations"))
    pads, taps, many = op.attribute(node, "pads", [0] * 4), math.prod(kernel), math.prod(count)
    moved = op.split(op.reshape(offset, (batch * parts, taps, 2, many)), [1, 1], 2)
    places = []
    for axis in (0, 1):
        windows = np.arange(count[axis]) * strides[axis] - pads[axis]
        grid = np.add.outer(np.arange(kernel[axis]) * dilations[axis], windows)  # [k, o] along this axis
        shape = [grid.shape[a // 2] if a % 2 == axis else 1 for a in range(4)]
        fixed = np.broadcast_to(grid.reshape(shape), (*kernel, *count)).reshape(1, taps, 1, many)
        place = op.Add(moved[axis], op.constant(fixed.tolist(), x.dtype))
        places.append(op.reshape(place, (batch * parts, taps * many)))
    pixels = op.reshape(x, (batch * parts, channels // parts, math.prod(image)))
    columns = sample(op, pixels, image, places)
    if mask is not None:
        columns = op.Mul(columns, op.reshape(mask, (batch * parts, 1, taps * many)))
    group = op.attribute(node, "group", 1)
    rows = op.reshape(columns, (batch, group, inner * taps, many))
    y = op.MatMul(op.reshape(w, (group, outputs // group, inner * taps)), rows)
    y = op.reshape(y, (batch, outputs, *count))
    return (y if bias is None else op.Add(y, op.reshape(bias, (outputs, 1, 1))),)


@expansion("RoiAlign")
def _roi_align(op: Emitter, node: ir.Node) -> tuple[ir.Value, ...] | None:
    """Averages of places in each part of each region (He et al. 2017)."""
    x, rois, numbers = (op.given(node, i) for i in range(3))
    (batch, channels, *image), ratio = op.dims(x), op.attribute(node, "sampling_ratio", 0)
    if ratio <= 0 or op.attribute(node, "mode", "avg") == "max":
        return None
    regions = op.dims(rois)[0]
    half = op.attribute(node, "coordinate_transformation_mode", "half_pixel") == "half_pixel"
    counts = [op.attribute(node, name, 1) for name in ("output_height", "output_width")]
    scaled = op.Mul(rois, op.attribute(node, "spatial_scale", 1.0))
    x1, y1, x2, y2 = op.split(op.Sub(scaled, 0.5) if half else scaled, [1] * 4, 1)
    places = []
    for axis, (start, stop) in enumerate(((y1, y2), (x1, x2))):
        length = op.Sub(stop, start)
        length = length if half else op.Max(length, 1.0)
        at = (np.arange(counts[axis] * ratio) + 0.5) / (counts[axis] * ratio)
        places.append(op.Add(start, op.Mul(length, op.constant(at.reshape(1, -1).tolist(), x.dtype))))
    full = (regions, counts[0] * ratio, counts[1] * ratio)
    ys = op.expand(op.reshape(places[0], (*full[:2], 1)), full)
    xs = op.expand(op.reshape(places[1], (regions, 1, full[2])), full)
    spots, inside = [], []
    for place, size in ((ys, image[0]), (xs, image[1])):
        flat = op.reshape(place, (regions, full[1] * full[2]))
        bounds = op.constant(-1.0, x.dtype), op.constant(float(size), x.dtype)
        inside.append(op.And(op.GreaterOrEqual(flat, bounds[0]), op.LessOrEqual(flat, bounds[1])))
        spots.append(op.Clip(flat, op.constant(0.0, x.dtype), op.constant(size - 1.0, x.dtype)))
    pixels = op.Gather(op.reshape(x, (batch, channels, math.prod(image))), numbers)
    read = sample(op, pixels, image, spots, padding="border")
    counted = op.reshape(op.cast(op.And(*inside), x.dtype), (regions, 1, full[1] * full[2]))
    parts = op.reshape(op.Mul(read, counted), (regions, channels, counts[0], ratio, counts[1], ratio))
    return (op.ReduceMean(parts, op.ints(3, 5), keepdims=0),)


CROP = "tf_crop_and_resize"
MODES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric", CROP)
Part = tuple[float, float] | None  # of an axis, what is read of it: from 0 for its first element to 1 for its last


@gradient("Resize")
def _resize(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    coordinates = op.attribute(node, "coordinate_transformation_mode", "half_pixel")
    if coordinates not in MODES:
        raise PlanError(
            f"node '{node.name}' (Resize): coordinate_transformation_mode={coordinates} has no gradient rule. "
            f"It can be {', '.join(MODES)}."
        )
    image = op.dims(node.inputs[0])
    scales = _scales(op, node, image, op.dims(dy))
    parts = _parts(op, node, len(image)) if coordinates == CROP else [None] * len(image)
    for axis in reversed(range(len(image))):
        if scales[axis] != 1.0 or op.dims(dy)[axis] != image[axis] or parts[axis] not in (None, (0.0, 1.0)):
            dy = _shrink(op, node, dy, axis, image[axis], scales[axis], parts[axis])
    return dy


def _scales(op: Emitter, node: ir.Node, image: tuple[int, ...], result: tuple[int, ...]) -> list[float]:
    """The factor of each axis: what is said, else what the sizes come to."""
    given = op.content(input_at(node, 2))
    policy = op.attribute(node, "keep_aspect_ratio_policy", "stretch")
    sizes = constants(op, node, 3, "sizes")
    if policy != "stretch" and sizes:
        over: Sequence[int] = op.attribute(node, "axes", []) or range(len(image))
        each = [np.float32(m) / np.float32(image[axis]) for axis, m in zip(over, sizes, strict=True)]
        factor = float(min(each) if policy == "not_larger" else max(each))
        return [factor if axis in [a % len(image) for a in over] else 1.0 for axis in range(len(image))]
    if given is None or given.size == 0:
        return [float(np.float32(m) / np.float32(n)) for n, m in zip(image, result, strict=True)]
    axes: Sequence[int] = op.attribute(node, "axes", []) or range(len(image))
    scales = dict(zip((axis % len(image) for axis in axes), given.tolist(), strict=True))
    return [float(scales.get(axis, 1.0)) for axis in range(len(image))]


def _parts(op: Emitter, node: ir.Node, rank: int) -> list[Part]:
    """The part of each axis that is read: input ``roi``."""
    roi = op.content(op.given(node, 1))
    if roi is None:
        raise PlanError(
            f"node '{node.name}' (Resize): roi isn't constant, and has no gradient rule. Make it an initializer alone."
        )
    axes: Sequence[int] = op.attribute(node, "axes", []) or range(rank)
    found: list[Part] = [(0.0, 1.0)] * rank
    for k, axis in enumerate(axes):
        found[axis % rank] = float(roi[k]), float(roi[k + len(axes)])
    return found


def _shrink(op: Emitter, node: ir.Node, dy: ir.Value, axis: int, size: int, scale: float, part: Part) -> ir.Value:
    """The transposed interpolation along one axis."""
    dims = op.dims(dy)
    before, after = math.prod(dims[:axis]), math.prod(dims[axis + 1 :])
    kind = np.dtype(np.float64 if dy.dtype == ir.DataType.DOUBLE else np.float32)
    matrix = _matrix(op, node, dims[axis], size, scale, kind, part)
    repeats = dims[axis] // size
    if dims[axis] == repeats * size and np.array_equal(matrix, np.repeat(np.eye(size), repeats, axis=0)):
        blocks = op.sum(op.reshape(dy, (before, size, repeats, after)), [2])
        return op.reshape(blocks, (*dims[:axis], size, *dims[axis + 1 :]))
    weights = matrix.astype((dy.dtype or ir.DataType.FLOAT).numpy())
    if after == 1:
        product = op.MatMul(op.reshape(dy, (before, dims[axis])), op.constant(weights))
    else:
        product = op.MatMul(op.constant(weights.T.copy()), op.reshape(dy, (before, dims[axis], after)))
    return op.reshape(product, (*dims[:axis], size, *dims[axis + 1 :]))


def _matrix(op: Emitter, node: ir.Node, count: int, size: int, scale: float, kind: np.dtype, part: Part) -> np.ndarray:
    """The interpolation along one axis: ``[count, size]``. What a part reads beyond the image is constant."""
    mode = op.attribute(node, "mode", "nearest")
    if part is not None:
        places = _places_of_part(part, count, size, kind)
        inside = (places >= 0) & (places <= size - 1)
        return np.asarray(_weights(op, node, places, size) * inside[:, None])
    places = _places(op.attribute(node, "coordinate_transformation_mode", "half_pixel"), count, size, scale, kind)
    if op.attribute(node, "antialias", 0) and scale < 1 and mode != "nearest":
        return _smoothed(op, node, places, size, scale)
    return _weights(op, node, places, size)


def _smoothed(op: Emitter, node: ir.Node, places: np.ndarray, size: int, scale: float) -> np.ndarray:
    """With windows as much wider as the image gets smaller; what they read outside is the edge's."""
    cubic = op.attribute(node, "mode", "nearest") == "cubic"
    a, radius = op.attribute(node, "cubic_coeff_a", -0.75), (2 if cubic else 1) / scale
    matrix = np.zeros((len(places), size))
    for row, place in enumerate(places.astype(np.float64).tolist()):
        at = np.arange(math.floor(place - radius) + 1, math.ceil(place + radius))
        far = np.abs(at - place) * scale
        weights = np.maximum(1 - far, 0)
        if cubic:
            near, rest = ((a + 2) * far - (a + 3)) * far * far + 1, ((a * far - 5 * a) * far + 8 * a) * far - 4 * a
            weights = np.where(far <= 1, near, np.where(far < 2, rest, 0))
        if op.attribute(node, "exclude_outside", 0):
            weights = np.where((at < 0) | (at >= size), 0.0, weights)
        np.add.at(matrix[row], np.clip(at, 0, size - 1), weights / weights.sum())
    return matrix


def _places_of_part(part: tuple[float, float], count: int, size: int, kind: np.dtype) -> np.ndarray:
    start, stop = (kind.type(n) for n in part)
    last = kind.type(size - 1)
    if count == 1:
        return np.array([(start + stop) / 2 * last], kind)
    step = (stop - start) * last / kind.type(count - 1)
    return np.asarray(start * last + np.arange(count, dtype=kind) * step, kind)


def _weights(op: Emitter, node: ir.Node, places: np.ndarray, size: int) -> np.ndarray:
    """The elements that each place reads, ``[places, size]``."""
    mode, count = op.attribute(node, "mode", "nearest"), len(places)
    rows = np.arange(count)
    matrix = np.zeros((count, size))
    if mode == "nearest":
        at = _nearest(places, op.attribute(node, "nearest_mode", "round_prefer_floor"))
        matrix[rows, np.clip(at, 0, size - 1)] = 1.0
        return matrix
    if mode == "linear":
        places = np.clip(places, 0, size - 1)
    first = np.floor(places).astype(np.int64)
    part = (places - first).astype(np.float64)
    offsets: tuple[int, ...] = (0, 1)
    weights = [1 - part, part]
    if mode == "cubic":
        offsets, weights = (-1, 0, 1, 2), _cubic(part, op.attribute(node, "cubic_coeff_a", -0.75))
    if op.attribute(node, "exclude_outside", 0):
        weights = [
            np.where((first + k < 0) | (first + k >= size), 0.0, w) for k, w in zip(offsets, weights, strict=True)
        ]
        total = np.sum(weights, axis=0)
        weights = [w / total for w in weights]
    for k, weight in zip(offsets, weights, strict=True):
        np.add.at(matrix, (rows, np.clip(first + k, 0, size - 1)), weight)
    return matrix


def _places(mode: str, count: int, size: int, scale: float, kind: np.dtype) -> np.ndarray:
    """Where in the image each element of the result lies, in the kernels' own precision: ties depend on it."""
    o, s, half, n = np.arange(count, dtype=kind), kind.type(scale), kind.type(0.5), kind.type(size)
    if count == 1 and mode in ("align_corners", "pytorch_half_pixel"):
        return o
    if mode == "align_corners":
        return np.asarray(o * (n - 1) / kind.type(count - 1))
    if mode == "asymmetric":
        return np.asarray(o / s)
    shift = n / 2 * (1 - kind.type(count) / (s * n)) if mode == "half_pixel_symmetric" else kind.type(0)
    return np.asarray(shift + ((o + half) / s - half), kind)


def _nearest(places: np.ndarray, mode: str) -> np.ndarray:
    directions = {"floor": np.floor(places), "ceil": np.ceil(places), "round_prefer_floor": np.ceil(places - 0.5)}
    return np.asarray(directions.get(mode, np.floor(places + 0.5)), np.int64)


def _cubic(t: np.ndarray, a: float) -> list[np.ndarray]:
    """Weights of the four elements around a place (Keys 1981)."""
    return [
        ((a * (t + 1) - 5 * a) * (t + 1) + 8 * a) * (t + 1) - 4 * a,
        ((a + 2) * t - (a + 3)) * t * t + 1,
        ((a + 2) * (1 - t) - (a + 3)) * (1 - t) * (1 - t) + 1,
        ((a * (2 - t) - 5 * a) * (2 - t) + 8 * a) * (2 - t) - 4 * a,
    ]
