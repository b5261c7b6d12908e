"""Lowest-offset-first for very many buffers, earliest first, in the time of a few binary searches for each.

The skyline is the height of what is laid out, step by step: intervals of steps with a height each, sorted in a heap.
Into the lowest interval goes the earliest buffer that lies within it; where there is none, it is raised to its lower
neighbour and joined with it. A tree of the stops of buffers sorted by start finds that buffer. The result is that of
`memonger.allocation.lowest_offset` with the order ``start``, but for how sizes that are no multiple of the alignment
share the end of the arena.
"""

import heapq
from collections.abc import Sequence

import numpy as np

from memonger.allocation.buffers import Buffer, Layout
from memonger.allocation.lower_bound import Columns, Ints

_NEVER = 1 << 62


def skyline(buffers: Sequence[Buffer]) -> Layout:
    """Lay buffers out lowest offset first, the earliest first.

    Takes O(n log n) time and O(n) memory.

    Raises:
        LayoutError: The problem is malformed (see ``validate``).
    """
    if not buffers:
        return Layout((), 0)
    columns = Columns.of(buffers)
    order = np.lexsort((-columns.stop, -columns.alignment, -columns.size, columns.start))
    offsets = np.empty(len(order), np.int64)
    offsets[order] = _placed(columns, order.tolist())
    if bool((columns.alignment == columns.unit).all()):  # upside down: sizes save their slack at the top
        ends = offsets + columns.size + columns.slack
        offsets = ends.max() - ends
    return Layout(tuple(offsets.tolist()), int((offsets + columns.size).max()))


def _placed(columns: Columns, order: list[int]) -> Ints:
    """Offsets in bytes, in this order, which is sorted by start."""
    size, alignment = (columns.size + columns.slack)[order].tolist(), columns.alignment[order].tolist()
    start, stop = columns.start[order], columns.stop[order]
    first_at = np.searchsorted(start, np.arange(columns.steps + 1)).tolist()  # the first buffer from each step on
    waiting, intervals = _BufferTree(stop.tolist()), _Intervals(columns.steps - 1)
    starts, stops = start.tolist(), stop.tolist()
    offsets = np.zeros(len(order), np.int64)
    left = len(order)
    while left:
        begin, end, height = intervals.lowest()
        found = waiting.first(first_at[begin], first_at[end], end)
        if found < 0:
            intervals.raise_lowest()
            continue
        waiting.remove(found)
        offsets[found] = at = -(-height // alignment[found]) * alignment[found]
        intervals.cover(begin, starts[found], stops[found], at + size[found])
        left -= 1
    return offsets


class _BufferTree:
    """Buffers not laid out yet, by their position in the order: a tree of the least stop of each half."""

    def __init__(self, stops: list[int]) -> None:
        self.leaves = 1 << max(1, len(stops) - 1).bit_length()
        self.least = [_NEVER] * self.leaves + stops + [_NEVER] * (self.leaves - len(stops))
        for node in range(self.leaves - 1, 0, -1):
            self.least[node] = min(self.least[2 * node], self.least[2 * node + 1])

    def remove(self, position: int) -> None:
        """Take a buffer out."""
        node, least = position + self.leaves, self.least
        least[node] = _NEVER
        while node > 1:
            node //= 2
            now = min(least[2 * node], least[2 * node + 1])
            if least[node] == now:
                break
            least[node] = now

    def first(self, low: int, high: int, stop: int) -> int:
        """The first position from ``low`` on, before ``high``, whose buffer stops at ``stop`` at the latest; or -1."""
        if low >= high:
            return -1
        node, least = low + self.leaves, self.least
        while least[node] > stop:
            while node & 1:  # a right child: what comes next is right of its parent
                node //= 2
            if not node:
                return -1
            node += 1
        while node < self.leaves:
            node *= 2
            node += least[node] > stop
        found = node - self.leaves
        return found if found < high else -1


class _Intervals:
    """The skyline over the steps from 0 to ``steps``."""

    def __init__(self, steps: int) -> None:
        self.end = {0: steps}  # by first step
        self.begin = {steps: 0}  # by the step after the last
        self.height = {0: 0}  # by first step
        self.heap = [(0, 0)]  # height and first step; stale where that no longer begins an interval of that height

    def lowest(self) -> tuple[int, int, int]:
        """First step, the step after the last, and height of the lowest interval, of equals the earliest."""
        while True:
            height, begin = self.heap[0]
            if self.height.get(begin) == height:
                return begin, self.end[begin], height
            heapq.heappop(self.heap)

    def raise_lowest(self) -> None:
        """Raise the lowest interval to its lower neighbour, or out of the way where it has none."""
        begin, end, _ = self.lowest()
        before = self.begin.get(begin)
        lower = _NEVER if before is None else self.height[before]
        raised = min(lower, self.height.get(end, _NEVER))
        self._take(begin)
        self._put(begin, end, raised)

    def cover(self, begin: int, start: int, stop: int, height: int) -> None:
        """Raise a part of the interval that begins at ``begin``, from ``start`` to ``stop``."""
        end, low = self.end[begin], self.height[begin]
        self._take(begin)
        if begin < start:
            self._put(begin, start, low)
        if stop < end:
            self._put(stop, end, low)
        self._put(start, stop, height)

    def _take(self, begin: int) -> None:
        del self.height[begin]
        del self.begin[self.end.pop(begin)]

    def _put(self, begin: int, end: int, height: int) -> None:
        """Add an interval, joined with neighbours of the same height."""
        before = self.begin.get(begin)
        if before is not None and self.height[before] == height:
            self._take(before)
            begin = before
        if self.height.get(end) == height:
            after, end = end, self.end[end]
            self._take(after)
        self.end[begin], self.begin[end], self.height[begin] = end, begin, height
        heapq.heappush(self.heap, (height, begin))
