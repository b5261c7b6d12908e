"""Models in loops, beside themselves as they were.

``python -m benchmarks.inference.loops [--images] [--batch N] [--threads N...] [NAME...]`` writes loops.txt, with
``--images`` images.txt; at another batch than 16 loops_batchN.txt, with so many threads ..._threadsN.txt. Networks of
`benchmarks.networks`, or networks of single images, in stock onnxruntime with its default options, file before and
after in processes of their own that take turns: own memory of the process once loaded, the most of a run beyond that,
and the median of what pairs of turns take. Outputs are compared bit for bit. With numbers of threads (0: the default)
each file is made once, as always, and compared with so many within a node, a table for each. A network that gains
nothing has the reason. Rows are kept in JSON beside the tables: ``--resume`` takes those that are there, ``--minutes``
begins none after so many.
"""

import argparse
import dataclasses
import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import memonger
from benchmarks.machine import MIB, Record, Table, geometric_mean, keep, stamp
from benchmarks.networks import DEFAULT, EVERY, IMAGES, NETWORKS, write
from memonger.errors import PlanError
from memonger.loops.search import Footprint, Shrunk, in_pairs
from memonger.model.load import load
from memonger.runtime.feeds import random_feeds
from memonger.runtime.measure import MeasuredSession, RunJob, read_arrays, write_arrays
from memonger.runtime.program import inputs_of

PACKAGES = ("onnxruntime", "onnx", "onnx-ir", "numpy")
BATCH = 16
OVERHEAD, IMAGES_OVERHEAD = 0.05, 0.1
"""How much longer a run may take."""

TABLE = Table(
    "network<19", "loaded>8.1f", "after>7.1f", "run>9.1f", "after>8.1f", "ratio>6.3f", "time>5.2f", "forecast>9.2f",
    "after>6.2f", "seconds>8.0f", "slices<16", missing="-",
)  # fmt: skip


def rows(
    name: str, batch: int, counts: Sequence[int], most: float
) -> Mapping[int, tuple[str, float | None, float | None]]:
    """By the number of threads a line of the table, and the ratios of memory and time; one file for all of them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        write(name, path)
        begin = time.perf_counter()
        try:
            made = memonger.shrink(path, batch=batch, max_overhead=most)
        except PlanError as error:
            return dict.fromkeys(counts, (f"{name:19} {str(error).split(': ', 1)[-1]}", None, None))
        seconds, found = time.perf_counter() - begin, dict[int, tuple[str, float | None, float | None]]()
        if any(counts):
            made.save(path.with_name("after.onnx"))
        slices = ", ".join(f"{loop.nodes}:{loop.slices}" for loop in made.loops) or "none"
        for threads in counts:
            one = _with_threads(path, batch, threads, made) if threads else made
            before, after, took = one.before, one.after, one.time_ratio
            assert took is not None
            memory = _run(after) / _run(before)
            loaded = ((each.loaded_bytes or 0) / MIB for each in (before, after))
            line = TABLE.row(
                name, *loaded, _run(before) / MIB, _run(after) / MIB, memory, took, _forecast(before), _forecast(after),
                seconds, slices,
            )  # fmt: skip
            found[threads] = line, memory, took
    return found


def _with_threads(path: Path, batch: int, threads: int, made: Shrunk) -> Shrunk:
    """The same, with what a file and ``after.onnx`` beside it take with so many threads within a node.

    Raises:
        RuntimeError: their outputs differ.
    """
    folder, files = path.parent, (path.name, "after.onnx")
    write_arrays(folder / "inputs.npz", random_feeds(inputs_of(load(path, batch=batch).ir.graph)))

    def job(file: str) -> RunJob:
        inputs, outputs = (str(folder / f"{name}.npz") for name in ("inputs", file))
        return RunJob(str(folder / file), inputs, outputs, planned=False, threads=threads)

    with ExitStack() as stack:
        before, after = (stack.enter_context(MeasuredSession(job(file), folder, file)) for file in files)
        arrays = [read_arrays(folder / f"{file}.npz") for file in files]
        if any(arrays[0][name].tobytes() != arrays[1][name].tobytes() for name in arrays[0]):
            raise RuntimeError(f"outputs of {path.stem} differ with {threads} threads")
        ratio = in_pairs(after, before, 1.0).ratio
    was, now = Footprint.of(before, made.before.expected), Footprint.of(after, made.after.expected)
    return dataclasses.replace(made, before=was, after=now, time_ratio=ratio)


def _run(footprint: Footprint) -> int:
    return max(1, footprint.run_bytes or 0)


def _forecast(footprint: Footprint) -> float | None:
    """What a run was expected to take, as a part of what it took; None where that isn't known."""
    return None if footprint.expected is None else footprint.expected.run_bytes / _run(footprint)


def lines(name: str, names: Sequence[str], batch: int, threads: int, most: float, record: Record) -> Iterator[str]:
    """The lines of a table, of those of these names that were measured.

    Args:
        name: What the command that measures it begins with.
        names: Of networks, in order.
        batch: At which they ran.
        threads: Within a node; 0: onnxruntime's default.
        most: How much longer a run might take.
        record: Their rows.
    """
    yield from stamp(" ".join([name, *([f"--threads {threads}"] if threads else [])]), PACKAGES)
    yield ""
    yield f"batch {batch}, {threads or 'all'} threads, --max-overhead {most}; MiB of the process's own memory;"
    yield "forecast: of a run, as a part of it; slices: nodes, and in how many slices they run (none: a branch)"
    yield ""
    yield TABLE.heading
    means = list[tuple[str, float, float]]()
    for network in (network for network in names if network in record.rows):
        line, memory, took = record.rows[network]["row"]
        yield line
        family = EVERY[network].family
        means += [(family, memory, took)] if memory is not None and took is not None else []
    yield ""
    for family in dict.fromkeys(family for family, _, _ in means):
        ratios = [(memory, took) for kind, memory, took in means if kind == family]
        memory, took = (geometric_mean(values) for values in zip(*ratios, strict=True))
        yield f"{family}: {len(ratios)} gain, {memory:.3f} of the memory of a run at {took:.2f} of its time"


def main() -> None:
    """Measure, print and keep the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", action="store_true", help="networks of single images")
    parser.add_argument("names", nargs="*", choices=[[], *EVERY], help="only these networks, and no file")
    parser.add_argument("--batch", type=int, default=BATCH, help="images or sequences at a time; those of --images: 1")
    threads = "within a node; 0: onnxruntime's default; a table for each number, each file made once"
    parser.add_argument("--threads", type=int, nargs="+", default=[0], help=threads)
    parser.add_argument("--resume", action="store_true", help="run what the tables' rows in JSON lack")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no network after so many")
    given = parser.parse_args()
    unknown = set(given.names).difference(IMAGES if given.images else NETWORKS)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: {'without' if given.images else 'with'} --images")
    batch, most = (1, IMAGES_OVERHEAD) if given.images else (given.batch, OVERHEAD)
    usual = list(IMAGES) if given.images else [name for name in DEFAULT if not NETWORKS[name].is_long]
    stem = "images" if given.images else "loops" if batch == BATCH else f"loops_batch{batch}"
    paths = {n: Path(__file__).with_name(f"{stem}_threads{n}.txt" if n else f"{stem}.txt") for n in given.threads}
    records = {
        n: Record(None if given.names else path.with_suffix(".json"), given.resume, given.minutes)
        for n, path in paths.items()
    }
    names = given.names or usual
    for name in names:
        missing = [n for n, record in records.items() if name not in record.rows and not record.is_over]
        if missing:
            for count, row in rows(name, batch, missing, most).items():
                records[count].add(name, {"row": row})
                print(f"{count or 'all'} threads: {row[0]}", flush=True)
    told = ["--images"] if given.images else [f"--batch {batch}"] if batch != BATCH else []
    command = " ".join(["inference.loops", *told, *given.names])
    for count, path in paths.items():
        keep(lines(command, names, batch, count, most, records[count]), None if given.names else path)


if __name__ == "__main__":
    main()
