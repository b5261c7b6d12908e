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


def parts_of(node: ir.Node) -> tuple[Part, ...]:
    """What a node that is marked as one that cuts or joins does; nothing where it isn't marked or does more.

    All shapes are static and fit: nothing is believed that strangers wrote into a file.
    """
    if WINDOW not in node.metadata_props or node.domain or any(value is None for value in node.inputs):
        return ()
    if node.op_type == "Concat":
        return _joined(node)
    return _cut(node) if node.op_type == "Slice" else ()


def _joined(node: ir.Node) -> tuple[Part, ...]:
    whole, found, begin = node.outputs[0], list[Part](), 0
    shape = static_shape(whole)
    attribute = node.attributes.get("axis")
    if shape is None or attribute is None or not -len(shape) <= attribute.as_int() < len(shape):
        return ()
    axis = attribute.as_int() % len(shape)
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
    whole, part = node.inputs[0], node.outputs[0]
    settings = [None if value is None else value.const_value for value in node.inputs[1:]]
    if whole is None or len(settings) not in (3, 4) or any(tensor is None or tensor.size != 1 for tensor in settings):
        return ()
    if any(value is not None and value.is_graph_input() for value in node.inputs[1:]):
        return ()
    begin, end, axis, *steps = (int(tensor.numpy().reshape(())) for tensor in settings if tensor is not None)
    shape, own = static_shape(whole), static_shape(part)
    if shape is None or own is None or steps not in ([], [1]) or not 0 <= axis < len(shape):
        return ()
    fits = 0 <= begin < end <= shape[axis] and own == (*shape[:axis], end - begin, *shape[axis + 1 :])
    return (Part(whole, part, axis, begin, True),) if fits and part.dtype == whole.dtype else ()
