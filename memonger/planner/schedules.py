"""Schedules of one structure of graph, each tried at every size: what was found at one size is valid at another."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from memonger.schedule import Outcome, Request
from memonger.schedule.budget import initial_schedules
from memonger.schedule.decide import Solution, decide, lay_out, order_for_least, total_bytes
from memonger.schedule.effort import Effort, Progress
from memonger.schedule.orders import ORDERS
from memonger.schedule.portfolio import PortfolioSearch
from memonger.schedule.problem import ScheduleFigures
from memonger.schedule.staged import StagedProblem
from memonger.units import MOST_BATCH

Schedule = tuple[int, ...]

_TARGETS = 2
"""Searches for one budget: where the arena has gaps, the next one is for less."""


def laid_out(request: Request, schedule: Schedule) -> Solution:
    """The solution for a schedule of the request's own graph."""
    return lay_out(request, tuple(range(len(request.graph.nodes))), Outcome(schedule))


@dataclass(slots=True)
class Schedules:
    """Schedules found so far, and the search for more.

    Attributes:
        memory: Bytes for everything.
        orders: Names of the evaluation orders to try.
        effort: Of each search; see `memonger.schedule.portfolio`.
        found: Schedules of the graph.
        untried: Those whose largest size isn't known yet.
        reduced: Those from a search, as schedules of the reduced problem, by what identifies that.
    """

    memory: int
    orders: Sequence[str]
    effort: int
    found: list[Schedule] = field(default_factory=list)
    untried: list[Schedule] = field(default_factory=list)
    reduced: dict[object, list[Schedule]] = field(default_factory=dict)

    def add(self, schedules: Iterable[Schedule]) -> None:
        """Remember schedules."""
        fresh = [each for each in dict.fromkeys(schedules) if each not in self.found]
        self.found.extend(fresh)
        self.untried.extend(fresh)

    def reach(self, best: int, at: Callable[[int], Request], high: int = MOST_BATCH) -> int:
        """The largest size with which a schedule added since the last call fits; ``best`` if it is no larger.

        Args:
            best: The largest size so far.
            at: The request of each size.
            high: No size above this one can fit.
        """
        for schedule in self.untried:
            best = largest(best, partial(self._fits_at, at, schedule), high)
        self.untried.clear()
        return best

    def _fits_at(self, at: Callable[[int], Request], schedule: Schedule, size: int) -> bool:
        return self._fits(at(size), schedule) is not None

    def _fits(self, request: Request, schedule: Schedule) -> Solution | None:
        """The solution for a schedule, if it fits."""
        if request.needed(schedule) > self.memory:
            return None
        solution = laid_out(request, schedule)
        return solution if total_bytes(request, solution) <= self.memory else None

    def add_plain(self, request: Request) -> None:
        """Remember the evaluation orders, in which nothing is recomputed."""
        self.add(ORDERS[name](request.graph) for name in self.orders)

    def add_swept(self, request: Request) -> None:
        """Remember what the sweep takes for the best of its thresholds, if there is a backward pass."""
        if not all(request.graph.forward):
            request = dataclasses.replace(request, budget=None, progress=None)
            self.add([decide(request, "sweep", self.orders[0]).schedule])

    def fitting(self, request: Request) -> Solution | None:
        """The cheapest of the schedules that fits the memory; None if none does."""
        costs = request.graph.costs
        cheapest_first = sorted(self.found, key=lambda each: sum(costs[node] for node in each))
        return next(filter(None, (self._fits(request, schedule) for schedule in cheapest_first)), None)

    def smallest(self, request: Request) -> Solution:
        """The solution with the smallest total of all schedules."""
        need = {schedule: request.needed(schedule) for schedule in self.found}
        best: Solution | None = None
        for schedule in sorted(need, key=need.__getitem__):
            if best is None or need[schedule] < total_bytes(request, best):
                solution = laid_out(request, schedule)
                if best is None or solution.total_bytes < best.total_bytes:
                    best = solution
        assert best is not None
        return best

    def search(self, request: Request, tell: Callable[[Progress], None]) -> None:
        """Look for a schedule that fits, or else one that needs less than all others; what is found is remembered."""
        self._search(request, tell, PortfolioSearch.smallest)

    def cheaper(self, request: Request, solution: Solution, tell: Callable[[Progress], None]) -> Solution:
        """A solution that fits at less cost than the one given, if one is found; else that."""
        if solution.cost <= math.fsum(request.graph.costs):
            return solution
        self._search(request, tell, PortfolioSearch.cheapest)
        return self.fitting(request) or solution

    def _search(
        self,
        request: Request,
        tell: Callable[[Progress], None],
        search: Callable[[PortfolioSearch, int], ScheduleFigures],
    ) -> None:
        ordered, order = order_for_least(request, self.orders)
        staged = StagedProblem(ordered)
        earlier = self.reduced.setdefault((order, staged.reduced.members), [])
        initial = [*initial_schedules(staged, request.time_limit), *earlier]
        budget = self.memory
        for _ in range(_TARGETS):
            effort = Effort(self.effort, request.time_limit, tell)
            result = search(PortfolioSearch(staged.problem, effort, initial=initial), budget)
            earlier.append(result.schedule)
            initial.append(result.schedule)
            schedule = tuple(order[node] for node in staged.reduced.expand(result.schedule))
            self.add([schedule])
            over = total_bytes(request, laid_out(request, schedule)) - self.memory
            if over <= 0 or result.peak > budget:
                return
            budget -= over


def largest(low: int, fits: Callable[[int], bool], high: int = MOST_BATCH) -> int:
    """The largest size from ``low``, which fits, to ``high``, as if all below one that fits did."""
    step = 1
    while low + step <= high and fits(low + step):
        low, step = low + step, step * 2
    high = min(high, low + step - 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
