"""Models' files field by field, as protobuf writes them: what of a message isn't wanted is passed over.

https://protobuf.dev/programming-guides/encoding has how a message is written. Nothing here needs protobuf, or onnx.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

PLAN = "memonger.plan"
"""What the entry of a model's metadata is called that has its plan."""

_METADATA, _KEY, _VALUE = 14, 1, 2  # of ModelProto, StringStringEntryProto


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


def plan_in(path: str | Path) -> dict[str, Any] | None:
    """The plan in a file, read without the model, and not checked; None where there is none that could be read."""
    found = None
    try:
        if not os.path.isfile(path):
            return None
        with open(path, "rb") as file:
            for part in fields(file, 0, os.fstat(file.fileno()).st_size):
                if part.number != _METADATA or not part.is_bytes:
                    continue
                entry = {one.number: _read(file, one) for one in fields(file, part.content, part.stop) if one.is_bytes}
                if entry.get(_KEY) == PLAN.encode():
                    found = json.loads(entry[_VALUE])  # of several the last is the file's
    except (OSError, ValueError, KeyError, RecursionError):
        return None  # whoever reads all of it says what is wrong
    return found if isinstance(found, dict) else None


def _read(file: BinaryIO, field: Field) -> bytes:
    file.seek(field.content)
    return file.read(field.stop - field.content)
