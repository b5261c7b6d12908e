"""The contents of small tensors that sizes are computed from: what onnxruntime's kernels give, by numpy.

Only operators whose results are exact stand here: integers, booleans, and single operations on floats. A function gets
the arrays of a node's inputs, None for one that isn't there, and returns those of its outputs.
"""

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import onnx_ir as ir

from memonger.shapes.shaping import NoRuleError, Site

One = Callable[[Sequence[Any]], np.ndarray]

Evaluate = Callable[[Sequence[Any]], Sequence[np.ndarray]]


def evaluator(site: Site) -> Evaluate | None:
    """What computes the outputs of a node of ONNX's own set; None for an operator or a setting that isn't known here.

    ``Shape`` and ``Size`` read no contents: `memonger.shapes.sizes` computes them.
    """
    if site.op_type == "Split":
        axis, count = site.integer("axis", 0), site.outputs

        def evaluate(arrays: Sequence[Any]) -> Sequence[np.ndarray]:
            sizes, length = site.integers_at("split", arrays), arrays[0].shape[axis]
            ends = np.cumsum(sizes)[:-1] if sizes else -(-length // count) * np.arange(1, count)
            return np.split(arrays[0], ends, axis)

        return evaluate
    plain, made = _PLAIN.get(site.op_type), _MADE.get(site.op_type)
    if plain is not None:
        return lambda arrays: (np.asarray(plain(*arrays)),)
    one = None if made is None or site.outputs != 1 else made(site)
    return None if one is None else lambda arrays: (one(arrays),)


def constant(site: Site) -> np.ndarray:
    """What a Constant node holds.

    Raises:
        NoRuleError: it is sparse.
    """
    ((name, attribute),) = site.attributes.items()
    match name:
        case "value":
            return attribute.as_tensor().numpy()
        case "value_int" | "value_ints":
            return np.array(attribute.value, np.int64)
        case "value_float" | "value_floats":
            return np.array(attribute.value, np.float32)
        case "value_string" | "value_strings":
            return np.array(attribute.value, object)
    raise NoRuleError("a sparse constant")


def integers(numbers: Any) -> np.ndarray:
    """Dimensions, or one of them, as an array: of objects where they are those of `memonger.shapes.traced_sizes`."""
    array = np.array(numbers)
    return array if array.dtype == object else array.astype(np.int64)


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind not in "iuO":
        return np.asarray(a / b)
    quotient = np.floor_divide(np.abs(a), np.abs(b))  # towards zero
    return np.asarray(np.where((a < 0) != (b < 0), -quotient, quotient).astype(np.result_type(a, b)))


_PLAIN: dict[str, Callable[..., Any]] = {
    "Abs": np.abs, "Add": np.add, "And": np.logical_and, "Ceil": np.ceil, "Div": _divide, "Equal": np.equal,
    "Floor": np.floor, "Greater": np.greater, "GreaterOrEqual": np.greater_equal, "Identity": lambda a: a,
    "Less": np.less, "LessOrEqual": np.less_equal, "Max": lambda *a: reduce(np.maximum, a),
    "Min": lambda *a: reduce(np.minimum, a), "Mul": np.multiply, "Neg": np.negative, "Not": np.logical_not,
    "Or": np.logical_or, "Pow": lambda a, b: np.power(a, b).astype(a.dtype), "Round": np.rint,
    "Sign": np.sign, "Sqrt": np.sqrt, "Sub": np.subtract,
    "Sum": lambda *a: reduce(np.add, a), "Where": np.where, "Xor": np.logical_xor,
    "Expand": lambda a, shape: a * np.ones(tuple(shape), a.dtype) if a.dtype.kind != "b" else np.broadcast_to(a, shape),
    "Tile": np.tile, "Range": lambda start, limit, by: np.arange(start, limit, by, dtype=start.dtype),
}  # fmt: skip


def _cast(site: Site) -> One:
    kind = ir.DataType(site.integer("to", 0)).numpy()
    is_kept = kind == np.int64
    return lambda arrays: arrays[0] if is_kept and arrays[0].dtype == object else np.asarray(arrays[0].astype(kind))


def _mod(site: Site) -> One:
    how = np.fmod if site.integer("fmod", 0) else np.mod
    return lambda arrays: np.asarray(how(*arrays))


def _clip(site: Site) -> One | None:
    if site.attributes:
        return None

    def evaluate(arrays: Sequence[Any]) -> np.ndarray:
        low, high = (*arrays[1:], None, None)[:2]
        result = arrays[0] if low is None else np.maximum(arrays[0], low)
        return np.asarray(result if high is None else np.minimum(result, high))

    return evaluate


def _flatten(site: Site) -> One:
    axis = site.integer("axis", 1)
    return lambda arrays: np.asarray(arrays[0].reshape(math.prod(arrays[0].shape[:axis]), -1))


def _reshape(site: Site) -> One:
    def evaluate(arrays: Sequence[Any]) -> np.ndarray:
        target = [arrays[0].shape[axis] if dim == 0 else dim for axis, dim in enumerate(arrays[1].tolist())]
        return np.asarray(arrays[0].reshape(target))

    return evaluate


def _slice(site: Site) -> One:
    fixed = [site.integers(name) for name in ("starts", "ends", "axes")]

    def evaluate(arrays: Sequence[Any]) -> np.ndarray:
        given = [None if array is None else array.tolist() for array in (*arrays[1:], None, None)[:4]]
        starts, ends, axes, steps = given if fixed[0] is None else (*fixed, None)
        where = [slice(None)] * arrays[0].ndim
        for number, (start, end) in enumerate(zip(starts or (), ends or (), strict=True)):
            axis, step = axes[number] if axes is not None else number, steps[number] if steps is not None else 1
            is_open = step < 0 and end < -arrays[0].shape[axis]
            where[axis] = slice(start, None if is_open else end, step)
        return np.asarray(arrays[0][tuple(where)])

    return evaluate


def _scatter_nd(site: Site) -> One | None:
    if site.text("reduction", "none") != "none":
        return None

    def evaluate(arrays: Sequence[Any]) -> np.ndarray:
        result = arrays[0].copy()
        result[tuple(np.moveaxis(arrays[1], -1, 0))] = arrays[2]
        return np.asarray(result)

    return evaluate


def _constant_of_shape(site: Site) -> One:
    given = site.attributes.get("value")
    value = np.zeros(1, np.float32) if given is None else given.as_tensor().numpy()
    return lambda arrays: np.full(tuple(arrays[0].tolist()), value.reshape(()))


def _reduce(how: Callable[..., Any]) -> Callable[[Site], One]:
    def made(site: Site) -> One:
        keep = bool(site.integer("keepdims", 1))
        return lambda arrays: np.asarray(
            how(arrays[0], axis=site.integers_at("axes", arrays), keepdims=keep), arrays[0].dtype
        )

    return made


def _cumulated(site: Site) -> One | None:
    if site.attributes:
        return None
    return lambda arrays: np.asarray(np.cumsum(arrays[0], int(arrays[1]), dtype=arrays[0].dtype))


def _held(site: Site) -> One:
    held = constant(site)
    return lambda _: held


_MADE: dict[str, Callable[[Site], One | None]] = {
    "Cast": _cast, "Clip": _clip, "ConstantOfShape": _constant_of_shape, "CumSum": _cumulated, "Flatten": _flatten,
    "Mod": _mod,
    "ReduceMax": _reduce(np.max), "ReduceMin": _reduce(np.min), "ReduceProd": _reduce(np.prod),
    "ReduceSum": _reduce(np.sum), "Reshape": _reshape,
    "ScatterND": _scatter_nd, "Slice": _slice,
    "Constant": _held,
    "Concat": lambda site: lambda arrays: np.concatenate(arrays, site.integer("axis", 0)),
    "Gather": lambda site: lambda arrays: np.asarray(np.take(arrays[0], arrays[1], site.integer("axis", 0))),
    "Squeeze": lambda site: lambda arrays: np.squeeze(arrays[0], site.integers_at("axes", arrays)),
    "Transpose": lambda site: lambda arrays: np.transpose(arrays[0], site.integers("perm")),
    "Unsqueeze": lambda site: lambda arrays: np.expand_dims(arrays[0], site.integers_at("axes", arrays) or ()),
}  # fmt: skip
