"""Whether nodes give the same bits on slices as on whole values: a kernel may take another path for another shape."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir

from memonger.devices import CPU
from memonger.errors import SessionError
from memonger.model.cutting import Slicing
from memonger.model.extract import extract, is_fed
from memonger.model.parts import elements
from memonger.model.values import static_shape
from memonger.runtime import ort
from memonger.runtime.weights import LEND_ALL

_NORMAL = 1 << 20
"""Random numbers that larger arrays repeat: to draw them takes longer than most nodes."""


class SliceCheck:
    """Runs single nodes, whole and on slices, on random numbers. What was seen of a node holds for all like it.

    Args:
        threads: Threads within a node; 0 leaves it to onnxruntime.
    """

    def __init__(self, threads: int) -> None:
        self._options = ort.Options(in_order=True, threads=threads, lending=LEND_ALL)
        self._known: dict[Any, float] = {}

    def difference(
        self, whole: tuple[ir.Model, ir.Node], how: Slicing, model: ir.Model,
        copies: Sequence[tuple[ir.Node, int, int]], size: int,
    ) -> float:  # fmt: skip
        """The largest difference between what a node gives for whole values and on slices; 0 for the same bits.

        Args:
            whole: A model and its node.
            how: How the node is cut.
            model: In chunks.
            copies: Copies of the node in that, with the first element of their slice and the one after its last.
            size: Elements of the axis.

        Returns: infinity where onnxruntime can't run one of them alone.
        """
        tried = list(copies)
        if not how.sums:
            tried = list({end - begin: (node, begin, end) for node, begin, end in copies}.values())  # each length once
        key = (_key(whole[1]), tuple(sorted(how.inputs.items())), tuple(sorted(end - begin for _, begin, end in tried)))
        if key not in self._known:
            self._known[key] = self._compared(whole, how, model, tried, size)
        return self._known[key]

    def _compared(
        self, whole: tuple[ir.Model, ir.Node], how: Slicing, model: ir.Model, tried: Sequence[tuple[ir.Node, int, int]],
        size: int,
    ) -> float:  # fmt: skip
        feeds = {index: _random(v) for index, v in enumerate(whole[1].inputs) if v is not None and is_fed(v)}
        try:
            results, most, parts = self._run(*whole, feeds), 0.0, dict[int, np.ndarray]()
            for copy, begin, end in tried:
                cut = {i: _cut(a, how.inputs.get(i), begin, end, size) for i, a in feeds.items()}
                if how.sums and begin:
                    cut[2] = parts[0]  # the sum so far, which a Gemm adds to
                parts = self._run(model, copy, cut)
                for number, axis in how.outputs.items():
                    expected = _cut(results[number], axis, begin, end, size)
                    most = max(most, _largest_difference(parts[number], expected))
            for number in how.sums:
                most = max(most, _largest_difference(parts[number], results[number]))
        except SessionError:
            return float("inf")
        return most

    def _run(self, model: ir.Model, node: ir.Node, feeds: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
        """The outputs of a node alone, by number."""
        outputs = {number: v for number, v in enumerate(node.outputs) if v.name}
        session = ort.make_session(extract(model, [node], outputs.values()), CPU, self._options)
        given = {str(v.name): feeds[i] for i, v in enumerate(node.inputs) if v is not None and is_fed(v)}
        try:
            return dict(zip(outputs, session.run(None, given), strict=True))
        except Exception as error:  # pybind exceptions share no base class
            raise SessionError(str(error)) from error


def _key(node: ir.Node) -> Any:
    attributes = (ir.to_proto(a).SerializeToString(deterministic=True) for _, a in sorted(node.attributes.items()))
    values = ((v.dtype, static_shape(v), is_fed(v)) if v is not None else None for v in (*node.inputs, *node.outputs))
    return node.op_identifier(), node.version, tuple(attributes), tuple(values)


@cache
def _normal() -> np.ndarray:
    return np.random.default_rng(0).standard_normal(_NORMAL, np.float32)


def _random(value: ir.Value) -> np.ndarray:
    """Random numbers of a value's type and shape; of integers zeros, which any index may be."""
    assert value.dtype is not None
    shape = static_shape(value) or ()
    if value.dtype.is_floating_point():
        return np.resize(_normal(), shape).astype(value.dtype.numpy(), copy=False)
    if value.dtype == ir.DataType.BOOL:
        return np.resize(_normal() > 0, shape)
    return np.zeros(shape, value.dtype.numpy())


def _cut(array: np.ndarray, axis: int | None, begin: int, end: int, size: int) -> np.ndarray:
    if axis is None:
        return array
    unit = array.shape[axis] // size
    return np.ascontiguousarray(array[elements(axis, begin * unit, end * unit)])


def _largest_difference(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference between elements; where only bits differ, as of zeros with signs, the smallest number."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return float("inf")
    if one.tobytes() == other.tobytes():
        return 0.0
    a, b = one.astype(np.float64), other.astype(np.float64)
    with np.errstate(all="ignore"):
        differences = np.where(np.isnan(a) & np.isnan(b), 0.0, np.nan_to_num(np.abs(a - b), nan=np.inf))
    both_nan = bool((np.isnan(a) == np.isnan(b)).all()) and bool((np.signbit(a) == np.signbit(b)).all())
    return max(float(differences.max(initial=0.0)), 0.0 if both_nan else float(np.finfo(np.float64).tiny))
