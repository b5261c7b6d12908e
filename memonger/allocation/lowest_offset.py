"""Lowest-offset-first: fill the arena from one end, always where the floor is lowest.

Lay out next the buffer whose lowest feasible offset is smallest, break ties by rank, and raise the lowest feasible
offset of every buffer alive at the same time above it. So the floor rises evenly over all steps, as in the skyline
heuristics for strip packing (Burke, Kendall and Whitwell, "A new placement heuristic for the orthogonal stock-cutting
problem", 2004), with time for the strip's width; buffers can't move in time, which makes "best fit" the rank alone.
A gap that was once built over is never filled.

Ranks come from `ORDERS`, each a permutation of rows, first considered first. A duration is counted in steps at which
some buffer starts or stops, so the scale of time doesn't matter. Ties are broken by size, alignment and duration (large
first), then start and the caller's order: never by id.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from memonger.allocation.buffers import Buffer, Layout
from memonger.allocation.lower_bound import Ints
from memonger.allocation.rows import SortedBuffers

Order = Callable[[SortedBuffers], NDArray[np.intp]]


def _sorted_by(rows: SortedBuffers, *keys: NDArray[np.generic]) -> NDArray[np.intp]:
    """Rows sorted by these keys, the most significant first, and then by the common tie-breaks."""
    return np.lexsort((rows.source, rows.start, rows.start - rows.stop, -rows.alignment, -rows.size, *reversed(keys)))


def _overlaps(rows: SortedBuffers) -> NDArray[np.intp]:
    """How many buffers begin before each ends, less those that have ended before it begins."""
    begun = np.searchsorted(np.sort(rows.start), rows.stop, side="left")
    return begun - np.searchsorted(np.sort(rows.stop), rows.start, side="right")


ORDERS: Mapping[str, Order] = MappingProxyType(
    {
        "size": _sorted_by,
        "area": lambda rows: _sorted_by(rows, rows.size.astype(np.float64) * (rows.start - rows.stop)),
        "duration": lambda rows: _sorted_by(rows, rows.start - rows.stop),
        "start": lambda rows: _sorted_by(rows, rows.start),
        "conflict": lambda rows: _sorted_by(rows, -_overlaps(rows)),
    }
)
"""Largest first; largest product of bytes and duration; longest-lived; earliest, as a runtime without a plan would
allocate; those that overlap the most others."""


_LAID_OUT = np.iinfo(np.int64).max
"""Key of a buffer that is laid out already."""


def lowest_offset_first(buffers: Sequence[Buffer], order: str = "area") -> Layout:
    """Lay buffers out lowest offset first, ties broken by an order from ``ORDERS``.

    Takes O(n) memory, and n vector operations on the buffers that can overlap one.

    Raises:
        LayoutError: The problem is malformed (see ``validate``).
    """
    if not buffers:
        return Layout((), 0)
    rows = SortedBuffers.of(buffers)
    return rows.layout(depths_of(rows, ORDERS[order](rows)))


def depths_of(rows: SortedBuffers, order: NDArray[np.intp]) -> Ints:
    """Depths by row, laid out lowest offset first, ties broken by ``order``.

    The next buffer is the argmin of one column: depth × n + rank, a single integer that compares by depth, then rank.
    """
    count = len(rows)
    rank = np.empty(count, dtype=np.int64)
    rank[order] = np.arange(count)
    key, depths = rows.floor * count + rank, np.empty(count, dtype=np.int64)
    start, occupied = rows.start.tolist(), rows.occupied.tolist()
    for _ in range(count):
        row = int(key.argmin())
        depth = depths[row] = int(key[row]) // count
        key[row] = _LAID_OUT
        for first, last in rows.windows:
            window = slice(first[row], last[row])
            free: Ints | int = depth + occupied[row]
            if not rows.uniform:  # up to what suits each row's alignment
                free = (free + rows.alignment[window] - 1) & -rows.alignment[window]
            raised = free * count + rank[window]
            np.maximum(key[window], raised, out=key[window], where=rows.stop[window] > start[row])
    return depths


_ORDERS = ("conflict", "area", "size", "start")

_ROUNDS = 200
"""Most layouts, which of some hundred buffers take a millisecond each."""

_HIGHEST = 0.05
"""Share of the buffers that is blamed at most: with more, blame says less."""


def relaid(buffers: Sequence[Buffer], layout: Layout, goal: int, placements: int) -> Layout:
    """Lowest-offset-first again and again, with what came out too high laid out earlier the next time.

    Joslin and Clements, "Squeaky wheel optimization" (1999): a plain algorithm lays everything out by a rank, what
    squeaks in the result is blamed, and blame raises the rank. Here what squeaks are buffers that end above the goal,
    of many the highest `_HIGHEST`. Blame is never forgiven; each order has its own, and the orders take turns.

    Args:
        buffers: At least one.
        layout: Where they lie so far.
        goal: Bytes.
        placements: How many buffers may be laid out in all, each counted as often as it is.

    Returns: the smallest layout that is found, or the first of at most ``goal`` bytes; never larger than ``layout``.
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
