"""Which rows of its inputs a node needs for some rows of its outputs: one rule an operator.

Axis 2 of an image ``[batch, channels, height, width]`` is its rows. A window of a convolution reaches beyond the rows
that it stands for; there is padding at the border of the image alone. What has no rule of its own works row by row if
its axis rule can cut it along axis 2. Everything else is a barrier: it needs images whole.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
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
"""Rows ``[begin, end)``."""


def is_image(value: ir.Value | None) -> bool:
    """Whether a value is one of several rows, and no constant."""
    shape = None if value is None or value.const_value is not None else static_shape(value)
    return shape is not None and len(shape) == 4 and shape[ROWS] > 1


@dataclass(frozen=True, slots=True)
class RowCopy:
    """What a copy of a node reads and writes that gives some rows of its outputs. Inputs count from 0.

    Attributes:
        rows: The rows that it gives: from the first that was asked for to the last, or further.
        made: The rows that it writes: these, and around them some that are wrong.
        inputs: The rows that it reads of each input that is an image.
        axes: Constants that are cut as the outputs are: input → axis of its rows.
        attributes: What it has in place of the node's own; None: nothing.
        constants: Integers that it reads in place of an input.
    """

    rows: Interval
    made: Interval
    inputs: Mapping[int, Interval]
    axes: Mapping[int, int] = field(default_factory=dict)
    attributes: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[int, Sequence[int]] = field(default_factory=dict)


Rows = Callable[[int, int], RowCopy]
"""From the rows ``[begin, end)`` of a node's outputs that are asked for to the copy that gives them."""


@dataclass(frozen=True, slots=True)
class RowRule:
    """How a node gives some rows of its outputs.

    Attributes:
        copy: From the rows ``[begin, end)`` that are asked for to the copy that gives them.
        whole: Inputs that are images, and that each copy reads whole: keys and values, say.
    """

    copy: Rows
    whole: frozenset[int] = frozenset()


_RULES: dict[str, Callable[[Cut], Rows]] = {}


def rows_of(node: ir.Node, images: Collection[int]) -> RowRule | Refusal:
    """How a node gives some rows of its outputs.

    Args:
        node: With static shapes.
        images: Those of its inputs that come in rows, one at least.

    Returns: a sentence where it can't give rows by themselves.
    """
    cut = Cut(node, dict.fromkeys(images, ROWS), 1)
    try:
        if not all(map(is_image, node.outputs)):
            cut.refuse("gives what isn't an image of several rows")
        rule = _RULES.get(operator_name(node))
        return _row_by_row(cut) if rule is None else RowRule(rule(cut))
    except NotCutError as error:
        return sentence(node, str(error))


def _rule(names: str, added: Collection[int] = ()) -> Callable[[Callable[[Cut], Rows]], Callable[[Cut], Rows]]:
    """Register the rule of operators that read an image as their first input, and may add others to the result."""

    def register(rule: Callable[[Cut], Rows]) -> Callable[[Cut], Rows]:
        def checked(cut: Cut) -> Rows:
            if any(index and index not in added for index in cut.axes):
                cut.refuse("takes a weight that is computed")
            return rule(cut)

        _RULES.update(dict.fromkeys(names.split(), checked))
        return rule

    return register


@_rule("com.microsoft.nchwc::Conv com.microsoft::FusedConv Conv ConvInteger QLinearConv", added=(3,))
def _convolution(cut: Cut) -> Rows:
    return _windows(cut, _kernel(cut, 3 if cut.operator == "QLinearConv" else 1), is_pool=False)


@_rule("MaxPool AveragePool LpPool com.microsoft.nchwc::MaxPool com.microsoft.nchwc::AveragePool")
def _pool(cut: Cut) -> Rows:
    if len(cut.outputs) > 1:
        cut.refuse("numbers the elements of the whole image")
    return _windows(cut, cut.integers("kernel_shape") or [1, 1], is_pool=True)


def _kernel(cut: Cut, weight: int) -> Sequence[int]:
    return cut.integers("kernel_shape") or list(cut.dims(weight)[2:])


def _windows(cut: Cut, kernel: Sequence[int], *, is_pool: bool) -> Rows:
    """Each window of rows reads ``extent`` rows from ``row * stride - begin`` on."""
    height = cut.dims(0)[ROWS]
    at = windows_of(cut.node, cut.dims(0)[2:], cut.out()[2:], kernel)
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

    def rows(begin: int, end: int) -> RowCopy:
        low = begin * at.strides[0] - at.begin[0]
        high = (end - 1) * at.strides[0] - at.begin[0] + at.extent[0]
        pads = [max(0, -low), *at.begin[1:], max(0, high - height), *after[1:]]
        read = {0: (max(low, 0), min(high, height))} | dict.fromkeys(added, (begin, end))
        return RowCopy((begin, end), (begin, end), read, {}, {"pads": pads} | fixed)

    return rows


@_rule("ConvTranspose")
def _transposed(cut: Cut) -> Rows:
    """Row ``i`` is added to ``extent`` rows from ``i * stride - begin`` on. Pads cut off what is written beyond."""
    count = cut.dims(0)[2:]
    at: Windows = windows_of(cut.node, cut.out()[2:], count, _kernel(cut, 1), up=True)
    stride, first, extent = at.strides[0], at.begin[0], at.extent[0]
    fixed: dict[str, Any] = {"auto_pad": "NOTSET"} if "auto_pad" in cut.node.attributes else {}
    fixed |= {"output_shape": None} if "output_shape" in cut.node.attributes else {}

    def rows(begin: int, end: int) -> RowCopy:
        low = max(0, min(-((extent - 1 - first - begin) // stride), (begin + first) // stride, count[0] - 1))
        high = max(low + 1, min(count[0], (end - 1 + first) // stride + 1))
        beyond = (high - 1) * stride - first + extent - end
        missing = [max(0, -beyond), *(max(0, -excess) for excess in at.excess[1:])]
        pads = [begin - (low * stride - first), *at.begin[1:], max(0, beyond), *(max(0, e) for e in at.excess[1:])]
        return RowCopy(
            (begin, end), (begin, end), {0: (low, high)}, {}, fixed | {"pads": pads, "output_padding": missing}
        )

    return rows


@_rule("Resize Upsample com.microsoft.nchwc::Upsample")
def _resized(cut: Cut) -> Rows:
    """Larger or smaller by a whole number. Rows that lie between others are made with more of these on each side."""
    height, made = cut.dims(0)[ROWS], cut.out()[ROWS]
    up, down = made // height, height // made
    where = cut.text("coordinate_transformation_mode", "half_pixel" if cut.operator == "Resize" else "asymmetric")
    mode, around = cut.text("mode", "nearest"), {"nearest": 1, "linear": 1, "bilinear": 1, "cubic": 2}
    if (made % height and height % made) or mode not in around or cut.integer("antialias", 0):
        cut.refuse(f"makes {made} rows of {height} ({mode}), which isn't cut: only enlargements by whole numbers are")
    if where not in ("asymmetric", "half_pixel", "pytorch_half_pixel") or made == 1:
        cut.refuse(f"places rows by '{where}', which depends on the height of the whole")
    scales = 2 if cut.operator == "Resize" and cut.opset >= 11 else 1
    if cut.has(scales) and cut.constant(scales).size and float(cut.constant(scales).reshape(-1)[-2]) != made / height:
        cut.refuse("changes the number of rows by a factor that isn't whole")
    if height > made and mode == "cubic":
        cut.refuse("makes fewer rows of more, each of four")
    is_copy = mode == "nearest" and where == "asymmetric" and cut.text("nearest_mode", "floor") == "floor"
    more = 0 if is_copy or height > made else around[mode]

    def rows(begin: int, end: int) -> RowCopy:
        if height > made:
            return RowCopy((begin, end), (begin, end), {0: (begin * down, end * down)})
        low, high = max(0, begin // up - more), min(height, (end - 1) // up + 1 + more)
        return RowCopy((begin, end), (low * up, high * up), {0: (low, high)})

    return rows


@_rule("DepthToSpace")
def _depth_to_space(cut: Cut) -> Rows:
    """Each row makes as many as the block has."""
    block = cut.integer("blocksize", 1)

    def rows(begin: int, end: int) -> RowCopy:
        low, high = begin // block, -(-end // block)
        given = low * block, high * block
        return RowCopy(given, given, {0: (low, high)})

    return rows


@_rule("SpaceToDepth")
def _space_to_depth(cut: Cut) -> Rows:
    block = cut.integer("blocksize", 1)
    return lambda begin, end: RowCopy((begin, end), (begin, end), {0: (begin * block, end * block)})


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

    def rows(begin: int, end: int) -> RowCopy:
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
        return RowCopy((begin, made[1]), made, {0: (low, high)}, **cuts)

    return rows


@_rule("Slice")
def _slice(cut: Cut) -> Rows:
    """A part of the rows one by one, and of other axes whatever it takes."""
    starts, ends = cut.setting("starts", 1, 10) or [], cut.setting("ends", 2, 10) or []
    axes = [cut.positive(axis) for axis in cut.setting("axes", 3, 10) or range(len(starts))]
    steps = (cut.setting("steps", 4, 10) if cut.opset >= 10 else None) or [1] * len(starts)
    if ROWS not in axes:
        return _row_by_row(cut).copy
    place, height = axes.index(ROWS), cut.dims(0)[ROWS]
    if steps[place] != 1:
        cut.refuse("takes rows that aren't one after the other")
    first = slice(starts[place], ends[place]).indices(height)[0]

    def rows(begin: int, end: int) -> RowCopy:
        own = [*starts[:place], 0, *starts[place + 1 :]], [*ends[:place], end - begin, *ends[place + 1 :]]
        told = {index: numbers for index, numbers in enumerate((*own, axes, steps), 1) if cut.has(index)}
        cuts: dict[str, Any] = {"constants": told}
        if cut.opset < 10:
            cuts = {"attributes": {"starts": own[0], "ends": own[1]}}
        return RowCopy((begin, end), (begin, end), {0: (begin + first, end + first)}, **cuts)

    return rows


@_rule("LRN com.microsoft.nchwc::ReorderInput com.microsoft.nchwc::ReorderOutput")
def _rows_alone(cut: Cut) -> Rows:
    if cut.integer("channels_last", 0):
        cut.refuse("has its channels last")
    return lambda begin, end: RowCopy((begin, end), (begin, end), {0: (begin, end)})


def _row_by_row(cut: Cut) -> RowRule:
    """What computes each row of its outputs from the same row of its inputs, and of others maybe all."""
    height = cut.out()[ROWS]
    answer = slicing(cut.node, cut.axes, height)
    if isinstance(answer, Refusal):
        raise NotCutError(answer.reason.split(") ", 1)[-1])
    if cut.node.op_type in ("Reshape", "Expand", "Transpose"):
        cut.refuse("mixes the rows of an image")
    images = tuple(index for index in cut.axes if index not in answer.whole)
    if set(answer.outputs.values()) != {ROWS} or any(cut.dims(index)[ROWS] != height for index in images):
        cut.refuse("gives no image with the rows of its input")
    constants = {index: axis for index, axis in answer.inputs.items() if index not in images}
    for index in constants:
        cut.constant(index)  # computed ones aren't cut

    def rows(begin: int, end: int) -> RowCopy:
        return RowCopy((begin, end), (begin, end), dict.fromkeys(images, (begin, end)), constants)

    return RowRule(rows, answer.whole)


def row_bytes(value: ir.Value) -> int:
    """Bytes of a row of an image."""
    shape, dtype = static_shape(value) or (), value.dtype
    assert dtype is not None
    return -(-math.prod(shape[:ROWS]) * math.prod(shape[ROWS + 1 :]) * dtype.bitwidth // 8)
