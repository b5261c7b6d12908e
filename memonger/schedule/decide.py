"""From a request to the order of evaluation, what is recomputed and the layout of the arena, on integers alone."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from memonger.allocation import EFFORT, Layout, allocate, lower_bound
from memonger.errors import BudgetError, PlanError
from memonger.graph import schedule as rewrite
from memonger.graph.graph import Graph
from memonger.graph.liveness import Storage, assign_storage, needed_bytes
from memonger.graph.window_choice import storages
from memonger.schedule import STRATEGIES, BudgetSearch, Outcome, Request, every_schedule
from memonger.schedule.budget import BUDGET
from memonger.schedule.every_schedule import least_arena, output_bytes
from memonger.schedule.forced import with_marked_again
from memonger.schedule.orders import ORDERS
from memonger.schedule.targets import ATTEMPTS, Tried, cheapest_within
from memonger.units import KiB, format_size

BOUND_EFFORT = every_schedule.EFFORT
"""Effort for a lower bound."""

_QUICK = EFFORT // 20
"""Effort for each layout that is compared."""

_WORTH = 256 * KiB
"""Bytes above its lower bound from which the smallest of them gets all the effort, which is some five seconds."""

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
    """

    schedule: tuple[int, ...]
    graph: Graph
    offsets: dict[int, int]
    arena_bytes: int
    outcome: Outcome

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


def least_total(request: Request, *, again: bool = True, whole: bool = True, effort: int = BOUND_EFFORT) -> int:
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
        effort: Of layouts where nothing is recomputed; see `memonger.allocation.allocate`.

    Raises:
        BudgetError: nothing was found whose arena, workspace, parameters and inputs fit the budget together. Planning
            succeeds with the budget that the error names.
        PlanError: the strategy finds nothing at all.
    """
    names = orders_of(order, request.graph)
    if strategy == "none":
        return _without(request, names, effort)
    if request.budget is not None:
        return Budgets(request, strategy, names).cheapest(request.budget)
    return _by(request, strategy, names)


def _by(request: Request, strategy: str, names: Sequence[str]) -> Solution:
    """What a strategy recomputes where there is no budget."""
    graph = request.graph if request.estimates is None else dataclasses.replace(request.graph, costs=request.estimates)
    ordered, schedule = _ordered_for(strategy, dataclasses.replace(request, graph=graph), names)
    return lay_out(request, schedule, STRATEGIES[strategy].run(ordered))


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
    begin = time.monotonic()
    searched = Budgets(request, strategy, orders_of(order, request.graph))
    plain, least = searched.plain, searched.least
    results, lowest, span = [plain, least], searched.total(least), searched.total(plain) - searched.total(least)
    tried = sorted(budgets) or [lowest + span * point // points for point in range(points)]
    for number, budget in enumerate(tried):
        left = None if request.time_limit is None else begin + request.time_limit - time.monotonic()
        if left is not None and left <= 0:
            break
        with suppress(BudgetError):
            part, point = None if left is None else left / (len(tried) - number), f"point {number + 1} of {len(tried)}"
            results.append(searched.cheapest(budget, part, f"{point}, "))
            if request.progress is not None:
                request.progress(f"found {point}: {searched.described(results[-1])}")
    return _undominated(results)


def _undominated(solutions: Iterable[Solution]) -> list[Solution]:
    """Those of which none is better than another in both total and cost, by falling total."""
    best: list[Solution] = []
    for solution in sorted(solutions, key=lambda each: (each.total_bytes, each.cost)):
        if not best or solution.cost < best[-1].cost:
            best.append(solution)
    return best[::-1]


class Budgets:
    """Solutions of one request for any number of budgets, which share all that doesn't depend on the budget.

    Args:
        request: What is planned.
        strategy: A strategy that takes a budget.
        names: Orders to try.

    Attributes:
        plain: With nothing recomputed but what is marked so.
    """

    def __init__(self, request: Request, strategy: str, names: Sequence[str]) -> None:
        self.request, self.strategy, self.names = request, strategy, names
        self._known: dict[tuple[int, ...], Solution] = {}
        if request.recomputes_marked:
            self.plain = self._laid_out(Outcome(tuple(range(len(self._ordered[1])))))
        else:
            self.plain = _without(request, names)

    def total(self, solution: Solution) -> int:
        """See `total_bytes`."""
        return total_bytes(self.request, solution)

    def described(self, solution: Solution) -> str:
        """Total and extra cost in words."""
        once = math.fsum(self.request.graph.costs)
        return f"{format_size(self.total(solution))} in total, {solution.cost / once - 1 if once else 0:+.1%}"

    def cheapest(self, budget: int, time_limit: float | None = None, told: str = "") -> Solution:
        """The cheapest solution found within the budget, or what no budget gives if that is cheaper and fits too.

        See `memonger.schedule.targets`.
        """
        if self.total(self.plain) <= budget:
            return self.plain
        limit, begin = self.request.time_limit if time_limit is None else time_limit, time.monotonic()

        def tried(target: int, attempt: int) -> tuple[int, Iterator[Tried[Solution]]]:
            left = None if limit is None else max(0.0, begin + limit - time.monotonic())
            counted, outcomes = self._within(target, left, f"{told}attempt {attempt + 1} of at most {ATTEMPTS}, ")
            solutions = map(self._laid_out, outcomes)
            return counted, (Tried(self.total(each), each.cost, each) for each in solutions)

        found = cheapest_within(budget, tried)
        fitting = (each for each in (found, self.usual) if each is not None and self.total(each) <= budget)
        solution = min(fitting, key=lambda each: each.cost, default=None)
        if solution is None:
            raise BudgetError(budget, self.total(self.least), self._lower_bound)
        return solution

    @cached_property
    def usual(self) -> Solution:
        """What is planned where nobody gives a budget: a sweep's choice, or without a backward pass all is kept."""
        if all(self.request.graph.forward):
            return self.plain
        return _by(dataclasses.replace(self.request, budget=None), "sweep", self.names)

    @cached_property
    def _lower_bound(self) -> int:
        """No plan of these nodes takes less, whatever its order and whatever it computes again."""
        return least_total(self.request)

    @cached_property
    def least(self) -> Solution:
        """The solution with the smallest total that is found whatever the budget."""
        _, (outcome, *_) = self._search.within(
            0, time_limit=self.request.time_limit, tell=self._telling("the smallest budget, ")
        )
        return min(self.plain, self._laid_out(outcome), key=lambda each: (each.total_bytes, each.cost))

    def _within(self, target: int, time_limit: float | None, told: str) -> tuple[int, list[Outcome]]:
        """What the strategy finds within a target; see `BudgetSearch.within`."""
        tell = self._telling(told)
        if self.strategy == BUDGET.name:
            return self._search.within(target, time_limit=time_limit, tell=tell)
        ordered = dataclasses.replace(self._ordered[0], budget=target, time_limit=time_limit, progress=tell)
        with suppress(PlanError):
            return target, [STRATEGIES[self.strategy].run(ordered)]
        return self._search.within(0, time_limit=time_limit, tell=tell)

    def _telling(self, told: str) -> Callable[[str], None] | None:
        tell = self.request.progress
        return None if tell is None else lambda state: tell(told + state)

    def _laid_out(self, outcome: Outcome) -> Solution:
        if outcome.schedule not in self._known:
            self._known[outcome.schedule] = lay_out(self.request, self._ordered[1], outcome)
        return dataclasses.replace(self._known[outcome.schedule], outcome=outcome)

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
        return BudgetSearch(self._ordered[0])


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


def _smallest(request: Request, ways: Iterable[tuple[tuple[int, ...], Outcome]], effort: int = EFFORT) -> Solution:
    """The first with the smallest arena of some schedules of the request's graph, each with windows and without."""
    candidates: list[tuple[int, Storage, Solution]] = []
    for schedule, outcome in ways:
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
    if layout.size - bound >= _WORTH and effort > _QUICK:
        layout = min(layout, allocate(storage.buffers, effort=effort), key=lambda each: each.size)
    return dataclasses.replace(solution, offsets=_offsets(storage, layout), arena_bytes=layout.size)


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


def lay_out(request: Request, order: tuple[int, ...], outcome: Outcome) -> Solution:
    """The solution for a schedule of the ordered graph."""
    return _smallest(request, [(tuple(order[node] for node in outcome.schedule), outcome)])


def _offsets(storage: Storage, layout: Layout) -> dict[int, int]:
    places = zip(storage.of_value, storage.within, strict=True)
    return {value: layout.offsets[number] + byte for value, (number, byte) in enumerate(places) if number >= 0}
