"""Rows of a long table, kept in a file after each, so that another run goes on where one ended."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any


class Record:
    """Measured rows by name, in JSON.

    Args:
        path: The file; None keeps the rows in memory alone.
        resumes: Whether to begin with the file's rows.
        minutes: No row is begun after so many.
    """

    def __init__(self, path: Path | None, resumes: bool = False, minutes: float = math.inf) -> None:
        self._path, self._end = path, time.monotonic() + 60 * minutes
        self.rows: dict[str, dict[str, Any]] = {}
        if resumes and path is not None and path.is_file():
            self.rows = json.loads(path.read_text())

    @property
    def is_over(self) -> bool:
        """Whether the time for new rows is over."""
        return time.monotonic() > self._end

    def add(self, name: str, row: Mapping[str, Any]) -> None:
        """Keep a row; one of that name is replaced."""
        self.rows[name] = dict(row)
        if self._path is not None:
            self._path.write_text(json.dumps(self.rows, indent=1) + "\n")


def progress(names: list[str], record: Record, is_done: Callable[[str], bool]) -> Iterator[str]:
    """The names of rows that aren't done, as long as there is time."""
    missing = [name for name in names if not is_done(name)]
    for number, name in enumerate(missing):
        if record.is_over:
            print(f"out of time: {len(missing) - number} of {len(names)} rows are left (--resume goes on)", flush=True)
            return
        yield name
