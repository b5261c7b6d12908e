"""Lowest-offset-first: fill the arena from one end, always where the floor is lowest.

Place the unplaced buffer whose lowest feasible offset is smallest, break ties by rank, and raise the lowest feasible
offset of every buffer alive at the same time above it. So the floor rises evenly over all steps, as in the skyline
heuristics for strip packing (Burke, Kendall and Whitwell, "A new placement heuristic for the orthogonal stock-cutting
problem", 2004), with time for the strip's width; buffers can't move in time, which makes "best fit" the rank alone.
A gap that was once built over is never filled.

With one alignment for all, the arena is built upside down. What lies first then ends at the arena's last byte, and a
size that is no multiple of the alignment saves its slack there: only buffers with enough slack may lie first (see
``may_be_topmost``).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from memonger.allocate.lower_bound import may_be_topmost
from memonger.allocate.orders import ORDERS
from memonger.allocate.rows import Ints, Rows
from memonger.allocate.types import Buffer, Layout

_PLACED = np.iinfo(np.int64).max


def lowest_offset_first(buffers: Sequence[Buffer], order: str = "area") -> Layout:
    """Lay buffers out lowest offset first, ties broken by an order from ``ORDERS``.

    O(n) memory. Time: n vector operations over the buffers that can overlap the one placed.

    Raises:
        LayoutError: The problem is malformed (see ``validate``).
    """
    if not buffers:
        return Layout((), 0)
    rows = Rows.of(buffers)
    return layout_in_order(rows, ORDERS[order](rows), may_be_topmost(buffers)[rows.source])


def layout_in_order(rows: Rows, order: NDArray[np.intp], topmost: NDArray[np.bool_]) -> Layout:
    """The layout lowest offset first, ties broken by position in ``order``; ``topmost`` says which rows may be so."""
    if not rows.uniform:
        return rows.layout(place(rows, order, np.zeros(len(rows), dtype=np.int64)))
    depth = place(rows, order, np.where(topmost, 0, rows.unit))
    occupied = np.array(rows.occupied())
    return rows.layout((depth + occupied).max() - depth - occupied)


def place(rows: Rows, order: NDArray[np.intp], floor: Ints) -> Ints:
    """Offsets in bytes for each row, none below its ``floor``, ties broken by position in ``order``.

    The next buffer is the argmin of one column: offset × n + rank, a single integer that compares by offset, then rank.
    """
    count = len(rows)
    rank = np.empty(count, dtype=np.int64)
    rank[order] = np.arange(count)
    key, offsets = floor * count + rank, np.empty(count, dtype=np.int64)
    start, occupied = rows.start.tolist(), rows.occupied()
    for _ in range(count):
        row = int(key.argmin())
        offset = offsets[row] = int(key[row]) // count
        key[row] = _PLACED
        top = offset + occupied[row]
        for first, last in rows.windows:
            window = slice(first[row], last[row])
            overlapping = rows.stop[window] > start[row]
            raised = rows.raised(window, top) * count + rank[window]
            np.maximum(key[window], raised, out=key[window], where=overlapping)
    return offsets
