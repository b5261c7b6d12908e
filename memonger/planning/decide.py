"""From a request to the order of evaluation, what is recomputed and the layout of the arena, on integers alone."""

import dataclasses
import time
from collections.abc import Iterable
from dataclasses import dataclass

from memonger.errors import PlanError
from memonger.graph import schedule as rewrite
from memonger.graph.graph import Graph
from memonger.graph.liveness import Storage, assign_storage, needed_bytes
from memonger.layout import Layout, allocate, lower_bound
from memonger.remat import STRATEGIES, Outcome, Request
from memonger.remat.orders import ORDERS

ATTEMPTS = 4
"""Searches for one budget: where the arena doesn't fit, the next search is given that much less."""

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

    def over(self, request: Request) -> int:
        """Bytes by which arena, largest workspace, parameters and inputs exceed the budget; 0 if they don't."""
        if request.budget is None:
            return 0
        return max(0, request.base + self.arena_bytes + max(self.graph.workspace, default=0) - request.budget)


def decide(request: Request, strategy: str, order: str) -> Solution:
    """Order the nodes, choose what is recomputed, and lay out.

    Args:
        request: The graph, the budget and the other settings.
        strategy: One of `STRATEGIES`.
        order: One of `ORDERS`, or ``best``.

    Raises:
        PlanError: the strategy finds nothing that fits the budget.
    """
    begin, names = time.monotonic(), _orders(order, len(request.graph.nodes))
    if strategy == "none":
        return _without(request, names)
    ordered, schedule = _least(request, names)
    solution = _lay_out(request, schedule, STRATEGIES[strategy].run(ordered))
    if request.budget is None:
        return solution
    return _fit_arena(request, ordered, schedule, strategy, solution, begin)


def frontier(request: Request, points: int, order: str) -> list[Solution]:
    """Solutions of which none is better than another in both peak and extra cost, by falling peak."""
    ordered, schedule = _least(request, _orders(order, len(request.graph.nodes)))
    outcomes = STRATEGIES["budget"].frontier
    assert outcomes is not None
    return [_lay_out(request, schedule, outcome) for outcome in outcomes(ordered, points)]


def _orders(order: str, nodes: int) -> list[str]:
    if order != "best":
        return [order]
    return list(ORDERS)[: 1 if nodes > _MANY else None]


def _without(request: Request, names: Iterable[str]) -> Solution:
    """The order with the smallest arena, the first of equals, with nothing recomputed."""
    candidates: list[tuple[int, int, tuple[int, ...], Graph, Storage]] = []
    for schedule in dict.fromkeys(ORDERS[name](request.graph) for name in names):
        graph = rewrite.schedule_graph(request.graph, schedule)
        storage = assign_storage(graph, request.sharing, request.alignment)
        candidates.append((lower_bound(storage.buffers), len(candidates), schedule, graph, storage))
    best: Solution | None = None
    for bound, _, schedule, graph, storage in sorted(candidates, key=lambda candidate: candidate[:2]):
        if best is not None and best.arena_bytes <= bound:
            break
        layout = allocate(storage.buffers)
        if best is None or layout.size < best.arena_bytes:
            best = Solution(schedule, graph, _offsets(storage, layout), layout.size, Outcome(schedule))
    assert best is not None
    return best


def _least(request: Request, names: Iterable[str]) -> tuple[Request, tuple[int, ...]]:
    """The request with its nodes in the order that needs least memory with nothing recomputed, and that order."""
    best: tuple[int, tuple[int, ...], Graph] | None = None
    for schedule in dict.fromkeys(ORDERS[name](request.graph) for name in names):
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


def _lay_out(request: Request, order: tuple[int, ...], outcome: Outcome) -> Solution:
    """The solution for a schedule of the ordered graph."""
    schedule = tuple(order[node] for node in outcome.schedule)
    graph = rewrite.schedule_graph(request.graph, schedule)
    storage = assign_storage(graph, request.sharing, request.alignment)
    layout = allocate(storage.buffers)
    return Solution(schedule, graph, _offsets(storage, layout), layout.size, outcome)


def _fit_arena(
    request: Request, ordered: Request, order: tuple[int, ...], strategy: str, solution: Solution, begin: float
) -> Solution:
    """A solution whose arena fits the budget, searched with smaller budgets; the first one if none does."""
    assert request.budget is not None
    first, target = solution, request.budget
    for _ in range(ATTEMPTS - 1):
        over = solution.over(request)
        if not over:
            return solution
        target -= over
        left = None if request.time_limit is None else max(0.0, begin + request.time_limit - time.monotonic())
        try:
            outcome = STRATEGIES[strategy].run(dataclasses.replace(ordered, budget=target, time_limit=left))
        except PlanError:
            break
        solution = _lay_out(request, order, outcome)
    return first if solution.over(request) else solution


def _offsets(storage: Storage, layout: Layout) -> dict[int, int]:
    return {value: layout.offsets[number] for value, number in enumerate(storage.of_value) if number >= 0}
