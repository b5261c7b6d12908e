"""What a fleet of models takes, from their plans."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memonger.runtime.arena import ArenaTensor


@dataclass(frozen=True, slots=True)
class FleetMemory:
    """What a fleet is planned to take, in bytes; inputs and outputs are the caller's.

    Attributes:
        weights: Of the models that are loaded, weights that several of them have counted with each. Of weights that
            stay in the plans' files the largest window, as often as there are arenas: what idles has none in memory.
        sessions: About what onnxruntime and Python take beside them, see `memonger.Plan.session_bytes`.
        arenas: The largest arena that one of them needs, as often as there are arenas.
        workspace: The largest workspace likewise; and of each model whose inputs decide sizes what that may take.
        pipelines: What pipelines keep between their models, likewise.
        in_files: Bytes of weights that stay in the plans' files, as a budget below all of them has it.
    """

    weights: int
    sessions: int
    arenas: int
    workspace: int
    pipelines: int
    in_files: int = 0

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
    window: int = 0
    in_files: int = 0
    own: int | None = None  # of a model that is held to it: what onnxruntime may take by itself, workspace included


@dataclass(frozen=True, slots=True)
class PlansOfModel:
    """What a fleet is told of the plans of a model.

    Attributes:
        key: The same for plans that are the same.
        need: In bytes.
        inputs: Names of the model's inputs.
        outputs: Its outputs by name, with type and shape; None where that isn't one shape.
    """

    key: str
    need: Need
    inputs: tuple[str, ...]
    outputs: Mapping[str, ArenaTensor | None]


def memory_of(needs: Sequence[Need], arenas: int = 1, pipelines: int = 0) -> FleetMemory:
    """What a fleet of models takes.

    Args:
        needs: Of each model.
        arenas: How many runs may go on at once.
        pipelines: Bytes that pipelines keep between their models.
    """
    return FleetMemory(
        sum(need.weights for need in needs) + arenas * max((need.window for need in needs), default=0),
        sum(need.session for need in needs),
        arenas * max((need.arena for need in needs), default=0),
        arenas * max((need.workspace for need in needs if need.own is None), default=0)
        + arenas * sum(need.own or 0 for need in needs),
        arenas * pipelines,
        sum(need.in_files for need in needs),
    )
