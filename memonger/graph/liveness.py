"""Which values share one address, and from which step to which each address is in use.

A *storage* is the bytes of one or more values: views of each other, values that overwrite one another in place, and
parts of a value that lie inside it. It has the size of the largest.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from memonger.allocation.buffers import Buffer
from memonger.allocation.onnxruntime_arena import region_bytes
from memonger.errors import PlanError
from memonger.graph.graph import ALIGNMENT as ALIGNMENT
from memonger.graph.graph import Graph, Pair, Part


@dataclass(frozen=True, slots=True)
class Sharing:
    """What may share bytes. All on is the smallest arena; off is for finding faults.

    Without views no part of a value lies inside it either; without windows only parts that are chunks do.
    """

    inplace: bool = True
    views: bool = True
    reuse: bool = True
    windows: bool = True


@dataclass(frozen=True, slots=True)
class Storage:
    """For each value its storage's number (-1: not planned) and its first byte there; the buffer of each storage."""

    of_value: tuple[int, ...]
    within: tuple[int, ...]
    buffers: tuple[Buffer, ...]


def last_reads(graph: Graph, order: Sequence[int] | None = None) -> list[int]:
    """The last step that needs each value: -1 if none, ``len(nodes)`` for outputs. Nodes run in this or in file order.

    A value that the runtime may hold as an alias of another (`Graph.runtime_aliases`) keeps that one alive as well.
    """
    order = range(len(graph.nodes)) if order is None else order
    last = [-1] * len(graph.values)
    for step, node in enumerate(order):
        for value in graph.reads[node]:
            last[value] = step
    for value in graph.outputs:
        last[value] = len(graph.nodes)
    for node in reversed(order):
        for source, target in graph.runtime_aliases[node]:
            last[source] = max(last[source], last[target])
    return last


def roots(graph: Graph) -> list[int]:
    """For each value the least one that it shares bytes with in every order, as views and subviews do."""
    root = list(range(len(graph.values)))

    def find(value: int) -> int:
        while root[value] != value:
            root[value] = value = root[root[value]]
        return value

    inside = ((part, whole) for subviews in graph.subviews for part, whole, _ in subviews)
    for one, other in chain(chain.from_iterable(graph.views), inside):
        low, high = sorted((find(one), find(other)))
        root[high] = low
    return [find(value) for value in range(len(root))]


def assign_storage(
    graph: Graph,
    sharing: Sharing | None = None,
    alignment: int = ALIGNMENT,
    offsets: Mapping[int, int] | None = None,
    subviews: Collection[int] = (),
    groups: Sequence[Sequence[int]] | None = None,
) -> Storage:
    """Decide which values share a storage: a view always, in place and inside another where nobody needs the old bytes.

    Args:
        graph: Its nodes run in file order.
        sharing: What may share.
        alignment: Put on every buffer, in bytes.
        offsets: An existing layout by value number: only values that it puts together share. This reads a plan's
            storages off its offsets.
        subviews: Of the nodes whose subviews are optional those that get them; with `offsets` all do.
        groups: Values that lie side by side in one storage, a group each; see `check_groups`. None: those of
            the graph's collectives.

    Raises:
        PlanError: a group can't be contiguous; it names the value.
    """
    sharing = sharing or Sharing()
    if groups is None:
        groups = graph.groups
    check_groups(graph, groups)
    draft = _undecided(graph, last_reads(graph), groups, sharing, alignment, offsets, subviews)
    draft.run(range(len(graph.nodes)), 0)
    for members in groups:
        draft.gather(places(graph, members, alignment))
    if not sharing.reuse:
        draft.start, draft.stop = [0] * len(draft.sizes), [len(graph.nodes)] * len(draft.sizes)
    return draft.storage(alignment)


def storage_in_window(
    graph: Graph, order: Sequence[int], begin: int, end: int
) -> Callable[[Sequence[int]], tuple[Storage, np.ndarray]]:
    """What decides storages where the nodes of a window run in another order: all before it is decided once.

    Args:
        graph: The nodes and values.
        order: In which its nodes run.
        begin: The first step of the window.
        end: Behind its last one. Nothing behind it is decided, as long as nothing there can put what lies in the window
            inside something else, as groups and subviews do.

    Returns: A function of the window's nodes in another order: the storages that it needs, and the bytes alive at its
        steps.
    """
    stop, last = len(order) if graph.groups or any(graph.subviews) else end, last_reads(graph, order)
    before = _undecided(graph, last, graph.groups, Sharing(), ALIGNMENT)
    before.run(order[:begin], 0)
    before.drop(begin)
    tied = [node for node in order[:begin] if graph.runtime_aliases[node]]

    def decided(window: Sequence[int]) -> tuple[Storage, np.ndarray]:
        own = last.copy()
        for step, node in enumerate(window, begin):
            for value in graph.reads[node]:
                if last[value] < end:
                    own[value] = step
        for node in reversed((*tied, *window)):
            for source, target in graph.runtime_aliases[node]:
                own[source] = max(own[source], own[target])
        draft = before.copy(own)
        draft.run((*window, *order[end:stop]), begin)
        for members in graph.groups:
            draft.gather(places(graph, members, ALIGNMENT))
        storage = draft.storage(ALIGNMENT)
        return storage, live_bytes(storage.buffers, len(order))[begin:end]

    return decided


def _undecided(
    graph: Graph, last: Sequence[int], groups: Sequence[Sequence[int]], sharing: Sharing, alignment: int,
    offsets: Mapping[int, int] | None = None, subviews: Collection[int] = (),
) -> "_Draft":  # fmt: skip
    """Storages of which none is decided; see `assign_storage`."""
    taken = frozenset(subviews)
    waits = {wait for wait, _ in graph.collectives}  # ranks add up where the gradients lie, whatever may share

    def allowed(node: int) -> _Allowed:
        is_taken = node in taken or not graph.optional[node]
        return _allowed(graph, sharing, node, alignment, offsets, is_taken, sharing.inplace or node in waits)

    return _Draft(graph, last, frozenset(chain.from_iterable(groups)), allowed)


_Allowed = tuple[tuple[Pair, ...], tuple[Pair, ...], tuple[Part, ...]]


def _allowed(
    graph: Graph, sharing: Sharing, step: int, alignment: int, offsets: Mapping[int, int] | None, is_taken: bool,
    overwrites: bool,
) -> _Allowed:  # fmt: skip
    """What the switches, the alignment and an existing layout leave of a node's views, in-place pairs and subviews."""
    views = graph.views[step] if sharing.views else ()
    inplace = graph.inplace[step] if overwrites else ()
    subviews = graph.subviews[step] if sharing.views and (is_taken or offsets is not None) else ()
    if subviews:
        subviews = tuple(each for each in subviews if each[2] % alignment == 0)
    if offsets is None:
        return views, inplace, subviews

    def at_one_offset(pairs: tuple[Pair, ...]) -> tuple[Pair, ...]:
        return tuple((a, b) for a, b in pairs if offsets[a] == offsets[b])

    inside = tuple((a, b, byte) for a, b, byte in subviews if a in offsets and offsets[a] == offsets[b] + byte)
    return at_one_offset(views), at_one_offset(inplace), inside


class _Draft:
    """Storages while they are decided, step by step.

    Attributes:
        of_value: For each value its storage, or -1.
        within: For each value its first byte in that storage.
        members: The values of each storage; none of one that lies inside another by now.
        needed: Those of its first members, so many, that some step needed when that was asked last.
        sizes: Bytes of each storage.
        start: The step at which it begins.
        stop: One after the last step that needs it.
        grouped: Values that lie in groups.
        allowed: What of each node may share.
    """

    def __init__(
        self, graph: Graph, last: Sequence[int], grouped: frozenset[int], allowed: Callable[[int], _Allowed]
    ) -> None:
        self.graph, self.last, self.grouped, self.allowed = graph, last, grouped, allowed
        self.of_value = [-1] * len(graph.values)
        self.within = [0] * len(graph.values)
        self.members: list[list[int]] = []
        self.needed: dict[int, tuple[list[int], int]] = {}
        self.sizes: list[int] = []
        self.start: list[int] = []
        self.stop: list[int] = []

    def drop(self, step: int) -> None:
        """Forget what nothing needs at a step or later."""
        kept = [number for number, stop in enumerate(self.stop) if stop > step and self.members[number]]
        self._renumber(kept)
        self.needed = {}
        for name in ("members", "sizes", "start", "stop"):
            setattr(self, name, [getattr(self, name)[number] for number in kept])

    def _renumber(self, kept: Sequence[int]) -> None:
        """Number these storages in their order; values of others have none."""
        number = [-1] * (len(self.members) + 1)  # the last one for values that have none
        for index, storage in enumerate(kept):
            number[storage] = index
        self.of_value = [number[storage] for storage in self.of_value]

    def copy(self, last: list[int]) -> "_Draft":
        """What was decided, for steps behind it in another order, in which values are needed until other ones."""
        other = _Draft(self.graph, last, self.grouped, self.allowed)
        other.of_value, other.within, other.members = self.of_value[:], self.within[:], [one[:] for one in self.members]
        other.sizes, other.start = self.sizes[:], self.start[:]
        other.stop = [max(last[value] + 1 for value in one) for one in self.members]
        return other

    def run(self, nodes: Sequence[int], first: int) -> None:
        """Decide what these nodes write, from a step on."""
        for step, node in enumerate(nodes, first):
            pairs = self.allowed(node)
            planned = [value for value in self.graph.writes[node] if self.graph.planned[value]]
            for number, value in enumerate(planned):
                self.put(step, value, pairs, planned[:number] if any(pairs) else ())
            if pairs[2]:
                self.join(step, node, pairs[2])

    def put(self, step: int, value: int, pairs: _Allowed, done: Sequence[int]) -> None:
        """Give a value its storage: one that it takes over or joins at this step, or a new one.

        Outputs of the node that have theirs (`done`) keep their bytes.
        """
        for source, byte in self._places(step, value, pairs) if any(pairs) else ():
            storage, begin = self.of_value[source], self.within[source] + byte
            if not done or not self._overlap(storage, begin, self.graph.sizes[value], done):
                break
        else:
            storage, begin = self._new(self.graph.sizes[value], step), 0
        self.of_value[value], self.within[value] = storage, begin
        self.members[storage].append(value)
        self.stop[storage] = max(self.stop[storage], self.last[value] + 1, self.start[storage] + 1)

    def _places(self, step: int, value: int, pairs: _Allowed) -> list[tuple[int, int]]:
        """Where an output may lie, the best place first: an input, and a byte of it.

        One whose bytes it takes over is needed by nothing else at this step, and by nothing later.
        """
        views, inplace, subviews = pairs
        places = [(source, 0) for source, target in views if target == value]
        places += [(whole, byte) for part, whole, byte in subviews if part == value]
        for source in (source for source, target in inplace if target == value and self.last[source] <= step):
            storage, begin = self.of_value[source], self.within[source]
            if value in self.grouped and not self.grouped.isdisjoint(self.members[storage]):
                continue  # of one storage one value is in a group
            others = [v for v in self._needed(step, storage) if v != source]
            if not others or not self._overlap(storage, begin, self.graph.sizes[source], others):
                places.append((source, 0))
        return places

    def _new(self, size: int, start: int) -> int:
        """An empty storage."""
        self.members.append([])
        self.sizes.append(size)
        self.start.append(start)
        self.stop.append(0)
        return len(self.sizes) - 1

    def _overlap(self, storage: int, begin: int, size: int, values: Iterable[int]) -> bool:
        """Whether any of these values has some of these bytes."""
        return any(
            self.of_value[v] == storage
            and begin < self.within[v] + self.graph.sizes[v]
            and self.within[v] < begin + size
            for v in values
        )

    def _needed(self, step: int, storage: int) -> list[int]:
        """The values of a storage that are needed at this step or later."""
        before, seen = self.needed.get(storage, ((), 0))
        found = [value for value in (*before, *self.members[storage][seen:]) if self.last[value] >= step]
        self.needed[storage] = found, len(self.members[storage])
        return found

    def join(self, step: int, node: int, subviews: Sequence[Part]) -> None:
        """Put the storages of a node's inputs inside that of its output, where they can be.

        Of several that would have the same bytes of it the first one gets them.
        """
        joined: list[tuple[int, int]] = []
        for part, whole, byte in subviews:
            inner, outer = self.of_value[part], self.of_value[whole]
            if inner == outer or whole not in self.graph.writes[node]:
                continue
            begin = byte - self.within[part]  # a node that joins begins a storage
            end = begin + self.sizes[inner]
            own = [p for p, _, at in subviews if self.of_value[p] == inner and at == begin + self.within[p]]
            free = all(stop <= begin or end <= start for start, stop in joined)
            if begin >= 0 and end <= self.sizes[outer] and free and self._stays(step, inner, own):
                joined.append((begin, end))
                self._move(inner, outer, begin)

    def _stays(self, step: int, storage: int, parts: Collection[int]) -> bool:
        """Whether all that is still needed of a storage is in these values, whose bytes stay as they are."""
        places = sorted((self.within[part], self.within[part] + self.graph.sizes[part]) for part in parts)
        for value in self._needed(step, storage):
            at, end = self.within[value], self.within[value] + self.graph.sizes[value]
            for start, stop in places:
                if start <= at < stop:
                    at = stop
            if at < end:
                return False
        return True

    def _move(self, inner: int, outer: int, begin: int) -> None:
        for value in self.members[inner]:
            self.of_value[value] = outer
            self.within[value] += begin
        self.members[outer] += self.members[inner]
        self.members[inner] = []
        self.start[outer] = min(self.start[outer], self.start[inner])
        self.stop[outer] = max(self.stop[outer], self.stop[inner])

    def gather(self, places: Mapping[int, int]) -> None:
        """Put the storages of a group's members inside a new one, at these places."""
        for value in places:
            inner = self.of_value[value]
            others = [v for v in self.members[inner] if v in self.grouped and v != value]
            if others or self.sizes[inner] != self.graph.sizes[value]:
                other = max(others or self.members[inner], key=lambda v: self.graph.sizes[v])
                raise PlanError(
                    f"value '{self.graph.values[value]}' can't be side by side with others in a group: it shares its "
                    f"bytes with '{self.graph.values[other]}'."
                )
        size = max(at + self.graph.sizes[value] for value, at in places.items())
        storage = self._new(size, len(self.graph.nodes))
        for value, at in places.items():
            self._move(self.of_value[value], storage, at)

    def storage(self, alignment: int) -> Storage:
        """What was decided. Storages inside others are no buffers."""
        end = len(self.graph.nodes)
        kept = [storage for storage, members in enumerate(self.members) if members]
        buffers = tuple(
            Buffer(index, self.sizes[storage], self.start[storage], min(self.stop[storage], end), alignment)
            for index, storage in enumerate(kept)
        )
        if len(kept) < len(self.members):
            self._renumber(kept)
        return Storage(tuple(self.of_value), tuple(self.within), buffers)


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


def run_time_bytes(graph: Graph, sizes: Mapping[str, int]) -> int:
    """Bytes that onnxruntime's arena needs for values that aren't planned, beside the largest workspace.

    It holds each until its last reader ran, in one region with the workspace of the steps in between; what nobody reads
    to the end of the run, as nothing after it says that it is over (1.32.0).

    Args:
        graph: One node a step.
        sizes: Bytes by name.
    """
    buffers, outputs = list[Buffer](), set(graph.outputs)
    for value, name in enumerate(graph.values):
        size = 0 if graph.planned[value] else sizes.get(name, 0)
        if size:
            start = graph.producer[value]
            readers = () if value in outputs else graph.readers[value]
            stop = max(readers) + 1 if readers else len(graph.nodes)
            buffers.append(Buffer(value, size, start, stop))
    if not buffers:
        return 0
    scratch = [Buffer(-1 - step, size, step, step + 1) for step, size in enumerate(graph.workspace) if size]
    return max(0, region_bytes([*buffers, *scratch]) - max(graph.workspace, default=0))


def places(graph: Graph, members: Sequence[int], alignment: int) -> dict[int, int]:
    """The first byte of each member in its group, in their order.

    Between two there are only as many bytes as the alignment takes.
    """
    found, end = dict[int, int](), 0
    for value in members:
        found[value] = -(-end // alignment) * alignment
        end = found[value] + graph.sizes[value]
    return found


def in_buckets(graph: Graph, values: Collection[int], first: int, rest: int) -> tuple[tuple[int, ...], ...]:
    """Values in groups, in the order in which nodes write them: each is full once it has so many bytes.

    Args:
        graph: Its nodes run in file order.
        values: By number.
        first: Bytes of the first group: a small one is full early.
        rest: Bytes of each later one.
    """
    found, size = [list[int]()], 0
    for value in sorted(values, key=lambda value: (graph.producer[value], value)):
        if size >= (first if len(found) == 1 else rest):
            found.append([])
            size = 0
        found[-1].append(value)
        size += graph.sizes[value]
    return tuple(map(tuple, found)) if values else ()


def check_groups(graph: Graph, groups: Sequence[Collection[int]]) -> None:
    """Every group has members, all of them in the arena, and none is in two groups.

    A group is values that lie side by side in the arena, as one range of bytes that can be sent or added as a whole: a
    buffer that no node writes. Its members lie inside it at fixed places, in the order in which they are given, and it
    is there from the first member's first byte to the last one's last read.

    Raises:
        PlanError: it names the value.
    """
    seen: set[int] = set()
    for members in groups:
        if not members:
            raise PlanError("a group has no values: give each at least one.")
        for value in members:
            if not 0 <= value < len(graph.values):
                raise PlanError(f"a group has value {value}, and the graph has {len(graph.values)} values.")
            if not graph.planned[value]:
                raise PlanError(f"value '{graph.values[value]}' is in a group, but isn't kept in the arena.")
    for value in chain.from_iterable(groups):
        if value in seen:
            raise PlanError(f"value '{graph.values[value]}' is twice in groups: it has one place.")
        seen.add(value)


TRIES = 100
"""Storages that are assigned and compared."""

_STEPS = 500_000
"""Steps of all these together: of large graphs fewer are compared."""


def storages(graph: Graph, sharing: Sharing, alignment: int = ALIGNMENT) -> tuple[Storage, ...]:
    """The storage without the subviews that a graph leaves optional; and with some, where that needs fewer bytes.

    A subview saves the second copy of a part, and makes the whole live from its first part to the last read of any.
    Which of both counts depends on what else is alive, so it is tried: from none taken, the subviews around the worst
    step are added as long as that helps. Those of one dense block hang together, and are tried together before each
    node for itself.

    Args:
        graph: Its nodes run in file order.
        sharing: What may share.
        alignment: Put on every buffer, in bytes.
    """
    plain = assign_storage(graph, sharing, alignment)
    candidates = _together(graph) if sharing.views and sharing.windows else []
    if not candidates:
        return (plain,)
    best, live = plain, live_bytes(plain.buffers, len(graph.nodes))
    taken, refused = frozenset[int](), set[int]()
    for _ in range(min(TRIES, 1 + _STEPS // max(1, len(graph.nodes)))):
        worst = int(live.argmax())  # tried are those that reach the step with most bytes alive
        reaching = (n for n, each in enumerate(candidates) if each.start <= worst <= each.stop and n not in refused)
        number = next((n for n in reaching if candidates[n].nodes - taken), None)
        if number is None:
            break
        tried = taken | candidates[number].nodes
        storage = assign_storage(graph, sharing, alignment, subviews=tried)
        other = live_bytes(storage.buffers, len(graph.nodes))
        # Whether the step with most bytes alive has fewer, or where they are equal the next one, and so on
        difference = np.sort(other)[::-1] - np.sort(live)[::-1]
        found = np.flatnonzero(difference)
        if found.size and difference[found[0]] < 0:
            best, live, taken, refused = storage, other, tried, set()
        else:
            refused.add(number)
    return (plain, best) if taken else (plain,)


@dataclass(frozen=True, slots=True)
class _Together:
    """Nodes whose optional subviews are tried together, and the first and last step that need one of their values."""

    nodes: frozenset[int]
    start: int
    stop: int


def _together(graph: Graph) -> list[_Together]:
    """All nodes with optional subviews of values that hang together, by size; then each node for itself."""
    steps = [step for step, subviews in enumerate(graph.subviews) if subviews and graph.optional[step]]
    if not steps:
        return []
    root, together = roots(graph), dict[int, list[int]]()
    for step in steps:
        together.setdefault(root[graph.subviews[step][0][0]], []).append(step)
    last = last_reads(graph)
    whole = [_of_nodes(graph, nodes, last) for nodes in together.values()]
    single = [_of_nodes(graph, [step], last) for nodes in together.values() if len(nodes) > 1 for step in nodes]
    return [*sorted(whole, key=lambda candidate: -len(candidate.nodes)), *single]


def _of_nodes(graph: Graph, nodes: Sequence[int], last: Sequence[int]) -> _Together:
    values = {value for node in nodes for part, whole, _ in graph.subviews[node] for value in (part, whole)}
    return _Together(frozenset(nodes), min(graph.producer[v] for v in values), max(last[v] for v in values))
