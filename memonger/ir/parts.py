"""Parts of a value along one axis: what Slices and Splits cut, and Concats join."""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from memonger.ir.marks import WINDOW
from memonger.ir.values import static_shape

MOST_AXES = 32
"""More numbers that say where to cut aren't looked at."""


@dataclass(frozen=True, slots=True)
class Part:
    """Elements of a value along one axis, as a value of their own.

    Attributes:
        whole: The value.
        part: Those elements.
        axis: Not negative.
        begin: Index of the first element along the axis.
        is_cut: Whether the part is made of the whole; else the whole is made of its parts.
    """

    whole: ir.Value
    part: ir.Value
    axis: int
    begin: int
    is_cut: bool


def elements(axis: int, begin: int, end: int) -> tuple[slice, ...]:
    """The index of an array's elements ``[begin, end)`` along an axis."""
    return (*(slice(None),) * axis, slice(begin, end))


def is_marked(node: ir.Node) -> bool:
    """Whether a model in chunks says of a node that it cuts or joins."""
    return node.metadata_props.get(WINDOW) == "1"


def parts_of(node: ir.Node) -> tuple[Part, ...]:
    """What a Slice, Split or Concat cuts or joins; nothing where it does more than that.

    All shapes are static and fit, and what says where is constant: nothing is believed that strangers wrote.
    """
    if node.domain or any(value is None for value in node.inputs):
        return ()
    if node.op_type == "Concat" and len(node.inputs) > 1:
        return _side_by_side(node, node.outputs[0], node.inputs, is_cut=False)
    if node.op_type == "Split":
        whole = node.inputs[0]
        return () if whole is None else _side_by_side(node, whole, node.outputs, is_cut=True)
    return _cut(node) if node.op_type == "Slice" and len(node.outputs) == 1 else ()


def _side_by_side(
    node: ir.Node, whole: ir.Value, values: Sequence[ir.Value | None], *, is_cut: bool
) -> tuple[Part, ...]:
    """Values that are one after the other in the whole along the node's axis, the first one of a Split by default."""
    shape, axis, given = static_shape(whole), 0 if is_cut else None, node.attributes.get("axis")
    if given is not None:
        axis = given.as_int() if given.type == ir.AttributeType.INT else None
    if shape is None or axis is None or not -len(shape) <= axis < len(shape):
        return ()
    axis %= len(shape)
    found, begin = list[Part](), 0
    for part in values:
        own = None if part is None else static_shape(part)
        if part is None or own is None or len(own) != len(shape) or part.dtype != whole.dtype:
            return ()
        if own != (*shape[:axis], own[axis], *shape[axis + 1 :]):
            return ()
        found.append(Part(whole, part, axis, begin, is_cut))
        begin += own[axis]
    return tuple(found) if begin == shape[axis] else ()


def _cut(node: ir.Node) -> tuple[Part, ...]:
    whole, part = node.inputs[0] if node.inputs else None, node.outputs[0]
    bounds = [_constants(value) for value in node.inputs[1:]]
    shape, own = None if whole is None else static_shape(whole), static_shape(part)
    if whole is None or shape is None or own is None or len(bounds) not in (2, 3, 4) or part.dtype != whole.dtype:
        return ()
    begins, ends = bounds[:2]
    axes = bounds[2] if len(bounds) > 2 else tuple(range(len(begins or ())))
    steps = bounds[3] if len(bounds) > 3 else (1,) * len(begins or ())
    if begins is None or ends is None or axes is None or steps is None or set(steps) - {1}:
        return ()
    if not len(begins) == len(ends) == len(axes) == len(steps) or any(not -len(shape) <= a < len(shape) for a in axes):
        return ()
    ranges = [(0, size) for size in shape]
    for begin, end, axis in zip(begins, ends, axes, strict=True):
        ranges[axis] = slice(begin, end).indices(shape[axis])[:2]
    cut = [axis for axis, (begin, end) in enumerate(ranges) if (begin, end) != (0, shape[axis])]
    if len({axis % len(shape) for axis in axes}) != len(axes) or len(cut) > 1 or not axes:
        return ()
    axis = cut[0] if cut else axes[0] % len(shape)
    fits = own == tuple(end - begin for begin, end in ranges)
    return (Part(whole, part, axis, ranges[axis][0], True),) if fits else ()


def _constants(value: ir.Value | None) -> tuple[int, ...] | None:
    """The integers that an initializer holds in one row, if it does."""
    if value is None or value.is_graph_input() or not value.is_initializer() or value.const_value is None:
        return None
    tensor = value.const_value
    integer = tensor.dtype in (ir.DataType.INT32, ir.DataType.INT64)
    return tuple(int(n) for n in tensor.numpy().reshape(-1)) if integer and tensor.size <= MOST_AXES else None
