"""Models' files read field by field, as protobuf writes them: what of a message isn't wanted is passed over.

https://protobuf.dev/programming-guides/encoding has how a message is written.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from memonger.files import ScratchFolder
from memonger.ir.tensors import FILES, LARGE
from memonger.units import MiB

SPILLED = 64 * MiB
"""Bytes of a model's file from which its weights are read into a temporary file, never into memory."""

_DATA = "memonger.weights"
_PIECE = 1 << 20  # bytes copied at a time
_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9  # of ModelProto, GraphProto, TensorProto
_ELSEWHERE = (13, 14)  # of TensorProto: external_data, data_location
_ALIGNED = 4096


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a message in a file: its number, where it begins, and where its content does; ``stop`` ends it.

    ``is_bytes``: whether it is a string, bytes or a message, of which the content is that.
    """

    number: int
    begin: int
    content: int
    stop: int
    is_bytes: bool


def fields(file: BinaryIO, begin: int, stop: int) -> Iterator[Field]:
    """The fields of a message that lies in a file from ``begin`` to ``stop``.

    Raises:
        ValueError: it is no message, or cut short.
    """
    at = begin
    while at < stop:
        file.seek(at)
        tag = number(file)
        kind = tag & 7
        if kind == 2:
            size = number(file)
        elif kind == 0:
            number(file)
            size = 0
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise ValueError(f"a field of kind {kind}")
        content = file.tell()
        if content + size > stop:
            raise ValueError("a field that is cut short")
        yield Field(tag >> 3, at, content, content + size, kind == 2)
        at = content + size


def number(file: BinaryIO) -> int:
    """A number of seven bits a byte, the lowest first.

    Raises:
        ValueError: the file ends, or it has more than 64 bits.
    """
    found = 0
    for shift in range(0, 70, 7):
        byte = file.read(1)
        if not byte:
            raise ValueError("a number that is cut short")
        found |= (byte[0] & 0x7F) << shift
        if byte[0] < 0x80:
            return found
    raise ValueError("a number of more than 64 bits")


def varint(value: int) -> bytes:
    """A number as `number` reads it."""
    parts = []
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def delimited(field: int, *parts: bytes) -> bytes:
    """A field that holds bytes, which may be given in parts."""
    return b"".join((varint(field << 3 | 2), varint(sum(map(len, parts))), *parts))


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
    offset, left = data.tell(), raw.stop - raw.content
    where = onnx.TensorProto(data_location=onnx.TensorProto.EXTERNAL)
    for key, value in (("location", _DATA), ("offset", offset), ("length", left)):
        where.external_data.add(key=key, value=str(value))
    file.seek(raw.content)
    while left:
        piece = file.read(min(left, _PIECE))
        if not piece:
            raise ValueError("a weight that is cut short")
        data.write(piece)
        left -= len(piece)
    return where.SerializeToString()


def _read(file: BinaryIO, begin: int, stop: int) -> bytes:
    file.seek(begin)
    return file.read(stop - begin)
