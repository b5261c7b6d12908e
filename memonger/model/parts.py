"""Parts of a value along one axis: what the Slices and Concats of a chunked model cut and join."""

from dataclasses import dataclass

import onnx_ir as ir

from memonger.model.marks import WINDOW
from memonger.model.values import static_shape


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


def parts_of(node: ir.Node) -> tuple[Part, ...]:
    """What a Slice or Concat does that is marked as one that cuts or joins; nothing where it isn't marked or does more.

    All shapes are static and fit, and what says where is constant: nothing is believed that strangers wrote.
    """
    marked = node.metadata_props.get(WINDOW) == "1" and not node.domain and len(node.outputs) == 1
    if not marked or any(value is None for value in node.inputs):
        return ()
    if node.op_type == "Concat" and len(node.inputs) > 1:
        return _joined(node)
    return _cut(node) if node.op_type == "Slice" else ()


def _joined(node: ir.Node) -> tuple[Part, ...]:
    whole, found, begin = node.outputs[0], list[Part](), 0
    shape, attribute = static_shape(whole), node.attributes.get("axis")
    axis = None if attribute is None or attribute.type != ir.AttributeType.INT else attribute.as_int()
    if shape is None or axis is None or not -len(shape) <= axis < len(shape):
        return ()
    axis %= len(shape)
    for part in node.inputs:
        own = None if part is None else static_shape(part)
        if part is None or own is None or len(own) != len(shape) or part.dtype != whole.dtype:
            return ()
        if own != (*shape[:axis], own[axis], *shape[axis + 1 :]):
            return ()
        found.append(Part(whole, part, axis, begin, False))
        begin += own[axis]
    return tuple(found) if begin == shape[axis] else ()


def _cut(node: ir.Node) -> tuple[Part, ...]:
    whole, part = node.inputs[0] if node.inputs else None, node.outputs[0]
    bounds = [_constant(value) for value in node.inputs[1:]]
    shape, own = None if whole is None else static_shape(whole), static_shape(part)
    if whole is None or shape is None or own is None or len(bounds) not in (3, 4):
        return ()
    begin, end, axis = bounds[:3]
    if begin is None or end is None or axis is None or bounds[3:] not in ([], [1]) or not 0 <= axis < len(shape):
        return ()
    fits = 0 <= begin < end <= shape[axis] and own == (*shape[:axis], end - begin, *shape[axis + 1 :])
    return (Part(whole, part, axis, begin, True),) if fits and part.dtype == whole.dtype else ()


def _constant(value: ir.Value | None) -> int | None:
    """The one integer that an initializer holds, if it holds one."""
    if value is None or value.is_graph_input() or not value.is_initializer() or value.const_value is None:
        return None
    tensor = value.const_value
    integer = tensor.dtype in (ir.DataType.INT32, ir.DataType.INT64)
    return int(tensor.numpy().item()) if integer and tensor.size == 1 else None
