"""Branches of ``If`` that don't go with the sizes that are planned for.

A model may have a branch for each of several sizes of its inputs, of which a run takes the right one. Once sizes are
fixed ONNX's inference and onnxruntime's optimizer compute shapes in the others too, find that they contradict each
other, and refuse the model. So such branches read what they take from outside through a Slice of all of it, whose
bounds only the run can tell.
"""

import itertools
from collections.abc import Iterator

import onnx_ir as ir

from memonger.ir.model import Model
from memonger.ir.values import dense, subgraphs


def has_branches(model: Model) -> bool:
    """Whether the model has branches of its own."""
    return any(node.op_type == "If" and not node.domain for node in model.graph)


def open_branches(model: Model) -> bool:
    """A pass: sizes are open in branches."""
    names = (f"memonger.branch{number}" for number in itertools.count())
    found = False
    for node in model.graph:
        if node.op_type == "If" and not node.domain and node.inputs[0] is not None:
            for branch in subgraphs(node):
                found |= _open(branch, node.inputs[0], names)
    return found


def _open(branch: ir.Graph, condition: ir.Value, names: Iterator[str]) -> bool:
    """Have a branch read the values that it takes from outside through Slices, but for scalars and constants."""
    nodes = list(branch.all_nodes())
    inside = {*branch.inputs, *branch.initializers.values(), *(v for node in nodes for v in node.outputs)}
    for graph in (graph for node in nodes for graph in subgraphs(node)):
        inside |= {*graph.inputs, *graph.initializers.values()}
    taken = dict.fromkeys(value for node in nodes for value in node.inputs if value is not None and value not in inside)
    made: list[ir.Node] = []
    for value in taken:
        if value.is_initializer() or not dense(value) or value is condition or not value.shape:
            continue
        more = _node("Cast", [condition], names, ir.AttrInt64("to", int(ir.DataType.INT64)))
        size = _node("Shape", [value], names)
        begin = _node("Sub", [size.outputs[0], size.outputs[0]], names)
        end = _node("Add", [size.outputs[0], more.outputs[0]], names)  # what is beyond the value's end is left out
        whole = _node("Slice", [value, begin.outputs[0], end.outputs[0]], names)
        for reader in nodes:
            for place, read in enumerate(reader.inputs):
                if read is value:
                    reader.replace_input_with(place, whole.outputs[0])
        whole.outputs[0].type = value.type
        made += [more, size, begin, end, whole]
    if made:
        branch.insert_before(branch[0], made)
    return bool(made)


def _node(op: str, inputs: list[ir.Value], names: Iterator[str], *attributes: ir.Attr) -> ir.Node:
    node = ir.Node("", op, inputs, attributes, name=next(names))
    node.outputs[0].name = next(names)
    return node
