"""Plans with chunks and without, made in a process of their own: ``python -m benchmarks.chunks.plans``.

It answers each request, a `Wish` in JSON, with the plan's figures (see `memonger.runtime.worker`). So memory that
planning leaves behind disturbs no measurement, and what ends the process is the row's reason to fail.
"""

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import memonger
import models
from benchmarks.networks import random_inputs
from memonger.cli.compare import symbolic_sizes
from memonger.devices import CPU
from memonger.errors import BudgetError
from memonger.ir.values import nbytes
from memonger.model.load import load
from memonger.options import Options
from memonger.planner.job import Job, finish, in_chunks, solve
from memonger.planner.search_plan import prepare
from memonger.runtime import ort
from memonger.runtime.program import inputs_of
from memonger.runtime.worker import Worker, reason, serve


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
        prepared: Whether the model is lowered and calibrated once for all wishes of it, which is part of each's time.
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
    prepared: bool = False
    trains: bool = False
    strategy: str = ""
    max_overhead: float = 0.02


class Planner(Worker):
    """The parent's end of a process that plans."""

    def __init__(self, folder: Path) -> None:
        super().__init__("benchmarks.chunks.plans", [], folder / "planner.err")

    def plan(self, wish: Wish) -> dict[str, Any]:
        """A plan's figures; see `answer`.

        Raises:
            WorkerError: it couldn't be made.
        """
        return self.ask(asdict(wish))


def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Make a plan, and say what it is: bytes, seconds, counts. A plan that is refused has ``smallest`` alone."""
    wish = Wish(**request)
    try:
        options = _options(wish)
        begin = time.perf_counter()
        if wish.prepared:
            plan, seconds = _planned(wish, options)
        else:
            plan = memonger.search_plan(wish.model, options=options)
            seconds = time.perf_counter() - begin
    except BudgetError as error:
        return {"smallest": error.smallest}
    except Exception as error:  # whatever a plan fails of is its row in the table
        return {"failed": reason(error)}
    figures = {
        "seconds": seconds,
        "peak": plan.arena_bytes + (plan.workspace_bytes or 0),
        "arena": plan.arena_bytes,
        "base": plan.parameter_bytes + plan.input_bytes,
        "predicted": plan.predicted_bytes,
        "stock": plan.stock_bytes or 0,
        "outputs": sum(nbytes(value) or 0 for value in dict.fromkeys(plan.model.graph.outputs)),
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
    return figures


def _planned(wish: Wish, options: Options) -> tuple[memonger.Plan, float]:
    """A plan and the seconds that it took, those of its model's preparation included."""
    key = wish.model, wish.batch, wish.threads, wish.trains
    if key not in _PREPARED:
        _PREPARED.clear()
        begin = time.perf_counter()
        _PREPARED[key] = prepare(load(wish.model, batch=wish.batch), options), time.perf_counter() - begin
    (job, preparing), begin = _PREPARED[key], time.perf_counter()
    request = dataclasses.replace(job.request, budget=options.budget_bytes)
    job = dataclasses.replace(job.copy(), options=options, request=request, strategy=options.chosen_strategy)
    job = in_chunks(job)
    return finish(job, solve(job), begin), preparing + time.perf_counter() - begin


_PREPARED: dict[tuple[object, ...], tuple[Job, float]] = {}
"""The model of the wish before, with the seconds that it took."""


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


def slices(figures: Mapping[str, Any], most: int = 3) -> str:
    """The slices of a plan's bands, stage by stage; of many bands the first."""
    rows = ["rows " if band["axis"] and not band["value"] else "" for band in figures["chunks"]]
    counts = ["+".join(map(str, band["slices"])) for band in figures["chunks"]]
    bands = [row + count for row, count in zip(rows, counts, strict=True)]
    return ", ".join(bands[:most]) + (f" and {len(bands) - most} more" if len(bands) > most else "") or "whole"


def main() -> None:
    """Plan something small, so that no request pays for imports; then answer requests."""
    small = models.build("resnet18", batch=None, image=32, width=0.125)
    for chunks in ("off", "auto"):
        memonger.search_plan(small, batch=4, device="cpu", mode="inference", chunks=chunks)
    serve(answer)


if __name__ == "__main__":
    main()
