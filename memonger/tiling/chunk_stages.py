"""Ranges of a model's steps that can run in slices, and the stages that a range is cut into for a given memory."""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from memonger.allocation.buffers import Buffer
from memonger.graph.graph import Graph
from memonger.graph.liveness import Storage
from memonger.ir.marks import CHUNK
from memonger.tiling.axes import Axes
from memonger.tiling.cutting import Refusal, Slicing

MOST_SLICES = 64
"""Finer slices leave kernels too little to do."""

NOTHING = 0.02
"""Bytes that cross from one stage to the next don't count where they are such a part of all."""

STRIDE = 128
"""onnxruntime's products sum up so many elements before they add them to the result, whole or in slices."""

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
        axes: The axes along which it is cut.
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
    axes: Axes
    stride: int = 0
    copied: int = 0
    waits: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))

    @property
    def levels(self) -> list[tuple[int, ...]]:
        """Bounds of slices, from the whole to the finest."""
        size = self.axes.size
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
        part = _needs(graph, alive, begin, end, axes)
        needs.append(dataclasses.replace(part, waits=np.array(waits[begin:end], bool)))
    return tuple(needs)


def _needs(graph: Graph, alive: Sequence[tuple[Buffer, bool]], begin: int, end: int, axes: Axes) -> StepSpan:
    """What a range needs, of the storages alive in it and whether they have the axis."""
    steps = end - begin
    cut, crossing, joined, exits = (np.zeros(steps + 1) for _ in range(4))
    fixed = 0
    for buffer, has_axis in alive:
        is_cut = has_axis and begin <= buffer.start and buffer.stop <= end
        first, last = max(buffer.start, begin) - begin, min(buffer.stop, end) - begin
        if first >= last:
            continue
        if is_cut:
            cut[first:last] += buffer.size
            crossing[first + 1 : last] += buffer.size
        elif buffer.start >= begin:
            joined[first:last] += buffer.size
            exits[first + 1 :] += buffer.size
        else:
            fixed += buffer.size
    return StepSpan(begin, end, fixed, cut, crossing, joined, exits, np.array(graph.workspace[begin:end], float), axes)


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
