"""Which values share one address, and from which step to which each address is in use.

A *storage* is the bytes of one or more values: views of each other, values that overwrite one another in place, and
parts of a value that lie inside it. It has the size of the largest.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from memonger.graph.graph import ALIGNMENT as ALIGNMENT
from memonger.graph.graph import Graph, Pair, Window
from memonger.layout.buffers import Buffer


@dataclass(frozen=True, slots=True)
class Sharing:
    """What may share bytes. All on is the smallest arena; off is for finding faults.

    Without views no part of a value lies inside it either.
    """

    inplace: bool = True
    views: bool = True
    reuse: bool = True


@dataclass(frozen=True, slots=True)
class Storage:
    """For each value its storage's number (-1: not planned) and its first byte there; the buffer of each storage."""

    of_value: tuple[int, ...]
    within: tuple[int, ...]
    buffers: tuple[Buffer, ...]


def last_reads(graph: Graph) -> list[int]:
    """The last step that needs each value: -1 if none, ``len(nodes)`` for outputs. Nodes run in file order.

    A value that the runtime may hold as an alias of another (`Graph.ties`) keeps that one alive as well.
    """
    last = [-1] * len(graph.values)
    for step, reads in enumerate(graph.reads):
        for value in reads:
            last[value] = step
    for value in graph.outputs:
        last[value] = len(graph.nodes)
    for ties in reversed(graph.ties):
        for source, target in ties:
            last[source] = max(last[source], last[target])
    return last


def assign_storage(
    graph: Graph,
    sharing: Sharing | None = None,
    alignment: int = ALIGNMENT,
    offsets: Mapping[int, int] | None = None,
) -> Storage:
    """Decide which values share a storage: a view always, in place and inside another where nobody needs the old bytes.

    Args:
        graph: Its nodes run in file order.
        sharing: What may share.
        alignment: Put on every buffer, in bytes.
        offsets: An existing layout by value number: only values that it puts together share. This reads a plan's
            storages off its offsets.
    """
    sharing = sharing or Sharing()
    last = last_reads(graph)
    draft = _Draft(graph)
    windows: list[tuple[int, Window]] = []
    for step, writes in enumerate(graph.writes):
        used: set[int] = set()
        pairs = _allowed(graph, sharing, step, alignment, offsets)
        windows.extend((step, window) for window in pairs[2])
        for value in writes:
            if graph.planned[value]:
                storage = draft.put(step, value, pairs, used)
                used.add(storage)
                draft.stop[storage] = max(draft.stop[storage], last[value] + 1)
    for step, (part, whole, byte) in windows:
        if whole in graph.writes[step]:
            draft.join(step, part, whole, byte)
    if not sharing.reuse:
        draft.start, draft.stop = [0] * len(draft.sizes), [len(graph.nodes)] * len(draft.sizes)
    return draft.storage(alignment)


_Allowed = tuple[tuple[Pair, ...], tuple[Pair, ...], tuple[Window, ...]]


def _allowed(graph: Graph, sharing: Sharing, step: int, alignment: int, offsets: Mapping[int, int] | None) -> _Allowed:
    """What the switches, the alignment and an existing layout leave of a node's views, in-place pairs and windows."""
    views = graph.views[step] if sharing.views else ()
    inplace = graph.inplace[step] if sharing.inplace else ()
    windows = graph.windows[step] if sharing.views else ()
    if windows:
        windows = tuple(each for each in windows if each[2] % alignment == 0)
    if offsets is None:
        return views, inplace, windows

    def at_one_offset(pairs: tuple[Pair, ...]) -> tuple[Pair, ...]:
        return tuple((a, b) for a, b in pairs if offsets[a] == offsets[b])

    inside = tuple((a, b, byte) for a, b, byte in windows if a in offsets and offsets[a] == offsets[b] + byte)
    return at_one_offset(views), at_one_offset(inplace), inside


class _Draft:
    """Storages while they are decided.

    Attributes:
        of_value: For each value its storage, or -1.
        within: For each value its first byte in that storage.
        sizes: Bytes of each storage.
        start: The step at which it begins.
        stop: One after the last step that needs it.
        over: The steps at which new content is written over all of it, if there are any.
        inside: The storage it lies inside of, if there is one, and its first byte there.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.of_value = [-1] * len(graph.values)
        self.within = [0] * len(graph.values)
        self.sizes: list[int] = []
        self.start: list[int] = []
        self.stop: list[int] = []
        self.over: dict[int, list[int]] = {}
        self.inside: dict[int, tuple[int, int]] = {}

    def put(self, step: int, value: int, pairs: _Allowed, used: Collection[int]) -> int:
        """Give a value its storage: one that it takes over or joins at this step, or a new one."""
        views, inplace, windows = pairs
        for source, target in views:
            if target == value and self.of_value[source] not in used:
                return self._share(value, source, 0)
        for part, whole, byte in windows:
            if part == value and self.of_value[whole] not in used:
                return self._share(value, whole, byte)
        for source, target in inplace:
            if target == value and self.of_value[source] not in used and self._is_last(step, source):
                self.over.setdefault(self.of_value[source], []).append(step)
                return self._share(value, source, 0)
        self.of_value[value] = len(self.sizes)
        self.sizes.append(self.graph.sizes[value])
        self.start.append(step)
        self.stop.append(step + 1)
        return self.of_value[value]

    def _share(self, value: int, source: int, byte: int) -> int:
        self.of_value[value] = self.of_value[source]
        self.within[value] = self.within[source] + byte
        return self.of_value[value]

    def _is_last(self, step: int, source: int) -> bool:
        """Whether nothing else in the storage of an input is needed at this step or later, and it is all of it."""
        storage = self.of_value[source]
        if self.stop[storage] != step + 1 or self.sizes[storage] != self.graph.sizes[source]:
            return False
        return not [v for v in self.graph.reads[step] if v != source and self.of_value[v] == storage]

    def join(self, step: int, part: int, whole: int, byte: int) -> None:
        """Put the storage of an input inside that of the output it becomes a part of, if that can be.

        The input has to be all of its storage, with nothing written over it from this step on, and nothing over the
        whole, which begins a storage here, while the input or a view of it is needed.
        """
        inner, outer = self._root(self.of_value[part]), self.of_value[whole]
        fills = self.sizes[inner] == self.graph.sizes[part] and inner != outer
        kept = max(self.over.get(inner, ()), default=-1) < step
        if fills and kept and self.stop[inner] <= min(self.over.get(outer, ()), default=self.stop[inner]):
            self.inside[inner] = outer, byte
            self.start[outer] = min(self.start[outer], self.start[inner])
            self.stop[outer] = max(self.stop[outer], self.stop[inner])

    def _root(self, storage: int) -> int:
        while storage in self.inside:
            storage = self.inside[storage][0]
        return storage

    def storage(self, alignment: int) -> Storage:
        """What was decided. Storages inside others are no buffers."""
        end = len(self.graph.nodes)
        roots = [storage for storage in range(len(self.sizes)) if storage not in self.inside]
        buffers = tuple(
            Buffer(number, self.sizes[root], self.start[root], min(self.stop[root], end), alignment)
            for number, root in enumerate(roots)
        )
        if not self.inside:
            return Storage(tuple(self.of_value), tuple(self.within), buffers)
        place = {root: (number, 0) for number, root in enumerate(roots)} | {-1: (-1, 0)}
        for storage in sorted(self.inside, reverse=True):  # a whole is written after its parts
            outer, byte = self.inside[storage]
            place[storage] = place[outer][0], place[outer][1] + byte
        of_value = tuple(place[storage][0] for storage in self.of_value)
        within = tuple(at + place[storage][1] for at, storage in zip(self.within, self.of_value, strict=True))
        return Storage(of_value, within, buffers)


def live_bytes(buffers: Sequence[Buffer], steps: int) -> np.ndarray:
    """Bytes alive at each step, alignment left out; ``int64[steps]``."""
    change = np.zeros(steps + 1, np.int64)
    for buffer in buffers:
        change[buffer.start] += buffer.size
        change[buffer.stop] -= buffer.size
    return np.cumsum(change)[:steps]


def peak_bytes(buffers: Sequence[Buffer], steps: int) -> int:
    """Most bytes alive at any step."""
    return int(live_bytes(buffers, steps).max(initial=0))


def worst_step(buffers: Sequence[Buffer], steps: int) -> int:
    """The first step at which most bytes are alive; 0 where there are no steps."""
    live = live_bytes(buffers, steps)
    return int(live.argmax()) if steps else 0


def needed_bytes(graph: Graph, storage: Storage) -> int:
    """Most bytes at any step: what lives in the arena and that step's workspace."""
    live = live_bytes(storage.buffers, len(graph.nodes)).tolist()
    return max((alive + workspace for alive, workspace in zip(live, graph.workspace, strict=True)), default=0)
