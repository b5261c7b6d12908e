"""What every command shares: a progress bar, notes and results on the terminal, and reading an .npz of inputs."""

import json
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from memonger.errors import MemongerError

STAGES = 7


@contextmanager
def progress_bar(quiet: bool, title: str) -> Iterator[Callable[[str], None]]:
    """A bar on standard error that advances at each new stage; nothing where standard error is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task(title, total=STAGES)
        seen = set[str]()

        def tell(stage: str) -> None:
            new = stage.partition(":")[0] not in seen
            seen.add(stage.partition(":")[0])
            progress.update(task, description=f"{title}: {stage}", advance=int(new))

        yield tell


def print_json(record: Any) -> None:
    """One JSON object on standard output."""
    click.echo(json.dumps(record))


def print_notes(notes: Sequence[str]) -> None:
    """Each note once, on standard error."""
    for note in dict.fromkeys(notes):
        click.echo(f"memonger: note: {note}", err=True)


def read_inputs(path: Path | None) -> dict[str, np.ndarray] | None:
    """The arrays of an .npz by name; None without a path.

    Raises:
        MemongerError: the file is no .npz.
    """
    if path is None:
        return None
    try:
        if not zipfile.is_zipfile(path):
            raise MemongerError(f"{path} is not an .npz of input arrays: write one with numpy.savez.")
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise MemongerError(f"{path} is not an .npz of input arrays: {str(error).rstrip('.')}.") from error
