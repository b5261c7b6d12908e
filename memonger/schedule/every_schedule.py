"""Bytes of the arena that every schedule of a graph needs, in whatever order, and whatever it computes again.

At a step some values have to be in memory together. Of these one was computed last, and at that step the others were
there already, together with what that node reads. So from a set of values there is one earlier set for each node that
may have been the last, and every schedule goes one of these ways back to the empty set. The way whose largest set is
smallest is looked for, as Dijkstra's algorithm finds shortest ones (Pollack 1960, "The maximum capacity through a
network"). What is found when the effort is spent is a bound, too: every way not ended leads through a set on the heap.

Left out, which makes the bound smaller and never wrong: alignment, what must not run again, and the gaps of a layout.
Of values that may lie inside one another each byte counts once.
"""

import functools
import heapq
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from memonger.graph.graph import Graph
from memonger.graph.liveness import Sharing

EFFORT = 3_000_000
"""Values looked at in the search of one bound: less than a second."""

_SHARES = (0.0, 0.5, 0.75, 0.9, 1.0)
"""The search begins behind the last node that touches so large a part of what the largest one touches."""

Values = int
"""Values as the bits of an integer, in the order in which they are written."""

Pieces = tuple[tuple[int, int, int], ...]


def least_arena(graph: Graph, sharing: Sharing | None = None, *, again: bool = True, effort: int = EFFORT) -> int:
    """Bytes below which no arena of any schedule of the graph is.

    Args:
        graph: Its nodes in any topological order.
        sharing: Which values may share an address.
        again: Whether nodes may run more than once. If not, every value is there from its one step to its last reader,
            in every order, and the bound is larger.
        effort: Values that the search may look at.
    """
    steps, outputs = _StepBounds.of(graph, sharing or Sharing())
    needs = [steps.needed(node) for node in range(len(graph.nodes))]
    if not needs:
        return steps.bytes_of(outputs)
    largest = max(needs)
    most = max(largest, steps.bytes_of(outputs))
    if not again:
        most = max([most, *_without_repeats(graph, steps, outputs)])
    starts = [max(node for node, need in enumerate(needs) if need >= share * largest) for share in _SHARES]
    sets = [outputs, *(steps.writes[node] or steps.reads[node] for node in dict.fromkeys(starts))]
    return max([most, *(_bottleneck(steps, values, effort // len(sets)) for values in dict.fromkeys(sets) if values)])


def output_bytes(graph: Graph, sharing: Sharing | None = None) -> int:
    """Bytes of the arena that a graph's outputs take, which are there together, and whole, when a run ends.

    Args:
        graph: Its nodes in any topological order.
        sharing: Which values may share an address.
    """
    steps, outputs = _StepBounds.of(graph, sharing or Sharing())
    return steps.bytes_of(outputs)


@dataclass(frozen=True, slots=True)
class _StepBounds:
    """What each node reads and writes of the arena, views being what they are views of.

    Attributes:
        alone: Bytes of some values, without those of ``shared``.
        covered: Bytes of some values of ``shared``.
        shared: The values that may share bytes with others, and so have pieces: stretches (value, first, end).
        reads: Of each node, without what it writes.
        writes: Of each node, without views.
        over: For each value those that it may overwrite.
        over_any: Those that any value may overwrite that a node writes.
        producer: The node that writes each value.
    """

    alone: "_NodeAlone"
    covered: "_Covered"
    shared: Values
    reads: Sequence[Values]
    writes: Sequence[Values]
    over: Sequence[Values]
    over_any: Sequence[Values]
    producer: Sequence[int]

    @classmethod
    def of(cls, graph: Graph, sharing: Sharing) -> tuple["_StepBounds", Values]:
        """The steps, and the graph's outputs."""
        root = [value if planned else -1 for value, planned in enumerate(graph.planned)]
        for pairs in graph.views if sharing.views else ():
            for source, target in pairs:
                root[target] = root[source]
        ranked = sorted({value for value in root if value >= 0}, key=lambda value: (graph.producer[value], value))
        bit = {value: 1 << rank for rank, value in enumerate(ranked)}

        def bits(values: Iterable[int]) -> Values:
            return functools.reduce(operator.or_, (bit[root[value]] for value in values if root[value] >= 0), 0)

        writes = [bits(value for value in each if root[value] == value) for each in graph.writes]
        reads = [bits(each) & ~own for each, own in zip(graph.reads, writes, strict=True)]
        over = [0] * len(graph.values)
        for pairs in graph.inplace if sharing.inplace else ():
            for source, target in pairs:
                over[target] |= bit.get(root[source], 1 << len(ranked))  # what isn't planned is never needed after
        pieces = _pieces(graph, root) if sharing.views else {}
        steps = cls(
            alone=_NodeAlone([0 if value in pieces else graph.sizes[value] for value in ranked]),
            covered=_Covered({rank: pieces[value] for rank, value in enumerate(ranked) if value in pieces}),
            shared=bits(pieces),
            reads=reads,
            writes=writes,
            over=[over[value] for value in ranked],
            over_any=[functools.reduce(operator.or_, (over[value] for value in each), 0) for each in graph.writes],
            producer=[graph.producer[value] for value in ranked],
        )
        return steps, bits(graph.outputs)

    def bytes_of(self, values: Values) -> int:
        """Of all these values, each byte once."""
        return self.alone[values] + self.covered[values & self.shared]

    def needed(self, node: int, after: Values = 0) -> int:
        """Bytes at the step of a node when these other values are there, and stay."""
        return self.bytes_of(after & ~self.writes[node] | self.reads[node] | self.born(node, after))

    def born(self, node: int, after: Values) -> Values:
        """What a node writes, without what may lie over an input that isn't needed after."""
        born = self.writes[node]
        if self.over_any[node] & ~after:
            for rank in _ranks(born):
                born ^= 1 << rank if self.over[rank] & ~after else 0
        return born


class _NodeAlone(dict[Values, int]):
    """Bytes of those of some values that have no pieces; small sets of values come again and again."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.sizes = sizes

    def __missing__(self, values: Values) -> int:
        self[values] = sum([self.sizes[rank] for rank in _ranks(values)])
        return self[values]


class _Covered(dict[Values, int]):
    """Bytes of all pieces of some values, each byte once."""

    def __init__(self, pieces: Mapping[int, Pieces]) -> None:
        super().__init__()
        self.pieces = pieces

    def __missing__(self, values: Values) -> int:
        # Bytes in any of the pieces
        pieces = [piece for rank in _ranks(values) for piece in self.pieces[rank]]
        total, value, end = 0, -1, 0
        for other, first, last in sorted(pieces):
            end = end if other == value else 0
            value = other
            total += max(0, last - max(first, end))
            end = max(end, last)
        self[values] = total
        return self[values]


def _pieces(graph: Graph, root: Sequence[int]) -> dict[int, Pieces]:
    """What the bytes of each value hold that has subviews: whatever was written first."""
    pieces: dict[int, Pieces] = {}

    def of(value: int) -> Pieces:
        return pieces.setdefault(value, ((value, 0, graph.sizes[value]),))

    for subviews, writes in zip(graph.subviews, graph.writes, strict=True):
        planned = sorted((byte, root[a], root[b], b) for a, b, byte in subviews if root[a] >= 0 and root[b] >= 0)
        joined: list[tuple[int, int, int]] = []
        end = 0
        for byte, part, whole, written in planned:
            if written not in writes:
                pieces[part] = _between(of(whole), byte, byte + graph.sizes[part])
            else:
                joined += [(whole, end, byte)] if end < byte else []
                joined += of(part)
                end = byte + graph.sizes[part]
                pieces[whole] = (*joined, (whole, end, graph.sizes[whole])) if end < graph.sizes[whole] else (*joined,)
    return pieces


def _between(pieces: Pieces, start: int, stop: int) -> Pieces:
    """The pieces of the bytes ``[start, stop)``."""
    found, at = list[tuple[int, int, int]](), 0
    for value, first, end in pieces:
        low, high = max(start, at), min(stop, at + end - first)
        if low < high:
            found.append((value, first + low - at, first + high - at))
        at += end - first
    return tuple(found)


def _bottleneck(steps: _StepBounds, values: Values, effort: int) -> int:
    """Bytes that a schedule needs at some step up to the one after which these values are in memory."""
    most = steps.bytes_of(values)
    heap = [(most, _latest(steps, values), 0, values)]
    least = {values: most}
    alone, covered, shared, number = steps.alone, steps.covered, steps.shared, 0
    while heap:
        bottleneck, _, _, values = heapq.heappop(heap)
        most = max(most, bottleneck)
        if not values or effort < 0:
            break
        effort -= values.bit_count() ** 2
        unchanged = alone[values]
        for node in _last_nodes(steps, values):
            before = values & ~steps.writes[node] | steps.reads[node]
            there = before | steps.born(node, values)
            needed = unchanged - alone[values & ~there] + alone[there & ~values] + covered[there & shared]
            needed = max(most, needed)
            if before not in least or needed < least[before]:
                least[before] = needed
                number += 1
                heapq.heappush(heap, (needed, _latest(steps, before), number, before))
    return most


def _latest(steps: _StepBounds, values: Values) -> int:
    return steps.producer[values.bit_length() - 1] if values else -1


def _last_nodes(steps: _StepBounds, values: Values) -> Sequence[int]:
    """The nodes that may have run last. Only one, if it reads and writes nothing but these values: it may as well."""
    nodes, rest, absent = list[int](), values, ~values
    while rest:
        rank = rest.bit_length() - 1
        node = steps.producer[rank]
        if not (steps.reads[node] | steps.writes[node]) & absent:
            return [node]
        nodes.append(node)
        rest &= ~(steps.writes[node] | 1 << rank)
    return nodes


def _without_repeats(graph: Graph, steps: _StepBounds, outputs: Values) -> Iterator[int]:
    """Bytes at each node's step, of what is there in every order: written before it in all, and read after it in all.

    This takes a step an edge.
    """
    nodes = len(graph.nodes)
    before, after = [0] * nodes, [outputs] * nodes
    for node in range(nodes):
        for source in graph.sources[node]:
            before[node] |= before[source] | steps.writes[source]
    for node in reversed(range(nodes)):
        for source in graph.sources[node]:
            after[source] |= after[node] | steps.reads[node]
    for node in range(nodes):
        yield steps.needed(node, before[node] & after[node])


def _ranks(values: Values) -> Iterator[int]:
    """The bits that are set, from the last written to the first."""
    while values:
        rank = values.bit_length() - 1
        yield rank
        values ^= 1 << rank
