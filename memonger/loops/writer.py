"""A model whose bands run in loops: a ``Scan`` for each stage, one inside the other.

What `memonger.tiling` calls a band with stages, fine slices first and coarser ones behind them, is written as nodes of
standard ONNX: the outermost loop goes over the coarsest slices, and what runs in finer ones is a loop in its body. So
between two stages values exist in slices only, and the memory of a body's values is used again by the next slice.

A ``Scan`` reads its inputs and writes its outputs where they lie, slice by slice: nothing is copied, but for values
whose axis has others before it, of which slices aren't stretches: they are transposed around the loop. A product over
the axis that is cut, as a weight's gradient is, a loop carries from slice to slice: each adds its part to the sum so
far. What a loop reads whole, stays outside. Constants stand in the body that reads them: only there onnxruntime packs
them for its kernels. They are to lie in a file beside the model: of a message's own onnxruntime keeps a second copy.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from memonger.errors import PlanError
from memonger.ir.operators import operator_name
from memonger.ir.tensors import transposed
from memonger.ir.values import inner_graphs, static_shape
from memonger.tiling.axes import Axes
from memonger.tiling.cutting import Slicing
from memonger.tiling.slices import Band
from memonger.tiling.writer import SliceWriter, told_shape

OLDEST_OPSET = 9
"""``Scan`` as it is written here is there from this operator set on."""


class NotInLoopsError(PlanError):
    """A band that loops can't run: its slices differ in size, or sums over them stand in another loop."""


def with_loops(model: ir.Model, axes: Axes, bands: Sequence[Band], open_size: str = "") -> ir.Model:
    """The model with its bands in loops.

    Args:
        model: With static shapes, in the order that the bands' steps count. Not changed.
        axes: How its nodes are cut, in that order.
        bands: Ascending and disjoint; the slices of each stage are of one size, and lie in those of the next stage.
        open_size: The name of the first dimension of inputs and outputs, which may have any size when the model runs;
            empty: the one that it has.

    Raises:
        NotInLoopsError: slices of a stage differ in size; or the model's operator set is older than `OLDEST_OPSET`; or
            with any size, not all that depends on it runs in one loop, of slices of one.
    """
    opset = model.graph.opset_imports.get("") or OLDEST_OPSET
    if opset < OLDEST_OPSET:
        raise NotInLoopsError(f"loops need operator set {OLDEST_OPSET} or newer, and the model has {opset}.")
    copy = model.clone()
    nodes, writer, start, there = list(copy.graph), SliceWriter(copy), 0, set(inner_graphs(copy.graph))
    settle_constants(writer)
    copy.graph.remove(nodes)
    for band in bands:
        first, last = band.stages[0].begin, band.stages[-1].end
        cut = dict(zip(nodes[first:last], axes.nodes[first:last], strict=True))
        answers = {node: how for node, how in cut.items() if isinstance(how, Slicing)}
        writer.order += [*nodes[start:first], *(node for node in cut if node not in answers)]
        stages = [[node for node in nodes[one.begin : one.end] if node in answers] for one in band.stages]
        if any(len({b - a for a, b in itertools.pairwise(one.slices)}) > 1 for one in band.stages):
            raise NotInLoopsError("a loop's slices are of one size.")
        counts = [len(one.slices) - 1 for one in band.stages]
        writer.order += _BandInLoops(writer, band.size, answers, stages, counts, open_size).nodes(len(stages) - 1, 1)
        start = last
    writer.order += nodes[start:]
    copy.graph.extend(writer.order)
    writer.drop_unread()
    move_constants(writer, [body for body in inner_graphs(copy.graph) if body not in there])
    if open_size:
        _open(copy.graph, open_size)
    return copy


_ANY_SIZE = frozenset(
    (
        "Add", "AveragePool", "BatchNormalization", "Cast", "Clip", "Concat", "Conv", "Div", "Dropout", "Flatten",
        "Gemm", "GlobalAveragePool", "Identity", "LayerNormalization", "LogSoftmax", "MatMul", "MaxPool", "Mul", "Relu",
        "Scan", "Sigmoid", "Softmax", "Squeeze", "Sub", "Tanh", "Transpose", "Unsqueeze",
    )
)  # fmt: skip
"""Operators that are told no size, so that nodes outside loops take any; of ``Reshape`` it depends."""


def _open(graph: ir.Graph, name: str) -> None:
    """Let what depends on an input have any size."""
    given = set(graph.inputs)
    for node in graph:
        if given.isdisjoint(node.inputs):
            continue
        told = node.inputs[1].const_value if node.op_type == "Reshape" and node.inputs[1] is not None else None
        if node.op_type not in _ANY_SIZE and (told is None or int(told.numpy().flat[0]) > 0):
            raise NotInLoopsError(f"node '{node.name}' ({node.op_type}) runs in no loop, and depends on the open size.")
        given.update(node.outputs)
        for value in node.outputs:
            value.shape = None if not value.is_graph_output() else value.shape
    for value in dict.fromkeys((*graph.inputs, *graph.outputs)):
        value.shape = ir.Shape([name, *(static_shape(value) or (0,))[1:]])


def settle_constants(writer: SliceWriter) -> None:
    """Let nodes read constants in place of what copies or transposes them, and no number that is cast there and back.

    A body's node wouldn't know that it reads a constant; and what onnxruntime works out of one when it loads a body, it
    holds in the body's message, too. A Cast back to the type that was there it drops, even where a body in a branch
    reads its result (1.32.0), and then finds nothing to read.
    """
    for node in writer.model.graph:
        if operator_name(node) == "Cast" and (number := _cast_back(node)) is not None:
            ir.convenience.replace_all_uses_with(node.outputs[0], number)
            writer.read_no_more(node.outputs[0])
            continue
        constant = node.inputs[0] if operator_name(node) in ("Identity", "Transpose") else None
        if constant is None or constant.const_value is None or constant.is_graph_input():
            continue
        result = node.outputs[0]
        if result.is_graph_output() or constant.dtype == ir.DataType.STRING:
            continue
        if node.op_type == "Transpose":
            axes = node.attributes.get_ints("perm")
            constant = writer.initializer(f"{constant.name}.transposed", transposed(constant.const_value, axes))
        ir.convenience.replace_all_uses_with(result, constant)
        writer.read_no_more(result)


def settle_scales(writer: SliceWriter) -> None:
    """Let products of matrices be scaled behind them in place of before: what they read, or a slice of it, as it is.

    onnxruntime makes either a part of the product, with one number for all. It can't where what is scaled and the
    product stand in two graphs, as around a loop and in it; and what is scaled before has other last bits.
    """
    graph = writer.model.graph
    for node in [each for each in graph if operator_name(each) == "MatMul" and each.outputs[0].dtype == _SCALED]:
        scales = {place: scale for place, value in enumerate(node.inputs) if (scale := _scale_of(value)) is not None}
        if not scales:
            continue
        factor = np.float32(1.0)
        for place, (unscaled, number) in scales.items():
            scaled = node.inputs[place]
            node.replace_input_with(place, unscaled)
            if scaled is not None:
                writer.read_no_more(scaled)
            factor *= number
        product = node.outputs[0]
        result = ir.Value(type=product.type, shape=product.shape)
        ir.convenience.replace_all_uses_with(product, result, replace_graph_outputs=True)
        result.name, product.name = product.name, writer.fresh(f"{product.name}.unscaled")
        constant = writer.initializer(f"{result.name}.scale", ir.Tensor(np.array(factor)))
        name = writer.fresh(f"{node.name}/Mul")
        graph.insert_after(node, ir.node("Mul", [product, constant], outputs=[result], name=name))


_SCALED = ir.DataType.FLOAT
"""The type of products that onnxruntime scales on a processor."""


def _scale_of(value: ir.Value | None) -> tuple[ir.Value, np.float32] | None:
    """What is multiplied by one number, or divided by it, to give a value, and by which; None where it isn't so."""
    node = None if value is None else value.producer()
    if value is None or node is None or operator_name(node) not in ("Mul", "Div"):
        return None
    for place in (0, 1) if node.op_type == "Mul" else (1,):
        number, other = node.inputs[place], node.inputs[1 - place]
        tensor = None if number is None or number.is_graph_input() else number.const_value
        if tensor is not None and other is not None and tensor.size == 1 and static_shape(other) == static_shape(value):
            given = np.float32(tensor.numpy().reshape(())[()])
            return other, given if node.op_type == "Mul" else np.float32(1.0 / given)
    return None


def _cast_back(node: ir.Node) -> ir.Value | None:
    """What a Cast gives again that was cast to a wider type before it; None where it gives something else."""
    wide = node.inputs[0]
    before = None if wide is None else wide.producer()
    if before is None or operator_name(before) != "Cast" or node.outputs[0].is_graph_output():
        return None
    value = before.inputs[0]
    floats = [v.dtype for v in (value, wide) if v is not None and v.dtype is not None and v.dtype.is_floating_point()]
    is_back = len(floats) == 2 and floats[0] == node.attributes["to"].as_int()
    return value if is_back and floats == [ir.DataType.FLOAT, ir.DataType.DOUBLE] else None


def move_constants(writer: SliceWriter, bodies: Sequence[ir.Graph]) -> None:
    """Put constants into the bodies whose nodes read them.

    Of those outside onnxruntime knows there neither that they are constant nor how to pack them for a kernel. Where two
    bodies read one, each has it.
    """
    main = writer.model.graph
    for body in bodies:
        copies, inside = dict[ir.Value, ir.Value](), set(body)
        for node in body:
            for index, value in enumerate(node.inputs):
                if value is None or value.const_value is None or value.is_graph_input():
                    continue
                if value not in copies:
                    if value.graph is not main:
                        continue
                    is_alone = all(use.node in inside for use in value.uses()) and not value.is_graph_output()
                    name = str(value.name) if is_alone else writer.fresh(str(value.name))
                    own = ir.Value(name=name, type=value.type, shape=value.shape, const_value=value.const_value)
                    if is_alone:
                        del main.initializers[name]
                    else:
                        own.const_value = _named(value.const_value, name)
                    body.register_initializer(own)
                    copies[value] = own
                node.replace_input_with(index, copies[value])


def _named(tensor: ir.TensorProtocol, name: str) -> ir.TensorProtocol:
    """The same numbers under another name; those of a file aren't read."""
    if not isinstance(tensor, ir.ExternalTensor):
        return ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=name)
    named = type(tensor)(
        tensor.location, tensor.offset, tensor.length, tensor.dtype, shape=tensor.shape, name=name,
        base_dir=tensor.base_dir,
    )  # fmt: skip
    named.meta.update(tensor.meta)
    return named


def _sums_of(node: ir.Node, how: Slicing) -> list[ir.Value]:
    """What a node sums up slice by slice."""
    return [node.outputs[index] for index in sorted(how.sums)]


@dataclass(slots=True)
class _BandInLoops:
    """A band that is written.

    Attributes:
        size: Parts of the finest cut.
        answers: Its nodes that are cut, in order.
        stages: The same by stage.
        counts: Into how many slices each stage is cut.
        open_size: See `with_loops`.
        axis_of: The axis of each value that is cut.
        reads: The inputs that are cut, of nodes that have some.
    """

    writer: SliceWriter
    size: int
    answers: Mapping[ir.Node, Slicing]
    stages: Sequence[Sequence[ir.Node]]
    counts: Sequence[int]
    open_size: str
    axis_of: dict[ir.Value, int] = field(default_factory=dict)
    reads: dict[ir.Node, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node, how in self.answers.items():
            self.reads[node] = list(how.inputs)
            self.axis_of |= {value: how.inputs[i] for i in how.inputs if (value := node.inputs[i]) is not None}
            self.axis_of |= {node.outputs[index]: axis for index, axis in how.outputs.items()}

    def nodes(self, last: int, around: int) -> list[ir.Node]:
        """What runs the stages up to ``last`` where values are in so many slices already: a loop, or its body."""
        count, own = self.counts[last], list(self.stages[last])
        if count % around:
            raise NotInLoopsError(f"{count} slices don't lie in {around}.")
        inner = self.nodes(last - 1, count) if last else []
        for node in own:
            self._cut(node, count)
        body = [*inner, *own]
        return body if count == around or not body else self._loop(body, count, around)

    def _cut(self, node: ir.Node, count: int) -> None:
        """Let a node write slices: what it writes gets their shape, and what it is told of that, too."""
        for value in node.outputs:
            if value in self.axis_of:
                value.shape = ir.Shape(self._scaled(value, 1, count))
        dims = static_shape(node.outputs[0]) or ()
        inputs, kind = told_shape(self.writer, node, list(node.inputs), dims)
        if kind != node.op_type:  # a Squeeze that would drop the axis of one element
            node.op_type = kind
            node.attributes.clear()
            node.resize_inputs(len(inputs))
        for index, read in enumerate(inputs):
            old = node.inputs[index]
            if read is not old:
                node.replace_input_with(index, read)
                if old is not None:
                    self.writer.read_no_more(old)

    def _scaled(self, value: ir.Value, times: int, parts: int) -> list[int]:
        """The shape of a value with so many times the elements along its axis, and of that one part of so many."""
        dims, axis = list(static_shape(value) or ()), self.axis_of[value]
        dims[axis] = dims[axis] * times // parts
        return dims

    def _loop(self, body: list[ir.Node], count: int, around: int) -> list[ir.Node]:
        """A loop over the slices in one of the surrounding ones, and what makes its inputs and outputs."""
        own, runs = set(body), count // around
        made = {value for node in body for value in node.outputs}
        before, entries, inputs = list[ir.Node](), dict[ir.Value, ir.Value](), list[ir.Value]()
        for node in body:
            for index in self.reads.get(node, ()):
                value = node.inputs[index]
                if value is None or value in made:
                    continue
                if value not in entries:
                    dims = self._scaled(value, 1, count)  # it was there whole before the band
                    entries[value] = self._value(value, dims, f"{value.name}.slice")
                    before += self._cut_apart(value, runs, dims)
                    inputs.append(before[-1].outputs[0])
                node.replace_input_with(index, entries[value])
        sums = [value for node in body if node in self.answers for value in self._summed(node, around)]
        zeros, begins, totals = [list(values) for values in zip(*sums, strict=True)] or [[], [], []]
        before += zeros
        exits = [
            v for node in body for v in node.outputs if v.is_graph_output() or any(n not in own for n in v.consumers())
        ]
        crossing = (*entries, *exits)
        if self.open_size and (count != self.size or around > 1 or any(self.axis_of[value] for value in crossing)):
            raise NotInLoopsError("a dimension of any size takes one loop, of slices of one.")
        outputs, behind, gives = list[ir.Value](), list[ir.Node](), list[ir.Value]()
        for value in exits:
            inside, is_result = static_shape(value) or (), value.is_graph_output()
            joined = self._value(value, self._scaled(value, runs, 1), "")
            for user, index in [(use.node, use.idx) for use in value.uses() if use.node not in own]:
                user.replace_input_with(index, joined)
            value.name, joined.name = self.writer.fresh(f"{value.name}.slice"), value.name
            graph_outputs = self.writer.model.graph.outputs
            graph_outputs[:] = [joined if one is value else one for one in graph_outputs]
            if is_result and around == 1 and inside[0] == 1 and not self.axis_of[value]:
                # A view of what the loop stacked would be a copy; of elements without the axis they are the result
                flat = ir.Value(
                    name=self.writer.fresh(f"{value.name}.flat"), type=value.type, shape=ir.Shape(inside[1:])
                )
                sizes, label = self.writer.integers(inside[1:]), self.writer.fresh(f"{flat.name}/Reshape")
                body.append(ir.Node("", "Reshape", [value, sizes], outputs=[flat], name=label))
                gives.append(flat)
                outputs.append(joined)
                continue
            gives.append(value)
            outputs.append(self._value(value, [runs, *inside], f"{joined.name}.slices"))
            behind += self._joined(outputs[-1], inside, joined)
        name = self.writer.fresh(f"loop.{body[0].name or (*exits, *totals)[0].name}")
        kept = [v for node in body if node in self.answers for v in _sums_of(node, self.answers[node])]
        graph = ir.Graph([*begins, *entries.values()], [*kept, *gives], nodes=body, name=f"{name}.body")
        attributes = [ir.AttrGraph("body", graph), ir.AttrInt64("num_scan_inputs", len(inputs))]
        taken = [*(zero.outputs[0] for zero in zeros), *inputs]
        scan = ir.Node("", "Scan", taken, attributes, outputs=[*totals, *outputs], name=name)
        return [*before, scan, *behind]

    def _summed(self, node: ir.Node, around: int) -> Iterator[tuple[ir.Node, ir.Value, ir.Value]]:
        """Let a product add its part to what the slices before it gave: zeros, the sum so far, and that of all."""
        for value in _sums_of(node, self.answers[node]):
            if around > 1 or operator_name(node) != "Gemm" or len(node.inputs) > 2 or value.dtype is None:
                raise NotInLoopsError(f"the loop that sums up '{value.name}' stands in another, or adds more to it.")
            dims = static_shape(value) or ()
            begin, total, zero = (ir.Value(type=value.type, shape=value.shape) for _ in range(3))
            ir.convenience.replace_all_uses_with(value, total, replace_graph_outputs=True)
            total.name, value.name = value.name, self.writer.fresh(f"{value.name}.so_far")
            begin.name, zero.name = (self.writer.fresh(f"{total.name}.{name}") for name in ("sum", "zeros"))
            node.resize_inputs(3)
            node.replace_input_with(2, begin)
            node.attributes.pop("beta", None)
            filled = {"value": ir.Tensor(np.zeros(1, value.dtype.numpy()), dtype=value.dtype)}
            name, sizes = self.writer.fresh(f"{zero.name}/ConstantOfShape"), self.writer.integers(dims)
            made = ir.node("ConstantOfShape", [sizes], filled, outputs=[zero], name=name)
            yield made, begin, total

    def _cut_apart(self, value: ir.Value, runs: int, dims: Sequence[int]) -> list[ir.Node]:
        """Nodes, the last giving the slices of a value, ``[runs, *dims]``: a copy where axes are before its own."""
        axis, name = self.axis_of[value], f"{value.name}.slices"
        if math.prod(dims[:axis]) == 1:
            made = [self._reshape(value, [runs, *dims], name)]
        else:
            apart = self._reshape(value, [*dims[:axis], runs, *dims[axis:]], f"{value.name}.apart")
            order = [axis, *range(axis), *range(axis + 1, len(dims) + 1)]
            made = [apart, self._transpose(apart.outputs[0], order, name)]
        self.reads[made[0]] = [0]
        return made

    def _joined(self, slices: ir.Value, dims: Sequence[int], result: ir.Value) -> list[ir.Node]:
        """Nodes, the last giving a value, of its slices ``[runs, *dims]``: likewise a copy then."""
        axis, made = self.axis_of[result], list[ir.Node]()
        if math.prod(dims[:axis]) != 1:
            order = [*range(1, axis + 1), 0, *range(axis + 1, len(dims) + 1)]
            made.append(self._transpose(slices, order, f"{result.name}.apart"))
            slices = made[0].outputs[0]
        made.append(self._reshape(slices, static_shape(result) or (), "", result))
        return made

    def _transpose(self, value: ir.Value, order: Sequence[int], name: str) -> ir.Node:
        dims = static_shape(value) or ()
        result = ir.Value(name=self.writer.fresh(name), type=value.type, shape=ir.Shape([dims[at] for at in order]))
        label = self.writer.fresh(f"{result.name}/Transpose")
        return ir.node("Transpose", [value], {"perm": order}, outputs=[result], name=label)

    def _value(self, like: ir.Value, dims: Sequence[int], name: str) -> ir.Value:
        made = ir.Value(name=self.writer.fresh(name) if name else None, type=like.type, shape=ir.Shape(dims))
        if like in self.axis_of:
            self.axis_of[made] = self.axis_of[like]
        return made

    def _reshape(self, value: ir.Value, dims: Sequence[int], name: str, result: ir.Value | None = None) -> ir.Node:
        if result is None:
            result = ir.Value(name=self.writer.fresh(name), type=value.type, shape=ir.Shape(dims))
        shape = self.writer.integers([-1, *dims[1:]] if self.open_size else dims)
        return ir.Node(
            "", "Reshape", [value, shape], outputs=[result], name=self.writer.fresh(f"{result.name}/Reshape")
        )
