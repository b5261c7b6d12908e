"""GPT-2 in ever smaller budgets, with chunks and by recomputing alone: the table of ``benchmarks.chunks --budgets``."""

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
from memonger.cli.differences import difference
from memonger.cli.measure import Job, MeasuredSession, take_turns
from memonger.cli.worker import WorkerError, reason

NAMES, BATCHES = ("gpt2", "gpt2_scores"), (1, 4)
SHARES = (0.5, 0.3, 0.2, 0.1)
WAYS = {"chunks": "auto", "recomputing": "off"}
ROUNDS, RUNS_SECONDS = 5, 1.0
COLUMNS = Table(
    "network<13", "batch>5", "budget>8", "MiB>9.1f", "way<13", "planned>9.1f", "run>9.1f", "ms>9.1f", "time>7.3f",
    "bits<7", "plan s>7.1f", "nodes>7", "again>6", "slices<20",
)  # fmt: skip


def budget_lines(threads: int) -> Iterator[str]:
    """The table, as it grows."""
    layers, full = NETWORKS["gpt2"].options["num_layers"], 12
    yield "Inference in ever smaller budgets: GPT-2 with 1,024 tokens and 50,257 words"
    yield from stamp("chunks --budgets", ("onnxruntime", "onnx", "numpy", "torch"))
    yield f"{layers} layers instead of {full}: budgets are of arena and workspace, which don't grow with layers; gpt2"
    yield "gives all logits, gpt2_scores one number for each token. budget: of arena and workspace of the plan without"
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
    model = str(folder / "model.onnx")
    with Planner(folder) as planner:
        plain = planner.plan(Wish(model, batch, threads, "off", keep=str(folder / "plain.onnx")))
        yield _line(name, batch, 1.0, "plain", plain, plain["peak"], raced(folder, "plain", threads))
        for share, (way, chunks) in itertools.product(SHARES, WAYS.items()):
            budget = round(share * plain["peak"])
            try:
                wish = Wish(model, batch, threads, chunks, plain["base"] + budget, str(folder / "way.onnx"))
                plan = planner.plan(wish)
                if "smallest" in plan:
                    smallest = (plan["smallest"] - plain["base"]) / MIB
                    yield COLUMNS.row(
                        name, batch, f"{share:.0%}", budget / MIB, way, f"refused: {smallest:.1f} is the smallest found"
                    )
                else:
                    yield _line(name, batch, share, way, plan, budget, raced(folder, "way", threads))
            except WorkerError as error:
                yield f"{name:<13}{batch:>5}{share:>8.0%}  {way}: failed: {error}"


def raced(folder: Path, kind: str, threads: int) -> Mapping[str, Any]:
    """A plan beside the plain one: bytes of a run, seconds, the ratio of the seconds, whether the bits are the same."""
    kinds = dict.fromkeys(("plain", kind))
    outputs = {one: folder / f"{one}.outputs.npz" for one in kinds}
    inputs = str(folder / "plain.npz")
    with ExitStack() as stack:
        workers = {
            one: stack.enter_context(
                MeasuredSession(
                    Job(str(folder / f"{one}.onnx"), inputs, str(outputs[one]), True, threads=threads), folder, one
                )
            )
            for one in kinds
        }
        take_turns(list(workers.values()), 1, 2)
        once = min(statistics.median(worker.seconds) for worker in workers.values())
        take_turns(list(workers.values()), ROUNDS, max(2, math.ceil(RUNS_SECONDS / once)))
        results = {one: worker.result() for one, worker in workers.items()}
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
