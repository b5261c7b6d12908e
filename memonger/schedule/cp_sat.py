"""The strategy ``exact``: the cheapest schedule within a budget by constraint programming, with a proof or a bound.

Bartan et al. 2023, "Moccasin: Efficient Tensor Rematerialization for Neural Networks": every node has up to C runs.
Each run has a start and, for each value it writes, a retention interval. At every time the bytes of the intervals must
be within the budget, and every reader of a value must run within one of its intervals. With ``order="given"``, as in
that paper and in Checkmate, first runs are in the given order, and the recomputations right before a first run are in
ascending order. With ``order="free"`` any order is allowed, which is feasible for very small graphs only. OR-Tools'
CP-SAT solves the model, starting from the schedule of the search.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Any

from memonger.errors import PlanError, RuntimeUnavailableError
from memonger.schedule.portfolio import search
from memonger.schedule.problem import Problem, ScheduleFigures
from memonger.schedule.strategy import Outcome, Request

EXACT_SECONDS = 60.0
"""Time limit of the strategy ``exact`` for requests without one."""
_PRECISE = 2**50
"""Costs that are not integers are scaled so that their sum is about this, then rounded."""


@dataclass(frozen=True, slots=True)
class ExactOptions:
    """Settings of the exact strategy.

    Attributes:
        copies: How many times a node may run.
        order: "given" or "free"; see the docstring of the module.
        time_limit: Seconds.
        workers: Threads. With one thread the result is always the same, unless time runs out.
        seed: Of the random numbers.
    """

    copies: int = 2
    order: str = "given"
    time_limit: float = EXACT_SECONDS
    workers: int = 1
    seed: int = 1


@dataclass(frozen=True, slots=True)
class Exact:
    """What the solver found.

    Attributes:
        result: The cheapest schedule. None if there is none, or the solver found none in time.
        bound: No schedule with this order and number of copies costs less. Infinite if there is no such schedule.
        proven: Whether the result is proven optimal, or proven not to exist, under these restrictions.
    """

    result: ScheduleFigures | None
    bound: float
    proven: bool


def solve(
    problem: Problem, budget: int, options: ExactOptions | None = None, start: Sequence[int] | None = None
) -> Exact:
    """The cheapest schedule within a budget.

    Args:
        problem: What to schedule.
        budget: Bytes, for everything.
        options: Settings.
        start: A schedule to begin with; it need not be one of those the options allow.

    Raises:
        PlanError: the budget is negative.
        RuntimeUnavailableError: OR-Tools isn't installed.
    """
    if budget < 0:
        raise PlanError(f"the budget is {budget} bytes: it has to be at least 0.")
    options = options or ExactOptions()
    cp_model = _cp_model()
    model = _CpModel(cp_model.CpModel(), problem, budget, options)
    model.build()
    if start is not None:
        model.hint(start)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = options.time_limit
    solver.parameters.num_workers = options.workers
    solver.parameters.random_seed = options.seed
    status = solver.solve(model.model)
    if status == cp_model.INFEASIBLE:
        return Exact(None, math.inf, True)
    bound = solver.best_objective_bound / model.scale
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Exact(None, bound, False)
    return Exact(ScheduleFigures.of(problem, model.schedule(solver)), bound, status == cp_model.OPTIMAL)


def _cp_model() -> Any:
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise RuntimeUnavailableError(
            "the exact strategy needs OR-Tools, which isn't installed: pip install ortools"
        ) from error
    return cp_model


class _CpModel:
    """Variables and constraints. Time is an integer, and a step is one unit long."""

    def __init__(self, model: Any, problem: Problem, budget: int, options: ExactOptions) -> None:
        self.model = model
        self.problem = problem
        self.options = options
        self.free = options.order == "free"
        n = problem.nodes
        self.runs = [options.copies if problem.recomputable[i] else 1 for i in range(n)]
        self.times = sum(self.runs) if self.free else n * n
        total = math.fsum(problem.costs)  # costs are rounded once they were multiplied by the scale
        self.scale = 1.0 if all(float(c).is_integer() for c in problem.costs) and total < _PRECISE else _PRECISE / total
        self.budget = budget - problem.base
        self.present: list[list[Any]] = []
        self.begin: list[list[Any]] = []
        self.until: list[list[Any]] = [[] for _ in problem.sizes]
        self.overwritten: list[list[list[Any]]] = [[] for _ in problem.sizes]

    def build(self) -> None:
        """Add all variables, constraints and the objective."""
        for node in range(self.problem.nodes):
            model, n = self.model, self.problem.nodes
            present = [model.new_constant(1), *(model.new_bool_var("") for _ in range(self.runs[node] - 1))]
            if self.free:
                begin = [model.new_int_var(0, self.times - 1, "") for _ in present]
            else:  # the node's place in its own stage, then one in a later stage
                places = [stage * n + node for stage in range(node + 1, n)] or [self.times - 1]
                later = _cp_model().Domain.from_values(places)
                first = model.new_constant(node * n + node)
                begin = [first, *(model.new_int_var_from_domain(later, "") for _ in present[1:])]
            for run in range(1, len(present)):
                model.add_implication(present[run], present[run - 1])
                model.add(begin[run] > begin[run - 1]).only_enforce_if(present[run])
            self.present.append(present)
            self.begin.append(begin)
            for value in self.problem.writes[node]:
                for run in range(len(present)):
                    until = model.new_int_var(0, self.times - 1, "")
                    model.add(until >= begin[run])
                    if value in self.problem.pinned and not run:
                        model.add(until == self.times - 1)
                    self.until[value].append(until)
                    self.overwritten[value].append([])
        for node in range(self.problem.nodes):
            deadline = self.problem.deadline[node]
            if deadline < self.problem.nodes:
                for present, begin in zip(self.present[node], self.begin[node], strict=True):
                    self.model.add(begin < self.begin[deadline][0]).only_enforce_if(present)
            over: list[list[Any]] = [[] for _ in self.present[node]]
            for value in self.problem.reads[node]:
                if self.problem.producer[value] >= 0:
                    self._reads(node, value, over)
            for several in over:
                self.model.add_at_most_one(several)
        self._memory()
        if self.free:
            steps = [
                self.model.new_optional_fixed_size_interval_var(begin, 1, present, "")
                for present_, begin_ in zip(self.present, self.begin, strict=True)
                for present, begin in zip(present_, begin_, strict=True)
            ]
            self.model.add_no_overlap(steps)
            fixed = [node for node, free in enumerate(self.problem.recomputable) if not free]
            for before, after in pairwise(fixed):
                self.model.add(self.begin[before][0] < self.begin[after][0])
        costs = [round(cost * self.scale) for cost in self.problem.costs]
        self.model.minimize(
            sum(cost * here for cost, present in zip(costs, self.present, strict=True) for here in present)
        )

    def _reads(self, node: int, value: int, over: list[list[Any]]) -> None:
        """Every run of the node reads a copy of the value within its retention interval; the last may overwrite it."""
        source, model = self.problem.producer[value], self.model
        for present, begin, several in zip(self.present[node], self.begin[node], over, strict=True):
            chosen = []
            for there, start, until in zip(self.present[source], self.begin[source], self.until[value], strict=True):
                reads = model.new_bool_var("")
                model.add_implication(reads, there)
                model.add(start < begin).only_enforce_if(reads)
                model.add(until >= begin).only_enforce_if(reads)
                chosen.append(reads)
                first = len(chosen) == 1
                if value in self.problem.inplace[node] and not (first and value in self.problem.pinned):
                    last = model.new_bool_var("")
                    model.add_implication(last, reads)
                    model.add_implication(last, present)
                    model.add(until == begin).only_enforce_if(last)
                    self.overwritten[value][len(chosen) - 1].append(last)
                    several.append(last)
            model.add_at_least_one(chosen).only_enforce_if(present)

    def _memory(self) -> None:
        model, problem = self.model, self.problem
        intervals, demands = [], []
        for node, writes in enumerate(problem.writes):
            for run, present in enumerate(self.present[node]):
                begin = self.begin[node][run]
                for value in writes:
                    stop = model.new_int_var(1, self.times, "")
                    model.add(stop == self.until[value][run] + 1 - sum(self.overwritten[value][run]))
                    size = model.new_int_var(1, self.times, "")
                    intervals.append(model.new_optional_interval_var(begin, size, stop, present, ""))
                    demands.append(problem.sizes[value])
                if problem.workspace[node]:
                    intervals.append(model.new_optional_fixed_size_interval_var(begin, 1, present, ""))
                    demands.append(problem.workspace[node])
        unit = max(1, reduce(math.gcd, demands, 0))
        model.add_cumulative(intervals, [demand // unit for demand in demands], self.budget // unit)

    def hint(self, schedule: Sequence[int]) -> None:
        """Start the solver from this schedule, as far as the restrictions allow."""
        turns = [0] * self.problem.nodes
        stage = 0
        for step, node in enumerate(schedule):
            turn = turns[node]
            turns[node] += 1
            if turn < self.runs[node] and (self.free or turn):
                self.model.add_hint(self.begin[node][turn], step if self.free else stage * self.problem.nodes + node)
                if turn:
                    self.model.add_hint(self.present[node][turn], 1)
            stage += not turn
        for node, turn in enumerate(turns):
            for present in self.present[node][max(1, turn) :]:
                self.model.add_hint(present, 0)

    def schedule(self, solver: Any) -> tuple[int, ...]:
        """The steps of the solution."""
        steps = [
            (solver.value(begin), node)
            for node in range(self.problem.nodes)
            for present, begin in zip(self.present[node], self.begin[node], strict=True)
            if solver.value(present)
        ]
        return tuple(node for _, node in sorted(steps))


def within_budget(request: Request) -> Outcome:
    """The cheapest schedule that CP-SAT finds starting from the search's, with a proof or a bound; see `solve`.

    Raises:
        PlanError: no schedule is within the budget, or none was found.
        RuntimeUnavailableError: OR-Tools isn't installed.
    """
    reduced, budget = request.reduced(), request.required_budget()
    problem = reduced.problem
    found = search(problem, budget, effort=request.effort)
    start = found if found.peak <= budget else None
    limit = EXACT_SECONDS if request.time_limit is None else request.time_limit
    solved = solve(problem, budget, ExactOptions(time_limit=limit), None if start is None else start.schedule)
    best = solved.result
    if start is not None and (best is None or start.cost < best.cost):
        best = start
    if best is None:
        state = (
            "there is none with two runs a node in this order" if solved.proven else f"none was found in {limit:g} s"
        )
        raise PlanError(f"no schedule within {budget} bytes: {state}. Try strategy 'budget', which names the smallest.")
    once = math.fsum(problem.costs)
    return Outcome(
        reduced.expand(best.schedule),
        bound=max(0.0, solved.bound / once - 1) if once and math.isfinite(solved.bound) else None,
        proven=solved.proven and solved.result is not None and best.cost <= solved.result.cost,
    )
