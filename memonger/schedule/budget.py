"""The strategy ``budget``: the cheapest schedule found within a budget; see `memonger.schedule.portfolio`."""

import math
import time
from collections.abc import Callable, Iterator
from functools import cached_property, partial

from memonger.errors import BudgetError
from memonger.schedule import portfolio
from memonger.schedule.cheap import cheap_groups
from memonger.schedule.effort import Progress
from memonger.schedule.problem import ScheduleFigures, weighed_by_bytes
from memonger.schedule.segments import block, logarithmic, square_root
from memonger.schedule.staged import StagedProblem
from memonger.schedule.strategy import Outcome, Request, Strategy
from memonger.schedule.sweep import sweep
from memonger.schedule.targets import Tried, cheapest_within

Tell = Callable[[str], None]


class BudgetSearch:
    """Searches of one request for any number of budgets, which share what doesn't depend on the budget.

    Args:
        request: What is planned. Its own budget is not looked at.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self._plain = tuple(range(len(request.graph.nodes)))
        self._least: tuple[int, ScheduleFigures] | None = None  # the largest target in vain, and what was found

    def within(
        self, target: int, *, time_limit: float | None = None, tell: Tell | None = None
    ) -> tuple[int, list[Outcome]]:
        """What one search of the reduced problem finds within a target, the cheapest first.

        Nodes are folded into one another there: it counts a little more or less than they need.

        Args:
            target: Bytes for everything, `Request.base` and workspace included.
            time_limit: Seconds after which nothing is improved.
            tell: Called with a few words on how far the search is.

        Returns:
            Bytes that are counted for the first schedule, and the schedules. Where none is within the target, the one
            with the smallest peak found, which is the same whatever was searched before.
        """
        if self._needed <= target:
            return self._needed, [Outcome(self._plain)]
        if self._least is not None and target <= self._least[0]:
            result = self._least[1]
        else:
            result = self._search(target, time_limit, tell)
            if result.peak > target:
                self._least = target, result
        return result.peak, [Outcome(self._staged.reduced.expand(each)) for each in (result.schedule, *result.others)]

    @cached_property
    def _needed(self) -> int:
        """Bytes with nothing recomputed."""
        return self.request.needed(self._plain)

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

    def _search(self, budget: int, time_limit: float | None, tell: Tell | None) -> ScheduleFigures:
        """The cheapest schedule of the reduced problem within the budget, or the one with the smallest peak found."""
        problem = self._staged.problem
        progress = None if tell is None else Report(tell, math.fsum(problem.costs))
        return portfolio.search_best(
            problem, budget, effort=self.request.effort, time_limit=time_limit, progress=progress, initial=self._initial
        )


def within_budget(request: Request) -> Outcome:
    """The cheapest schedule found within the budget of the request.

    Raises:
        BudgetError: no schedule within the budget was found.
    """
    budget, search = request.required_budget(), BudgetSearch(request)
    within = partial(search.within, time_limit=request.time_limit, tell=request.progress)

    def tried(target: int, _: int) -> tuple[int, Iterator[Tried[Outcome]]]:
        counted, outcomes = within(target)
        return counted, (Tried(request.needed(each.schedule), request.cost(each.schedule), each) for each in outcomes)

    outcome = cheapest_within(budget, tried)
    if outcome is None:
        _, (least, *_) = within(0)
        raise BudgetError(budget, request.needed(least.schedule), search.lower_bound)
    return outcome


def initial_schedules(staged: StagedProblem, time_limit: float | None = None) -> list[tuple[int, ...]]:
    """Schedules of the strategies without search, from which the search may start. None without a backward pass.

    They are the same whatever a node costs; see `memonger.schedule.portfolio.PortfolioSearch.smallest`.
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
