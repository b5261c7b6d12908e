"""From a request to the order of evaluation, what is recomputed and the layout of the arena, on integers alone."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from memonger.allocation import EFFORT, Layout, allocate, lower_bound
from memonger.errors import BudgetError, PlanError
from memonger.graph import schedule as rewrite
from memonger.graph.graph import Graph
from memonger.graph.liveness import Storage, assign_storage, needed_bytes, storages
from memonger.schedule import STRATEGIES, BudgetSearch, Outcome, Request, every_schedule
from memonger.schedule.budget import ATTEMPTS, BUDGET, Allocated, KnownSchedules, ReportProgress, cheapest_within
from memonger.schedule.every_schedule import least_arena, output_bytes
from memonger.schedule.forced import with_marked_again
from memonger.schedule.orders import ORDERS
from memonger.units import KiB, format_size

_BOUND_SHARE = 8
"""A lower bound that is only said may look at so many values for each change of a schedule that the search may try."""

_QUICK = EFFORT // 20
"""Effort for each layout that is compared."""

_WORTH = 256 * KiB
"""Bytes above its lower bound from which the smallest of them gets all the effort, which is some five seconds."""

IN_SLICES = 200_000
"""Effort for layouts of a model in slices that are compared: its many small buffers lie well after the allocators, and
a search takes long."""

_PAGE = 4 * KiB
"""Bytes of memory that a process gets at once: fewer above a lower bound are worth no more effort."""

Item = TypeVar("Item")

_MANY = 50_000
"""With more nodes than this ``best`` is the file's own order, as the others take seconds each."""


@dataclass(frozen=True, slots=True)
class Solution:
    """A schedule and a layout for a graph.

    Attributes:
        schedule: Node ids of the graph in the request; one that occurs again is recomputed.
        graph: The scheduled graph: one node a step.
        offsets: Byte offset of each planned value of the scheduled graph.
        arena_bytes: Size of the arena.
        outcome: What the strategy returned.
        gap: Bytes by which more effort might make the arena smaller, where that is worth it.
    """

    schedule: tuple[int, ...]
    graph: Graph
    offsets: dict[int, int]
    arena_bytes: int
    outcome: Outcome
    gap: int = 0

    @property
    def total_bytes(self) -> int:
        """Arena and largest workspace."""
        return self.arena_bytes + max(self.graph.workspace, default=0)

    @property
    def cost(self) -> float:
        """Of all steps."""
        return math.fsum(self.graph.costs)


def total_bytes(request: Request, solution: Solution) -> int:
    """What has to fit a budget: arena, largest workspace, parameters and inputs. It is `Plan.total_bytes`."""
    return request.base + solution.total_bytes


def total_lower_bound(
    request: Request, *, again: bool = True, whole: bool = True, effort: int = every_schedule.EFFORT
) -> int:
    """Bytes that the total of every plan takes, in whatever order: what is there at each step, and the least arena.

    What the inputs decide the size of isn't counted: other inputs may take less.

    Args:
        request: The graph, what is there beside it, and what may share bytes.
        again: Whether nodes may run more than once.
        whole: Whether every node runs whole. In chunks the outputs alone are sure to be there whole.
        effort: See `memonger.schedule.every_schedule.least_arena`.
    """
    graph, fixed = request.graph, request.base - (request.run_time or 0)
    if not whole:
        return fixed + output_bytes(graph, request.sharing)
    workspace = max(graph.workspace, default=0) if request.run_time is None else 0
    return fixed + workspace + least_arena(graph, request.sharing, again=again, effort=effort)


def decide(request: Request, strategy: str, order: str, effort: int = EFFORT) -> Solution:
    """Order the nodes, choose what is recomputed, and lay out.

    Args:
        request: The graph, the budget and the other settings.
        strategy: One of `STRATEGIES`.
        order: One of `ORDERS`, or ``best``.
        effort: Of layouts that are compared; see `memonger.allocation.allocate`.

    Raises:
        BudgetError: nothing was found whose arena, workspace, parameters and inputs fit the budget together. Planning
            succeeds with the budget that the error names.
        PlanError: the strategy finds nothing at all.
    """
    names = orders_of(order, request.graph)
    if strategy == "none":
        return _without(request, names, effort)
    if request.budget is not None:
        return Budgets(request, strategy, names, effort=effort).cheapest(request.budget)
    _, own_order, outcome = _unbudgeted(request, strategy, names)
    return lay_out(request, own_order, outcome)


def _unbudgeted(request: Request, strategy: str, names: Sequence[str]) -> tuple[Request, tuple[int, ...], Outcome]:
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


def frontier(
    request: Request, points: int, order: str, budgets: Sequence[int] = (), strategy: str = BUDGET.name
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


class Budgets:
    """Solutions of one request for any number of budgets, which share all that doesn't depend on the budget.

    Args:
        request: What is planned.
        strategy: A strategy that takes a budget.
        names: Orders to try.
        known: See `memonger.schedule.budget.BudgetSearch`.
        effort: Of layouts that are compared; see `memonger.allocation.allocate`. What is returned, and where only that
            decides whether a budget holds, gets all of it.

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
    ) -> None:
        self.request, self.strategy, self.names, self._known, self._effort = request, strategy, names, known, effort
        self.laid_out: dict[tuple[int, ...], Solution] = {}
        self._found: dict[int, Solution | None] = {}

    @cached_property
    def plain(self) -> Solution:
        """With nothing recomputed but what is marked so."""
        if self.request.recomputes_marked:
            return self._lay_out(Outcome(tuple(range(len(self._ordered[1])))))
        return _without(self.request, self.names, self._effort)

    @cached_property
    def lower_bound(self) -> int:
        """No plan of these nodes takes less, whatever its order and whatever it computes again."""
        return total_lower_bound(self.request, effort=min(every_schedule.EFFORT, _BOUND_SHARE * self.request.effort))

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
                refused = max(refused, self.lower_bound - 1)
            found = None if budget <= refused else self.search(budget, time_limit, prefix)
            self._found[budget] = None if found is None else self._best_laid_out(found)
        return self._found[budget]

    def search(
        self, budget: int, time_limit: float | None = None, prefix: str = "", *, any_cost: bool = False
    ) -> Solution | None:
        """As `within`, where something has to be recomputed; with ``any_cost`` the first that fits will do."""
        request, begin, fitting = self.request, time.monotonic(), list[Solution]()
        limit = request.time_limit if time_limit is None else time_limit

        def propose(target: int, attempt: int) -> tuple[int, list[Outcome]]:
            if any_cost and fitting:
                return target, []
            left = None if limit is None else max(0.0, begin + limit - time.monotonic())
            report = self._reporting(f"{prefix}attempt {attempt + 1} of at most {ATTEMPTS}, ")
            if self.strategy != BUDGET.name:
                ordered = dataclasses.replace(self._ordered[0], budget=target, time_limit=left, progress=report)
                with suppress(PlanError):
                    return target, [STRATEGIES[self.strategy].run(ordered)]
                target = 0
            return self._search.within(target, time_limit=left, report=report, any_cost=any_cost)

        def allocate(outcome: Outcome) -> Allocated[Solution]:
            solution = self._lay_out(outcome)
            if self.total(solution) > budget >= self.total(solution) - solution.gap:
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
        return _unbudgeted(self.request, "sweep", self.names)

    @cached_property
    def smallest(self) -> Solution:
        """The solution with the smallest total that is found whatever the budget."""
        if all(self.request.graph.forward) and self.total(self.plain) <= self.lower_bound:
            return self.plain
        _, (outcome, *_) = self._search.within(
            0, time_limit=self.request.time_limit, report=self._reporting("the smallest budget, ")
        )
        found = self._best_laid_out(self._lay_out(outcome))
        return min(self.plain, found, key=lambda each: (each.total_bytes, each.cost))

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


def orders_of(order: str, graph: Graph) -> list[str]:
    """The orders that are tried. Of a step with a backward pass ``peak`` isn't: its layouts take long to search."""
    if order != "best":
        return [order]
    if len(graph.nodes) > _MANY:
        return list(ORDERS)[:1]
    return [name for name in ORDERS if name != "peak" or all(graph.forward)]


def _without(request: Request, names: Iterable[str], effort: int = EFFORT) -> Solution:
    """The order with the smallest arena, the first of equals, with nothing recomputed."""
    schedules = dict.fromkeys(ORDERS[name](request.graph) for name in names)
    return _smallest(request, [(schedule, Outcome(schedule)) for schedule in schedules], effort)


def lay_out(request: Request, order: tuple[int, ...], outcome: Outcome, effort: int = EFFORT) -> Solution:
    """The solution for a schedule of the ordered graph."""
    return _smallest(request, [(tuple(order[node] for node in outcome.schedule), outcome)], effort)


def _smallest(request: Request, scheduled: Iterable[tuple[tuple[int, ...], Outcome]], effort: int = EFFORT) -> Solution:
    """The first with the smallest arena of some schedules of a graph, each with optional subviews and without."""
    candidates: list[tuple[int, Storage, Solution]] = []
    for schedule, outcome in scheduled:
        graph = rewrite.schedule_graph(request.graph, schedule)
        empty = Solution(schedule, graph, {}, 0, outcome)
        stored = storages(graph, request.sharing, request.alignment)
        candidates += [(lower_bound(storage.buffers), storage, empty) for storage in stored]
    best: tuple[Layout, int, Storage, Solution] | None = None
    for bound, storage, solution in sorted(candidates, key=lambda candidate: candidate[0]):
        if best is not None and best[0].size <= bound:
            break
        layout = allocate(storage.buffers, effort=min(effort, _QUICK))
        if best is None or layout.size < best[0].size:
            best = layout, bound, storage, solution
    assert best is not None
    layout, bound, storage, solution = best
    least = min(bound for bound, _, _ in candidates)
    if layout.size - bound >= _WORTH and effort > _QUICK:
        layout = min(layout, allocate(storage.buffers, effort=effort), key=lambda each: each.size)
    offsets, gap = _offsets(storage, layout), layout.size - least
    gap = gap if effort < EFFORT and gap >= _PAGE else 0
    return dataclasses.replace(solution, offsets=offsets, arena_bytes=layout.size, gap=gap)


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
    step_of = {node: step for step, node in enumerate(schedule)}
    return dataclasses.replace(
        request,
        graph=graph,
        stages={step_of[node]: stage for node, stage in request.stages.items()},
        forced={step_of[node]: forced for node, forced in request.forced.items()},
        parts=frozenset(step_of[node] for node in request.parts),
    ), schedule


def _offsets(storage: Storage, layout: Layout) -> dict[int, int]:
    places = zip(storage.of_value, storage.within, strict=True)
    return {value: layout.offsets[number] + byte for value, (number, byte) in enumerate(places) if number >= 0}
