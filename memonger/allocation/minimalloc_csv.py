"""MiniMalloc's file format for packing problems and their solutions (github.com/google/minimalloc).

Comma-separated columns named in the first line, in any order: ``id,lower,upper,size`` and optionally ``alignment`` (1
by default) and ``offset``. Lifetimes are half-open, ``[lower, upper)``; the older column ``end`` is inclusive. An id is
any text without a comma; there is no quoting. What is left out: ``gaps`` (lifetimes with holes), which are refused, and
fixed positions: an ``offset`` is read as a solution found before.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from memonger.allocation.buffers import Buffer, Layout, validate_buffer
from memonger.errors import LayoutError
from memonger.files import write_whole

_ALIASES = {"buffer": "id", "buffer_id": "id", "begin": "lower", "start": "lower", "end": "upper"}
_REQUIRED = ("id", "lower", "upper", "size")
_OPTIONAL = ("alignment", "gaps", "offset")
_INTEGER = re.compile(r"-?[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class PackingProblem:
    """A packing problem as read from a file.

    Attributes:
        names: The id of each buffer as the file has it; unique.
        buffers: The buffers, whose own ids are their positions.
        offsets: The file's ``offset`` column, in bytes, or None where it has none. Nothing is checked about it.
    """

    names: tuple[str, ...]
    buffers: tuple[Buffer, ...]
    offsets: tuple[int, ...] | None = None


def read_problem(path: str | os.PathLike[str]) -> PackingProblem:
    """Read a problem.

    Raises:
        LayoutError: The file can't be read or is malformed; the message names the file and the line.
    """
    lines = _lines(Path(path))
    # The column names of the first line as written there, checked to name every required column once
    columns = tuple(name.strip() for name in lines[0].split(","))
    meanings = [_ALIASES.get(name, name) for name in columns]
    for name in _REQUIRED:
        if name not in meanings:
            raise LayoutError(f"{os.fspath(path)}, line 1: no column {name}; expected {','.join(_REQUIRED)}")
    for name, meaning in zip(columns, meanings, strict=True):
        if meaning not in _REQUIRED + _OPTIONAL or meanings.count(meaning) > 1:
            raise LayoutError(f"{os.fspath(path)}, line 1: column {name!r} is unknown or given twice")
    names: dict[str, int] = {}
    buffers: list[Buffer] = []
    offsets: list[int] = []
    for number, line in enumerate(lines[1:], start=2):
        try:
            values = line.split(",")
            if len(values) != len(columns):
                raise LayoutError(f"{len(values)} fields for {len(columns)} columns")
            fields = {_ALIASES.get(name, name): value for name, value in zip(columns, values, strict=True)}
            earlier = names.setdefault(fields["id"], number)
            if earlier != number:
                raise LayoutError(f"id {fields['id']} was given on line {earlier} already")
            position = len(buffers)
            inclusive = "end" in columns
            if fields.get("gaps", "").strip():
                raise LayoutError("gaps in lifetimes are not supported")
            buffer = Buffer(
                id=position,
                size=_integer(fields, "size"),
                start=_integer(fields, "lower"),
                stop=_integer(fields, "upper") + inclusive,
                alignment=_integer(fields, "alignment", 1),
            )
            validate_buffer(buffer)
            buffers.append(buffer)
            offsets.append(_integer(fields, "offset", 0))
        except LayoutError as error:
            raise LayoutError(f"{os.fspath(path)}, line {number}: {error}") from None
    return PackingProblem(tuple(names), tuple(buffers), tuple(offsets) if "offset" in columns else None)


def write_solution(path: str | os.PathLike[str], problem: PackingProblem, layout: Layout) -> None:
    """Write a problem with its offsets, the file whole or not at all.

    The columns are ``id,lower,upper,size,offset``, with ``alignment`` before ``offset`` where one is not 1.

    Raises:
        LayoutError: The numbers of offsets and of buffers differ, or the file can't be written.
    """
    if len(layout.offsets) != len(problem.buffers):
        raise LayoutError(f"{len(layout.offsets)} offsets for {len(problem.buffers)} buffers; {path} is not written")
    aligned = any(buffer.alignment != 1 for buffer in problem.buffers)
    rows = [["id", "lower", "upper", "size", *(["alignment"] if aligned else []), "offset"]]
    for name, buffer, offset in zip(problem.names, problem.buffers, layout.offsets, strict=True):
        numbers = [buffer.start, buffer.stop, buffer.size, *([buffer.alignment] if aligned else []), offset]
        rows.append([name, *map(str, numbers)])
    text = "".join(",".join(row) + "\n" for row in rows)
    try:
        write_whole(Path(path), lambda target: target.write(text.encode()))
    except (OSError, UnicodeEncodeError) as error:
        raise LayoutError(f"{path} can't be written: {error}") from error


def _lines(path: Path) -> list[str]:
    """The lines of a file, blank ones at its end left out; at least one."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or no name of a file
        why = f"{error}." if isinstance(error, OSError) else "it is no text, but should be a CSV file of buffers."
        raise LayoutError(f"{path} can't be read: {why}") from error
    lines = text.rstrip().split("\n")
    if not lines[0].strip():
        raise LayoutError(f"{path}, line 1: no column names; expected {','.join(_REQUIRED)}")
    return [line.rstrip("\r") for line in lines]


def _integer(fields: Mapping[str, str], column: str, default: int | None = None) -> int:
    if default is not None and column not in fields:
        return default
    text = fields[column].strip()
    if not _INTEGER.fullmatch(text):
        raise LayoutError(f"{column} is {text!r}, not an integer of at most 18 digits")
    return int(text)
