"""What a strategy is asked and what it answers, and the strategies by name."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from memonger.errors import PlanError
from memonger.graph import Graph
from memonger.liveness import Sharing
from memonger.recompute import budget as budgets
from memonger.recompute import problem as problems
from memonger.recompute.cheap import cheap as cheap_schedule
from memonger.recompute.exact import ExactOptions, solve
from memonger.recompute.levels import block, logarithmic, square_root
from memonger.recompute.on_demand import forward_pass, in_time, recompute_on_demand
from memonger.recompute.problem import Problem
from memonger.recompute.reduction import Reduction, deadlines, fixed_nodes, reduce
from memonger.recompute.stages import Stage, make_mirror, marked, narrow, structural
from memonger.recompute.sweep import Candidate, PeakOf, sweep

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
        stages: Node → its ``mirror_stage``.
        forced: Node → its ``force_mirroring``.
        trials: Thresholds of the sweep's grid.
        effort: Of a search; see `memonger.recompute.search`.
        time_limit: Seconds after which nothing more is improved.
        progress: Called with how far the search is, in a few words.
    """

    graph: Graph
    base: int = 0
    budget: int | None = None
    sharing: Sharing = field(default_factory=Sharing)
    stages: Mapping[int, str] = field(default_factory=dict)
    forced: Mapping[int, bool] = field(default_factory=dict)
    trials: int = 6
    effort: int = budgets.EFFORT
    time_limit: float | None = None
    progress: Callable[[str], None] | None = None


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
    """What costs next to nothing is recomputed; see `memonger.recompute.cheap`."""
    return Outcome(cheap_schedule(request.graph))


def by_marks(request: Request) -> Outcome:
    """``force_mirroring`` to the letter: "True" is recomputed, everything else is kept.

    Raises:
        PlanError: a node that is to be recomputed can't run twice.
    """
    graph = request.graph
    fixed = fixed_nodes(graph)
    forward = forward_pass(graph.reads, graph.writes, graph.forward)
    dropped = [node for node, recomputed in request.forced.items() if recomputed and forward[node]]
    in_turn = set(in_time(graph.reads, graph.writes, forward, deadlines(graph), dropped))
    wrong = next((node for node in dropped if fixed[node] or node not in in_turn), None)
    if wrong is not None:
        raise PlanError(
            f"node '{graph.nodes[wrong]}' ({graph.ops[wrong]}) has force_mirroring 'True', but can't run again: "
            "it writes an output, reads what is updated before, holds random state, or its size isn't known."
        )
    return Outcome(recompute_on_demand(graph.reads, graph.writes, forward, dropped))


def by_sweep(request: Request) -> Outcome:
    """The segment budget with the smallest peak; see `memonger.recompute.sweep`."""
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
    """Nodes of the graph that `make_mirror` drops: memonger's ``make_mirror_plan``."""
    staged = _Staged(request)
    mirror = make_mirror(staged.problem, staged.forward, staged.stages, threshold, staged.forced)
    return tuple(node for group in mirror.dropped for node in staged.reduced.members[group])


class _Staged:
    """The problem of a request, its forward pass, and what may be kept in it."""

    def __init__(self, request: Request) -> None:
        self.reduced = _reduced(request)
        self.problem = self.reduced.problem
        self.forward = self.reduced.forward
        of_node = self.reduced.groups
        self.forced = {of_node[n]: f for n, f in request.forced.items() if of_node[n] >= 0 and self._may(of_node[n], f)}
        self.sets = self._sets({of_node[n]: stage for n, stage in request.stages.items() if of_node[n] >= 0})

    def _may(self, group: int, recomputed: bool) -> bool:
        return not recomputed or (self.forward[group] and self.problem.recomputable[group])

    def _sets(self, marks: Mapping[int, str]) -> dict[str, tuple[Stage, ...]]:
        if marks:
            return {"marks": marked(marks)}
        return {
            "dominators": structural(self.problem, self.forward),
            "narrow cuts": narrow(self.problem, self.forward),
        }

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The marked ones; without marks the dominators, or where these are few the narrow cuts."""
        first, *others = self.sets.values()
        return first if len(first) >= _FEW or not others else others[0]


def by_budget(request: Request) -> Outcome:
    """The cheapest schedule found that holds the budget; see `memonger.recompute.search`."""
    reduced = _reduced(request)
    found = budgets.search(
        reduced.problem, _budget(request), effort=request.effort, time_limit=request.time_limit,
        progress=_watch(request, reduced.problem),
    )  # fmt: skip
    return Outcome(reduced.expand(found.schedule))


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
    reduced = _reduced(request)
    found = budgets.pareto(reduced.problem, points=points, effort=request.effort, time_limit=request.time_limit)
    return [Outcome(reduced.expand(one.schedule)) for one in found]


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
    keep = [node for node, recomputed in request.forced.items() if not recomputed]
    return reduce(request.graph, base=request.base, sharing=request.sharing, keep=keep)


STRATEGIES: dict[str, Strategy] = {
    "none": none, "cheap": cheap, "block": partial(by_level, block), "sqrt": partial(by_level, square_root),
    "log": partial(by_level, logarithmic), "sweep": by_sweep, "marks": by_marks, "budget": by_budget,
    "exact": by_solver,
}  # fmt: skip

FRONTIERS: dict[str, Callable[[Request, int], list[Outcome]]] = {"budget": budget_frontier}
