"""What a fleet of models takes, from their plans."""

from collections.abc import Sequence
from dataclasses import dataclass

from memonger.plan import LIMIT_MARGIN, Plan, is_sized_at_run_time, limit_of
from memonger.runtime import program


@dataclass(frozen=True, slots=True)
class FleetMemory:
    """What a fleet is planned to take, in bytes; inputs and outputs are the caller's.

    Attributes:
        weights: Of the models that are loaded, weights that several of them have counted with each.
        sessions: About what onnxruntime and Python take beside them, see `memonger.Plan.session_bytes`.
        arenas: The largest arena that one of them needs, as often as there are arenas.
        workspace: The largest workspace likewise; and of each model whose inputs decide sizes what that may take.
        pipelines: What pipelines keep between their models, likewise.
    """

    weights: int
    sessions: int
    arenas: int
    workspace: int
    pipelines: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.sessions + self.arenas + self.workspace + self.pipelines


@dataclass(frozen=True, slots=True)
class Need:
    """What a model needs of a fleet, in bytes; for what the fields say see `FleetMemory`."""

    weights: int
    session: int
    arena: int
    workspace: int
    own: int | None = None  # of a model that is held to it: what onnxruntime may take by itself, workspace included


def need_of(plans: Sequence[Plan]) -> Need:
    """What plans of one model need: weights of those that differ in shapes alone once, the largest of all else."""
    groups = [members[0] for members in program.alike(plans)] if len(plans) > 1 else [0]
    return Need(
        weights=sum(plans[index].parameter_bytes for index in groups),
        session=max(plan.session_bytes or 0 for plan in plans),
        arena=max(plan.arena_bytes for plan in plans),
        workspace=max(plan.workspace_bytes or 0 for plan in plans),
        own=_own(plans),
    )


def _own(plans: Sequence[Plan]) -> int | None:
    """What the plans' limits are, or where they have none, what a run showed: of those whose inputs decide sizes."""
    if not any(is_sized_at_run_time(plan.model) for plan in plans):
        return None
    limit = limit_of(plans)
    seen = max((plan.workspace_bytes or 0) + plan.run_time_bytes for plan in plans)
    return seen + LIMIT_MARGIN if limit is None else limit


def memory_of(needs: Sequence[Need], arenas: int = 1, pipelines: int = 0) -> FleetMemory:
    """What a fleet of models takes.

    Args:
        needs: Of each model.
        arenas: How many runs may go on at once.
        pipelines: Bytes that pipelines keep between their models.
    """
    return FleetMemory(
        sum(need.weights for need in needs),
        sum(need.session for need in needs),
        arenas * max((need.arena for need in needs), default=0),
        arenas * max((need.workspace for need in needs if need.own is None), default=0)
        + arenas * sum(need.own or 0 for need in needs),
        arenas * pipelines,
    )
