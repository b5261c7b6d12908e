"""The cheapest schedule that fits a budget, the smallest budget that fits a schedule, and the frontier between the two.

A portfolio: greedy relief of several orders, then large-neighbourhood search from the best (see `greedy`, `improve`).
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from memonger.errors import BudgetError, PlanError
from memonger.remat import problem as problems
from memonger.remat.annealed_order import reorder
from memonger.remat.greedy import Relief, excess, relieve, tidy
from memonger.remat.neighbourhood import Annealing, Energy, improve
from memonger.remat.problem import Problem
from memonger.remat.timeline import CrowdedError, Timeline

EFFORT = 400_000
"""Some 4 s."""
_STARTS = ((Relief(many=True), True), (Relief(), True), (Relief(plain=True), False))
"""Greedy settings, and whether first runs move."""
_LARGE = 2_000
"""Nodes from which on only the first start is made."""
_SHARES = (0.15, 0.3, 0.45, 1.0)
"""Ends of the stages of a search: several from the same start, then one from the best of them."""
_AGAIN = (0.3, 0.55, 0.8, 1.0)
"""As that, from a schedule that was hard to find: where it leads hangs on luck, so more often."""
_HUGE, _FEW = 10_000, 2
"""From how many nodes on only the first few of the known schedules are tried."""
_GIVEN = 0.04
"""Part of the effort that relief of one of them may take; it isn't counted."""
_HEAVY = 2_500
"""Nodes with which a change takes twice as long."""
_START = 0.2
"""Part of the effort after which no further greedy plan is tried."""
_HASTE = 0.3
"""Part of the effort that a greedy plan from another order may take."""
_ORDERS = 1
"""Starts from reordered nodes."""
_ORDERING = 0.12
"""Part of the effort spent on one order ..."""
_PROBE = 0.02
"""... if this part of it ..."""
_SHIFTING = 0.25
"""`Annealing.shifts` where orders matter."""
_DEPTHS = (0.4, 0.25)
"""Parts of the bytes between the lower bound and the peak at which orders for the smallest budget aim."""
_WORTH = 0.8
"""... leaves less than this part of the bytes above the budget: the orders of networks are good, others' not always."""


@dataclass(frozen=True, slots=True)
class Result:
    """A valid schedule.

    Attributes:
        schedule: Node ids; one that occurs again is a recomputation.
        peak: Bytes at the worst step.
        cost: Of all steps.
        overhead: Cost beyond that of running each node once, as a fraction of it.
    """

    schedule: tuple[int, ...]
    peak: int
    cost: float
    overhead: float

    @classmethod
    def of(cls, problem: Problem, schedule: tuple[int, ...]) -> Self:
        """What a schedule takes.

        Raises:
            PlanError: It isn't valid.
        """
        once = problems.cost(problem, problem.schedule)
        cost = problems.cost(problem, schedule)
        return cls(schedule, problems.peak(problem, schedule), cost, cost / once - 1 if once else 0.0)


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a search is.

    Attributes:
        spent: Part of the effort or the time that is spent, whichever is more.
        excess: Bytes above the budget, summed over the steps, of the best schedule so far.
        cost: Of that.
    """

    spent: float
    excess: int
    cost: float


@dataclass(slots=True)
class _Meter:
    """What is spent."""

    effort: float
    time_limit: float | None
    report: Callable[[Progress], None] | None
    begin: float = field(default_factory=time.monotonic)
    used: int = 0

    def spent(self, timeline: Timeline) -> float:
        """The part of the effort or time that is gone."""
        weight = 1 + timeline.n / _HEAVY
        used = weight * (self.used + timeline.work) / max(1.0, self.effort)
        if self.time_limit is None:
            return used
        return max(used, (time.monotonic() - self.begin) / self.time_limit if self.time_limit > 0 else 1.0)

    def again(self, part: float) -> "_Meter":
        """One with this part of the effort, and the same end of time."""
        return _Meter(self.effort * part, self.time_limit, self.report, self.begin)

    def seen(self, timeline: Timeline, energy: Energy) -> None:
        if self.report is not None:
            self.report(Progress(min(1.0, self.spent(timeline)), *energy))


def search(
    problem: Problem,
    budget: int,
    *,
    effort: int = EFFORT,
    time_limit: float | None = None,
    progress: Callable[[Progress], None] | None = None,
    seed: int = 1,
    known: Sequence[tuple[int, ...]] = (),
) -> Result:
    """The cheapest schedule found whose memory is within the budget at every step.

    The same arguments give the same schedule, unless the time limit ends the search.

    Args:
        problem: What to schedule.
        budget: Bytes, for everything: `Problem.base` and scratch included.
        effort: How many changes to a schedule may be tried, some 10 µs each; fewer in large problems, where they take
            longer. The first plan is finished in any case.
        time_limit: Seconds after which no further improvement is tried, and no smaller budget looked for; likewise.
        progress: Called with every better schedule.
        seed: Of the random numbers.
        known: Schedules to begin with, where greedy relief makes more of them than of the given order.

    Raises:
        PlanError: the budget is negative.
        BudgetError: no schedule was found that holds it. The message names the smallest budget for which one was.
    """
    if budget < 0:
        raise PlanError(f"the budget is {budget} bytes: it has to be at least 0.")
    once = Result.of(problem, problem.schedule)
    if once.peak <= budget:
        return once
    way = _fitting if budget >= problem.lower_bound else _smallest
    found = way(problem, budget, _Meter(effort, time_limit, progress), seed, known)
    if found.peak > budget:
        raise BudgetError(budget, found.peak, problem.lower_bound)
    return found


Schedules = Sequence[tuple[int, ...]]
Found = tuple[Energy, tuple[int, ...]]


def _fitting(problem: Problem, budget: int, meter: _Meter, seed: int, known: Schedules) -> Result:
    """The cheapest schedule found that holds the budget, or the one with the smallest peak if none was found."""
    starts = _starts(problem, budget, meter, seed)
    shares = _SHARES
    shifts = _SHIFTING if len(starts) > 1 else 0.0
    given = min([starts[0], *_relieved_from(problem, budget, meter, known)])
    if given is not starts[0]:
        starts.append(given)
    best = _best_of(problem, budget, meter, _annealing(problem, seed, shifts), starts, shares[:-1])
    if best[0][0]:  # then the way of `smallest_budget`, so that what that one finds is found here
        least = _smallest(problem, budget, meter.again(1.0), seed, known)
        if least.peak > budget:
            return least
        best, meter, shares = ((0, least.cost), least.schedule), meter.again(0.4), _AGAIN
        best = _best_of(problem, budget, meter, _annealing(problem, seed), [best], shares[:-1])
    annealing = _annealing(problem, seed + len(shares))
    best = min(best, _best_of(problem, budget, meter, annealing, [best], shares[-1:]))
    return Result.of(problem, best[1])


def _best_of(
    problem: Problem,
    budget: int,
    meter: _Meter,
    annealing: Annealing,
    starts: Sequence[Found],
    shares: Sequence[float],
) -> Found:
    """The best of several searches from these schedules in turn; each ends when this share of the effort is spent."""
    best = starts[0]
    timeline = Timeline(problem, best[1])
    once = problems.cost(problem, problem.schedule)
    before = meter.spent(timeline)
    for turn, share in enumerate(shares):
        if turn:
            timeline.load(starts[turn % len(starts)][1])
        energy = improve(
            timeline,
            budget,
            replace(annealing, seed=annealing.seed + turn),
            _Stage(meter, timeline, before + (1 - before) * share, once, budget),
            lambda energy: meter.seen(timeline, energy),
        )
        best = min(best, (energy, timeline.schedule()))
        if best[0] <= (0, once) or (best[0][0] and turn + 1 >= len(starts)):
            break
    meter.used += timeline.work
    return best


def _annealing(problem: Problem, seed: int, shifts: float = 0.0) -> Annealing:
    return Annealing(seed, many=1.0) if problem.nodes > _LARGE else Annealing(seed, shifts=shifts)


@dataclass(slots=True)
class _Stage:
    """The part of a stage that is over: 1 when its share is spent, or nothing is left to improve."""

    meter: _Meter
    timeline: Timeline
    until: float
    once: float
    budget: int
    begin: float = -1.0

    def __call__(self) -> float:
        spent = self.meter.spent(self.timeline)
        if self.begin < 0:
            self.begin = spent
        if spent >= self.until or (self.timeline.cost <= self.once and not excess(self.timeline, self.budget)):
            return 1.0
        return (spent - self.begin) / (self.until - self.begin)


def _relieved_from(problem: Problem, budget: int, meter: _Meter, known: Schedules) -> Iterator[Found]:
    """What greedy relief makes of known schedules: the budget holds, and doesn't without what they still do."""
    timeline = Timeline(problem)
    found = sorted(_found(problem, schedule, budget) for schedule in dict.fromkeys(known))
    for _, schedule in found[: _FEW if problem.nodes > _HUGE else None]:
        timeline.load(schedule)
        yield _relief_of(timeline, budget, meter)


def _relief_of(timeline: Timeline, budget: int, meter: _Meter) -> Found:
    part = _Part(meter, timeline, meter.spent(timeline), _GIVEN)

    def expired() -> bool:
        return part() >= 1

    if _relieved(timeline, budget, _STARTS[0][0], expired):
        tidy(timeline, budget, expired)
    energy = _energy(timeline, budget)
    meter.seen(timeline, energy)
    return energy, timeline.schedule()


def _found(problem: Problem, schedule: tuple[int, ...], budget: int) -> Found:
    above = sum(max(0, held - budget) for held in problems.memory(problem, schedule))
    return (above, problems.cost(problem, schedule)), schedule


def _energy(timeline: Timeline, budget: int) -> Energy:
    return excess(timeline, budget), timeline.cost


def _starts(problem: Problem, budget: int, meter: _Meter, seed: int) -> list[Found]:
    """The best greedy plan of the given order and those of several others, the best first."""
    found = [_start(problem, problem.schedule, budget, meter, _STARTS if problem.nodes <= _LARGE else _STARTS[:1])]
    once = problems.cost(problem, problem.schedule)
    for order in _orders(problem, budget, meter, seed) if found[0][0] > (0, once) else ():
        found.append(_start(problem, order, budget, meter))
        if found[-1][0] <= (0, once):
            break
    return sorted(found)


def _orders(problem: Problem, budget: int, meter: _Meter, seed: int) -> Iterator[tuple[int, ...]]:
    """Other orders with fewer bytes above the budget, where there are any that have much fewer."""
    if problem.nodes > _LARGE:
        return
    for turn, part in enumerate((_PROBE, *(_ORDERING,) * _ORDERS)):
        timeline = Timeline(problem)
        first = excess(timeline, budget)
        begin = meter.spent(timeline)
        if begin >= 1:
            return
        left = reorder(timeline, budget, seed + turn, _Part(meter, timeline, begin, part))
        meter.used += timeline.work
        if turn or not left:
            yield timeline.schedule()
        if not left or left > first * _WORTH:
            return


@dataclass(frozen=True, slots=True)
class _Part:
    """How much of a part of the effort is spent."""

    meter: _Meter
    timeline: Timeline
    begin: float
    part: float

    def __call__(self) -> float:
        spent = self.meter.spent(self.timeline)
        return 1.0 if spent >= 1 else (spent - self.begin) / self.part


def _start(
    problem: Problem,
    order: tuple[int, ...],
    budget: int,
    meter: _Meter,
    settings: Sequence[tuple[Relief, bool]] = (),
) -> Found:
    """The best of several greedy plans from an order, of which the first is finished; by default a hasty one."""
    best: Found | None = None
    timeline = Timeline(problem, order)
    last = _START if settings else meter.spent(timeline) + _HASTE
    for relief, moving in settings or _STARTS[1:2]:
        if best is not None:
            timeline.load(order)
        timeline.moving = moving
        expired = (lambda: False) if settings and best is None else (lambda: meter.spent(timeline) > last)
        if _relieved(timeline, budget, relief, expired):
            timeline.moving = True
            tidy(timeline, budget, expired)
        energy = _energy(timeline, budget)
        if best is None or energy < best[0]:
            best = energy, timeline.schedule()
            meter.seen(timeline, energy)
    assert best is not None
    meter.used += timeline.work
    return best


def _relieved(timeline: Timeline, budget: int, relief: Relief, expired: Callable[[], bool]) -> bool:
    """`relieve`, however often the labels have to be spread."""
    while True:
        try:
            return relieve(timeline, budget, relief, expired)
        except CrowdedError:
            timeline.load(timeline.schedule())


def smallest_budget(
    problem: Problem,
    *,
    effort: int = EFFORT,
    time_limit: float | None = None,
    progress: Callable[[Progress], None] | None = None,
    seed: int = 1,
    known: Schedules = (),
) -> Result:
    """The schedule with the smallest peak that was found.

    Its ``peak`` is the smallest budget there is a schedule for, as far as is known; for the arguments see `search`.
    """
    return _smallest(problem, 0, _Meter(effort, time_limit, progress), seed, known)


def _smallest(problem: Problem, enough: int, meter: _Meter, seed: int, known: Schedules) -> Result:
    """As `smallest_budget`, but ends at the first peak that is small enough."""
    once = Result.of(problem, problem.schedule)
    low, high = problem.lower_bound, once.peak
    starts = [once]
    for target in (low + int((high - low) * part) for part in _DEPTHS):
        for order in _orders(problem, target, meter, seed):
            _, schedule = _start(problem, order, target, meter)
            starts.append(Result.of(problem, schedule))
    shifts = _SHIFTING if len(starts) > 1 else 0.0
    starts += [Result.of(problem, schedule) for schedule in known]
    least = min(starts, key=_least)
    starts = [least] if least is once or problem.nodes > _LARGE else [once, least]
    annealing = _annealing(problem, seed, shifts)
    best = min(starts, key=_least)
    timeline = Timeline(problem)
    begin = meter.spent(timeline)
    for turn, start in enumerate(starts):
        if best.peak > enough:
            timeline.load(start.schedule)
            until = begin + (1 - begin) * (turn + 1) / len(starts)
            best = min(best, _descend(timeline, start, enough, meter, until, annealing), key=_least)
    return best


def _least(result: Result) -> tuple[int, float]:
    return result.peak, result.cost


def _descend(
    timeline: Timeline, best: Result, enough: int, meter: _Meter, until: float, annealing: Annealing
) -> Result:
    """Lower the peak of the timeline, which is at this result, until it is small enough or that much is spent."""
    problem = timeline.problem
    step = 0.5 if problem.nodes > _LARGE else 0.03  # of the bytes above the lower bound
    while best.peak > max(enough, problem.lower_bound) and meter.spent(timeline) < until and step > 1e-4:
        target = best.peak - max(1, int((best.peak - problem.lower_bound) * step))
        _lower(timeline, target, annealing, meter)
        found = Result.of(problem, timeline.schedule())
        step = min(0.5, step * 1.3) if found.peak <= target else step / 2
        best = min(best, found, key=_least)
    return best


def _lower(timeline: Timeline, target: int, annealing: Annealing, meter: _Meter) -> None:
    """Change the timeline until its peak is this, or a fifth of the effort is spent."""
    part = _Part(meter, timeline, meter.spent(timeline), 0.2)
    improve(
        timeline,
        target,
        annealing,
        lambda: max(part(), float(int(timeline.held.max()) <= target)),
        lambda energy: meter.seen(timeline, energy),
    )


def pareto(
    problem: Problem,
    *,
    points: int = 8,
    effort: int = EFFORT,
    time_limit: float | None = None,
    seed: int = 1,
    known: Schedules = (),
) -> tuple[Result, ...]:
    """Schedules of which none is better than another in both peak and cost, by falling peak.

    Args:
        problem: What to schedule.
        points: How many budgets are tried, evenly between the peak without recomputation and the smallest one found.
        effort: Of each.
        time_limit: Seconds for each.
        seed: Of the random numbers.
        known: As for `search`.
    """
    once = Result.of(problem, problem.schedule)
    least = smallest_budget(problem, effort=effort, time_limit=time_limit, seed=seed, known=known)
    found = [once, least]
    budgets = _between(least.peak, once.peak, points)
    found += [_fitting(problem, budget, _Meter(effort, time_limit, None), seed, known) for budget in budgets]
    found.sort(key=lambda result: (result.peak, result.cost))
    frontier: list[Result] = []
    for result in found:
        if not frontier or result.cost < frontier[-1].cost:
            frontier.append(result)
    return tuple(frontier[::-1])


def _between(low: int, high: int, points: int) -> Iterator[int]:
    for point in range(points):
        yield low + math.floor((high - low) * point / points)
