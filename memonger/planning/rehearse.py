"""A run under the plan, for a model that doesn't fit its device without one: what scratch its kernels take."""

from memonger.errors import PlanError, SessionError
from memonger.graph.schedule import original
from memonger.plan import Plan
from memonger.runtime import feeds as feeding
from memonger.runtime.engine import Engine
from memonger.runtime.session import Session
from memonger.runtime.trainer import Trainer


def rehearse(plan: Plan, inputs: feeding.Feeds | None) -> dict[str, int]:
    """Bytes of scratch of each node by name, copies counted for what they are copies of, where above zero.

    Args:
        plan: For a CUDA device.
        inputs: What it is fed; random numbers if None.

    Raises:
        PlanError: it doesn't fit as planned, either.
    """
    try:
        engine = _run(plan, inputs)
    except SessionError as error:
        raise PlanError(f"{plan.model.graph.name}: {error}") from error
    found: dict[str, int] = {}
    for name, size in engine.scratch.items():
        found[original(name)] = max(size, found.get(original(name), 0))
    return found


def _run(plan: Plan, inputs: feeding.Feeds | None) -> Engine:
    known = plan.training
    if known is not None and known.loss is not None:
        trainer = Trainer(plan, cuda_graph="off")
        engine = trainer.engine
        with engine.pool.recording():
            trainer.step(inputs if inputs is not None else feeding.random_feeds(trainer.inputs))
        return engine
    session = Session(plan, cuda_graph="off")
    (engine,) = session.engines
    with engine.pool.recording():
        session.run(inputs if inputs is not None else feeding.random_feeds(feeding.inputs_of(plan.model.graph)))
    return engine
