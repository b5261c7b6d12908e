"""Operators that move elements and change none."""

import math

from memonger.tiling.cutting import Cut, Slicing, axis_rule


@axis_rule("Reshape Flatten Squeeze Unsqueeze")
def _reshape(cut: Cut) -> Slicing:
    """Cut along the axis whose slices are the same bytes: with the same product of the axes before it."""
    before, after, axis = cut.dims(0), cut.out(), cut.axis
    outer = math.prod(before[:axis])
    fitting = (a for a, n in enumerate(after) if math.prod(after[:a]) == outer and n > 0 and n % cut.size == 0)
    place = next(fitting, None)
    if place is not None:
        return cut.along({0: axis}, {0: place})
    return cut.refuse(
        f"makes {list(after)} of {list(before)}, in which slices of axis {axis} aren't slices of one axis"
    )


@axis_rule("Transpose")
def _transpose(cut: Cut) -> Slicing:
    perm = cut.integers("perm", reversed(range(len(cut.dims(0))))) or []
    return cut.along({0: cut.axis}, {0: perm.index(cut.axis)})


@axis_rule("Concat com.microsoft::QLinearConcat")
def _concat(cut: Cut) -> Slicing:
    quantized = cut.node.op_type != "Concat"
    parts = list(range(2, len(cut.node.inputs), 3)) if quantized else cut.inputs
    if cut.axis == cut.positive(cut.integer("axis", 1), parts[0]):
        cut.refuse(f"joins its inputs along axis {cut.axis}")
    return cut.all_along(cut.axis, parts)


@axis_rule("Split")
def _split(cut: Cut) -> Slicing:
    if cut.axis == cut.positive(cut.integer("axis", 0)):
        cut.refuse(f"splits axis {cut.axis}")
    return cut.all_along(cut.axis, [0])


@axis_rule("Slice")
def _slice(cut: Cut) -> Slicing:
    """Along an axis that it takes whole."""
    starts, ends = cut.setting("starts", 1, 10) or [], cut.setting("ends", 2, 10) or []
    axes = cut.setting("axes", 3, 10) or list(range(len(starts)))
    steps = (cut.setting("steps", 4, 10) if cut.opset >= 10 else None) or [1] * len(starts)
    length = cut.dims(0)[cut.axis]
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if cut.positive(axis) == cut.axis and not (start in (0, -length) and end >= length and step == 1):
            cut.refuse(f"takes a part of axis {cut.axis}")
    return cut.all_along(cut.axis, [0])


@axis_rule("Pad com.microsoft::Pad")
def _pad(cut: Cut) -> Slicing:
    rank = len(cut.dims(0))
    is_input = cut.node.domain != "" or cut.opset >= 11
    pads = [int(n) for n in cut.constant(1).reshape(-1)] if is_input else cut.integers("pads") or []
    axes = [int(n) for n in cut.constant(3)] if cut.has(3) else list(range(rank))
    for place, axis in enumerate(axes):
        if cut.positive(axis) == cut.axis and (pads[place] or pads[place + len(axes)]):
            cut.refuse(f"pads axis {cut.axis}")
    return cut.all_along(cut.axis, [0])


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
