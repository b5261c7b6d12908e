"""A schedule with its layout: `Solution`, what it takes, and the best where nothing is recomputed."""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

from memonger.allocation import EFFORT, Layout, allocate, lower_bound
from memonger.graph import schedule as rewrite
from memonger.graph.graph import Graph
from memonger.graph.liveness import Storage, storages
from memonger.schedule import every_schedule
from memonger.schedule.every_schedule import least_arena, output_bytes
from memonger.schedule.orders import ORDERS
from memonger.schedule.strategy import Outcome, Request
from memonger.units import KiB

_QUICK = EFFORT // 20
"""Effort for each layout that is compared."""

_WORTH = 256 * KiB
"""Bytes above its lower bound from which the smallest of them gets all the effort, which is some five seconds."""

IN_SLICES = 200_000
"""Effort for layouts of a model in slices that are compared: its many small buffers lie well after the allocators, and
a search takes long."""

_PAGE = 4 * KiB
"""Bytes of memory that a process gets at once: fewer above a lower bound are worth no more effort."""

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


def orders_of(order: str, graph: Graph) -> list[str]:
    """The orders that are tried. Of a step with a backward pass ``peak`` isn't: its layouts take long to search."""
    if order != "best":
        return [order]
    if len(graph.nodes) > _MANY:
        return list(ORDERS)[:1]
    return [name for name in ORDERS if name != "peak" or all(graph.forward)]


def without_recomputation(request: Request, names: Iterable[str], effort: int = EFFORT) -> Solution:
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


def _offsets(storage: Storage, layout: Layout) -> dict[int, int]:
    places = zip(storage.of_value, storage.within, strict=True)
    return {value: layout.offsets[number] + byte for value, (number, byte) in enumerate(places) if number >= 0}
