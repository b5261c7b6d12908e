"""An independent checker of plans.

It follows the bytes instead of computing lifetimes: step by step it keeps, for every stretch of the arena, whose
content is there. A node may read a value only while all its bytes are still its own. It shares no code with the
searches, the storage assignment or the allocators, and runs on every plan that is saved, loaded or executed: a plan
file's offsets become raw addresses.
"""

from bisect import bisect_right
from collections.abc import Mapping

from memonger.errors import VerificationError
from memonger.graph.graph import Graph


class _Arena:
    """Who owns which bytes: disjoint stretches, sorted by offset, each with the values whose content it holds."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.stops: list[int] = []
        self.owners: list[set[int]] = []
        self.place: dict[int, tuple[int, int]] = {}
        self.lost_to: dict[int, int] = {}
        self.replaced: set[int] = set()  # persistent inputs whose bytes hold their new content by now

    def overlapping(self, start: int, stop: int) -> slice:
        first = bisect_right(self.starts, start)
        if first and self.stops[first - 1] > start:
            first -= 1
        last = first
        while last < len(self.starts) and self.starts[last] < stop:
            last += 1
        return slice(first, last)

    def write(self, value: int, start: int, stop: int, keep: set[int]) -> None:
        """Put a value's content at ``[start, stop)``; of what was there only the values in ``keep`` survive."""
        hit = self.overlapping(start, stop)
        for owners in self.owners[hit]:
            for owner in owners - keep:
                del self.place[owner]
                self.lost_to[owner] = value
        self.starts[hit], self.stops[hit], self.owners[hit] = [start], [stop], [keep | {value}]
        self.place[value] = (start, stop)


def verify(graph: Graph, offsets: Mapping[int, int], arena_bytes: int, alignment: int) -> None:
    """Check a layout of a graph whose nodes run in file order.

    Args:
        graph: What will run.
        offsets: The byte offset of every planned value, by number; every planned value and no other has one.
        arena_bytes: Size of the arena.
        alignment: Every offset is a multiple of it.

    Raises:
        VerificationError: a value without an address, outside the arena or misaligned; two values that collide; a
            node that would read overwritten bytes. It names the node, the values and the bytes.
    """
    _check_addresses(graph, offsets, arena_bytes, alignment)
    arena = _Arena()
    written: set[int] = set(range(len(graph.values))) - {v for writes in graph.writes for v in writes}
    tied: dict[int, list[int]] = {}
    for step in range(len(graph.nodes)):
        for value in graph.reads[step]:
            _check_readable(graph, arena, written, tied, value, f"node '{graph.nodes[step]}' (step {step})")
        _write_outputs(graph, offsets, arena, step)
        _write_updates(graph, arena, tied, step)
        written.update(graph.writes[step])
        for source, target in graph.ties[step]:
            tied.setdefault(target, []).append(source)
    for value in graph.outputs:
        _check_readable(graph, arena, written, tied, value, "the end of the run, as an output")


def _check_addresses(graph: Graph, offsets: Mapping[int, int], arena_bytes: int, alignment: int) -> None:
    if arena_bytes < 0 or alignment < 1:
        raise VerificationError(
            f"an arena must have 0 bytes or more, aligned to 1 or more: this has {arena_bytes}, aligned to {alignment}."
        )
    for value, name in enumerate(graph.values):
        if graph.planned[value] != (value in offsets):
            kind = "has no offset" if graph.planned[value] else "has an offset, but isn't kept in the arena"
            raise VerificationError(f"value '{name}' {kind}.")
        if not graph.planned[value]:
            continue
        offset, size = offsets[value], graph.sizes[value]
        if offset < 0 or offset + size > arena_bytes:
            raise VerificationError(
                f"value '{name}' at bytes [{offset}, {offset + size}) leaves the arena of {arena_bytes} bytes."
            )
        if offset % alignment:
            raise VerificationError(f"value '{name}' at byte {offset} is not aligned to {alignment} bytes.")


def _check_readable(
    graph: Graph, arena: _Arena, written: set[int], tied: Mapping[int, list[int]], value: int, where: str
) -> None:
    pending, seen = [value], {value}
    while pending:
        needed = pending.pop()
        name = graph.values[needed]
        if needed not in written:
            raise VerificationError(f"{where} needs '{name}' before anything has written it.")
        if needed in arena.replaced or (graph.planned[needed] and needed not in arena.place):
            by = graph.values[arena.lost_to[needed]]
            raise VerificationError(f"{where} needs '{name}', whose bytes '{by}' has overwritten.")
        fresh = [source for source in tied.get(needed, ()) if source not in seen]
        seen.update(fresh)
        pending.extend(fresh)


def _write_outputs(graph: Graph, offsets: Mapping[int, int], arena: _Arena, step: int) -> None:
    done: list[int] = []
    for value in graph.writes[step]:
        if not graph.planned[value]:
            continue
        start = offsets[value]
        stop = start + graph.sizes[value]
        _check_collisions(graph, offsets, arena, step, value, done)
        keep = {
            source
            for source, target in graph.views[step]
            if target == value and arena.place.get(source) == (start, stop)
        }
        survivors: set[int] = set()
        for owners in arena.owners[arena.overlapping(start, stop)]:
            if owners & keep:
                survivors |= owners
        arena.write(value, start, stop, survivors)
        done.append(value)


def _write_updates(graph: Graph, arena: _Arena, tied: Mapping[int, list[int]], step: int) -> None:
    """The new content of a persistent input goes over the old one: once a run, and over nothing else that is read."""
    for old, new in graph.updates[step]:
        where = f"node '{graph.nodes[step]}' (step {step}) writes '{graph.values[new]}' over '{graph.values[old]}'"
        if old in arena.replaced:
            raise VerificationError(f"{where}, which '{graph.values[arena.lost_to[old]]}' has overwritten before.")
        if old in arena.place or graph.planned[old] or graph.planned[new]:
            raise VerificationError(f"{where}, which isn't a persistent input.")
        if graph.sizes[old] != graph.sizes[new]:
            raise VerificationError(f"{where}: they are {graph.sizes[new]} and {graph.sizes[old]} bytes.")
        alias = next((v for v in graph.reads[step] if v != old and old in tied.get(v, ())), None)
        if alias is not None:
            raise VerificationError(f"{where}, while it reads '{graph.values[alias]}', which may be the same bytes.")
        arena.replaced.add(old)
        arena.lost_to[old] = new


def _check_collisions(
    graph: Graph, offsets: Mapping[int, int], arena: _Arena, step: int, value: int, done: list[int]
) -> None:
    """An output may lie over an input of its own node only where the written list allows it, at the very same bytes."""
    start, stop = offsets[value], offsets[value] + graph.sizes[value]
    allowed = {
        source
        for source, target in (*graph.views[step], *graph.inplace[step])
        if target == value and arena.place.get(source) == (start, stop)
    }
    shared = {owner for source in allowed for owner in _owners_at(arena, arena.place[source])}
    for owners in arena.owners[arena.overlapping(start, stop)]:
        for other in sorted(owners):
            at = arena.place[other]
            clash = other in done or (other in graph.reads[step] and other not in allowed)
            if clash and not (other in shared and _is_view_pair(graph, step, allowed, value)):
                raise VerificationError(
                    f"node '{graph.nodes[step]}' (step {step}) writes '{graph.values[value]}' at "
                    f"bytes [{start}, {stop}) over '{graph.values[other]}' at [{at[0]}, {at[1]}), which it "
                    f"{'also writes' if other in done else 'reads'} at that step."
                )


def _owners_at(arena: _Arena, place: tuple[int, int]) -> set[int]:
    return {owner for owners in arena.owners[arena.overlapping(*place)] for owner in owners}


def _is_view_pair(graph: Graph, step: int, allowed: set[int], value: int) -> bool:
    return any(source in allowed and target == value for source, target in graph.views[step])
