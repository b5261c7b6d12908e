"""What every table of a benchmark has: a stamp of what it was measured on, columns, geometric means."""

import importlib.metadata
import math
import os
import platform
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

MIB = 1 << 20
HERE = Path(__file__).parent  # where tables are kept
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
