"""A better evaluation order before anything is recomputed, by simulated annealing (Kirkpatrick et al. 1983).

A change runs one node earlier or later, between the producers of its inputs and its first reader. The bytes above the
budget, summed over the steps, are minimized. Random graphs with many crossing edges lose a quarter of their peak by
this; the files of most networks are in a good order already.
"""

import math
import random
from collections.abc import Callable

from memonger.schedule.greedy import excess
from memonger.schedule.neighbourhood import move
from memonger.schedule.timeline import CrowdedError, Timeline

_HOT, _COLD = 0.01, 0.0002
"""Temperatures at the beginning and the end, as fractions of the excess at the beginning."""


def reorder(timeline: Timeline, budget: int, seed: int, done: Callable[[], float]) -> int:
    """Move nodes until the timeline is within the budget or the effort is spent, and leave it at the best order.

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
