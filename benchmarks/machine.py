"""What every table of a benchmark has: a stamp of what it was measured on, columns, rows that are kept, means."""

import argparse
import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

MIB = 1 << 20
HERE = Path(__file__).parent  # where tables of the programs beside it are kept
ROOT = HERE.parent
LOAD = os.getloadavg()[0]  # before this program added to it


class Table:
    """Columns of a table, each given as its head, alignment, width and number format: ``network<16``, ``ms>9.1f``.

    A column to the left after one to the right has two spaces before it. ``missing`` is what stands for None.
    """

    def __init__(self, *columns: str, missing: str = "") -> None:
        self.columns = [re.fullmatch(r"(.*)([<>])(\+?)(\d+)(.*)", column).groups() for column in columns]
        self.missing = missing

    @property
    def heading(self) -> str:
        """The heads."""
        return self.row(*(column[0] for column in self.columns))

    def row(self, *cells: object) -> str:
        """A line: numbers in their column's format, text as it is; later cells may be left out."""
        line, before = "", "<"
        for cell, (_, align, sign, width, form) in zip(cells, self.columns, strict=False):
            text = self.missing if cell is None else cell if isinstance(cell, str) else format(cell, sign + form)
            line += f"{'  ' if (before, align) == ('>', '<') else ''}{text:{align}{width}}"
            before = align
        return line.rstrip()


def stamp(command: str, packages: Sequence[str]) -> list[str]:
    """What a table was measured on: machine, versions and load, and the command that measures it."""
    return [f"{machine(packages)}, load {LOAD:.1f}", f"command: python -m benchmarks.{command}"]


def keep(lines: Iterable[str], path: Path | None) -> None:
    """Print lines as they come, and write them to a file at the end."""
    text = ""
    for line in lines:
        print(line, flush=True)
        text += line.rstrip() + "\n"
    if path is not None:
        path.write_text(text, encoding="utf-8")


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


def chosen(doc: str | None, known: Iterable[str]) -> tuple[tuple[str, ...], bool]:
    """The names on a program's command line, all that are known where it has none; and whether it has none.

    Args:
        doc: The program's docstring, whose first line ``--help`` shows.
        known: Names.
    """
    parser, every = argparse.ArgumentParser(description=(doc or "").splitlines()[0]), tuple(known)
    parser.add_argument("names", nargs="*", choices=(*every, []), metavar="NAME", help=f"of {', '.join(every)}")
    names = tuple(parser.parse_args().names)
    return names or every, not names


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


def pyplot() -> Any:
    """matplotlib's pyplot, which draws into files only."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def machine(packages: Sequence[str]) -> str:
    """Processor with its widest vectors, which products run as fast as, cores, Python, and versions of packages."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    fields = {name.strip(): text.strip() for name, _, text in (line.partition(":") for line in lines)}
    features = fields.get("flags", fields.get("Features", "")).split()
    vectors = next((f" ({width})" for width in ("avx512f", "avx2", "sve", "asimd") if width in features), "")
    model = fields.get("model name") or platform.processor()
    versions = ", ".join(f"{name} {_version(name)}" for name in packages)
    return f"{model}{vectors}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed as a package)"


def accelerator(index: int) -> str:
    """A GPU's name, memory, driver, and the CUDA version the driver supports.

    Raises:
        ImportError: nvidia-ml-py isn't installed.
    """
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    size, version = pynvml.nvmlDeviceGetMemoryInfo(handle).total, pynvml.nvmlSystemGetCudaDriverVersion()
    name, driver = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlSystemGetDriverVersion()
    supported = f"{version // 1000}.{version % 1000 // 10}"
    return f"{name}, {size / (1 << 30):.1f} GiB, driver {driver} (up to CUDA {supported})"
