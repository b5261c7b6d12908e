"""What is computed again: one request with a strategy, for one budget, for several, or for none."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TypeVar

from memonger.allocation import EFFORT
from memonger.errors import BudgetError, PlanError
from memonger.graph import schedule as rewrite
from memonger.graph.graph import Graph
from memonger.graph.liveness import assign_storage, needed_bytes
from memonger.schedule import every_schedule
from memonger.schedule.budget import (
    ATTEMPTS,
    Allocated,
    BudgetSearch,
    KnownSchedules,
    ReportProgress,
    cheapest_within,
)
from memonger.schedule.forced import with_marked_again
from memonger.schedule.orders import ORDERS
from memonger.schedule.solution import (
    Solution,
    lay_out,
    orders_of,
    total_bytes,
    total_lower_bound,
    without_recomputation,
)
from memonger.schedule.strategy import STRATEGIES, Outcome, Request
from memonger.units import format_size

_BOUND_SHARE = 8
"""A lower bound that is only said may look at so many values for each change of a schedule that the search may try."""

_NEXT_TO_LEAST = 1.01
"""Without a backward pass little is saved by computing again: where a plan without that takes at most so many times the
bytes that every plan takes, nothing is looked for."""

_MANY = 4_000
"""Nor in a model of more nodes, most of which are a few nodes in many slices: a tenth of the memory was saved at most,
and that took half a minute and more."""

Item = TypeVar("Item")


def unbudgeted(request: Request, strategy: str, names: Sequence[str]) -> tuple[Request, tuple[int, ...], Outcome]:
    """The ordered request, its order, and what a strategy makes of it, by estimated costs where there are any."""
    graph = request.graph if request.estimates is None else dataclasses.replace(request.graph, costs=request.estimates)
    ordered, order = _ordered_for(strategy, dataclasses.replace(request, graph=graph, budget=None), names)
    return ordered, order, STRATEGIES[strategy].run(ordered)


def _ordered_for(strategy: str, request: Request, names: Sequence[str]) -> tuple[Request, tuple[int, ...]]:
    """What `order_for_least` returns, with the marked nodes a second time for a strategy that doesn't look at marks."""
    ordered, order = order_for_least(request, names)
    if not request.recomputes_marked or STRATEGIES[strategy].heeds_marks:
        return ordered, order
    ordered, again = with_marked_again(ordered)
    return ordered, tuple(order[node] for node in again)


def order_for_least(request: Request, names: Sequence[str]) -> tuple[Request, tuple[int, ...]]:
    """The request with its nodes in the order that needs least memory with nothing recomputed, and that order.

    Of several orders ``peak`` isn't tried: strategies recompute whole stretches, which it takes apart.
    """
    best: tuple[int, tuple[int, ...], Graph] | None = None
    tried = [name for name in names if name != "peak"] or names
    for schedule in dict.fromkeys(ORDERS[name](request.graph) for name in tried):
        graph = rewrite.schedule_graph(request.graph, schedule)
        needed = needed_bytes(graph, assign_storage(graph, request.sharing, request.alignment))
        if best is None or needed < best[0]:
            best = needed, schedule, graph
    assert best is not None
    _, schedule, graph = best
    return request.renumbered(graph, {node: step for step, node in enumerate(schedule)}), schedule


class Budgets:
    """Solutions of one request for any number of budgets, which share all that doesn't depend on the budget.

    Args:
        request: What is planned.
        strategy: A strategy that takes a budget.
        names: Orders to try.
        known: See `memonger.schedule.budget.BudgetSearch`.
        effort: Of layouts that are compared; see `memonger.allocation.allocate`. What is returned, and where only that
            decides whether a budget holds, gets all of it.
        plain: With nothing recomputed, where that was laid out before.

    Attributes:
        laid_out: All that was laid out, by schedules of the ordered graph.
    """

    def __init__(
        self,
        request: Request,
        strategy: str,
        names: Sequence[str],
        known: KnownSchedules | None = None,
        effort: int = EFFORT,
        plain: Solution | None = None,
    ) -> None:
        self.request, self.strategy, self.names, self._known, self._effort = request, strategy, names, known, effort
        self._given = None if request.recomputes_marked else plain
        self.laid_out: dict[tuple[int, ...], Solution] = {}
        self._found: dict[int, Solution | None] = {}

    @cached_property
    def plain(self) -> Solution:
        """With nothing recomputed but what is marked so."""
        if self.request.recomputes_marked:
            return self._lay_out(Outcome(tuple(range(len(self._ordered[1])))))
        return self._given or without_recomputation(self.request, self.names, self._effort)

    @cached_property
    def lower_bound(self) -> int:
        """No plan of these nodes takes less, whatever its order and whatever it computes again."""
        effort = 0 if self._has_too_many else min(every_schedule.EFFORT, _BOUND_SHARE * self.request.effort)
        return total_lower_bound(self.request, effort=effort)

    def total(self, solution: Solution) -> int:
        """See `total_bytes`."""
        return total_bytes(self.request, solution)

    def cheapest(self, budget: int) -> Solution:
        """As `within`.

        Raises:
            BudgetError: nothing was found. `within` finds something for the budget that it names.
        """
        solution = self.within(budget)
        if solution is None:
            raise BudgetError(budget, self.total(self.smallest), self.lower_bound)
        return solution

    def within(self, budget: int, time_limit: float | None = None, prefix: str = "") -> Solution | None:
        """The cheapest solution found within a budget, or what no budget gives if that is cheaper and fits too.

        What was found for a budget is kept, and below one for which nothing was found nothing is searched.

        Args:
            budget: Bytes for everything.
            time_limit: Seconds, in place of the request's.
            prefix: What every report of progress begins with.
        """
        if self.total(self.plain) <= budget:
            return self.plain
        if budget not in self._found:
            refused = max((each for each, solution in self._found.items() if solution is None), default=-1)
            if all(self.request.graph.forward):  # then the bound is tight
                refused = max(refused, (self.total(self.plain) if self._plain_is_least else self.lower_bound) - 1)
            found = None if budget <= refused else self.search(budget, time_limit, prefix)
            self._found[budget] = None if found is None else self._best_laid_out(found)
        return self._found[budget]

    def search(
        self, budget: int, time_limit: float | None = None, prefix: str = "", *, any_cost: bool = False
    ) -> Solution | None:
        """As `within`, where something has to be recomputed; with ``any_cost`` the first that fits will do."""
        request, begin, fitting = self.request, time.monotonic(), list[Solution]()
        limit = request.time_limit if time_limit is None else time_limit
        is_smallest, tries = False, 1  # layouts that get all effort beside that of the smallest

        def propose(target: int, attempt: int) -> tuple[int, list[Outcome]]:
            nonlocal is_smallest
            is_smallest = not target
            if any_cost and fitting:
                return target, []
            left = None if limit is None else max(0.0, begin + limit - time.monotonic())
            report = self._reporting(f"{prefix}attempt {attempt + 1} of at most {ATTEMPTS}, ")
            if self.strategy != "budget":
                ordered = dataclasses.replace(self._ordered[0], budget=target, time_limit=left, progress=report)
                with suppress(PlanError):
                    return target, [STRATEGIES[self.strategy].run(ordered)]
                target = 0
            return self._search.within(target, time_limit=left, report=report, any_cost=any_cost)

        def allocate(outcome: Outcome) -> Allocated[Solution]:
            nonlocal tries
            solution = self._lay_out(outcome)
            if self.total(solution) > budget >= self.total(solution) - solution.gap and (is_smallest or tries):
                tries -= not is_smallest
                solution = self._best_laid_out(solution)
            fitting.extend([solution] if self.total(solution) <= budget else [])
            return Allocated(self.total(solution), solution.cost, solution)

        found = cheapest_within(budget, propose, allocate)
        if not all(request.graph.forward):
            ordered, order, outcome = self._swept
            cost = math.fsum(request.graph.costs[order[node]] for node in outcome.schedule)
            may_be_better = (found is None or cost < found.cost) and ordered.needed(outcome.schedule) <= budget
            if may_be_better and self.total(self.usual) <= budget:
                return self.usual
        return None if found is None else found.item

    @cached_property
    def usual(self) -> Solution:
        """What is planned where nobody gives a budget: a sweep's choice, or without a backward pass all is kept."""
        return self.plain if all(self.request.graph.forward) else lay_out(self.request, *self._swept[1:], self._effort)

    @cached_property
    def _swept(self) -> tuple[Request, tuple[int, ...], Outcome]:
        return unbudgeted(self.request, "sweep", self.names)

    @cached_property
    def smallest(self) -> Solution:
        """The solution with the smallest total that is found whatever the budget."""
        if self._plain_is_least:
            return self.plain
        _, (outcome, *_) = self._search.within(
            0, time_limit=self.request.time_limit, report=self._reporting("the smallest budget, ")
        )
        found = self._best_laid_out(self._lay_out(outcome))
        return min(self.plain, found, key=lambda each: (each.total_bytes, each.cost))

    @cached_property
    def _plain_is_least(self) -> bool:
        """Whether nothing is looked for that takes less than without recomputation."""
        if not all(self.request.graph.forward):
            return False
        return self._has_too_many or self.total(self.plain) <= _NEXT_TO_LEAST * self.lower_bound

    @cached_property
    def _has_too_many(self) -> bool:
        """Whether there are too many nodes to look for what is computed again, and too little would be saved."""
        request = self.request
        is_many = len(request.graph.nodes) > _MANY and self.strategy == "budget" and not request.recomputes_marked
        return is_many and all(request.graph.forward)

    def _reporting(self, prefix: str) -> ReportProgress | None:
        report = self.request.progress
        return None if report is None else lambda state: report(prefix + state)

    def _lay_out(self, outcome: Outcome) -> Solution:
        if outcome.schedule not in self.laid_out:
            self.laid_out[outcome.schedule] = lay_out(self.request, self._ordered[1], outcome, self._effort)
        return dataclasses.replace(self.laid_out[outcome.schedule], outcome=outcome)

    def _best_laid_out(self, solution: Solution) -> Solution:
        """The same schedule with the best layout that is found with all effort."""
        if not solution.gap:
            return solution
        best = lay_out(self.request, self._ordered[1], solution.outcome)
        best = best if best.arena_bytes < solution.arena_bytes else dataclasses.replace(solution, gap=0)
        self.laid_out[solution.outcome.schedule] = best
        return best

    @cached_property
    def _ordered(self) -> tuple[Request, tuple[int, ...]]:
        """The request with its nodes in order, and that order.

        A budget holds the arena beside the largest workspace, whichever step takes that: it counts at all of them.
        """
        request, order = _ordered_for(self.strategy, self.request, self.names)
        graph, most = request.graph, max(request.graph.workspace, default=0)
        even = dataclasses.replace(graph, workspace=(0,) * len(graph.nodes))
        return dataclasses.replace(request, graph=even, base=request.base + most), order

    @cached_property
    def _search(self) -> BudgetSearch:
        return BudgetSearch(self._ordered[0], self._known)


def frontier(
    request: Request, points: int, order: str, budgets: Sequence[int] = (), strategy: str = "budget"
) -> list[Solution]:
    """Solutions of which none is better than another in both total and extra cost, by falling total.

    Args:
        request: The graph and the other settings; it has no budget of its own.
        points: Number of budgets to try, evenly between the smallest total found and that without recomputation.
        order: One of `ORDERS`, or ``best``.
        strategy: A strategy that takes a budget.
        budgets: These budgets instead. For one that nothing was found for, the smallest total found stands.
    """
    begin, once = time.monotonic(), math.fsum(request.graph.costs)
    search = Budgets(request, strategy, orders_of(order, request.graph))
    found = [search.plain, search.smallest]
    lowest, span = search.total(search.smallest), search.total(search.plain) - search.total(search.smallest)
    tried = sorted(budgets) or [lowest + span * point // points for point in range(points)]
    for number, budget in enumerate(tried):
        left = None if request.time_limit is None else begin + request.time_limit - time.monotonic()
        if left is not None and left <= 0:
            break
        part, point = None if left is None else left / (len(tried) - number), f"point {number + 1} of {len(tried)}"
        solution = search.within(budget, part, f"{point}, ")
        if solution is not None:
            found.append(solution)
            if request.progress is not None:
                overhead = solution.cost / once - 1 if once else 0
                request.progress(f"found {point}: {format_size(search.total(solution))} in total, {overhead:+.1%}")
    return undominated(found, lambda each: (each.total_bytes, each.cost))


def undominated(candidates: Sequence[Item], figures: Callable[[Item], tuple[int, float]]) -> list[Item]:
    """Those of which none is better than another in both total and cost, by falling total."""
    best: list[Item] = []
    for one in sorted(candidates, key=figures):
        if not best or figures(one)[1] < figures(best[-1])[1]:
            best.append(one)
    return best[::-1]
