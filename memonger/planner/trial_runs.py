"""Runs of plans while a plan is made: what running in chunks costs in time, and workspace that nothing else measures.

Chunks are timed by runs of a plan with them and of one without, taking turns. They are chosen by constants of one kind
of processor (`memonger.tiling.chunk_times`), so that the same input gives the same plan whatever else the machine does.
On another processor the constants may be wrong. So the plan that was chosen is compared once with the plan without
chunks, and only a clear difference counts: of runs in which the process had the processor to itself the fastest in
chunks takes longer than was allowed, and `NOISE` on top. Whether it had is what Linux says of each thread: for how long
it could have run and had to wait (``/proc/self/task/*/schedstat``). On a quiet machine that is 0.1 % of a run's time,
beside one busy process more than all of it. Where others are running, nothing is measured, and the plan is that of the
constants.
"""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from memonger.errors import MemongerError, PlanError, SessionError
from memonger.plan import Plan
from memonger.runtime import feeds as feeding
from memonger.runtime.engine import Engine
from memonger.runtime.program import inputs_of
from memonger.runtime.session import Session
from memonger.runtime.trainer import Trainer
from memonger.units import MiB

NOISE = 0.03
"""How much longer runs with chunks may seem to take than they are allowed to: what pairs of equal runs differ by."""

QUIET = 0.02
"""Seconds of waiting for a processor in one second of a run above which the run doesn't count."""

PAIRS = 3, 9
"""Pairs of runs that are timed at least, and at most, if the fastest runs with chunks seem to take too long. What else
the machine does makes runs slower, in chunks that lie in the cache more than whole, and never faster: so the fastest of
each are compared."""

LONG_RUNS = 3
"""Long runs that are timed: in chunks, without them, and in chunks again where the first seems to take too long."""

PAUSE = 0.05
"""Seconds before each run: threads of the session that ran before spin for a while, and would be waited for."""

SHORTEST, LONG, LONGEST = 2e-3, 1.5, 15.0
"""Seconds of a run: of one that is shorter two percent can't be told apart; a long one isn't timed as often; and the
longest would take too much time."""

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
        self._long_runs = LONG_RUNS

    def ratio(self, chunked: Plan) -> float | None:
        """The time of a run in chunks over that of one without them, the fastest of each.

        Returns: None where it isn't measured: it can't be (`can_be_timed`), or others are running on the machine.
        """
        if not can_be_timed(self._seconds, self._whole.parameter_bytes):
            return None
        try:
            if self._without is None:
                self._without = _runner(self._whole, self._inputs)
                if self._seconds < LONG and min(_timed(self._without)[1], _timed(self._without)[1]) > QUIET:
                    return None  # nothing is gained by loading the other one
            with_chunks = _runner(chunked, self._inputs)
            if self._seconds >= LONG:
                return self._compared_long(with_chunks, self._without)
            with_chunks()
            return self._compared(with_chunks, self._without)
        except MemongerError:  # whoever runs the plan is told why it doesn't
            return None

    def _compared(self, with_chunks: Callable[[], object], without: Callable[[], object]) -> float | None:
        """The ratio of the fastest runs; None where too few of them had the processor to themselves."""
        best, counted, (fewest, most) = math.inf, 0, PAIRS
        for tried in range(2 * most):
            (seconds, waited), (others, others_waited) = _timed(with_chunks), _timed(without)
            self._without_seconds += [others] if others_waited <= QUIET else []
            if max(waited, others_waited) <= QUIET:
                best, counted = min(best, seconds), counted + 1
            elif tried + 1 - counted > fewest:  # the machine isn't quiet
                return None
            holds = bool(self._without_seconds) and best <= self._limit * min(self._without_seconds)
            if counted == most or (counted >= fewest and holds):
                return best / min(self._without_seconds)
        return None

    def _compared_long(self, with_chunks: Callable[[], object], without: Callable[[], object]) -> float | None:
        """The same of long runs: `LONG_RUNS` for the first plan, and what is left of them for each other, one at least.

        Runs without chunks are the same for all plans: one that counts will do.
        """
        best, others = math.inf, self._without_seconds
        for left in range(max(1, self._long_runs), 0, -1):
            if (best == math.inf) + (not others) > left:  # too few count
                break
            self._long_runs -= 1
            in_chunks = best == math.inf or bool(others)
            seconds, waited = _timed(with_chunks if in_chunks else without)
            if waited <= QUIET and in_chunks:
                best = min(best, seconds)
            elif waited <= QUIET:
                others.append(seconds)
            if others and best <= self._limit * others[0]:
                break
        return best / others[0] if others and best < math.inf else None


def _runner(plan: Plan, inputs: feeding.Feeds | None) -> Callable[[], object]:
    """What runs a plan once; of training a step."""
    if plan.training is not None and plan.training.loss is not None:
        trainer = Trainer(plan, check_order=False)
        batch = inputs if inputs is not None else feeding.random_feeds(trainer.inputs)
        return lambda: trainer.step(batch)
    session = Session(plan, check_order=False)
    given = inputs if inputs is not None else feeding.random_feeds(inputs_of(plan.model.graph))
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


def workspace_under(plan: Plan, inputs: feeding.Feeds | None) -> dict[str, int]:
    """Bytes of workspace of each node by name in a run under a first plan, where the model doesn't fit unplanned.

    Nodes that take none are left out; recomputations count for the node they repeat.

    Args:
        plan: A plan for a CUDA device.
        inputs: Input arrays; random numbers if None.

    Raises:
        PlanError: the model doesn't fit as planned, either.
    """
    try:
        engines = _recorded(plan, inputs)
    except SessionError as error:
        raise PlanError(f"{plan.model.graph.name}: {error}") from error
    workspace: dict[str, int] = {}
    first = dict(zip(plan.graph.nodes, plan.graph.runs, strict=True))
    for name, size in (pair for engine in engines for pair in engine.workspace.items()):
        own = first.get(name, name)
        workspace[own] = max(size, workspace.get(own, 0))
    return workspace


def _recorded(plan: Plan, inputs: feeding.Feeds | None) -> tuple[Engine, ...]:
    if plan.training is not None and plan.training.loss is not None:
        trainer = Trainer(plan)
        with trainer.engines[0].pool.recording():
            trainer.step(inputs if inputs is not None else feeding.random_feeds(trainer.inputs))
        return trainer.engines
    session = Session(plan, cuda_graph="off")
    with session.engines[0].pool.recording():
        session.run(inputs if inputs is not None else feeding.random_feeds(inputs_of(plan.model.graph)))
    return session.engines
