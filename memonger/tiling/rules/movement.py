"""Operators that move elements and change none, and those that pick or place elements by index."""

import itertools
import math
from typing import Any

from memonger.tiling.cutting import Cut, SliceCopy, Slicing, axis_rule


@axis_rule("Reshape Flatten Squeeze Unsqueeze")
def _reshape(cut: Cut) -> Slicing:
    """Cut along the axis whose slices are the same bytes: with the same product of the axes before it.

    Of rows each may be a stretch of a longer axis, as tokens of an image, or the other way around.
    """
    before, after, axis = cut.dims(0), cut.out(), cut.axis
    outer, count = math.prod(before[:axis]), before[axis]

    def fits(size: int) -> bool:
        return size > 1 and 0 in (size % count, count % size) if cut.halo else size > 0 and size % cut.size == 0

    place = next((a for a, n in enumerate(after) if math.prod(after[:a]) == outer and fits(n)), None)
    if place is None:
        cut.refuse(f"makes {list(after)} of {list(before)}, in which slices of axis {axis} aren't slices of one axis")
    given = after[place]
    if not cut.halo or given == count:
        return cut.along({0: axis}, {0: place})

    def rows(begin: int, end: int) -> SliceCopy:
        first, last = begin * count // given, -(-end * count // given)
        made = first * given // count, last * given // count
        return SliceCopy((begin, made[1]), made, {0: (first, last)})

    return cut.in_rows(rows, place)


@axis_rule("Transpose")
def _transpose(cut: Cut) -> Slicing:
    perm = cut.integers("perm", reversed(range(len(cut.dims(0))))) or []
    return cut.along({0: cut.axis}, {0: perm.index(cut.axis)})


@axis_rule("Concat com.microsoft::QLinearConcat")
def _concat(cut: Cut) -> Slicing:
    """Along another axis; or images one below the other: of each the rows that are asked for."""
    quantized = cut.node.op_type != "Concat"
    parts = list(range(2, len(cut.node.inputs), 3)) if quantized else cut.inputs
    if cut.axis != cut.positive(cut.integer("axis", 1), parts[0]):
        return cut.all_along(cut.axis, parts)
    if not cut.halo or quantized:
        cut.refuse(f"joins its inputs along axis {cut.axis}")
    if len(cut.axes) < len(parts) or set(cut.axes.values()) != {cut.axis}:
        cut.refuse("joins rows with those of a constant")
    ends = list(itertools.accumulate(cut.dims(index)[cut.axis] for index in parts))

    def rows(begin: int, end: int) -> SliceCopy:
        read = {}
        for index, low, high in zip(parts, [0, *ends], ends, strict=False):
            if max(begin, low) < min(end, high):
                read[index] = max(begin, low) - low, min(end, high) - low
        return SliceCopy((begin, end), (begin, end), read, without=frozenset(parts).difference(read))

    return cut.in_rows(rows, cut.axis)


@axis_rule("Split")
def _split(cut: Cut) -> Slicing:
    if cut.axis == cut.positive(cut.integer("axis", 0)):
        cut.refuse(f"splits axis {cut.axis}")
    return cut.all_along(cut.axis, [0])


@axis_rule("Slice")
def _slice(cut: Cut) -> Slicing:
    """Along an axis that it takes whole; or a part of the rows, or of these each second one, say."""
    starts, ends = cut.setting("starts", 1, 10) or [], cut.setting("ends", 2, 10) or []
    axes = [cut.positive(axis) for axis in cut.setting("axes", 3, 10) or range(len(starts))]
    steps = (cut.setting("steps", 4, 10) if cut.opset >= 10 else None) or [1] * len(starts)
    if cut.axis not in axes:
        return cut.all_along(cut.axis, [0])
    place, length = axes.index(cut.axis), cut.dims(0)[cut.axis]
    if not cut.halo:
        if starts[place] not in (0, -length) or ends[place] < length or steps[place] != 1:
            cut.refuse(f"takes a part of axis {cut.axis}")
        return cut.all_along(cut.axis, [0])
    first, _, step = slice(starts[place], ends[place], steps[place]).indices(length)
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

    return cut.in_rows(rows, cut.axis)


@axis_rule("Pad com.microsoft::Pad")
def _pad(cut: Cut) -> Slicing:
    """Along an axis that it leaves; or rows, with zeros or what those at the border say, which are read for it."""
    rank, axis, mode = len(cut.dims(0)), cut.axis, cut.text("mode", "constant")
    is_input = cut.node.domain != "" or cut.opset >= 11
    pads = [int(n) for n in cut.constant(1).reshape(-1)] if is_input else cut.integers("pads") or [0] * (2 * rank)
    if cut.has(3):
        axes, given = [cut.positive(int(axis)) for axis in cut.constant(3)], pads
        pads = [0] * (2 * rank)
        for place, padded in enumerate(axes):
            pads[padded], pads[padded + rank] = given[place], given[place + len(axes)]
    height, top, bottom = cut.dims(0)[axis], pads[axis], pads[axis + rank]
    if not (top or bottom):
        return cut.all_along(axis, [0])
    if not cut.halo or cut.node.domain:
        cut.refuse(f"pads axis {axis}")
    if min(top, bottom) < 0 or mode == "wrap":
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
        own[axis], own[axis + rank] = top if low == 0 and begin < top else 0, bottom if end > top + height else 0
        made = low + top - own[axis], high + top + own[axis + rank]
        told = {1: own} | ({3: list(range(rank))} if cut.has(3) else {})
        cuts: dict[str, Any] = {"constants": told} if is_input else {"attributes": {"pads": own}}
        return SliceCopy((begin, made[1]), made, {0: (low, high)}, **cuts)

    return cut.in_rows(rows, axis)


@axis_rule("Tile")
def _tile(cut: Cut) -> Slicing:
    if cut.out()[cut.axis] != cut.dims(0)[cut.axis]:
        cut.refuse(f"repeats axis {cut.axis}")
    return cut.all_along(cut.axis, [0])


@axis_rule("ReverseSequence")
def _reverse(cut: Cut) -> Slicing:
    """Each sequence of the batch by its own length."""
    if cut.axis == cut.integer("time_axis", 0) and 0 in cut.axes:
        cut.refuse(f"reverses axis {cut.axis}")
    of_batch = cut.integer("batch_axis", 1)
    axis = cut.axes.get(0, of_batch)
    return cut.along({0: axis} | ({1: 0} if axis == of_batch else {}), {0: axis})


@axis_rule("Gather")
def _gather(cut: Cut) -> Slicing:
    """By the axes of the indices, with the data whole; else by an axis of the data that nothing is picked from.

    Rows that constant numbers pick are cut, too.
    """
    axis, rank = cut.positive(cut.integer("axis", 0)), len(cut.dims(1))
    if 1 in cut.axes:
        return cut.along({1: cut.axes[1]}, {0: axis + cut.axes[1]}, whole=(0,))
    if cut.axis != axis:
        return cut.along({0: cut.axis}, {0: cut.axis if cut.axis < axis else cut.axis + rank - 1})
    if not cut.halo:
        cut.refuse(f"picks from axis {axis}")
    if rank != 1:
        cut.refuse("picks rows by numbers that aren't a list")
    picked = [int(row) % cut.dims(0)[axis] for row in cut.constant(1)]

    def rows(begin: int, end: int) -> SliceCopy:
        low, high = min(picked[begin:end]), max(picked[begin:end]) + 1
        own = [row - low for row in picked[begin:end]]
        return SliceCopy((begin, end), (begin, end), {0: (low, high)}, constants={1: own})

    return cut.in_rows(rows, axis)


@axis_rule("GatherElements")
def _gather_elements(cut: Cut) -> Slicing:
    """By any axis that nothing is picked from; by that one too where the indices alone are cut, from whole data."""
    axis, working = cut.axes.get(1, cut.axis), cut.positive(cut.integer("axis", 0))
    if axis == working:
        if 1 not in cut.axes:
            cut.refuse(f"picks from axis {axis}")
        return cut.along({1: axis}, {0: axis}, whole=(0,))
    if cut.dims(0)[axis] != cut.dims(1)[axis]:
        cut.refuse(f"reads a part of axis {axis}")
    return cut.all_along(axis, [0, 1])


@axis_rule("GatherND")
def _gather_nd(cut: Cut) -> Slicing:
    """By a batch axis of both; by an axis of the indices; or by one of the data that the indices don't reach."""
    shared, rank = cut.integer("batch_dims", 0), len(cut.dims(1))
    axis = cut.axes.get(1, cut.axis)
    if axis < shared:
        return cut.all_along(axis, [0, 1])
    if 1 in cut.axes:
        if axis == rank - 1:
            cut.refuse(f"reads its indices along axis {axis}")
        return cut.along({1: axis}, {0: axis}, whole=(0,))
    first = shared + cut.dims(1)[-1]
    if axis < first:
        cut.refuse(f"picks from axis {axis}")
    return cut.along({0: axis}, {0: axis - first + rank - 1})


@axis_rule("ScatterElements")
def _scatter_elements(cut: Cut) -> Slicing:
    if cut.axis == cut.positive(cut.integer("axis", 0)):
        cut.refuse(f"writes into axis {cut.axis} by index")
    if len({cut.dims(index)[cut.axis] for index in range(3)}) > 1:
        cut.refuse(f"writes a part of axis {cut.axis}")
    return cut.all_along(cut.axis, range(3))


@axis_rule("OneHot")
def _one_hot(cut: Cut) -> Slicing:
    working = cut.integer("axis", -1)
    working += len(cut.out()) if working < 0 else 0
    return cut.along({0: cut.axis}, {0: cut.axis + (cut.axis >= working)})
