"""What running in chunks costs in time, measured: runs of a plan with chunks and of one without, taking turns.

Chunks are chosen by constants of one kind of processor (`memonger.tiling.chunk_times`), so that the same input gives
the same plan whatever else the machine does. On another processor the constants may be wrong. So the plan that was
chosen is compared once with the plan without chunks, by pairs of runs (`memonger.runtime.pairs`): it goes only where it
takes longer than was allowed, and `NOISE` on top. Where threads wait for a processor most of the time, as
others are running, nothing is measured, and the plan is that of the constants. For how long threads could have run and
had to wait is what Linux says of each (``/proc/self/task/*/schedstat``).
"""

import dataclasses
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from memonger.errors import MemongerError
from memonger.plan import Plan
from memonger.runtime import feeds as feeding
from memonger.runtime.pairs import Pairs
from memonger.runtime.program import inputs_of
from memonger.runtime.session import Session
from memonger.runtime.trainer import Trainer
from memonger.units import MiB

NOISE = 0.03
"""How much longer runs with chunks may seem to take than they are allowed to: what equal plans differ by."""

BUSY = 0.5
"""Seconds of waiting for a processor in one second of runs above which nothing is measured, as others are running."""

LONG_PAIRS, FEWEST_PAIRS, MOST_PAIRS = 3, 5, 60
"""Pairs of runs at most, where it isn't clear before: of long runs, of those of a second, and of short ones."""

TOGETHER = 10.0
"""Seconds that all runs of two plans may take, about, beyond the fewest."""

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
        limit: What of the ratio decides something: pairs are run until it is clear on which side of it the ratio lies.
        inputs: What runs are fed; random numbers if None.
    """

    def __init__(self, whole: Plan, seconds: float, limit: float, inputs: feeding.Feeds | None) -> None:
        self._whole, self._seconds, self._limit, self._inputs = whole, seconds, limit, inputs
        self._without: Callable[[], object] | None = None
        within = min(max(int(TOGETHER / (2 * seconds)), FEWEST_PAIRS), MOST_PAIRS)
        self._most = LONG_PAIRS if seconds >= LONG else within

    def pairs(self, chunked: Plan) -> Pairs | None:
        """Runs in chunks beside runs without them.

        Returns: None where nothing is measured: it can't be (`can_be_timed`), or others are running on the machine.
        """
        if not can_be_timed(self._seconds, self._whole.parameter_bytes):
            return None
        try:
            is_long = self._seconds >= LONG
            if self._without is None:
                self._without = _runner(self._whole, self._inputs)
                if not is_long and _waited_too_long(_timed(self._without), _timed(self._without)):
                    return None  # nothing is gained by loading the other one
            with_chunks = _runner(chunked, self._inputs)
            if not is_long:
                with_chunks()
            return self._compared(with_chunks, self._without)
        except MemongerError:  # whoever runs the plan is told why it doesn't
            return None

    def _compared(self, with_chunks: Callable[[], object], without: Callable[[], object]) -> Pairs | None:
        """Pairs of runs; None where others are running on the machine."""
        pairs = Pairs(self._limit, self._most)
        while not pairs.are_enough:
            first, second = (with_chunks, without)[:: -1 if len(pairs.ratios) % 2 else 1]
            runs = {run: _timed(run) for run in (first, second)}
            if _waited_too_long(*runs.values()):
                return None
            pairs.add(runs[with_chunks][0], runs[without][0])
        return pairs


def _waited_too_long(*runs: tuple[float, float]) -> bool:
    return sum(waited for _, waited in runs) > BUSY * sum(seconds for seconds, _ in runs)


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
    """Seconds of a run, and for how many its threads waited for a processor."""
    time.sleep(PAUSE)
    before, begin = _waited() or 0.0, time.perf_counter()
    run()
    seconds = time.perf_counter() - begin
    return seconds, max(0.0, (_waited() or 0.0) - before)


def _waited() -> float | None:
    """Seconds that this process's threads have waited for a processor that they could have used; None: nobody says."""
    found = list[int]()
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # a thread that ended meanwhile
            found.append(int(path.read_text().split()[1]))
    return sum(found) / 1e9 if found else None
