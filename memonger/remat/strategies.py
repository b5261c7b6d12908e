"""What a strategy is asked and what it answers, and the strategies by name."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from memonger.errors import BudgetError, PlanError
from memonger.graph.graph import Graph
from memonger.graph.liveness import ALIGNMENT, Sharing, assign_storage, needed_bytes, peak_bytes
from memonger.graph.schedule import schedule_graph
from memonger.model.operators import facts_of
from memonger.remat import portfolio as budgets
from memonger.remat import problem as problems
from memonger.remat.cheap import cheap as cheap_schedule
from memonger.remat.checkpoints import Stage, make_mirror, marked, narrow, structural
from memonger.remat.cp_sat import ExactOptions, solve
from memonger.remat.on_demand import forward_pass, in_time, recompute_on_demand
from memonger.remat.problem import Problem
from memonger.remat.reduction import Reduction, deadlines, fixed_nodes, reduce
from memonger.remat.segments import block, logarithmic, square_root
from memonger.remat.sweep import Candidate, PeakOf, sweep

EXACT_SECONDS = 60.0
_FEW = 8
"""Dominators, below which the levels take narrow cuts."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a strategy is asked.

    Attributes:
        graph: Its nodes in file order.
        base: Bytes that are there at every step, beside the arena: parameters, inputs.
        budget: Bytes for everything, for the strategies that take one.
        sharing: What may share an address.
        alignment: Of every address, in bytes.
        stages: Node → its ``mirror_stage``.
        forced: Node → its ``force_mirroring``.
        parts: Those of ``forced`` that are kept where they can't run again: see `memonger.model.marks`.
        trials: Thresholds of the sweep's grid.
        effort: Of a search; see `memonger.remat.portfolio`.
        time_limit: Seconds after which nothing more is improved.
        progress: Called with how far the search is, in a few words.
    """

    graph: Graph
    base: int = 0
    budget: int | None = None
    sharing: Sharing = field(default_factory=Sharing)
    alignment: int = ALIGNMENT
    stages: Mapping[int, str] = field(default_factory=dict)
    forced: Mapping[int, bool] = field(default_factory=dict)
    parts: frozenset[int] = frozenset()
    trials: int = 6
    effort: int = budgets.EFFORT
    time_limit: float | None = None
    progress: Callable[[str], None] | None = None

    @property
    def peak_bytes(self) -> int:
        """Live bytes at the worst step of the graph as it is."""
        return peak_bytes(assign_storage(self.graph, self.sharing, self.alignment).buffers, len(self.graph.nodes))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a strategy answers.

    Attributes:
        schedule: Node ids of the graph; one that occurs again is a recomputation.
        segments: Between kept stages, for the strategies that have such.
        candidates: What a sweep tried.
        bound: Overhead below which no schedule is, where that was proven for the exact strategy's schedules.
        proven: Whether the exact strategy proved the schedule optimal; None for the others.
    """

    schedule: tuple[int, ...]
    segments: int = 1
    candidates: tuple[Candidate, ...] = ()
    bound: float | None = None
    proven: bool | None = None


Strategy = Callable[[Request], Outcome]
Level = Callable[[Problem, Sequence[bool], Sequence[Stage], Mapping[int, bool]], tuple[int, ...]]


def none(request: Request) -> Outcome:
    """Nothing is recomputed."""
    return Outcome(tuple(range(len(request.graph.nodes))))


def cheap(request: Request) -> Outcome:
    """What costs next to nothing is recomputed; see `memonger.remat.cheap`."""
    return Outcome(cheap_schedule(request.graph, _kept(request)))


def by_marks(request: Request) -> Outcome:
    """``force_mirroring`` to the letter: "True" is recomputed where a backward step needs it, everything else is kept.

    Raises:
        PlanError: a node that is to be recomputed, and is needed, can't run twice.
    """
    graph = request.graph
    fixed = fixed_nodes(graph)
    forward = forward_pass(graph.reads, graph.writes, graph.forward)
    wanted = [node for node, recomputed in sorted(request.forced.items()) if recomputed and forward[node]]
    free = [node for node in wanted if not fixed[node]]
    dropped = in_time(graph.reads, graph.writes, forward, deadlines(graph), free)
    runs = Counter(recompute_on_demand(graph.reads, graph.writes, forward, wanted))
    may = {*dropped, *request.parts}
    wrong = next((node for node in wanted if node not in may and runs[node] > 1), None)
    if wrong is not None:
        raise PlanError(
            f"node '{graph.nodes[wrong]}' ({graph.ops[wrong]}) is to be recomputed (force_mirroring 'True'), but can't "
            f"run again: {_obstacle(graph, wrong)}. Take the mark off, or keep it (force_mirroring 'False', --keep)."
        )
    return Outcome(recompute_on_demand(graph.reads, graph.writes, forward, dropped))


def _obstacle(graph: Graph, node: int) -> str:
    """Why a node can't run twice."""
    if facts_of(graph.ops[node]).random:
        return "it draws random numbers, others each time"
    if any(value in graph.outputs for value in graph.writes[node]):
        return "it writes an output of the model"
    if any(not graph.planned[value] for value in graph.writes[node]):
        return "the runtime keeps its value, or it is an update"
    return "what it reads is updated before the backward pass needs it"


def by_sweep(request: Request) -> Outcome:
    """The segment budget with the smallest peak; see `memonger.remat.sweep`."""
    staged = _Staged(request)
    tell = request.progress
    watch = None if tell is None else lambda done: tell(f"{done:.0%} of the sweep")
    found = sweep(staged.problem, staged.forward, staged.sets, request.trials, staged.forced, watch)
    candidates = tuple(replace(one, peak=one.peak - request.base) for one in found.candidates)
    return Outcome(staged.reduced.expand(found.schedule), found.mirror.segments, candidates)


def by_level(level: Level, request: Request) -> Outcome:
    """One of the schedules without search, of the candidates that make its peak smallest; see `levels`."""
    staged = _Staged(request)
    peak = PeakOf(staged.problem)
    best: tuple[int, Outcome] | None = None
    for stages in staged.sets.values():
        schedule = level(staged.problem, staged.forward, stages, staged.forced)
        needed = peak(schedule)
        if best is None or needed < best[0]:
            best = needed, Outcome(staged.reduced.expand(schedule), len(stages) + 1 if level is block else 1)
    assert best is not None
    return best[1]


def mirror_plan(request: Request, threshold: float) -> tuple[int, ...]:
    """Nodes of the graph that `make_mirror` drops, views of what they write included: memonger's
    ``make_mirror_plan``."""
    staged = _Staged(request)
    mirror = make_mirror(staged.problem, staged.forward, staged.stages, threshold, staged.forced)
    dropped = set(mirror.dropped)
    return tuple(node for node, group in enumerate(staged.reduced.groups) if group in dropped)


class _Staged:
    """The problem of a request, its forward pass, and what may be kept in it."""

    def __init__(self, request: Request) -> None:
        self.reduced = _reduced(request)
        self.problem = self.reduced.problem
        self.forward = self.reduced.forward
        of_node = self.reduced.groups
        self.forced = self._forced(request, of_node)
        self.sets = self._sets({of_node[n]: stage for n, stage in request.stages.items() if of_node[n] >= 0})

    def _forced(self, request: Request, of_node: Sequence[int]) -> dict[int, bool]:
        """What is decided for nodes of the problem. A view alone can be kept only: it runs when it is needed."""
        found = dict.fromkeys((of_node[node] for node in _kept(request) if of_node[node] >= 0), False)
        for node, recomputed in sorted(request.forced.items()):
            group = of_node[node]
            may = group >= 0 and self.forward[group] and self.problem.recomputable[group]
            if recomputed and may and node in self.reduced.members[group]:
                found[group] = True
        return found

    def _sets(self, marks: Mapping[int, str]) -> dict[str, tuple[Stage, ...]]:
        if marks:
            return {"marks": marked(marks)}
        return {
            "dominators": structural(self.problem, self.forward),
            "narrow cuts": narrow(self.problem, self.forward),
        }

    def known(self) -> list[tuple[int, ...]]:
        """Schedules by the structure of the forward pass, for a search to begin with."""
        if all(self.forward):
            return []
        kept = {node: False for node, recomputed in self.forced.items() if not recomputed}
        levels = [
            level(self.problem, self.forward, stages, kept)
            for stages in self.sets.values()
            for level in (block, square_root, logarithmic)
        ]
        swept = sweep(self.problem, self.forward, self.sets, forced=kept).schedule
        return [*levels, swept, self._cheap()]

    def _cheap(self) -> tuple[int, ...]:
        problem, forward, ops = self.problem, self.forward, self.reduced.graph.ops
        firsts = [nodes[0] for nodes in self.reduced.members]
        may = [early and again for early, again in zip(forward, problem.recomputable, strict=True)]
        dropped = [group for group, node in enumerate(firsts) if may[group] and facts_of(ops[node]).cheap]
        dropped = in_time(problem.reads, problem.writes, forward, problem.deadline, dropped)
        return recompute_on_demand(problem.reads, problem.writes, forward, dropped)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The marked ones; without marks the dominators, or where these are few the narrow cuts."""
        first, *others = self.sets.values()
        return first if len(first) >= _FEW or not others else others[0]


def by_budget(request: Request) -> Outcome:
    """The cheapest schedule found that holds the budget; see `memonger.remat.portfolio`.

    Raises:
        BudgetError: nothing was found that holds the budget.
    """
    budget, plain = _budget(request), tuple(range(len(request.graph.nodes)))
    if _needed(request, plain) <= budget:  # the problem counts a little more, where small nodes were folded
        return Outcome(plain)
    staged = _Staged(request)
    known, watch = staged.known(), _watch(request, staged.problem)

    def searched(allowed: int) -> tuple[int, ...]:
        found = budgets.search(
            staged.problem, allowed, effort=request.effort, time_limit=request.time_limit, progress=watch, known=known
        )
        return staged.reduced.expand(found.schedule)

    try:
        return Outcome(searched(budget))
    except BudgetError as error:
        # By as much as the problem counts too much, what it finds may take more: it may hold the budget all the same.
        spare = problems.peak(staged.problem, staged.problem.schedule) - _needed(request, plain)
        if error.smallest > budget + spare or _needed(request, schedule := searched(budget + spare)) > budget:
            raise
        return Outcome(schedule)


def _needed(request: Request, schedule: Sequence[int]) -> int:
    """Bytes at the worst step of a schedule of the graph's nodes."""
    graph = schedule_graph(request.graph, schedule)
    return request.base + needed_bytes(graph, assign_storage(graph, request.sharing, request.alignment))


def by_solver(request: Request) -> Outcome:
    """The cheapest schedule by CP-SAT, begun from the search's, with a proof or a bound; see `solve`.

    Raises:
        PlanError: no schedule holds the budget, or none was found.
        RuntimeUnavailableError: OR-Tools isn't installed.
    """
    reduced, budget = _reduced(request), _budget(request)
    problem = reduced.problem
    try:
        start: tuple[int, ...] | None = budgets.search(problem, budget, effort=request.effort).schedule
    except PlanError:
        start = None
    limit = EXACT_SECONDS if request.time_limit is None else request.time_limit
    solved = solve(problem, budget, ExactOptions(time_limit=limit), start)
    once = math.fsum(problem.costs)
    found = solved.result
    if start is not None and (found is None or problems.cost(problem, start) < found.cost):
        found = budgets.Result.of(problem, start)
    if found is None:
        state = (
            "there is none with two runs a node in this order" if solved.proven else f"none was found in {limit:g} s"
        )
        raise PlanError(f"no schedule within {budget} bytes: {state}. Try strategy 'budget', which names the smallest.")
    proven = solved.proven and solved.result is not None and found.cost <= solved.result.cost
    bound = max(0.0, solved.bound / once - 1) if once and math.isfinite(solved.bound) else None
    return Outcome(reduced.expand(found.schedule), bound=bound, proven=proven)


def budget_frontier(request: Request, points: int) -> list[Outcome]:
    """Schedules of which none is better than another in both peak and cost, by falling peak."""
    staged = _Staged(request)
    found = budgets.pareto(
        staged.problem, points=points, effort=request.effort, time_limit=request.time_limit, known=staged.known()
    )
    return [Outcome(staged.reduced.expand(one.schedule)) for one in found]


def _budget(request: Request) -> int:
    if request.budget is None:
        raise PlanError("this strategy needs a budget.")
    return request.budget


def _watch(request: Request, problem: Problem) -> Callable[[budgets.Progress], None] | None:
    if request.progress is None:
        return None
    tell, once = request.progress, math.fsum(problem.costs)

    def watch(found: budgets.Progress) -> None:
        state = f"{found.cost / once - 1:+.2%}" if once and not found.excess else "not within the budget yet"
        tell(f"{found.spent:.0%}, {state}")

    return watch


def _reduced(request: Request) -> Reduction:
    return reduce(
        request.graph,
        base=request.base,
        sharing=request.sharing,
        keep=_kept(request),
        alignment=request.alignment,
    )


def _kept(request: Request) -> list[int]:
    """Nodes that may not run again. To keep a view is to keep what it is a view of, unless that is recomputed."""
    graph, forced = request.graph, request.forced
    kept = {node for node, recomputed in forced.items() if not recomputed}
    source = {value: node for node, writes in enumerate(graph.writes) for value in writes}
    for node in reversed(range(len(graph.nodes))) if request.sharing.views else ():
        for value, _ in graph.views[node] if node in kept else ():
            if value in source and not forced.get(source[value], False):
                kept.add(source[value])
    return sorted(kept)


STRATEGIES: dict[str, Strategy] = {
    "none": none, "cheap": cheap, "block": partial(by_level, block), "sqrt": partial(by_level, square_root),
    "log": partial(by_level, logarithmic), "sweep": by_sweep, "marks": by_marks, "budget": by_budget,
    "exact": by_solver,
}  # fmt: skip

BUDGETED = ("budget", "exact")
"""Strategies that take a budget, and need one."""

MIRRORING = ("block", "sqrt", "log", "sweep", "marks")
"""Strategies that recompute what is marked to be; the others decide by themselves, and only keep what is to be kept."""

FRONTIERS: dict[str, Callable[[Request, int], list[Outcome]]] = {"budget": budget_frontier}
