"""The rows, as they are kept: a line of JSON each, written as it comes."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
"""``stage``, ``item``, ``seconds`` that it took, and ``failed`` with the reason or what the stage measured."""


def append(path: Path, row: Row) -> None:
    """Add a row; it is on the disk when this returns."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def load(path: Path) -> list[Row]:
    """The rows there are, the last one of each item; a line that was cut off is none."""
    if not path.is_file():
        return []
    found: dict[tuple[str, str], Row] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
            found[row["stage"], row["item"]] = row
        except (json.JSONDecodeError, TypeError, KeyError):
            continue
    return list(found.values())


def of(rows: Sequence[Row], stage: str) -> list[Row]:
    """The rows of a stage that didn't fail."""
    return [row for row in rows if row["stage"] == stage and not row.get("failed")]


def failed(rows: Sequence[Row], stage: str) -> list[Row]:
    """The rows of a stage that did."""
    return [row for row in rows if row["stage"] == stage and row.get("failed")]


def head(rows: Sequence[Row]) -> Row | None:
    """What they were measured on; None where nothing was."""
    return next(iter(of(rows, "about")), None)
