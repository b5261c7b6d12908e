"""The largest batch each contestant can train in a given memory.

PyTorch's is found by runs, each in a process of its own that may take no more; memonger's from plans alone, and
confirmed by one run. The contestants then take turns at their largest batches.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace

from benchmarks.training.side_by_side import networks
from benchmarks.training.side_by_side.contestants import MORE, Contestant, largest
from benchmarks.training.side_by_side.job import Job
from benchmarks.training.side_by_side.planning import Wish
from benchmarks.training.side_by_side.results import Result, Row
from benchmarks.training.side_by_side.rows import Course, entry, prepared
from benchmarks.training.side_by_side.search import TRIES, largest_batch
from benchmarks.training.side_by_side.turns import Entry, Settings, compete, started
from memonger.runtime.worker import WorkerError

RUNS = 8  # of PyTorch at most, before the one that is shown


def measure(name: str, size: networks.Size, settings: Settings) -> Row:
    """A row of largest batches of samples of a size.

    Raises:
        OutOfTime: the clock ran out.
    """
    chosen = largest(settings.device.name)
    with ExitStack() as stack:
        try:
            course = prepared(name, size, settings, stack)
        except WorkerError as error:
            failed = [Result(one.key, one.title, failed=f"no export: {error}") for one in chosen]
            return Row("largest", name, 0, size.shape, tuple(failed))
        entries, eager = [], 0
        for one in chosen:
            entries.append(_entry(course, one, eager))
            if one.key == "eager":
                eager = entries[0].result.batch
        course.planner.end()
        results = compete(entries, settings, course.folder)
    return Row("largest", name, 0, size.shape, tuple(_over(result, settings) for result in results))


def _entry(course: Course, one: Contestant, eager: int) -> Entry:
    """A contestant at its largest batch, or why there is none."""
    settings, budget, asked = course.settings, 0, 0
    if one.key in settings.without:
        return Entry(Result(one.key, one.title, failed="left out (--without)"), None)
    if one.plan == "budget":
        budget = _room(settings)
    try:
        if one.key == "more":
            if not eager:
                return Entry(Result(one.key, one.title, failed="PyTorch eager has no largest batch"), None)
            batch = math.ceil(MORE * eager)
        else:
            tries = RUNS if one.library == "torch" else TRIES
            batch, known = largest_batch(_need(course, one), _room(settings), course.size.batch, tries)
            asked = len(known)
    except WorkerError as error:
        return Entry(Result(one.key, one.title, failed=str(error)), None)
    if not batch:
        return Entry(Result(one.key, one.title, failed="not one sample fits"), None)
    found = entry(course, one, "largest", batch, budget)
    note = f"{asked} {'plans' if one.library == 'memonger' else 'runs'}" if asked else ""
    return replace(found, result=replace(found.result, note=note), job=_capped(found, settings))


def _capped(found: Entry, settings: Settings) -> Job | None:
    if found.job is None or not settings.device.cuda or found.job.library != "torch":
        return found.job
    return replace(found.job, cap=_room(settings))


def _room(settings: Settings) -> int:
    """Bytes for tensors and kernels' scratch: on a GPU the context takes its part."""
    return settings.memory - settings.device.context


def _need(course: Course, one: Contestant) -> Callable[[int], float]:
    """Bytes of a batch, what is no tensor left out: of a plan, or of a run."""
    settings = course.settings
    if one.library == "memonger":
        name = "smallest" if one.plan == "budget" else one.plan

        def planned(batch: int) -> float:
            figures = course.plan(Wish(name, batch, keep=False))
            inputs = figures.inputs if settings.device.cuda else 0
            return figures.predicted + inputs

        return planned

    def run(batch: int) -> float:
        ready = entry(course, one, "largest", batch)
        try:
            with ExitStack() as stack:
                _, said = started(replace(ready, job=_capped(ready, settings)), settings, course.folder, stack)
        except WorkerError as error:
            if "OutOfMemory" in str(error) or "out of memory" in str(error):
                return math.inf
            raise
        return float(said["peak"] - said["beside"])

    return run


def _over(result: Result, settings: Settings) -> Result:
    """The result, with a word where the confirming run took more than it was to."""
    if result.tensors is None or result.tensors <= _room(settings):
        return result
    over = f"{result.tensors / _room(settings) - 1:.1%} over"
    return replace(result, note=", ".join(filter(None, (result.note, over))))
