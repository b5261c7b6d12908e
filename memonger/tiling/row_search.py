"""Which bands of a model run in slices of an image's rows, and in how many slices: by memory and time.

Where nodes that need images whole (`row_rules`) stand, the order of the model falls into stretches. Each is cut at a
few places where little crosses from one side to the other; the bands between two of them, whole or in so many slices,
are judged by what a slice from their middle keeps and needs. Of all sequences of bands the one is
taken that holds an arena in the least time (dynamic programming), for a number of arenas, each a fraction of the one
before.
"""

import dataclasses
import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np
import onnx_ir as ir

from memonger.errors import PlanError
from memonger.graph.liveness import assign_storage, last_reads, live_bytes
from memonger.graph.session_memory import MANY_STRIPS, PACKED, bytes_of, session_bytes
from memonger.ir.extract import is_fed
from memonger.ir.marks import OVERLAP, before_chunks, chunk_of
from memonger.ir.values import nbytes, static_shape
from memonger.lowering.cpu_convolutions import block_size
from memonger.plan_file import ROWS
from memonger.schedule.solution import IN_SLICES
from memonger.tiling.axes import BLOCKED, LARGER, Axes, row_rules, rows_axis
from memonger.tiling.candidates import MOST_NODES, WORTH, Candidate, CutModel, ToSlice
from memonger.tiling.chunk_times import CACHE_BYTES, launch_seconds, run_seconds
from memonger.tiling.cutting import Interval, Refusal, Slicing
from memonger.tiling.slices import Band, Slice, exits_of, row_band, row_slices, rows_in, slice_rows

PLACES, FEWEST_PLACES, STEPS_OF_BANDS = 16, 6, 1200
"""A stretch may be cut into so many parts of about as many steps each, or fewer where bands would have more steps."""

SLICES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128)
"""Numbers of slices that are looked at."""

COARSE, LESS = 8, 0.97
"""Finer slices than so many are looked at as long as they need so much of what coarser ones needed."""

STEPS = 3
"""Arenas that are tried for each halving of memory."""

HALVINGS = 7

HIDDEN = 0.5
"""Of the time in which values come from memory, or else products are computed, whichever is less, that much is added to
the other: a denoiser and a super-resolution network took 0.98 to 1.02 of their time in 4 to 27 slices."""

PRICES = (0.0, 5e-10, 5e-8)
"""Seconds that a byte less of what sessions take of the process is worth."""

FORMS = 6
"""About so many slices of a band differ: the first ones, which fill what is kept, and the last ones."""

BLOCKS_AT_ONCE = 4
"""So many blocks of channels onnxruntime computes together."""

Fitted = Callable[[Band, Mapping[ir.Node, Slicing]], Band | None]
"""From a band and its nodes to a band."""

_MORE_NODES = 3
"""Nodes that cut, join and view for each value of which more is read than was just made."""


def _idle_share(node: ir.Node, rows: int, cores: int) -> float:
    """How much longer a copy of a node takes that gives so few rows that not all cores get as many.

    Of blocked convolutions: onnxruntime divides the rows of an image, for each `BLOCKS_AT_ONCE` blocks of its channels,
    among the cores.
    """
    batch, channels, *_ = static_shape(node.outputs[0]) or (1, 1)
    if node.domain != BLOCKED or node.op_type != "Conv":
        return 0.0
    pieces = batch * rows * -(-channels // (BLOCKS_AT_ONCE * block_size()))
    return -(-pieces // cores) * cores / pieces - 1


@dataclass(frozen=True, slots=True)
class BandOfRows:
    """A band and what it is estimated to need.

    Attributes:
        band: None: its nodes run as they are.
        bytes: Of arena and workspace.
        seconds: More than as it is.
        nodes: More than as it is.
        own: Nodes that run in slices.
        packed: Bytes of weights that these pack again.
    """

    band: Band | None
    bytes: float
    seconds: float = 0.0
    nodes: int = 0
    own: int = 0
    packed: int = 0

    @property
    def shares(self) -> bool:
        """Whether slices of one form are to share a session."""
        return self.nodes > MANY_STRIPS or self.packed > PACKED

    @property
    def session(self) -> int:
        """About the bytes that sessions take more of the process."""
        part = min(1.0, FORMS / self.band.counts[0]) if self.shares and self.band is not None else 1.0
        more = bytes_of(round(part * self.nodes), self.nodes, False) - bytes_of(0, 0, False)
        return more + round(part * self.packed)


KnownBand = tuple[int, int, tuple[int, ...]]
"""The first step of a band, the one behind it, and the marked ones between."""


def _in_long_stretches(nodes: Sequence[ir.Node], rules: Sequence[Slicing | Refusal | None]) -> list[int]:
    """An order in which what needs images whole comes before nodes that it doesn't depend on.

    So the values of an attention are there before the product of its queries and keys, and all of that is one stretch;
    also where these are computed in rows, in the stretch before.
    And what is made of an image that is there whole anyway, for what comes behind, waits for that.
    """
    order, read_whole = list[int](), _read_whole(nodes, rules)
    for _, steps in itertools.groupby(range(len(nodes)), lambda step: chunk_of(nodes[step])):
        before, own, behind, there = list[int](), list[int](), list[int](), set[ir.Node]()
        latest = -1
        for step in larger_late(nodes, list(steps)):
            node, waits_for_reader, latest = nodes[step], step < latest, max(step, latest)
            how, depends = rules[step], any(v is not None and v.producer() in there for v in node.inputs)
            if isinstance(how, Slicing) and (depends or node not in read_whole):
                if behind:
                    read = {value for other in behind for value in nodes[other].inputs}
                    also = read.union(value for other in own for value in nodes[other].inputs)
                    unread = [other for other in own if also.isdisjoint(nodes[other].outputs)]
                    images = {other: [v for v in nodes[other].inputs if rows_axis(v) is not None] for other in unread}
                    waits = [other for other, values in images.items() if read.issuperset(values)]
                    order += [*before, *(other for other in own if other not in waits)]
                    before, own, behind, there = behind, waits, [], {nodes[other] for other in waits}
                whole = {node.inputs[index] for index in how.whole}
                if not behind and any(value is not None and value.producer() in there for value in whole):
                    order += [*before, *own]
                    before, own, there = [], [], set[ir.Node]()
                own.append(step)
                there.add(node)
            elif depends or (behind and waits_for_reader):
                behind.append(step)
                there.add(node)
            else:
                before.append(step)
        order += [*before, *own, *behind]
    return order


def _no_whole_reads(nodes: Sequence[ir.Node], rules: Sequence[Slicing | Refusal | None]) -> list[int]:
    """For each node the number of the part that it is in: none reads whole what its part computes."""
    numbers, made = list[int](), set[ir.Value | None]()
    for node, how in zip(nodes, rules, strict=True):
        starts = isinstance(how, Slicing) and not made.isdisjoint(node.inputs[index] for index in how.whole)
        if starts:
            made.clear()
        made.update(node.outputs)
        numbers.append(numbers[-1] + starts if numbers else 0)
    return numbers


def _read_whole(nodes: Sequence[ir.Node], rules: Sequence[Slicing | Refusal | None]) -> set[ir.Node]:
    """Nodes whose rows serve for nothing but what others read whole that give rows, as an attention's values."""
    whole = {
        node.inputs[index]
        for node, how in zip(nodes, rules, strict=True)
        if isinstance(how, Slicing)
        for index in how.whole
    }
    found = set[ir.Node]()
    for node in reversed(nodes):
        readers = [user for value in node.outputs if value not in whole for user in value.consumers()]
        if (readers or not whole.isdisjoint(node.outputs)) and found.issuperset(readers):
            found.add(node)
    return found


def larger_late(nodes: Sequence[ir.Node], steps: Sequence[int]) -> list[int]:
    """These steps in an order in which what is larger than what it is made of is made right before its first reader.

    What is made of that without getting smaller goes with it. At no step more is alive than before. Images that are
    made larger to be joined at the end are so made together, in slices, and what stands between has the small ones
    beside it.
    """
    place_of, gains = {nodes[step]: step for step in steps}, set[ir.Node]()
    surely = dict(place_of)
    for step in reversed(steps):
        node = nodes[step]
        readers = [place_of.get(user) for value in node.outputs for user in value.consumers()]
        if not readers or None in readers or any(value.is_graph_output() for value in node.outputs):
            continue
        first = min(place for place in readers if place is not None)
        waits = 0  # bytes that would stay as long
        for value in {value for value in node.inputs if value is not None and is_fed(value)}:
            others = (surely.get(user, math.inf) for user in value.consumers() if user is not node)
            waits += 0 if value.is_graph_output() or any(at >= first for at in others) else nbytes(value) or 0
        given = sum(nbytes(value) or 0 for value in node.outputs)
        if waits <= given:
            place_of[node] = first
        if waits < given:
            surely[node] = first
            gains.add(node)
    waiting = dict[int, list[int]]()
    for step in steps:
        node = nodes[step]
        if node in gains or any(value is not None and value.producer() in gains for value in node.inputs):
            gains |= {node} if place_of[node] > step else set()
        else:
            place_of[node] = step
        waiting.setdefault(place_of[node], []).append(step)
    return [one for step in steps for one in waiting.get(step, [])]


class RowSearch(CutModel):
    """Cuts of one model into bands of rows, each looked at once, whatever nodes stay whole.

    Args:
        job: The model, in the order of its plan.
        rules: `row_rules` of its nodes.
        asked: The number of slices that was asked for; 0: any.
        lines: How often the rows are there that are kept for later slices.
        results: How often what a band computes for others is there when it ends.
        moving: Seconds for each byte that is cut or joined for a slice, or of what a band computes for others.
        ends: From the nodes in order to whether a band may end before each; None: before any.
        fitted: From a band and its nodes that read images to the same with as many rows as it needs, or to None where
            it won't do; None: all will.
        known: What searches like this one have found of bands, by their first and last steps and what is marked of
            them to be computed again: other forms of the model have the same where the same is marked.
    """

    def __init__(
        self, job: ToSlice, rules: Sequence[Slicing | Refusal | None], asked: int = 0, *, lines: int = 1,
        results: int = 1, moving: float = 0.0, ends: Callable[[Sequence[ir.Node]], Sequence[bool]] | None = None,
        fitted: Fitted | None = None, known: dict[KnownBand, list[tuple[int, BandOfRows]]] | None = None,
    ) -> None:  # fmt: skip
        order = _in_long_stretches(list(job.lowered.model.graph), rules)
        super().__init__(job, ROWS, order, Axes(0, tuple(rules), {}))
        self.asked, self.lines, self.copies, self.moving, self.fitted = asked, lines, results, moving, fitted
        self.steps = {node: step for step, node in enumerate(self.nodes)}
        self.ends = [True] * (len(self.nodes) + 1) if ends is None else ends(self.nodes)
        self.row_bytes = {v: _row_bytes(v, axis) for v, axis in self.axes_in(0, len(self.nodes)).items()}
        graph, storage = self.graph, self.storage
        last, outputs = last_reads(graph), frozenset(graph.outputs)
        self.buffer_of = dict(zip(graph.values, storage.of_value, strict=True))
        # Of values that have a buffer: the step that makes each, that of its last reader, the buffer, if it is a result
        lives = ((graph.producer[v], last[v], at, v in outputs) for v, at in enumerate(storage.of_value) if at >= 0)
        self.lives = np.array([*lives], int).reshape(-1, 4).T
        self.sizes = np.array([buffer.size for buffer in storage.buffers], float)
        self._known = {} if known is None else known
        self._marked = [step for step, node in enumerate(self.nodes) if OVERLAP in node.metadata_props]

    def candidates(
        self, refused: Mapping[str, int], most: float = math.inf, most_copies: int = MOST_NODES
    ) -> list[Candidate]:
        """The model in row tiles, in several forms, the finest first.

        Args:
            refused: Nodes that gave other bits, and in how many slices; in as many or more they stay whole.
            most: Seconds that they may take longer, by estimate.
            most_copies: How many copies of nodes they may make.
        """
        before = 0.0 if self.job.outer is None else self.job.outer.extra
        sessions, found = session_bytes(self.lowered.model, False), list[Candidate]()
        for bands, parts in self.ways(refused, most - before, most_copies):
            if bands not in self.made:  # the same for the same bands, so that it is written once
                more = max(0.0, math.fsum(part.seconds for part in parts))  # none where caches save some
                packed = sum(part.packed for part in parts if not part.shares)
                self.made[bands] = Candidate(
                    round(max(part.bytes for part in parts)), sessions + sum(part.session for part in parts),
                    before + more, partial(self.in_slices, bands, more, packed, IN_SLICES),
                )  # fmt: skip
            found.append(self.made[bands])
        return found

    def ways(
        self, refused: Mapping[str, int], most: float = math.inf, most_copies: float = MOST_NODES
    ) -> list[tuple[tuple[Band, ...], list[BandOfRows]]]:
        """For ever larger arenas the bands in slices, and all bands, those that run as they are among them.

        The arguments are those of `candidates`.
        """
        # Stretches: steps one after the other of which none needs an image whole, nor what the others compute. Of those
        # of slices of one length all do the same, and the last has most around it
        alike, outside = dict[object, list[tuple[int, int]]](), np.ones(len(self.nodes), bool)
        steps, parts_of = range(len(self.nodes)), _no_whole_reads(self.nodes, self.how)
        for key, group in itertools.groupby(
            steps, lambda s: (isinstance(self.how[s], Refusal), chunk_of(self.nodes[s]), parts_of[s])
        ):
            (is_whole, chunk, _), own = key, list(group)
            if is_whole or not any(isinstance(self.how[step], Slicing) for step in own):
                continue
            begin, end = own[0], own[-1] + 1
            name = (begin, end) if chunk is None else tuple(before_chunks(node) for node in self.nodes[begin:end])
            alike.setdefault((name, chunk and chunk.end - chunk.begin), []).append((begin, end))
            outside[begin:end] = False
        if not alike:
            return []
        whole = float(self.live[outside].max(initial=0)) + float(self.workspace[outside].max(initial=0.0))
        if self.job.outer is not None and whole > WORTH * self.job.plain.total_bytes:
            return []
        stretches = [(self._parts(*at[-1], refused), [begin - at[-1][0] for begin, _ in at]) for at in alike.values()]
        if self.asked:
            arenas = [max([whole, *(_bottleneck(parts) for parts, _ in stretches)])]
        else:
            top = self.job.plain.total_bytes
            arenas = [top * 2 ** (-step / STEPS) for step in reversed(range(1, STEPS * HALVINGS + 1))]
        found: dict[tuple[Band, ...], list[BandOfRows]] = {}
        rooms = [(_bottleneck(one), max(p.bytes for own in one.values() for p in own)) for one, _ in stretches]
        cheapest = cache(lambda place, room, price: _cheapest(stretches[place][0], room, price))
        for arena, price in itertools.product(arenas, PRICES):
            chosen = (cheapest(at, min(max(arena, low), high), price) for at, (low, high) in enumerate(rooms))
            parts = [
                p if p.band is None else dataclasses.replace(p, band=_moved(p.band, by))
                for own, (_, moves) in zip(chosen, stretches, strict=True) for by in moves for p in own
            ]  # fmt: skip
            parts.append(BandOfRows(None, whole))
            bands = tuple(sorted((p.band for p in parts if p.band is not None), key=lambda band: band.begin))
            is_slow = math.fsum(part.seconds for part in parts) > most and not self.asked
            if bands and not is_slow and sum(part.nodes + part.own for part in parts) <= most_copies:
                found.setdefault(bands, parts)
        return sorted(found.items(), key=lambda way: max(part.bytes for part in way[1]))

    def _parts(self, begin: int, end: int, refused: Mapping[str, int]) -> dict[tuple[int, int], list[BandOfRows]]:
        """Bands between places of a stretch: as they are, and in slices, fewer than those that were refused."""
        fewest = [refused.get(str(node.name), MOST_NODES) for node in self.nodes]
        found = dict[tuple[int, int], list[BandOfRows]]()
        for a, b in itertools.combinations(self._places(begin, end), 2):
            key = a, b, tuple(self._marked[bisect_left(self._marked, a) : bisect_left(self._marked, b)])
            if key not in self._known:
                self._known[key] = self._parts_between(a, b)
            most = min(fewest[a:b])
            found[a, b] = [part for asked, part in self._known[key] if asked < most]
        return found

    def _places(self, begin: int, end: int) -> list[int]:
        """Where a stretch may be cut: in each part of its steps where the fewest bytes cross."""
        crossing = np.zeros(len(self.nodes) + 2)
        for buffer in self.storage.buffers:  # written before a step, and read at it or later
            crossing[buffer.start + 1] += buffer.size
            crossing[max(buffer.stop, buffer.start + 1)] -= buffer.size
        crossing = crossing.cumsum()
        count = min(PLACES, end - begin, max(FEWEST_PLACES, STEPS_OF_BANDS // (end - begin)))
        parts = itertools.pairwise(begin + (end - begin) * number // count for number in range(count + 1))
        within = [[step for step in range(max(a, begin + 1), b) or [b] if self.ends[step]] for a, b in parts]
        inner = [min(steps, key=lambda step: (crossing[step], step)) for steps in within if steps]
        return sorted({begin, end, *inner})

    def _parts_between(self, begin: int, end: int) -> list[tuple[int, BandOfRows]]:
        """A band as it is, and in slices, each with the number of slices that was looked for.

        Where what is there whole takes as much as the band as it is, it isn't cut, unless that is asked for.
        """
        workspace = self.workspace[begin:end].max(initial=0.0)
        found = [(0, BandOfRows(None, float(self.live[begin:end].max(initial=0)) + workspace))]
        nodes = dict(zip(self.nodes[begin:end], self.how[begin:end], strict=True))
        own = {node: rule for node, rule in nodes.items() if isinstance(rule, Slicing)}
        (before, given), needed = self._around(begin, end), math.inf
        beside = before + max(1, self.copies) * given
        if beside >= found[0][1].bytes and not self.asked:
            return found
        rows = min((rows_in(value, own) for value in exits_of(own)), default=0)
        packed = sum(self.job.works[str(node.name)].packed for node in own)
        for asked in (self.asked,) if self.asked else SLICES:
            if asked > rows:
                break
            band: Band | None = row_band(begin, end, own, slice_rows(own, asked, 0 if self.asked else self.job.cores))
            band = self.fitted(band, own) if self.fitted is not None and band is not None else band
            if band is None or band.counts[0] < 2 or band == found[-1][1].band:
                continue
            bytes_, seconds, more = self._slice(own, band)
            if asked > COARSE and bytes_ > LESS * needed:
                break
            needed = min(needed, bytes_)
            needs = max(before + given + bytes_ + workspace / band.counts[0], before + self.copies * given)
            part = BandOfRows(band, needs, seconds, more, len(own), packed * (band.counts[0] - 1))
            if part.shares and self.job.runs_in_one:
                break
            runs = band.counts[0] * run_seconds(part.shares, self.job.cores)
            found.append((asked, dataclasses.replace(part, seconds=seconds + runs + self.moving * given)))
        return found

    def _around(self, begin: int, end: int) -> tuple[float, float]:
        """Bytes of what there is whole while a band runs: what was there before, and what is read behind it.

        A result isn't written over what the band reads, of which later slices read more.
        """
        made, last, number, is_result = self.lives
        before = number[(made < begin) & (last >= begin)]
        given = number[(made >= begin) & (made < end) & ((last >= end) | (is_result > 0))]
        return float(self.sizes[np.unique(before)].sum()), float(self.sizes[np.unique(given)].sum())

    def _slice(self, nodes: Mapping[ir.Node, Slicing], band: Band) -> tuple[float, float, int]:
        """What a slice from the middle needs: bytes; of all slices seconds and nodes more than whole."""
        (count,), ends = band.counts, band.stages[0].slices
        middle = max(0, count // 2 - 1)
        slices = row_slices(nodes, [ends[number] for number in sorted({1, middle, middle + 1, middle + 2} - {0})])
        own, kept = slices[-2], slices[-2].kept
        done = {v: copy.rows[1] for one in slices[:-1] for node, copy in one.tiles for v in node.outputs}
        kept_bytes = sum(max(0, done[v] - first) * self.row_bytes[v] for v, first in kept.items() if v in done)
        lines = float(self.lines * kept_bytes)
        peak, nodes_more, moved = self._walked(own)
        peak = max(peak, self._walked(slices[0])[0] - lines)  # the first computes what others read around it
        cores, launch = self.job.cores, launch_seconds(self.job.cores)
        seconds = count * (nodes_more * launch + moved * max(self.moving, 2 / CACHE_BYTES))  # copies run on one core
        for node in nodes:
            work, working_set = self.job.works[str(node.name)], self.working_set[self.steps[node]]
            seconds += work.more_seconds(cores, working_set, lines + peak, count)
            seconds += HIDDEN * (work.hidden_seconds(cores, lines + peak) - work.hidden_seconds(cores, working_set))
        for node, copy in own.tiles:
            more = _idle_share(node, copy.made[1] - copy.made[0], cores)
            if OVERLAP in node.metadata_props:
                more += max(0.0, count * (copy.rows[1] - copy.rows[0]) / nodes[node].height - 1)
            seconds += more * self.job.works[str(node.name)].product_seconds(cores)
        return lines + peak, seconds, count * (nodes_more + len(own.tiles)) - len(nodes)

    def _walked(self, one: Slice) -> tuple[float, int, float]:
        """The most bytes that are alive within a slice, and what is cut and joined for it: nodes and bytes."""
        left = Counter(node.inputs[index] for node, copy in one.tiles for index in copy.inputs)
        live = peak = moved = 0.0
        more, rows_of, taken = 0, dict[ir.Value, Interval](), set[tuple[ir.Value, Interval]]()
        for node, copy in one.tiles:
            beside, reused = 0.0, False
            for index, rows in copy.inputs.items():
                value = node.inputs[index]
                assert value is not None
                left[value] -= 1
                own, there = (rows[1] - rows[0]) * self.row_bytes[value], rows_of.get(value, (0, 0))
                if there != rows:
                    beside += own
                    peak = max(peak, live + beside)
                    if (value, rows) not in taken:
                        taken.add((value, rows))
                        more += _MORE_NODES
                        moved += own
                        if self.moving and node.op_type in LARGER:  # in rows in place of blocks
                            moved += sum((copy.made[1] - copy.made[0]) * self.row_bytes[v] for v in node.outputs)
                if not left[value]:
                    buffer = self.buffer_of.get(str(value.name), -1)
                    reused = reused or buffer == self.buffer_of.get(str(node.outputs[0].name), -2)
                    gone = (there[1] - there[0]) * self.row_bytes[value]
                    live -= gone
                    beside += gone if there == rows else 0.0
            given = float(sum((copy.made[1] - copy.made[0]) * self.row_bytes[v] for v in node.outputs if v.name))
            peak = max(peak, live + beside + (0.0 if reused else given))
            for value in (v for v in node.outputs if left.get(v)):
                rows_of[value] = copy.rows
                live += (copy.rows[1] - copy.rows[0]) * self.row_bytes[value]
        return peak, more, moved


def _row_bytes(value: ir.Value, axis: int) -> int:
    """Bytes of a row of an image, whose rows are this axis."""
    shape, dtype = static_shape(value) or (), value.dtype
    assert dtype is not None
    return -(-math.prod(shape[:axis]) * math.prod(shape[axis + 1 :]) * dtype.bitwidth // 8)


def _bottleneck(parts: Mapping[tuple[int, int], Sequence[BandOfRows]]) -> float:
    """The fewest bytes that a stretch needs at its worst band."""
    return _path(parts, lambda candidates: min(part.bytes for part in candidates), max)[0]


def _cheapest(parts: Mapping[tuple[int, int], Sequence[BandOfRows]], room: float, price: float) -> list[BandOfRows]:
    """The bands of a stretch that need no more than so many bytes each, in the least time and nodes."""

    def best(candidates: Sequence[BandOfRows]) -> tuple[float, BandOfRows | None]:
        fitting = ((part, number) for number, part in enumerate(candidates) if part.bytes <= room)
        cost, number = min(((p.seconds + price * p.session, number) for p, number in fitting), default=(math.inf, -1))
        return cost, None if number < 0 else candidates[number]

    _, places = _path(parts, lambda candidates: best(candidates)[0], lambda a, b: a + b)
    chosen = [best(parts[pair])[1] for pair in itertools.pairwise(places)]
    return [part for part in chosen if part is not None]


def _path(
    parts: Mapping[tuple[int, int], Sequence[BandOfRows]], cost: Callable[[Sequence[BandOfRows]], float],
    add: Callable[[float, float], float],
) -> tuple[float, list[int]]:  # fmt: skip
    """The least cost from the first place to the last by bands, and the places; of equals the fewest bands."""
    places = sorted({place for pair in parts for place in pair})
    best: dict[int, tuple[float, int, list[int]]] = {places[0]: (-math.inf if add is max else 0.0, 0, [places[0]])}
    for end in places[1:]:
        candidates = []
        for begin in (place for place in places if place < end):
            before, count, path = best[begin]
            candidates.append((add(before, cost(parts[begin, end])), count + 1, [*path, end]))
        best[end] = min(candidates)
    total, _, path = best[places[-1]]
    return total, path


def _moved(band: Band, by: int) -> Band:
    """The same band so many steps later."""
    return Band(tuple(dataclasses.replace(each, begin=each.begin + by, end=each.end + by) for each in band.stages))


def asked_for(
    jobs: Sequence[ToSlice], count: int, refused: Mapping[str, int], uncut: Mapping[str, str]
) -> list[Candidate]:
    """The one with bands of so many slices that needs the least memory, of the first of these models that has one.

    Raises:
        PlanError: there is none.
    """
    rules: Sequence[Slicing | Refusal | None] = ()
    for job in jobs:
        rules = row_rules(job.lowered.model, uncut)
        if found := RowSearch(job, rules, count).candidates(refused):
            return found
    heights = [rule.height for rule in rules if isinstance(rule, Slicing)]
    if not heights:
        why = next((str(one).rstrip(".") for one in rules if isinstance(one, Refusal)), "it reads no images")
    elif count > max(heights):
        why = f"its images have {max(heights)} rows at most"
    elif refused:
        why = f"node '{next(iter(refused))}' gives other last bits in strips than of whole images"
    else:
        graph = jobs[-1].plain.graph
        worst = rules[int(live_bytes(assign_storage(graph).buffers, len(graph.nodes)).argmax())]
        why = "it would save nothing, or the results of what could have fewer rows"
        why += f"; and where most bytes are alive {worst}" if isinstance(worst, Refusal) else ""
    raise PlanError(f"the model can't run in {count} strips: {why}.")
