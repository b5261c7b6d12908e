"""One model at all sizes of a dimension, interpolated between a few sizes at which it was lowered, and schedules of it.

How what is known of those sizes grows: `memonger.lowering.growth`.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from memonger.graph.graph import Alias, Graph
from memonger.lowering.growth import POINTS, STEP, Growth
from memonger.schedule import Outcome, Request
from memonger.schedule.orders import ORDERS
from memonger.schedule.recompute import Budgets
from memonger.schedule.solution import Solution, lay_out, total_bytes
from memonger.units import MOST_BATCH

PLACED = ("subview", "optional")
"""Aliases whose byte depends on the size; see `Interpolation.request`."""

Structure = tuple[object, ...]
Schedule = tuple[int, ...]


def structure(graph: Graph) -> Structure:
    """All of a graph but sizes and costs: its nodes, and what they write and read of one another.

    Inputs and constants are left out: a constant's name and number follow its content, which may be 1 / batch.
    """
    written = [value for writes in graph.writes for value in writes]
    number = {value: place for place, value in enumerate(written)}

    def described(alias: Alias) -> Structure:
        return alias.kind, number.get(alias.source, graph.values[alias.source]), number[alias.target]

    return (
        graph.nodes,
        graph.ops,
        graph.forward,
        tuple(graph.planned[value] for value in written),
        tuple(tuple(number[value] for value in reads if value in number) for reads in graph.reads),
        tuple(map(len, graph.writes)),
        tuple(number[value] for value in graph.outputs if value in number),
        tuple(
            tuple(described(a) for a in each if a.kind not in PLACED and (a.kind != "runtime" or a.source in number))
            for each in graph.aliases
        ),
    )


@dataclass(frozen=True, slots=True)
class Interpolation:
    """Requests of one structure at every size.

    Attributes:
        sizes: Three, ascending, at which the model was lowered.
        requests: Of these sizes.
        structure: Of their graphs.
    """

    sizes: tuple[int, ...]
    requests: tuple[Request, ...]
    structure: Structure

    @staticmethod
    def of(requests: Mapping[int, Request], enough: int = POINTS) -> "Interpolation | None":
        """That of the three largest of these sizes; None if they are fewer, or their structures differ.

        Where they don't tell the one before, lengths are rounded, as those of images are by strides: it is that of the
        largest three that are alike modulo `STEP`, or None.

        Args:
            requests: By size.
            enough: As many sizes there have to be.
        """
        sizes = sorted(requests)
        found = Interpolation._of(requests, sizes[-POINTS:]) if len(sizes) >= enough else None
        if found is None or len(sizes) == POINTS or found._tells(sizes[-POINTS - 1], requests):
            return found
        alike = [[size for size in sizes if size % STEP == own] for own in {size % STEP for size in sizes}]
        best = max((own for own in alike if len(own) >= POINTS), key=lambda own: own[-1], default=None)
        return None if best is None else Interpolation._of(requests, best[-POINTS:])

    @staticmethod
    def _of(requests: Mapping[int, Request], sizes: Sequence[int]) -> "Interpolation | None":
        structures = [structure(requests[size].graph) for size in sizes]
        if any(each != structures[0] for each in structures[1:]):
            return None
        return Interpolation(tuple(sizes), tuple(requests[size] for size in sizes), structures[0])

    def _tells(self, size: int, requests: Mapping[int, Request]) -> bool:
        """Whether values of another size, where its structure is this one, are as large as these three tell."""
        graph = requests[size].graph
        if not self.has(graph):
            return True
        written = [value for writes in graph.writes for value in writes]
        own = [value for writes in self.requests[-1].graph.writes for value in writes]
        told = self.request(size).graph.sizes
        return all(graph.sizes[a] == told[b] for a, b in zip(written, own, strict=True))

    def has(self, graph: Graph) -> bool:
        """Whether a graph is of this structure, so that schedules of the one are schedules of the other."""
        return structure(graph) == self.structure

    def request(self, size: int) -> Request:
        """The request at a size."""
        if size in self.sizes:
            return self.requests[self.sizes.index(size)]
        growth, largest_one = Growth(self.sizes, size), self.requests[-1]
        graphs, graph = [each.graph for each in self.requests], largest_one.graph
        written = [[value for writes in each.writes for value in writes] for each in graphs]
        columns = [[each.sizes[value] for value in own] for each, own in zip(graphs, written, strict=True)]
        sizes = list(graph.sizes)
        for value, row in zip(written[-1], zip(*columns, strict=True), strict=True):
            sizes[value] = max(growth.polynomial(row), int(graph.planned[value]))  # what is planned has a byte

        graph = dataclasses.replace(
            graph,
            sizes=tuple(sizes),
            workspace=tuple(map(growth.measured, zip(*(each.workspace for each in graphs), strict=True))),
            costs=tuple(cost * growth.ratio for cost in graph.costs),
        )
        nothing = [()] * len(graph.nodes)  # as byte offsets subviews hold at one size: without them more is counted
        graph = graph.with_aliases(subview=nothing, optional=nothing)
        base = growth.polynomial([each.base - (each.run_time or 0) for each in self.requests])
        run_time = largest_one.run_time
        if run_time is not None:
            run_time = growth.measured([each.run_time or 0 for each in self.requests])
            base += run_time
        return dataclasses.replace(largest_one, graph=graph, base=base, run_time=run_time, estimates=None)


class Schedules:
    """Schedules of one structure of graph, and the search for more; what was found at one size is valid at another."""

    def __init__(self, memory: int, orders: Sequence[str]) -> None:
        self.memory, self.orders = memory, orders
        self.found: list[Schedule] = []
        self._reduced: dict[object, list[Schedule]] = {}

    def add(self, schedules: Iterable[Schedule]) -> list[Schedule]:
        """Remember schedules; returns those that are new."""
        fresh = [each for each in dict.fromkeys(schedules) if each not in self.found]
        self.found.extend(fresh)
        return fresh

    def add_orders(self, request: Request) -> list[Schedule]:
        """Remember the evaluation orders, in which nothing is recomputed."""
        return self.add(ORDERS[name](request.graph) for name in self.orders)

    def add_usual(self, request: Request) -> list[Schedule]:
        """Remember what no budget gives."""
        usual = Budgets(dataclasses.replace(request, progress=None), "budget", self.orders).usual
        return [] if all(request.graph.forward) else self.add([usual.schedule])

    def search(self, request: Request, *, any_cost: bool) -> list[Schedule]:
        """Look for a schedule that fits; returns the new ones of what was tried: else the one with the fewest bytes."""
        search = Budgets(request, "budget", self.orders, self._reduced)
        search.search(self.memory, any_cost=any_cost)
        return self.add(each.schedule for each in search.laid_out.values())

    def solution(self, request: Request, schedule: Schedule) -> Solution | None:
        """What a schedule takes; None where it doesn't fit."""
        if request.needed(schedule) > self.memory:
            return None
        solution = _laid_out(request, schedule)
        return solution if total_bytes(request, solution) <= self.memory else None

    def reach(self, low: int, at: Callable[[int], Request], high: int, schedules: Iterable[Schedule]) -> int:
        """The largest size up to ``high`` with which one of these schedules fits; ``low`` if it is no larger."""

        def fits(schedule: Schedule, size: int) -> bool:
            return self.solution(at(size), schedule) is not None

        for schedule in schedules:
            low = largest(low, partial(fits, schedule), high)
        return low

    def fitting(self, request: Request) -> Solution | None:
        """The cheapest that fits; None if none does."""
        costs = request.graph.costs
        cheapest_first = sorted(self.found, key=lambda each: sum(costs[node] for node in each))
        return next(filter(None, (self.solution(request, each) for each in cheapest_first)), None)

    def smallest(self, request: Request) -> Solution:
        """The one with the smallest total."""
        needed = {schedule: request.needed(schedule) for schedule in self.found}
        best: Solution | None = None
        for schedule in sorted(needed, key=needed.__getitem__):
            if best is None or needed[schedule] < total_bytes(request, best):
                solution = _laid_out(request, schedule)
                best = solution if best is None or solution.total_bytes < best.total_bytes else best
        assert best is not None
        return best


def _laid_out(request: Request, schedule: Schedule) -> Solution:
    return lay_out(request, tuple(range(len(request.graph.nodes))), Outcome(schedule))


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
