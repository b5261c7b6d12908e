"""The strategy ``budget``: the cheapest schedule the search finds within a budget; see `memonger.remat.portfolio`."""

import math
import time
from collections.abc import Callable
from functools import cached_property

from memonger.errors import BudgetError
from memonger.remat import portfolio
from memonger.remat.cheap import cheap_groups
from memonger.remat.effort import Progress
from memonger.remat.problem import Result, peak, weighed_by_bytes
from memonger.remat.segments import block, logarithmic, square_root
from memonger.remat.staged import StagedProblem
from memonger.remat.strategy import Outcome, Request, Strategy
from memonger.remat.sweep import sweep

Tell = Callable[[str], None]

_TRIALS = 3
"""Searches for a budget: what one finds may need more than the reduced problem says."""


class BudgetSearch:
    """Searches of one request for any number of budgets, which share what doesn't depend on the budget.

    Args:
        request: What is planned. Its own budget is not looked at.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self._plain = tuple(range(len(request.graph.nodes)))
        self._least: Result | None = None

    def within(self, budget: int, *, time_limit: float | None = None, tell: Tell | None = None) -> list[Outcome]:
        """The schedules found within a budget, the cheapest first; where its arena has gaps, another's may have none.

        Args:
            budget: Bytes for everything, `Request.base` and workspace included.
            time_limit: Seconds after which nothing is improved.
            tell: Called with a few words on how far the search is.
        """
        needed, target = self.request.needed, budget
        if needed(self._plain) <= budget:  # the problem counts a little more, where small nodes were folded
            return [Outcome(self._plain)]
        for _ in range(_TRIALS):
            schedules = self._schedules(target, time_limit, tell)
            fitting = [Outcome(schedule) for schedule in schedules if needed(schedule) <= budget]
            if fitting or not schedules:
                return fitting
            target -= min(map(needed, schedules)) - budget
        return []

    def _schedules(self, target: int, time_limit: float | None, tell: Tell | None) -> list[tuple[int, ...]]:
        """What the reduced problem has within a target, the cheapest first.

        Nodes are folded into one another there: it counts a little more or less than they need.
        """
        result = self._search(target, time_limit, tell)
        if result.peak > target:
            spare = peak(self._staged.problem, self._staged.problem.schedule) - self.request.needed(self._plain)
            if result.peak > target + spare:
                return []
            result = self._search(target + spare, time_limit, tell)
        return [self._staged.reduced.expand(schedule) for schedule in (result.schedule, *result.others)]

    def least(self, *, time_limit: float | None = None, tell: Tell | None = None) -> Outcome:
        """The schedule with the smallest peak found. It is the same whatever was searched before."""
        if self._least is None:
            self._search(0, time_limit, tell)
        assert self._least is not None
        return Outcome(self._staged.reduced.expand(self._least.schedule))

    @cached_property
    def lower_bound(self) -> int:
        """No schedule takes less."""
        return self._staged.problem.lower_bound

    @cached_property
    def _staged(self) -> StagedProblem:
        return StagedProblem(self.request)

    @cached_property
    def _initial(self) -> list[tuple[int, ...]]:
        return initial_schedules(self._staged, self.request.time_limit)

    def _search(self, budget: int, time_limit: float | None, tell: Tell | None) -> Result:
        """The cheapest schedule of the reduced problem within the budget, or the one with the smallest peak found."""
        problem = self._staged.problem
        progress = None if tell is None else Report(tell, math.fsum(problem.costs))
        result = portfolio.search_best(
            problem, budget, effort=self.request.effort, time_limit=time_limit, progress=progress, initial=self._initial
        )
        if result.peak > budget:
            self._least = result
        return result


def within_budget(request: Request) -> Outcome:
    """The cheapest schedule found within the budget of the request.

    Raises:
        BudgetError: no schedule within the budget was found.
    """
    budget, search = request.required_budget(), BudgetSearch(request)
    outcomes = search.within(budget, time_limit=request.time_limit, tell=request.progress)
    if not outcomes:
        least = search.least(time_limit=request.time_limit, tell=request.progress)
        raise BudgetError(budget, request.needed(least.schedule), search.lower_bound)
    return outcomes[0]


def initial_schedules(staged: StagedProblem, time_limit: float | None = None) -> list[tuple[int, ...]]:
    """Schedules of the strategies without search, from which the search may start. None without a backward pass.

    They are the same whatever a node costs; see `memonger.remat.portfolio.Search.smallest`.
    """
    problem, kept = weighed_by_bytes(staged.problem), staged.kept
    if all(problem.forward):
        return []
    segmented = [
        strategy(problem, stages, kept)
        for stages in staged.stage_sets.values()
        for strategy in (block, square_root, logarithmic)
    ]
    swept = sweep(problem, staged.stage_sets, forced=kept, time_limit=time_limit)
    return [*segmented, swept.schedule, cheap_groups(staged.reduced)]


class Report:
    """Says in words how far a search is: the part done, the best schedule so far, and the time left.

    Args:
        tell: Called with the words.
        once: Cost of one pass.
    """

    def __init__(self, tell: Tell, once: float) -> None:
        self.tell, self.once, self.begin = tell, once, time.monotonic()
        self.done = 0.0
        self.best = (math.inf, math.inf)

    def __call__(self, progress: Progress) -> None:
        self.done = max(self.done, progress.done)
        if not progress.lowering:
            self.best = min(self.best, (progress.excess, progress.cost))
        excess, cost = self.best
        state = "nothing within the budget yet" if excess else f"best {cost / (self.once or 1) - 1:+.2%}"
        if progress.lowering:
            state = "looking for less memory"  # costs don't count there
        self.tell(f"{self.done:.0%}, {state}{self._left()}")

    def _left(self) -> str:
        seconds = time.monotonic() - self.begin
        if seconds < 1 or self.done < 0.05:
            return ""
        return f", about {seconds * (1 - self.done) / self.done:.0f} s left"


BUDGET = Strategy(
    "budget", "The cheapest recomputation that a search finds within the budget.", within_budget, takes_budget=True
)
