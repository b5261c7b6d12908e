"""Buffers as numpy columns, and the size below which no layout of them can be."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from memonger.allocation.buffers import Buffer, validate

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """One entry for each buffer. Steps are ranks among the steps at which a buffer starts or stops.

    Attributes:
        size: Bytes.
        slack: Bytes by which the size falls short of a multiple of ``unit``.
        start: Rank of the first step at which the bytes are in use.
        stop: Rank of the first step at which they are free again.
        alignment: Bytes.
        unit: The smallest alignment, in bytes: every offset is a multiple of it.
        steps: Number of steps at which a buffer starts or stops.
    """

    size: Ints
    slack: Ints
    start: Ints
    stop: Ints
    alignment: Ints
    unit: int
    steps: int

    @classmethod
    def of(cls, buffers: Sequence[Buffer]) -> Self:
        """The columns of at least one buffer.

        Raises:
            LayoutError: The problem is malformed (see ``validate``).
        """
        validate(buffers)
        table = np.array([(b.size, b.start, b.stop, b.alignment) for b in buffers], dtype=np.int64)
        size, alignment = table[:, 0], table[:, 3]
        steps = np.unique(table[:, 1:3])
        start, stop = np.searchsorted(steps, table[:, 1]), np.searchsorted(steps, table[:, 2])
        unit = int(alignment.min())
        return cls(size, -size % unit, start, stop, alignment, unit, len(steps))


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
    columns = Columns.of(buffers)
    return int((_alive(columns) - _most_slack(columns)).max())


def may_be_topmost(columns: Columns) -> NDArray[np.bool_]:
    """Which buffers may end at the top of an arena that is no larger than the lower bound.

    All of them, if the bound is a multiple of the smallest alignment. Else what is topmost at a step with the most
    bytes alive has to leave enough slack, and what isn't alive at such a step can stay below.
    """
    alive = _alive(columns)
    saved = alive.max() - (alive - _most_slack(columns)).max()
    if not saved:
        return np.ones(len(columns.size), dtype=np.bool_)
    peaks = np.concatenate(([0], np.cumsum(alive == alive.max())))
    topmost: NDArray[np.bool_] = (columns.slack >= saved) & (peaks[columns.stop] > peaks[columns.start])
    return topmost


def _alive(columns: Columns) -> Ints:
    """The bytes alive at each step, every size rounded up to a multiple of the smallest alignment."""
    change = np.zeros(columns.steps, dtype=np.int64)
    np.add.at(change, columns.start, columns.size + columns.slack)
    np.subtract.at(change, columns.stop, columns.size + columns.slack)
    return np.cumsum(change)


def _most_slack(columns: Columns) -> Ints:
    """The most slack of one buffer alive at each step; 0 where none is.

    A sparse table used backwards: a lifetime is the union of two spans of the largest power of two that fits, which
    overlap, as a maximum may. Then each level's spans are handed down to their halves.
    """
    level = np.frexp(columns.stop - columns.start)[1] - 1
    table = np.zeros(columns.steps, dtype=np.int64)
    for power in range(int(level.max()), -1, -1):
        mine, span = level == power, 1 << power
        np.maximum.at(table, columns.start[mine], columns.slack[mine])
        np.maximum.at(table, columns.stop[mine] - span, columns.slack[mine])
        half = span // 2
        if half:
            table[half:] = np.maximum(table[half:], table[:-half])
    return table
