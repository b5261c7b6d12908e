"""Large-neighbourhood search on a timeline: take something out, repair it greedily with perturbed scores, tidy.

Shaw 1998; accepted as in simulated annealing. What is taken out: recomputations next to each other, or here and there,
or all of one node; or nothing, and a recomputation nobody asked for is put in, or a node is moved, for another basin.
While the budget doesn't hold, bytes above it are what is minimized.
"""

import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from memonger.remat import greedy
from memonger.remat.greedy import Relief
from memonger.remat.timeline import CrowdedError, Timeline


@dataclass(frozen=True, slots=True)
class Annealing:
    """Settings of `improve`.

    Attributes:
        seed: Of the random numbers.
        warmth: Accepts plans that are worse by this fraction of what recomputation costs, at first; in the end none.
        noise: Standard deviation of the logarithm of the factor on greedy scores.
        most: Recomputations taken out at once.
        many: How often `Relief.many` repairs.
        patience: A repair gives up when recomputation costs this many times what it did before.
        shifts: How often, while the budget doesn't hold, nodes are only moved.
    """

    seed: int = 1
    warmth: float = 0.02
    noise: float = 0.25
    most: int = 20
    many: float = 0.3
    patience: float = 2.0
    shifts: float = 0.0


_SHIFTS = 20
"""Moves of nodes in a row."""

Energy = tuple[int, float]
"""Bytes above the budget summed over the steps, then the cost."""


def improve(
    timeline: Timeline,
    budget: int,
    annealing: Annealing,
    done: Callable[[], float],
    seen: Callable[[Energy], None],
) -> Energy:
    """Improve the timeline, and leave it at the best that was found.

    Args:
        timeline: Changed.
        budget: Bytes.
        annealing: Settings.
        done: Which part of the effort is spent; it ends at 1.
        seen: Called with every better one.
    """
    rng = random.Random(annealing.seed)
    current = best = (greedy.excess(timeline, budget), timeline.cost)
    kept = timeline.schedule()
    least = math.fsum(timeline.problem.costs)
    while (spent := done()) < 1:
        mark = len(timeline.journal)
        timeline.work += 5 + len(timeline.sizes) // 20
        try:
            if current[0] and rng.random() < annealing.shifts:
                found = _shift(timeline, budget, rng, current)
            else:
                _destroy(timeline, rng, annealing)
                found = _repair(timeline, budget, rng, annealing, current, least, done)
        except CrowdedError:
            timeline.rollback(mark)
            timeline.load(timeline.schedule())
            continue
        slack = annealing.warmth * (1 - spent) * -math.log(1 - rng.random())
        if _accepted(found, current, slack, least):
            current = found
            if found < best:
                best, kept = found, timeline.schedule()
                seen(best)
        else:
            timeline.rollback(mark)
    timeline.load(kept)
    return best


def _shift(timeline: Timeline, budget: int, rng: random.Random, current: Energy) -> Energy:
    """Move nodes one after the other, each only if that adds no bytes above the budget."""
    above = current[0]
    for _ in range(_SHIFTS):
        mark = len(timeline.journal)
        timeline.work += 1
        if move(timeline, rng):
            found = greedy.excess(timeline, budget)
            if found > above:
                timeline.rollback(mark)
            else:
                above = found
    return above, timeline.cost


def _accepted(found: Energy, current: Energy, slack: float, least: float) -> bool:
    if found[0] or current[0]:
        return found[0] <= current[0] * (1 + slack)
    return found[1] <= current[1] + slack * (current[1] - least)


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
    relief = Relief(
        noise=lambda: math.exp(rng.gauss(0.0, spread)),
        step=None if rng.random() < 0.5 else lambda count: int(rng.random() * count),
        stop=math.inf if current[0] else least + (current[1] - least) * annealing.patience,
        many=rng.random() < annealing.many,
        chosen=8,
    )
    if greedy.relieve(timeline, budget, relief, lambda: done() >= 1):
        greedy.tidy(timeline, budget, lambda: done() >= 1)
    return greedy.excess(timeline, budget), timeline.cost


def _destroy(timeline: Timeline, rng: random.Random, annealing: Annealing) -> None:
    extra = sorted(label for copies in timeline.copies for label in copies[1:])
    kind = rng.random()
    if kind < 0.35 and extra:
        _neighbours(timeline, rng, extra, annealing.most)
    elif kind < 0.55 and extra:
        count = 1 + int(rng.random() * min(annealing.most, len(extra)))
        _withdraw(timeline, [extra[int(rng.random() * len(extra))] for _ in range(count)])
    elif kind < 0.8:
        _insert(timeline, rng)
    else:
        move(timeline, rng)


def _neighbours(timeline: Timeline, rng: random.Random, extra: list[int], most: int) -> None:
    first = int(rng.random() * len(extra))
    _withdraw(timeline, extra[first : first + 1 + int(rng.random() * most)])


def _withdraw(timeline: Timeline, labels: list[int]) -> None:
    for label in labels:
        node = timeline.node.get(label)
        if node is not None and timeline.copies[node][0] != label:
            greedy.withdraw(timeline, label)


def _insert(timeline: Timeline, rng: random.Random) -> None:
    """Compute a value again for one of its readers."""
    label = timeline.labels[int(rng.random() * len(timeline.labels))]
    found = [(value, stop) for value, _, stop in greedy.across(timeline, label)]
    found = [(v, s) for v, s in found if not timeline.fixed[timeline.problem.producer[v]]]
    if not found:
        return
    value, stop = found[int(rng.random() * len(found))]
    node = timeline.problem.producer[value]
    if stop <= timeline.limit(node):
        greedy.apply(timeline, (node, stop, -1), int(timeline.held.max()), keep=rng.random() < 0.5)


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
    new = timeline.between(labels[to], 1)[0]
    timeline.add(new, node)
    if new < label or timeline.unread(label):
        timeline.remove(label)
    return True
