"""What running in chunks costs in time, measured: runs of a plan with chunks and of one without, taking turns.

Chunks are chosen by constants of one kind of processor (`memonger.tiling.chunk_times`), so that the same input gives
the same plan whatever else the machine does. On another processor the constants may be wrong. So the plan that was
chosen is compared once with the plan without chunks, and only a clear difference counts: of runs in which the process
had the processor to itself the fastest in chunks takes longer than was allowed, and `NOISE` on top. Whether it had is
what Linux says of each thread: for how long it could have run and had to wait (``/proc/self/task/*/schedstat``). On a
quiet machine that is 0.1 % of a run's time, beside one busy process more than all of it. Where others are running,
nothing is measured, and the plan is that of the constants.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from memonger.errors import MemongerError
from memonger.plan import Plan
from memonger.runtime import feeds as feeding
from memonger.runtime.program import inputs_of
from memonger.runtime.session import Session
from memonger.runtime.trainer import Trainer
from memonger.units import MiB

NOISE = 0.03
"""How much longer runs with chunks may seem to take than they are allowed to: what pairs of equal runs differ by."""

QUIET = 0.02
"""Seconds of waiting for a processor in one second of a run above which the run doesn't count."""

RUNS = 3, 9
"""Runs of each kind that are timed at least, and at most, if the fastest with chunks seem to take too long; fewer where
they are long. What else the machine does makes runs slower, in chunks that lie in the cache more than whole, and never
faster: so the fastest of each are compared."""

TOGETHER = 4.0
"""Seconds that all runs of two plans may take, about; one of each kind is timed however long it takes."""

PAUSE = 0.05
"""Seconds before each run: threads of the session that ran before spin for a while, and would be waited for."""

SHORTEST, LONG, LONGEST = 2e-3, 1.5, 15.0
"""Seconds of a run: of one that is shorter two percent can't be told apart; of a long one the first run counts as well;
and the longest would take too much time."""

MOST_PARAMETERS = 512 * MiB
"""Bytes of parameters beyond which two sessions beside the plan would take too much memory."""


def can_be_timed(seconds: float, parameter_bytes: int) -> bool:
    """Whether plans can be timed whose runs take about so many seconds, and whose parameters so many bytes.

    They can't where runs are shorter than `SHORTEST` or longer than `LONGEST`, where parameters are larger than
    `MOST_PARAMETERS`, and where the system doesn't say what threads waited for.
    """
    return SHORTEST <= seconds <= LONGEST and parameter_bytes <= MOST_PARAMETERS and _waited() is not None


class ChunkTimer:
    """Times plans with chunks beside the one without.

    Args:
        whole: The plan without chunks, for this machine.
        seconds: What a run of it takes, about.
        limit: What of the ratio decides something: more runs are timed where it seems to be above.
        inputs: What runs are fed; random numbers if None.
    """

    def __init__(self, whole: Plan, seconds: float, limit: float, inputs: feeding.Feeds | None) -> None:
        self._whole, self._seconds, self._limit, self._inputs = whole, seconds, limit, inputs
        self._without: Callable[[], object] | None = None
        self._without_seconds = list[float]()
        most = min(max(int(TOGETHER / (2 * seconds)) - 1, 1), RUNS[1])  # one of each isn't counted
        self._fewest, self._most = min(RUNS[0], most), most

    def ratio(self, chunked: Plan) -> float | None:
        """The time of a run in chunks over that of one without them, the fastest of each.

        Returns: None where it isn't measured: it can't be (`can_be_timed`), or others are running on the machine.
        """
        if not can_be_timed(self._seconds, self._whole.parameter_bytes):
            return None
        try:
            is_long = self._seconds >= LONG
            if self._without is None:
                self._without = _runner(self._whole, self._inputs)
                if not is_long and min(_timed(self._without)[1], self._count_without()) > QUIET:
                    return None  # nothing is gained by loading the other one
            with_chunks = _runner(chunked, self._inputs)
            if not is_long:
                with_chunks()
            return self._compared(with_chunks)
        except MemongerError:  # whoever runs the plan is told why it doesn't
            return None

    def _compared(self, with_chunks: Callable[[], object]) -> float | None:
        """The ratio of the fastest runs; None where too many of them didn't have the processor to themselves.

        Runs without chunks are the same for all plans, and are timed as often as those of the first.
        """
        best, counted, disturbed, others = math.inf, 0, 0, self._without_seconds
        while disturbed <= self._fewest:
            if counted > len(others):
                waited = self._count_without()
            else:
                seconds, waited = _timed(with_chunks)
                best, counted = (min(best, seconds), counted + 1) if waited <= QUIET else (best, counted)
            disturbed += waited > QUIET
            is_enough = min(counted, len(others)) >= self._fewest and best <= self._limit * min(others)
            if is_enough or (counted >= self._most and others):
                return best / min(others)
        return None

    def _count_without(self) -> float:
        """Time a run without chunks, which counts if it had the processor to itself; returns what part it waited."""
        assert self._without is not None
        seconds, waited = _timed(self._without)
        self._without_seconds += [seconds] if waited <= QUIET else []
        return waited


def _runner(plan: Plan, inputs: feeding.Feeds | None) -> Callable[[], object]:
    """What runs a plan once; of training a step. All of its weights are in memory: chunks are compared, not disks."""
    plan = dataclasses.replace(plan, window=None)
    if plan.training is not None and plan.training.loss is not None:
        trainer = Trainer(plan, check_order=False)
        batch = inputs if inputs is not None else feeding.random_feeds(trainer.inputs)
        return lambda: trainer.step(batch)
    session = Session(plan, check_order=False)
    given = inputs if inputs is not None else feeding.random_feeds(inputs_of(plan.model.graph))
    session.arena.touch()
    return lambda: session.run(given, copy=False)


def _timed(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a run, and what part of them its threads waited for a processor."""
    time.sleep(PAUSE)
    before, begin = _waited() or 0.0, time.perf_counter()
    run()
    seconds = time.perf_counter() - begin
    return seconds, max(0.0, (_waited() or 0.0) - before) / seconds


def _waited() -> float | None:
    """Seconds that this process's threads have waited for a processor that they could have used; None: nobody says."""
    found = list[int]()
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # a thread that ended meanwhile
            found.append(int(path.read_text().split()[1]))
    return sum(found) / 1e9 if found else None
