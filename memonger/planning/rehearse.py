"""Runs under a first plan: to measure workspace where the model doesn't fit unplanned, and to time chunks."""

import time
from collections.abc import Callable

from memonger.errors import PlanError, SessionError
from memonger.graph.schedule import original
from memonger.plan import Plan
from memonger.runtime import feeds as feeding
from memonger.runtime.engine import Engine
from memonger.runtime.session import Session
from memonger.runtime.trainer import Trainer


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
    for name, size in (pair for engine in engines for pair in engine.workspace.items()):
        workspace[original(name)] = max(size, workspace.get(original(name), 0))
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


_TURNS, _SECONDS = 8, 0.25
_PAUSE = 0.005
"""Seconds between two sessions' runs: until then onnxruntime's threads of the first one spin."""


def time_ratio(plan: Plan, other: Plan, inputs: feeding.Feeds | None) -> float:
    """The time that a run of another plan takes, as a multiple of this one's: the least of a few, taking turns.

    Args:
        plan: For the CPU.
        other: Of the same model.
        inputs: Input arrays; random numbers if None.
    """
    runs = [_runner(one, inputs) for one in (plan, other)]
    least, end = [float("inf")] * 2, time.monotonic() + _SECONDS
    for turn in range(_TURNS + 1):
        for number, run in enumerate(runs):
            time.sleep(_PAUSE)
            begin = time.perf_counter()
            run()
            least[number] = min(least[number], time.perf_counter() - begin if turn else float("inf"))
        if turn > 1 and time.monotonic() > end:
            break
    return least[1] / least[0]


def _runner(plan: Plan, inputs: feeding.Feeds | None) -> Callable[[], object]:
    """A run of a plan on the CPU, or a step."""
    if plan.training is not None and plan.training.loss is not None:
        trainer = Trainer(plan, check_order=False)
        batch = inputs if inputs is not None else feeding.random_feeds(trainer.inputs)
        return lambda: trainer.step(batch)
    session = Session(plan, check_order=False)
    feeds = inputs if inputs is not None else feeding.random_feeds(feeding.inputs_of(plan.model.graph))
    return lambda: session.run(feeds, copy=False)
