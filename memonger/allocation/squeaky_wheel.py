"""Lowest-offset-first again and again, with what came out too high laid out earlier the next time.

Joslin and Clements, "Squeaky wheel optimization" (1999): a plain algorithm lays everything out by a rank, what squeaks
in the result is blamed, and blame raises the rank. Here what squeaks are buffers that end above the goal, of many the
highest `_HIGHEST`. Blame is never forgiven; each order has its own, and the orders take turns.
"""

from collections.abc import Sequence

import numpy as np

from memonger.allocation.buffers import Buffer, Layout
from memonger.allocation.lowest_offset import depths_of
from memonger.allocation.orders import ORDERS
from memonger.allocation.rows import SortedBuffers

_ORDERS = ("conflict", "area", "size", "start")

_ROUNDS = 200
"""Most layouts, which of some hundred buffers take a millisecond each."""

_HIGHEST = 0.05
"""Share of the buffers that is blamed at most: with more, blame says less."""


def relaid(buffers: Sequence[Buffer], layout: Layout, goal: int, placements: int) -> Layout:
    """The smallest layout that is found, or the first of at most ``goal`` bytes; never larger than ``layout``.

    Args:
        buffers: At least one.
        layout: Where they lie so far.
        goal: Bytes.
        placements: How many buffers may be laid out in all, each counted as often as it is.
    """
    rows = SortedBuffers.of(buffers)
    ranks, blames = [np.argsort(ORDERS[name](rows)) for name in _ORDERS], np.zeros((len(_ORDERS), len(rows)), np.int64)
    for number in range(min(_ROUNDS, placements // len(rows))):
        rank, blame = ranks[number % len(_ORDERS)], blames[number % len(_ORDERS)]
        depths = depths_of(rows, np.lexsort((rank, -blame)))
        layout = min(layout, rows.layout(depths), key=lambda each: each.size)
        if layout.size <= goal:
            break
        ends = depths + rows.occupied
        blame += ends > max(goal, np.quantile(ends, 1 - _HIGHEST))
    return layout
