"""Inference in chunks beside stock onnxruntime and plans without: ``python -m benchmarks.chunks`` writes chunks.txt.

A row is a network at a batch and a number of threads. Its contestants, each in a process of its own, take turns: stock
onnxruntime as it comes, stock without its memory arena, memonger's plan without chunks, and with them. Memory is what a
run takes over the loaded model (`memonger.runtime.process_memory`). Planning has a process of its own, too. Rows are
kept in chunks.json as they are measured, those at batch 16 first: ``--minutes`` ends a run, ``--resume`` goes on.

``--images``: networks of single images, at batch 1, in chunks of their rows: images.txt. ``--budgets``: GPT-2 in ever
smaller budgets, with chunks and by recomputing alone: budgets.txt. ``--resume`` and ``--minutes`` hold for each.
"""

import itertools
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.chunks.budgets import budget_lines, measure_budgets
from benchmarks.chunks.plans import Planner, Wish, slices
from benchmarks.machine import MIB, Record, Table, geometric_mean, keep, progress, stamp
from benchmarks.networks import DEFAULT, EVERY, IMAGES, NETWORKS, write
from benchmarks.turns import contest, race
from memonger.cli.differences import difference
from memonger.runtime.measure import RunJob
from memonger.runtime.worker import WorkerError, reason

BATCHES, THREADS = (16, 1, 4, 64), (2, 1)
QUICK = ("mobilenet_v2", "vit", "t5_encoder")
ROUNDS, SECONDS = 5, 10.0  # turns a session takes, and about how long all turns of a row are
FEWEST = 3  # turns, where each is of a single run that is long
ROOM = 0.8  # of the memory that is free may the contestants of a row take
STOCK = {"stock": {}, "no arena": {"arena": False}}
PLANS = {"off": "off", "chunked": "auto"}
AIMS = (
    (1, "image", "0.05"), (1, "whole image", "0.3"), (16, "CNN", "0.05"), (16, "transformer", "0.25"),
    (64, "CNN", "0.05"), (64, "transformer", "0.25"),
)  # fmt: skip
"""For a family at a batch, of stock's memory."""
HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured of a network at a batch with so many threads; by contestant: bytes and seconds.

    Attributes:
        network: Its name.
        batch: Samples.
        threads: Threads within a node.
        failed: Why there is nothing else; empty where there is.
        plans: What `benchmarks.chunks.plans.answer` says, without chunks and with them.
        peak: What a run takes over the loaded model.
        loaded: What loading leaves resident.
        median: Of the seconds of a run.
        p95: 95 of 100 runs took no longer.
        bits: Of the plans, how their outputs differ from stock onnxruntime's told the same shapes; empty: nowhere.
    """

    network: str
    batch: int
    threads: int
    failed: str = ""
    plans: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    peak: Mapping[str, int] = field(default_factory=dict)
    loaded: Mapping[str, int] = field(default_factory=dict)
    median: Mapping[str, float] = field(default_factory=dict)
    p95: Mapping[str, float] = field(default_factory=dict)
    bits: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int, int]:
        """What it is a row of."""
        return self.network, self.batch, self.threads

    @property
    def name(self) -> str:
        """The same in words."""
        return _name(*self.key)

    def memory(self, one: str = "chunked", other: str = "stock") -> float:
        """A contestant's memory, as a multiple of another's."""
        return self.peak[one] / self.peak[other]

    @property
    def beside_outputs(self) -> float:
        """The same of the plan in chunks, without the outputs, which both hold."""
        outputs = self.plans["chunked"]["outputs"]
        return (self.peak["chunked"] - outputs) / (self.peak["stock"] - outputs)

    def time(self, one: str = "chunked", other: str = "stock") -> float:
        """The median of a run's seconds, likewise."""
        return self.median[one] / self.median[other]


def measure(name: str, model: Path, batch: int, threads: int) -> Row:
    """Plan and measure one row; where that fails the row says why."""
    row = partial(Row, name, batch, threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        try:
            with Planner(folder) as planner:
                plans = {
                    kind: planner.plan(
                        Wish(
                            str(model), batch, threads, chunks, keep=str(folder / f"{kind}.onnx"),
                            told=str(folder / "told.npz") if kind == "off" else "",
                        )
                    )
                    for kind, chunks in PLANS.items()
                }  # fmt: skip
            _check_room(plans)
            return row(plans=plans, **_measured(model, folder, threads))
        except Exception as error:  # the next row goes on
            return row(failed=str(error) if isinstance(error, WorkerError) else reason(error))


def _check_room(plans: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse a row that may not fit the machine: contestants hold what they allocated while others have their turn.

    Raises:
        WorkerError: they may not.
    """
    needed = 2 * plans["off"]["stock"] + sum(plan["predicted"] for plan in plans.values())
    text = Path("/proc/meminfo").read_text().split("MemAvailable:")[1]
    free = int(text.split()[0]) * 1024
    if needed > ROOM * free:
        raise WorkerError(f"the contestants may need {needed / 2**30:.0f} GiB together, {free / 2**30:.0f} are free")


def _measured(model: Path, folder: Path, threads: int) -> dict[str, Any]:
    """What all contestants took, by field of `Row`."""
    outputs = {kind: folder / f"{kind}.outputs.npz" for kind in (*STOCK, *PLANS)}
    job = partial(RunJob, inputs=str(folder / "off.npz"), threads=threads)
    jobs = {
        kind: job(str(model), outputs=str(outputs[kind]), planned=False, **options) for kind, options in STOCK.items()
    }
    for kind in PLANS:
        jobs[kind] = job(str(folder / f"{kind}.onnx"), outputs=str(outputs[kind]), planned=True)
    with contest(jobs, folder) as workers:
        race(list(workers.values()), ROUNDS, SECONDS / ROUNDS, fewest=FEWEST)
        results = {kind: worker.result() for kind, worker in workers.items()}
        loaded = {kind: worker.loaded["loaded_bytes"] or 0 for kind, worker in workers.items()}
    return {
        "peak": {kind: result.peak_bytes or 0 for kind, result in results.items()},
        "loaded": loaded,
        "median": {kind: result.latency_seconds for kind, result in results.items()},
        "p95": {kind: result.p95_seconds for kind, result in results.items()},
        "bits": {kind: _different(outputs[kind], folder / "told.npz") for kind in PLANS},
    }


def _different(mine: Path, stock: Path) -> str:
    """How far outputs are from stock's; empty for the same bits."""
    result = difference(dict(np.load(mine)), dict(np.load(stock)))
    if result.bitwise_equal:
        return ""
    return result.why if result.max_abs_diff is None else f"by {result.max_abs_diff}"


COLUMNS = Table(
    "network<20", "batch>5", "thr.>5", "stock>9.1f", "no arena>9.1f", "off>8.1f", "chunked>8.1f", "÷stock>8.3f",
    "outputs>8.1f", "predicted>10.1f", "error>+8.1%", "load>+8.1f", "ms>9.1f", "no arena>9.2f", "off>6.2f",
    "chunked>8.2f", "p95>6.2f", "bits<7", "plan s>7.1f", "÷off>6.1f", "sessions>9", "nodes>6", "chunked>8",
    "slices<12",
)  # fmt: skip


def line(row: Row) -> str:
    """A line of the table."""
    if row.failed:
        return f"{row.network:<20}{row.batch:>5}{row.threads:>5}  failed: {row.failed}"
    off, chunked, peak = row.plans["off"], row.plans["chunked"], {k: size / MIB for k, size in row.peak.items()}
    predicted = chunked["predicted"] / MIB
    return COLUMNS.row(
        *row.key, peak["stock"], peak["no arena"], peak["off"], peak["chunked"], row.memory(), chunked["outputs"] / MIB,
        predicted, peak["chunked"] / predicted - 1, (row.loaded["chunked"] - row.loaded["stock"]) / MIB,
        row.median["stock"] * 1e3, row.time("no arena"), row.time("off"), row.time(),
        row.p95["chunked"] / row.p95["stock"], "DIFFER" if any(row.bits.values()) else "same", chunked["seconds"],
        chunked["seconds"] / off["seconds"], chunked["sessions"], off["nodes"], chunked["nodes"], slices(chunked),
    )  # fmt: skip


def means(rows: Sequence[Row]) -> Iterator[str]:
    """Geometric means beside the aims."""
    measured = [row for row in rows if not row.failed]
    for threads in sorted({row.threads for row in measured}, reverse=True):
        cores = f"{threads} threads" if threads > 1 else "1 thread"
        here = [row for row in measured if row.threads == threads]
        for batch, family, memory in AIMS:
            chosen = [row for row in here if row.batch == batch and EVERY[row.network].family == family]
            yield from _mean(f"{family}s, batch {batch}, {cores}", chosen, memory)
        for row in (row for row in here if EVERY[row.network].is_long and row.batch == 1):
            ratio = row.plans["chunked"]["peak"] / row.plans["off"]["peak"]
            yield (
                f"{row.network}, 1,024 tokens, {cores}: arena and workspace {ratio:.3f} of the plan without "
                f"chunks, time {row.time('chunked', 'off'):.3f} (aims: 0.15, 1.05)"
            )
    plain = [(row.memory("off"), row.time("off")) for row in measured]
    if plain:
        memory, time = map(geometric_mean, zip(*plain, strict=True))
        yield f"without chunks, rows: {len(plain)}; memory {memory:.3f} of stock's, time {time:.3f} of stock's"
    different = [f"{' '.join(map(str, row.key))}: {row.bits}" for row in measured if any(row.bits.values())]
    yield f"same bits as stock onnxruntime in {len(measured) - len(different)} of {len(measured)} rows"
    yield from different


def _mean(what: str, rows: Sequence[Row], memory: str) -> Iterator[str]:
    """What networks take together, beside the aims for all networks at batch 16: ``memory``, and stock's time."""
    if not rows:
        return
    figures = (
        geometric_mean(row.memory() for row in rows), geometric_mean(row.beside_outputs for row in rows),
        geometric_mean(row.memory("chunked", "off") for row in rows), geometric_mean(row.time() for row in rows),
        geometric_mean(row.time("chunked", "off") for row in rows),
    )  # fmt: skip
    yield (
        f"{what}, networks: {len(rows)}; memory {figures[0]:.3f} of stock's, outputs apart {figures[1]:.3f} (aim: "
        f"{memory}), {figures[2]:.3f} of the plan without chunks; time {figures[3]:.3f} of stock's (aim: 1.00), "
        f"{figures[4]:.3f}"
    )


HEAD = (
    "stock: onnxruntime as it comes; no arena: enable_cpu_mem_arena off; off: planned without chunks; chunked: planned",
    "as by default. First MiB of a run over the loaded model. outputs: of these the outputs, which all of them hold.",
    "predicted: arena, workspace and copies, from the plan; error: measured over predicted; load: MiB that the loaded",
    "model takes of the process beyond stock's. Then stock's median ms, the others' as multiples of it, and p95 of",
    "chunked as a multiple of stock's p95. bits: off and chunked against stock onnxruntime told the same shapes.",
    "plan s: with chunks; ÷off: over planning without. nodes: without chunks, and with. slices: stage after stage.",
    "Elsewhere: AutoChunk (Zhao et al. 2024) saves over 80 % of activations below 10 % of speed, in PyTorch; MCUNetV2",
    "(Lin et al. 2021) 4 to 8 times, by patches of the image that overlap.",
)


def _name(network: str, batch: int, threads: int) -> str:
    return f"{network} {batch} {threads}"


def measure_all(keys: Sequence[tuple[str, int, int]], record: Record) -> None:
    """Measure the rows that aren't there or failed, as long as there is time, and print each."""
    named = {_name(*key): key for key in keys}
    written = dict[str, tuple[Path, str]]()
    print(COLUMNS.heading, flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        for row_name in progress(list(named), record, lambda one: not record.rows.get(one, {"failed": True})["failed"]):
            name, batch, threads = named[row_name]
            if name not in written:
                path = Path(scratch) / f"{name}.onnx"
                written[name] = path, _written(name, path)
            path, failed = written[name]
            row = Row(name, batch, threads, failed) if failed else measure(name, path, batch, threads)
            record.add(row_name, asdict(row))
            print(line(row), flush=True)


def keys_of(names: Sequence[str], batches: Sequence[int], threads: Sequence[int]) -> list[tuple[str, int, int]]:
    """All rows, in the order that they are measured."""
    every = itertools.product(batches, threads, names)
    return [(name, n, count) for n, count, name in every if n in (EVERY[name].batches or batches)]


def table(record: Record) -> Iterator[str]:
    """The lines of the main table: all rows that there are, by network."""
    yield "Inference on the CPU in chunks: memory and latency beside stock onnxruntime and plans without chunks"
    yield from stamp(" ".join(["chunks", *sys.argv[1:]]), ("onnxruntime", "onnx", "numpy", "torch", "transformers"))
    yield from ("", *HEAD, "", COLUMNS.heading)
    places = {name: place for place, name in enumerate(EVERY)}
    rows = [Row(**row) for row in record.rows.values()]
    rows.sort(key=lambda row: (places.get(row.network, len(places)), row.batch, row.threads))
    yield from (*map(line, rows), "", *means(rows))


def _written(name: str, path: Path) -> str:
    """Write a network; returns why it couldn't be written, if it couldn't."""
    try:
        write(name, path)
    except Exception as error:  # an exporter's
        return f"not written: {reason(error)}"
    return ""


def _numbers(_context: click.Context, _parameter: click.Parameter, text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise click.BadParameter("give positive numbers with commas between them, as 1,16")
    return tuple(map(int, parts))


def _names(_context: click.Context, _parameter: click.Parameter, text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - set(NETWORKS):
        raise click.BadParameter(f"no network {', '.join(sorted(unknown))}; there are {', '.join(NETWORKS)}")
    return names


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--networks", default=",".join(DEFAULT), callback=_names, metavar="NAME,...", help="All but near kin.")
@click.option("--batches", default=",".join(map(str, BATCHES)), callback=_numbers, metavar="N,...", show_default=True)
@click.option("--threads", default=",".join(map(str, THREADS)), callback=_numbers, metavar="N,...", show_default=True)
@click.option("--quick", is_flag=True, help=f"{', '.join(QUICK)} at batch 16 on one thread.")
@click.option("--budgets", "wanted", flag_value="budgets", help="GPT-2 in ever smaller budgets.")
@click.option("--images", "wanted", flag_value="images", help="Single images, in chunks of their rows.")
@click.option("--resume", is_flag=True, help="Go on where the kept rows end: measure what isn't there, or failed.")
@click.option("--minutes", type=click.FloatRange(0), default=math.inf, help="Begin no row after so many.")
@click.option("--untimed", is_flag=True, help="With --budgets: memory and bits, which need no quiet.")
def main(
    networks: tuple[str, ...], batches: tuple[int, ...], threads: tuple[int, ...], quick: bool, wanted: str | None,
    resume: bool, minutes: float, untimed: bool,
) -> None:  # fmt: skip
    """Measure; a table is kept where nothing was left out, or what was measured before goes on."""
    if wanted == "budgets":
        record = Record(HERE / "budgets.json", resume, minutes)
        measure_budgets(record, threads[0], untimed)
        keep(budget_lines(record, threads[0]), HERE / "budgets.txt")
        return
    if quick:
        networks, batches, threads = QUICK, (16,), (1,)
    stem = "chunks"
    if wanted == "images":
        stem, networks, batches = "images", tuple(IMAGES), (1,)
    is_kept = resume or (networks, batches, threads) in [(DEFAULT, BATCHES, THREADS), (tuple(IMAGES), (1,), THREADS)]
    record = Record(HERE / f"{stem}.json" if is_kept else None, resume, minutes)
    measure_all(keys_of(networks, batches, threads), record)
    keep(table(record), HERE / f"{stem}.txt" if is_kept else None)


if __name__ == "__main__":
    main()
