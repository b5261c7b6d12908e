"""decision: a request → what runs when and lies where: order, recomputation and layout, on integers alone."""

import dataclasses
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
"""Searches for one budget, each for less than the one before, until the arena fits as well as the live bytes."""

_MANY = 50_000
"""Nodes above which ``best`` is the file's own order: the others take seconds each."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided for a graph.

    Attributes:
        schedule: Node ids of the graph that was asked about.
        graph: One node a step.
        offsets: Byte offset of each planned value of that.
        arena_bytes: Size of the arena.
        outcome: What the strategy said.
    """

    schedule: tuple[int, ...]
    graph: Graph
    offsets: dict[int, int]
    arena_bytes: int
    outcome: Outcome

    def over(self, request: Request) -> int:
        """Bytes by which arena, most scratch, parameters and inputs are more than the budget; 0 where they aren't."""
        if request.budget is None:
            return 0
        return max(0, request.base + self.arena_bytes + max(self.graph.workspace, default=0) - request.budget)


def decide(request: Request, strategy: str, order: str) -> Decision:
    """Order the nodes, choose what is recomputed, and lay out.

    Args:
        request: What is asked.
        strategy: One of `STRATEGIES`.
        order: One of `ORDERS`, or ``best``.

    Raises:
        PlanError: the strategy finds nothing that fits the budget.
    """
    names = _orders(order, len(request.graph.nodes))
    if strategy == "none":
        return _without(request, names)
    ordered, schedule = _least(request, names)
    found = _placed(request, schedule, STRATEGIES[strategy].run(ordered))
    if request.budget is None:
        return found
    return _within(request, ordered, schedule, strategy, found)


def frontier(request: Request, points: int, order: str) -> list[Decision]:
    """Decisions of which none is better than another in both peak and extra cost, by falling peak.

    Raises:
        PlanError: an unknown order.
    """
    ordered, schedule = _least(request, _orders(order, len(request.graph.nodes)))
    outcomes = STRATEGIES["budget"].frontier
    assert outcomes is not None
    return [_placed(request, schedule, outcome) for outcome in outcomes(ordered, points)]


def _orders(order: str, nodes: int) -> list[str]:
    if order != "best":
        return [order]
    return list(ORDERS)[: 1 if nodes > _MANY else None]


def _without(request: Request, names: Iterable[str]) -> Decision:
    """Nothing is recomputed; the order with the smallest arena, the first of equals."""
    candidates: list[tuple[int, int, tuple[int, ...], Graph, Storage]] = []
    for schedule in dict.fromkeys(ORDERS[name](request.graph) for name in names):
        graph = rewrite.schedule_graph(request.graph, schedule)
        storage = assign_storage(graph, request.sharing, request.alignment)
        candidates.append((lower_bound(storage.buffers), len(candidates), schedule, graph, storage))
    best: Decision | None = None
    for bound, _, schedule, graph, storage in sorted(candidates, key=lambda candidate: candidate[:2]):
        if best is not None and best.arena_bytes <= bound:
            break
        layout = allocate(storage.buffers)
        if best is None or layout.size < best.arena_bytes:
            best = Decision(schedule, graph, _offsets(storage, layout), layout.size, Outcome(schedule))
    assert best is not None
    return best


def _least(request: Request, names: Iterable[str]) -> tuple[Request, tuple[int, ...]]:
    """The request in the order that needs least with nothing recomputed, and that order."""
    best: tuple[int, tuple[int, ...], Graph] | None = None
    for schedule in dict.fromkeys(ORDERS[name](request.graph) for name in names):
        graph = rewrite.schedule_graph(request.graph, schedule)
        needed = needed_bytes(graph, assign_storage(graph, request.sharing, request.alignment))
        if best is None or needed < best[0]:
            best = needed, schedule, graph
    assert best is not None
    _, schedule, graph = best
    place = {node: step for step, node in enumerate(schedule)}
    return dataclasses.replace(
        request,
        graph=graph,
        stages={place[node]: stage for node, stage in request.stages.items()},
        forced={place[node]: forced for node, forced in request.forced.items()},
        parts=frozenset(place[node] for node in request.parts),
    ), schedule


def _placed(request: Request, order: tuple[int, ...], outcome: Outcome) -> Decision:
    """The decision for a schedule of the ordered graph."""
    schedule = tuple(order[node] for node in outcome.schedule)
    graph = rewrite.schedule_graph(request.graph, schedule)
    storage = assign_storage(graph, request.sharing, request.alignment)
    layout = allocate(storage.buffers)
    return Decision(schedule, graph, _offsets(storage, layout), layout.size, outcome)


def _within(request: Request, ordered: Request, order: tuple[int, ...], strategy: str, found: Decision) -> Decision:
    """The decision, or one found for less, whose arena holds the budget, too: the first, if none does."""
    assert request.budget is not None
    first, target = found, request.budget
    for _ in range(ATTEMPTS - 1):
        over = found.over(request)
        if not over:
            return found
        target -= over
        try:
            outcome = STRATEGIES[strategy].run(dataclasses.replace(ordered, budget=target))
        except PlanError:
            break
        found = _placed(request, order, outcome)
    return first if found.over(request) else found


def _offsets(storage: Storage, layout: Layout) -> dict[int, int]:
    return {value: layout.offsets[number] for value, number in enumerate(storage.of_value) if number >= 0}
