"""A model whose nodes stand in a branch: onnxruntime takes no second block of memory for its values.

In the first run of a graph onnxruntime asks its arena for one value after the other. From the second run on it takes
one block in which all of them lie, worked out from the first, and what the first run was given stays with the arena:
a model takes about twice what its values need. A graph that is given anything but tensors gets no such block. So all
nodes stand in a branch of an ``If`` that reads a sequence, an empty one that is made beside it, of which nothing is
known when the model is loaded; bodies of loops read it, too. The other branch never runs. A branch writes its results
where they are to lie: nothing is copied, and nodes and kernels are those that there were.

Told the sizes of a batch, onnxruntime makes one node of a product and the sum behind it, which rounds otherwise; of a
batch that is open it doesn't. So where that is open in the model as it was, it isn't told here: what shapes are told by
is added to the length of the sequence, which is 0.
"""

import numpy as np
import onnx_ir as ir

from memonger.ir.operators import operator_name
from memonger.ir.values import add_initializer, all_values, graphs, inner_graphs, static_shape
from memonger.loops.writer import move_constants, settle_constants
from memonger.tiling.writer import SliceWriter

_OLDEST_OPSET = 13
"""Sequences are older; nodes that take any type are there from this operator set on."""

_FILLED = frozenset(
    (
        ir.DataType.BOOL, ir.DataType.DOUBLE, ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.INT8,
        ir.DataType.INT16, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.UINT8, ir.DataType.UINT16,
        ir.DataType.UINT32, ir.DataType.UINT64, ir.DataType.STRING,
    )
)  # fmt: skip
"""Types of results that the branch which never runs can give, by Cast and Expand."""


def can_be_in_branch(model: ir.Model) -> bool:
    """Whether a model's nodes can stand in a branch and gain by that: all that it is given and gives are tensors."""
    graph = model.graph
    is_new = (graph.opset_imports.get("") or 0) >= _OLDEST_OPSET
    are_tensors = all(type(value.type) is ir.TensorType for value in (*graph.inputs, *graph.outputs))
    return is_new and are_tensors and all(value.dtype in _FILLED for value in graph.outputs)


BATCHES = 2, 3
"""Two sizes of a batch, of which those of other values tell whether they depend on it."""


def open_batch(model: ir.Model) -> str | None:
    """The name of the first dimension of inputs, if no other is open; None where it has none."""
    dims = [dim for value in model.graph.inputs for dim in (value.shape or (ir.SymbolicDim(None),))]
    names = {dim.value for dim in dims if isinstance(dim, ir.SymbolicDim)}
    firsts = {dim.value for v in model.graph.inputs for dim in (v.shape or ())[:1] if isinstance(dim, ir.SymbolicDim)}
    return next(iter(names)) if len(names) == 1 and names == firsts else None


def add_sizes(model: ir.Model, batch: str, few: ir.Model, many: ir.Model) -> None:
    """Give values the sizes that don't depend on the batch, which stays open, and types where they have none.

    onnxruntime computes in place only what it knows to have one size; of a shape that is computed it knows none.

    Args:
        model: Changed.
        batch: The name of its open dimension.
        few: The model with the first of `BATCHES`, shapes inferred.
        many: With the second.
    """
    least, most = ({v.name: v for v in all_values(each.graph) if static_shape(v)} for each in (few, many))
    inner = (v for node in model.graph for v in node.outputs if static_shape(v) is None and not v.is_graph_output())
    for value in (value for value in inner if value.name in least and value.name in most):
        pairs = list(zip(*(static_shape(each[value.name]) or () for each in (least, most)), strict=False))
        if all(a == b or (a, b) == BATCHES for a, b in pairs):
            value.shape = ir.Shape([a if a == b else batch for a, b in pairs])
            value.type = value.type or least[value.name].type


def in_branch(model: ir.Model, is_open: bool = False) -> ir.Model:
    """The model with its nodes, and the constants that they read, in a branch that reads a sequence.

    Args:
        model: As `can_be_in_branch` allows it. Not changed.
        is_open: Whether onnxruntime is not to know the sizes of the first dimension of inputs, and of slices.
    """
    copy = model.clone()
    graph, writer = copy.graph, SliceWriter(copy)
    settle_constants(writer)
    writer.drop_unread()
    sequence = ir.Value(name=writer.fresh("branch.sequence"), type=ir.SequenceType(ir.TensorType(ir.DataType.FLOAT)))
    for scan in [node for each in graphs(copy) for node in each if operator_name(node) == "Scan"]:
        body = scan.attributes["body"].as_graph()
        _add_length(writer, body, sequence, f"{scan.name}.branch")
        for each in ("scan_output_axes", "scan_output_directions"):
            if (given := scan.attributes.get_ints(each)) is not None:
                scan.attributes.add(ir.AttrInt64s(each, [*given, 0]))
        scan.resize_outputs(len(scan.outputs) + 1)
        scan.outputs[-1].name = writer.fresh(f"{scan.name}.lengths")
        scan.outputs[-1].type = ir.TensorType(ir.DataType.INT64)
    nodes, insides = list(graph), dict[ir.Value, ir.Value]()
    graph.remove(nodes)
    for value in [value for value in dict.fromkeys(graph.outputs) if value.producer() is not None]:
        result = ir.Value(type=value.type, shape=value.shape)
        graph.outputs[:] = [result if each is value else each for each in graph.outputs]
        result.name, value.name = value.name, writer.fresh(f"{value.name}.inside")
        insides[result] = value
    then = ir.Graph([], list(insides.values()), nodes=nodes, name=writer.fresh("branch.then"))
    _add_length(writer, then, sequence, "branch.then")
    other = ir.Graph([], [], nodes=[], name=writer.fresh("branch.else"))
    count = _add_length(writer, other, sequence, "branch.else")
    for place, result in enumerate(insides):
        other.outputs.insert(place, _filled(writer, other, count, result))
    lengths = ir.Value(name=writer.fresh("branch.lengths"), type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
    graph.append(ir.node("SequenceEmpty", [], outputs=[sequence], name=writer.fresh("branch/SequenceEmpty")))
    number, is_empty = (ir.Value(name=writer.fresh(f"branch.{name}")) for name in ("length", "is_empty"))
    zero = writer.initializer("branch.zero", ir.Tensor(np.array(0, np.int64)))
    graph.append(ir.node("SequenceLength", [sequence], outputs=[number], name=writer.fresh("branch/SequenceLength")))
    graph.append(ir.node("Equal", [number, zero], outputs=[is_empty], name=writer.fresh("branch/Equal")))
    attributes = {"then_branch": then, "else_branch": other}
    graph.append(ir.node("If", [is_empty], attributes, outputs=[*insides, lengths], name=writer.fresh("branch/If")))
    number.type, is_empty.type = ir.TensorType(ir.DataType.INT64), ir.TensorType(ir.DataType.BOOL)
    if is_open:
        _tell_no_sizes(writer, then, number)
    move_constants(writer, [then])
    return copy


_TOLD = ("ConcatFromSequence", "Loop", "Reshape", "Scan")
"""Operators whose results keep the other dimensions where the first is not to be known: no inference tells them."""


def _tell_no_sizes(writer: SliceWriter, branch: ir.Graph, zero: ir.Value) -> None:
    """Let first dimensions be unknown until the model runs: of its inputs, of slices, of what shapes are told for."""
    inside = [branch, *inner_graphs(branch)]
    reshapes = [node for graph in inside for node in graph if operator_name(node) == "Reshape"]
    graph = writer.model.graph
    for value in [value for value in graph.inputs if static_shape(value) and value.uses()]:
        view = ir.Value(name=writer.fresh(f"{value.name}.view"), type=value.type, shape=value.shape)
        for user, place in list(value.uses()):
            user.replace_input_with(place, view)
        sizes = writer.integers(static_shape(value) or ())
        reshapes.append(ir.node("Reshape", [value, sizes], outputs=[view], name=writer.fresh(f"{view.name}/Reshape")))
        branch.insert_before(branch[0], reshapes[-1])
    for node in reshapes:
        told = node.inputs[1]
        if told is None or told.const_value is None or node.graph is None:
            continue
        sizes = ir.Value(name=writer.fresh(f"{node.name}.sizes"), type=told.type, shape=told.shape)
        name = writer.fresh(f"{sizes.name}/Add")
        node.graph.insert_before(node, ir.node("Add", [told, zero], outputs=[sizes], name=name))
        node.replace_input_with(1, sizes)
    for each in inside:
        kept = {value for node in each if node.op_type in _TOLD for value in node.outputs}
        for value in (*each.inputs, *(value for node in each for value in node.outputs)):
            dims = static_shape(value)
            if dims and value in kept.union(each.inputs).difference(each.outputs):
                made = value.producer()
                is_stack = "Scan" in (made and made.op_type, *(user.op_type for user in value.consumers()))
                open_dims = min(len(dims), 2 if is_stack else 1)  # of a stack of slices their number and a slice's size
                # one name means one size: onnxruntime computes in place by names
                value.shape = ir.Shape([*(f"{each.name}.size{dim}" for dim in dims[:open_dims]), *dims[open_dims:]])
            elif dims and not (each is branch and value in each.outputs):
                value.shape = None


def _add_length(writer: SliceWriter, graph: ir.Graph, sequence: ir.Value, name: str) -> ir.Value:
    """Let a graph read the sequence: its length is another of its results, so that nothing drops the node."""
    result = ir.Value(name=writer.fresh(f"{name}.length"), type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
    graph.append(ir.node("SequenceLength", [sequence], outputs=[result], name=writer.fresh(f"{name}/SequenceLength")))
    graph.outputs.append(result)
    return result


def _filled(writer: SliceWriter, graph: ir.Graph, count: ir.Value, like: ir.Value) -> ir.Value:
    """What the branch that never runs gives for a result: numbers of its type, of sizes that may be its own."""
    assert like.dtype is not None
    dims = [dim if isinstance(dim, int) else 1 for dim in like.shape or ()]
    cast = ir.Value(name=writer.fresh(f"{like.name}.number"), type=like.type, shape=ir.Shape([]))
    filled = ir.Value(name=writer.fresh(f"{like.name}.filled"), type=like.type, shape=ir.Shape(dims))
    sizes = add_initializer(graph, writer.fresh(f"{like.name}.sizes"), np.array(dims, np.int64))
    to = {"to": like.dtype.value}
    graph.append(ir.node("Cast", [count], to, outputs=[cast], name=writer.fresh(f"{cast.name}/Cast")))
    graph.append(ir.node("Expand", [cast, sizes], outputs=[filled], name=writer.fresh(f"{filled.name}/Expand")))
    return filled
