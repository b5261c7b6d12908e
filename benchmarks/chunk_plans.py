"""Plans with chunks and without, made in a process of their own: ``python -m benchmarks.chunk_plans``.

It answers each request, a `Wish` in JSON, with the plan's figures (see `memonger.cli.worker`). So memory that planning
leaves behind disturbs no measurement, and what ends the process is the row's reason to fail.
"""

import dataclasses
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

import memonger
from benchmarks.chunk_networks import NETWORKS, random_inputs, write
from benchmarks.machine import MIB, Table, stamp
from benchmarks.planning import residual_chain, timed
from benchmarks.record import Record, progress
from memonger.cli.compare import symbolic_sizes
from memonger.cli.worker import Worker, WorkerError, reason, serve
from memonger.devices import CPU
from memonger.errors import BudgetError
from memonger.graph.costs import flops
from memonger.ir.values import static_shape
from memonger.model.load import load
from memonger.options import Options
from memonger.planner.search_plan import Job, finish, in_chunks, prepare, solve
from memonger.runtime import ort
from memonger.runtime.feeds import inputs_of
from memonger.tiling.axes import axes_of
from memonger.tiling.chunking import seeds_of
from memonger.tiling.cutting import Refusal

CHAIN = 10_000  # nodes
CHAIN_BATCHES = (4, 128)
REPEATS = 3  # of each plan whose time is told


@dataclass(frozen=True, slots=True)
class Wish:
    """A plan that is asked for.

    Attributes:
        model: An ONNX file.
        batch: Size of its first dimension.
        threads: Threads within a node.
        chunks: As `memonger.search_plan` takes it.
        budget: Bytes of all: of parameters and inputs (``base``), too; 0 for none.
        keep: Where to save the plan, ``.onnx``, and beside it random inputs, ``.npz``; nothing is kept without it.
        told: Where to save, ``.npz``, what stock onnxruntime that is told the shapes gives for those inputs; or empty.
        times: How often it is planned: the time is the median.
        prepared: Whether the model is lowered and calibrated once for all wishes of it, which is part of each's time.
        tells_refusals: Whether to say which nodes can't be cut along which axes.
        trains: Whether the model has a loss of that name, and AdamW updates its parameters.
        strategy: As `memonger.search_plan` takes it; empty for the default.
        max_overhead: Likewise.
    """

    model: str
    batch: int
    threads: int
    chunks: str
    budget: int = 0
    keep: str = ""
    told: str = ""
    times: int = 1
    prepared: bool = False
    tells_refusals: bool = False
    trains: bool = False
    strategy: str = ""
    max_overhead: float = 0.02


class Planner(Worker):
    """The parent's end of a process that plans."""

    def __init__(self, folder: Path) -> None:
        super().__init__("benchmarks.chunk_plans", [], folder / "planner.err")

    def plan(self, wish: Wish) -> dict[str, Any]:
        """A plan's figures; see `answer`.

        Raises:
            WorkerError: it couldn't be made.
        """
        return self.ask(asdict(wish))


def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Make a plan, and say what it is: bytes, seconds, counts. A plan that is refused has ``smallest`` alone."""
    wish, seconds = Wish(**request), list[float]()
    try:
        options = _options(wish)
        for _ in range(wish.times):
            if wish.prepared:
                plan, last = _planned(wish, options)
            else:
                plan, last = timed(lambda: memonger.search_plan(wish.model, options=options))
            seconds.append(last)
    except BudgetError as error:
        return {"smallest": error.smallest}
    except Exception as error:  # whatever a plan fails of is its row in the table
        return {"failed": reason(error)}
    figures = {
        "seconds": statistics.median(seconds),
        "peak": plan.arena_bytes + (plan.workspace_bytes or 0),
        "arena": plan.arena_bytes,
        "base": plan.parameter_bytes + plan.input_bytes,
        "predicted": plan.predicted_bytes,
        "stock": plan.stock_bytes or 0,
        "outputs": sum(size_of(value) for value in dict.fromkeys(plan.model.graph.outputs)),
        "flops": sum(map(flops, plan.model.graph)),
        "nodes": len(plan.graph.nodes),
        "recomputed": len(plan.recomputed),
        "chunks": [
            {"axis": band.axis, "value": band.value, "nodes": band.nodes, "slices": band.slices} for band in plan.chunks
        ],
        "notes": list(plan.notes),
    }
    if wish.keep:
        figures["sessions"] = _kept(plan, Path(wish.keep))
    if wish.told:
        _run_stock(wish, Path(wish.told))
    if wish.tells_refusals:
        figures["refusals"] = refusals(wish)
    return figures


def _planned(wish: Wish, options: Options) -> tuple[memonger.Plan, float]:
    """A plan and the seconds that it took, those of its model's preparation included."""
    key = wish.model, wish.batch, wish.threads, wish.trains
    if key not in _PREPARED:
        _PREPARED.clear()
        _PREPARED[key] = timed(lambda: prepare(load(wish.model, batch=wish.batch), options))
    (job, preparing), begin = _PREPARED[key], time.perf_counter()
    request = dataclasses.replace(job.request, budget=options.budget_bytes)
    job = dataclasses.replace(job.copy(), options=options, request=request, strategy=options.chosen_strategy)
    job = in_chunks(job)
    return finish(job, solve(job), begin), preparing + time.perf_counter() - begin


_PREPARED: dict[tuple[object, ...], tuple[Job, float]] = {}
"""The model of the wish before, with the seconds that it took."""


def size_of(value: ir.Value) -> int:
    """Bytes of a value of a static shape."""
    assert value.dtype is not None
    return math.prod(static_shape(value) or ()) * value.dtype.itemsize


def _options(wish: Wish) -> Options:
    training: dict[str, Any] = {"loss": "loss", "optimizer": memonger.AdamW(1e-4)} if wish.trains else {}
    return Options(
        batch=wish.batch, device="cpu", mode="training" if wish.trains else "inference", threads=wish.threads,
        chunks=wish.chunks, budget=wish.budget or None, strategy=wish.strategy or None,
        max_overhead=wish.max_overhead, **training,
    )  # fmt: skip


def _kept(plan: memonger.Plan, path: Path) -> int:
    """Save a plan and random inputs, and run it, which checks the executed order; returns how many sessions run it."""
    plan.save(path)
    if plan.training is not None:
        trainer = memonger.TrainingSession(plan)
        feeds = random_inputs(trainer.inputs)
        np.savez(path.with_suffix(".npz"), **feeds)
        trainer.step(feeds)
        return len(trainer.engines)
    feeds = random_inputs(inputs_of(plan.model.graph))
    np.savez(path.with_suffix(".npz"), **feeds)
    session = memonger.Session(plan)
    session.run(feeds)
    return len(session.engines)


def _run_stock(wish: Wish, path: Path) -> None:
    """Save what stock onnxruntime gives for the kept inputs, whose shapes its optimizer knows, as it does for plans."""
    feeds = dict(np.load(Path(wish.keep).with_suffix(".npz")))
    told = ort.SessionSettings("ORT_ENABLE_ALL", threads=wish.threads, dims=symbolic_sizes(Path(wish.model), feeds))
    session = ort.make_session(Path(wish.model), CPU, told)
    names = list(dict.fromkeys(output.name for output in session.get_outputs()))
    np.savez(path, **dict[str, Any](zip(names, session.run(names, feeds), strict=True)))


def refusals(wish: Wish) -> list[str]:
    """For each axis that is tried how many nodes can't be cut along it, and why not the first of each operator."""
    job = prepare(load(wish.model, batch=wish.batch), _options(wish))
    texts = []
    for seeds in seeds_of(job.lowered.model, job.source.batch):
        refused = {
            str(node.op_type): str(how)
            for node, how in reversed(list(zip(job.lowered.model.graph, _axes(job.lowered.model, seeds), strict=True)))
            if isinstance(how, Refusal)
        }
        texts += [f"axis {max(seeds.values())}: {text}" for text in reversed(refused.values())]
    return texts


def _axes(model: Any, seeds: Mapping[str, int]) -> Sequence[object]:
    return axes_of(model, seeds).nodes


TIMES = Table(
    "network<17", "batch>5", "nodes>7", "chunked>8", "MiB>9.2f", "chunked>9.2f", "ratio>7.3f", "off s>8.2f",
    "auto s>8.2f", "auto÷off>9.2f", "slices<30",
)  # fmt: skip


def measure_planning(names: Sequence[str], record: Record, threads: int) -> None:
    """Plan what isn't there or failed, and print a line for each."""
    batches: dict[str, tuple[str, int | None]] = {name: (name, None) for name in names}
    batches |= {f"chain {batch}": ("chain", batch) for batch in CHAIN_BATCHES}
    for row_name in progress(list(batches), record, lambda one: not record.rows.get(one, {"failed": True})["failed"]):
        with tempfile.TemporaryDirectory() as scratch:
            record.add(row_name, _times(*batches[row_name], Path(scratch), threads))
        print(record.rows[row_name]["line"], flush=True)


def planning_lines(record: Record, threads: int) -> Iterator[str]:
    """The table of planning times that were measured."""
    yield "Planning for the CPU with chunks beside planning without: time, nodes, and arena with workspace"
    yield from stamp("chunks --planning", ("onnxruntime", "onnx", "numpy"))
    yield f"seconds: medians of {REPEATS}, of the chain 1; batch 16, of networks of 1,024 tokens 1; {threads} threads;"
    yield "the chain has 10,000 convolutions and sums, at batch 4 too small for chunks, at batch 128 of 4 MiB"
    yield from ("aims: at most twice as long; the chain of 10,000 nodes in 20 s", "", TIMES.heading)
    yield from (row["line"] for row in record.rows.values())
    refused = [text for row in record.rows.values() for text in row["refused"]]
    if refused:
        yield from ("", "Nodes that can't be cut: the first of each operator", *refused)


def _times(name: str, chain: int | None, folder: Path, threads: int) -> dict[str, Any]:
    """A row: its line, whether it failed, and which nodes can't be cut."""
    path, is_chain = folder / "model.onnx", chain is not None
    batch = chain or (*NETWORKS[name].batches, 16)[0]
    try:
        if is_chain:
            onnx.save(residual_chain(CHAIN), path)
        else:
            write(name, path)
        with Planner(folder) as planner:
            off, auto = (
                planner.plan(Wish(str(path), batch, threads, chunks, times=1 if is_chain else REPEATS,
                                  tells_refusals=chunks == "auto"))
                for chunks in ("off", "auto")
            )  # fmt: skip
    except Exception as error:  # the next row goes on
        why = reason(error) if not isinstance(error, WorkerError) else error
        return {"line": f"{name:<17} failed: {why}", "failed": True, "refused": []}
    line = TIMES.row(
        name, batch, off["nodes"], auto["nodes"], off["peak"] / MIB, auto["peak"] / MIB, auto["peak"] / off["peak"],
        off["seconds"], auto["seconds"], auto["seconds"] / off["seconds"], slices(auto),
    )  # fmt: skip
    return {"line": line, "failed": False, "refused": [f"{name}: {text}" for text in auto["refusals"]]}


def slices(figures: Mapping[str, Any], most: int = 3) -> str:
    """The slices of a plan's bands, stage by stage; of many bands the first."""
    rows = ["rows " if band["axis"] and not band["value"] else "" for band in figures["chunks"]]
    counts = ["+".join(map(str, band["slices"])) for band in figures["chunks"]]
    bands = [row + count for row, count in zip(rows, counts, strict=True)]
    return ", ".join(bands[:most]) + (f" and {len(bands) - most} more" if len(bands) > most else "") or "whole"


def main() -> None:
    """Plan something small, so that no request pays for imports; then answer requests."""
    small = residual_chain(50)
    for chunks in ("off", "auto"):
        memonger.search_plan(small, batch=4, device="cpu", mode="inference", chunks=chunks)
    serve(answer)


if __name__ == "__main__":
    main()
