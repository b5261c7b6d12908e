"""The graph under construction: values with inferred types, seeded weights that are drawn only when read, marks.

Every float initializer is a trainable parameter or a running statistic; other constants are `Constant` nodes. A
weight is a function of (seed, name, shape) alone, so a network's size can be known without drawing one number.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

OPSET = 20
"""The newest opset for whose every operator used here onnxruntime 1.23 and later has a CPU kernel."""

IR_VERSION = 10
"""The first version whose nodes carry `metadata_props`, where the marks live."""

Dim = int | str
Array = npt.NDArray[np.generic]
Initializer = Callable[[np.random.Generator, tuple[int, ...]], npt.NDArray[np.float32]]
Attribute = int | float | str | Sequence[int] | ir.TensorProtocol


class Builder:
    """One model being written. Names given to its methods are prefixed with the open scopes: `stage1/unit1/conv`.

    Attributes:
        batch: the first dimension of every input, a number or the symbol "batch".
        training: whether the training form is wanted (batch statistics, dropout, a loss).
        seed: what all weights and dropout masks derive from.
    """

    def __init__(self, name: str, *, batch: int | None, training: bool, seed: int) -> None:
        self.name = name
        self.batch: Dim = "batch" if batch is None else batch
        self.training = training
        self.seed = seed
        self._scopes: list[str] = []
        self._types: dict[ir.Value, onnx.TypeProto] = {}
        self._constants: dict[tuple[str, bytes, tuple[int, ...]], ir.Value] = {}
        self._inputs: list[ir.Value] = []
        self._outputs: list[ir.Value] = []
        self._statistics: list[ir.Value] = []
        self._parameters: list[ir.Value] = []
        self._nodes: list[ir.Node] = []

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix all names given inside with `name/`."""
        self._scopes.append(name)
        yield
        self._scopes.pop()

    def path(self, name: str) -> str:
        """Return `name` behind the open scopes."""
        return "/".join([*self._scopes, name])

    def input(self, name: str, shape: Sequence[Dim], dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
        """Add a graph input; its name takes no scope."""
        value = self._typed(name, dtype, shape)
        self._inputs.append(value)
        return value

    def output(self, value: ir.Value, name: str | None = None) -> None:
        """Make `value` a graph output, renamed to `name` where one is given."""
        value.name = name or value.name
        self._outputs.append(value)

    def statistic(self, value: ir.Value) -> None:
        """Make `value` one of the graph outputs that follow all others: the next step's running statistics."""
        self._statistics.append(value)

    def parameter(self, name: str, shape: Sequence[int], initializer: Initializer) -> ir.Value:
        """Add a float32 initializer whose content is drawn when it is read."""
        path, dims, seed = self.path(name), tuple(shape), self.seed

        def draw() -> ir.TensorProtocol:
            generator = np.random.default_rng([seed, zlib.crc32(path.encode())])
            return ir.Tensor(initializer(generator, dims), name=path)

        value = self._typed(path, ir.DataType.FLOAT, dims)
        value.const_value = ir.LazyTensor(draw, ir.DataType.FLOAT, ir.Shape(dims), name=path)
        self._parameters.append(value)
        return value

    def constant(self, array: Array | Sequence[int], name: str) -> ir.Value:
        """Return the output of a `Constant` node; equal constants are one node, named where first used."""
        content = np.asarray(array)
        key = (content.dtype.str, content.tobytes(), content.shape)
        if key not in self._constants:
            tensor = ir.Tensor(content, name=self.path(name))
            self._constants[key] = self.op("Constant", [], name, value=tensor)
            self._constants[key].const_value = tensor
        return self._constants[key]

    def op(self, op_type: str, inputs: Sequence[ir.Value], name: str, **attributes: Attribute) -> ir.Value:
        """Append a node of one output; node and value both get the scoped name."""
        return self.multi_op(op_type, inputs, name, [""], **attributes)[0]

    def multi_op(
        self, op_type: str, inputs: Sequence[ir.Value], name: str, suffixes: Sequence[str], **attributes: Attribute
    ) -> tuple[ir.Value, ...]:
        """Append a node with one output for each suffix, named by the node's name and the suffix.

        Raises:
            ValueError: if an output would have an empty dimension, or none that ONNX can infer.
        """
        path = self.path(name)
        outputs = [ir.Value(name=path + suffix) for suffix in suffixes]
        # onnx-ir first asks a list of numbers whether it is a graph, a tensor or a type: that takes half a millisecond.
        given = {
            key: ir.AttrInt64s(key, value) if isinstance(value, list | tuple) else value
            for key, value in attributes.items()
        }
        node = ir.node(op_type, inputs, given, outputs=outputs, name=path)
        for value, type_proto in zip(outputs, self._infer(node), strict=True):
            self._set_type(value, type_proto)
        self._nodes.append(node)
        return tuple(outputs)

    def mark(self, value: ir.Value, stage: str = "True") -> ir.Value:
        """In training form mark the node that computes `value` as a candidate for keeping; return `value`.

        Stages of one name are one cut (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", and the
        `mirror_stage` attribute of its MXNet implementation).
        """
        node = value.producer()
        if node is None:
            raise ValueError(f"{value.name} is computed by no node, so it can't be marked")
        if self.training:
            node.metadata_props["mirror_stage"] = stage
        return value

    def model(self) -> ir.Model:
        """Return the finished model; the builder is spent."""
        graph = ir.Graph(
            self._inputs,
            [*self._outputs, *self._statistics],
            nodes=self._nodes,
            initializers=self._parameters,
            opset_imports={"": OPSET},
            name=self.name,
        )
        return ir.Model(graph, ir_version=IR_VERSION, producer_name="memonger.models")

    def _typed(self, name: str, dtype: ir.DataType, shape: Sequence[Dim]) -> ir.Value:
        value = ir.Value(name=name)
        self._set_type(value, onnx.helper.make_tensor_type_proto(int(dtype), shape))
        return value

    def _set_type(self, value: ir.Value, type_proto: onnx.TypeProto) -> None:
        shape = ir.serde.deserialize_type_proto_for_shape(type_proto)
        if shape is None or any(isinstance(dim, int) and dim < 1 for dim in shape):
            raise ValueError(f"{value.name} would have shape {shape}: the image is too small, or an option doesn't fit")
        value.type = ir.serde.deserialize_type_proto_for_type(type_proto)
        value.shape = shape
        self._types[value] = type_proto

    def _infer(self, node: ir.Node) -> list[onnx.TypeProto]:
        """Return the types of a node's outputs, by ONNX's own inference of that one node."""
        inputs = [value for value in node.inputs if value is not None]
        contents = {value.name or "": _small_constant(value) for value in inputs}
        inferred = onnx.shape_inference.infer_node_outputs(
            onnx.defs.get_schema(node.op_type, OPSET, ""),
            ir.serde.serialize_node(node),
            {value.name or "": self._types[value] for value in inputs},
            {name: ir.serde.serialize_tensor(content) for name, content in contents.items() if content is not None},
            opset_imports=[onnx.helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
        )
        return [inferred[value.name or ""] for value in node.outputs]


def _small_constant(value: ir.Value) -> ir.TensorProtocol | None:
    """Return the content of a shape or the like, but draw no weight."""
    tensor = value.const_value
    return tensor if isinstance(tensor, ir.Tensor) and tensor.size <= 16 else None


def normal(std: float) -> Initializer:
    """Return an initializer drawing from N(0, std²)."""
    return lambda generator, shape: generator.standard_normal(shape, np.float32) * np.float32(std)


def uniform(low: float, high: float) -> Initializer:
    """Return an initializer drawing from [low, high)."""
    return lambda generator, shape: generator.random(shape, np.float32) * np.float32(high - low) + np.float32(low)


def filled(content: float) -> Initializer:
    """Return an initializer giving one number everywhere."""
    return lambda _, shape: np.full(shape, content, np.float32)


def static_dim(value: ir.Value, axis: int) -> int:
    """Return a dimension of `value` that has to be a number.

    Raises:
        ValueError: if it is symbolic.
    """
    dim = value.shape[axis] if value.shape is not None else None
    if not isinstance(dim, int):
        raise ValueError(f"dimension {axis} of {value.name} is {dim}, and has to be a number")
    return dim
