"""What running in chunks costs in time, measured: runs of a plan with chunks and of one without, taking turns.

Chunks are chosen by constants of one kind of processor (`memonger.tiling.chunk_times`), so that the same input gives
the same plan whatever else the machine does. On another processor the constants may be wrong. So the plan that was
chosen is compared once with the plan without chunks, and only a clear difference counts: pairs of runs in which the
process had the processor to itself agree that chunks cost more than was allowed, and `NOISE` on top. Whether it had is
what Linux says of each thread: for how long it could have run and had to wait (``/proc/self/task/*/schedstat``). On a
quiet machine that is 0.1 % of a run's time, beside one busy process more than all of it. Where others are running,
nothing is measured, and the plan is that of the constants.
"""

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from memonger.errors import MemongerError
from memonger.plan import Plan
from memonger.runtime import feeds as feeding
from memonger.runtime.session import Session
from memonger.runtime.trainer import Trainer
from memonger.units import MiB

NOISE = 0.03
"""How much longer runs with chunks may seem to take than they are allowed to: what pairs of equal runs differ by."""

QUIET = 0.02
"""Seconds of waiting for a processor in one second of a run above which the run doesn't count."""

PAIRS, MOST_PAIRS = 3, 9
"""Pairs that count if all agree, and those of which the median decides if they don't."""

PAUSE = 0.05
"""Seconds before each run: threads of the session that ran before spin for a while, and would be waited for."""

SHORTEST, LONGEST = 2e-3, 2.5
"""Seconds of a run: of one that is shorter two percent can't be told apart, and two pairs of longer ones take too long.
"""

MOST_PARAMETERS = 512 * MiB
"""Bytes of parameters beyond which two sessions beside the plan would take too much memory."""


def ratio_of_times(
    chunked: Plan, whole: Plan, seconds: float, limit: float, inputs: feeding.Feeds | None
) -> float | None:
    """The time of a run in chunks over that of one without them.

    Args:
        chunked: The plan with chunks, for this machine.
        whole: The same without.
        seconds: What a run takes without chunks, about.
        limit: What of the ratio decides something: as many pairs run as it takes to tell on which side it lies.
        inputs: What runs are fed; random numbers if None.

    Returns: None where it isn't measured: others are running on the machine; runs are shorter than `SHORTEST` or longer
        than `LONGEST`; parameters are larger than `MOST_PARAMETERS`; the system doesn't say what threads waited for.
    """
    if not SHORTEST <= seconds <= LONGEST or whole.parameter_bytes > MOST_PARAMETERS or _waited() is None:
        return None
    try:
        without = _runner(whole, inputs)
        if min(_timed(without)[1], _timed(without)[1]) > QUIET:  # nothing is gained by loading the other one
            return None
        with_chunks = _runner(chunked, inputs)
        with_chunks()
        return _compared(with_chunks, without, limit)
    except MemongerError:  # whoever runs the plan is told why it doesn't
        return None


def _compared(chunked: Callable[[], object], whole: Callable[[], object], limit: float) -> float | None:
    ratios = list[float]()
    for tried in range(2 * MOST_PAIRS):
        (with_chunks, first_waited), (without, second_waited) = _timed(chunked), _timed(whole)
        if max(first_waited, second_waited) <= QUIET:
            ratios.append(with_chunks / without)
        elif tried + 1 - len(ratios) > PAIRS:  # the machine isn't quiet
            break
        agree = all(ratio <= limit for ratio in ratios) or all(ratio > limit for ratio in ratios)
        if len(ratios) == MOST_PAIRS or (len(ratios) >= PAIRS and agree):
            return statistics.median(ratios)
    return None


def _runner(plan: Plan, inputs: feeding.Feeds | None) -> Callable[[], object]:
    """What runs a plan once; of training a step."""
    if plan.training is not None and plan.training.loss is not None:
        trainer = Trainer(plan, check_order=False)
        batch = inputs if inputs is not None else feeding.random_feeds(trainer.inputs)
        return lambda: trainer.step(batch)
    session = Session(plan, check_order=False)
    given = inputs if inputs is not None else feeding.random_feeds(feeding.inputs_of(plan.model.graph))
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
