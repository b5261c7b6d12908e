"""The emitter: appends ONNX nodes to a graph, each with the type and shape that ONNX's own inference gives it.

    y = op.Mul(a, b)                                      # one output: a value
    y, indices = op.several("MaxPool", 2, x, kernel_shape=[2, 2])
    z = op.Add(y, 1.0)                                    # a Python number becomes a scalar of the other input's type

Every shape it sees is static. Constants are shared: equal ones are one initializer.
"""

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import onnx
import onnx_ir as ir

from memonger.errors import PlanError
from memonger.ir.marks import COMPOSITE, spread
from memonger.ir.values import INFERENCE_ERRORS, add_initializer, all_values, input_at, static_shape

SMALL = 1024  # elements; a larger constant never decides a shape

MANY_ROWS = 64  # of one sample, from which they are summed in two levels
MANY_SAMPLES = 256  # from which these are
LONG_ROW = 256  # from which a sum along the last axes is

BROADCASTING = frozenset({
    "Add", "And", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mul", "Or", "Pow",
    "Sub", "Where",
})  # fmt: skip

RULE_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
"""What a rule that relies on a node's inputs and attributes raises where they can't be."""

Operand = ir.Value | float | int | bool | None
Attribute = int | float | str | Sequence[int] | Sequence[float] | ir.TensorProtocol | None
T = TypeVar("T")


class Emit(Protocol):
    """``op.Relu``: appends a node of that operator and returns its only output."""

    def __call__(self, *inputs: Operand, **attributes: Attribute) -> ir.Value:
        """Append the node. An attribute that is None is left out."""


class Emitter:
    """Nodes for one graph, in the order they are asked for.

    Attributes:
        graph: Where constants go. Nodes go into ``nodes`` first.
        opset: Version of the default operator set.
        nodes: What was emitted so far.
        where: Name of the forward node that is being worked on: it stands in the new nodes' names.
        wanted: Which inputs of that node need a gradient.
        scalars: Graph inputs that a session feeds at every step, by role: ``random_key``, ``step``, ``learning_rate``.
        classes: Graph inputs of class numbers: how many classes there are, and the number that counts for nothing.
    """

    def __init__(self, model: ir.Model) -> None:
        self.graph = model.graph
        self.opset = int(model.opset_imports[""])
        self.nodes: list[ir.Node] = []
        self.where = ""
        self.wanted: tuple[bool, ...] = ()
        self._names: set[str] = set()
        self.learn_names(model)
        self._counts: dict[str, int] = {}
        self._constants: dict[tuple[str, bytes, tuple[int, ...]], ir.Value] = {}
        self.scalars: dict[str, ir.Value] = {}
        self.classes: dict[str, tuple[int, int | None]] = {}
        self._moved: dict[tuple[object, ...], ir.Value] | None = None  # Reshapes and Transposes of the node at hand
        self._joined: dict[tuple[object, ...], ir.Value] = {}
        self._inferences: dict[tuple[object, ...], list[tuple[ir.DataType, ir.Shape] | None]] = {}
        self._opsets = [onnx.helper.make_opsetid("", self.opset)]

    def __getattr__(self, op_type: str) -> Emit:
        if not op_type[:1].isupper():
            raise AttributeError(op_type)
        return partial(self.emit, op_type)

    @contextmanager
    def at(self, where: str, wanted: Sequence[bool] = ()) -> Iterator[None]:
        """Work on one forward node.

        Raises:
            PlanError: its inputs or attributes are none its operator could run with, though ONNX's inference took them.
        """
        before = self.where, self.wanted, self._moved
        self.where, self.wanted, self._moved = where, tuple(wanted), {}
        try:
            yield
        except RULE_ERRORS as error:
            problem = " ".join(str(error).split()) or type(error).__name__
            raise PlanError(f"the gradient of '{where}' can't be written: the node is malformed: {problem}.") from error
        self.where, self.wanted, self._moved = before

    @contextmanager
    def behind(self, node: ir.Node) -> Iterator[None]:
        """Emit right behind a forward node: what makes a value smaller before it is kept."""
        before = self.nodes, self._moved
        self.nodes, self._moved = [], {}
        yield
        if node.graph is not None:
            spread(node, self.nodes, ())
            node.graph.insert_after(node, self.nodes)
        self.nodes, self._moved = before

    def wants(self, index: int) -> bool:
        """Whether input ``index`` of the forward node needs a gradient."""
        return index < len(self.wanted) and self.wanted[index]

    def emit(self, op_type: str, /, *inputs: Operand, **attributes: Attribute) -> ir.Value:
        """Append a node with one output; ``op.Relu(x)`` is ``op.emit("Relu", x)``."""
        return self.several(op_type, 1, *inputs, **attributes)[0]

    def several(self, op_type: str, outputs: int, /, *inputs: Operand, **attributes: Attribute) -> tuple[ir.Value, ...]:
        """Append a node with that many outputs.

        Raises:
            PlanError: ONNX's inference finds the node wrong, or can't tell its outputs' shapes.
        """
        kind = next((v.dtype for v in inputs if isinstance(v, ir.Value) and v.dtype is not None), ir.DataType.FLOAT)
        values = [v if v is None or isinstance(v, ir.Value) else self.constant(v, kind) for v in inputs]
        if op_type in BROADCASTING:
            values = self._aligned(values)
        name = self.fresh(f"{self.where}/{op_type}" if self.where else op_type)
        results = [ir.Value(name=name if k == 0 else self.fresh(f"{name}.{k}")) for k in range(outputs)]
        node = ir.node(op_type, values, as_attributes(attributes), outputs=results, name=name)
        self.infer(node)
        self.nodes.append(node)
        return tuple(results)

    def composite(self, name: str, value: ir.Value) -> ir.Value:
        """``value``, its node marked as computing ``name``: a lowering may write that otherwise."""
        node = value.producer()
        assert node is not None
        node.metadata_props[COMPOSITE] = name
        return value

    def _aligned(self, values: Sequence[ir.Value | None]) -> list[ir.Value | None]:
        """Single numbers with as many axes as the tensor they meet, where its last axis is 1.

        onnxruntime's CPU kernels go through such a tensor element by element if the number has fewer axes: a hundred
        times slower.
        """
        shaped = [self.dims(v) for v in values if v is not None]
        rank = max(map(len, shaped), default=0)
        if not any(len(dims) == rank and dims[-1:] == (1,) and math.prod(dims) > 1 for dims in shaped):
            return list(values)
        return [self._with_axes(v, rank) if v is not None and self.size(v) == 1 else v for v in values]

    def _with_axes(self, number: ir.Value, rank: int) -> ir.Value:
        if len(self.dims(number)) == rank:
            return number
        content = self.content(number)
        if content is not None:
            return self.constant(content.reshape((1,) * rank))
        return self.Reshape(number, self.ints(*(1,) * rank))

    def add_output(self, node: ir.Node, index: int, suffix: str) -> ir.Value:
        """Output ``index`` of a forward node, made to exist: the indices of a MaxPool, say."""
        if index < len(node.outputs) and node.outputs[index].name:
            return node.outputs[index]
        if index >= len(node.outputs):
            node.resize_outputs(index + 1)
        value = node.outputs[index]
        value.name = self.fresh(f"{node.outputs[0].name}.{suffix}")
        for other in node.outputs:
            other.name = other.name or ""
        self.infer(node, only=value)
        return value

    def constant(self, content: Any, dtype: ir.DataType | None = ir.DataType.FLOAT) -> ir.Value:
        """An initializer of that content and type. Arrays of numpy keep their own type."""
        kind = (dtype or ir.DataType.FLOAT).numpy()
        array = content if isinstance(content, np.ndarray) else np.asarray(content).astype(kind)
        key = (array.dtype.str + str(array.dtype), array.tobytes(), array.shape)
        if key not in self._constants:
            name = self.fresh(f"constant/{'x'.join(map(str, array.shape)) or array.item()}")
            self._constants[key] = add_initializer(self.graph, name, array)
            self._constants[key].meta["constant"] = True
        return self._constants[key]

    def ints(self, *numbers: int) -> ir.Value:
        """A constant int64 vector: axes, a shape."""
        return self.constant(np.array(numbers, np.int64))

    def input(self, name: str, dtype: ir.DataType, dims: Sequence[int]) -> ir.Value:
        """A new graph input. Its name is ``name`` where that is free."""
        value = ir.Value(name=self.fresh(name), type=ir.TensorType(dtype), shape=ir.Shape(list(dims)))
        self.graph.inputs.append(value)
        return value

    def scalar(self, role: str, dtype: ir.DataType, default: float | None = None) -> ir.Value:
        """The scalar graph input of that role, made when first asked for; with a default it may be left out."""
        if role not in self.scalars:
            self.scalars[role] = self.input(role, dtype, ())
        value = self.scalars[role]
        if default is not None and value.const_value is None:
            value.const_value = ir.tensor(default, dtype=dtype, name=value.name)
            self.graph.register_initializer(value)
        return value

    def fresh(self, name: str) -> str:
        """``name``, or where another value has it ``name#2`` and so on."""
        result = name
        while result in self._names:
            self._counts[name] = self._counts.get(name, 1) + 1
            result = f"{name}#{self._counts[name]}"
        self._names.add(result)
        return result

    # What rules are made of.

    def given(self, node: ir.Node, index: int) -> ir.Value:
        """Input ``index`` of a node, which has to be there."""
        value = input_at(node, index)
        if value is None:
            raise PlanError(f"operator {node.op_type} (node '{node.name}') lacks input {index}: it can't be run.")
        return value

    def dims(self, value: ir.Value | None) -> tuple[int, ...]:
        """The static shape of a value."""
        shape = None if value is None else static_shape(value)
        if shape is None:
            raise PlanError(
                f"the size of value '{value.name if value is not None else ''}' (near node '{self.where}') is unknown: "
                "gradients need static shapes. Fix the sizes it depends on, or write its shape into the model."
            )
        return shape

    def size(self, value: ir.Value | None) -> int:
        """Number of elements."""
        return math.prod(self.dims(value))

    def learn_names(self, model: ir.Model) -> None:
        """Take the names that others gave since."""
        self._names.update(str(v.name) for v in all_values(model.graph))
        self._names.update(str(node.name) for node in model.graph)

    def reshape(self, x: ir.Value, dims: Sequence[int]) -> ir.Value:
        """``x`` with another shape; ``x`` itself where it has it. What one rule asks for twice is written once."""
        node = x.producer()
        if node is not None and node.op_type in ("Reshape", "Squeeze", "Unsqueeze") and not node.domain:
            x = self.given(node, 0)  # one view, not a view of a view
        if self.dims(x) == tuple(dims):
            return x
        made = partial(self.Reshape, x, self.ints(*dims), allowzero=1 if 0 in dims else None)
        return self._once(("Reshape", x, *dims), made)

    def transpose(self, x: ir.Value, perm: Sequence[int]) -> ir.Value:
        """``x`` with its axes in the order ``perm``; ``x`` itself where that is its own order, and what ``x`` is a
        Transpose of where it undoes that. Written once, likewise."""
        if list(perm) == list(range(len(perm))):
            return x
        node = x.producer()
        if node is not None and node.op_type == "Transpose":
            source, before = self.given(node, 0), self.attribute(node, "perm", list(range(len(perm)))[::-1])
            if [before[axis] for axis in perm] == list(range(len(perm))):
                return source
        return self._once(("Transpose", x, *perm), partial(self.Transpose, x, perm=list(perm)))

    def _once(self, key: tuple[object, ...], make: Callable[[], ir.Value]) -> ir.Value:
        """What ``make`` emits, or has emitted for this key since work on the node at hand began."""
        if self._moved is None:
            return make()
        if key not in self._moved:
            self._moved[key] = make()
        return self._moved[key]

    def concat(self, parts: Sequence[ir.Value | None], axis: int) -> ir.Value:
        """Values joined along an axis; what was joined before isn't joined again, nor what was cut so."""
        if len(parts) == 1 and parts[0] is not None:
            return parts[0]
        node = None if parts[0] is None else parts[0].producer()
        if node is not None and _runs_along(node, "Split", axis) and tuple(parts) == node.outputs:
            return self.given(node, 0)
        key = (axis, *parts)
        if key not in self._joined:
            self._joined[key] = self.Concat(*parts, axis=axis)
        return self._joined[key]

    def split(self, x: ir.Value, sizes: Sequence[int], axis: int) -> tuple[ir.Value, ...]:
        """``x`` cut along an axis; what it was joined from, where those are the parts."""
        node = x.producer()
        if node is not None and _runs_along(node, "Concat", axis):
            parts = tuple(v for v in node.inputs if v is not None)
            if [self.dims(v)[axis] for v in parts] == list(sizes):
                return parts
        return (x,) if len(sizes) == 1 else self.several("Split", len(sizes), x, self.ints(*sizes), axis=axis)

    def cast(self, x: ir.Value, dtype: ir.DataType | None) -> ir.Value:
        """``x`` as another type; ``x`` itself where it is of that type."""
        return x if dtype is None or x.dtype == dtype else self.Cast(x, to=int(dtype))

    def expand(self, x: ir.Value, dims: Sequence[int]) -> ir.Value:
        """``x`` broadcast to ``dims``."""
        return x if self.dims(x) == tuple(dims) else self.Expand(x, self.ints(*dims))

    def sum(self, x: ir.Value, axes: Sequence[int], *, keepdims: bool = False) -> ir.Value:
        """The sum over ``axes``; ``x`` itself over none.

        onnxruntime's kernels add one number after another. A long sum is written as sums of about its root, so that
        the error of n numbers grows with the fourth root of n, not the root (Higham 1993, in two levels).
        """
        dims = self.dims(x)
        summed = sorted(axis % len(dims) for axis in axes)
        if not summed:
            return x
        rest = [1 if axis in summed else size for axis, size in enumerate(dims)]
        shape = rest if keepdims else [size for axis, size in enumerate(dims) if axis not in summed]
        exact = x.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE)
        if exact and self.size(x) and summed[-1] == len(summed) - 1 < len(dims) - 1:
            rows = self.reshape(x, (self.size(x) // math.prod(rest), math.prod(rest)))
            return self.reshape(self.weighted_rows(None, rows, samples=dims[0]), shape)
        first = next(axis for axis in range(len(dims), -1, -1) if axis - 1 not in summed)
        last = math.prod(dims[first:])
        size = _block(last) if exact and last >= LONG_ROW else 1
        if size == 1:
            return self.ReduceSum(x, self.ints(*axes), keepdims=int(keepdims))
        blocks = self.reshape(x, (*dims[:first], last // size, size))
        sums = self.ReduceSum(blocks, self.ints(first + 1), keepdims=0)
        outer = [axis for axis in summed if axis < first]
        return self.reshape(self.ReduceSum(sums, self.ints(*outer, first), keepdims=0), shape)

    def weighted_rows(self, weights: ir.Value | None, x: ir.Value, *, samples: int) -> ir.Value:
        """The sum ``[1, n]`` of the rows of a matrix ``[m, n]``, each times its weight (m numbers; None: 1).

        Products with ones, which are faster than ReduceSum and nearer to the sum. Rows of a sample are summed first,
        so that the nodes are the same at every batch.

        Args:
            samples: How many the rows are of; the rows of each lie side by side.
        """
        rows, n = self.dims(x)
        for size in _levels(rows // samples, MANY_ROWS) + _levels(samples, MANY_SAMPLES):
            rows //= size
            many = (rows,) if rows > 1 else ()
            if weights is None:
                vectors = self.constant([[1.0] * size], x.dtype)
            else:
                vectors = self.reshape(weights, (*many, 1, size))
            x, weights = self.MatMul(vectors, self.reshape(x, (*many, size, n))), None
        if weights is not None:  # of one row
            x = self.Mul(self.reshape(weights, (1, 1)), x)
        return self.reshape(x, (1, n))

    def sum_to(self, x: ir.Value, dims: Sequence[int]) -> ir.Value:
        """The adjoint of broadcasting ``dims`` to the shape of ``x``: sums over the axes that broadcasting repeated."""
        given, target = self.dims(x), tuple(dims)
        if given == target:
            return x
        lead = len(given) - len(target)
        axes = [a for a, size in enumerate(given) if a < lead or (target[a - lead] == 1 and size != 1)]
        return self.reshape(self.sum(x, axes), target)

    def slice(self, x: ir.Value, axis: int, start: int, stop: int, step: int = 1) -> ir.Value:
        """``x[..., start:stop:step, ...]`` along one axis."""
        return self.Slice(x, self.ints(start), self.ints(stop), self.ints(axis), self.ints(step))

    @staticmethod
    def attribute(node: ir.Node, name: str, default: T) -> T:
        """The Python value of an attribute, of the default's type: a number, a string, a list of numbers."""
        attribute = node.attributes.get(name)
        if attribute is None:
            return default
        value = attribute.value
        return cast(T, list(value) if isinstance(value, tuple | list) else value)

    def content(self, value: ir.Value | None) -> np.ndarray | None:
        """The content of a constant nobody can override, else None."""
        if value is None or value.const_value is None or value.is_graph_input():
            return None
        return value.const_value.numpy()

    def infer(self, node: ir.Node, only: ir.Value | None = None) -> None:
        """Give a node's outputs, or ``only`` one, their types and shapes.

        Equal nodes on equal shapes are inferred once.
        """
        # What the types and shapes of a node's outputs depend on
        inputs = tuple(_input_signature(value) for value in node.inputs)
        attributes = tuple((name, repr(attribute.value)) for name, attribute in sorted(node.attributes.items()))
        key = node.op_type, inputs, attributes, tuple(bool(value.name) for value in node.outputs)
        if key not in self._inferences:
            self._inferences[key] = self._inferred(node)
        for value, inferred in zip(node.outputs, self._inferences[key], strict=True):
            if only is None or value is only:
                if inferred is None:
                    raise PlanError(f"the gradient of '{self.where}' can't be written: {node.op_type} has no shape.")
                dtype, value.shape = inferred
                value.type = ir.TensorType(dtype)

    def _inferred(self, node: ir.Node) -> list[tuple[ir.DataType, ir.Shape] | None]:
        try:
            inputs = {str(v.name): v for v in node.inputs if v is not None}
            contents = {
                name: ir.serde.serialize_tensor(v.const_value)
                for name, v in inputs.items()
                if v.const_value is not None and not v.is_graph_input() and v.const_value.size <= SMALL
            }
            make_type = onnx.helper.make_tensor_type_proto
            types = {name: make_type(int(v.dtype or 0), static_shape(v)) for name, v in inputs.items()}
            protos = onnx.shape_inference.infer_node_outputs(
                onnx.defs.get_schema(node.op_type, self.opset, ""),
                ir.serde.serialize_node(node),
                types,
                contents,
                opset_imports=self._opsets,
                ir_version=10,
            )
        except INFERENCE_ERRORS as error:
            problem = " ".join(str(error).split())
            raise PlanError(
                f"the gradient of node '{self.where}' can't be written: {node.op_type}: {problem}"
            ) from error
        results: list[tuple[ir.DataType, ir.Shape] | None] = []
        for value in node.outputs:
            proto = protos.get(value.name or "")
            shape = None if proto is None else ir.serde.deserialize_type_proto_for_shape(proto)
            kind = None if proto is None else ir.serde.deserialize_type_proto_for_type(proto)
            dims = [dim for dim in shape or () if isinstance(dim, int)]
            static = shape is not None and len(dims) == len(shape) and isinstance(kind, ir.TensorType)
            results.append((kind.dtype, ir.Shape(dims, frozen=True)) if static and kind is not None else None)
        return results


def as_attributes(given: Mapping[str, Attribute]) -> dict[str, Any]:
    """Those that aren't None, lists of whole numbers made attributes.

    onnx-ir first asks a list whether it is a graph, a tensor or a type, by all the methods they have: half a
    millisecond.
    """
    return {
        name: ir.AttrInt64s(name, value)
        if isinstance(value, list | tuple) and value and all(type(number) is int for number in value)
        else value
        for name, value in given.items()
        if value is not None
    }


def _runs_along(node: ir.Node, op_type: str, axis: int) -> bool:
    """Whether a node is of that type and works along that axis."""
    if node.op_type != op_type or node.domain:
        return False
    rank = len(static_shape(node.outputs[0]) or ())
    return rank > 0 and node.attributes.get_int("axis", 0) % rank == axis


def _levels(count: int, many: int) -> list[int]:
    """How many numbers each level of a sum adds up, the first level first."""
    block = _block(count) if count >= many else count
    return [size for size in (block, count // block) if size > 1]


def _block(count: int) -> int:
    """The least divisor of a count that isn't below its root; 1 where that is the count itself."""
    below = next((size for size in range(math.isqrt(count), 1, -1) if count % size == 0), count)
    return count // below


def _input_signature(value: ir.Value | None) -> object:
    if value is None:
        return None
    content = value.const_value
    small = content is not None and not value.is_graph_input() and content.size <= SMALL
    return value.dtype, None if value.shape is None else value.shape.dims, value.name if small else None


@contextmanager
def collecting_later() -> Iterator[None]:
    """No garbage collection meanwhile: nearly all that is made stays; looking through it took a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
