"""Which rows of its inputs a node needs for some rows of its outputs: one rule an operator.

Axis 2 of an image ``[batch, channels, height, width]`` is its rows, of a volume its depth, of a sequence that a
convolution reads its time. Behind a transpose or a reshape of such an image they may be another axis. A window of a
convolution reaches beyond the rows that it stands for; there is padding at the border of the image alone. What has no
rule of its own works row by row if its axis rule can cut it along that axis. Everything else is a barrier: it needs
images whole.
"""

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import onnx_ir as ir

from memonger.ir.operators import operator_name
from memonger.ir.values import static_shape
from memonger.ir.windows import Windows, windows_of
from memonger.plan_file import ROWS
from memonger.tiling.axes import slicing
from memonger.tiling.cutting import Cut, NotCutError, Refusal, SliceCopy, Slicing, sentence

BLOCKED = "com.microsoft.nchwc"
"""Domain of the operators on images whose channels lie in blocks."""

_LONGEST = 64
"""Rows after which what a Resize does with them is the same again, at most."""

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


Rows = Callable[[int, int], SliceCopy]
"""From the rows ``[begin, end)`` of a node's outputs that are asked for to the copy that gives them."""

Rule = Callable[[Cut], Rows | Slicing]

_RULES: dict[str, Rule] = {}

_WHOLE: Mapping[str, frozenset[int]] = {"GridSample": frozenset([0])}
"""Inputs that copies of operators with rules read whole."""


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
        rule = _RULES.get(operator_name(node))
        made = _row_by_row(cut, in_order) if rule is None else _by_rule(cut, rule)
        if made.height < 2 or not (in_order or all(rows_axis(v) is not None for v in node.outputs if v.name)):
            cut.refuse("gives what isn't an image of several rows")
        return made
    except NotCutError as error:
        return sentence(node, str(error))


def _by_rule(cut: Cut, rule: Rule) -> Slicing:
    whole = _WHOLE.get(cut.operator, frozenset())
    axis = ROWS if whole else cut.axes.get(0, ROWS)
    images = {index: axis for index, axis in cut.axes.items() if index not in whole}
    made = rule(cut)
    if isinstance(made, Slicing):
        return made
    return Slicing(dict.fromkeys(cut.outputs, axis), images, whole, height=cut.out()[axis], by_rows=made)


def _rule(names: str, added: Collection[int] = (), axis: int | None = ROWS) -> Callable[[Rule], Rule]:
    """Register the rule of operators that read an image as their first input, and may add others to the result.

    Args:
        names: Of the operators.
        added: Inputs that are added.
        axis: Of the rows, or that behind the first where ``channels_last`` is set; None: any.
    """

    def register(rule: Rule) -> Rule:
        def checked(cut: Cut) -> Rows | Slicing:
            if any(index and index not in added for index in cut.axes):
                cut.refuse("takes a weight that is computed")
            if axis is not None and any(own != _first(cut) for own in cut.axes.values()):
                cut.refuse(f"works on axis {_first(cut)}, and its image's rows are axis {cut.axis}")
            return rule(cut)

        _RULES.update(dict.fromkeys(names.split(), checked))
        return rule

    return register


def _first(cut: Cut) -> int:
    """The first axis of an image that windows slide along."""
    return 1 if cut.integer("channels_last", cut.operator == "com.microsoft::NhwcMaxPool") else ROWS


@_rule(
    "com.microsoft.nchwc::Conv com.microsoft::FusedConv Conv ConvInteger QLinearConv com.microsoft::QLinearConv",
    added=(3,),
)
def _convolution(cut: Cut) -> Rows:
    return _windows(cut, _kernel(cut, 3 if "QLinear" in cut.operator else 1), is_pool=False)


@_rule(
    "MaxPool AveragePool LpPool com.microsoft.nchwc::MaxPool com.microsoft.nchwc::AveragePool "
    "com.microsoft::NhwcMaxPool com.microsoft::QLinearAveragePool"
)
def _pool(cut: Cut) -> Rows:
    if len(cut.outputs) > 1:
        cut.refuse("numbers the elements of the whole image")
    return _windows(cut, cut.integers("kernel_shape") or [1, 1], is_pool=True)


def _kernel(cut: Cut, weight: int) -> Sequence[int]:
    return cut.integers("kernel_shape") or list(cut.dims(weight)[2:])


def _windows(cut: Cut, kernel: Sequence[int], *, is_pool: bool) -> Rows:
    """Each window of rows reads ``extent`` rows from ``row * stride - begin`` on."""
    first, behind = _first(cut), len(cut.dims(0)) - (_first(cut) == 1)
    height = cut.dims(0)[first]
    at = windows_of(cut.node, cut.dims(0)[first:behind], cut.out()[first:behind], kernel)
    after = [max(0, excess) for excess in at.excess]
    if cut.integer("count_include_pad", 0) and any(a > b for a, b in zip(after, at.end, strict=True)):
        cut.refuse("counts padding, and takes windows beyond it")
    if max(at.begin[0], at.excess[0]) >= at.extent[0]:
        cut.refuse("has windows that are padding alone")
    if is_pool and any(pad >= size for pad, size in zip([*at.begin, *after], at.kernel * 2, strict=True)):
        cut.refuse("has windows in its padding")
    added = [index for index in cut.axes if index]
    fixed: dict[str, Any] = {"auto_pad": "NOTSET"} if "auto_pad" in cut.node.attributes else {}
    fixed |= {"ceil_mode": 0} if "ceil_mode" in cut.node.attributes else {}

    def rows(begin: int, end: int) -> SliceCopy:
        low = begin * at.strides[0] - at.begin[0]
        high = (end - 1) * at.strides[0] - at.begin[0] + at.extent[0]
        pads = [max(0, -low), *at.begin[1:], max(0, high - height), *after[1:]]
        read = {0: (max(low, 0), min(high, height))} | dict.fromkeys(added, (begin, end))
        return SliceCopy((begin, end), (begin, end), read, {}, {"pads": pads} | fixed)

    return rows


@_rule("ConvTranspose")
def _transposed(cut: Cut) -> Rows:
    """Row ``i`` is added to ``extent`` rows from ``i * stride - begin`` on. Pads cut off what is written beyond."""
    count = cut.dims(0)[2:]
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

    return rows


@_rule("Resize Upsample com.microsoft.nchwc::Upsample")
def _resized(cut: Cut) -> Rows:
    """Of each ``step`` rows ``made``. Rows that lie between others are made with more of these on each side."""
    height, given = cut.dims(0)[ROWS], cut.out()[ROWS]
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
        read = low * step, min(height, high * step + corners)
        to = given if read[1] == height else high * made + corners
        return SliceCopy((begin, end), (low * made, to), {0: read})

    return rows


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


@_rule("DepthToSpace")
def _depth_to_space(cut: Cut) -> Rows:
    """Each row makes as many as the block has."""
    block = cut.integer("blocksize", 1)

    def rows(begin: int, end: int) -> SliceCopy:
        low, high = begin // block, -(-end // block)
        given = low * block, high * block
        return SliceCopy(given, given, {0: (low, high)})

    return rows


@_rule("SpaceToDepth")
def _space_to_depth(cut: Cut) -> Rows:
    block = cut.integer("blocksize", 1)
    return lambda begin, end: SliceCopy((begin, end), (begin, end), {0: (begin * block, end * block)})


@_rule("Pad")
def _pad(cut: Cut) -> Rows:
    """Zeros, or what the rows at the border say; these are read for it."""
    height, rank, mode = cut.dims(0)[ROWS], len(cut.dims(0)), cut.text("mode", "constant")
    is_input = cut.opset >= 11
    pads = [int(n) for n in cut.constant(1).reshape(-1)] if is_input else cut.integers("pads") or [0] * (2 * rank)
    if cut.has(3):
        axes, given = [cut.positive(int(axis)) for axis in cut.constant(3)], pads
        pads = [0] * (2 * rank)
        for place, axis in enumerate(axes):
            pads[axis], pads[axis + rank] = given[place], given[place + len(axes)]
    top, bottom = pads[ROWS], pads[ROWS + rank]
    if min(top, bottom) < 0 or (mode == "wrap" and (top or bottom)):
        cut.refuse(f"pads rows by {top} and {bottom} ('{mode}'), which isn't cut")
    border = {"reflect": max(top, bottom) + 1}.get(mode, 1)
    if border > height:
        cut.refuse("pads by more rows than there are")

    def rows(begin: int, end: int) -> SliceCopy:
        low, high = min(max(0, begin - top), height - 1), max(min(height, end - top), 1)
        if begin < top:
            high = max(high, min(border, height))
        if end > top + height:
            low = min(low, max(0, height - border))
        own = list(pads)
        own[ROWS], own[ROWS + rank] = top if low == 0 and begin < top else 0, bottom if end > top + height else 0
        made = low + top - own[ROWS], high + top + own[ROWS + rank]
        told = {1: own} | ({3: list(range(rank))} if cut.has(3) else {})
        cuts: dict[str, Any] = {"constants": told} if is_input else {"attributes": {"pads": own}}
        return SliceCopy((begin, made[1]), made, {0: (low, high)}, **cuts)

    return rows


@_rule("Slice", axis=None)
def _slice(cut: Cut) -> Rows | Slicing:
    """A part of the rows, or of these each second one, say, and of other axes whatever it takes."""
    starts, ends = cut.setting("starts", 1, 10) or [], cut.setting("ends", 2, 10) or []
    axes = [cut.positive(axis) for axis in cut.setting("axes", 3, 10) or range(len(starts))]
    steps = (cut.setting("steps", 4, 10) if cut.opset >= 10 else None) or [1] * len(starts)
    if cut.axis not in axes:
        return _row_by_row(cut, True)
    place, height = axes.index(cut.axis), cut.dims(0)[cut.axis]
    first, _, step = slice(starts[place], ends[place], steps[place]).indices(height)
    if step < 1:
        cut.refuse("takes rows from the last to the first")

    def rows(begin: int, end: int) -> SliceCopy:
        count = (end - begin - 1) * step + 1
        own = [*starts[:place], 0, *starts[place + 1 :]], [*ends[:place], count, *ends[place + 1 :]]
        told = {index: numbers for index, numbers in enumerate((*own, axes, steps), 1) if cut.has(index)}
        cuts: dict[str, Any] = {"constants": told}
        if cut.opset < 10:
            cuts = {"attributes": {"starts": own[0], "ends": own[1]}}
        low = begin * step + first
        return SliceCopy((begin, end), (begin, end), {0: (low, low + count)}, **cuts)

    return rows


@_rule("Gather", axis=None)
def _gather(cut: Cut) -> Rows | Slicing:
    """Rows by constant numbers; of other axes whatever it takes."""
    if 0 not in cut.axes or cut.positive(cut.integer("axis", 0)) != cut.axis:
        return _row_by_row(cut, True)
    if len(cut.dims(1)) != 1:
        cut.refuse("picks rows by numbers that aren't a list")
    height = cut.dims(0)[cut.axis]
    picked = [int(row) % height for row in cut.constant(1)]

    def rows(begin: int, end: int) -> SliceCopy:
        low, high = min(picked[begin:end]), max(picked[begin:end]) + 1
        own = [row - low for row in picked[begin:end]]
        return SliceCopy((begin, end), (begin, end), {0: (low, high)}, constants={1: own})

    return rows


@_rule("GridSample", added=(1,), axis=None)
def _grid_sample(cut: Cut) -> Rows:
    """A row of places gives one of the result; the image is read whole."""
    if len(cut.out()) != 4 or cut.axes.get(1, 1) != 1:
        cut.refuse("takes places that don't come in rows")
    if 1 in cut.axes:
        return lambda begin, end: SliceCopy((begin, end), (begin, end), {1: (begin, end)})
    cut.constant(1)
    return lambda begin, end: SliceCopy((begin, end), (begin, end), {}, {1: 1})


def _joined(cut: Cut) -> Slicing:
    """Images one below the other: of each the rows that are asked for."""
    if len(cut.axes) < len(cut.inputs) or set(cut.axes.values()) != {cut.positive(cut.integer("axis", 1))}:
        cut.refuse("joins rows with those of a constant")
    ends = list(itertools.accumulate(cut.dims(index)[cut.axis] for index in cut.inputs))

    def rows(begin: int, end: int) -> SliceCopy:
        read = {}
        for index, low, high in zip(cut.inputs, [0, *ends], ends, strict=False):
            if max(begin, low) < min(end, high):
                read[index] = max(begin, low) - low, min(end, high) - low
        return SliceCopy((begin, end), (begin, end), read, without=frozenset(cut.inputs).difference(read))

    return Slicing({0: cut.axis}, cut.axes, height=ends[-1], by_rows=rows)


@_rule("LRN com.microsoft.nchwc::ReorderInput com.microsoft.nchwc::ReorderOutput", axis=None)
def _rows_alone(cut: Cut) -> Slicing:
    """Each row as it is; what has its channels last has its rows before its columns."""
    last, is_output = cut.integer("channels_last", 0), cut.node.op_type == "ReorderOutput"
    axis, given = (1 if last and not is_output else ROWS), (1 if last and is_output else ROWS)
    if cut.axes != {0: axis}:
        cut.refuse(f"works on axis {axis}, and its image's rows are axis {cut.axis}")
    return Slicing({0: given}, cut.axes, height=cut.out()[given])


def _row_by_row(cut: Cut, in_order: bool) -> Slicing:
    """What computes each row of its outputs from the same row of its inputs, and of others maybe all."""
    if cut.operator == "Concat" and cut.positive(cut.integer("axis", 1), cut.inputs[0]) == cut.axis:
        return _joined(cut)
    height = cut.dims(min(cut.axes))[cut.axis]
    answer = slicing(cut.node, cut.axes, height)
    if isinstance(answer, Refusal):
        raise NotCutError(answer.reason.split(") ", 1)[-1])
    if cut.node.op_type in ("Reshape", "Expand", "Transpose") and not in_order:
        cut.refuse("mixes the rows of an image")
    images = {index: axis for index, axis in cut.axes.items() if index not in answer.whole}
    if any(cut.dims(index)[axis] != height for index, axis in images.items()) or not images:
        cut.refuse("gives no image with the rows of its input")
    if not answer.outputs or any(cut.out(index)[axis] != height for index, axis in answer.outputs.items()):
        cut.refuse("gives no image with the rows of its input")
    constants = {index: axis for index, axis in answer.inputs.items() if index not in images}
    for index in constants:
        cut.constant(index)  # computed ones aren't cut

    def rows(begin: int, end: int) -> SliceCopy:
        return SliceCopy((begin, end), (begin, end), dict.fromkeys(images, (begin, end)), constants)

    return Slicing(answer.outputs, images, answer.whole, height=height, by_rows=rows)


def row_bytes(value: ir.Value, axis: int) -> int:
    """Bytes of a row of an image, whose rows are this axis."""
    shape, dtype = static_shape(value) or (), value.dtype
    assert dtype is not None
    return -(-math.prod(shape[:axis]) * math.prod(shape[axis + 1 :]) * dtype.bitwidth // 8)
