"""A better order of the nodes before anything is recomputed: simulated annealing on a timeline.

Kirkpatrick et al. 1983; a move runs one node earlier or later, between what it reads and its first reader, and what is
minimized is the bytes above the budget, summed over the steps. Graphs with many edges that cross (other than those of
networks, whose files are in a good order) lose a quarter of their peak by that.
"""

import math
import random
from collections.abc import Callable

from memonger.remat.greedy import excess
from memonger.remat.neighbourhood import move
from memonger.remat.timeline import CrowdedError, Timeline

_HOT, _COLD = 0.01, 0.0002
"""Temperatures at the beginning and the end, as parts of the excess at the beginning."""
_LONG = 2000
"""Changes after which the journal is forgotten."""


def reorder(timeline: Timeline, budget: int, seed: int, done: Callable[[], float]) -> int:
    """Move nodes until the budget holds or the effort is spent; the timeline ends at the best order.

    Args:
        timeline: Changed.
        budget: Bytes.
        seed: Of the random numbers.
        done: Which part of the effort is spent; it ends at 1.

    Returns:
        Bytes above the budget, summed over all steps.
    """
    rng = random.Random(seed)
    current = best = first = excess(timeline, budget)
    kept = timeline.schedule()
    while best and (spent := done()) < 1:
        mark = len(timeline.journal)
        if mark > _LONG:
            timeline.journal.clear()
            mark = 0
        timeline.work += 1
        try:
            moved = move(timeline, rng)
        except CrowdedError:
            timeline.load(timeline.schedule())
            continue
        if not moved:
            continue
        found = excess(timeline, budget)
        heat = first * _HOT * (_COLD / _HOT) ** spent
        if found <= current or rng.random() < math.exp((current - found) / heat):
            current = found
            if found < best:
                best, kept = found, timeline.schedule()
        else:
            timeline.rollback(mark)
    timeline.load(kept)
    return best
