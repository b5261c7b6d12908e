"""How a model's weights reach onnxruntime without being serialized: that would copy them twice, at a crawl."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from memonger.errors import SessionError
from memonger.model.checks import root_cause
from memonger.model.tensors import external_tensors
from memonger.model.values import tensor_shape
from memonger.runtime.onnxruntime import onnxruntime

LARGE = 1024  # bytes; smaller weights travel with the graph
MOST_IN_MESSAGE = 1_900_000_000  # bytes; a message ends at 2 GiB

# Wire format of protobuf: the key of a length-delimited field is (field number << 3) | 2.
_GRAPH, _INITIALIZER, _RAW_DATA = bytes([7 << 3 | 2]), bytes([5 << 3 | 2]), bytes([9 << 3 | 2])


def split(model: ir.Model) -> tuple[ir.Model, dict[str, ir.TensorProtocol]]:
    """The model with its large weights taken out, and those weights. What lies in files of its own stays there."""
    try:
        copy = model.clone()
    except RuntimeError as error:  # onnx-ir's
        raise SessionError(f"the model can't be handed to onnxruntime: {root_cause(error)}") from error
    weights = {}
    for value in copy.graph.initializers.values():
        tensor = value.const_value
        if tensor is None or isinstance(tensor, ir.ExternalTensor) or tensor.nbytes < LARGE:
            continue
        if tensor.dtype == ir.DataType.STRING or tensor.dtype.bitwidth < 8:
            continue
        weights[str(value.name)] = tensor
    return copy, weights


@dataclass(frozen=True, slots=True)
class Message:
    """A model as bytes, for the runtime.

    Attributes:
        data: The ``ModelProto``.
        folder: Where external data lies that it refers to; None if it refers to none.
    """

    data: bytes
    folder: str | None


def owned_message(model: ir.Model) -> Message | None:
    """The model as one message that the runtime makes its own copy of; None where that would be over 2 GiB.

    Messages of one type that stand one after the other are one message, with the repeated fields of each: so the
    weights are joined to the graph as bytes.

    Raises:
        SessionError: it can't be cloned or written.
    """
    copy, weights = split(model)
    if sum(tensor.nbytes for tensor in weights.values()) > MOST_IN_MESSAGE:
        return None
    for name in weights:
        del copy.graph.initializers[name]
    return Message(b"".join([_serialized(copy), *_joined(weights)]), _folder(model))


def _serialized(model: ir.Model) -> bytes:
    try:
        return ir.to_proto(model).SerializeToString()
    except RuntimeError as error:  # onnx-ir's
        raise SessionError(f"the model can't be handed to onnxruntime: {root_cause(error)}") from error


def _folder(model: ir.Model) -> str | None:
    """Where a model's external data lies: all in one folder, its own."""
    return next((str(Path(tensor.base_dir).resolve()) for tensor in external_tensors(model)), None)


def _joined(weights: dict[str, ir.TensorProtocol]) -> Iterator[bytes]:
    for name, tensor in weights.items():
        header = onnx.TensorProto(name=name, data_type=int(tensor.dtype), dims=tensor.shape.numpy())
        data = tensor.tobytes()
        fields = header.SerializeToString() + _RAW_DATA + _varint(len(data))
        graph = _INITIALIZER + _varint(len(fields) + len(data)) + fields
        yield _GRAPH + _varint(len(graph) + len(data)) + graph
        yield data


def _varint(number: int) -> bytes:
    parts = []
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def lent_message(model: ir.Model, settings: Any) -> tuple[Message, list[Any]]:
    """The model as a message without its weights, and OrtValues over their memory.

    The session reads the weights through those, and doesn't hold on to them: whoever makes the session has to, for as
    long as it lives.

    Args:
        model: The model.
        settings: The session's options; the weights are added to them.

    Raises:
        SessionError: it can't be cloned or written.
    """
    copy, weights = split(model)
    make = onnxruntime().OrtValue.ortvalue_from_numpy_with_onnx_type
    values = [make(np.require(t.numpy(), requirements="C"), int(t.dtype)) for t in weights.values()]
    for name, tensor in weights.items():
        copy.graph.initializers[name].const_value = ir.ExternalTensor(
            "lent", 0, tensor.nbytes, tensor.dtype, shape=tensor_shape(tensor), name=name
        )
    if weights:
        settings.add_external_initializers(list(weights), values)
    return Message(_serialized(copy), _folder(model)), values
