"""Lowest-offset-first: fill the arena from one end, always where the floor is lowest.

Lay out next the buffer whose lowest feasible offset is smallest, break ties by rank, and raise the lowest feasible
offset of every buffer alive at the same time above it. So the floor rises evenly over all steps, as in the skyline
heuristics for strip packing (Burke, Kendall and Whitwell, "A new placement heuristic for the orthogonal stock-cutting
problem", 2004), with time for the strip's width; buffers can't move in time, which makes "best fit" the rank alone.
A gap that was once built over is never filled.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from memonger.allocation.buffers import Buffer, Layout
from memonger.allocation.columns import Ints
from memonger.allocation.orders import ORDERS
from memonger.allocation.rows import SortedBuffers

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
            raised = _aligned(rows, window, depth + occupied[row]) * count + rank[window]
            np.maximum(key[window], raised, out=key[window], where=rows.stop[window] > start[row])
    return depths


def _aligned(rows: SortedBuffers, window: slice, depth: int) -> Ints | int:
    """The least depth from ``depth`` on, a multiple of ``unit``, that suits each row's alignment."""
    if rows.uniform:
        return depth
    alignment = rows.alignment[window]
    return (depth + alignment - 1) & -alignment
