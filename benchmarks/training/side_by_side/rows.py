"""One row: a network exported and planned, and its contestants measured."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.training.side_by_side import networks
from benchmarks.training.side_by_side.contestants import KINDS, Contestant
from benchmarks.training.side_by_side.job import Job
from benchmarks.training.side_by_side.planning import Figures, Wish
from benchmarks.training.side_by_side.results import Result, Row
from benchmarks.training.side_by_side.turns import LATE, Entry, OutOfTime, Settings, compete
from memonger.runtime.worker import Worker, WorkerError

PLANNED, READY = 0.6, 0.6  # of the time that is left, where a row may be measured in part


@dataclass(frozen=True, slots=True)
class Course:
    """A network in its folder, exported, and what plans it."""

    name: str
    size: networks.Size
    folder: Path
    settings: Settings
    sizes: Mapping[str, int]
    planner: Worker

    def plan(self, wish: Wish) -> Figures:
        """A plan.

        Raises:
            WorkerError: there is none; the text says why.
        """
        return Figures(**self.planner.ask(asdict(wish), 2 * self.settings.patience))


def measure(kind: str, name: str, size: networks.Size, settings: Settings, partly: bool = False) -> Row:
    """A row of ``training``.

    Args:
        kind: Which contestants.
        name: The network.
        size: Of its inputs.
        settings: How.
        partly: Whether contestants that aren't ready in time are left out, rather than the row given up: exporting and
            planning end when 60 % of the time are over, and what has started 60 % of the rest later takes its turns.

    Raises:
        OutOfTime: the clock ran out.
    """
    chosen = KINDS[kind](settings.device.name)
    with ExitStack() as stack:
        try:
            course = prepared(name, size, replace(settings, clock=settings.clock.part(PLANNED if partly else 1)), stack)
        except WorkerError as error:
            failed = [Result(one.key, one.title, failed=f"no export: {error}", batch=size.batch) for one in chosen]
            return Row(kind, name, size.batch, size.shape, tuple(failed))
        entries = []
        for one in chosen:
            try:
                entries.append(entry(course, one, kind, size.batch))
            except OutOfTime:
                if not partly:
                    raise
                entries.append(Entry(Result(one.key, one.title, failed=LATE, batch=size.batch), None))
        course.planner.end()
        results = compete(entries, settings, course.folder, settings.clock.part(READY) if partly else None)
    return Row(kind, name, size.batch, size.shape, tuple(results))


def folder_of(name: str, size: networks.Size, settings: Settings) -> Path:
    """Where a network of this size goes, and its plans with these settings."""
    what = json.dumps([size.shape, dict(size.options), settings.device.name, settings.threads, settings.tf32])
    return settings.folder / f"{name}-{hashlib.sha256(what.encode()).hexdigest()[:8]}"


def prepared(name: str, size: networks.Size, settings: Settings, stack: ExitStack) -> Course:
    """The network exported, unless it is there already, and a planner that ends with ``stack``.

    Raises:
        WorkerError: it can't be exported.
        OutOfTime: the clock ran out.
    """
    folder = folder_of(name, size, settings)
    folder.mkdir(parents=True, exist_ok=True)
    figures = folder / "figures.json"
    if not figures.exists():
        arguments = [name, json.dumps(asdict(size)), str(folder)]
        with Worker(
            "benchmarks.training.side_by_side.export", arguments, folder / "export.err", left=settings.clock.left
        ) as worker:
            worker.read(2 * settings.patience)
    effort = "-" if settings.effort is None else str(settings.effort)
    arguments = [str(folder), settings.device.name, str(settings.threads), str(int(settings.tf32)), effort]
    planner = Worker(
        "benchmarks.training.side_by_side.planning", arguments, folder / "planning.err", left=settings.clock.left
    )
    stack.push(planner)
    return Course(name, size, folder, settings, json.loads(figures.read_text()), planner)


def entry(course: Course, one: Contestant, kind: str, batch: int, budget: int = 0) -> Entry:
    """A contestant made ready to start: inputs written, its plan made."""
    held = course.sizes["weight_bytes"] + course.sizes["state_bytes"]
    common: dict[str, Any] = {"contestant": one.key, "title": one.title, "batch": batch, "held": held}
    model, predicted, session, note = str(course.folder / "forward.onnx"), None, None, ""
    if one.key in course.settings.without:
        return Entry(Result(**common, failed="left out (--without)"), None)
    if one.library == "memonger":
        try:
            figures = course.plan(Wish(one.plan, batch, budget))
        except WorkerError as error:
            return Entry(Result(**common, failed=f"no plan: {error}"), None)
        model, session, note = figures.path, figures.session, figures.note
        predicted = figures.predicted + (figures.inputs if course.settings.device.cuda else 0)
    job = _job(course, one, batch, model, f"{kind}-{one.key}")
    return Entry(Result(**common, predicted=predicted, session=session, note=note), job, one.keeps)


def _job(course: Course, one: Contestant, batch: int, model: str, stem: str) -> Job:
    settings, inputs = course.settings, course.folder / f"inputs-{batch}.npz"
    if not inputs.exists():
        np.savez(inputs, **dict[str, Any](networks.data(networks.NETWORKS[course.name], course.size, batch)))
    return Job(
        library=one.library,
        mode=one.mode,
        network=course.name,
        device=(one.library == "torch" and settings.device.torch) or settings.device.name,
        inputs=str(inputs),
        weights=str(course.folder / "weights.pt"),
        model=model,
        results=str(course.folder / f"{stem}-{batch}.npz"),
        weight_bytes=course.sizes["weight_bytes"],
        state_bytes=course.sizes["state_bytes"],
        threads=settings.threads,
        tf32=settings.tf32,
        tuned=settings.tuned,
        share=one.share,
        options=course.size.options,
    )
