"""What is to run in slices, and a model that a pass wrote anew: in chunks, in row tiles, with joined products."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Self

import onnx_ir as ir

from memonger.devices import Device
from memonger.graph.graph import Graph
from memonger.graph.liveness import Storage, live_bytes
from memonger.ir.training_roles import Training
from memonger.lowering.lowered import Calibration, Lowered
from memonger.plan import graph_of, parameter_bytes
from memonger.plan_file import ChunkedBand
from memonger.schedule import Request
from memonger.schedule.solution import Solution
from memonger.shapes.ranges import DimRange
from memonger.tiling.chunk_times import NodeWork, work_of
from memonger.tiling.slice_check import SeenAlone, SliceCheck

MOST_NODES = 30_000
"""Nodes that slices may add: more take minutes to plan and load."""

UNSURE = 1.05
"""Estimates of what slices take at least are up to so many times what they take."""

WORTH = 0.95
"""Slices that save less than a twentieth aren't worth a plan that is harder to read."""


@dataclass(frozen=True, slots=True)
class ToSlice:
    """What is to run in slices: the model in the order of its plan, what is asked of it, its layout, and the device.

    ``cores`` is how many it runs on, ``works`` what its nodes do, by name, ``training`` the roles of a training step's
    inputs and outputs, ``ranges`` its dimensions with a range of sizes, ``outer`` the slices that it runs in already.
    """

    lowered: Lowered
    request: Request
    plain: Solution
    device: Device
    cores: int
    works: Mapping[str, NodeWork]
    training: Training | None = None
    ranges: Mapping[str, DimRange] = field(default_factory=dict)
    outer: "InSlices | None" = None

    def again(self, outer: "InSlices") -> "ToSlice":
        """The model in slices, which are to run in slices themselves."""
        works = {str(node.name): self.works.get(str(node.name)) or work_of(node) for node in outer.lowered.model.graph}
        return dataclasses.replace(
            self, lowered=outer.lowered, request=outer.request, plain=outer.solution, works=works, outer=outer
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class InSlices:
    """A model in slices.

    Attributes:
        lowered: The model with a copy of each node for every slice, in the order that they run.
        request: What is asked of it: its graph.
        solution: Its layout.
        constants: Bytes of slices of constants, and of the numbers that cut.
        extra: Seconds beyond those of the model as it was, by the constants of `memonger.tiling.chunk_times`.
        sessions: About the bytes that sessions take of the process: each copy of a node is one more.
        notes: What the user should know.
        outer: The slices that these are slices of; None where they are the model's own.
    """

    lowered: Lowered
    request: Request
    solution: Solution
    constants: int
    extra: float
    sessions: int
    notes: tuple[str, ...] = ()
    outer: "InSlices | None" = None

    def within(self, outer: "InSlices | None") -> Self:
        """The same of a model in slices, as slices of the model itself."""
        if outer is None:
            return self
        extra, constants = outer.extra + self.extra, outer.constants + self.constants
        return dataclasses.replace(self, extra=extra, constants=constants, outer=outer)

    def described(self) -> tuple[ChunkedBand, ...]:
        """What runs in slices, for the plan."""
        return () if self.outer is None else self.outer.described()

    def seen(self, check: SliceCheck) -> SeenAlone:
        """What was seen of its nodes whole and on slices."""
        return SeenAlone() if self.outer is None else self.outer.seen(check)

    @property
    def recomputed(self) -> float:
        """Estimated seconds of what runs again."""
        return 0.0

    @property
    def total(self) -> int:
        """Bytes of arena and workspace, and of what is added to the constants."""
        return self.solution.total_bytes + self.constants

    @property
    def with_sessions(self) -> int:
        """The same with sessions."""
        return self.total + self.sessions


@dataclass(eq=False)
class Candidate:
    """Slices that a model may run in. They are written and laid out when somebody looks at them.

    Attributes:
        needed: About the bytes of arena and workspace that it takes at least: up to `UNSURE` times as many.
        sessions: About the bytes that sessions take.
        seconds: About how much longer it takes.
        write: Gives the model in these slices, laid out.
    """

    needed: int
    sessions: int
    seconds: float
    write: Callable[[], InSlices]

    @property
    def least(self) -> int:
        """About the bytes that it takes at least, sessions included."""
        return self.needed + self.sessions

    @cached_property
    def written(self) -> InSlices:
        """The model in these slices, laid out."""
        return self.write()


Candidates = Sequence[Candidate]
"""Along one axis of a model, the finest first."""


def working_set_bytes(graph: Graph, storage: Storage) -> list[float]:
    """Bytes alive at each step that nodes may read again: an output that nobody reads takes no room in the cache."""
    moves = zip(graph.reads, graph.subviews, graph.views, strict=True)
    read = {storage.of_value[value] for reads, windows, views in moves if not (windows or views) for value in reads}
    unread = {storage.of_value[value] for value in graph.outputs} - read
    buffers = [buffer for number, buffer in enumerate(storage.buffers) if number not in unread]
    return [float(size) for size in live_bytes(buffers, len(graph.nodes))]


def shared(lowered: Lowered, made: ir.Model, part_of: Callable[[ir.Node], tuple[str, float]]) -> Lowered:
    """The model in slices, with each copy's share of what was measured of its node.

    Args:
        lowered: The model.
        made: The same in slices.
        part_of: Of a node of that the one that it is a copy of, and the part of it that it computes.
    """
    measured = lowered.calibration
    if measured is None:
        return dataclasses.replace(lowered, model=made)
    seconds, workspace = dict[str, float](), dict[str, int]()
    for node in made.graph:
        name, part = part_of(node)
        seconds[str(node.name)] = (measured.seconds or {}).get(name, 0.0) * part
        if needed := measured.workspace.get(name, 0):
            workspace[str(node.name)] = math.ceil(needed * part)
    calibration = dataclasses.replace(measured, seconds=seconds, workspace=workspace)
    return dataclasses.replace(lowered, model=made, calibration=calibration)


def asked_of(
    made: Lowered, before: ir.Model, request: Request, roles: Training | None, device: Device,
    ranges: Mapping[str, DimRange] = MappingProxyType({}),
) -> Request:  # fmt: skip
    """The same as was asked of the model before, without its marks: what they name may be there no more.

    Args:
        made: The model, with what was measured of its nodes.
        before: The model that the request is of.
        request: What is asked of that.
        roles: A training step's.
        device: The plan's.
        ranges: Sizes that it is asked for; none: the largest alone, which the model has.
    """
    measured = made.calibration or Calibration(None, {})
    graph = graph_of(made.model, roles, measured.seconds, measured.workspace, measured.host, device, ranges)
    base = request.base + parameter_bytes(made.model, roles) - parameter_bytes(before, roles)
    return dataclasses.replace(request, graph=graph, base=base, stages={}, forced={}, parts=frozenset(), estimates=None)
