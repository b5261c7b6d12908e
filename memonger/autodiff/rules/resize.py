"""Resize: linear in the image, so its gradient is the transposed interpolation, one axis at a time."""

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from memonger.autodiff.registry import Gradient, gradient
from memonger.autodiff.rules.movement import constants
from memonger.errors import PlanError
from memonger.model.emitter import Emitter

MODES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric")


@gradient("Resize")
def _resize(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    _check(op, node)
    image = op.dims(node.inputs[0])
    scales = _scales(op, node, image, op.dims(dy))
    for axis in reversed(range(len(image))):
        if scales[axis] != 1.0 or op.dims(dy)[axis] != image[axis]:
            dy = _shrink(op, node, dy, axis, image[axis], scales[axis])
    return dy


def _check(op: Emitter, node: ir.Node) -> None:
    coordinates = op.attribute(node, "coordinate_transformation_mode", "half_pixel")
    if coordinates not in MODES or op.attribute(node, "antialias", 0):
        raise PlanError(
            f"node '{node.name}' (Resize): coordinate_transformation_mode={coordinates}, "
            f"antialias={op.attribute(node, 'antialias', 0)} has no gradient rule. "
            f"It can be {', '.join(MODES)}, and no antialias."
        )


def _scales(op: Emitter, node: ir.Node, image: tuple[int, ...], result: tuple[int, ...]) -> list[float]:
    """The factor of each axis: what is said, else what the sizes come to."""
    given = op.content(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] is not None else None
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


def _shrink(op: Emitter, node: ir.Node, dy: ir.Value, axis: int, size: int, scale: float) -> ir.Value:
    """The transposed interpolation along one axis."""
    dims = op.dims(dy)
    before, after = math.prod(dims[:axis]), math.prod(dims[axis + 1 :])
    kind = np.dtype(np.float64 if dy.dtype == ir.DataType.DOUBLE else np.float32)
    matrix = _matrix(op, node, dims[axis], size, scale, kind)
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


def _matrix(op: Emitter, node: ir.Node, count: int, size: int, scale: float, kind: np.dtype) -> np.ndarray:
    """The interpolation along one axis: ``[count, size]``."""
    places = _places(op.attribute(node, "coordinate_transformation_mode", "half_pixel"), count, size, scale, kind)
    mode = op.attribute(node, "mode", "nearest")
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
