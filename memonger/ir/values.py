"""Types, shapes and sizes of a model's values."""

from collections.abc import Iterator

import numpy as np
import onnx
import onnx_ir as ir

INFERENCE_ERRORS = (
    onnx.shape_inference.InferenceError, onnx.defs.SchemaError, onnx.checker.ValidationError, ir.serde.SerdeError,
    RuntimeError, ValueError, TypeError,
)  # fmt: skip
"""What onnx's inference raises for a node that is wrong: one of a type that the operator doesn't take, say (float8)."""

NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
"""Floating-point types of 16 bits."""

SMALL = 1024  # elements; larger tensors are never part of shape arithmetic

LARGEST = 2**62  # bytes; sums of two such sizes still fit 64 bits


def dense(value: ir.Value) -> bool:
    """Whether the value is an ordinary tensor of numbers, whose bytes can be planned."""
    return isinstance(value.type, ir.TensorType) and value.dtype not in (
        None,
        ir.DataType.UNDEFINED,
        ir.DataType.STRING,
    )


def required_inputs(graph: ir.Graph) -> list[ir.Value]:
    """The inputs that a caller has to give: those without a default."""
    return [value for value in graph.inputs if value.name not in graph.initializers]


def is_floating(value: ir.Value) -> bool:
    """Whether the value is a tensor of floating-point numbers."""
    return value.dtype is not None and value.dtype.is_floating_point()


def static_shape(value: ir.Value) -> tuple[int, ...] | None:
    """The value's shape where every dimension is a number, else None."""
    if value.shape is None:
        return None
    dims = value.shape.dims
    return dims if all(type(dim) is int for dim in dims) else None  # type: ignore[return-value]


def tensor_shape(tensor: ir.TensorProtocol) -> ir.Shape:
    """The shape of a concrete tensor, to put on a value."""
    return ir.Shape([int(dim) for dim in tensor.shape.numpy()])


def add_initializer(graph: ir.Graph, name: str, content: np.ndarray) -> ir.Value:
    """A new initializer of a graph, in which nothing is called so."""
    tensor = ir.Tensor(content, name=name)
    value = ir.Value(name=name, shape=tensor_shape(tensor), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def nbytes(value: ir.Value) -> int | None:
    """Bytes of a dense tensor with a static shape, else None. Sub-byte types are packed."""
    dims = static_shape(value)
    if dims is None or value.dtype is None or not dense(value):
        return None
    count = 1
    for dim in dims:
        count *= dim
    return (count * value.dtype.bitwidth + 7) // 8


def input_at(node: ir.Node, index: int) -> ir.Value | None:
    """Input ``index`` of a node; None where it is left out."""
    return node.inputs[index] if index < len(node.inputs) else None


def all_values(graph: ir.Graph) -> Iterator[ir.Value]:
    """Inputs, initializers and node outputs of one graph, subgraphs left out."""
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def swapped_axes(rank: int) -> list[int]:
    """The order of axes in which the last two have changed places."""
    return [*range(rank - 2), rank - 1, rank - 2]


def is_swapped(value: ir.Value | None) -> bool:
    """Whether a value is the Transpose of the matrices in the last two axes of another one."""
    node = None if value is None else value.producer()
    perm = None if node is None or node.op_type != "Transpose" else node.attributes.get_ints("perm")
    return perm is not None and list(perm) == swapped_axes(len(perm))


def attribute_bytes(attribute: ir.Attr) -> bytes:
    """All that an attribute says, as bytes that equal ones share."""
    return ir.serde.serialize_attribute(attribute).SerializeToString(deterministic=True)


def subgraphs(node: ir.Node) -> list[ir.Graph]:
    """Bodies of If, Loop, Scan and their like."""
    bodies: list[ir.Graph] = []
    for attribute in node.attributes.data.values():  # which takes a third of the time: it is asked of every node
        kind = attribute.type
        if kind == ir.AttributeType.GRAPH and not attribute.is_ref():
            bodies.append(attribute.as_graph())
        elif kind == ir.AttributeType.GRAPHS and not attribute.is_ref():
            bodies.extend(attribute.as_graphs())
    return bodies


def has_loop(model: ir.Model) -> bool:
    """Whether a node of the model has a body that may run more than once: all that have bodies but ``If``."""
    return any(node.op_type != "If" and subgraphs(node) for graph in graphs(model) for node in graph)


def read_values(node: ir.Node) -> list[ir.Value]:
    """What the node reads: its inputs, then what its subgraphs capture from outside, in a fixed order."""
    values = [v for v in node.inputs if v is not None]
    pending = subgraphs(node)
    while pending:
        graph = pending.pop()
        for inner in graph:
            values.extend(v for v in inner.inputs if v is not None)
            pending.extend(subgraphs(inner))
        values.extend(graph.outputs)
    return values


def graphs(model: ir.Model) -> Iterator[ir.Graph]:
    """The model's graph, then what `inner_graphs` finds in it."""
    yield model.graph
    yield from inner_graphs(model.graph)


def inner_graphs(outer: ir.Graph | ir.Function) -> Iterator[ir.Graph]:
    """The bodies in a graph or function, and those in them, in the order in which they are written.

    ``subgraphs`` of onnx-ir gives the same and takes several times as long, which counts where 100,000 nodes have none.
    """
    found: dict[ir.Graph, None] = {}
    pending: list[ir.Graph] = [each for node in outer for each in subgraphs(node)][::-1]
    while pending:
        graph = pending.pop()
        if graph not in found:
            found[graph] = None
            pending += [each for node in graph for each in subgraphs(node)][::-1]
    yield from found
