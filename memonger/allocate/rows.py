"""Buffers as numpy columns, sorted so that every buffer's overlapping neighbours lie in one or two short windows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from memonger.allocate.types import Buffer, Layout
from memonger.allocate.validation import validate

Ints = NDArray[np.int64]
Window = tuple[list[int], list[int]]

_PINNED_CHOICES = (0, 64, 1024)
"""How many of the longest-lived buffers may form a part of their own. More parts cost a fixed time per placement."""

_PART_COST = 2048
"""Rows that could be compared in the time one more window costs."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """One row for each buffer. Rows are sorted by start within each part; columns are parallel arrays.

    A few buffers that live nearly throughout would stretch every window to the beginning, so the longest-lived ones may
    form a first part of their own: two windows for each row instead of one.

    Attributes:
        source: Position of each row's buffer in the caller's sequence.
        size: Bytes.
        start: First step, as the rank among all steps that occur.
        stop: Step at which the bytes are free again, likewise.
        duration: Steps alive, in the caller's own steps.
        alignment: Bytes.
        unit: The smallest alignment, in bytes: every offset is a multiple of it.
        uniform: Whether all alignments are equal.
        windows: For each part, the first row and the row after the last that can overlap row ``i``, as two lists.
            Within a window every row starts before row ``i`` stops, so it overlaps it exactly if it stops after row
            ``i`` starts.
    """

    source: NDArray[np.intp]
    size: Ints
    start: NDArray[np.int32]
    stop: NDArray[np.int32]
    duration: Ints
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
        validate(buffers)
        size, begin, end, alignment = columns(buffers)
        steps = np.unique(np.concatenate((begin, end)))
        start = np.searchsorted(steps, begin).astype(np.int32)
        stop = np.searchsorted(steps, end).astype(np.int32)
        source, pinned = _arrange(start, stop)
        start, stop, alignment = start[source], stop[source], alignment[source]
        return cls(
            source=source,
            size=size[source],
            start=start,
            stop=stop,
            duration=(end - begin)[source],
            alignment=alignment,
            unit=int(alignment.min()),
            uniform=bool((alignment == alignment[0]).all()),
            windows=tuple(_window(start, stop, *part) for part in _parts(pinned, len(start))),
        )

    def __len__(self) -> int:
        return len(self.source)

    def layout(self, offsets: Ints) -> Layout:
        """The layout with these offsets, given by row in bytes."""
        placed = np.empty_like(offsets)
        placed[self.source] = offsets
        return Layout(tuple(placed.tolist()), int((offsets + self.size).max()))

    def raised(self, rows: slice | NDArray[np.intp], offset: int) -> Ints | int:
        """The lowest offset from ``offset`` on (bytes, a multiple of ``unit``) that suits each row's alignment."""
        if self.uniform:
            return offset
        alignment = self.alignment[rows]
        return (offset + alignment - 1) & -alignment

    def occupied(self) -> list[int]:
        """Bytes each row keeps others from using: its size, up to the next multiple of ``unit``."""
        occupied: list[int] = (-(-self.size // self.unit) * self.unit).tolist()
        return occupied


def columns(buffers: Sequence[Buffer]) -> tuple[Ints, Ints, Ints, Ints]:
    """Sizes, starts, stops and alignments of at least one buffer."""
    table = np.array([(b.size, b.start, b.stop, b.alignment) for b in buffers], dtype=np.int64)
    return table[:, 0], table[:, 1], table[:, 2], table[:, 3]


def _arrange(start: NDArray[np.int32], stop: NDArray[np.int32]) -> tuple[NDArray[np.intp], int]:
    """The order of the rows and how many of them are in the first part: the choice with the smallest windows."""
    by_start = np.lexsort((stop, start))
    rank = np.empty(len(start), dtype=np.intp)
    rank[np.lexsort((start, start - stop))] = np.arange(len(start))
    cheapest, best = -1, (by_start, 0)
    for pinned in _PINNED_CHOICES:
        if pinned >= len(start):
            break
        long_lived = rank[by_start] < pinned
        source = np.concatenate((by_start[long_lived], by_start[~long_lived]))
        cost = _comparisons(start[source], stop[source], pinned)
        if cheapest < 0 or cost < cheapest:
            cheapest, best = cost, (source, pinned)
    return best


def _comparisons(start: NDArray[np.int32], stop: NDArray[np.int32], pinned: int) -> int:
    """Rows in all windows together, and what the windows themselves cost, in rows."""
    cost = 0
    for part in _parts(pinned, len(start)):
        first, last = _bounds(start, stop, *part)
        cost += int((last - first).sum()) + _PART_COST * len(start)
    return cost


def _parts(pinned: int, count: int) -> tuple[tuple[int, int], ...]:
    return ((0, pinned), (pinned, count)) if pinned else ((0, count),)


def _bounds(start: NDArray[np.int32], stop: NDArray[np.int32], low: int, high: int) -> tuple[Ints, Ints]:
    latest_stop = np.maximum.accumulate(stop[low:high])
    first = low + np.searchsorted(latest_stop, start, side="right")
    last = low + np.searchsorted(start[low:high], stop, side="left")
    return first, np.maximum(first, last)


def _window(start: NDArray[np.int32], stop: NDArray[np.int32], low: int, high: int) -> Window:
    first, last = _bounds(start, stop, low, high)
    return first.tolist(), last.tolist()
