"""Which values are images that come in rows, and how a node gives some rows of its outputs.

Axis 2 of an image ``[batch, channels, height, width]`` is its rows, of a volume its depth, of a sequence that a
convolution reads its time. Behind a transpose or a reshape of such an image they may be another axis. What an
operator's rule doesn't cut along that axis is a barrier: it needs images whole.
"""

import math
from collections.abc import Mapping

import onnx_ir as ir

from memonger.ir.operators import operator_name
from memonger.ir.values import static_shape
from memonger.tiling.axes import slicing
from memonger.tiling.cutting import Cut, NotCutError, Refusal, SliceCopy, Slicing, sentence
from memonger.tiling.rules.images import ROWS

BLOCKED = "com.microsoft.nchwc"
"""Domain of the operators on images whose channels lie in blocks."""

_WINDOWS = frozenset(
    ["AveragePool", "Conv", "ConvInteger", "ConvTranspose", "LpPool", "MaxPool", "QLinearConv",
     "com.microsoft::FusedConv", "com.microsoft.nchwc::Conv"]
)  # fmt: skip
"""Operators whose windows slide over images, and over sequences."""


def rows_axis(value: ir.Value | None) -> int | None:
    """The axis of a value's rows, if nobody cut what it is made of; None where it is no image of several rows."""
    shape = None if value is None or value.const_value is not None else static_shape(value)
    if value is None or shape is None or not 3 <= len(shape) <= 5:
        return None
    if len(shape) == 3 and not is_slid_over(value):
        return None
    is_grid = any(node.op_type == "GridSample" and index == 1 for node, index in value.uses())
    return (1 if is_grid else ROWS) if shape[1 if is_grid else ROWS] > 1 else None


def is_slid_over(value: ir.Value) -> bool:
    """Whether windows read a value, so that its rows are in order."""
    return any(index == 0 and operator_name(node) in _WINDOWS for node, index in value.uses())


def rows_of(node: ir.Node, axes: Mapping[int, int], *, in_order: bool) -> Slicing | Refusal:
    """How a node gives some rows of its outputs.

    Args:
        node: With static shapes.
        axes: Those of its inputs that come in rows, one at least, each with the axis of these.
        in_order: Whether some of these rows are made or read by windows, so that it pays to follow them where they are
            moved to another axis.

    Returns: a sentence where it can't give rows by themselves.
    """
    cut = Cut(node, axes, 1)
    try:
        height = cut.dims(min(axes))[cut.axis]
        made = slicing(node, axes, height, halo=True)
        if isinstance(made, Refusal):
            return made
        if not made.height:
            # What computes each row of its outputs from the same row of its inputs, and of others maybe all
            if cut.node.op_type in ("Reshape", "Expand", "Transpose") and not in_order:
                cut.refuse("mixes the rows of an image")
            images = {index: axis for index, axis in cut.axes.items() if index not in made.whole}
            if any(cut.dims(index)[axis] != height for index, axis in images.items()) or not images:
                cut.refuse("gives no image with the rows of its input")
            if not made.outputs or any(cut.out(index)[axis] != height for index, axis in made.outputs.items()):
                cut.refuse("gives no image with the rows of its input")
            constants = {index: axis for index, axis in made.inputs.items() if index not in images}
            for index in constants:
                cut.constant(index)  # computed ones aren't cut

            def rows(begin: int, end: int) -> SliceCopy:
                return SliceCopy((begin, end), (begin, end), dict.fromkeys(images, (begin, end)), constants)

            made = Slicing(made.outputs, images, made.whole, height=height, by_rows=rows)
        if made.height < 2 or not (in_order or all(rows_axis(v) is not None for v in node.outputs if v.name)):
            cut.refuse("gives what isn't an image of several rows")
        return made
    except NotCutError as error:
        return sentence(node, str(error))


def row_bytes(value: ir.Value, axis: int) -> int:
    """Bytes of a row of an image, whose rows are this axis."""
    shape, dtype = static_shape(value) or (), value.dtype
    assert dtype is not None
    return -(-math.prod(shape[:axis]) * math.prod(shape[axis + 1 :]) * dtype.bitwidth // 8)
