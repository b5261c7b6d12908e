"""How a model's weights reach onnxruntime without being serialized: that would copy them twice, at a crawl."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from memonger.model.values import tensor_shape
from memonger.runtime.onnxruntime import onnxruntime

LARGE = 1024  # bytes; smaller weights travel with the graph
MOST_IN_MESSAGE = 1_900_000_000  # bytes; a message ends at 2 GiB

# Wire format of protobuf: the key of a length-delimited field is (field number << 3) | 2.
_GRAPH, _INITIALIZER, _RAW_DATA = bytes([7 << 3 | 2]), bytes([5 << 3 | 2]), bytes([9 << 3 | 2])


def split(model: ir.Model) -> tuple[ir.Model, dict[str, ir.TensorProtocol]]:
    """The model with its large weights taken out, and those weights. What lies in files of its own stays there."""
    copy = model.clone()
    weights = {}
    for value in copy.graph.initializers.values():
        tensor = value.const_value
        if tensor is None or isinstance(tensor, ir.ExternalTensor) or tensor.nbytes < LARGE:
            continue
        if tensor.dtype == ir.DataType.STRING or tensor.dtype.bitwidth < 8:
            continue
        weights[str(value.name)] = tensor
    return copy, weights


def owned_message(model: ir.Model) -> bytes | None:
    """The model as one message that the runtime makes its own copy of; None where that would be over 2 GiB.

    Messages of one type that stand one after the other are one message, with the repeated fields of each: so the
    weights are joined to the graph as bytes.
    """
    copy, weights = split(model)
    if sum(tensor.nbytes for tensor in weights.values()) > MOST_IN_MESSAGE:
        return None
    for name in weights:
        del copy.graph.initializers[name]
    return b"".join([ir.to_proto(copy).SerializeToString(), *_joined(weights)])


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


def lent_message(model: ir.Model, settings: Any) -> tuple[bytes, list[Any]]:
    """The model as a message without its weights, and OrtValues over their memory.

    The session reads the weights through those, and doesn't hold on to them: whoever makes the session has to, for as
    long as it lives.

    Args:
        model: The model.
        settings: The session's options; the weights are added to them.
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
    return ir.to_proto(copy).SerializeToString(), values
