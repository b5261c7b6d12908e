"""The cheapest schedule within a budget, and the smallest budget with a schedule.

`PortfolioSearch` is a portfolio: greedy schedules from several starting points (`memonger.schedule.greedy`), then a
large-neighbourhood search with simulated annealing from the best of them (`memonger.schedule.neighbourhood`). Effort is
counted in changes tried, not in seconds, so that a result does not depend on the speed of the machine.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

from memonger.schedule.effort import EFFORT, Effort, Progress
from memonger.schedule.greedy import GreedyOptions, excess, fit_budget, remove_redundant
from memonger.schedule.neighbourhood import Annealing, improve, reorder
from memonger.schedule.problem import Problem, ScheduleFigures, cost, memory, weighed_by_bytes
from memonger.schedule.repeats import broadcast
from memonger.schedule.timeline import CrowdedError, Timeline


@dataclass(frozen=True, slots=True)
class Tuning:
    """Tuned constants of `PortfolioSearch`.

    They were chosen on the published problems in tests/data/remat (``python -m benchmarks.planning.remat``), and those
    for large problems on deep ResNets (``python -m benchmarks.planning.recompute``). Fractions of effort are of the
    effort of one search.

    Attributes:
        large: Number of nodes. Larger problems skip other evaluation orders and all greedy variants but the first, and
            change several things at once.
        huge: Number of nodes. Larger problems start from the best few of the initial schedules only.
        huge_initial: How many initial schedules a huge problem starts from.
        few: Number of nodes. What is counted per node is counted for so many at least.
        greedy: Variants of the greedy algorithm for the given order, before the plain one. The first one always runs,
            however small the effort is.
        first_work: Changes per node that the first variant may try. Networks need some twenty at most. It gives up as
            soon as its pace is too slow for that, as it is where nothing but the order is bad.
        plain_work: Changes that the plain algorithm may try, fewer in large problems. It has them for itself, whatever
            the effort is, so that no result is worse than its own.
        plain_faster: It gives up where it would have to be so many times as fast as until then.
        greedy_charge: Fraction of effort that is charged for the variants at most, so that the rest is left for others.
        greedy_reordered: The variant for another order.
        greedy_until: Fraction of effort after which no further greedy variant runs.
        greedy_patience: A further variant gives up when recomputation costs this many times what it does in the best.
        reordered_share: Fraction of effort that the greedy algorithm may take on another order.
        initial_share: Fraction of effort that the greedy algorithm may take on an initial schedule. It is not charged.
        repeats_share: Fraction of effort for few of the blocks that repeat in a large problem. It is not charged.
        probe: Fraction of effort for a first, short search for a better order.
        probe_left: The search for an order ends after the probe if more than this fraction of the excess is left: the
            order of most networks is good already.
        reorder: Fraction of effort for the full search for an order.
        shifts: How often the annealing moves nodes only, where another order was found to matter.
        explore: Fractions of effort at which the annealing runs from the starting schedules end. A last one, from the
            best schedule, takes the rest.
        explore_again: As ``explore``, from a schedule that only the search for the smallest budget found. Results of
            such starts vary more, so these are more runs.
        again: Fraction of the effort that this second exploration has.
        smallest_work: Changes per node that the search for the smallest budget may try. Problems of some ten to some
            hundred nodes were seen to need a tenth of that at most.
        smallest_targets: Budgets for which the search for the smallest budget looks for another order, as fractions
            of the way from the lower bound to the peak without recomputation.
        first_step: Fraction of the bytes above the lower bound by which the smallest peak is lowered at first.
        first_step_large: The same for large problems.
        widest_step: Largest such fraction.
        last_step: The search for the smallest budget ends when the fraction falls below this.
        widening: Factor on the fraction after a success. It is halved after a failure.
        step_share: Fraction of effort that each lowering may take.
    """

    large: int = 2_000
    huge: int = 10_000
    huge_initial: int = 2
    few: int = 1_000
    greedy: tuple[GreedyOptions, ...] = (GreedyOptions(bulk=True), GreedyOptions())
    first_work: int = 500
    plain_work: int = 300_000
    plain_faster: float = 4.0
    greedy_charge: float = 0.5
    greedy_reordered: GreedyOptions = field(default_factory=GreedyOptions)
    greedy_until: float = 0.2
    greedy_patience: float = 2.0
    reordered_share: float = 0.3
    initial_share: float = 0.04
    repeats_share: float = 0.125
    probe: float = 0.02
    probe_left: float = 0.8
    reorder: float = 0.12
    shifts: float = 0.25
    explore: tuple[float, ...] = (0.15, 0.3, 0.45)
    explore_again: tuple[float, ...] = (0.3, 0.55, 0.8)
    again: float = 0.4
    smallest_work: int = 1_000
    smallest_targets: tuple[float, ...] = (0.4, 0.25)
    first_step: float = 0.03
    first_step_large: float = 0.5
    widest_step: float = 0.5
    last_step: float = 1e-4
    widening: float = 1.3
    step_share: float = 0.2


_PACE = 0.2
"""Part of the most work from which on the pace is looked at."""

Schedules = Sequence[tuple[int, ...]]


def search(
    problem: Problem,
    budget: int,
    *,
    effort: int = EFFORT,
    time_limit: float | None = None,
    progress: Callable[[Progress], None] | None = None,
    seed: int = 1,
    initial: Schedules = (),
    any_cost: bool = False,
) -> ScheduleFigures:
    """The cheapest schedule found whose memory is within the budget at every step.

    Where none was found, it is the one with the smallest peak found, which is the same for every budget: a budget of 0
    asks for that one. The same arguments give the same schedule, unless the time limit ends the search.

    Args:
        problem: What to schedule.
        budget: Bytes for everything, `Problem.base` and workspace included.
        effort: How many changes of a schedule may be tried, some 10 µs each; fewer in large problems, where a change
            takes longer. The first greedy schedule is finished in any case.
        time_limit: Seconds after which nothing is improved and no smaller budget is looked for, likewise.
        progress: Called whenever a part of the search finds a better schedule.
        seed: Of the random numbers.
        initial: Schedules to start from as well, where the greedy algorithm gets further from them than from the
            given order.
        any_cost: The first schedule found within the budget will do.
    """
    once = ScheduleFigures.of(problem, problem.schedule)
    if once.peak <= budget:
        return once
    lowering = any_cost or budget < problem.lower_bound
    searching = PortfolioSearch(problem, Effort(effort, time_limit, progress, lowering=lowering), seed, initial)
    return searching.smallest(budget) if lowering else searching.cheapest(budget)


class SearchPoint(NamedTuple):
    """A schedule in a search for one budget. The smaller is the better.

    Attributes:
        excess: Bytes above the budget, summed over all steps.
        cost: Sum over all steps.
        schedule: Node ids.
    """

    excess: int
    cost: float
    schedule: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PortfolioSearch:
    """One search, which ends when its effort is spent.

    Attributes:
        problem: What to schedule.
        effort: What may be spent.
        seed: Of the random numbers.
        initial: Schedules to start from, beside the given order.
        tuning: Constants.
    """

    problem: Problem
    effort: Effort
    seed: int = 1
    initial: Schedules = ()
    tuning: Tuning = field(default_factory=Tuning)

    def cheapest(self, budget: int) -> ScheduleFigures:
        """The cheapest schedule found within the budget, or the one with the smallest peak if none was found."""
        self.effort.whole = 2 + self.tuning.again
        given = self._greedy_from_given(budget)
        starts = given[:1]
        order = self._better_order(budget) if given[0][:2] > (0, cost(self.problem, self.problem.schedule)) else None
        if order is not None:
            starts = sorted([given[0], self._greedy_from_order(order, budget)])
        annealing = self._annealing(order_matters=len(starts) > 1)
        most = self.tuning.huge_initial if self.problem.nodes > self.tuning.huge else None
        initial = (self._greedy_from(schedules, most, budget) for schedules in (self.initial, self._repeated(budget)))
        best_start = min([starts[0], *chain(*initial)])
        if best_start is not starts[0]:
            starts.append(best_start)
        best = self._explore(budget, starts, self.tuning.explore, annealing)
        if not best.excess:
            result = self._refined(budget, best)
            others = dict.fromkeys(point.schedule for point in sorted([*given, *starts]) if not point.excess)
            return replace(result, others=tuple(each for each in others if each != result.schedule))
        # As without any budget, so that every budget which a refusal names as feasible is feasible here too.
        least = replace(self, effort=self.effort.part(1.0, before=1.0, lowering=True)).smallest(budget)
        if least.peak > budget:
            return least
        again = replace(self, effort=self.effort.part(self.tuning.again, before=2.0))
        start = SearchPoint(0, least.cost, least.schedule)
        return again._refined(budget, again._explore(budget, [start], self.tuning.explore_again, self._annealing()))

    def smallest(self, enough: int = 0) -> ScheduleFigures:
        """The schedule with the smallest peak found, or the first one found whose peak is at most ``enough`` bytes.

        It is the same whatever a node costs. Costs may be measured, and others each time: a budget that was once named
        as the smallest must be held the next time, too.
        """
        limit = min(self.effort.limit, self.tuning.smallest_work * self.problem.nodes)
        weighed = replace(self, problem=weighed_by_bytes(self.problem), effort=replace(self.effort, limit=limit))
        return ScheduleFigures.of(self.problem, weighed._smallest(enough).schedule)

    def _smallest(self, enough: int) -> ScheduleFigures:
        once = ScheduleFigures.of(self.problem, self.problem.schedule)
        reordered = list(self._reordered(once))
        if self.initial:
            given = self.initial
        else:  # what the first greedy variant makes of the given order until it gets no further; it is not charged
            given = (self._until_hopeless(self._far_below(once)[0], self.tuning.greedy[0], self._first_work).schedule,)
        best = min([once, *reordered, *(ScheduleFigures.of(self.problem, each) for each in given)], key=_peak_then_cost)
        starts = [best] if best is once or self.problem.nodes > self.tuning.large else [once, best]
        annealing = self._annealing(order_matters=bool(reordered))
        timeline = Timeline(self.problem)
        begin = self.effort.spent(timeline)
        for turn, start in enumerate(starts):
            if best.peak > enough:
                timeline.load(start.schedule)
                until = begin + (1 - begin) * (turn + 1) / len(starts)
                best = min(best, self._descend(timeline, start, enough, until, annealing), key=_peak_then_cost)
        return best

    def _greedy_from_given(self, budget: int) -> list[SearchPoint]:
        """What the variants of the greedy algorithm make of the given order, the best first."""
        tuning, timeline = self.tuning, Timeline(self.problem)
        first, *others = tuning.greedy[: 1 if self.problem.nodes > tuning.large else None]
        points = [self._greedy(timeline, budget, first, _hopeless(timeline, budget, self._first_work))]
        once = cost(self.problem, self.problem.schedule)
        for options in others:
            best = min(points)
            if best[:2] <= (0, once):
                return [best]
            limit = math.inf if best.excess else once + tuning.greedy_patience * (best.cost - once)
            timeline.load(self.problem.schedule)
            options = replace(options, cost_limit=limit)
            points.append(
                self._greedy(timeline, budget, options, lambda: self.effort.spent(timeline) > tuning.greedy_until)
            )
        self.effort.charge(timeline, tuning.greedy_charge)
        most = tuning.plain_work * min(1.0, tuning.large / self.problem.nodes)
        return sorted([*points, self._until_hopeless(budget, GreedyOptions(plain=True), most)])  # not charged

    def _until_hopeless(self, budget: int, options: GreedyOptions, most: float) -> SearchPoint:
        """What a variant makes of the given order with so many changes, as long as its pace leaves hope and time."""
        timeline = Timeline(self.problem)
        hopeless = _hopeless(timeline, budget, most, self.tuning.plain_faster)
        return self._greedy(timeline, budget, options, lambda: hopeless() or self.effort.is_late)

    @property
    def _first_work(self) -> int:
        """Changes that the first variant may try."""
        return self.tuning.first_work * max(self.tuning.few, self.problem.nodes)

    def _greedy_from_order(self, order: tuple[int, ...], budget: int) -> SearchPoint:
        """The greedy schedule of another order."""
        timeline = Timeline(self.problem, order)
        stop = self.effort.spent(timeline) + self.tuning.reordered_share
        options = self.tuning.greedy_reordered
        point = self._greedy(timeline, budget, options, lambda: self.effort.spent(timeline) > stop)
        self.effort.charge(timeline)
        return point

    def _repeated(self, budget: int) -> Schedules:
        """Schedules in which what few blocks recompute is recomputed in all that are alike."""
        tuning, problem = self.tuning, self.problem
        if problem.nodes <= tuning.large or all(problem.forward):
            return ()
        effort = Effort(self.effort.limit * tuning.repeats_share)

        def solve(contracted: Problem, target: int) -> tuple[int, ...]:
            return PortfolioSearch(contracted, replace(effort), self.seed, tuning=tuning).cheapest(target).schedule

        return broadcast(problem, budget, solve)

    def _greedy_from(self, schedules: Schedules, most: int | None, budget: int) -> Iterator[SearchPoint]:
        """What the greedy algorithm makes of so many of these, which may be above the budget or far below it."""
        timeline = Timeline(self.problem)
        points = [
            SearchPoint(
                sum(max(0, step - budget) for step in memory(self.problem, each)), cost(self.problem, each), each
            )
            for each in dict.fromkeys(schedules)
        ]
        for start in sorted(points)[:most]:
            timeline.load(start.schedule)
            share = self.effort.portion(timeline, self.tuning.initial_share)

            def ended(share: Callable[[], float] = share) -> bool:
                return share() >= 1

            yield self._greedy(timeline, budget, self.tuning.greedy[0], ended)

    def _greedy(
        self, timeline: Timeline, budget: int, options: GreedyOptions, expired: Callable[[], bool]
    ) -> SearchPoint:
        """Recompute until the timeline is within the budget, then remove what is redundant."""
        timeline.first_runs_move = not options.plain
        while True:
            try:
                fits = fit_budget(timeline, budget, options, expired)
                break
            except CrowdedError:
                timeline.load(timeline.schedule())
        timeline.first_runs_move = True
        if fits:
            remove_redundant(timeline, budget, expired)
        point = SearchPoint(excess(timeline, budget), timeline.cost, timeline.schedule())
        self.effort.report_progress(timeline, point.excess, point.cost)
        return point

    def _better_order(self, budget: int) -> tuple[int, ...] | None:
        """An evaluation order with much less excess than the given one, or None where a short probe finds none."""
        if self.problem.nodes > self.tuning.large:
            return None
        for turn, share in enumerate((self.tuning.probe, self.tuning.reorder)):
            timeline = Timeline(self.problem)
            if self.effort.spent(timeline) >= 1:
                break
            before = excess(timeline, budget)
            left = reorder(timeline, budget, self.seed + turn, self.effort.portion(timeline, share))
            self.effort.charge(timeline)
            if turn or not left:
                return timeline.schedule()
            if left > before * self.tuning.probe_left:
                break
        return None

    def _annealing(self, order_matters: bool = False) -> Annealing:
        """Settings of the neighbourhood search."""
        if self.problem.nodes > self.tuning.large:
            return Annealing(self.seed, bulk=1.0)
        return Annealing(self.seed, shifts=self.tuning.shifts if order_matters else 0.0)

    def _explore(
        self, budget: int, starts: Sequence[SearchPoint], ends: Sequence[float], annealing: Annealing
    ) -> SearchPoint:
        """The best of several neighbourhood searches, which start from these points in turn.

        Args:
            budget: Bytes.
            starts: Where to start.
            ends: For each search the fraction of the remaining effort at which it ends.
            annealing: Settings. Each search has a seed of its own.
        """
        best = starts[0]
        timeline = Timeline(self.problem, best.schedule)
        self.effort.report_progress(timeline, best.excess, best.cost)
        once = cost(self.problem, self.problem.schedule)
        before = self.effort.spent(timeline)
        for turn, end in enumerate(ends):
            if turn:
                timeline.load(starts[turn % len(starts)].schedule)
            until, spent = before + (1 - before) * end, self.effort.spent(timeline)
            portion = self.effort.portion(timeline, until - spent, until)

            def done(portion: Callable[[], float] = portion) -> float:
                return 1.0 if timeline.cost <= once and not excess(timeline, budget) else portion()

            seeded = replace(annealing, seed=annealing.seed + turn)
            energy = improve(
                timeline, budget, seeded, done, lambda energy: self.effort.report_progress(timeline, *energy)
            )
            best = min(best, SearchPoint(*energy, timeline.schedule()))
            if best[:2] <= (0, once) or (best.excess and turn + 1 >= len(starts)):
                break
        self.effort.charge(timeline)
        return best

    def _refined(self, budget: int, start: SearchPoint) -> ScheduleFigures:
        """The best schedule of a last neighbourhood search, which takes the effort that is left."""
        annealing = self._annealing()
        last = replace(annealing, seed=annealing.seed + len(self.tuning.explore) + 1)
        return ScheduleFigures.of(self.problem, self._explore(budget, [start], (1.0,), last).schedule)

    def _far_below(self, once: ScheduleFigures) -> list[int]:
        """Budgets far below the peak without recomputation."""
        low = self.problem.lower_bound
        return [low + int((once.peak - low) * part) for part in self.tuning.smallest_targets]

    def _reordered(self, once: ScheduleFigures) -> Iterator[ScheduleFigures]:
        """Greedy schedules, of other evaluation orders, for budgets far below the peak without recomputation."""
        for target in self._far_below(once):
            order = self._better_order(target)
            if order is not None:
                yield ScheduleFigures.of(self.problem, self._greedy_from_order(order, target).schedule)

    def _descend(
        self, timeline: Timeline, start: ScheduleFigures, enough: int, until: float, annealing: Annealing
    ) -> ScheduleFigures:
        """Lower the peak of the timeline, which is at ``start``, until it is ``enough`` or the effort is spent."""
        tuning, best, low = self.tuning, start, self.problem.lower_bound
        step = tuning.first_step_large if self.problem.nodes > tuning.large else tuning.first_step
        while best.peak > max(enough, low) and self.effort.spent(timeline) < until and step > tuning.last_step:
            target = best.peak - max(1, int((best.peak - low) * step))
            share = self.effort.portion(timeline, tuning.step_share)

            def done(share: Callable[[], float] = share, target: int = target) -> float:
                return max(share(), float(int(timeline.memory.max()) <= target))

            improve(timeline, target, annealing, done, lambda energy: self.effort.report_progress(timeline, *energy))
            result = ScheduleFigures.of(self.problem, timeline.schedule())
            step = min(tuning.widest_step, step * tuning.widening) if result.peak <= target else step / 2
            best = min(best, result, key=_peak_then_cost)
        return best


def _hopeless(timeline: Timeline, budget: int, most: float, faster: float = 1.0) -> Callable[[], bool]:
    """Whether so many changes of a timeline are made, or its excess won't be gone by then.

    It won't if it falls too slowly, were it so many times as fast as until now.
    """
    before = excess(timeline, budget)

    def ended() -> bool:
        work = timeline.work
        if work < _PACE * most:
            return False
        left = excess(timeline, budget)
        return work > most or work * left > faster * (most - work) * (before - left)

    return ended


def _peak_then_cost(result: ScheduleFigures) -> tuple[int, float]:
    return result.peak, result.cost
