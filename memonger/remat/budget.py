"""The strategy ``budget``: the cheapest schedule the search finds within a budget; see `memonger.remat.portfolio`."""

import math
from collections.abc import Callable, Sequence

from memonger.errors import BudgetError
from memonger.graph.liveness import assign_storage, needed_bytes
from memonger.graph.schedule import schedule_graph
from memonger.remat import portfolio
from memonger.remat.cheap import cheap_groups
from memonger.remat.effort import Progress
from memonger.remat.problem import Problem, peak
from memonger.remat.segments import block, logarithmic, square_root
from memonger.remat.staged import StagedProblem
from memonger.remat.strategy import Outcome, Request, Strategy
from memonger.remat.sweep import sweep


def within_budget(request: Request) -> Outcome:
    """The cheapest schedule found within the budget.

    Raises:
        BudgetError: no schedule within the budget was found.
    """
    budget, plain = request.required_budget(), tuple(range(len(request.graph.nodes)))
    if _needed(request, plain) <= budget:  # the problem counts a little more, where small nodes were folded
        return Outcome(plain)
    staged = StagedProblem(request)
    initial, progress = initial_schedules(staged, request.time_limit), _progress(request, staged.problem)

    def searched(allowed: int) -> tuple[int, ...]:
        result = portfolio.search(
            staged.problem,
            allowed,
            effort=request.effort,
            time_limit=request.time_limit,
            progress=progress,
            initial=initial,
        )
        return staged.reduced.expand(result.schedule)

    try:
        return Outcome(searched(budget))
    except BudgetError as error:
        # The reduced problem overestimates the bytes, so a schedule above the budget there may be within it here.
        spare = peak(staged.problem, staged.problem.schedule) - _needed(request, plain)
        if error.smallest > budget + spare or _needed(request, schedule := searched(budget + spare)) > budget:
            raise
        return Outcome(schedule)


def initial_schedules(staged: StagedProblem, time_limit: float | None = None) -> list[tuple[int, ...]]:
    """Schedules of the strategies without search, from which the search may start. None without a backward pass."""
    problem, kept = staged.problem, staged.kept
    if all(problem.forward):
        return []
    segmented = [
        strategy(problem, stages, kept)
        for stages in staged.stage_sets.values()
        for strategy in (block, square_root, logarithmic)
    ]
    swept = sweep(problem, staged.stage_sets, forced=kept, time_limit=time_limit)
    return [*segmented, swept.schedule, cheap_groups(staged.reduced)]


def frontier(request: Request, points: int) -> list[Outcome]:
    """Schedules of which none is better than another in both peak and cost, by falling peak."""
    staged = StagedProblem(request)
    results = portfolio.pareto(
        staged.problem,
        points=points,
        effort=request.effort,
        time_limit=request.time_limit,
        initial=initial_schedules(staged, request.time_limit),
    )
    return [Outcome(staged.reduced.expand(result.schedule)) for result in results]


def _needed(request: Request, schedule: Sequence[int]) -> int:
    """Bytes at the worst step of a schedule of the graph's nodes."""
    graph = schedule_graph(request.graph, schedule)
    return request.base + needed_bytes(graph, assign_storage(graph, request.sharing, request.alignment))


def _progress(request: Request, problem: Problem) -> Callable[[Progress], None] | None:
    """What reports the progress of the search in words, if the request asks for it."""
    if request.progress is None:
        return None
    tell, once = request.progress, math.fsum(problem.costs)

    def report(progress: Progress) -> None:
        state = f"{progress.cost / once - 1:+.2%}" if once and not progress.excess else "not within the budget yet"
        tell(f"{progress.spent:.0%}, {state}")

    return report


BUDGET = Strategy(
    "budget", "The cheapest recomputation that a search finds within the budget.", within_budget,
    takes_budget=True, frontier=frontier,
)  # fmt: skip
