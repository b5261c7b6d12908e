"""Bands of one model in stages along an axis: which stretches run in slices, and in how many, for a given memory.

Where nodes are independent along an axis of their values (the batch; the rows of a transformer; whatever
`memonger.tiling.chunk_regions` finds), values between two stages of a band exist in slices only: a few fine chunks
where values are large, then one coarse chunk of what follows, depth first.
"""

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from memonger.allocation.buffers import Buffer
from memonger.errors import PlanError
from memonger.graph.graph import Graph
from memonger.graph.liveness import Storage
from memonger.graph.session_memory import PACKED, bytes_of
from memonger.ir.extract import is_fed
from memonger.ir.marks import CHUNK
from memonger.tiling.axes import Axes
from memonger.tiling.candidates import Candidate, CutModel, ToSlice
from memonger.tiling.chunk_times import NodeWork, run_seconds, work_of
from memonger.tiling.cutting import Refusal, Slicing
from memonger.tiling.slices import Band, SliceStage

STEPS = 4
"""Arenas that are tried for each halving of memory."""

MOST_SLICES = 64
"""Finer slices leave kernels too little to do."""

NOTHING = 0.02
"""Bytes that cross from one stage to the next don't count where they are such a part of all."""

NEAR = 24
"""Nodes among which a stage may end where fewest bytes cross."""


def slice_levels(size: int) -> list[tuple[int, ...]]:
    """Bounds of slices, each level within those of the one before: from the whole to `MOST_SLICES` or single elements.

    Slices are halved, or cut in three where that leaves equal ones; of a prime they differ by one.
    """
    levels: list[tuple[int, ...]] = [(0, size)]
    while size > 1 and len(levels[-1]) <= MOST_SLICES / 2 and len(levels[-1]) <= size:
        bounds = levels[-1]
        widths = {b - a for a, b in itertools.pairwise(bounds)}
        pieces = next((p for p in (2, 3) if all(width % p == 0 for width in widths)), 2)
        finer = [a + (b - a) * i // pieces for a, b in itertools.pairwise(bounds) for i in range(pieces)]
        levels.append((*dict.fromkeys(finer), size))
    return levels


@dataclass(frozen=True, slots=True)
class StepSpan:
    """Steps of a model that can run in slices, and what they need. Arrays have an element for each step.

    Attributes:
        begin: The first step.
        end: Behind the last one.
        fixed: Bytes of what is read whole, at all steps.
        cut: Bytes alive that a slice has its share of.
        crossing: Of those alive, the bytes written before the step and read at it or later.
        joined: Bytes alive that are joined for later steps or as outputs.
        exits: Bytes of what the steps before this one write of that.
        workspace: Bytes of workspace, of which a slice has its share, too.
        size: Parts of the finest cut.
        stride: What bounds of slices have to be multiples of, where products are summed up slice by slice; 0 where
            none are.
        copied: Bytes of what is read that slices are no stretches of: they are copied.
        waits: Of each step, whether it waits for its weights, which each slice reads again.
    """

    begin: int
    end: int
    fixed: int
    cut: np.ndarray
    crossing: np.ndarray
    joined: np.ndarray
    exits: np.ndarray
    workspace: np.ndarray
    size: int
    stride: int = 0
    copied: int = 0
    waits: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))

    @property
    def levels(self) -> list[tuple[int, ...]]:
        """Bounds of slices, from the whole to the finest."""
        size = self.size
        if not self.stride:
            return slice_levels(size)
        widths = (self.stride << power for power in reversed(range(size.bit_length())))
        levels = [(*range(0, size, width), size) for width in widths if width < size <= width * MOST_SLICES]
        return [(0, size), *levels]

    def needed(self, step: int, end: int, slices: int, collected: float) -> float:
        """About the bytes at a step of a band that ends there; of a step behind it, as it is.

        Args:
            step: A step of the range.
            end: Where the band ends.
            slices: Into how many slices the step is cut.
            collected: Bytes of slices that are kept for coarser stages.
        """
        if slices == 1:
            return float(self.fixed + self.cut[step - self.begin] + self.joined[step - self.begin])
        own = (self.cut[step - self.begin] + self.copied) / slices
        return float(self.fixed + self.exits[end - self.begin] + collected + own)

    def least(self, slices: int) -> float:
        """About the bytes that the range needs with steps in so many slices, or as they are."""
        steps = range(self.begin, self.end)
        return max(min(self.needed(step, self.end, count, 0.0) for count in (1, slices)) for step in steps)


@dataclass(slots=True)
class _Block:
    """Nodes of an order, one after the other: those of a range that can run in slices, or others."""

    is_range: bool
    steps: list[int] = field(default_factory=list)
    made: set[ir.Value | None] = field(default_factory=set)
    whole: set[ir.Value | None] = field(default_factory=set)

    def add(self, step: int, node: ir.Node, how: Slicing | Refusal | None) -> None:
        """Put a node at the end."""
        self.steps.append(step)
        if isinstance(how, Slicing):
            self.made.update(node.outputs)
            self.whole.update(node.inputs[index] for index in how.whole)


def ranges_in_order(model: ir.Model, axes: Axes) -> tuple[list[int], list[tuple[int, int]]]:
    """An order of a model's nodes, and the ranges of it that can run in slices, each as long as can be.

    Before a node that reads as a whole what its own range makes, a new range begins. All that this value depends on
    stays in the one before, or where nothing there is read whole either goes on to the one before that: the keys and
    values of an attention, say, wherever the file has them. In a model that runs in chunks already no range goes on
    from one to the next.
    """
    nodes, blocks, chunk = list(model.graph), [_Block(False)], ""
    for step, (node, how) in enumerate(zip(nodes, axes.nodes, strict=True)):
        before, chunk = chunk, node.metadata_props.get(CHUNK, "")
        if before != chunk or isinstance(how, Refusal) or (isinstance(how, Slicing) and not blocks[-1].is_range):
            blocks.append(_Block(isinstance(how, Slicing)))
        if isinstance(how, Slicing) and not blocks[-1].made.isdisjoint(node.inputs[index] for index in how.whole):
            _split(blocks, {node.inputs[index] for index in how.whole}, nodes, axes)
        blocks[-1].add(step, node, how)
    begins = list(itertools.accumulate((len(block.steps) for block in blocks), initial=0))
    ranges = [(begin, end) for block, begin, end in zip(blocks, begins, begins[1:], strict=False) if block.made]
    return [step for block in blocks for step in block.steps], ranges


def _split(blocks: list[_Block], values: set[ir.Value | None], nodes: Sequence[ir.Node], axes: Axes) -> None:
    """Split the last block in what these values depend on, and the rest."""
    last, wanted, early = blocks.pop(), set(values), set[int]()
    for step in reversed(last.steps):
        if not wanted.isdisjoint(nodes[step].outputs):
            early.add(step)
            wanted.update(nodes[step].inputs)
    read_whole = {nodes[s].inputs[i] for s in early if isinstance(how := axes.nodes[s], Slicing) for i in how.whole}
    if not (blocks[-1].is_range and blocks[-1].made.isdisjoint(read_whole)):
        blocks.append(_Block(True))
    first, rest = blocks[-1], _Block(True)
    blocks.append(rest)
    for step in last.steps:
        (first if step in early else rest).add(step, nodes[step], axes.nodes[step])


def measured(
    graph: Graph, storage: Storage, axes: Axes, ranges: Sequence[tuple[int, int]], waits: Sequence[bool] = ()
) -> tuple[StepSpan, ...]:
    """What each range needs. A storage is cut if all of it is made and read within the range.

    Args:
        graph: In the order of the ranges.
        storage: Of its values.
        axes: The axis of each value.
        ranges: Their first steps, and those behind their last ones.
        waits: Of each step of the graph, whether it waits for its weights.
    """
    outputs = frozenset(graph.outputs)
    has_axis = [True] * len(storage.buffers)
    for value, number in enumerate(storage.of_value):
        if number >= 0 and (graph.values[value] not in axes.values or value in outputs):
            has_axis[number] = False
    buffers = sorted(zip(storage.buffers, has_axis, strict=True), key=lambda one: one[0].start)
    needs, alive, waiting = [], list[tuple[Buffer, bool]](), iter(buffers)
    upcoming = next(waiting, None)
    for begin, end in ranges:
        alive = [one for one in alive if one[0].stop > begin]
        while upcoming is not None and upcoming[0].start < end:
            alive.append(upcoming)
            upcoming = next(waiting, None)
        fixed, (cut, crossing, joined, exits) = 0, (np.zeros(end - begin + 1) for _ in range(4))
        for buffer, is_cut in alive:
            first, last = max(buffer.start, begin) - begin, min(buffer.stop, end) - begin
            if first >= last:
                continue
            if is_cut and begin <= buffer.start and buffer.stop <= end:
                cut[first:last] += buffer.size
                crossing[first + 1 : last] += buffer.size
            elif buffer.start >= begin:
                joined[first:last] += buffer.size
                exits[first + 1 :] += buffer.size
            else:
                fixed += buffer.size
        workspace, waiting_steps = np.array(graph.workspace[begin:end], float), np.array(waits[begin:end], bool)
        needs.append(
            StepSpan(begin, end, fixed, cut, crossing, joined, exits, workspace, axes.size, waits=waiting_steps)
        )
    return tuple(needs)


def stages_for(part: StepSpan, slices: Sequence[int], most: float, most_workspace: float) -> list[tuple[int, int, int]]:
    """Stages of a range that need at most so many bytes, as far as is possible: ``(begin, end, level)``.

    From the last step to the first a stage goes on as long as its slices fit. Where they don't, finer ones begin: at
    the step nearby before which fewest bytes cross, as those are collected for the coarser stage, but before one that
    waits for its weights; or further behind, where less is collected, so that the steps before have room for their
    finest slices. Where nothing leaves them room, the stage itself takes finer slices. Steps at the end that fit as
    they are belong to no stage.

    Args:
        part: The range.
        slices: Number of slices of each level.
        most: Bytes alive.
        most_workspace: Bytes of workspace.
    """

    def fits(step: int, level: int) -> bool:
        alive = part.needed(step, end, slices[level], collected)
        return alive <= most and bool(part.workspace[step - part.begin] / slices[level] <= most_workspace)

    finest, level, stop, end, collected = len(slices) - 1, 0, part.end, part.end, 0.0
    own = np.maximum.accumulate(part.cut + part.copied) / slices[finest]
    stages: list[tuple[int, int, int]] = []
    for step in reversed(range(part.begin, part.end)):
        if step >= stop or level == finest or fits(step, level):
            continue
        places = np.arange(_boundary(part, step + 1, stop, most), stop) - part.begin
        handed = collected + part.crossing[places] / slices[level]
        exits = part.exits[end - part.begin] if level else part.exits[places]
        roomy = np.flatnonzero(part.fixed + exits + own[places - 1] + handed <= most)
        if len(roomy):
            here = part.begin + int(places[roomy[0]])
            if level:
                stages.append((here, stop, level))
            else:
                end = here
            collected, stop = float(handed[roomy[0]]), here
        level = next((finer for finer in range(level + 1, finest) if fits(step, finer)), finest)
    if level:
        stages.append((part.begin, stop, level))
    return [one for one in reversed(stages) if one[0] < one[1]]


def _boundary(part: StepSpan, first: int, stop: int, most: float) -> int:
    """Where a stage that ends at ``stop`` begins, that step or a later one nearby; ``stop`` where none is between.

    It is the first before which next to nothing crosses, or else the one before which fewest bytes do, as all before it
    runs in slices; but no step behind one that waits for its weights.
    """
    if first == stop:
        return stop
    near = slice(first - part.begin, min(stop, first - 1 + NEAR) - part.begin)
    waiting = np.flatnonzero(part.waits[near])
    crossing = part.crossing[near][: 1 + int(waiting[0]) if len(waiting) else None]
    few = np.flatnonzero(crossing <= NOTHING * most)
    return first + int(few[0] if len(few) else crossing.argmin())


class StageSearch(CutModel):
    """Ways of a model to run in stages along an axis.

    Args:
        job: What is to run in slices.
        axis: See `CutModel`.
        axes: How its nodes are cut, in the job's order.
        order: See `CutModel`; None: one in which the ranges that can run in slices are long.
        spans: These ranges; None: what there are in that order.
    """

    def __init__(
        self, job: ToSlice, axis: int, axes: Axes, order: Sequence[int] | None = None,
        spans: Sequence[StepSpan] | None = None,
    ) -> None:  # fmt: skip
        ranges: Sequence[tuple[int, int]] = ()
        if order is None:
            order, ranges = ranges_in_order(job.lowered.model, axes)
        super().__init__(job, axis, order, axes)
        self.works = list[NodeWork]()
        for node, how in zip(self.nodes, self.how, strict=True):
            cut = how.inputs if isinstance(how, Slicing) else {}
            has_constants = any((value := node.inputs[i]) is not None and not is_fed(value) for i in cut)
            known = None if has_constants else job.works.get(str(node.name))
            self.works.append(work_of(node, cut) if known is None else known)
        waits = [one.waits for one in self.works]
        self.ranges = measured(self.graph, self.storage, self.axes, ranges, waits) if spans is None else tuple(spans)

    def more_seconds(self, bands: Sequence[Band]) -> float:
        """About how much longer the nodes of bands take in slices."""
        more = 0.0
        for step, slices in self._cut_steps(bands):
            live = self.working_set[step]
            more += self.works[step].more_seconds(self.job.cores, live, live / slices, slices)
        return more

    def packs_again(self, bands: Sequence[Band]) -> bool:
        """Whether copies of nodes would pack so much again that chunks share sessions."""
        packed = (self.works[step].packed * (slices - 1) for step, slices in self._cut_steps(bands))
        return self.job.training is None and sum(packed) > PACKED

    def _cut_steps(self, bands: Sequence[Band]) -> Iterator[tuple[int, int]]:
        """The steps of bands that are cut, and in how many slices each runs."""
        for steps, slices in _stages(bands):
            yield from ((step, slices) for step in steps if isinstance(self.how[step], Slicing))

    def estimated(self, bands: Sequence[Band]) -> float:
        """About how much longer bands take, but for what cuts and joins."""
        runs = sum(sum(band.counts) for band in bands)
        return self.more_seconds(bands) + runs * run_seconds(self.packs_again(bands), self.job.cores)

    def candidate(self, bands: tuple[Band, ...]) -> Candidate:
        """The model with these bands in slices, the same for the same bands.

        At a step that is cut what it reads whole is alive, and its slice of the rest. What cuts and joins isn't known.
        """
        if bands in self.made:
            return self.made[bands]
        whole, workspace = np.ones(len(self.live), bool), self.workspace.copy()
        for band in bands:
            whole[band.begin : band.end] = False
        live = float(self.live[whole].max(initial=0))
        shares, begins, copies = self.packs_again(bands), [one.begin for one in self.ranges], 0
        for own, slices in _stages(bands):
            part = self.ranges[bisect_right(begins, own.start) - 1]
            cut = part.cut[own.start - part.begin : own.stop - part.begin]
            live = max(live, part.fixed + float(cut.max()) / slices)
            workspace[own.start : own.stop] /= slices
            copies += sum(isinstance(self.how[step], Slicing) for step in own) * (slices - 1)
        live += float(workspace.max(initial=0.0))
        steps = len(self.live)
        sessions = bytes_of(steps + (0 if shares else copies), steps + copies, self.job.training is not None)
        write = partial(self.in_slices, bands)
        self.made[bands] = Candidate(round(live), sessions, self.estimated(bands), write)
        return self.made[bands]

    def candidates(self, most: float, most_copies: int) -> list[Candidate]:
        """Ways to run the model in chunks, for ever larger arenas.

        Args:
            most: Seconds that they may take longer, by estimate.
            most_copies: How many copies of nodes they may make.
        """
        levels = [one.levels for one in self.ranges]
        slices = [[len(bounds) - 1 for bounds in each] for each in levels]
        least = max((one.least(counts[-1]) for one, counts in zip(self.ranges, slices, strict=True)), default=0.0)
        arena, workspace = self.job.plain.arena_bytes, max(self.job.plain.graph.workspace, default=0)
        seen: dict[tuple[Any, ...], None] = {}
        for step in reversed(range(1, STEPS * len(bin(max((counts[-1] for counts in slices), default=1))))):
            share = 2 ** (-step / STEPS)
            chosen = (
                stages_for(one, counts, max(least, arena * share), workspace * share)
                for one, counts in zip(self.ranges, slices, strict=True)
            )
            seen[tuple(map(tuple, chosen))] = None
        found = list[Candidate]()
        for each in seen:
            bands = tuple(
                Band(tuple(SliceStage(begin, end, bounds[level]) for begin, end, level in stages))
                for stages, bounds in zip(each, levels, strict=True)
                if stages
            )
            copies = sum(len(steps) * slices for steps, slices in _stages(bands))
            if not bands or copies > most_copies or (self.job.runs_in_one and self.packs_again(bands)):
                continue
            if self.estimated(bands) <= most:
                found.append(self.candidate(bands))
        return found

    def all_in_slices(self, count: int) -> Candidate:
        """All that can be in so many slices.

        Raises:
            PlanError: nothing can; or the axis has fewer elements.
        """
        size = self.axes.size
        if count > size:
            raise PlanError(f"the axis has {size} elements, and so at most as many chunks, not {count}.")
        if not self.ranges:
            refusal = next((str(how) for how in self.how if isinstance(how, Refusal)), "no node reads it")
            raise PlanError(f"nothing can run in chunks along that axis: {refusal}.")
        bounds = tuple(size * number // count for number in range(count + 1))
        return self.candidate(tuple(Band((SliceStage(one.begin, one.end, bounds),)) for one in self.ranges))


def _stages(bands: Sequence[Band]) -> Iterator[tuple[range, int]]:
    """The steps of each stage, and in how many slices they run."""
    return ((range(one.begin, one.end), len(one.slices) - 1) for band in bands for one in band.stages)
