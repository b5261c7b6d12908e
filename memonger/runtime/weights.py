"""Models as messages for onnxruntime, whose weights aren't serialized: that would copy them twice, at a crawl."""

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import onnx_ir as ir

from memonger.devices import Device
from memonger.errors import SessionError
from memonger.ir.checks import root_cause
from memonger.ir.element_types import ElementType
from memonger.ir.fields import varint
from memonger.ir.packed import all_packed, tell
from memonger.ir.tensors import FILES, external_tensors, is_large, sizes_of_parts
from memonger.ir.values import tensor_shape
from memonger.runtime import ort
from memonger.runtime.prepared import Held, Message
from memonger.units import MiB

MOST_IN_MESSAGE = 1_900_000_000  # bytes; a message ends at 2 GiB

LARGE_COPY = 4 * MiB
"""Bytes of a packed copy that is let go while a session is made: see `memonger.runtime.weight_reader.dropping`."""

# Wire format of protobuf: the key of a length-delimited field is (field number << 3) | 2.
_GRAPH, _INITIALIZER, _RAW_DATA = bytes([7 << 3 | 2]), bytes([5 << 3 | 2]), bytes([9 << 3 | 2])


class Lending:
    """Which weights a session is given beside its model: all of them. The model has none, and the session copies them.

    Attributes:
        is_shared: Whether they are in the model as well. The session then reads them where they lie, without a copy.
    """

    is_shared = False

    def lends(self, value: ir.Value) -> bool:
        """Whether this initializer is lent."""
        return True

    def held(self, tensor: ir.TensorProtocol) -> Held:
        """The weight where the session is to read it."""
        return Held(tensor.numpy(), ElementType(tensor.dtype))


LEND_ALL = Lending()

_READ_AS_THEY_ARE = frozenset(
    {"Add", "BatchNormalization", "Concat", "Div", "Gather", "Mul", "Sub", "Where", "com.microsoft.nchwc:Conv"}
)
"""Operators whose kernels on the CPU read a weight where it lies: all others may pack it into a copy of their own."""


class LendRead(Lending):
    """Lends those that no kernel packs, each in memory of its own: what models have in common may be there once.

    See `memonger.runtime.prepared.SharedWeights`.
    """

    is_shared = True

    def lends(self, value: ir.Value) -> bool:
        """Whether all that read it read it where it lies."""
        readers = [f"{node.domain}:{node.op_type}" if node.domain else node.op_type for node, _ in value.uses()]
        return bool(readers) and _READ_AS_THEY_ARE.issuperset(readers)

    def held(self, tensor: ir.TensorProtocol) -> Held:
        """A copy of the weight."""
        return Held(np.array(tensor.numpy()), ElementType(tensor.dtype))


def _large(model: ir.Model) -> dict[ir.Value, ir.TensorProtocol]:
    """Its large weights, those in files of their own among them. What nobody reads the runtime drops by itself."""
    values = model.graph.initializers.values()
    tensors = {v: v.const_value for v in values if v.uses() or v.is_graph_output()}
    large = {v: tensor for v, tensor in tensors.items() if tensor is not None and is_large(tensor)}
    inside = sizes_of_parts(model.graph)
    in_bytes = {v: one for v, one in large.items() if one.dtype != ir.DataType.STRING and one.dtype.bitwidth >= 8}
    return {v: tensor for v, tensor in in_bytes.items() if v not in inside}


def message(model: ir.Model, lending: Lending | None = None) -> Message:
    """The model as one message.

    Messages of one type that stand one after the other are one message, with the repeated fields of each: so weights
    are joined to the graph as bytes, of which the runtime makes its own copy.

    Args:
        model: The model.
        lending: Which weights are lent; None: none, and all where the message would be over 2 GiB.

    Raises:
        SessionError: it can't be written.
    """
    large = _large(model)
    # External data is read from one folder: that of a temporary file only where there is no other.
    folders = dict.fromkeys((FILES in tensor.meta, str(tensor.base_dir)) for tensor in external_tensors(model))
    folder = str(Path(min(folders)[1]).resolve()) if folders else None
    values = model.graph.initializers.values()
    constants = [v for v in values if v.uses() or v.is_graph_input() or v.is_graph_output()]  # or nobody asks for it
    inside = {
        value: tensor
        for value, tensor in large.items()
        if not isinstance(tensor, ir.ExternalTensor) or str(Path(tensor.base_dir).resolve()) != folder
    }
    if sum(tensor.nbytes for tensor in inside.values()) > MOST_IN_MESSAGE:
        lending = LEND_ALL
    is_shared = lending is None or lending.is_shared
    if is_shared:
        rest = [value for value in constants if value not in inside]
        data = b"".join([_serialized(model, rest), *_joined(inside)])
        lent = [value for value in large if lending is not None and lending.lends(value)]
    else:
        given = {value: value for value in constants}
        for value, tensor in inside.items():  # which say only that their content is given beside the model
            shape, name = tensor_shape(tensor), str(value.name)
            where = ir.ExternalTensor("lent", 0, tensor.nbytes, tensor.dtype, shape=shape, name=name)
            given[value] = ir.Value(name=name, type=value.type, shape=value.shape, const_value=where)
        data = _serialized(model, list(given.values()))
        lent = list(inside)
    weights = {} if lending is None else {str(value.name): lending.held(large[value]) for value in lent}
    copies = dict[str, list[tuple[int, int]]]()
    for tensor, packed in all_packed(model):
        if packed.length >= LARGE_COPY:
            copies.setdefault(os.path.realpath(tensor.path), []).append((packed.offset, packed.length))
    return Message(data, folder, weights, is_shared, copies)


def session_of(
    model: ir.Model, device: Device, options: ort.SessionSettings, lending: Lending | None = None, *, pool: Any = None
) -> Any:
    """An ``onnxruntime.InferenceSession`` of a model in memory; see `message` and `memonger.runtime.ort.make_session`.

    `LEND_ALL` is right for a session that is soon gone: it is spared the message.
    """
    return ort.make_session(message(model, lending), device, options, pool=pool)


def _serialized(model: ir.Model, constants: Sequence[ir.Value]) -> bytes:
    """The model with these initializers instead of its own: its nodes are written as they are, and never copied."""
    graph, view = model.graph, copy.copy(model)
    view.graph = cast(
        ir.Graph,
        ir.GraphView(
            graph.inputs, graph.outputs, nodes=graph, initializers=constants, doc_string=graph.doc_string,
            opset_imports=graph.opset_imports, name=graph.name,
        ),
    )  # fmt: skip
    try:
        message = ir.serde.serialize_model(view)
        tell(message, {str(value.name): value.const_value for value in constants})
        return message.SerializeToString()
    except RuntimeError as error:  # onnx-ir's
        raise SessionError(f"the model can't be handed to onnxruntime: {root_cause(error)}") from error


def _joined(weights: Mapping[ir.Value, ir.TensorProtocol]) -> Iterator[bytes]:
    for value, tensor in weights.items():
        header = onnx.TensorProto(name=value.name, data_type=int(tensor.dtype), dims=tensor.shape.numpy())
        data = tensor.tobytes()
        fields = header.SerializeToString() + _RAW_DATA + varint(len(data))
        graph = _INITIALIZER + varint(len(fields) + len(data)) + fields
        yield _GRAPH + varint(len(graph) + len(data)) + graph
        yield data
