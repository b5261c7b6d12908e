"""Large-neighbourhood search on a timeline: remove something, repair the schedule greedily, remove what is redundant.

Shaw 1998, "Using constraint programming and local search methods to solve vehicle routing problems"; changes are
accepted as in simulated annealing. Removed are several recomputations in a row, or some at random places. Instead, a
recomputation may be added that nothing needs, or a node may move, to get out of a local minimum. While the timeline is
above the budget its excess is minimized, then the cost. Repairs perturb the scores of the greedy algorithm at random.
"""

import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from memonger.schedule import greedy
from memonger.schedule.greedy import GreedyOptions, excess
from memonger.schedule.timeline import CrowdedError, Timeline


@dataclass(frozen=True, slots=True)
class Annealing:
    """Settings of `improve`.

    Attributes:
        seed: Of the random numbers.
        temperature: Fraction of the cost of recomputation, at the beginning. A schedule that is worse by this much is
            accepted with probability 1/e. Falls linearly to 0.
        noise: Largest standard deviation of the logarithm of the random factor on greedy scores.
        removed: Most recomputations removed at once.
        bulk: Fraction of the repairs that make several moves at a step before they look again.
        patience: A repair gives up when recomputation costs this many times what it did before.
        shifts: Fraction of the turns above the budget in which nodes are only moved.
    """

    seed: int = 1
    temperature: float = 0.02
    noise: float = 0.25
    removed: int = 20
    bulk: float = 0.3
    patience: float = 2.0
    shifts: float = 0.0


_SHIFTS = 20
"""Attempts to move a node in one turn that only moves nodes."""

Energy = tuple[int, float]
"""Bytes above the budget, summed over the steps, then the cost. This is minimized."""


def improve(
    timeline: Timeline,
    budget: int,
    annealing: Annealing,
    done: Callable[[], float],
    report: Callable[[Energy], None],
) -> Energy:
    """Improve the timeline, and leave it at the best schedule of the search. Returns the energy of that.

    Args:
        timeline: Changed.
        budget: Bytes.
        annealing: Settings.
        done: Fraction of the effort that is spent. The search ends at 1.
        report: Called with the energy of every schedule better than all before.
    """
    rng = random.Random(annealing.seed)
    current = best = (greedy.excess(timeline, budget), timeline.cost)
    best_schedule = timeline.schedule()
    least = math.fsum(timeline.problem.costs)
    while (spent := done()) < 1:
        mark = timeline.mark()
        timeline.work += 5 + len(timeline.sizes) // 20
        try:
            if current[0] and rng.random() < annealing.shifts:
                energy = _shift(timeline, budget, rng, current)
            else:
                extra = sorted(label for copies in timeline.copies for label in copies[1:])
                kind = rng.random()
                if kind < 0.35 and extra:
                    first = int(rng.random() * len(extra))
                    _withdraw(timeline, extra[first : first + 1 + int(rng.random() * annealing.removed)])
                elif kind < 0.55 and extra:
                    count = 1 + int(rng.random() * min(annealing.removed, len(extra)))
                    _withdraw(timeline, [extra[int(rng.random() * len(extra))] for _ in range(count)])
                elif kind < 0.8:
                    _insert(timeline, rng)
                else:
                    move(timeline, rng)
                energy = _repair(timeline, budget, rng, annealing, current, least, done)
        except CrowdedError:
            timeline.rollback(mark)
            timeline.load(timeline.schedule())
            continue
        slack = annealing.temperature * (1 - spent) * -math.log(1 - rng.random())
        if _accepted(energy, current, slack, least):
            current = energy
            if energy < best:
                best, best_schedule = energy, timeline.schedule()
                report(best)
        else:
            timeline.rollback(mark)
    timeline.load(best_schedule)
    return best


def _shift(timeline: Timeline, budget: int, rng: random.Random, current: Energy) -> Energy:
    """Move nodes one after the other, each only if that adds no bytes above the budget."""
    above = current[0]
    for _ in range(_SHIFTS):
        mark = timeline.mark()
        timeline.work += 1
        if move(timeline, rng):
            after = greedy.excess(timeline, budget)
            if after > above:
                timeline.rollback(mark)
            else:
                above = after
    return above, timeline.cost


def _accepted(energy: Energy, current: Energy, slack: float, least: float) -> bool:
    if energy[0] or current[0]:
        return energy[0] <= current[0] * (1 + slack)
    return energy[1] <= current[1] + slack * (current[1] - least)


def _repair(
    timeline: Timeline,
    budget: int,
    rng: random.Random,
    annealing: Annealing,
    current: Energy,
    least: float,
    done: Callable[[], float],
) -> Energy:
    spread = annealing.noise * rng.random()
    options = GreedyOptions(
        noise=lambda: math.exp(rng.gauss(0.0, spread)),
        pick_step=None if rng.random() < 0.5 else lambda count: int(rng.random() * count),
        cost_limit=math.inf if current[0] else least + (current[1] - least) * annealing.patience,
        bulk=rng.random() < annealing.bulk,
        tried=8,
    )
    if greedy.fit_budget(timeline, budget, options, lambda: done() >= 1):
        greedy.remove_redundant(timeline, budget, lambda: done() >= 1)
    return greedy.excess(timeline, budget), timeline.cost


def _withdraw(timeline: Timeline, labels: list[int]) -> None:
    for label in labels:
        node = timeline.node.get(label)
        if node is not None and timeline.copies[node][0] != label:
            greedy.remove_recomputation(timeline, label)


def _insert(timeline: Timeline, rng: random.Random) -> None:
    """Compute a value again for one of its readers, at a random step."""
    label = timeline.labels[int(rng.random() * len(timeline.labels))]
    uses = [(value, stop) for value, _, stop in greedy.idle_values(timeline, label)]
    uses = [(v, s) for v, s in uses if not timeline.fixed[timeline.problem.producer[v]]]
    if not uses:
        return
    value, stop = uses[int(rng.random() * len(uses))]
    node = timeline.problem.producer[value]
    if stop <= timeline.limit(node):
        step = node, stop, -1
        greedy.apply(timeline, step, greedy.chain(timeline, step, int(timeline.memory.max()), rng.random() < 0.5))


def move(timeline: Timeline, rng: random.Random) -> bool:
    """Run a node earlier or later, between what it reads and its first reader; returns whether that changed anything.

    Raises:
        CrowdedError: there is no room at that place. Nothing has changed.
    """
    labels = timeline.labels
    at = int(rng.random() * len(labels))
    label = labels[at]
    node = timeline.node[label]
    if timeline.fixed[node] or (len(timeline.copies[node]) > 1 and timeline.copies[node][0] == label):
        return False
    first = max((timeline.source(value, label) for value in timeline.inputs[node]), default=label)
    stops = [timeline.limit(node), timeline.next_copy(node, label)]
    for value in timeline.problem.writes[node]:
        reads = timeline.reads[value]
        stops += reads[bisect_left(reads, label) :][:1]
    low, high = bisect_right(labels, first), min(bisect_left(labels, min(stops)), len(labels) - 1)
    if low >= high:
        return False
    to = low + int(rng.random() * (high - low + 1))
    if at <= to <= at + 1:
        return False
    (new,) = timeline.add(labels[to], [node])
    if new < label or timeline.unread(label):
        timeline.remove(label)
    return True


_HOT, _COLD = 0.01, 0.0002
"""Temperatures at the beginning and the end, as fractions of the excess at the beginning."""


def reorder(timeline: Timeline, budget: int, seed: int, done: Callable[[], float]) -> int:
    """Move nodes until the timeline is within the budget or the effort is spent, and leave it at the best order.

    A better evaluation order before anything is recomputed, by simulated annealing (Kirkpatrick et al. 1983). A change
    runs one node earlier or later, between the producers of its inputs and its first reader. Random graphs with many
    crossing edges lose a quarter of their peak by this; the files of most networks are in a good order already.

    Args:
        timeline: Changed.
        budget: Bytes.
        seed: Of the random numbers.
        done: Fraction of the effort that is spent. The search ends at 1.

    Returns:
        Bytes above the budget, summed over all steps.
    """
    rng = random.Random(seed)
    current = best = first = excess(timeline, budget)
    best_order = timeline.schedule()
    while best and (spent := done()) < 1:
        mark = timeline.mark()
        timeline.work += 1
        try:
            moved = move(timeline, rng)
        except CrowdedError:
            timeline.load(timeline.schedule())
            continue
        if not moved:
            continue
        after = excess(timeline, budget)
        temperature = first * _HOT * (_COLD / _HOT) ** spent
        if after <= current or rng.random() < math.exp((current - after) / temperature):
            current = after
            if after < best:
                best, best_order = after, timeline.schedule()
        else:
            timeline.rollback(mark)
    timeline.load(best_order)
    return best
