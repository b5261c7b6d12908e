"""GPT-2 in ever smaller budgets, with chunks, recomputing, and both: the table of ``benchmarks.chunks --budgets``."""

import itertools
import math
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.chunk_networks import NETWORKS, write
from benchmarks.chunk_plans import Planner, Wish, slices
from benchmarks.machine import MIB, Table, stamp
from memonger.cli import measure_steps
from memonger.cli.differences import difference
from memonger.cli.measure import Job, MeasuredSession, take_turns
from memonger.cli.worker import WorkerError, reason

NAMES, BATCHES = ("gpt2", "gpt2_scores", "gpt2_step"), (1, 4)
TRAINS = "gpt2_step"
SHARES = (0.5, 0.3, 0.2, 0.1)
WAYS = {"chunks": {"chunks": "auto"}, "recomputing": {"chunks": "off"}}
STEP_WAYS: dict[str, dict[str, Any]] = {
    "chunks": {"chunks": "auto", "strategy": "none", "max_overhead": 1e6}, "recomputing": {"chunks": "off"},
    "both": {"chunks": "auto"},
}  # fmt: skip
ROUNDS, RUNS_SECONDS = 5, 1.0
COLUMNS = Table(
    "network<13", "batch>5", "budget>8", "MiB>9.1f", "way<13", "planned>9.1f", "run>9.1f", "ms>9.1f", "time>7.3f",
    "bits<7", "plan s>7.1f", "nodes>7", "again>6", "slices<20",
)  # fmt: skip


def budget_lines(threads: int) -> Iterator[str]:
    """The table, as it grows."""
    layers, full = NETWORKS["gpt2"].options["num_layers"], 12
    yield "Inference and training in ever smaller budgets: GPT-2 with 1,024 tokens and 50,257 words"
    yield from stamp("chunks --budgets", ("onnxruntime", "onnx", "numpy", "torch"))
    yield f"{layers} layers instead of {full}: budgets are of arena and workspace, which don't grow with layers; gpt2"
    yield "gives all logits, gpt2_scores one number for each token, gpt2_step is a training step with AdamW, whose"
    yield "chunks alone are those that take least memory. budget: of arena and workspace of the plan without"
    yield "chunks and budget, in MiB; run: what a run takes over the loaded model; time: over that plan's, both taking"
    yield f"turns, {threads} threads; bits: against that plan; again: nodes that run again; refused: the smallest."
    yield from ("", COLUMNS.heading)
    for name in NAMES:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            write(name, folder / "model.onnx")
            for batch in BATCHES:
                try:
                    yield from _lines(name, batch, threads, folder)
                except Exception as error:  # the next batch goes on
                    yield f"{name:<13}{batch:>5}  failed: {reason(error)}"


def _lines(name: str, batch: int, threads: int, folder: Path) -> Iterator[str]:
    model, trains = str(folder / "model.onnx"), name == TRAINS
    with Planner(folder) as planner:
        wish = Wish(
            model, batch, threads, "off", keep=str(folder / "plain.onnx"), trains=trains, strategy="none" * trains
        )
        plain = planner.plan(wish)
        yield _line(name, batch, 1.0, "plain", plain, plain["peak"], raced(folder, "plain", threads, trains))
        ways = STEP_WAYS if trains else WAYS
        for share, (way, options) in itertools.product(SHARES, ways.items()):
            budget = round(share * plain["peak"])
            try:
                given = 0 if "strategy" in options else plain["base"] + budget
                wish = Wish(
                    model, batch, threads, budget=given, keep=str(folder / "way.onnx"), trains=trains, **options
                )
                plan = planner.plan(wish)
                smallest = plan["smallest"] - plain["base"] if "smallest" in plan else plan["peak"]
                if "smallest" in plan or plan["peak"] > budget:
                    refused = f"refused: {smallest / MIB:.1f} is the smallest found"
                    yield COLUMNS.row(name, batch, f"{share:.0%}", budget / MIB, way, refused)
                else:
                    yield _line(name, batch, share, way, plan, budget, raced(folder, "way", threads, trains))
            except WorkerError as error:
                yield f"{name:<13}{batch:>5}{share:>8.0%}  {way}: failed: {error}"


def _worker(folder: Path, one: str, output: Path, threads: int, trains: bool) -> MeasuredSession:
    plan, inputs = str(folder / f"{one}.onnx"), str(folder / "plain.npz")
    if trains:
        job = measure_steps.Job(plan, inputs, str(output), True, untimed=2, threads=threads)
        return measure_steps.MeasuredTrainer(job, folder, one)
    return MeasuredSession(Job(plan, inputs, str(output), True, threads=threads), folder, one)


def raced(folder: Path, kind: str, threads: int, trains: bool) -> Mapping[str, Any]:
    """A plan beside the plain one: bytes of a run, seconds, the ratio of the seconds, whether the bits are the same."""
    kinds = dict.fromkeys(("plain", kind))
    outputs = {one: folder / f"{one}.outputs.npz" for one in kinds}
    with ExitStack() as stack:
        workers = {one: stack.enter_context(_worker(folder, one, outputs[one], threads, trains)) for one in kinds}
        take_turns(list(workers.values()), 1, 2)
        once = min(statistics.median(worker.seconds) for worker in workers.values())
        take_turns(list(workers.values()), ROUNDS, max(1 if trains else 2, math.ceil(RUNS_SECONDS / once)))
        results = {one: worker.result() for one, worker in workers.items()}
        for worker in workers.values():
            if isinstance(worker, measure_steps.MeasuredTrainer):
                worker.save()  # as many steps as the others took
    mine, plain = (_loaded(outputs[one]) for one in (kind, "plain"))
    return {
        "peak": results[kind].peak_bytes or 0,
        "seconds": results[kind].latency_seconds,
        "ratio": results[kind].latency_seconds / results["plain"].latency_seconds,
        "bits": "same" if difference(mine, plain).bitwise_equal else "DIFFER",
    }


def _line(
    name: str, batch: int, share: float, way: str, plan: Mapping[str, Any], budget: int, raced: Mapping[str, Any]
) -> str:
    return COLUMNS.row(
        name, batch, f"{share:.0%}", budget / MIB, way, plan["peak"] / MIB, raced["peak"] / MIB, raced["seconds"] * 1e3,
        raced["ratio"], raced["bits"], plan["seconds"], plan["nodes"], plan["recomputed"], slices(plan),
    )  # fmt: skip


def _loaded(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as archive:
        return {name: archive[name] for name in archive.files}
