"""Which rows of its inputs a node needs for some rows of its outputs: convolutions, pools, and what works row by row.

Axis 2 of an image ``[batch, channels, height, width]`` is its rows. A window of a convolution reaches beyond the rows
that it stands for, so neighbouring strips of a result need some rows of the input both. There is padding at the border
of the image alone.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from memonger.ir.operators import operator_name
from memonger.ir.values import static_shape
from memonger.ir.windows import Windows, windows_of
from memonger.plan_file import ROWS
from memonger.tiling.axes import slicing
from memonger.tiling.cutting import Cut, NotCutError, Refusal, sentence

BLOCKED = "com.microsoft.nchwc"
"""Domain of the operators on images whose channels lie in blocks."""

Interval = tuple[int, int]


def is_image(value: ir.Value | None) -> bool:
    """Whether a value is one of several rows, and no constant."""
    shape = None if value is None or value.const_value is not None else static_shape(value)
    return shape is not None and len(shape) == 4 and shape[ROWS] > 1


@dataclass(frozen=True, slots=True)
class RowRule:
    """How a copy of a node gives some rows of its outputs. Rows are intervals ``[begin, end)``, inputs count from 0.

    Attributes:
        made: The rows that the copy writes: those that were asked for, and maybe some around them that don't count.
        inputs: The rows that it reads of each input that is an image.
        axes: Constants that are cut alike: input → axis of its rows.
        attributes: What it has in place of the node's own.
    """

    made: Interval
    inputs: Mapping[int, Interval]
    axes: Mapping[int, int] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)


def rows_of(node: ir.Node, images: Collection[int], rows: Interval) -> RowRule | Refusal:
    """What a node needs for some rows of its outputs.

    Args:
        node: With static shapes.
        images: Those of its inputs that come in rows, one at least.
        rows: Of the outputs.

    Returns: a sentence where it can't give rows by themselves.
    """
    cut = Cut(node, dict.fromkeys(images, ROWS), 1)
    try:
        if not all(map(is_image, node.outputs)):
            cut.refuse("gives what isn't an image of several rows")
        name = operator_name(node).removeprefix(f"{BLOCKED}::").removeprefix("com.microsoft::")
        if name in _ONE_IMAGE and any(index not in (0, 3 if name.endswith("Conv") else 0) for index in images):
            cut.refuse("takes a weight that is computed")
        if name in _WINDOWS:
            return _windows(cut, rows, has_weight=name in ("Conv", "FusedConv"))
        if name == "ConvTranspose":
            return _transposed(cut, rows)
        if name in ("Resize", "Upsample"):
            return _resized(cut, rows)
        if name == "LRN" or (name in ("ReorderInput", "ReorderOutput") and not cut.integer("channels_last", 0)):
            return RowRule(rows, {0: rows})
        return _row_by_row(cut, rows)
    except NotCutError as error:
        return sentence(node, str(error))


_WINDOWS = frozenset(("Conv", "FusedConv", "MaxPool", "AveragePool", "LpPool"))

_ONE_IMAGE = _WINDOWS | {"ConvTranspose", "Resize", "Upsample"}
"""Operators that read an image, convolutions maybe one that is added to the result."""


def _windows(cut: Cut, rows: Interval, *, has_weight: bool) -> RowRule:
    """Each window of rows reads ``extent`` rows from ``row * stride - begin`` on."""
    if not has_weight and len(cut.outputs) > 1:
        cut.refuse("numbers the elements of the whole image")
    height = cut.dims(0)[ROWS]
    at = windows_of(cut.node, cut.dims(0)[2:], cut.out()[2:], _kernel(cut, has_weight))
    after = [max(0, excess) for excess in at.excess]
    ceiling = "ceil_mode" in cut.node.attributes
    if cut.integer("count_include_pad", 0) and any(a > b for a, b in zip(after, at.end, strict=True)):
        cut.refuse("counts padding, and takes windows beyond it")
    low, high = rows[0] * at.strides[0] - at.begin[0], (rows[1] - 1) * at.strides[0] - at.begin[0] + at.extent[0]
    if max(at.begin[0], at.excess[0]) >= at.extent[0]:
        cut.refuse("has windows that are padding alone")
    read = max(low, 0), min(high, height)
    pads = [max(0, -low), *at.begin[1:], max(0, high - height), *after[1:]]
    if not has_weight and any(pad >= size for pad, size in zip(pads, at.kernel * 2, strict=True)):
        cut.refuse("has windows in its padding")
    added = {index: rows for index in cut.axes if index}
    return RowRule(rows, {0: read} | added, {}, _padding(cut, pads) | ({"ceil_mode": 0} if ceiling else {}))


def _kernel(cut: Cut, has_weight: bool) -> Sequence[int]:
    return cut.integers("kernel_shape") or (list(cut.dims(1)[2:]) if has_weight else [1, 1])


def _padding(cut: Cut, pads: Sequence[int]) -> dict[str, Any]:
    return {"pads": list(pads)} | ({"auto_pad": "NOTSET"} if "auto_pad" in cut.node.attributes else {})


def _transposed(cut: Cut, rows: Interval) -> RowRule:
    """Row ``i`` is added to ``extent`` rows from ``i * stride - begin`` on. Pads cut off what is written beyond."""
    count = cut.dims(0)[2:]
    at: Windows = windows_of(cut.node, cut.out()[2:], count, _kernel(cut, True), up=True)
    stride, begin, extent = at.strides[0], at.begin[0], at.extent[0]
    low = min(-((extent - 1 - begin - rows[0]) // stride), (rows[0] + begin) // stride, count[0] - 1)
    low = max(0, low)
    high = max(low + 1, min(count[0], (rows[1] - 1 + begin) // stride + 1))
    beyond = (high - 1) * stride - begin + extent - rows[1]
    first = rows[0] - (low * stride - begin)
    missing = [max(0, -beyond), *(max(0, -excess) for excess in at.excess[1:])]
    pads = [first, *at.begin[1:], max(0, beyond), *(max(0, excess) for excess in at.excess[1:])]
    attributes = _padding(cut, pads) | {"output_padding": missing}
    if "output_shape" in cut.node.attributes:
        attributes["output_shape"] = None
    return RowRule(rows, {0: (low, high)}, {}, attributes)


def _resized(cut: Cut, rows: Interval) -> RowRule:
    """Enlarged by a whole number. Rows that lie between two others are computed with one more on each side."""
    height, larger = cut.dims(0)[ROWS], cut.out()[ROWS]
    factor, mode = larger // height, cut.text("mode", "nearest")
    where = cut.text("coordinate_transformation_mode", "half_pixel" if cut.operator == "Resize" else "asymmetric")
    if larger % height or mode not in ("nearest", "linear") or cut.integer("antialias", 0):
        cut.refuse(f"makes {larger} rows of {height} ({mode}): only nearest and linear are cut, by whole numbers")
    if where not in ("asymmetric", "half_pixel", "pytorch_half_pixel") or larger == 1:
        cut.refuse(f"places rows by '{where}', which depends on the height of the whole")
    scales = 2 if cut.operator == "Resize" and cut.opset >= 11 else 1
    if cut.has(scales) and cut.constant(scales).size and cut.constant(scales).reshape(-1)[-2] != factor:
        cut.refuse("enlarges rows by a number that isn't whole")
    is_copy = mode == "nearest" and where == "asymmetric" and cut.text("nearest_mode", "floor") == "floor"
    around = 0 if is_copy else 1
    low, high = rows[0] // factor - around, (rows[1] - 1) // factor + 1 + around
    read = max(0, low), min(height, high)
    return RowRule((read[0] * factor, read[1] * factor), {0: read})


def _row_by_row(cut: Cut, rows: Interval) -> RowRule:
    """What computes each row of its outputs from the same row of its inputs."""
    height = cut.out()[ROWS]
    answer = slicing(cut.node, cut.axes, height)
    if isinstance(answer, Refusal):
        raise NotCutError(answer.reason.split(") ", 1)[-1])
    if cut.node.op_type in ("Reshape", "Expand", "Transpose") or answer.whole:
        cut.refuse("mixes the rows of an image")
    if set(answer.outputs.values()) != {ROWS} or any(cut.dims(index)[ROWS] != height for index in cut.axes):
        cut.refuse("gives no image with the rows of its input")
    constants = {index: axis for index, axis in answer.inputs.items() if index not in cut.axes}
    for index in constants:
        cut.constant(index)  # computed ones aren't cut
    return RowRule(rows, dict.fromkeys(cut.axes, rows), constants)
