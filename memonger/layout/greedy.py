"""The classic greedy allocators: lay out buffers in a fixed order, each in a gap between those laid out before.

Greedy by size with best fit is Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference" (2020),
algorithm 3, and what TensorFlow Lite and XLA's heap simulator do in the main; by start with first fit is what a runtime
without a plan does.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from memonger.layout.buffers import Buffer, Layout
from memonger.layout.columns import Ints
from memonger.layout.lower_bound import lower_bound
from memonger.layout.orders import ORDERS
from memonger.layout.rows import Rows

Fit = Literal["best", "first", "ends"]


def greedy(buffers: Sequence[Buffer], order: str = "size", fit: Fit = "best") -> Layout:
    """Lay buffers out one by one in an order from ``ORDERS``, each into a gap that holds it.

    The fit says into which: the smallest (``best``), the lowest (``first``), or where it comes nearest to either end of
    an arena as large as the lower bound (``ends``). The last keeps what stays free in one piece in the middle: of a
    chain of long-lived buffers, each overlapping the next, every other one lies at the same end, and the short-lived
    ones between them.

    A buffer that fits no gap goes on top of its neighbours. Takes O(n) memory, and the time of n sorts of the offsets
    of the buffers that overlap one.

    Raises:
        LayoutError: The problem is malformed (see ``validate``).
    """
    if not buffers:
        return Layout((), 0)
    rows = Rows.of(buffers)
    capacity = -(-lower_bound(buffers) // rows.unit) * rows.unit if fit == "ends" else None
    return rows.layout(_depths(rows, ORDERS[order](rows), fit, capacity))


def _depths(rows: Rows, order: NDArray[np.intp], fit: Fit, capacity: int | None) -> Ints:
    """Depths in bytes by row, for rows laid out in this order."""
    depths, ends = np.zeros(len(rows), dtype=np.int64), np.zeros(len(rows), dtype=np.int64)
    alignment, occupied = rows.alignment.tolist(), rows.occupied.tolist()
    for row in order.tolist():
        below, above = _neighbours(rows, row, depths, ends)
        floors = np.concatenate((np.zeros(1, dtype=np.int64), above))
        if not rows.uniform:
            floors = (floors + alignment[row] - 1) & -alignment[row]
        if capacity is not None:
            depths[row] = _nearest_to_an_end(floors, below, occupied[row], alignment[row], capacity)
        else:
            depths[row] = _choose_gap(floors, below, occupied[row], fit)
        ends[row] = depths[row] + occupied[row]
    return depths


def _neighbours(rows: Rows, row: int, depths: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Depths and ends of the buffers laid out already that overlap this one, each list sorted by itself."""
    begin = rows.start[row]
    windows = [slice(first[row], last[row]) for first, last in rows.windows]
    chosen = [(rows.stop[window] > begin) & (ends[window] > 0) for window in windows]
    below = np.concatenate([depths[window][mask] for window, mask in zip(windows, chosen, strict=True)])
    above = np.concatenate([ends[window][mask] for window, mask in zip(windows, chosen, strict=True)])
    below.sort()
    above.sort()
    return below, above


def _nearest_to_an_end(floors: Ints, below: Ints, occupied: int, alignment: int, capacity: int) -> int:
    """Where in the gaps of an arena of ``capacity`` bytes a buffer comes nearest to one of its ends; else the top."""
    ceilings = np.concatenate((below, np.full(1, capacity, dtype=np.int64)))
    fits = ceilings - floors >= occupied
    if not fits.any():
        return int(floors[-1])
    lowest = floors[fits]
    highest = np.maximum((ceilings[fits] - occupied) & -alignment, lowest)
    depths = np.concatenate((lowest, highest))
    return int(depths[np.minimum(depths, capacity - occupied - depths).argmin()])


def _choose_gap(floors: Ints, below: Ints, occupied: int, fit: Fit) -> int:
    """Where the smallest (best) or lowest (first) gap of at least ``occupied`` bytes begins; else the top.

    ``floors`` are the ground and the sorted ends. The gap below the k-th depth begins at the k-th floor, although
    depths and ends are sorted independently: there is a gap exactly if the buffers that begin lower have all ended, and
    if there is none the k-th floor lies above the k-th depth, which gives a negative width.
    """
    width = below - floors[:-1]
    fits = np.flatnonzero(width >= occupied)
    if not len(fits):
        return int(floors[-1])
    return int(floors[fits[0] if fit == "first" else fits[width[fits].argmin()]])
