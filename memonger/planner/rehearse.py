"""Runs under plans that aren't decided on yet.

Where a model doesn't fit its device unplanned, its workspace is measured under a first plan. And whether chunks hold
`Options.max_overhead` on this machine is seen by runs with and without them, which take turns.
"""

import math
import time

from memonger.errors import PlanError, SessionError
from memonger.plan import Plan
from memonger.plan_records import Spent, TimedTurns
from memonger.runtime import feeds as feeding
from memonger.runtime.engine import Engine
from memonger.runtime.session import Session
from memonger.runtime.trainer import Trainer

LONGEST = 1.0
"""Seconds of a run, by estimate, up to which a plan in chunks is timed. In longer ones each node takes long, so that it
matters little how many there are; and planning would take many times as long."""

PAIRS = 5
"""Runs of each of the two plans, if need be."""

MARGIN = 0.05
"""Time beyond what is allowed that could be the machine's: only what takes longer than with it is too slow."""

LIMIT = 5.0
"""Seconds for one comparison; where its pairs of runs take longer nothing is decided by them."""


def rehearse(plan: Plan, inputs: feeding.Feeds | None) -> dict[str, int]:
    """Bytes of workspace of each node by name, where above zero; recomputations count for the node they repeat.

    Args:
        plan: A plan for a CUDA device.
        inputs: Input arrays; random numbers if None.

    Raises:
        PlanError: the model doesn't fit as planned, either.
    """
    try:
        engines = _run(plan, inputs)
    except SessionError as error:
        raise PlanError(f"{plan.model.graph.name}: {error}") from error
    workspace: dict[str, int] = {}
    first = {name: again or name for name, again in zip(plan.graph.nodes, plan.graph.again, strict=True)}
    for name, size in (pair for engine in engines for pair in engine.workspace.items()):
        own = first.get(name, name)
        workspace[own] = max(size, workspace.get(own, 0))
    return workspace


def _run(plan: Plan, inputs: feeding.Feeds | None) -> tuple[Engine, ...]:
    if plan.training is not None and plan.training.loss is not None:
        trainer = Trainer(plan)
        with trainer.engines[0].pool.recording():
            trainer.step(inputs if inputs is not None else feeding.random_feeds(trainer.inputs))
        return trainer.engines
    session = Session(plan, cuda_graph="off")
    with session.engines[0].pool.recording():
        session.run(inputs if inputs is not None else feeding.random_feeds(feeding.inputs_of(plan.model.graph)))
    return session.engines


class Turns:
    """Times runs of plans for one model beside those of a first one, of which a session is made once.

    Args:
        plan: For inference on the CPU.
        inputs: Input arrays; random numbers if None.
        spent: Where runs are counted.
    """

    def __init__(self, plan: Plan, inputs: feeding.Feeds | None, spent: Spent) -> None:
        self._spent = spent
        self._feeds = inputs if inputs is not None else feeding.random_feeds(feeding.inputs_of(plan.model.graph))
        self._first = self._warm(plan)

    def slower(self, plan: Plan, allowed: float) -> tuple[bool, TimedTurns]:
        """Whether a plan is clearly slower than is allowed, and the times that it was seen by.

        It is where it takes longer in each of `PAIRS` pairs of runs, and its fastest run longer than the first plan's:
        the first pair in which it doesn't ends the comparison. Other work on the machine makes runs longer, one or the
        other, so a plan that holds isn't refused for that.

        Args:
            plan: Of the same model.
            allowed: Extra time, as a fraction.

        Raises:
            SessionError: it doesn't run.
        """
        second, begin, most = self._warm(plan), time.perf_counter(), 1 + allowed + MARGIN
        fastest = [math.inf, math.inf]
        for pair in range(PAIRS):
            seconds = [0.0, 0.0]
            for which in (0, 1) if pair % 2 else (1, 0):
                seconds[which] = self._timed((self._first, second)[which])
            fastest = list(map(min, fastest, seconds))
            is_last = pair == PAIRS - 1
            if seconds[1] <= most * seconds[0] or (not is_last and time.perf_counter() - begin > LIMIT):
                return False, TimedTurns(fastest[0], fastest[1], pair + 1)
        return fastest[1] > most * fastest[0], TimedTurns(fastest[0], fastest[1], PAIRS)

    def _warm(self, plan: Plan) -> Session:
        session = Session(plan, check_order=False)
        self._timed(session)
        return session

    def _timed(self, session: Session) -> float:
        begin = time.perf_counter()
        session.run(self._feeds, copy=False)
        seconds = time.perf_counter() - begin
        self._spent.count(seconds)
        return seconds
