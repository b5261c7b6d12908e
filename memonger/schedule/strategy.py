"""What every strategy is given (`Request`) and returns (`Outcome`), and the table of them (`STRATEGIES`).

To add a strategy, write a file with its function, and add its `Strategy` record to the table.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from memonger.errors import PlanError
from memonger.graph.graph import Graph
from memonger.graph.liveness import ALIGNMENT, Sharing, assign_storage, live_bytes, needed_bytes
from memonger.graph.schedule import schedule_graph
from memonger.schedule.effort import EFFORT

if TYPE_CHECKING:
    from memonger.schedule.reduction import Reduction


@dataclass(frozen=True, slots=True)
class Request:
    """What a strategy is given.

    Attributes:
        graph: Its nodes in file order.
        base: Bytes in use at every step beside the arena: parameters, inputs.
        run_time: Of ``base`` the bytes that the inputs decide, as a run showed them: no bound holds them. Workspace is
            then the inputs' to decide as well. None: the inputs decide no size.
        budget: Bytes for everything, for the strategies that take a budget.
        sharing: Which values may share an address.
        alignment: Of every address, in bytes.
        stages: Node → its ``mirror_stage``.
        forced: Node → its ``force_mirroring``: True to recompute it, False to keep it.
        parts: Those of ``forced`` that are kept without an error where they can't run again; see
            `memonger.ir.marks`.
        trials: Thresholds of the sweep's grid.
        effort: Of a search; see `memonger.schedule.portfolio`.
        time_limit: Seconds after which nothing more is improved.
        progress: Called with a few words on how far the search is.
        estimates: Estimated cost of each node, where the graph has what was measured; None: it has estimates, or they
            aren't known. Without a budget strategies go by them: a plan then is the same in every run.
    """

    graph: Graph
    base: int = 0
    run_time: int | None = None
    budget: int | None = None
    sharing: Sharing = field(default_factory=Sharing)
    alignment: int = ALIGNMENT
    stages: Mapping[int, str] = field(default_factory=dict)
    forced: Mapping[int, bool] = field(default_factory=dict)
    parts: frozenset[int] = frozenset()
    trials: int = 6
    effort: int = EFFORT
    time_limit: float | None = None
    progress: Callable[[str], None] | None = None
    estimates: tuple[float, ...] | None = None

    @property
    def live_bytes(self) -> np.ndarray:
        """Live bytes at each step of the graph without recomputation: ``int64[steps]``."""
        return live_bytes(assign_storage(self.graph, self.sharing, self.alignment).buffers, len(self.graph.nodes))

    @property
    def peak_bytes(self) -> int:
        """Live bytes at the worst step of the graph without recomputation."""
        return int(self.live_bytes.max(initial=0))

    def needed(self, schedule: Sequence[int]) -> int:
        """Bytes at the worst step of a schedule of the graph's nodes, `base` and workspace included.

        The total of its plan is as large, or larger: an arena may have gaps.
        """
        graph = schedule_graph(self.graph, schedule)
        return self.base + needed_bytes(graph, assign_storage(graph, self.sharing, self.alignment))

    def cost(self, schedule: Sequence[int]) -> float:
        """Of all steps of a schedule of the graph's nodes."""
        return math.fsum(self.graph.costs[node] for node in schedule)

    @property
    def recomputes_marked(self) -> bool:
        """Whether a node is marked to be recomputed."""
        return any(self.forced.values())

    @property
    def kept(self) -> list[int]:
        """Nodes marked to be kept, ascending, with the nodes whose values they view unless those are recomputed."""
        graph, forced = self.graph, self.forced
        kept = {node for node, recomputed in forced.items() if not recomputed}
        for node in reversed(range(len(graph.nodes))) if self.sharing.views else ():
            for value, _ in graph.views[node] if node in kept else ():
                source = graph.producer[value]
                if source >= 0 and not forced.get(source, False):
                    kept.add(source)
        return sorted(kept)

    def renumbered(self, graph: Graph, number: Mapping[int, int]) -> "Request":
        """The request of a graph in which nodes have these numbers, with all that it says of them."""
        return replace(
            self,
            graph=graph,
            stages={number[node]: stage for node, stage in self.stages.items()},
            forced={number[node]: recomputed for node, recomputed in self.forced.items()},
            parts=frozenset(number[node] for node in self.parts),
        )

    def required_budget(self) -> int:
        """The budget.

        Raises:
            PlanError: there is none.
        """
        if self.budget is None:
            raise PlanError("this strategy needs a budget.")
        return self.budget

    def reduced(self) -> "Reduction":
        """The rematerialization problem of the graph; see `memonger.schedule.reduction`."""
        from memonger.schedule.reduction import reduce  # here: what recomputes nothing needs no problem

        return reduce(self.graph, base=self.base, sharing=self.sharing, keep=self.kept, alignment=self.alignment)


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """What one threshold of the sweep gives.

    Attributes:
        source: Which set of stages it chose from. "none": only what is forced is recomputed.
        threshold: Bytes.
        segments: Number of segments between kept stages.
        kept_bytes: Bytes that the kept stages write.
        peak: Bytes at the worst step of the whole schedule.
        overhead: Cost beyond that of one pass, as a fraction of it.
    """

    source: str
    threshold: int
    segments: int
    kept_bytes: int
    peak: int
    overhead: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a strategy returns.

    Attributes:
        schedule: Node ids of the graph; every occurrence of a node after its first is a recomputation.
        segments: Number of segments between kept stages, for the strategies that have stages.
        candidates: What a sweep tried.
        bound: The exact strategy's lower bound on the overhead, as a fraction of the cost of one pass.
        proven: Whether the exact strategy proved the schedule optimal. None for the other strategies.
        notes: What the user should know, one sentence each.
    """

    schedule: tuple[int, ...]
    segments: int = 1
    candidates: tuple[SweepPoint, ...] = ()
    bound: float | None = None
    proven: bool | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to decide which nodes run again.

    Attributes:
        name: What users call it.
        help: What is recomputed, in one sentence.
        function: The strategy, a function from `Request` to `Outcome`, as ``module:function`` of this folder. It is
            imported when it runs: what recomputes nothing needs none of them.
        takes_budget: Whether it needs a budget. The other strategies refuse one.
        heeds_marks: Whether it looks at the nodes that are marked to be recomputed. The others but ``none`` are given a
            graph in which these run twice already. All of them keep what is marked to be kept.
        needs_model: Whether it needs operators or marks, which a graph of bytes and costs does not have.
    """

    name: str
    help: str
    function: str
    takes_budget: bool = False
    heeds_marks: bool = False
    needs_model: bool = False

    def run(self, request: Request) -> Outcome:
        """What the strategy returns.

        Raises:
            BudgetError, PlanError: it finds nothing.
        """
        outcome: Outcome = resolve_name(f"memonger.schedule.{self.function}")(request)
        return outcome


def recompute_nothing(request: Request) -> Outcome:
    """The strategy ``none``."""
    return Outcome(tuple(range(len(request.graph.nodes))))


STRATEGIES: Mapping[str, Strategy] = MappingProxyType({
    strategy.name: strategy
    for strategy in (
        Strategy("none", "Nothing runs again.", "strategy:recompute_nothing"),
        Strategy(
            "cheap", "Normalizations, activations, concatenations and views run again in the backward pass.",
            "cheap:recompute_cheap", needs_model=True,
        ),
        Strategy(
            "block", "Everything between stages runs again, one segment at a time.", "segments:recompute_blocks",
            heeds_marks=True,
        ),
        Strategy(
            "sqrt", "Everything between sqrt(n) of the n stages runs again.", "segments:recompute_square_root",
            heeds_marks=True,
        ),
        Strategy(
            "log", "Segments run again recursively, so that O(log n) checkpoints are alive at a time.",
            "segments:recompute_logarithmic", heeds_marks=True,
        ),
        Strategy(
            "sweep", "What lies between the stages kept at the best of several thresholds runs again.",
            "sweep:recompute_swept", heeds_marks=True,
        ),
        Strategy(
            "marks", "The nodes marked force_mirroring \"True\" run again, and no others.", "forced:recompute_marked",
            heeds_marks=True, needs_model=True,
        ),
        Strategy(
            "budget", "The cheapest recomputation that a search finds within the budget.", "budget:within_budget",
            takes_budget=True,
        ),
        Strategy(
            "exact", "The cheapest recomputation within the budget, by constraint programming with a proof or a bound.",
            "cp_sat:within_budget", takes_budget=True,
        ),
    )
})  # fmt: skip
"""Every strategy by name."""
