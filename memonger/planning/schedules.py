"""Schedules of one structure of graph, each tried at every size: what was found at one size is valid at another."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from memonger.graph.liveness import assign_storage, needed_bytes
from memonger.graph.schedule import schedule_graph
from memonger.layout import allocate
from memonger.planning import decide
from memonger.planning.decide import Solution
from memonger.remat import Outcome, Request
from memonger.remat.budget import initial_schedules
from memonger.remat.effort import Effort
from memonger.remat.orders import ORDERS
from memonger.remat.portfolio import Search
from memonger.remat.problem import Result
from memonger.remat.staged import StagedProblem

Schedule = tuple[int, ...]

_TARGETS = 3
"""Searches for one budget: where the arena has gaps, the next one is for less."""


def total_bytes(request: Request, solution: Solution) -> int:
    """Arena, workspace, parameters and inputs: `Plan.total_bytes` of the plan that the solution gives."""
    return request.base + solution.arena_bytes + max(solution.graph.workspace, default=0)


def lay_out(request: Request, schedule: Schedule) -> Solution:
    """The solution for a schedule of the request's graph."""
    graph = schedule_graph(request.graph, schedule)
    storage = assign_storage(graph, request.sharing, request.alignment)
    layout = allocate(storage.buffers)
    offsets = {value: layout.offsets[number] for value, number in enumerate(storage.of_value) if number >= 0}
    return Solution(schedule, graph, offsets, layout.size, Outcome(schedule))


def least_total(request: Request, schedule: Schedule) -> int:
    """Bytes that a schedule needs at its worst step: its layout takes as many, or more for gaps."""
    graph = schedule_graph(request.graph, schedule)
    return request.base + needed_bytes(graph, assign_storage(graph, request.sharing, request.alignment))


@dataclass(slots=True)
class Schedules:
    """Schedules found so far, and the search for more.

    Attributes:
        memory: Bytes for everything.
        orders: Names of the evaluation orders to try.
        found: Schedules of the graph, the one that needs least last.
        reduced: The same schedules of the reduced problem, by what identifies that.
    """

    memory: int
    orders: Sequence[str]
    found: list[Schedule] = field(default_factory=list)
    reduced: dict[object, list[Schedule]] = field(default_factory=dict)

    def add(self, schedules: Iterable[Schedule]) -> None:
        """Remember schedules."""
        self.found.extend(each for each in dict.fromkeys(schedules) if each not in self.found)

    def add_plain(self, request: Request) -> None:
        """Remember the evaluation orders, in which nothing is recomputed."""
        self.add(ORDERS[name](request.graph) for name in self.orders)

    def add_swept(self, request: Request) -> None:
        """Remember what the sweep takes for the best of its thresholds, if there is a backward pass."""
        if not all(request.graph.forward):
            request = dataclasses.replace(request, budget=None, progress=None)
            self.add([decide.decide(request, "sweep", self.orders[0]).schedule])

    def fitting(self, request: Request) -> Solution | None:
        """The cheapest of the schedules that fits the memory; None if none does."""
        costs = request.graph.costs
        for schedule in sorted(self.found, key=lambda each: sum(costs[node] for node in each)):
            if least_total(request, schedule) <= self.memory:
                solution = lay_out(request, schedule)
                if total_bytes(request, solution) <= self.memory:
                    return solution
        return None

    def smallest(self, request: Request) -> Solution | None:
        """The solution with the smallest total of all schedules."""
        best: Solution | None = None
        for schedule in sorted(self.found, key=lambda each: least_total(request, each)):
            if best is None or least_total(request, schedule) < total_bytes(request, best):
                solution = lay_out(request, schedule)
                if best is None or solution.arena_bytes < best.arena_bytes:
                    best = solution
        return best

    def search(self, request: Request, effort: int) -> None:
        """Look for a schedule that fits, or else one that needs less than all others; what is found is remembered."""
        self._searched(request, effort, lambda searching, budget: searching.smallest(budget))

    def cheaper(self, request: Request, solution: Solution, effort: int) -> Solution:
        """A solution that fits at less cost, if one is found; else the one given."""
        if sum(solution.graph.costs) <= sum(request.graph.costs):
            return solution
        self._searched(request, effort, lambda searching, budget: searching.cheapest(budget))
        return self.fitting(request) or solution

    def _searched(self, request: Request, effort: int, search: Callable[[Search, int], Result]) -> None:
        ordered, order = decide._least(request, self.orders)
        staged = StagedProblem(ordered)
        known = self.reduced.setdefault((order, staged.reduced.members), [])
        initial = [*known, *initial_schedules(staged, request.time_limit)]
        budget = self.memory
        for _ in range(_TARGETS):
            searching = Search(staged.problem, Effort(effort, request.time_limit), initial=initial)
            result = search(searching, budget)
            known.append(result.schedule)
            initial.append(result.schedule)
            schedule = tuple(order[node] for node in staged.reduced.expand(result.schedule))
            self.add([schedule])
            over = total_bytes(request, lay_out(request, schedule)) - self.memory
            if over <= 0 or result.peak > budget:
                return
            budget -= over
