"""Resize: linear in the image, so its gradient is the transposed interpolation, one axis at a time."""

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from memonger.autodiff.registry import Gradient, gradient
from memonger.autodiff.rules.movement import constants
from memonger.errors import PlanError
from memonger.ir.emitter import Emitter
from memonger.ir.values import input_at

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
