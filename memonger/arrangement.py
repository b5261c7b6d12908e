"""arrangement: a schedule and a layout, with or without a model behind it, and what they take."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from memonger import rewrite, verify
from memonger.allocate import lower_bound
from memonger.graph import Graph
from memonger.liveness import Storage, assign_storage, live_bytes, peak_bytes


@dataclass(frozen=True, eq=False, kw_only=True)
class Arrangement:
    """The order nodes run in and the byte of one arena at which every planned value lies.

    Attributes:
        graph: One node a step, recomputed ones as copies.
        offsets: Byte offset of each planned value, by value number of ``graph``.
        arena_bytes: Size of the arena.
        alignment: Every offset is a multiple of it.
        peak_before_bytes: The peak in the given order with nothing recomputed; None for a plan from a file.
        planning_seconds: Wall time planning took; None for a plan from a file.
    """

    graph: Graph
    offsets: Mapping[int, int]
    arena_bytes: int
    alignment: int
    peak_before_bytes: int | None = None
    planning_seconds: float | None = None

    @cached_property
    def storage(self) -> Storage:
        """The buffers behind the offsets, read off the offsets themselves."""
        return assign_storage(self.graph, alignment=self.alignment, offsets=self.offsets)

    @cached_property
    def peak_bytes(self) -> int:
        """Live bytes of the arena at the worst step."""
        return peak_bytes(self.storage.buffers, len(self.graph.nodes))

    @cached_property
    def lower_bound_bytes(self) -> int:
        """No layout of this order and sharing is smaller, alignment counted."""
        return lower_bound(self.storage.buffers)

    @property
    def activation_bytes(self) -> int:
        """All planned values at once, each once."""
        graph = self.graph
        return sum(
            size
            for name, size, planned in zip(graph.values, graph.sizes, graph.planned, strict=True)
            if planned and not rewrite.is_copy(name)
        )

    @property
    def overhead(self) -> float:
        """Cost of what is recomputed over the cost of one pass with nothing recomputed."""
        copies = sum(self.graph.costs[node] for node in self.recomputed)
        once = sum(self.graph.costs) - copies
        return copies / once if once else 0.0

    @cached_property
    def recomputed(self) -> tuple[int, ...]:
        """Steps that compute something again."""
        return tuple(step for step, name in enumerate(self.graph.nodes) if rewrite.is_copy(name))

    def verify(self) -> None:
        """Run the independent checker.

        Raises:
            VerificationError: the plan is wrong.
        """
        verify.verify(self.graph, self.offsets, self.arena_bytes, self.alignment)


def needed_bytes(graph: Graph, storage: Storage) -> int:
    """Most bytes at any step: what lives in the arena and that step's scratch."""
    live = live_bytes(storage.buffers, len(graph.nodes)).tolist()
    return max((held + scratch for held, scratch in zip(live, graph.workspace, strict=True)), default=0)
