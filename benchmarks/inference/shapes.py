"""Inputs whose shape changes from run to run: ``python -m benchmarks.inference.shapes --record FOLDER -o FILE``.

Each network (`benchmarks.inference.shape_networks`) is exported with symbolic dimensions and planned once.
The contestants run the same shapes, the largest first and then at random, each in a process of its own:

- ``stock``: onnxruntime with default options; ``no arena``: its own arena off; ``shrink``: its arena shrunk after every
  run; ``per shape``: a session for each shape, told the shape.
- ``memonger``: one session of one plan for the ranges.

Memory is measured with one thread each, two contestants side by side: the process's own (anonymous) memory over what
was resident before the first run, with free memory given back. Latency is measured apart, on a machine that does
nothing else (``--latency 300``): the contestants take turns, a few shapes each, and the first run of each shape counts.

The first run of a shape is measured with networks of about a thousand nodes, one thread (``--first 100``): how much
longer it takes than the second.

What is measured of a network is written into the record when it is done: ``--resume`` leaves out what is there. Table
and plot are made of the record.
"""

import hashlib
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.inference.shape_networks import DEEP, LARGER, NETWORKS, Network
from benchmarks.machine import MIB, Table, keep, pyplot, stamp
from memonger.runtime.worker import Worker, say, serve

WAYS = ("stock", "memonger", "no arena", "shrink", "per shape")
FULL = ("stock", "memonger")  # those that run all the shapes
TURN = 5  # shapes that a contestant runs in its turn
EVERY, FEW = 10, 100  # shapes between two looks at memory; up to how many there is one after each
CHECKED = 200  # shapes whose outputs are compared
SHARE, SLACK = 0.01, 2 * MIB  # how far memory may be from the prediction at the end
TABLE = Table(
    "network<13", "way<10", "shapes>7", "a tenth>9.1f", "end>9.1f", "peak>9.1f", "predicted>11.1f", "÷>7.3f", "same>9",
    "time>9.3f", "p50>7.3f", "more>7.2f",
)  # fmt: skip
FIRST = Table("network<13", "nodes>7", "shapes>8", "second run>12.2f", "first, more>13.2f", "most>8.2f")
ALL = {**NETWORKS, **LARGER}
Shapes = Sequence[Mapping[str, int]]
Run = Callable[[Mapping[str, np.ndarray], Mapping[str, int]], Sequence[np.ndarray]]


@dataclass(frozen=True, slots=True)
class Counts:
    """How many shapes: for stock onnxruntime and memonger, for the other ways, and for that with a session each."""

    shapes: int
    others: int
    sessions: int

    def of(self, way: str) -> int:
        """How many this way runs."""
        return min(self.shapes, self.shapes if way in FULL else self.sessions if way == "per shape" else self.others)


def runner(way: str, model: Path, planned: Path, threads: int) -> Run:
    """What runs inputs of any of the shapes, in a worker."""
    if way == "memonger":
        from memonger.runtime.session import Session

        session = Session(planned, check_order=False)
        return lambda feeds, _: list(session.run(feeds).values())
    import onnxruntime

    def stock(**dims: int) -> Any:
        options = onnxruntime.SessionOptions()
        options.enable_cpu_mem_arena = way != "no arena"
        options.intra_op_num_threads = threads
        for name, size in dims.items():
            options.add_free_dimension_override_by_name(name, size)
        return onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])

    if way == "per shape":
        made: dict[tuple[int, ...], Any] = {}

        def run_own(feeds: Mapping[str, np.ndarray], sizes: Mapping[str, int]) -> Sequence[np.ndarray]:
            key = tuple(sizes.values())
            if key not in made:
                made[key] = stock(**sizes)
            return made[key].run(None, feeds)

        return run_own
    session = stock()
    options = onnxruntime.RunOptions()
    if way == "shrink":
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
    return lambda feeds, _: session.run(None, feeds, options)


def run_all(network: Network, run: Run, count: int) -> Mapping[str, Any]:
    """Run the shapes one after the other: memory in bytes over what was resident before, and digests of outputs."""
    from memonger.runtime import process_memory

    shapes, at, memory, digests = network.shapes(count), [], [], []
    network.feeds(shapes[0], 0)  # makes what it keeps
    baseline = process_memory.settle()
    process_memory.reset_peak()
    for number, sizes in enumerate(shapes):
        feeds = network.feeds(sizes, number)
        outputs = run(feeds, sizes)
        if number < CHECKED:
            digests.append(hashlib.sha256(b"".join(each.tobytes() for each in outputs)).hexdigest()[:16])
        del outputs, feeds
        if count <= FEW or number % EVERY == 0 or number == count - 1:
            process_memory.give_back()
            at.append(number + 1)
            memory.append(process_memory.resident().now - baseline)
    return {"at": at, "memory": memory, "digests": digests, "peak": process_memory.resident().peak - baseline}


def serve_turns(network: Network, run: Run, count: int) -> None:
    """Run the next shapes whenever the parent asks; answers the seconds that each took."""
    shapes = iter(enumerate(network.shapes(count)))

    def answer(_: object) -> Mapping[str, Any]:
        seconds = []
        for number, sizes in (next(shapes) for _ in range(min(TURN, count))):
            feeds = network.feeds(sizes, number)
            begin = time.perf_counter()
            run(feeds, sizes)
            seconds.append(time.perf_counter() - begin)
        return {"seconds": seconds}

    serve(answer)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A network's files, made for a number of threads (0: onnxruntime's own choice), and the plan's prediction."""

    name: str
    folder: Path
    threads: int
    predicted: int

    def worker(self, way: str, count: int, kind: str) -> Worker:
        """A contestant in a process of its own."""
        arguments = ["--worker", kind, "--network", self.name, "--way", way, "--shapes", str(count)]
        at = ["--threads", str(self.threads), "--record", str(self.folder)]
        return Worker("benchmarks.inference.shapes", [*arguments, *at], self.folder / f"{way}.err")


def prepared(name: str, folder: Path, threads: int) -> Prepared:
    """Export a network and plan it."""
    import memonger

    network, model = ALL[name], folder / "model.onnx"
    network.export(model)
    plan = memonger.search_plan(model, mode="inference", dims=network.sizes, device="cpu", threads=threads)
    plan.save(folder / "planned.onnx")
    with memonger.Session(plan) as session:
        session.run(network.feeds(network.shapes(1)[0], 0))  # checks the order, which those that are measured don't
    assert plan.predicted_bytes is not None
    return Prepared(name, folder, threads, plan.predicted_bytes)


def measure_memory(one: Prepared, ways: Sequence[str], counts: Counts) -> Mapping[str, Any]:
    """All the shapes in each way, two ways at a time."""

    def run(way: str) -> Mapping[str, Any]:
        begin = time.perf_counter()
        with one.worker(way, counts.of(way), "memory") as worker:
            answer = worker.read()
        print(f"{one.name}: {way} took {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
        return answer

    with ThreadPoolExecutor(2) as pool:
        return {"predicted": one.predicted, "ways": dict(zip(ways, pool.map(run, ways), strict=True))}


def measure_latency(one: Prepared, ways: Sequence[str], count: int) -> Mapping[str, Any]:
    """Seconds of every run, in turns."""
    workers = {way: one.worker(way, count, "latency") for way in ways}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    try:
        for _ in range(count // TURN):
            for way, worker in workers.items():
                seconds[way] += worker.ask({})["seconds"]
    finally:
        for worker in workers.values():
            worker.end()
    return seconds


def first_runs(network: Network, folder: Path, count: int) -> Mapping[str, Any]:
    """How much longer the first run of each of some shapes takes than the second, in seconds of this thread."""
    import memonger

    network.export(folder / "deep.onnx")
    plan = memonger.search_plan(folder / "deep.onnx", mode="inference", dims=network.sizes, device="cpu", threads=1)
    shapes = list({tuple(sizes.values()): sizes for sizes in network.shapes(20 * count)}.values())[: count + 1]
    seconds = []
    with memonger.Session(plan, intra_op_threads=1) as session:
        for number, sizes in enumerate(shapes):
            feeds, runs = network.feeds(sizes, number), []
            for _ in range(2):
                begin = time.thread_time()
                session.run(feeds)
                runs.append(time.thread_time() - begin)
            seconds.append(runs)
    return {"nodes": len(plan.graph.nodes), "seconds": seconds[1:]}  # but for the one whose order is checked


def first_rows(folder: Path) -> Iterator[str]:
    """The rows of first runs, in ms."""
    for name in DEEP:
        found = read(folder, name, "first")
        if found:
            first, second = np.array(found["seconds"]).T * 1e3
            more = first - second
            yield FIRST.row(
                name, str(found["nodes"]), str(len(more)), float(np.median(second)), float(np.median(more)), more.max()
            )


def record(names: Sequence[str], ways: Sequence[str], counts: Counts, latency: int, folder: Path, resume: bool) -> None:
    """Measure the networks, and write each into the record when it is done."""
    kind = "latency" if latency else "memory"
    for name in names:
        path = folder / f"{name}.{kind}.json"
        if resume and path.is_file():
            continue
        with tempfile.TemporaryDirectory() as scratch:
            one = prepared(name, Path(scratch), threads=0 if latency else 1)
            found = measure_latency(one, ways, latency) if latency else measure_memory(one, ways, counts)
        path.write_text(json.dumps(found))


def record_first(folder: Path, count: int) -> None:
    """Measure the first runs of shapes."""
    for name, network in DEEP.items():
        with tempfile.TemporaryDirectory() as scratch:
            found = first_runs(network, Path(scratch), count)
        (folder / f"{name}.first.json").write_text(json.dumps(found))


def read(folder: Path, name: str, kind: str) -> Any:
    """What the record has of a network; empty if nothing."""
    path = folder / f"{name}.{kind}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def rows(name: str, folder: Path) -> Iterator[str]:
    """The rows of a network."""
    memory, latency = read(folder, name, "memory"), read(folder, name, "latency")
    for way in (each for each in WAYS if each in memory.get("ways", {}) or each in latency):
        cells: list[Any] = [name, way, *[None] * 7]
        if way in memory.get("ways", {}):
            found, stock = memory["ways"][way], memory["ways"]["stock"]["digests"]
            series = found["memory"]
            same = sum(a == b for a, b in zip(found["digests"], stock, strict=False))
            cells[2:6] = str(found["at"][-1]), series[len(series) // 10] / MIB, series[-1] / MIB, found["peak"] / MIB
            cells[8] = f"{same}/{len(found['digests'])}"
            if way == "memonger":
                cells[6:8] = memory["predicted"] / MIB, series[-1] / memory["predicted"]
        if way in latency:
            own, stock = np.array(latency[way]), np.array(latency["stock"])
            cells += [own.sum() / stock.sum(), float(np.median(own / stock)), float(np.median(own - stock)) * 1e3]
        yield TABLE.row(*cells)


def lines(names: Sequence[str], folder: Path) -> Iterator[str]:
    """The table."""
    yield "Inputs that change their shape from run to run, on the CPU: memory in MiB over the loaded model"
    command = "inference.shapes --record FOLDER, again with --first 40, again with --latency 300 -o FILE"
    yield from stamp(command, ("onnxruntime", "onnx", "numpy", "torch", "transformers"))
    yield "memory with one thread, after a tenth of the shapes, at the end, and at most; predicted: arena, workspace;"
    yield f"÷: at the end over predicted; same: outputs that are bit for bit those of stock, of the first {CHECKED}"
    yield "(per shape: fused for the shape); latency in turns: time is all runs over stock's, p50 the median of the"
    yield "ratios of single runs, more the median of their differences in ms; sizes are drawn evenly on a logarithmic"
    yield "scale, as small ones are more frequent: few runs are of a shape that is still bound"
    for name in names:
        sizes = ", ".join(f"{dim} {a} to {b}" + f" by {s}" * (s > 1) for dim, (a, b, s) in ALL[name].sizes.items())
        yield f"{name}: {ALL[name].words}; {sizes}"
    yield ""
    yield TABLE.heading
    for name in names:
        yield from rows(name, folder)
    yield ""
    yield "The first run of a shape: how much longer it takes than the second, ms of one thread (median, most)"
    for name, network in DEEP.items():
        yield f"{name}: {network.words}"
    yield FIRST.heading
    yield from first_rows(folder)


def over(names: Sequence[str], folder: Path) -> Iterator[str]:
    """Networks whose memory isn't what was predicted, in words."""
    for name in names:
        memory = read(folder, name, "memory")
        if memory:
            end, predicted = memory["ways"]["memonger"]["memory"][-1], memory["predicted"]
            if abs(end - predicted) > SHARE * predicted + SLACK:
                yield f"{name} takes {end / MIB:.1f} MiB at the end, {predicted / MIB:.1f} were predicted"


def plot(names: Sequence[str], folder: Path, path: Path) -> None:
    """Memory after each run, one picture a network."""
    plt = pyplot()
    figure, axes = plt.subplots(-(-len(names) // 3), min(3, len(names)), figsize=(13, 7), squeeze=False)
    for name, place in zip(names, axes.flat, strict=False):
        memory = read(folder, name, "memory")
        for way, found in memory.get("ways", {}).items():
            place.plot(found["at"], [each / MIB for each in found["memory"]], label=way)
        if memory:
            place.axhline(memory["predicted"] / MIB, label="memonger, predicted", color="black", linestyle=":")
        place.set(title=name, xlabel="shapes run", ylabel="MiB over the loaded model", xscale="log", ylim=(0, None))
    for place in axes.flat:
        handles, labels = place.get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc="lower center", ncols=len(labels))
            break
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=110)
    plt.close(figure)


@click.command()
@click.option("--record", "folder", type=click.Path(path_type=Path), required=True, help="Where measurements are kept.")
@click.option("--resume", is_flag=True, help="Leave out the networks that the record has.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the table here as well.")
@click.option("--plot", "picture", type=click.Path(path_type=Path), help="Write a plot of memory over the runs.")
@click.option("--network", "names", multiple=True, type=click.Choice(list(ALL)), help="Only these networks.")
@click.option("--way", "ways", multiple=True, type=click.Choice(WAYS), help="Only these contestants.")
@click.option("--shapes", default=10_000, show_default=True, help="Runs of stock onnxruntime and memonger.")
@click.option("--others", default=1000, show_default=True, help="Runs of the other ways.")
@click.option("--sessions", default=20, show_default=True, help="Shapes that get a stock session of their own.")
@click.option("--latency", default=0, help="Measure latency instead of memory, with so many shapes.")
@click.option("--first", default=0, help="Measure the first runs of so many shapes instead.")
@click.option("--table-only", is_flag=True, help="Measure nothing.")
@click.option("--worker", type=click.Choice(("memory", "latency")), hidden=True)
@click.option("--threads", default=0, hidden=True)
def main(
    folder: Path, resume: bool, output: Path | None, picture: Path | None, names: tuple[str, ...],
    ways: tuple[str, ...], shapes: int, others: int, sessions: int, latency: int, first: int, table_only: bool,
    worker: str | None, threads: int,
) -> None:  # fmt: skip
    """Measure, and print the table of what the record has."""
    if worker is not None:
        network = ALL[names[0]]
        run = runner(ways[0], folder / "model.onnx", folder / "planned.onnx", threads)
        serve_turns(network, run, shapes) if worker == "latency" else say(run_all(network, run, shapes))
        return
    logging.disable(logging.WARNING)  # the exporters' own
    folder.mkdir(parents=True, exist_ok=True)
    if first:
        record_first(folder, first)
    elif not table_only:
        chosen = ways or (FULL if latency else WAYS)
        record(
            names or tuple(ALL if latency else NETWORKS),
            chosen,
            Counts(shapes, others, sessions),
            latency,
            folder,
            resume,
        )
    keep(lines(tuple(ALL), folder), output)
    if picture is not None:
        plot(tuple(NETWORKS), folder, picture)
    sys.exit("\n".join(over(tuple(NETWORKS), folder)) or None)


if __name__ == "__main__":
    main()
