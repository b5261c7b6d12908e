"""Every allocator on hard packing instances and on generated ones: arena ÷ lower bound, and milliseconds.

Run from the repository's root: ``python -m benchmarks.packing [NAME ...]``. Prints the table, and writes it to
benchmarks/packing.txt unless problems are named.
The training-like problems have forward values read again in reverse order, one in five short-lived, and gradients that
live a few steps. Every layout is checked. A time is of one run.
"""

import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.machine import HERE, keep, stamp
from memonger.layout import ALLOCATORS, Allocator, Buffer, allocate, check_layout, lower_bound
from memonger.layout.minimalloc_csv import read_problem

ROOT = Path(__file__).parent.parent
TRAINING_SIZES = (2_000, 5_000, 20_000)


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
    for path in sorted((ROOT / "tests" / "data" / "packing").glob("*.csv")):
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


def table(names: Sequence[str]) -> Iterator[str]:
    """Lines of the table, as they are measured: one problem after the other, or those named."""
    strategies = {**ALLOCATORS, "allocate": allocate}
    yield from stamp("packing", ["numpy"])
    yield "each line: arena / lower bound, milliseconds; allocate: strategies in this order until one is good enough"
    for name, buffers in problems():
        if names and name not in names:
            continue
        yield f"\n{name}: {len(buffers)} buffers, lower bound {lower_bound(buffers):,} bytes"
        for strategy, allocator in strategies.items():
            yield f"  {strategy:24} {measure(allocator, buffers)}"


if __name__ == "__main__":
    keep(table(sys.argv[1:]), None if sys.argv[1:] else HERE / "packing.txt")
