"""Every allocator on hard packing instances and on generated ones: arena ÷ lower bound, and milliseconds.

``python -m benchmarks.planning.packing [--minimalloc PROGRAM] [NAME ...]`` prints the table, and writes
packing.txt unless problems are named. The hard instances are also packed into their
capacity, by this project's search with numba and without, each in a process of its own, and by MiniMalloc if its
program is given.
The training-like problems have forward values read again in reverse order, one in five short-lived, and gradients that
live a few steps. Every layout is checked. A time is of one run; numba's leaves out the compilation.
"""

import argparse
import importlib.util
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.machine import ROOT, keep, stamp
from memonger.allocation import (
    ALLOCATORS,
    Allocator,
    Buffer,
    Layout,
    allocate,
    check_layout,
    lower_bound,
    placement_search,
)
from memonger.allocation.minimalloc_csv import read_problem

TRAINING_SIZES = (2_000, 5_000, 20_000)
CAPACITY = 1 << 20
EFFORT = 1_000_000_000
HARD = sorted((ROOT / "tests" / "data" / "packing").glob("*.csv"))


def training_like(count: int, seed: int = 1) -> list[Buffer]:
    """A generated problem of this many buffers, sizes in multiples of 1,000 bytes, aligned to 64."""
    rng = random.Random(seed)
    half = count // 2

    def size() -> int:
        return rng.choice([1, 2, 4, 8, 16]) * rng.randint(1, 64) * 1000

    buffers = []
    for step in range(half):
        stop = 2 * half - step if rng.random() < 0.8 else step + rng.randint(2, 6)
        buffers.append(Buffer(step, size(), step, stop))
    return buffers + [Buffer(step, size(), step, step + rng.randint(2, 3)) for step in range(half, count)]


def problems() -> Iterator[tuple[str, Sequence[Buffer]]]:
    """Names and buffers."""
    for path in HARD:
        yield path.name[0], read_problem(path).buffers
    for count in TRAINING_SIZES:
        yield f"training-{count}", training_like(count)


def measure(allocator: Allocator, buffers: Sequence[Buffer]) -> str:
    """One cell of the table."""
    begin = time.perf_counter()
    layout = allocator(buffers)
    milliseconds = 1000 * (time.perf_counter() - begin)
    check_layout(buffers, layout)
    return f"{layout.size / lower_bound(buffers):.4f} {milliseconds:7.1f}"


def solve(name: str, compiled: bool) -> None:
    """Pack a hard instance into its capacity in this process, and print the seconds."""
    placement_search.has_numba = lambda: compiled  # type: ignore[assignment]
    buffers = read_problem(next(path for path in HARD if path.name[0] == name)).buffers
    if compiled:
        allocate(buffers, capacity=CAPACITY, effort=1)  # compiles
    begin = time.perf_counter()
    layout = allocate(buffers, capacity=CAPACITY, effort=EFFORT)
    seconds = time.perf_counter() - begin
    check_layout(buffers, layout)
    print(f"{seconds:.2f}" if layout.size <= CAPACITY else "none")


def solved_by(arguments: Sequence[str]) -> str:
    """What a process of its own prints."""
    command = [sys.executable, "-m", "benchmarks.planning.packing", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout.strip()


def minimalloc(program: str, path: Path) -> str:
    """Seconds of MiniMalloc, its process included; its layout is checked."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "solved.csv"
        begin = time.perf_counter()
        command = [program, f"--capacity={CAPACITY}", f"--input={path}", f"--output={output}"]
        subprocess.run(command, check=True, capture_output=True)
        seconds = time.perf_counter() - begin
        solved = read_problem(output)
    check_layout(solved.buffers, Layout(solved.offsets or (), CAPACITY))
    return f"{seconds:.2f}"


def into_capacity(program: str | None) -> Iterator[str]:
    """The hard instances packed into their capacity: seconds."""
    yield f"\nseconds until a layout of {CAPACITY:,} bytes is found"
    yield f"{'':8} {'numba':>8} {'without':>8} {'MiniMalloc':>10}"
    for path in HARD:
        name = path.name[0]
        compiled = solved_by(["--solve", name, "--compiled"]) if importlib.util.find_spec("numba") else "-"
        plain = solved_by(["--solve", name])
        yield f"{name:8} {compiled:>8} {plain:>8} {minimalloc(program, path) if program else '-':>10}"


def table(names: Sequence[str], program: str | None) -> Iterator[str]:
    """Lines of the table, as they are measured: one problem after the other, or those named."""
    strategies = {**ALLOCATORS, "allocate": allocate}
    yield from stamp("planning.packing --minimalloc PROGRAM", ["numpy", "numba"])
    yield "each line: arena / lower bound, milliseconds; allocate: strategies in this order, then the search"
    for name, buffers in problems():
        if names and name not in names:
            continue
        yield f"\n{name}: {len(buffers)} buffers, lower bound {lower_bound(buffers):,} bytes"
        for strategy, allocator in strategies.items():
            yield f"  {strategy:24} {measure(allocator, buffers)}"
    if not names:
        buffers = training_like(1_000_000)
        yield f"\ntraining-1000000: allocate {measure(allocate, buffers)}"
        yield from into_capacity(program)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these problems; no table is written")
    parser.add_argument("--minimalloc", metavar="PROGRAM", help="MiniMalloc's program, built from its repository")
    parser.add_argument("--solve", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--compiled", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.solve:
        solve(options.solve, options.compiled)
        return
    keep(table(options.names, options.minimalloc), None if options.names else Path(__file__).with_suffix(".txt"))


if __name__ == "__main__":
    main()
