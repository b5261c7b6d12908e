"""Lowest-offset-first: fill the arena from one end, always where the floor is lowest.

Lay out next the buffer whose lowest feasible offset is smallest, break ties by rank, and raise the lowest feasible
offset of every buffer alive at the same time above it. So the floor rises evenly over all steps, as in the skyline
heuristics for strip packing (Burke, Kendall and Whitwell, "A new placement heuristic for the orthogonal stock-cutting
problem", 2004), with time for the strip's width; buffers can't move in time, which makes "best fit" the rank alone.
A gap that was once built over is never filled.

Ranks come from `ORDERS`, each a permutation of rows, first considered first. A duration is counted in steps at which
some buffer starts or stops, so the scale of time doesn't matter. Ties are broken by size, alignment and duration (large
first), then start and the caller's order: never by id.

Buffers sorted so that all that overlap one of them lie in one or two short windows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from memonger.allocation.buffers import Buffer, Layout
from memonger.allocation.lower_bound import Columns, Ints, may_be_topmost

Steps = NDArray[np.int32]
Window = tuple[list[int], list[int]]

_FIRST_PART_SIZES = (0, 64, 1024)
"""How many of the longest-lived buffers may form a part of their own."""

_PART_COST = 2048
"""Cost of one more window for each row, in comparisons of rows."""


@dataclass(frozen=True, slots=True, eq=False)
class SortedBuffers:
    """One row for each buffer. Rows are sorted by start within each part; columns are parallel arrays.

    A few buffers that live nearly throughout would stretch every window to the beginning, so the longest-lived ones may
    form a first part of their own: two windows for each row instead of one.

    Allocators compute *depths*. With one alignment for all, ``layout`` turns them upside down: what has depth 0 ends at
    the arena's last byte, where a size that is no multiple of the alignment saves its slack. With several alignments a
    depth is an offset.

    Attributes:
        source: Position of each row's buffer in the caller's sequence.
        size: Bytes.
        occupied: Bytes each row keeps others from using: its size, up to the next multiple of ``unit``.
        floor: The least depth, in bytes, with which a layout can be as small as the lower bound: 0, or ``unit`` where
            the slack doesn't suffice. An allocator that fills the arena evenly should respect it.
        start: Rank of the first step at which the bytes are in use, among all steps that occur.
        stop: Rank of the first step at which they are free again.
        alignment: Bytes.
        unit: The smallest alignment, in bytes: every depth is a multiple of it.
        uniform: Whether all alignments are equal.
        windows: For each part, the first row and the row after the last that can overlap row ``i``, as two lists.
            Within a window every row starts before row ``i`` stops, so it overlaps it exactly if it stops after row
            ``i`` starts.
    """

    source: NDArray[np.intp]
    size: Ints
    occupied: Ints
    floor: Ints
    start: Steps
    stop: Steps
    alignment: Ints
    unit: int
    uniform: bool
    windows: tuple[Window, ...]

    @classmethod
    def of(cls, buffers: Sequence[Buffer]) -> Self:
        """The rows of at least one buffer. Equal input gives equal rows, whatever the ids.

        Raises:
            LayoutError: The problem is malformed (see ``validate``).
        """
        columns = Columns.of(buffers)
        source, first_part = _order_and_parts(columns.start.astype(np.int32), columns.stop.astype(np.int32))
        start, stop = columns.start[source].astype(np.int32), columns.stop[source].astype(np.int32)
        uniform = bool((columns.alignment == columns.unit).all())
        kept_below = ~may_be_topmost(columns) if uniform else np.zeros(len(source), dtype=np.bool_)
        return cls(
            source=source,
            size=columns.size[source],
            occupied=(columns.size + columns.slack)[source],
            floor=np.where(kept_below[source], columns.unit, 0),
            start=start,
            stop=stop,
            alignment=columns.alignment[source],
            unit=columns.unit,
            uniform=uniform,
            windows=tuple(_window(start, stop, *part) for part in _parts(first_part, len(source))),
        )

    def __len__(self) -> int:
        return len(self.source)

    def layout(self, depths: Ints) -> Layout:
        """The layout with these depths, in bytes by row."""
        ends = depths + self.occupied
        offsets = ends.max() - ends if self.uniform else depths
        by_buffer = np.empty_like(offsets)
        by_buffer[self.source] = offsets
        return Layout(tuple(by_buffer.tolist()), int((offsets + self.size).max()))


def _order_and_parts(start: Steps, stop: Steps) -> tuple[NDArray[np.intp], int]:
    """The order of the rows, and how many of them form the first part, such that the windows are smallest."""
    by_start = np.lexsort((stop, start))
    rank = np.empty(len(start), dtype=np.intp)
    rank[np.lexsort((start, start - stop))] = np.arange(len(start))
    cheapest, best = -1, (by_start, 0)  # by the estimated time of going through all windows, in comparisons of rows
    for first_part in _FIRST_PART_SIZES:
        if first_part >= len(start):
            break
        long_lived = rank[by_start] < first_part
        source = np.concatenate((by_start[long_lived], by_start[~long_lived]))
        parts = _parts(first_part, len(start))
        bounds = [_bounds(start[source], stop[source], *part) for part in parts]
        cost = sum(int((last - first).sum()) for first, last in bounds) + len(parts) * _PART_COST * len(start)
        if cheapest < 0 or cost < cheapest:
            cheapest, best = cost, (source, first_part)
    return best


def _parts(first_part: int, count: int) -> tuple[tuple[int, int], ...]:
    return ((0, first_part), (first_part, count)) if first_part else ((0, count),)


def _bounds(start: Steps, stop: Steps, low: int, high: int) -> tuple[Ints, Ints]:
    latest_stop = np.maximum.accumulate(stop[low:high])
    first = low + np.searchsorted(latest_stop, start, side="right")
    last = low + np.searchsorted(start[low:high], stop, side="left")
    return first, np.maximum(first, last)


def _window(start: Steps, stop: Steps, low: int, high: int) -> Window:
    first, last = _bounds(start, stop, low, high)
    return first.tolist(), last.tolist()


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
