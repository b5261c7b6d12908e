"""Contestants of one network in processes of their own that take turns."""

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.training.side_by_side import cores
from benchmarks.training.side_by_side.devices import Device, Watch
from benchmarks.training.side_by_side.job import KEEP_MEMORY, Job
from benchmarks.training.side_by_side.results import Result
from memonger.runtime.worker import Worker, WorkerError

WORKER = "benchmarks.training.side_by_side.worker"
PATIENT = 4  # times as many rounds as asked for, at most, for turns in which the cores shared a cache
LATE = "not ready in time"


class OutOfTime(Exception):  # noqa: N818  (not an error of the program)
    """The time for the whole program is over."""


@dataclass(frozen=True, slots=True)
class Clock:
    """When the program has to end, by `time.monotonic`; None: whenever."""

    end: float | None = None

    def left(self) -> float:
        """Seconds left.

        Raises:
            OutOfTime: none.
        """
        left = math.inf if self.end is None else self.end - time.monotonic()
        if left <= 0:
            raise OutOfTime
        return left

    def part(self, share: float) -> "Clock":
        """One that ends when this share of what is left of it is over."""
        return self if self.end is None else Clock(self.end - (1 - share) * max(0.0, self.end - time.monotonic()))


@dataclass(frozen=True, slots=True)
class Settings:
    """How everything is measured.

    Attributes:
        device: Where.
        threads: Threads within a node.
        clock: When to stop.
        patience: Seconds that a contestant may take to get ready, compiling included; a plan may take twice as long.
        rounds: Turns each contestant takes, where cores share a cache at times those in which they did (see `cores`).
        seconds: About how long a turn is; two steps at least.
        tf32: Whether products of float32 may be computed in TF32, on all sides.
        tuned: Whether PyTorch tries cuDNN's algorithms.
        memory: Bytes that the largest batch has to fit.
        without: Keys of contestants that are left out.
        folder: Where networks, plans and what processes exchange go.
        effort: What a search for a budget may spend; None: the planner's own.
    """

    device: Device
    threads: int
    clock: Clock
    patience: float
    rounds: int
    seconds: float
    tf32: bool
    tuned: bool
    memory: int
    without: tuple[str, ...]
    folder: Path
    effort: int | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A contestant ready to be started; or not, then ``result`` has the reason."""

    result: Result
    job: Job | None
    keeps: bool = False


def compete(entries: Sequence[Entry], settings: Settings, folder: Path, ready: Clock | None = None) -> list[Result]:
    """Start all, one after another, and let them take turns. One that fails has the reason in its result.

    Args:
        entries: The contestants.
        settings: How.
        folder: Where their jobs go.
        ready: When those that are ready are measured without the others; None: never.

    Raises:
        OutOfTime: the clock ran out.
    """
    results = [entry.result for entry in entries]
    with ExitStack() as stack:
        workers: dict[int, Worker] = {}
        compiled_last = sorted(
            enumerate(entries), key=lambda one: one[1].job is not None and one[1].job.mode == "compile"
        )
        for index, entry in compiled_last:  # compiling may take all the time there is to get ready
            if entry.job is None:
                continue
            try:
                patience = min(settings.patience, (ready or Clock()).left())
            except OutOfTime:
                results[index] = replace(entry.result, failed=LATE)
                continue
            try:
                workers[index], said = started(entry, replace(settings, patience=patience), folder, stack)
            except WorkerError as error:
                results[index] = replace(entry.result, failed=str(error))
                continue
            results[index] = replace(entry.result, peak=said["peak"], beside=said["beside"])
        times = _turns(workers, settings, results)
    for index, found in times.items():
        if not results[index].failed:
            results[index] = replace(results[index], **found.figures())
    return _compared(entries, results)


def started(entry: Entry, settings: Settings, folder: Path, stack: ExitStack) -> tuple[Worker, dict[str, Any]]:
    """A contestant's process, ready for its turns and ended with ``stack``; its ``peak`` and what is ``beside``.

    Raises:
        WorkerError: it couldn't be made ready.
        OutOfTime: the clock ran out.
    """
    assert entry.job is not None
    name, device = entry.result.contestant, settings.device
    entry.job.save(folder / f"{name}.job.json")
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(settings.folder / "inductor"),
        "OMP_NUM_THREADS": str(settings.threads),
    }
    environment |= KEEP_MEMORY if entry.keeps else {}
    with ExitStack() as until_ready:
        watch = until_ready.enter_context(Watch(device.index)) if device.cuda else None
        arguments = [str(folder / f"{name}.job.json")]
        process = Worker(WORKER, arguments, folder / f"{name}.err", environment, settings.clock.left)
        until_ready.push(process)
        said = process.read(settings.patience)
        if watch is not None:
            said = {"peak": watch.peak(), "beside": device.context}
        else:
            said = {"peak": said["peak"], "beside": said["rest"]}
        until_ready.pop_all()
        stack.push(process)
        if watch is not None:
            watch.__exit__(None, None, None)
        return process, said


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds of a contestant's steps, turn by turn.

    Attributes:
        near: Where the cores shared a cache before the turn and after, or there is no telling.
        far: Where they shared none, before or after.
        changed: Where that changed.
    """

    near: list[float] = field(default_factory=list)
    far: list[float] = field(default_factory=list)
    changed: list[float] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """What a result says of them; ``seconds`` is of all turns where the cores never shared a cache."""
        near = self.near or [*self.far, *self.changed]
        far = statistics.median(self.far) if self.far else None
        return {"seconds": statistics.median(near), "near": len(self.near), "far_seconds": far, "far": len(self.far)}


def _turns(workers: Mapping[int, Worker], settings: Settings, results: list[Result]) -> dict[int, _Times]:
    """Each contestant's turns until all have enough; one that fails in a turn is out."""
    times = {index: _Times() for index in workers}
    before = _near(settings)
    for count in range(PATIENT * settings.rounds):
        left = {index: worker for index, worker in workers.items() if not results[index].failed}
        if count >= settings.rounds and all(len(times[index].near) >= settings.rounds for index in left):
            break
        for index, worker in left.items():
            try:
                seconds = statistics.median(worker.times(2, settings.seconds, settings.patience))
            except WorkerError as error:
                results[index] = replace(results[index], failed=str(error))
                continue
            after = _near(settings)
            found = times[index]
            (found.changed if before is not after else found.near if after else found.far).append(seconds)
            before = after
    return times


def _near(settings: Settings) -> bool:
    """Whether cores share a cache now; so it counts where one thread or a GPU computes, or there is no telling."""
    return settings.device.cuda or settings.threads < 2 or cores.share_a_cache() is not False


def _compared(entries: Sequence[Entry], results: Sequence[Result]) -> list[Result]:
    """The results with how far each is from the first that didn't fail, where both ran the same batch."""
    found, first, batch = list(results), None, 0
    for index, (entry, result) in enumerate(zip(entries, results, strict=True)):
        if result.failed or entry.job is None:
            continue
        with np.load(entry.job.results) as archive:
            values = archive["values"].astype(np.float64)
        if first is None:
            first, batch = values, result.batch
        if result.batch == batch:
            found[index] = replace(result, apart=apart(values[:1], first[:1]), drift=apart(values, first))
    return found


def apart(mine: np.ndarray, first: np.ndarray) -> float:
    """The largest difference, over the largest magnitude there is to differ from."""
    return float(np.abs(mine - first).max() / max(np.abs(first).max(), np.finfo(np.float64).tiny))
