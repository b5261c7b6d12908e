"""The tensors of a model, wherever they stand."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from memonger.errors import PlanFileError
from memonger.ir.values import graphs, inner_graphs

LARGE = 1024  # bytes
FILES = "memonger.files"
"""In the ``meta`` of an external tensor: what keeps the temporary file alive that it lies in."""

_PART = 1 << 20  # bytes of a weight read at a time


UNSIZED = (ir.DataType.UNDEFINED, ir.DataType.STRING)
"""Types whose elements have no size: tensors of these can't lie in a file of their own."""


def is_large(tensor: ir.TensorProtocol) -> bool:
    """Whether a weight is worth handling apart from the graph: smaller ones travel with it. Text never is."""
    return tensor.dtype != ir.DataType.STRING and tensor.nbytes >= LARGE


def sizes_of_parts(graph: ir.Graph) -> dict[ir.Value, ir.TensorProtocol]:
    """Constants that say into what a node splits: of any size they stay in a model's message.

    What infers shapes reads them, and onnxruntime refuses a model where they lie elsewhere.
    """
    return {
        value: value.const_value
        for value in graph.initializers.values()
        if value.const_value is not None
        and any(node.op_type in ("Split", "SplitToSequence") and index == 1 for node, index in value.uses())
    }


def in_memory(tensor: ir.TensorProtocol) -> ir.Tensor[Any]:
    """A tensor with its content, which may lie in a file of its own, in the model."""
    return ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=tensor.name)


class DataFile(ir.ExternalTensor):
    """A tensor in a file that `memonger.ir.checks.check_external_data` has looked at.

    onnx-ir refuses files with several hard links, which is what uv, ``cp -l`` and deduplication make of them: a link is
    made by who may read the file, and what an archive brings along is a file of its own.
    """

    __slots__ = ()

    def _check_path_containment(self) -> None:
        pass

    @classmethod
    def of(cls, tensor: ir.ExternalTensor, *, location: str | None = None, base_dir: Any = None) -> "DataFile":
        """The same tensor, of another file where one is given."""
        made = cls(
            tensor.location if location is None else location, tensor.offset, tensor.length, tensor.dtype,
            shape=tensor.shape, name=tensor.name or "", doc_string=tensor.doc_string,
            metadata_props=dict(tensor.metadata_props),
            base_dir=tensor.base_dir if base_dir is None else base_dir,
        )  # fmt: skip
        made.meta.update(tensor.meta)
        return made


def transposed(tensor: ir.TensorProtocol, axes: Sequence[int] | None = None) -> ir.TensorProtocol:
    """A constant with its axes in another order, reversed if none is said; worked out when it is read."""
    axes = range(len(tensor.shape))[::-1] if axes is None else axes
    shape = ir.Shape([int(tensor.shape[axis]) for axis in axes])  # type: ignore[arg-type]
    dtype = tensor.dtype
    return ir.LazyTensor(
        lambda: ir.Tensor(np.ascontiguousarray(np.transpose(tensor.numpy(), axes)), dtype=dtype),
        dtype=dtype, shape=shape, name=tensor.name,
    )  # fmt: skip


def replace_tensors(model: ir.Model, made: Callable[[ir.TensorProtocol], ir.TensorProtocol]) -> None:
    """Put another tensor in the place of each, wherever in the model it stands."""
    for body in bodies(model):
        for value in body.initializers.values() if isinstance(body, ir.Graph) else ():
            if value.const_value is not None:
                value.const_value = made(value.const_value)
        for node in body:
            for attribute in [each for each in node.attributes.values() if not each.is_ref()]:
                if attribute.type == ir.AttributeType.TENSOR:
                    node.attributes.add(ir.AttrTensor(attribute.name, made(attribute.value)))
                elif attribute.type == ir.AttributeType.TENSORS:
                    node.attributes.add(ir.AttrTensors(attribute.name, list(map(made, attribute.value))))


def replace_external(model: ir.Model, made: Callable[[ir.ExternalTensor], ir.TensorProtocol]) -> None:
    """The same of each that lies in a file of its own."""
    replace_tensors(model, lambda tensor: made(tensor) if isinstance(tensor, ir.ExternalTensor) else tensor)


def bodies(model: ir.Model) -> Iterator[ir.Graph | ir.Function]:
    """Whatever holds nodes: the graph, the bodies of functions, and the subgraphs in all of them."""
    yield from graphs(model)
    for function in model.functions.values():
        yield function
        yield from inner_graphs(function)


def all_tensors(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    """Every tensor in a model, wherever it stands: weights and attributes, of functions and subgraphs too."""
    for body in bodies(model):
        if isinstance(body, ir.Graph):
            yield from (v.const_value for v in body.initializers.values() if v.const_value is not None)
        for node in body:
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref():
                    yield attribute.value
                elif attribute.type == ir.AttributeType.TENSORS and not attribute.is_ref():
                    yield from attribute.value


def inner_tensors(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    """Weights that are no initializers of the main graph: of branches, loops and functions, and large attributes."""
    for body in bodies(model):
        if isinstance(body, ir.Graph) and body is not model.graph:
            yield from (v.const_value for v in body.initializers.values() if v.const_value is not None)
        for attribute in (each for node in body for each in node.attributes.data.values()):
            if attribute.type == ir.AttributeType.TENSOR and not attribute.is_ref() and is_large(attribute.value):
                yield attribute.value


def inner_bytes(model: ir.Model) -> int:
    """Bytes of these, and of long lists of numbers in attributes, as of trees; short ones are settings."""
    return list_bytes(model) + sum(one.nbytes for one in inner_tensors(model) if one.dtype != ir.DataType.STRING)


def list_bytes(model: ir.Model) -> int:
    """Bytes of long lists of numbers in attributes."""
    lists = (each for body in bodies(model) for node in body for each in node.attributes.data.values())
    return sum(size for one in lists if (size := _list_bytes(one)) >= LARGE)


def _list_bytes(attribute: ir.Attr) -> int:
    """Bytes of an attribute that is a list of numbers, as onnxruntime holds it."""
    each = {ir.AttributeType.FLOATS: 4, ir.AttributeType.INTS: 8}.get(attribute.type, 0)
    return each * len(attribute.value) if each and not attribute.is_ref() else 0


def external_tensors(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    """Every tensor of the model that lies in a file of its own."""
    return (tensor for tensor in all_tensors(model) if isinstance(tensor, ir.ExternalTensor))


def content(tensor: ir.TensorProtocol) -> Iterator[Any]:
    """A tensor's bytes, in parts: those in a file of their own may be more than the memory holds.

    Raises:
        PlanFileError: it lies in a file that can't be read.
    """
    if isinstance(tensor, ir.ExternalTensor):
        yield from read_bytes(tensor.path, tensor.offset or 0, tensor.nbytes, str(tensor.name))
    elif tensor.dtype == ir.DataType.STRING:
        yield json.dumps([str(each) for each in tensor.numpy().ravel()]).encode()
    elif tensor.dtype.bitwidth < 8:
        yield tensor.tobytes()
    else:
        yield np.ascontiguousarray(tensor.numpy()).reshape(-1).view(np.uint8).data


def read_bytes(path: Any, offset: int, length: int, name: str) -> Iterator[bytes]:
    """Bytes of a file in parts: read, not mapped, as mapped pages would count as this process's memory.

    Args:
        path: The file.
        offset: Where they begin.
        length: How many there are.
        name: The tensor that they are of, for the error.

    Raises:
        PlanFileError: they can't be read.
    """
    left = length
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            while left and (part := file.read(min(left, _PART))):
                yield part
                left -= len(part)
    except OSError as error:
        raise PlanFileError(f"tensor '{name}' can't be read from {path}: {error}.") from error
