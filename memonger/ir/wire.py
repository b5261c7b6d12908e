"""Models' files read without their weights, which are copied into a file of their own."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from memonger.files import ScratchFolder, copy_part
from memonger.ir.fields import Field, delimited, fields
from memonger.ir.tensors import FILES, LARGE
from memonger.units import MiB

SPILLED = 64 * MiB
"""Bytes of a model's file from which its weights are read into a temporary file, never into memory."""

_DATA = "memonger.weights"
_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9  # of ModelProto, GraphProto, TensorProto
_ELSEWHERE = (13, 14)  # of TensorProto: external_data, data_location
_ALIGNED = 4096


def read_spilled(path: Path) -> tuple[onnx.ModelProto, ScratchFolder] | None:
    """A model's message with its large weights in a temporary file, which they are copied into piece by piece.

    Returns: the message and the folder of that file; None where the model is small, or no message, or there is no room:
        it is to be read as a whole then.
    """
    if path.stat().st_size < SPILLED:
        return None
    folder = None
    with suppress(OSError, ValueError, DecodeError):
        folder = ScratchFolder()
        with path.open("rb") as file, (folder.path / _DATA).open("wb") as data:
            parts = [
                part for field in fields(file, 0, path.stat().st_size) for part in _without_weights(file, field, data)
            ]
        return onnx.ModelProto.FromString(b"".join(parts)), folder
    if folder is not None:
        folder.remove()
    return None


def bind(model: ir.Model, folder: ScratchFolder) -> None:
    """Tell a model's tensors where the weights lie that `read_spilled` copied; they hold the folder."""
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and str(tensor.location) == _DATA:
            tensor.base_dir = folder.path
            tensor.meta[FILES] = folder


def _without_weights(file: BinaryIO, field: Field, data: BinaryIO) -> Iterator[bytes]:
    """A field of a model as it is; of its graph several graphs, which protobuf reads as one, without large weights."""
    if field.number != _GRAPH or not field.is_bytes:
        yield _read(file, field.begin, field.stop)
        return
    begin = field.content  # of what goes over as it is
    for part in fields(file, field.content, field.stop):
        raw = _raw_data(file, part) if part.number == _INITIALIZER and part.is_bytes else None
        if raw is None:
            continue
        yield delimited(_GRAPH, _read(file, begin, part.begin))
        where = _copied(file, raw, data)
        rest = [_read(file, part.content, raw.begin), _read(file, raw.stop, part.stop)]
        yield delimited(_GRAPH, delimited(_INITIALIZER, *rest, where))
        begin = part.stop
    yield delimited(_GRAPH, _read(file, begin, field.stop))


def _raw_data(file: BinaryIO, tensor: Field) -> Field | None:
    """Where a large weight has its bytes; None where it is small, or has them elsewhere."""
    if tensor.stop - tensor.content < LARGE:
        return None
    found = [field for field in fields(file, tensor.content, tensor.stop) if field.number in (_RAW_DATA, *_ELSEWHERE)]
    is_alone = len(found) == 1 and found[0].number == _RAW_DATA and found[0].is_bytes
    return found[0] if is_alone and found[0].stop - found[0].content >= LARGE else None


def _copied(file: BinaryIO, raw: Field, data: BinaryIO) -> bytes:
    """Copy a weight's bytes; returns what its message says of them instead."""
    data.write(bytes(-data.tell() % _ALIGNED))
    offset, length = data.tell(), raw.stop - raw.content
    where = onnx.TensorProto(data_location=onnx.TensorProto.EXTERNAL)
    for key, value in (("location", _DATA), ("offset", offset), ("length", length)):
        where.external_data.add(key=key, value=str(value))
    if copy_part(file, raw.content, length, data) < length:
        raise ValueError("a weight that is cut short")
    return where.SerializeToString()


def _read(file: BinaryIO, begin: int, stop: int) -> bytes:
    file.seek(begin)
    return file.read(stop - begin)
