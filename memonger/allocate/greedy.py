"""The classic greedy allocators: take buffers in a fixed order, put each into a gap between those placed before.

Greedy by size with best fit is Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference" (2020),
algorithm 3, and what TensorFlow Lite and XLA's heap simulator do in the main; by start with first fit is what a runtime
without a plan does.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from memonger.allocate.orders import ORDERS
from memonger.allocate.rows import Ints, Rows
from memonger.allocate.types import Buffer, Layout

Fit = Literal["best", "first"]


def greedy(buffers: Sequence[Buffer], order: str = "size", fit: Fit = "best") -> Layout:
    """Lay buffers out one by one in an order from ``ORDERS``, each into the smallest or the lowest gap that holds it.

    A buffer that fits no gap goes on top of its neighbours. O(n) memory. Time: n sorts of the offsets of the buffers
    that overlap the one placed.

    Raises:
        LayoutError: The problem is malformed (see ``validate``).
    """
    if not buffers:
        return Layout((), 0)
    rows = Rows.of(buffers)
    return rows.layout(place_in_order(rows, ORDERS[order](rows), fit))


def place_in_order(rows: Rows, order: NDArray[np.intp], fit: Fit) -> Ints:
    """Offsets in bytes for each row, taken in this order."""
    offsets, ends = np.full(len(rows), -1, dtype=np.int64), np.full(len(rows), -1, dtype=np.int64)
    size, alignment, occupied = rows.size.tolist(), rows.alignment.tolist(), rows.occupied()
    for row in order.tolist():
        below, above = _neighbours(rows, row, offsets, ends)
        if alignment[row] > rows.unit:
            above = (above + alignment[row] - 1) & -alignment[row]
        offset = _choose_gap(above, below, size[row], fit)
        offsets[row], ends[row] = offset, offset + occupied[row]
    return offsets


def _neighbours(rows: Rows, row: int, offsets: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Offsets, and ends, of the placed buffers alive together with this one, each sorted by itself."""
    begin = rows.start[row]
    windows = [slice(first[row], last[row]) for first, last in rows.windows]
    chosen = [(rows.stop[window] > begin) & (ends[window] > 0) for window in windows]
    below = np.concatenate([offsets[window][mask] for window, mask in zip(windows, chosen, strict=True)])
    above = np.concatenate([ends[window][mask] for window, mask in zip(windows, chosen, strict=True)])
    below.sort()
    above.sort()
    return below, above


def _choose_gap(above: Ints, below: Ints, size: int, fit: Fit) -> int:
    """Where the smallest (best) or lowest (first) gap of at least ``size`` bytes begins; else the top.

    The gap below the (k+1)-th offset begins at the k-th end, where both are sorted independently: there is a gap
    exactly if the k buffers that begin lower have all ended, and if there is none the k-th end lies above the (k+1)-th
    offset, which gives a negative width.
    """
    if not len(below):
        return 0
    floor = np.concatenate((np.zeros(1, dtype=np.int64), above))
    width = below - floor[:-1]
    fits = np.flatnonzero(width >= size)
    if not len(fits):
        return int(floor[-1])
    return int(floor[fits[0] if fit == "first" else fits[width[fits].argmin()]])
