"""Models in loops, beside themselves as they were: ``python -m benchmarks.inference.loops [NAME...]``.

Writes loops.txt. Networks of `benchmarks.networks` at batch 16, in stock onnxruntime with its default options, file
before and after in processes of their own that take turns: own memory of the process once loaded, the most of a run
beyond that, and the fastest run. Outputs are compared bit for bit. A network that gains nothing has the reason.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import memonger
from benchmarks.machine import MIB, Table, geometric_mean, keep, stamp
from benchmarks.networks import DEFAULT, NETWORKS, write
from memonger.errors import PlanError
from memonger.loops.search import Footprint

BATCH = 16
TABLE = Table(
    "network<19", "loaded>8.1f", "after>7.1f", "run>9.1f", "after>8.1f", "ratio>6.3f", "time>5.2f", "forecast>9.2f",
    "after>6.2f", "seconds>8.0f", "slices<16",
)  # fmt: skip


def row(name: str, folder: Path) -> tuple[str, float | None, float | None]:
    """A line of the table, and the ratios of memory and time."""
    write(name, folder / "model.onnx")
    begin = time.perf_counter()
    try:
        made = memonger.shrink(folder / "model.onnx", batch=BATCH)
    except PlanError as error:
        return f"{name:19} {str(error).split(': ', 1)[-1]}", None, None
    before, after = made.before, made.after
    assert before.seconds is not None
    assert after.seconds is not None
    memory, took = _run(after) / _run(before), after.seconds / before.seconds
    slices = ", ".join(f"{loop.nodes}:{loop.slices}" for loop in made.loops)
    line = TABLE.row(
        name, (before.loaded_bytes or 0) / MIB, (after.loaded_bytes or 0) / MIB, _run(before) / MIB, _run(after) / MIB,
        memory, took, _forecast(before), _forecast(after), time.perf_counter() - begin, slices,
    )  # fmt: skip
    return line, memory, took


def _run(footprint: Footprint) -> int:
    return max(1, footprint.run_bytes or 0)


def _forecast(footprint: Footprint) -> float:
    """What a run was expected to take, as a part of what it took."""
    return (footprint.expected.run_bytes if footprint.expected else math.nan) / _run(footprint)


def lines(names: Sequence[str]) -> Iterator[str]:
    """The lines of the table, of all networks or those of these names."""
    yield from stamp(" ".join(["inference.loops", *names]), ("onnxruntime", "onnx", "onnx-ir", "numpy"))
    yield ""
    yield f"batch {BATCH}; MiB of the process's own memory; forecast: of a run, as a part of it; "
    yield "slices: nodes, and in how many slices they run"
    yield ""
    yield TABLE.heading
    means = list[tuple[str, float, float]]()
    for name in names or [name for name in DEFAULT if not NETWORKS[name].is_long]:
        with tempfile.TemporaryDirectory() as folder:
            line, memory, took = row(name, Path(folder))
        yield line
        means += [(NETWORKS[name].family, memory, took)] if memory is not None and took is not None else []
    yield ""
    for family in dict.fromkeys(family for family, _, _ in means):
        ratios = [(memory, took) for kind, memory, took in means if kind == family]
        memory, took = (geometric_mean(values) for values in zip(*ratios, strict=True))
        yield f"{family}: {len(ratios)} gain, {memory:.3f} of the memory of a run at {took:.2f} of its time"


def main() -> None:
    """Measure, print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *NETWORKS], help="only these networks, and no file")
    names = parser.parse_args().names
    keep(lines(names), None if names else Path(__file__).with_suffix(".txt"))


if __name__ == "__main__":
    main()
