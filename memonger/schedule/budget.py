"""Search under a budget: propose schedules for a target, allocate them, correct the target by what they lack.

What is searched isn't what the budget is of. A search of the reduced problem holds the live bytes of its worst step.
A plan needs an arena, which may have gaps; folded nodes need a little more or less than the problem says; and what runs
in slices takes less. `cheapest_within` is the loop around all of these, `BudgetSearch` proposes schedules, and the
strategy ``budget`` takes what they need as they are. `memonger.schedule.recompute` lays them out.
"""

import math
import time
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

from memonger.errors import BudgetError
from memonger.schedule.cheap import cheap_groups
from memonger.schedule.checkpoints import StagedProblem
from memonger.schedule.effort import Progress
from memonger.schedule.portfolio import search
from memonger.schedule.problem import ScheduleFigures, weighed_by_bytes
from memonger.schedule.segments import block, logarithmic, square_root
from memonger.schedule.strategy import Outcome, Request
from memonger.schedule.sweep import sweep

ATTEMPTS = 6
"""Targets for one budget."""

ReportProgress = Callable[[str], None]
KnownSchedules = MutableMapping[object, list[tuple[int, ...]]]
Proposal = TypeVar("Proposal")
Item = TypeVar("Item")


class Allocated(NamedTuple, Generic[Item]):
    """What became of a proposal.

    Attributes:
        bytes: In those of the budget.
        cost: Of all steps.
        item: What it is.
    """

    bytes: int
    cost: float
    item: Item


Propose = Callable[[int, int], tuple[int, Iterable[Proposal]]]
"""Given a target and the number of the attempt, the bytes that the search counts for the first proposal, and
proposals within the target, the cheapest first; where there is none, the one with the fewest bytes. None at all ends
the search."""


def cheapest_within(
    budget: int,
    propose: Propose[Proposal],
    allocate: Callable[[Proposal], Allocated[Item]],
    *,
    start: int | None = None,
    attempts: int = ATTEMPTS,
) -> Allocated[Item] | None:
    """The cheapest that was found within the budget, or None.

    Where the cheapest proposal doesn't fit, the next target is smaller by what it lacks, from the third time on by
    twice that, then four times, and so on; and one halfway back where nothing was found any more. Where nothing fitted
    twice (of three attempts once), the smallest that there is is looked at: if that doesn't fit, nothing does, and else
    no target is below it any more. Where it was found for want of anything else, the next target leaves it what it
    leaves of the budget.

    Args:
        budget: Bytes.
        propose: What may be done.
        allocate: What it takes; asked of the proposals one by one, to the first that fits.
        start: The first target, where that isn't the budget.
        attempts: Targets that are tried.
    """
    target, too_large, smallest = budget if start is None else start, 0, -1
    best: Allocated[Item] | None = None
    for attempt in range(attempts):
        checks = best is None and attempt == min(2, attempts - 2)
        counted, proposals = propose(0 if checks else target, attempt)
        first = fitting = None
        for each in map(allocate, proposals):
            first = first or each
            if each.bytes <= budget:
                fitting = each
                break
        if first is None or (checks and fitting is None):
            break
        before, best = best, min((each for each in (best, fitting) if each), key=lambda each: each.cost, default=None)
        if checks:
            smallest = counted
        elif counted <= target:
            if best is not None and best.cost <= first.cost:
                break
            too_large = target
            target = min(target - ((first.bytes - budget) << max(0, attempt - 1)), counted - 1)
        elif fitting is not None and before is None:
            smallest, target = counted, counted + budget - fitting.bytes
            if too_large:
                target = min(target, (counted + too_large) // 2)
        elif best is None and too_large:
            target = (target + too_large) // 2
        else:
            break
        if target < smallest:
            target = (smallest + too_large) // 2
            if target >= too_large:
                break
    return best


class BudgetSearch:
    """Schedules of one request for any number of targets, which share what doesn't depend on the target.

    Args:
        request: What is planned. Its own budget is not looked at.
        known: Schedules of the reduced problem to start from beside those of the strategies, by what its nodes stand
            for. What is found is added.
    """

    def __init__(self, request: Request, known: KnownSchedules | None = None) -> None:
        self.request, self._known = request, known
        self._once = tuple(range(len(request.graph.nodes)))
        self._smallest: tuple[int, ScheduleFigures] | None = None  # the largest target in vain, and what was found

    def within(
        self,
        target: int,
        *,
        time_limit: float | None = None,
        report: ReportProgress | None = None,
        any_cost: bool = False,
    ) -> tuple[int, list[Outcome]]:
        """What one search of the reduced problem finds within a target, the cheapest first.

        Nodes are folded into one another there: it counts a little more or less than they need.

        Args:
            target: Bytes for everything, `Request.base` and workspace included.
            time_limit: Seconds after which nothing is improved.
            report: Called with a few words on how far the search is.
            any_cost: The first schedule found within the target will do.

        Returns:
            Bytes that are counted for the first schedule, and the schedules. Where none is within the target, the one
            with the smallest peak found, which is the same whatever was searched before.
        """
        if self._bytes_once <= target:
            return self._bytes_once, [Outcome(self._once)]
        if self._smallest is not None and target <= self._smallest[0]:
            figures = self._smallest[1]
        else:
            problem, request = self.staged.problem, self.request
            progress = None if report is None else _InWords(report, math.fsum(problem.costs))
            key, known = (request.graph.nodes, self.staged.reduced.members), list[tuple[int, ...]]()
            if self._known is not None:
                known = self._known.setdefault(key, known)
            figures = search(
                problem, target, effort=request.effort, time_limit=time_limit, progress=progress,
                initial=[*self._initial, *known], any_cost=any_cost,
            )  # fmt: skip
            known.append(figures.schedule)
            if figures.peak > target:
                self._smallest = target, figures
        expand = self.staged.reduced.expand
        return figures.peak, [Outcome(expand(each)) for each in (figures.schedule, *figures.others)]

    @cached_property
    def _bytes_once(self) -> int:
        """With nothing recomputed."""
        return self.request.needed(self._once)

    @cached_property
    def staged(self) -> StagedProblem:
        """The reduced problem that is searched."""
        return StagedProblem(self.request)

    @cached_property
    def _initial(self) -> list[tuple[int, ...]]:
        """Schedules of the strategies without search; without a backward pass there are none.

        They are the same whatever a node costs; see `memonger.schedule.portfolio.PortfolioSearch.smallest`.
        """
        problem, kept, stage_sets = weighed_by_bytes(self.staged.problem), self.staged.kept, self.staged.stage_sets
        if all(problem.forward):
            return []
        segmented = [
            strategy(problem, stages, kept)
            for stages in stage_sets.values()
            for strategy in (block, square_root, logarithmic)
        ]
        swept = sweep(problem, stage_sets, forced=kept, time_limit=self.request.time_limit)
        return [*segmented, swept.schedule, cheap_groups(self.staged.reduced)]


def within_budget(request: Request, needed: Callable[[Sequence[int]], int] | None = None) -> Outcome:
    """The cheapest schedule found within the budget of the request.

    Args:
        request: What is planned.
        needed: Bytes at the worst step of a schedule, where that isn't `Request.needed`.

    Raises:
        BudgetError: no schedule within the budget was found.
    """
    budget, search = request.required_budget(), BudgetSearch(request)
    bytes_of = needed or request.needed

    def as_it_is(outcome: Outcome) -> Allocated[Outcome]:
        return Allocated(bytes_of(outcome.schedule), request.cost(outcome.schedule), outcome)

    found = cheapest_within(
        budget,
        lambda target, _: search.within(target, time_limit=request.time_limit, report=request.progress),
        as_it_is,
    )
    if found is None:
        _, smallest = search.within(0)
        least = min(bytes_of(each.schedule) for each in smallest)
        raise BudgetError(budget, least, search.staged.problem.lower_bound)
    return found.item


class _InWords:
    """Says in words how far a search is: the part done, the best schedule so far, and the time left."""

    def __init__(self, report: ReportProgress, once: float) -> None:
        self.report, self.once, self.begin = report, once, time.monotonic()
        self.done = 0.0
        self.best = (math.inf, math.inf)

    def __call__(self, progress: Progress) -> None:
        self.done = max(self.done, progress.done)
        if progress.lowering:
            state = "looking for less memory"  # costs don't count there
        else:
            self.best = min(self.best, (progress.excess, progress.cost))
            excess, cost = self.best
            state = "nothing within the budget yet" if excess else f"best {cost / (self.once or 1) - 1:+.2%}"
        seconds = time.monotonic() - self.begin
        left = ""
        if seconds >= 1 and self.done >= 0.05:
            left = f", about {seconds * (1 - self.done) / self.done:.0f} s left of this attempt"
        self.report(f"{self.done:.0%}, {state}{left}")
