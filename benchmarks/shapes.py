"""Inputs whose shape changes from run to run: ``python -m benchmarks.shapes -o benchmarks/shapes.txt``.

Each network (`benchmarks.shape_networks`) is exported with symbolic dimensions and planned once for all their sizes.
The contestants run the same shapes, the largest first and then at random, each in a process of its own; they take
turns, a few shapes each. Latency is the sum of all runs over that of the stock session, the first run of each shape
included. Memory is the process's own (anonymous) memory over what was resident before the first run, with free memory
given back. Outputs of the first shapes are compared with the stock session's by digest.

- ``stock``: onnxruntime with default options; ``no arena``: its own arena off; ``shrink``: its arena shrunk after every
  run; ``per shape``: a session for each shape, told the shape, of as many shapes as ``--sessions`` says.
- ``memonger``: one session of one plan for the ranges.
"""

import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.machine import MIB, Table, keep, stamp
from benchmarks.shape_networks import NETWORKS, Network
from memonger.cli.worker import Worker, serve

WAYS = ("stock", "no arena", "shrink", "per shape", "memonger")
TURN = 5  # shapes that a contestant runs in its turn
CHECKED = 200  # shapes whose outputs are compared
SHARE, SLACK = 0.01, 2 * MIB  # how far memory may be from the prediction
TABLE = Table(
    "network<14", "way<10", "shapes>7", "time>7.3f", "p50>7.3f", "after a tenth>14.1f", "at the end>11.1f", "peak>8.1f",
    "predicted>10.1f", "same>14",
)  # fmt: skip
Run = Callable[[Mapping[str, np.ndarray], Mapping[str, int]], Sequence[np.ndarray]]


@dataclass(slots=True)
class Contestant:
    """What is known of one way to run the shapes; memory in bytes over what was resident before the first run."""

    worker: Worker
    seconds: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    peak: int = 0

    def take(self, first: int, shapes: Sequence[Mapping[str, int]]) -> None:
        """Run the next shapes, of which the first has this number."""
        answer = self.worker.ask({"first": first, "shapes": shapes})
        self.seconds += answer["seconds"]
        self.memory += answer["memory"]
        self.digests += answer["digests"]
        self.peak = max(self.peak, answer["peak"])


def runner(way: str, model: Path, planned: Path) -> Run:
    """What runs inputs of any of the shapes, in a worker."""
    if way == "memonger":
        from memonger.runtime.session import Session

        session = Session(planned, check_order=False)
        return lambda feeds, _: list(session.run(feeds).values())
    import onnxruntime

    def stock(**dims: int) -> Any:
        options = onnxruntime.SessionOptions()
        options.enable_cpu_mem_arena = way != "no arena"
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


def work(network: Network, way: str, model: Path, planned: Path) -> None:
    """Run what the parent asks for, until it asks no more."""
    from memonger.runtime import process_memory

    run = runner(way, model, planned)
    baseline = process_memory.settle()

    def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        seconds, memory, digests = [], [], []
        process_memory.reset_peak()
        for number, sizes in enumerate(request["shapes"], request["first"]):
            feeds = network.feeds(sizes, number)
            begin = time.perf_counter()
            outputs = run(feeds, sizes)
            seconds.append(time.perf_counter() - begin)
            if number < CHECKED:
                digests.append(hashlib.sha256(b"".join(each.tobytes() for each in outputs)).hexdigest()[:16])
            del outputs, feeds
            process_memory.give_back()
            memory.append(process_memory.resident().now - baseline)
        return {
            "seconds": seconds, "memory": memory, "digests": digests,
            "peak": process_memory.resident().peak - baseline,
        }  # fmt: skip

    serve(answer)


def measure(name: str, count: int, sessions: int, ways: Sequence[str], folder: Path) -> Iterator[str]:
    """The rows of one network; the memory after each run goes into a file for the plot."""
    import memonger

    network, model, planned = NETWORKS[name], folder / f"{name}.onnx", folder / f"{name}.planned.onnx"
    network.export(model)
    plan = memonger.search_plan(model, mode="inference", dims=network.sizes, device="cpu")
    plan.save(planned)
    predicted, shapes = plan.predicted_bytes, network.shapes(count)
    memonger.Session(plan).run(network.feeds(shapes[0], 0))  # checks the order, which those that are measured don't
    del plan
    workers = {
        way: Worker("benchmarks.shapes", ["--worker", name, way, str(model), str(planned)], folder / way)
        for way in ways
    }
    try:
        found = {way: Contestant(worker) for way, worker in workers.items()}
        for first in range(0, count, TURN):
            part = shapes[first : first + TURN]
            for way, contestant in found.items():
                if way != "per shape" or first < sessions:
                    contestant.take(first, part)
    finally:
        for worker in workers.values():
            worker.end()
    base = found.get("stock", found[ways[-1]])
    for way, one in found.items():
        yield _row(name, way, one, base, predicted if way == "memonger" else None)
    series = {way: [round(each / MIB, 2) for each in one.memory] for way, one in found.items()}
    (folder / f"{name}.json").write_text(json.dumps(series))


def _row(name: str, way: str, one: Contestant, base: Contestant, predicted: int | None) -> str:
    ran = len(one.seconds)
    same = sum(a == b for a, b in zip(one.digests, base.digests, strict=False))
    ratios = [a / b for a, b in zip(one.seconds, base.seconds, strict=False)]
    held = predicted is None or one.memory[-1] <= predicted * (1 + SHARE) + SLACK
    return TABLE.row(
        name, way, str(ran), sum(one.seconds) / sum(base.seconds[:ran]), float(np.median(ratios)),
        one.memory[ran // 10] / MIB, one.memory[-1] / MIB, one.peak / MIB,
        None if predicted is None else predicted / MIB,
        f"{same}/{len(one.digests)}" + ("" if held else " OVER"),
    )  # fmt: skip


def lines(names: Sequence[str], count: int, sessions: int, ways: Sequence[str], folder: Path) -> Iterator[str]:
    """The table as it grows."""
    yield "Inputs that change their shape from run to run, on the CPU: memory in MiB over the loaded model"
    yield from stamp("shapes -o benchmarks/shapes.txt", ("onnxruntime", "onnx", "numpy", "torch", "transformers"))
    yield "time: all runs ÷ stock's; p50: median of the ratios of single runs; predicted: arena and workspace"
    yield f"same: outputs that are bit for bit those of stock, of the first {CHECKED}; per shape: fused for the shape"
    for name in names:
        sizes = ", ".join(f"{dim} {a} to {b} by {s}" for dim, (a, b, s) in NETWORKS[name].sizes.items())
        yield f"{name}: {sizes}"
    yield ""
    yield TABLE.heading
    for name in names:
        yield from measure(name, count, sessions, ways, folder)


def plot(names: Sequence[str], folder: Path, path: Path) -> None:
    """Memory after each run, one picture a network."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        -(-len(names) // 3), min(3, len(names)), figsize=(12, 3 * -(-len(names) // 3)), squeeze=False
    )
    for name, place in zip(names, axes.flat, strict=False):
        for way, memory in json.loads((folder / f"{name}.json").read_text()).items():
            place.plot(memory, label=way)
        place.set(title=name, xlabel="run", ylabel="MiB")
    axes.flat[0].legend()
    figure.tight_layout()
    figure.savefig(path)


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the table here as well.")
@click.option("--plot", "picture", type=click.Path(path_type=Path), help="Write a plot of memory over the runs.")
@click.option("--network", "names", multiple=True, type=click.Choice(list(NETWORKS)), help="Only these networks.")
@click.option("--way", "ways", multiple=True, type=click.Choice(WAYS), help="Only these contestants.")
@click.option("--shapes", "count", default=10_000, show_default=True, help="Runs of each.")
@click.option("--sessions", default=50, show_default=True, help="Shapes that get a stock session of their own.")
@click.option("--worker", nargs=4, hidden=True)
def main(
    output: Path | None, picture: Path | None, names: tuple[str, ...], ways: tuple[str, ...], count: int, sessions: int,
    worker: tuple[str, str, str, str] | None,
) -> None:  # fmt: skip
    """Measure and print the table."""
    if worker is not None:
        name, way, model, planned = worker
        work(NETWORKS[name], way, Path(model), Path(planned))
        return
    with tempfile.TemporaryDirectory() as folder:
        chosen = names or tuple(NETWORKS)
        keep(lines(chosen, count, sessions, ways or WAYS, Path(folder)), output)
        if picture is not None:
            plot(chosen, Path(folder), picture)


if __name__ == "__main__":
    sys.exit(main())
