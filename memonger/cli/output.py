"""What every command shares: a progress bar, notes and results on the terminal, and reading an .npz of inputs."""

import itertools
import json
import re
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx_ir as ir
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from memonger.errors import MemongerError
from memonger.model.load import load_as_is
from memonger.units import shown

STAGES = 7
LINE_SECONDS = 5.0
WIDEST = 1000  # columns
FOUND = "search: found "


class Screen(Console):
    """A terminal that shows texts as they are: no markup and no emoji in them, and what isn't printable escaped."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """The text as rich shows it; every cell and title of a table, and all that is printed, comes through here."""
        return super().render_str(_in_letters_of(self.encoding, shown(text)), **options)


def print_line(text: str, *, err: bool = False) -> None:
    """One line, what isn't printable in it escaped."""
    click.echo(_in_letters_of((sys.stderr if err else sys.stdout).encoding, shown(text)), err=err)


_PLAIN = str.maketrans({**dict(zip("▁▂▃▄▅▆▇█", "_.:-=+*#", strict=True)), "÷": "/", "…": "..."})
"""What our own texts are written with where an output has no Unicode; rich draws its tables in ASCII there."""


def _in_letters_of(encoding: str | None, text: str) -> str:
    try:
        text.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return text.translate(_PLAIN)
    return text


def print_lines(console: Console, lines: Sequence[str]) -> None:
    """Each on a line of its own, wrapped between words."""
    for line in lines:
        console.print(line)


def print_wide(console: Console, table: Table) -> None:
    """A table of many columns: where there is no terminal, as wide as it takes."""
    if not console.is_terminal:
        wide = console.options.update(max_width=WIDEST)
        console.width = max(console.width, console.measure(table, options=wide).maximum)
    console.print(table)


@contextmanager
def progress_bar(quiet: bool, title: str, steps: int = STAGES) -> Iterator[Callable[[str], None]]:
    """What is being done, on standard error: a bar on a terminal, else a line from time to time.

    The bar moves by one of ``steps`` for each stage that wasn't told of before. What a search has found of a frontier
    stays as a line of its own.
    """
    console = Screen(stderr=True)
    if quiet:
        yield lambda stage: None
    elif not console.is_terminal:
        with _lines(title) as report_progress:
            yield report_progress
    else:
        with _bar(title, console, steps) as report_progress:
            yield report_progress


@contextmanager
def _bar(title: str, console: Screen, steps: int) -> Iterator[Callable[[str], None]]:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(shown(title), total=steps)
        seen = set[str]()

        def report_progress(stage: str) -> None:
            new = stage.partition(":")[0] not in seen
            seen.add(stage.partition(":")[0])
            if stage.startswith(FOUND):
                progress.console.print(f"{title}: {stage.removeprefix(FOUND)}")
            progress.update(task, description=shown(f"{title}: {stage}"), advance=int(new))

        yield report_progress


@contextmanager
def _lines(title: str) -> Iterator[Callable[[str], None]]:
    """Says what is being done in a line after `LINE_SECONDS`, and ever more seldom; nothing of what takes less."""
    begin, state, over = time.monotonic(), [""], threading.Event()

    def say(stage: str) -> None:
        print_line(f"{title}: {stage} ({time.monotonic() - begin:.0f} s)", err=True)

    def speak() -> None:
        while not over.wait(max(LINE_SECONDS, (time.monotonic() - begin) / 4)):
            say(state[0])

    def report_progress(stage: str) -> None:
        state[0] = stage
        if stage.startswith(FOUND):
            say(stage.removeprefix(FOUND))

    speaker = threading.Thread(target=speak, daemon=True)
    speaker.start()
    try:
        yield report_progress
    finally:
        over.set()
        speaker.join()


def done_of(done: int, of: int, what: str, begin: float) -> str:
    """How many of some alike parts are done, and about how long the others take.

    Args:
        done: How many.
        of: Of how many.
        what: What they are, as ``runs``.
        begin: When the first began, by `time.monotonic`.
    """
    left = f", about {(time.monotonic() - begin) / done * (of - done):.0f} s left" if done else ""
    return f"{done} of {of} {what} done{left}"


def print_json(record: Any) -> None:
    """One JSON object on standard output."""
    click.echo(json.dumps(record))


def print_result(as_json: bool, record: Any, *lines: str) -> None:
    """What a command found or did: the record as JSON, or else in sentences."""
    if as_json:
        print_json(record)
        return
    for line in lines:
        print_line(line)


def print_notes(notes: Sequence[str]) -> None:
    """Each note once, on standard error."""
    for note in dict.fromkeys(notes):
        print_line(f"memonger: note: {note}", err=True)


def read_inputs(path: Path | None, *models: Path) -> dict[str, Any] | None:
    """The arrays of an .npz by name; None without a path.

    What one of the models takes as a sequence ``x`` is the list of its arrays ``x[0]``, ``x[1]`` and so on, or of the
    rows of an array ``x``: an empty one has none.

    Raises:
        MemongerError: the file is no .npz.
    """
    if path is None:
        return None
    try:
        if not zipfile.is_zipfile(path):
            raise MemongerError(f"{path} is not an .npz of input arrays: write one with numpy.savez.")
        with np.load(path, allow_pickle=False) as arrays:
            content = {name: arrays[name] for name in arrays.files}
            strange = next((name for name, array in content.items() if not isinstance(array, np.ndarray)), None)
            if strange is not None:
                raise MemongerError(f"{path} is not an .npz of input arrays: '{strange}' is no array.")
            return _with_sequences(content, models)
    except MemongerError:
        raise
    except Exception as error:  # of a file from outside numpy and zipfile raise nearly everything
        text = " Text is read from arrays of numpy's str: array.astype(str)." if "allow_pickle" in str(error) else ""
        raise MemongerError(f"{path} is not an .npz of input arrays: {str(error).rstrip('.')}.{text}") from error


_ELEMENT = re.compile(r"(.+)\[\d+\]")


def _with_sequences(content: Mapping[str, np.ndarray], models: Sequence[Path]) -> dict[str, Any]:
    """The arrays, in lists where they are those of a sequence that a model takes."""
    named = {match[1] for match in map(_ELEMENT.fullmatch, content) if match is not None} - content.keys()
    inputs = [value for model in models for value in load_as_is(model).ir.graph.inputs]
    sequences = {str(value.name) for value in inputs if isinstance(value.type, ir.SequenceType)}
    found = dict[str, Any](content)
    for sequence in sorted(named & sequences):
        names = list(itertools.takewhile(found.__contains__, (f"{sequence}[{n}]" for n in itertools.count())))
        found[sequence] = [found.pop(name) for name in names]
    return found | {name: list(map(np.asarray, found[name])) for name in sequences & content.keys() if found[name].ndim}
