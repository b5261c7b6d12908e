"""An independent checker of plans.

It follows the bytes instead of computing lifetimes: step by step it keeps, for every stretch of the arena, whose
content is there. A node may read a value only while all its bytes are still its own. It shares no code with the
searches, the storage assignment or the allocators, and runs on every plan that is saved, loaded or executed: a plan
file's offsets become raw addresses.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from memonger.errors import VerificationError
from memonger.graph.graph import Graph
from memonger.ir.operators import BEGIN, RANKS, WAIT

Stretch = tuple[int, int]


class _Content:
    """Who owns which bytes: disjoint stretches, sorted by offset, each with the values whose content it holds.

    A value may own several, as parts of it are values too. It is there as long as it owns all its bytes.
    """

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.stops: list[int] = []
        self.owners: list[set[int]] = []
        self.place: dict[int, tuple[int, int]] = {}
        self.lost_to: dict[int, int] = {}
        self.replaced: set[int] = set()  # persistent inputs, or parts, whose bytes hold their new content by now
        self.torn: set[int] = set()  # persistent inputs of which parts are replaced
        self.grown: set[int] = set()  # persistent inputs behind which more was written
        self.cut: dict[int, tuple[int, int, int]] = {}  # parts of persistent inputs: which, and its bytes in it

    def overlapping(self, start: int, stop: int) -> slice:
        first = bisect_right(self.starts, start)
        if first and self.stops[first - 1] > start:
            first -= 1
        last = first
        while last < len(self.starts) and self.starts[last] < stop:
            last += 1
        return slice(first, last)

    def owners_in(self, start: int, stop: int) -> set[int]:
        """The values that own any of these bytes."""
        return set().union(*self.owners[self.overlapping(start, stop)])

    def write(self, value: int, start: int, stop: int, changed: list[Stretch]) -> None:
        """Put a value's content at ``[start, stop)``, of which these stretches change and the others are right."""
        for edge in {start, stop, *chain.from_iterable(changed)}:
            self._split(edge)
        for begin, end in changed:
            hit = self.overlapping(begin, end)
            for owner in set().union(*self.owners[hit]):
                self._forget(owner)
                self.lost_to[owner] = value
            self.starts[hit], self.stops[hit], self.owners[hit] = [begin], [end], [set()]
        for owners in self.owners[self.overlapping(start, stop)]:
            owners.add(value)
        self.place[value] = (start, stop)

    def _split(self, edge: int) -> None:
        """Let no stretch reach over this byte."""
        at = bisect_right(self.starts, edge) - 1
        if at >= 0 and self.starts[at] < edge < self.stops[at]:
            self.starts.insert(at + 1, edge)
            self.stops.insert(at, edge)
            self.owners.insert(at + 1, set(self.owners[at]))

    def _forget(self, value: int) -> None:
        for owners in self.owners[self.overlapping(*self.place.pop(value))]:
            owners.discard(value)


def verify(
    graph: Graph,
    offsets: Mapping[int, int],
    arena_bytes: int,
    alignment: int,
    groups: Sequence[Sequence[int]] | None = None,
) -> None:
    """Check a layout of a graph whose nodes run in file order.

    Args:
        graph: What will run.
        offsets: The byte offset of every planned value, by number; every planned value and no other has one.
        arena_bytes: Size of the arena.
        alignment: Every offset is a multiple of it.
        groups: Values that have to be side by side, a group each: in the order in which they are given, with no
            more between two than the alignment takes, so that nothing else can lie there. None: those of the graph's
            collectives.

    Raises:
        VerificationError: a value without an address, outside the arena or misaligned; two values that collide; a
            node that would read overwritten bytes; a group with gaps. It names the node, the values and the bytes.
    """
    _check_addresses(graph, offsets, arena_bytes, alignment)
    for members in graph.groups if groups is None else groups:
        _check_group(graph, offsets, alignment, members)
    _check_collectives(graph, offsets)
    arena = _Content()
    written: set[int] = set(range(len(graph.values))) - {v for writes in graph.writes for v in writes}
    tied: dict[int, list[int]] = {}
    for step in range(len(graph.nodes)):
        for value in graph.reads[step]:
            _check_readable(graph, arena, written, tied, value, f"node '{graph.nodes[step]}' (step {step})")
        for part, whole, byte in graph.subviews[step]:
            if not graph.planned[whole] and not graph.planned[part] and graph.producer[whole] < 0:
                arena.cut[part] = whole, byte, byte + graph.sizes[part]
        _write_outputs(graph, offsets, arena, step)
        _write_updates(graph, arena, tied, step)
        _write_growths(graph, arena, step)
        written.update(graph.writes[step])
        for source, target in graph.runtime_aliases[step]:
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


def _check_group(graph: Graph, offsets: Mapping[int, int], alignment: int, members: Sequence[int]) -> None:
    before, end = -1, -1
    for value in members:
        if value not in offsets:
            raise VerificationError(f"value '{graph.values[value]}' is in a group, but isn't kept in the arena.")
        if before >= 0 and offsets[value] != end + -end % alignment:
            raise VerificationError(
                f"value '{graph.values[value]}' at byte {offsets[value]} isn't right behind '{graph.values[before]}', "
                f"which ends at {end}: their group has to be contiguous."
            )
        before, end = value, offsets[value] + graph.sizes[value]


def _check_collectives(graph: Graph, offsets: Mapping[int, int]) -> None:
    """From the node that begins a collective to the one that waits for it nobody else reads or writes its bytes."""
    steps = {op: step for step, op in enumerate(graph.ops)}
    for wait, members in graph.collectives:
        name, begin = graph.nodes[wait], steps.get(graph.ops[wait].replace(f"::{WAIT}", f"::{BEGIN}"), wait)
        if begin >= wait or len(members) != len(graph.writes[wait]) - 1 or not {*members} <= {*graph.reads[begin]}:
            raise VerificationError(f"node '{name}' (step {wait}) waits for a collective that no node began.")
        moved = [(a, b) for a, b in graph.inplace[wait] if offsets[a] != offsets[b]]
        if moved:
            a, b = (f"'{graph.values[v]}' at byte {offsets[v]}" for v in moved[0])
            raise VerificationError(f"node '{name}' (step {wait}) gives {b}, and its collective has written {a}.")
        places = [(offsets[v], offsets[v] + graph.sizes[v]) for v in members]
        for step in range(begin + 1, wait):
            for value in (*graph.reads[step], *graph.writes[step]):
                if not graph.planned[value] or graph.ops[step].startswith(f"{RANKS}::"):
                    continue
                if any(offsets[value] < stop and start < offsets[value] + graph.sizes[value] for start, stop in places):
                    raise VerificationError(
                        f"node '{graph.nodes[step]}' (step {step}) uses '{graph.values[value]}', which has bytes of "
                        f"the collective that node '{name}' (step {wait}) waits for."
                    )


def _check_readable(
    graph: Graph, arena: _Content, written: set[int], tied: Mapping[int, list[int]], value: int, where: str
) -> None:
    pending, seen = [value], {value}
    while pending:
        needed = pending.pop()
        name = graph.values[needed]
        if needed not in written:
            raise VerificationError(f"{where} needs '{name}' before anything has written it.")
        torn = needed == value and needed in arena.torn  # a part of it may be as it was
        if torn or needed in arena.replaced or (graph.planned[needed] and needed not in arena.place):
            by = graph.values[arena.lost_to[needed]]
            raise VerificationError(f"{where} needs '{name}', whose bytes '{by}' has overwritten.")
        fresh = [source for source in tied.get(needed, ()) if source not in seen]
        seen.update(fresh)
        pending.extend(fresh)


def _write_outputs(graph: Graph, offsets: Mapping[int, int], arena: _Content, step: int) -> None:
    done: list[int] = []
    for value in graph.writes[step]:
        if graph.planned[value]:
            start, stop = offsets[value], offsets[value] + graph.sizes[value]
            changed = _gaps(start, stop, _unchanged(graph, arena, step, value, (start, stop)))
            for stretch in changed:
                _check_collisions(graph, arena, step, value, (start, stop), stretch, done)
            arena.write(value, start, stop, changed)
            done.append(value)


def _unchanged(graph: Graph, arena: _Content, step: int, value: int, place: Stretch) -> list[Stretch]:
    """The bytes that hold what is to be written there already, as they are those of an input of the node."""
    if any(target == value and arena.place.get(source) == place for source, target in graph.views[step]):
        return [place]
    stretches = []
    for part, whole, byte in graph.subviews[step]:
        at = arena.place.get(whole if value == part else part)
        if at is not None and value in (part, whole):
            inner, outer = (place, at) if value == part else (at, place)
            if inner[0] == outer[0] + byte >= outer[0] and inner[1] <= outer[1]:
                stretches.append(inner)
    return stretches


def _gaps(start: int, stop: int, stretches: list[Stretch]) -> list[Stretch]:
    """The bytes of ``[start, stop)`` in none of the stretches."""
    gaps = []
    for begin, end in [*sorted(stretches), (stop, stop)]:
        if start < begin:
            gaps.append((start, begin))
        start = max(start, end)
    return gaps


def _write_updates(graph: Graph, arena: _Content, tied: Mapping[int, list[int]], step: int) -> None:
    """The new content of a persistent input goes over the old one: once a run, and over nothing else that is read."""
    for old, new in graph.updates[step]:
        where = f"node '{graph.nodes[step]}' (step {step}) writes '{graph.values[new]}' over '{graph.values[old]}'"
        if old in arena.replaced or (old in arena.cut and arena.cut[old][0] in arena.replaced):
            by = graph.values[arena.lost_to[old if old in arena.replaced else arena.cut[old][0]]]
            raise VerificationError(f"{where}, which '{by}' has overwritten before.")
        if old in arena.place or graph.planned[old] or graph.planned[new]:
            raise VerificationError(f"{where}, which isn't a persistent input.")
        if graph.sizes[old] != graph.sizes[new]:
            raise VerificationError(f"{where}: they are {graph.sizes[new]} and {graph.sizes[old]} bytes.")
        alias = next((v for v in graph.reads[step] if v != old and old in tied.get(v, ())), None)
        if alias is not None:
            raise VerificationError(f"{where}, while it reads '{graph.values[alias]}', which may be the same bytes.")
        for lost in (old, *_overlapping(arena, old)):
            arena.replaced.add(lost)
            arena.lost_to[lost] = new
        if old in arena.cut:
            arena.torn.add(arena.cut[old][0])
            arena.lost_to[arena.cut[old][0]] = new


def _write_growths(graph: Graph, arena: _Content, step: int) -> None:
    """What a persistent input becomes with more behind it is written where that lies: nothing that is read changes."""
    for old, new in graph.appends[step]:
        where = f"node '{graph.nodes[step]}' (step {step}) writes '{graph.values[new]}' behind '{graph.values[old]}'"
        if graph.planned[old] or graph.planned[new] or graph.producer[old] >= 0 or old not in graph.reads[step]:
            raise VerificationError(f"{where}, which isn't a persistent input that it reads.")
        replaced = any(old == other for pairs in graph.updates for other, _ in pairs)
        if old in arena.grown or replaced or old in graph.outputs:
            raise VerificationError(f"{where}, where another node writes as well, or which is an output itself.")
        if graph.sizes[new] < graph.sizes[old]:
            raise VerificationError(f"{where}: it is {graph.sizes[new]} bytes, and that is {graph.sizes[old]}.")
        arena.grown.add(old)


def _overlapping(arena: _Content, old: int) -> list[int]:
    """Parts of a persistent input; of such a part the other ones that have bytes of it."""
    if old not in arena.cut:
        return [part for part, (whole, _, _) in arena.cut.items() if whole == old]
    whole, start, stop = arena.cut[old]
    return [p for p, (w, a, b) in arena.cut.items() if w == whole and p != old and a < stop and start < b]


def _check_collisions(
    graph: Graph, arena: _Content, step: int, value: int, place: Stretch, changed: Stretch, done: list[int]
) -> None:
    """Bytes change over an input of the node only where the written list allows it, at the very same place."""
    allowed = {source for source, target in graph.inplace[step] if target == value and arena.place.get(source) == place}
    for other in sorted(arena.owners_in(*changed)):
        if other in done or (other in graph.reads[step] and other not in allowed):
            at = arena.place[other]
            raise VerificationError(
                f"node '{graph.nodes[step]}' (step {step}) writes '{graph.values[value]}' at "
                f"bytes [{place[0]}, {place[1]}) over '{graph.values[other]}' at [{at[0]}, {at[1]}), which it "
                f"{'also writes' if other in done else 'reads'} at that step."
            )


def sharing_pairs(graph: Graph, offsets: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    """The (input, output) pairs that lie at one address in a layout, views and in place."""
    pairs = chain.from_iterable(chain(graph.views, graph.inplace))
    return tuple(dict.fromkeys((a, b) for a, b in pairs if offsets[a] == offsets[b]))


def stays_within(
    graph: Graph,
    sharing: tuple[tuple[int, int], ...],
    sizes: Mapping[int, int],
    changed: Iterable[int] | None = None,
) -> bool:
    """Whether a layout that `verify` passed holds at other sizes, by a sufficient condition that takes microseconds.

    No planned value is larger than it was, and those at one address (`sharing_pairs`) are as large as one another:
    every value then owns a part of the bytes it owned, and none collides that didn't. If not, `verify` has to be asked.

    Args:
        graph: What was laid out.
        sharing: See `sharing_pairs`.
        sizes: Bytes of each planned value.
        changed: Values that may be larger than they were; None: any.
    """
    return all(sizes[value] <= graph.sizes[value] for value in (sizes if changed is None else changed)) and all(
        sizes[a] == sizes[b] for a, b in sharing
    )
