"""A run under a first plan, to measure workspace where the model doesn't fit unplanned."""

from memonger.errors import PlanError, SessionError
from memonger.plan import Plan
from memonger.runtime import feeds as feeding
from memonger.runtime.engine import Engine
from memonger.runtime.program import inputs_of
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
    first = dict(zip(plan.graph.nodes, plan.graph.runs, strict=True))
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
        session.run(inputs if inputs is not None else feeding.random_feeds(inputs_of(plan.model.graph)))
    return session.engines
