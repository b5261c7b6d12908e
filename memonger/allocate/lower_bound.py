"""The size below which no layout of a problem can be."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from memonger.allocate.rows import Ints, columns
from memonger.allocate.types import Buffer
from memonger.allocate.validation import validate


def lower_bound(buffers: Sequence[Buffer]) -> int:
    """Bytes that every layout of these buffers needs: the most that is alive at any one step.

    Every offset is a multiple of the smallest alignment, so of the buffers alive at one step all but the topmost keep
    their size rounded up to that alignment from the others, and the topmost ends where its size ends. Which one is
    topmost is up to the allocator; the bound grants it the one with the most slack. With alignment 1 this is the
    plain sum of the sizes. The bound is not always attainable.

    O(n log n) time and memory. No buffers: 0.

    Raises:
        LayoutError: The problem is malformed (see ``validate``).
    """
    if not buffers:
        return 0
    alive, slack, _, _ = _by_step(buffers)
    return int((alive - slack).max())


def may_be_topmost(buffers: Sequence[Buffer]) -> NDArray[np.bool_]:
    """Which of at least one buffers may end at the top of an arena that is no larger than the lower bound.

    All of them, if the bound is a multiple of the smallest alignment. Else what is topmost at a step with the most
    bytes alive has to leave enough slack, and what isn't alive at such a step can stay below.

    Raises:
        LayoutError: The problem is malformed (see ``validate``).
    """
    alive, slack, start, stop = _by_step(buffers)
    saved = alive.max() - (alive - slack).max()
    if not saved:
        return np.ones(len(buffers), dtype=np.bool_)
    peaks = np.concatenate(([0], np.cumsum(alive == alive.max())))
    size, _, _, alignment = columns(buffers)
    topmost: NDArray[np.bool_] = (-size % alignment.min() >= saved) & (peaks[stop] > peaks[start])
    return topmost


def _by_step(buffers: Sequence[Buffer]) -> tuple[Ints, Ints, Ints, Ints]:
    """Rounded bytes alive and the most slack of one buffer, at each step that occurs; starts and stops among these."""
    validate(buffers)
    size, begin, end, alignment = columns(buffers)
    slack = -size % alignment.min()
    steps = np.unique(np.concatenate((begin, end)))
    start, stop = np.searchsorted(steps, begin), np.searchsorted(steps, end)
    alive = _sum_alive(start, stop, size + slack, len(steps))
    return alive, _largest_alive(start, stop, slack, len(steps)), start, stop


def _sum_alive(start: Ints, stop: Ints, value: Ints, steps: int) -> Ints:
    """The sum of ``value`` over the intervals ``[start, stop)`` that hold each step."""
    change = np.zeros(steps, dtype=np.int64)
    np.add.at(change, start, value)
    np.subtract.at(change, stop, value)
    return np.cumsum(change)


def _largest_alive(start: Ints, stop: Ints, value: Ints, steps: int) -> Ints:
    """The largest ``value`` (0 or more) over the intervals that hold each step; 0 where there is none.

    A sparse table used backwards: an interval is the union of two spans of the largest power of two that fits, which
    overlap, as a maximum may. Then each level's spans are handed down to their halves.
    """
    level = np.frexp(stop - start)[1] - 1
    table = np.zeros(steps, dtype=np.int64)
    for power in range(int(level.max()), -1, -1):
        mine, span = level == power, 1 << power
        np.maximum.at(table, start[mine], value[mine])
        np.maximum.at(table, stop[mine] - span, value[mine])
        half = span // 2
        if half:
            table[half:] = np.maximum(table[half:], table[:-half])
    return table
