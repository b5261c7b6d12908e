"""Convolutions, pools and other operators on images: each image of a batch by itself, and rows of it.

A window of a convolution reaches beyond the rows that it stands for; there is padding at the border of the image alone.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from memonger.ir.windows import Windows, windows_of
from memonger.plan_file import ROWS
from memonger.tiling.cutting import Cut, SliceCopy, Slicing, axis_rule, axis_rules

_LONGEST = 64
"""Rows after which what a Resize does with them is the same again, at most."""

_ADD = ("com.microsoft::FusedConv", "com.microsoft.nchwc::Conv")
"""Convolutions that add their fourth input, an image, to the result."""


def batch(cut: Cut, *inputs: int) -> Slicing:
    """These inputs, and all outputs, are cut along axis 0."""
    if cut.axis != 0:
        cut.refuse(f"works on whole images, and can't be cut along axis {cut.axis}")
    return cut.all_along(0, inputs)


def _first(cut: Cut, *added: int) -> int:
    """The first axis of an image that windows slide along: its rows, which are cut.

    The image is the first input; the others are settings and weights, but for those that are added to the result.
    """
    first = 1 if cut.integer("channels_last", cut.operator == "com.microsoft::NhwcMaxPool") else ROWS
    if any(index and index not in added for index in cut.axes):
        cut.refuse("takes a weight that is computed")
    if any(axis != first for axis in cut.axes.values()):
        cut.refuse(f"works on axis {first}, and its image's rows are axis {cut.axis}")
    return first


@axis_rule("Conv ConvInteger QLinearConv com.microsoft::FusedConv com.microsoft::QLinearConv com.microsoft.nchwc::Conv")
def _convolution(cut: Cut) -> Slicing:
    """By images or rows; or by output channels, where the weight is cut along them: gradients of weights are so."""
    added = (3,) if cut.operator in _ADD else ()
    if cut.halo:
        return _windows(cut, _kernel(cut, 3 if "QLinear" in cut.operator else 1), added=added)
    if cut.operator == "Conv" and cut.axes.get(1) == 0 and cut.integer("group", 1) == 1:
        return cut.along({1: 0} | ({2: 0} if cut.has(2) else {}), {0: 1}, whole=(0,))
    return batch(cut, 0, *added)


@axis_rule(
    "AveragePool LpPool MaxPool com.microsoft::NhwcMaxPool com.microsoft::QLinearAveragePool",
    "com.microsoft.nchwc::AveragePool com.microsoft.nchwc::MaxPool",
)
def _pool(cut: Cut) -> Slicing:
    if len(cut.outputs) > 1:
        cut.refuse("numbers the elements of its input through all images of the batch (axis 0)")
    if cut.halo:
        return _windows(cut, cut.integers("kernel_shape") or [1, 1], is_pool=True)
    return batch(cut, 0)


def _kernel(cut: Cut, weight: int) -> Sequence[int]:
    return cut.integers("kernel_shape") or list(cut.dims(weight)[2:])


def _windows(cut: Cut, kernel: Sequence[int], *, added: tuple[int, ...] = (), is_pool: bool = False) -> Slicing:
    """Each window of rows reads ``extent`` rows from ``row * stride - begin`` on."""
    first = _first(cut, *added)
    behind, height = len(cut.dims(0)) - (first == 1), cut.dims(0)[first]
    at = windows_of(cut.node, cut.dims(0)[first:behind], cut.out()[first:behind], kernel)
    try:
        at.padding(is_pool=is_pool, counted=cut.integer("count_include_pad", 0) > 0)
    except ValueError as error:
        cut.refuse(f"has windows that can't be told to a copy: {error}")
    after = [max(0, excess) for excess in at.excess]
    if max(at.begin[0], at.excess[0]) >= at.extent[0]:
        cut.refuse("has windows that are padding alone")
    images = [index for index in cut.axes if index]
    fixed: dict[str, Any] = {"auto_pad": "NOTSET"} if "auto_pad" in cut.node.attributes else {}
    fixed |= {"ceil_mode": 0} if "ceil_mode" in cut.node.attributes else {}

    def rows(begin: int, end: int) -> SliceCopy:
        low = begin * at.strides[0] - at.begin[0]
        high = (end - 1) * at.strides[0] - at.begin[0] + at.extent[0]
        pads = [max(0, -low), *at.begin[1:], max(0, high - height), *after[1:]]
        read = {0: (max(low, 0), min(high, height))} | dict.fromkeys(images, (begin, end))
        return SliceCopy((begin, end), (begin, end), read, {}, {"pads": pads} | fixed)

    return cut.in_rows(rows, first)


@axis_rule("ConvTranspose")
def _transposed(cut: Cut) -> Slicing:
    """Row ``i`` is added to ``extent`` rows from ``i * stride - begin`` on. Pads cut off what is written beyond."""
    if not cut.halo:
        return batch(cut, 0)
    axis, count = _first(cut), cut.dims(0)[2:]
    at: Windows = windows_of(cut.node, cut.out()[2:], count, _kernel(cut, 1), up=True)
    stride, first, extent = at.strides[0], at.begin[0], at.extent[0]
    fixed: dict[str, Any] = {"auto_pad": "NOTSET"} if "auto_pad" in cut.node.attributes else {}
    fixed |= {"output_shape": None} if "output_shape" in cut.node.attributes else {}

    def rows(begin: int, end: int) -> SliceCopy:
        low = max(0, min(-((extent - 1 - first - begin) // stride), (begin + first) // stride, count[0] - 1))
        high = max(low + 1, min(count[0], (end - 1 + first) // stride + 1))
        beyond = (high - 1) * stride - first + extent - end
        missing = [max(0, -beyond), *(max(0, -excess) for excess in at.excess[1:])]
        pads = [begin - (low * stride - first), *at.begin[1:], max(0, beyond), *(max(0, e) for e in at.excess[1:])]
        return SliceCopy(
            (begin, end), (begin, end), {0: (low, high)}, {}, fixed | {"pads": pads, "output_padding": missing}
        )

    return cut.in_rows(rows, axis)


@axis_rule("Resize Upsample com.microsoft.nchwc::Upsample")
def _resized(cut: Cut) -> Slicing:
    """Of each ``step`` rows ``made``. Rows that lie between others are made with more of these on each side."""
    if not cut.halo:
        if cut.dims(0)[:1] != cut.out()[:1]:
            cut.refuse("changes the size of axis 0")
        return batch(cut, 0)
    axis = _first(cut)
    height, given = cut.dims(0)[axis], cut.out()[axis]
    where = cut.text("coordinate_transformation_mode", "half_pixel" if cut.operator == "Resize" else "asymmetric")
    mode, around = cut.text("mode", "nearest"), {"nearest": 1, "linear": 1, "bilinear": 1, "cubic": 2}
    corners, antialias = where == "align_corners", cut.integer("antialias", 0)
    if where == "tf_crop_and_resize" or cut.text("keep_aspect_ratio_policy", "stretch") != "stretch" or given == 1:
        cut.refuse(f"places rows by '{where}' in {given} rows, which depends on the height of the whole")
    if mode not in around:
        cut.refuse(f"has the mode '{mode}', which isn't cut")
    made, step = _pattern(cut, height, given, corners)
    reach = math.ceil(around[mode] * max(1.0, step / made)) + 1 if antialias else around[mode]
    is_copy = mode == "nearest" and where == "asymmetric" and cut.text("nearest_mode", "floor") == "floor"
    alone = not (antialias or corners or mode == "cubic")
    before = 0 if alone and (made == 1 or (is_copy and step == 1)) else reach
    behind = before + (-(-step // (2 * made)) if made > 1 and step > made else 0)
    if step * 2 > height - corners:
        cut.refuse(f"makes {given} rows of {height}, which lie between others in no pattern that is shorter")

    def rows(begin: int, end: int) -> SliceCopy:
        low = max(0, begin * step // made - before) // step
        high = -(-((end - 1) * step // made + 1 + behind - corners) // step)
        if where == "pytorch_half_pixel" and (high - low) * made == 1:  # which has another place where it is alone
            low, high = (low, high + 1) if (high + 1) * step <= height else (low - 1, high)
        read = low * step, min(height, high * step + corners)
        to = given if read[1] == height else high * made + corners
        return SliceCopy((begin, end), (low * made, to), {0: read})

    return cut.in_rows(rows, axis)


def _pattern(cut: Cut, height: int, given: int, corners: bool) -> tuple[int, int]:
    """How many rows are made of how many: the fewest that are placed alike."""
    if corners:
        exact = Fraction(given - 1, height - 1)
        return exact.numerator, exact.denominator
    scales = 2 if cut.operator == "Resize" and cut.opset >= 11 else 1
    exact = Fraction(given, height)
    if cut.has(scales) and cut.constant(scales).size:
        axes = cut.integers("axes") or range(len(cut.dims(0)))
        factors = dict(zip(map(cut.positive, axes), cut.constant(scales).reshape(-1), strict=True))
        told = factors.get(ROWS, np.float32(1))
        exact = Fraction(float(told)).limit_denominator(_LONGEST)
        if np.float32(exact.numerator / exact.denominator) != told or math.floor(height * exact) != given:
            cut.refuse(f"changes the number of rows by a factor of {told}, whose pattern isn't short")
    elif "scales" in cut.node.attributes and exact.denominator > 1 < exact.numerator:
        cut.refuse("changes the number of rows by a factor that isn't whole")
    return exact.numerator, exact.denominator


@axis_rule("DepthToSpace SpaceToDepth")
def _blocks(cut: Cut) -> Slicing:
    """Each row makes as many as the block has, or is made of as many."""
    if not cut.halo:
        return batch(cut, 0)
    axis, block = _first(cut), cut.integer("blocksize", 1)

    def rows(begin: int, end: int) -> SliceCopy:
        if cut.operator == "SpaceToDepth":
            return SliceCopy((begin, end), (begin, end), {0: (begin * block, end * block)})
        low, high = begin // block, -(-end // block)
        given = low * block, high * block
        return SliceCopy(given, given, {0: (low, high)})

    return cut.in_rows(rows, axis)


@axis_rule("GridSample")
def _grid_sample(cut: Cut) -> Slicing:
    """A row of places gives one of the result; the image is read whole."""
    if not cut.halo:
        return batch(cut, 0, 1)
    if len(cut.out()) != 4 or cut.axes.get(1, 1) != 1:
        cut.refuse("takes places that don't come in rows")
    of_places = 1 in cut.axes
    if not of_places:
        cut.constant(1)

    def rows(begin: int, end: int) -> SliceCopy:
        read, told = ({1: (begin, end)}, {}) if of_places else ({}, {1: 1})
        return SliceCopy((begin, end), (begin, end), read, told)

    return cut.in_rows(rows, ROWS, whole=(0,))


@axis_rule("LRN com.microsoft.nchwc::ReorderInput com.microsoft.nchwc::ReorderOutput")
def _rows_alone(cut: Cut) -> Slicing:
    """Each row as it is; what has its channels last has its rows before its columns."""
    if not cut.halo:
        return batch(cut, 0)
    last, is_output = cut.integer("channels_last", 0), cut.node.op_type == "ReorderOutput"
    axis, given = (1 if last and not is_output else ROWS), (1 if last and is_output else ROWS)
    if cut.axes != {0: axis}:
        cut.refuse(f"works on axis {axis}, and its image's rows are axis {cut.axis}")
    return Slicing({0: given}, cut.axes, height=cut.out()[given])


axis_rules({
    "GlobalAveragePool GlobalLpPool GlobalMaxPool GroupNormalization InstanceNormalization Col2Im "
    "com.microsoft::QLinearGlobalAveragePool com.microsoft.nchwc::GlobalAveragePool "
    "com.microsoft.nchwc::GlobalMaxPool": lambda cut: batch(cut, 0),
    "DeformConv": lambda cut: batch(cut, 0, 2, 4),
})  # fmt: skip
