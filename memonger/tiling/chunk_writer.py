"""What chunks are written with: slices of values and constants, joined values, targets of shapes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from memonger.graph.aliasing import windows
from memonger.ir import training_roles
from memonger.ir.marks import WINDOW
from memonger.ir.names import fresh
from memonger.ir.parts import elements
from memonger.ir.tensors import FILES
from memonger.ir.values import all_values, graphs, static_shape, tensor_shape


@dataclass(slots=True)
class SliceWriter:
    """The model that is written.

    Attributes:
        model: Its nodes are replaced by ``order`` at the end.
        mark: What the nodes have in their metadata that cut and join.
        is_ranged: Whether the axis may be shorter than it is, so that the last slices that have any elements are cut
            short: shapes are told without it.
        order: Nodes in the order in which they run.
        early: Slices of what persists from step to step, to stand before any node that writes over parts of it.
    """

    model: ir.Model
    mark: str = WINDOW
    is_ranged: bool = False
    order: list[ir.Node] = field(default_factory=list)
    early: list[ir.Node] = field(default_factory=list)
    _persistent: frozenset[str] = field(init=False)
    _taken: set[str] = field(init=False)
    _constants: dict[tuple[int, ...], ir.Value] = field(default_factory=dict)
    _parts: dict[tuple[ir.Value, int, int, int], ir.Value] = field(default_factory=dict)
    _read: dict[ir.Value, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        roles = training_roles.read(self.model, str(self.model.graph.name))
        self._persistent = frozenset(roles.updates) if roles is not None else frozenset()
        self._taken = {str(v.name) for v in all_values(self.model.graph)}
        self._taken.update(str(node.name) for graph in graphs(self.model) for node in graph)
        self._taken.update(str(v.name) for graph in graphs(self.model) for node in graph for v in node.outputs)

    def fresh(self, name: str) -> str:
        """A name that nothing else has."""
        return fresh(name, self._taken)

    def integers(self, numbers: Sequence[int]) -> ir.Value:
        """A constant, one for the same numbers."""
        key = tuple(numbers)
        if key not in self._constants:
            self._constants[key] = self.initializer(
                f"chunk.{'_'.join(map(str, key))}", ir.Tensor(np.array(key, np.int64))
            )
        return self._constants[key]

    def part(self, whole: ir.Value, axis: int, begin: int, end: int, name: str) -> ir.Value:
        """The elements ``[begin, end)`` of a constant's axis: one constant for all bands that read them."""
        key = (whole, axis, begin, end)
        if key not in self._parts:
            assert whole.const_value is not None
            self._parts[key] = self.initializer(name, sliced(whole.const_value, axis, begin, end))
        return self._parts[key]

    def initializer(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        """A new constant."""
        tensor.name = self.fresh(name)
        kind = ir.TensorType(tensor.dtype)
        value = ir.Value(name=tensor.name, type=kind, shape=tensor_shape(tensor), const_value=tensor)
        self.model.graph.register_initializer(value)
        return value

    def window(
        self, op: str, inputs: Sequence[ir.Value], attributes: Mapping[str, int | list[int]], result: ir.Value
    ) -> None:
        """Add a node that cuts, joins or views."""
        name = self.fresh(f"{result.name}/{op}")
        made = ir.node(op, inputs, attributes, outputs=[result], name=name, metadata_props={self.mark: "1"})
        persists = op == "Slice" and inputs[0].name in self._persistent
        (self.early if persists and windows(made) else self.order).append(made)

    def slice(self, source: ir.Value, axis: int, begin: int, end: int, result: ir.Value) -> None:
        """Add a node that takes the elements ``[begin, end)`` of an axis."""
        if (self.model.graph.opset_imports.get("") or 10) >= 10:
            bounds = [self.integers([number]) for number in (begin, end, axis)]
            self.window("Slice", [source, *bounds], {}, result)
        else:
            self.window("Slice", [source], {"starts": [begin], "ends": [end], "axes": [axis]}, result)

    def value(self, like: ir.Value, axis: int, length: int, name: str) -> ir.Value:
        """A value of the type of another, with another number of elements along an axis."""
        dims = list(static_shape(like) or ())
        dims[axis] = length
        return ir.Value(name=self.fresh(name), type=like.type, shape=ir.Shape(dims))

    def detach(self, node: ir.Node) -> None:
        """Let a node that isn't written any more read nothing."""
        self._read.update((v, None) for v in node.inputs if v is not None)
        for index in range(len(node.inputs)):
            node.replace_input_with(index, None)

    def read_no_more(self, value: ir.Value) -> None:
        """A node that read a value doesn't any more: it goes with the rest in `drop_unread`, if nobody does."""
        self._read[value] = None

    def drop_unread(self) -> None:
        """Remove the constants of which only slices are read, and nodes that nothing reads any more: of told shapes."""
        waiting = list(self._read)
        while waiting:
            value = waiting.pop()
            node = value.producer()
            if node is None:
                if value.is_initializer() and not (value.uses() or value.is_graph_input() or value.is_graph_output()):
                    del self.model.graph.initializers[str(value.name)]
            elif node.graph is not None and not any(v.uses() or v.is_graph_output() for v in node.outputs):
                waiting += [v for v in node.inputs if v is not None]
                self.model.graph.remove(node, safe=True)


def sliced(tensor: ir.TensorProtocol, axis: int, begin: int, end: int) -> ir.TensorProtocol:
    """The elements ``[begin, end)`` of an axis of a constant: of one in a file where they are one stretch of it."""
    dims = [int(dim) for dim in tensor.shape.numpy()]
    inner = math.prod(dims[axis + 1 :]) * tensor.dtype.bitwidth
    if isinstance(tensor, ir.ExternalTensor) and math.prod(dims[:axis]) == 1 and inner % 8 == 0:
        dims[axis] = end - begin
        offset, length = (tensor.offset or 0) + begin * inner // 8, (end - begin) * inner // 8
        shape = ir.Shape(dims)
        part = type(tensor)(
            tensor.location, offset, length, tensor.dtype, shape=shape, name="", base_dir=tensor.base_dir
        )
        if FILES in tensor.meta:
            part.meta[FILES] = tensor.meta[FILES]
        return part
    return ir.Tensor(tensor.numpy()[elements(axis, begin, end)].copy(), dtype=tensor.dtype)


def told_shape(
    writer: SliceWriter, node: ir.Node, inputs: list[ir.Value | None], dims: Sequence[int], axis: int | None = None
) -> tuple[list[ir.Value | None], str]:
    """The inputs and the type of a copy that writes this shape: some operators are told their output's.

    Args:
        writer: What writes the copy.
        node: What it is a copy of.
        inputs: The copy's.
        dims: The shape of its output.
        axis: That along which it is cut.
    """
    kind = node.op_type
    if node.domain or kind not in ("Expand", "Reshape", "Resize", "Squeeze"):
        return inputs, kind
    if writer.is_ranged and axis is not None:  # what is left of a product; what an Expand's input has
        dims = [(1 if kind == "Expand" else -1) if number == axis else dim for number, dim in enumerate(dims)]
    if kind == "Squeeze":  # without axes it would drop that of a slice of one element
        told = len(inputs) > 1 or "axes" in node.attributes
        return (inputs, kind) if told else ([*inputs, writer.integers(dims)], "Reshape")
    place = 3 if kind == "Resize" else 1
    if place < len(inputs) and inputs[place] is not None:
        axes = node.attributes.get_ints("axes") or range(len(dims))
        inputs[place] = writer.integers([dims[axis] for axis in axes])
    return inputs, kind
