"""A model whose nodes stand in a branch: onnxruntime takes no second block of memory for its values.

In the first run of a graph onnxruntime asks its arena for one value after the other. From the second run on it takes
one block in which all of them lie, worked out from the first, and what the first run was given stays with the arena:
a model takes about twice what its values need. A graph that is given anything but tensors gets no such block. So all
nodes stand in a branch of an ``If`` that reads a sequence, an empty one that is made beside it, of which nothing is
known when the model is loaded; bodies of loops read it, too. The other branch never runs. A branch writes its results
where they are to lie: nothing is copied, and nodes and kernels are those that there were.

A value of a shape that comes again later takes the memory of the first one, which onnxruntime keeps until then: of
layers that are alike the memory of each shape is there in all of them. A branch knows of no other. So within the branch
the nodes stand in branches again, a section of them in each, between which little is alive.

Told the sizes of a batch, onnxruntime makes one node of a product and the sum behind it, which rounds otherwise; of a
batch that is open it doesn't. So where that is open in the model as it was, it isn't told here: what shapes are told by
is added to the length of the sequence, which is 0. And where such a size has no name, either, no value takes another's
memory, and none waits for one that comes later: of many values of few shapes, as a detector's, that takes least. But
then no sum takes the memory of what it reads: of residual layers that takes more.
"""

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Literal

import networkx as nx
import numpy as np
import onnx_ir as ir

from memonger.graph import aliasing
from memonger.ir.operators import facts, operator_name
from memonger.ir.values import (
    add_initializer,
    all_values,
    graphs,
    inner_graphs,
    nbytes,
    read_values,
    static_shape,
    subgraphs,
)
from memonger.loops.rows import MAKES_BLOCKS
from memonger.loops.writer import move_constants, settle_constants
from memonger.tiling.axes import WITHIN
from memonger.tiling.writer import SliceWriter

_OLDEST_OPSET = 11
"""Sequences are there from this operator set on."""

_INTEGER_MAX_OPSET = 12
"""From this operator set on ``Max`` takes integers."""

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


Sizes = Literal["told", "open", "nameless"]
"""What onnxruntime knows of the first dimension of inputs, and of slices: its size; that two have the same; nothing."""


def in_branch(
    model: ir.Model, sizes: Sizes = "told", divided: bool = True, unranked: Collection[str] = ()
) -> ir.Model:  # fmt: skip
    """The model with its nodes, and the constants that they read, in a branch that reads a sequence.

    Args:
        model: As `can_be_in_branch` allows it. Not changed.
        sizes: What onnxruntime is to know of first dimensions, as `Sizes` says.
        divided: Whether the branch is divided into sections, where that makes sense.
        unranked: Where it isn't told sizes, names of values of which it isn't told how many dimensions they have.
    """
    copy = model.clone()
    graph, writer = copy.graph, SliceWriter(copy)
    settle_constants(writer)
    writer.drop_unread()
    outside = _of_constants(graph)
    graph.remove(outside)
    sections = _sections(list(graph), graph.outputs) if divided else []
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
    number, is_empty = (ir.Value(name=writer.fresh(f"branch.{name}")) for name in ("length", "is_empty"))
    number.type, is_empty.type = ir.TensorType(ir.DataType.INT64), ir.TensorType(ir.DataType.BOOL)
    zero = writer.initializer("branch.zero", ir.Tensor(np.array(0, np.int64)))
    bodies = [_put(writer, nodes, sequence, is_empty, _SECTION) for nodes in sections] if len(sections) > 1 else []
    branch = _put(writer, list(graph), sequence, is_empty, "branch")
    graph.insert_before(graph[0], outside)
    made: dict[str, tuple[list[ir.Value], ir.Value]] = {
        "SequenceEmpty": ([], sequence), "SequenceLength": ([sequence], number), "Equal": ([number, zero], is_empty)
    }  # fmt: skip
    for operator, (read, result) in made.items():
        name = writer.fresh(f"branch/{operator}")
        graph.insert_before(graph[-1], ir.node(operator, read, outputs=[result], name=name))
    if sizes != "told":
        _tell_no_sizes(writer, branch, bodies, number, unranked, sizes == "nameless")
    move_constants(writer, [branch, *bodies])
    return copy


def with_first_piece(model: ir.Model, size: int) -> ir.Model:
    """A model in a branch that asks for a piece of memory before that branch, and gives it back.

    onnxruntime's arena takes regions as values ask for them, each twice as large as the last; no value lies in two, and
    what is left over in one is lost. A piece of more than half a region has it take that one first.

    Args:
        model: What `in_branch` gives. Not changed.
        size: Bytes of the piece, which each run writes to.
    """
    copy = model.clone()
    writer, branch = SliceWriter(copy), copy.graph[-1]
    sequence = next(node.outputs[0] for node in copy.graph if node.op_type == "SequenceEmpty")
    then, other = (ir.Graph([], [], nodes=[], name=writer.fresh(f"first.{name}")) for name in ("then", "else"))
    length = _add_length(writer, then, sequence, "first.then")
    sizes, piece, count, given, is_given = (
        ir.Value(name=writer.fresh(f"first.{name}"), type=ir.TensorType(dtype), shape=ir.Shape(dims))
        for name, dtype, dims in (
            ("sizes", ir.DataType.INT64, [1]), ("piece", ir.DataType.UINT8, [size]), ("size", ir.DataType.INT64, []),
            ("given", ir.DataType.INT64, []), ("is_given", ir.DataType.BOOL, []),
        )
    )  # fmt: skip
    told = add_initializer(then, writer.fresh("first.bytes"), np.array([size], np.int64))
    zero = {"value": ir.Tensor(np.zeros(1, np.uint8))}
    then.append(ir.node("Add", [length, told], outputs=[sizes], name=writer.fresh("first/Add")))
    then.append(ir.node("ConstantOfShape", [sizes], zero, outputs=[piece], name=writer.fresh("first/ConstantOfShape")))
    then.append(ir.node("Size", [piece], outputs=[count], name=writer.fresh("first/Size")))
    then.outputs[:] = [count]
    _add_length(writer, other, sequence, "first.else")
    branches = {"then_branch": then, "else_branch": other}
    asks = ir.node("If", [branch.inputs[0]], branches, outputs=[given], name=writer.fresh("first/If"))
    bytes_ = writer.initializer("first.size", ir.Tensor(np.array(size, np.int64)))
    equal = ir.node("Equal", [given, bytes_], outputs=[is_given], name=writer.fresh("first/Equal"))
    copy.graph.insert_before(branch, [asks, equal])
    branch.replace_input_with(0, is_given)
    return copy


def forms_in_branch(
    model: ir.Model, is_open: bool = False, unranked: Collection[str] = ()
) -> Iterator[Sequence[ir.Model]]:
    """The model in a branch, in sections and without, with sizes that have names and without.

    Args:
        model: As `can_be_in_branch` allows it. Not changed.
        is_open: Whether sizes aren't to be known; forms in which they are come behind.
        unranked: See `in_branch`.
    """
    groups: list[list[Sizes]] = [["open", "nameless"], ["told"]] if is_open else [["told", "nameless"]]
    for group in groups:
        forms = [in_branch(model, sizes, unranked=unranked) for sizes in group]
        if any(str(graph.name).startswith(_SECTION) for graph in inner_graphs(forms[0].graph)):
            forms += [in_branch(model, sizes, False, unranked) for sizes in group]
        yield forms


_SECTION = "section"
"""What the names of sections begin with."""


def _put(
    writer: SliceWriter, nodes: Sequence[ir.Node], sequence: ir.Value, is_empty: ir.Value, name: str
) -> ir.Graph:  # fmt: skip
    """Put the first nodes of the model into a branch of an ``If``, which comes behind the others. Returns that."""
    graph, inside, insides = writer.model.graph, set(nodes), dict[ir.Value, ir.Value]()
    inside.update(node for outer in nodes for node in _inner_nodes(outer))
    graph.remove(nodes)
    for value in [value for node in nodes for value in node.outputs]:
        users = [use for use in value.uses() if use.node not in inside]
        if users or value in graph.outputs:
            result = ir.Value(type=value.type, shape=value.shape)
            graph.outputs[:] = [result if each is value else each for each in graph.outputs]
            for use in users:
                use.node.replace_input_with(use.idx, result)
            result.name, value.name = value.name, writer.fresh(f"{value.name}.inside")
            insides[result] = value
    then = ir.Graph([], list(insides.values()), nodes=nodes, name=writer.fresh(f"{name}.then"))
    _add_length(writer, then, sequence, f"{name}.then")
    _fix_order(writer, then)
    other = ir.Graph([], [], nodes=[], name=writer.fresh(f"{name}.else"))
    count = _add_length(writer, other, sequence, f"{name}.else")
    for place, result in enumerate(insides):
        other.outputs.insert(place, _filled(writer, other, count, result))
    lengths = ir.Value(name=writer.fresh(f"{name}.lengths"), type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
    attributes = {"then_branch": then, "else_branch": other}
    graph.append(ir.node("If", [is_empty], attributes, outputs=[*insides, lengths], name=writer.fresh(f"{name}/If")))
    return then


_WEIGHT_BYTES = 4096
"""Constants of fewer bytes may be part of what onnxruntime makes one node of."""

_PACKS = frozenset(("Gather", "GRU", "Gemm", "LSTM", "MatMul", "RNN"))
"""Operators whose kernels take weights from around a branch as they take them within it."""


def _of_constants(graph: ir.Graph) -> list[ir.Node]:
    """Nodes that compute weights of others out of constants, as of a type of fewer bits: they may stand outside.

    Of what it works out when it loads a branch onnxruntime keeps a second copy; of what it works out around it, none.
    What takes integers out of their scale stays: onnxruntime multiplies the integers.
    """
    found, made = list[ir.Node](), set[ir.Value]()
    large = {v for v in graph.initializers.values() if not v.is_graph_input() and (nbytes(v) or 0) >= _WEIGHT_BYTES}
    for node in graph:
        given = [value for value in node.inputs if value is not None]
        are_constant = all(v in made or (v.const_value is not None and not v.is_graph_input()) for v in given)
        is_computed = not facts(node).random and not subgraphs(node) and node.op_type != "DequantizeLinear"
        if is_computed and are_constant and not large.isdisjoint(given):
            found.append(node)
            made.update(node.outputs)
            large.update(node.outputs)
    parts = nx.Graph([(value.producer(), node) for node in found for value in node.inputs if value in made])
    parts.add_nodes_from(found)
    inside = set[ir.Node]()
    for part in nx.connected_components(parts):
        values = [value for node in part for value in node.outputs]
        users = {user for value in values for user in value.consumers()} - part
        are_packed = all(user.graph is graph and user.op_type in _PACKS for user in users)
        inside |= set() if are_packed and not any(value.is_graph_output() for value in values) else part
    return [node for node in found if node not in inside]


LESS, MUCH = 2, 8
"""Of what a section made there is at its end a half of what there was at its worst step, or less; and less by an eighth
of what there is at the worst step of the model, or more."""


def _sections(nodes: Sequence[ir.Node], outputs: Sequence[ir.Value]) -> list[Sequence[ir.Node]]:
    """The nodes in sections, which end where little of what they made is alive: that passes to the next.

    They don't end between nodes that onnxruntime may make one of, or lay out images for (`_may_be_one`, `_can_pass`).
    """
    owner, last, steps = dict[ir.Value, ir.Value](), dict[ir.Value, int](), len(nodes)
    for step, node in enumerate(nodes):
        for source, target in aliasing.view_pairs(node):
            if (given := node.inputs[source]) is not None:
                owner[node.outputs[target]] = owner.get(given, given)
        last |= {owner.get(value, value): step for value in read_values(node)}
    last |= {owner.get(value, value): steps for value in outputs}
    made = [
        (s, v, nbytes(v) or 0) for s, node in enumerate(nodes) for v in node.outputs if v in last and v not in owner
    ]

    def alive(begin: int) -> tuple[np.ndarray, np.ndarray]:
        """Bytes of what is made from a step on: what there is of it within each step, and before it."""
        within, before = np.zeros((2, steps), np.int64)
        for step, value, size in made:
            if step >= begin:
                within[step : last[value] + 1] += size
                before[step + 1 : last[value] + 1] += size
        return within, before

    in_one, step_of = np.zeros(steps, bool), {node: step for step, node in enumerate(nodes)}
    made_at = {value: step for step, node in enumerate(nodes) for value in node.outputs}
    for step, node in enumerate(nodes):
        for user in (node, *_inner_nodes(node)):
            for value in (value for value in user.inputs if value in made_at and not _can_pass(value, user)):
                in_one[made_at[value] + 1 : step + 1] = True
        for user in (user for v in node.outputs for user in v.consumers() if user in step_of):
            if _may_be_one(node, user):
                in_one[step + 1 : step_of[user] + 1] = True
    (within, before), ends, lowest = alive(0), [0], 0
    much = within.max(initial=0) / MUCH
    for step in range(1, steps):
        worst = within[ends[-1] : step].max()
        if not in_one[step] and worst >= max(before[step] + much, LESS * before[step]):
            lowest = step if lowest <= ends[-1] or before[step] < before[lowest] else lowest
        if lowest > ends[-1] and within[step] >= before[lowest] + much:
            ends.append(lowest)
            within, before = alive(lowest)
    return [nodes[begin:end] for begin, end in itertools.pairwise([*ends, steps])]


def _inner_nodes(node: ir.Node) -> Iterator[ir.Node]:
    """The nodes in the bodies of a node."""
    for body in subgraphs(node):
        for each in (body, *inner_graphs(body)):
            yield from each


def _can_pass(value: ir.Value, user: ir.Node) -> bool:
    """Whether a value can pass to a node in another section: its size is known, and it isn't an image that onnxruntime
    may hand over in blocks."""
    is_read_so = user.op_type in _IN_BLOCKS and user.attributes.get_int("axis", 1) == 1
    return value.dtype in _FILLED and static_shape(value) is not None and not (_is_image(value) and is_read_so)


def _is_image(value: ir.Value) -> bool:
    """Whether a value may be an image whose channels lie in blocks where it is made."""
    producer = value.producer()
    return len(value.shape or ()) == 4 and producer is not None and producer.op_type in _IN_BLOCKS


_IN_BLOCKS = MAKES_BLOCKS | WITHIN
"""Operators that may write channels in blocks, which each section would have to lay out anew."""


def _may_be_one(node: ir.Node, user: ir.Node) -> bool:
    """Whether onnxruntime may make one node of two, the second of which reads the first: that may round otherwise."""
    if node.op_type in _MOVES | _NORMALIZES or user.op_type in _MOVES:
        return node.op_type == "Transpose" and user.op_type in ("Gemm", "MatMul")
    return user.op_type in _NORMALIZES or len(node.outputs[0].uses()) == 1


_MOVES = frozenset(
    (
        "Concat", "Expand", "Identity", "If", "Loop", "Pad", "Reshape", "Scan", "Slice", "Split", "Squeeze",
        "Tile", "Transpose", "Unsqueeze",
    )
)  # fmt: skip
"""Operators that only move what they read, or run bodies."""

_NORMALIZES = frozenset(
    ("GroupNormalization", "InstanceNormalization", "LayerNormalization", "RMSNormalization", "Softmax")
)
"""Operators that onnxruntime makes one with a sum before them, and with nothing behind."""

_TOLD = ("ConcatFromSequence", "If", "Loop", "Reshape", "Scan")
"""Operators whose results keep the other dimensions where the first is not to be known: no inference tells them."""


def _tell_no_sizes(
    writer: SliceWriter, branch: ir.Graph, sections: Collection[ir.Graph], zero: ir.Value, unranked: Collection[str],
    nameless: bool,
) -> None:  # fmt: skip
    """Let first dimensions be unknown until the model runs: of its inputs, of slices, of what shapes are told for.

    What is nameless has no name for such a size, but in bodies of loops, where sizes are known.
    """
    inside = [branch, *sections] if nameless else [branch, *inner_graphs(branch)]
    reshapes = [node for graph in inside for node in graph if operator_name(node) == "Reshape"]
    graph = writer.model.graph
    viewed = [v for v in graph.inputs if v.shape and (nameless or static_shape(v)) and v.uses()]
    for value in viewed:
        view = ir.Value(name=writer.fresh(f"{value.name}.view"), type=value.type, shape=value.shape)
        for user, place in list(value.uses()):
            user.replace_input_with(place, view)
        sizes = writer.integers([0] * len(value.shape or ()))  # as they are
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
            dims = value.shape.dims if nameless and value.shape is not None else static_shape(value)
            if dims and value.name in unranked and value not in each.outputs:
                value.shape = None
            elif dims and value in kept.union(each.inputs).difference(() if each in sections else each.outputs):
                made = value.producer()
                is_stack = "Scan" in (made and made.op_type, *(user.op_type for user in value.consumers()))
                open_dims = min(len(dims), 2 if is_stack else 1)  # of a stack of slices their number and a slice's size
                # one name means one size: onnxruntime computes in place by names
                size = f"{(branch if each in sections else each).name}.size"
                names = [None if nameless else f"{size}{dim}" for dim in dims[:open_dims]]
                value.shape = ir.Shape([*names, *dims[open_dims:]])
            elif dims and not (each is branch and value in each.outputs):
                value.shape = None


def _add_length(writer: SliceWriter, graph: ir.Graph, sequence: ir.Value, name: str) -> ir.Value:
    """Let a graph read the sequence: its length is another of its results, so that nothing drops the node."""
    result = ir.Value(name=writer.fresh(f"{name}.length"), type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([]))
    graph.append(ir.node("SequenceLength", [sequence], outputs=[result], name=writer.fresh(f"{name}/SequenceLength")))
    graph.outputs.append(result)
    return result


def _fix_order(writer: SliceWriter, graph: ir.Graph) -> None:
    """Let a branch make images that it gives in the order in which they are written, each as soon as it can be.

    The optimizer adds what takes an image out of its blocks in another order each time, and in that a run makes those
    that nothing reads: it takes now more, now less. So their sizes are read, for the branch's length, the last first.
    """
    step_of = {value: step for step, node in enumerate(graph) for value in node.outputs}
    images = [value for value in graph.outputs if value in step_of and _is_image(value)]
    if len(images) < 2 or (writer.model.graph.opset_imports.get("") or 0) < _INTEGER_MAX_OPSET:
        return
    read, length = list[ir.Value](), graph.outputs[-1]
    for value in sorted(images, key=step_of.__getitem__, reverse=True):
        read.append(ir.Value(name=writer.fresh(f"{value.name}.size"), type=length.type, shape=ir.Shape([])))
        graph.append(ir.node("Size", [value], outputs=[read[-1]], name=writer.fresh(f"{value.name}/Size")))
    most = ir.Value(name=writer.fresh(f"{length.name}.most"), type=length.type, shape=ir.Shape([]))
    graph.append(ir.node("Max", [*read, length], outputs=[most], name=writer.fresh(f"{most.name}/Max")))
    graph.outputs[-1] = most


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
