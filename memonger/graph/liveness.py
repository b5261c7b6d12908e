"""Which values share one address, and from which step to which each address is in use.

A *storage* is the bytes of one or more values: views of each other, or values that overwrite one another in place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from memonger.graph.graph import Graph, Pair
from memonger.layout.buffers import Buffer

ALIGNMENT = 64  # bytes: a cache line, and what onnxruntime's own allocator gives


@dataclass(frozen=True, slots=True)
class Sharing:
    """What may share an address. All on is the smallest arena; off is for finding faults."""

    inplace: bool = True
    views: bool = True
    reuse: bool = True


@dataclass(frozen=True, slots=True)
class Storage:
    """For each value the number of its storage (-1: not planned), and the buffer of each storage."""

    of_value: tuple[int, ...]
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
    """Decide in one pass which values share a storage: a view always, in place where nobody needs the old bytes.

    Args:
        graph: Its nodes run in file order.
        sharing: What may share.
        alignment: Put on every buffer, in bytes.
        offsets: An existing layout by value number: only values at one offset share. This reads a plan's storages off
            its offsets.
    """
    sharing = sharing or Sharing()
    last = last_reads(graph)
    of_value = [-1] * len(graph.values)
    sizes: list[int] = []
    start: list[int] = []
    stop: list[int] = []
    for step, writes in enumerate(graph.writes):
        used: set[int] = set()
        pairs = _allowed(graph, sharing, step, offsets)
        for value in writes:
            if not graph.planned[value]:
                continue
            storage = _shared(graph, pairs, step, value, of_value, stop, used)
            if storage < 0:
                storage = len(sizes)
                sizes.append(graph.sizes[value])
                start.append(step)
                stop.append(step + 1)
            of_value[value] = storage
            used.add(storage)
            stop[storage] = max(stop[storage], last[value] + 1)
    end = len(graph.nodes)
    if not sharing.reuse:
        start, stop = [0] * len(sizes), [end] * len(sizes)
    buffers = tuple(
        Buffer(number, size, start[number], min(stop[number], end), alignment) for number, size in enumerate(sizes)
    )
    return Storage(tuple(of_value), buffers)


def _allowed(
    graph: Graph, sharing: Sharing, step: int, offsets: Mapping[int, int] | None
) -> tuple[list[Pair], list[Pair]]:
    """The node's view pairs and in-place pairs that the switches, and an existing layout, leave."""
    views = graph.views[step] if sharing.views else ()
    inplace = graph.inplace[step] if sharing.inplace else ()
    if offsets is None:
        return list(views), list(inplace)

    def at_one_offset(pairs: tuple[Pair, ...]) -> list[Pair]:
        return [(a, b) for a, b in pairs if offsets[a] == offsets[b]]

    return at_one_offset(views), at_one_offset(inplace)


def _shared(
    graph: Graph,
    pairs: tuple[list[Pair], list[Pair]],
    step: int,
    value: int,
    of_value: list[int],
    stop: list[int],
    used: set[int],
) -> int:
    """The storage the value takes over or joins at this step, or -1."""
    views, inplace = pairs
    for source, target in views:
        if target == value and of_value[source] not in used:
            return of_value[source]
    for source, target in inplace:
        storage = of_value[source]
        if target == value and storage not in used and stop[storage] == step + 1:
            others = [v for v in graph.reads[step] if v != source and of_value[v] == storage]
            if not others:
                return storage
    return -1


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
