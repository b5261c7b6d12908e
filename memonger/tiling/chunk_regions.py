"""Ranges of a model's steps that can run in slices, and the stages that a range is cut into for a given memory.

Inference is cut along one axis of its inputs. A training step has no such axis: an update is pointwise along its
parameter, the loss and its gradients are rows, a weight's gradient has output channels. So the question is asked the
other way round: of the step with most bytes alive, along which axis of what it reads or writes could it run in slices,
and which of its neighbours with it?
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from memonger.allocation.buffers import Buffer
from memonger.graph.graph import Graph
from memonger.graph.liveness import Storage, assign_storage, live_bytes
from memonger.graph.schedule import schedule_graph
from memonger.ir.marks import CHUNK
from memonger.ir.values import nbytes, static_shape
from memonger.tiling.axes import Axes, slicing
from memonger.tiling.cutting import Refusal, Slicing
from memonger.tiling.slices import axes_of_nodes

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
        needs.append(StepSpan(begin, end, fixed, cut, crossing, joined, exits, workspace, axes, waits=waiting_steps))
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


REACH = 96
"""Steps before and behind the one with most bytes that a region may have."""

HIGH = 0.7
"""Steps with such a part of the bytes of the worst one belong to its region if they can."""

GAIN = 0.97
"""A region has to lower the bytes of its worst step at least to such a part."""

MOST_REGIONS = 200


def regions_of(
    model: ir.Model, graph: Graph, refused: Mapping[str, str]
) -> tuple[tuple[int, ...], Graph, Axes, tuple[StepSpan, ...]]:
    """Find regions, from the worst step on, until one can't be lowered.

    Args:
        model: Its nodes are the schedule.
        graph: Of the model.
        refused: Nodes by name that aren't to be cut, and why.

    Returns: The model's steps in an order in which its regions are ranges; the graph in that order; how each node is
        cut; and the regions, ascending.
    """
    nodes, order = list(model.graph), list(range(len(graph.nodes)))
    regions: list[tuple[_Region, float]] = []
    now, floor = graph, 0.0
    for _ in range(MOST_REGIONS):
        needed = [int(n) for n in live_bytes(assign_storage(now).buffers, len(now.nodes))]
        place = {step: at for at, step in enumerate(order)}
        least_at = {place[step]: least for region, least in regions for step in region.how}
        worst = max((at for at in range(len(order)) if at not in least_at), key=lambda at: needed[at], default=-1)
        floor = max([floor, *least_at.values()])
        if worst < 0 or needed[worst] <= floor:
            break
        low = max((at + 1 for at in least_at if at < worst), default=0)
        high = min((at for at in least_at if at > worst), default=len(order))
        window = order[max(low, worst - REACH) : min(high, worst + REACH)]
        best = None
        for region in _candidates(nodes, graph, order[worst], window, needed, place, refused):
            trial = _reordered(order, graph, region, window, order[worst])
            laid = schedule_graph(graph, trial)
            part = _range(laid, trial, region, nodes)
            least = part.least(len(part.levels[-1]) - 1)
            rank = round(least / needed[worst], 2), -len(region.how)
            if least < GAIN * needed[worst] and (best is None or rank < best[0]):
                best = rank, least, region, trial, laid
        if best is None:
            floor = needed[worst]
            continue
        regions.append((best[2], best[1]))
        order, now = best[3], best[4]
    how = {step: answer for region, _ in regions for step, answer in region.how.items()}
    ranges = sorted((_range(now, order, region, nodes) for region, _ in regions), key=lambda part: part.begin)
    return tuple(order), now, Axes(1, tuple(map(how.get, order)), {}), tuple(ranges)


class _Region(NamedTuple):
    """Steps that are cut together into so many parts at most, in order, and how each is cut."""

    size: int
    how: dict[int, Slicing]


def _candidates(
    nodes: Sequence[ir.Node], graph: Graph, worst: int, window: Sequence[int], needed: Sequence[int],
    place: Mapping[int, int], refused: Mapping[str, str],
) -> Iterator[_Region]:  # fmt: skip
    """Regions that have this step, along each axis of the large values that it reads or writes."""
    high = HIGH * needed[place[worst]]
    steps = {nodes[step]: step for step in window}
    seen = set[tuple[tuple[int, ...], int]]()
    size_of = dict(zip(graph.values, graph.sizes, strict=True))
    values = [v for v in (*nodes[worst].outputs, *nodes[worst].inputs) if v is not None and static_shape(v)]
    largest = max((size_of.get(str(v.name), 0) for v in values), default=0)
    for value in dict.fromkeys(v for v in values if size_of.get(str(v.name), 0) * 8 >= largest > 0):
        for axis, length in enumerate(static_shape(value) or ()):
            is_high = {step: needed[place[step]] >= high for step in window}
            for sums, back in itertools.product((True, False), repeat=2) if length > 1 else ():
                grown = _Growth(steps, size_of, is_high, refused, length, sums, back)
                region = grown.region(value, axis, nodes, graph, window)
                key = (tuple(region.how), region.size)
                if worst in region.how and key not in seen:
                    seen.add(key)
                    yield region


@dataclass(slots=True)
class _Growth:
    """Grows a region from one value: to its readers, and to what wrote it where that pays.

    Attributes:
        steps: Of the nodes that it may have.
        size_of: Bytes of each value by name.
        is_high: Whether a step is one of those with most bytes.
        refused: Nodes by name that aren't to be cut, and why.
        size: Parts of the finest cut.
        sums: Whether products over the axis may be summed up.
        back: Whether what reads computed values belongs to it, for what it writes; else only what reads inputs.
        answers: Its nodes, and how they are cut.
        axis_of: The axis of each value that is.
    """

    steps: Mapping[ir.Node, int]
    size_of: Mapping[str, int]
    is_high: Mapping[int, bool]
    refused: Mapping[str, str]
    size: int
    sums: bool
    back: bool
    answers: dict[ir.Node, Slicing] = field(default_factory=dict)
    axis_of: dict[ir.Value, int] = field(default_factory=dict)

    def region(
        self, seed: ir.Value, axis: int, nodes: Sequence[ir.Node], graph: Graph, window: Sequence[int]
    ) -> _Region:
        """All that is cut with a value, in an order in which it can run."""
        self.axis_of[seed] = axis
        pending, made = [seed], {seed}
        while pending:
            value = pending.pop()
            node = value.producer()
            if node is not None and node in self.steps and node not in self.answers:
                pending += self._written_by(node, value, made)
            if value in made:
                for reader in value.consumers():
                    if reader not in self.steps or reader in self.answers:
                        continue
                    read = {
                        i: self.axis_of[v] for i, v in enumerate(reader.inputs) if v is not None and v in self.axis_of
                    }
                    how = self._answer(reader, read)
                    if how and all(self.axis_of.get(reader.outputs[o], a) == a for o, a in how.outputs.items()):
                        pending += self._take(reader, how, made)
        return self._in_order(nodes, graph, window)

    def _answer(self, node: ir.Node, axes: Mapping[int, int]) -> Slicing | None:
        if str(node.name) in self.refused:
            return None
        how = slicing(node, axes, self.size, sums=self.sums)
        if isinstance(how, Refusal):
            return None
        own = ((node.inputs[index], axis) for index, axis in how.inputs.items())
        if any(v is not None and self.axis_of.get(v, axis) != axis for v, axis in own):
            return None
        return how

    def _take(self, node: ir.Node, how: Slicing, made: set[ir.Value]) -> list[ir.Value]:
        """Let a node belong to the region; returns the values that are cut by that."""
        self.answers[node] = how
        newly_cut = []
        for index, axis in how.inputs.items():
            value = node.inputs[index]
            assert value is not None
            if value not in self.axis_of and not (value.is_initializer() and not value.is_graph_input()):
                self.axis_of[value] = axis
                newly_cut.append(value)
        for index, axis in how.outputs.items():
            value = node.outputs[index]
            made.add(value)
            self.axis_of.setdefault(value, axis)
            newly_cut.append(value)
        return newly_cut

    def _written_by(self, node: ir.Node, value: ir.Value, made: set[ir.Value]) -> list[ir.Value]:
        """What wrote a value, if it can write slices of it, of what takes no more."""
        place, axis = list(node.outputs).index(value), self.axis_of[value]
        computed = [v for v in node.inputs if v is not None and v.producer() is not None]
        reads_inputs = all(math.prod(static_shape(v) or ()) == 1 for v in computed)  # but for single numbers
        for index, read in enumerate(node.inputs):
            for other, length in enumerate((static_shape(read) if read is not None else None) or ()):
                if length < 2 or length % self.size:
                    continue
                how = self._answer(node, {index: other})
                if how is None or how.outputs.get(place) != axis:
                    continue
                read_now = [v for v in computed if v not in self.axis_of and v in [node.inputs[i] for i in how.inputs]]
                taken = sum(self.size_of.get(str(v.name), 0) for v in dict.fromkeys(read_now))
                given = self.size_of.get(str(value.name), 0)
                if reads_inputs or (self.back and (self.is_high[self.steps[node]] or taken <= given)):
                    return self._take(node, how, made)
        return []

    def _in_order(self, nodes: Sequence[ir.Node], graph: Graph, window: Sequence[int]) -> _Region:
        """The nodes that can stand one after the other: none depends on what has to be whole by then."""
        region, made, whole = _Region(self.size, {}), set[ir.Value](), set[int]()
        for step in window:
            node, how = nodes[step], self.answers.get(nodes[step])
            read_cut = made.intersection(v for v in node.inputs if v is not None)
            fits = how is not None and not any(node.inputs[index] in made for index in how.whole)
            fits = fits and not whole.intersection(graph.reads[step])
            if how is not None and fits and all(v in {node.inputs[i] for i in how.inputs} for v in read_cut):
                region.how[step] = how
                made.update(node.outputs[index] for index in how.outputs)
                summed = {str(node.outputs[index].name) for index in how.sums}
                whole.update(v for v in graph.writes[step] if graph.values[v] in summed)
            elif read_cut or whole.intersection(graph.reads[step]):
                whole.update(graph.writes[step])
        return region


def _reordered(order: Sequence[int], graph: Graph, region: _Region, window: Sequence[int], worst: int) -> list[int]:
    """An order in which a region's steps stand one after the other.

    What they need comes before them, what depends on them behind them; of the rest what stood before the worst step
    stays before, but updates wait for those who read the old content.
    """
    first, last = min(map(window.index, region.how)), max(map(window.index, region.how))
    inner = [(place, step) for place, step in enumerate(window[first : last + 1], first) if step not in region.how]
    wrote, behind = {value for step in region.how for value in graph.writes[step]}, set[int]()
    for _, step in inner:
        if not wrote.isdisjoint(graph.reads[step]):
            behind.add(step)
            wrote.update(graph.writes[step])
    read = {value for step in region.how for value in graph.reads[step]}
    overwritten = {old for step in region.how for old in graph.overwritten[step]}
    at, before = window.index(worst), set[int]()
    for place, step in reversed(inner):
        is_early = place < at and read.isdisjoint(graph.overwritten[step])
        is_needed = not read.isdisjoint(graph.writes[step]) or not overwritten.isdisjoint(graph.reads[step])
        if step not in behind and (is_early or is_needed):
            before.add(step)
            read.update(graph.reads[step])
    early, late = ([step for _, step in inner if (step in before) == side] for side in (True, False))
    begin = order.index(window[first])
    return [*order[:begin], *early, *region.how, *late, *order[begin + last - first + 1 :]]


def _range(graph: Graph, order: Sequence[int], region: _Region, nodes: Sequence[ir.Node]) -> StepSpan:
    """What a region needs in an order. Slices can't be written into the whole of a value, or read where it lies, whose
    axis isn't the outermost; nor into what was written over something that is now read whole."""
    storage, axis_of = assign_storage(graph), axes_of_nodes({nodes[step]: how for step, how in region.how.items()})
    axes = Axes(region.size, (), {str(value.name): axis for value, axis in axis_of.items()})
    begin = order.index(next(iter(region.how)))
    part = measured(graph, storage, axes, [(begin, begin + len(region.how))])[0]
    number, own = {name: value for value, name in enumerate(graph.values)}, {nodes[step] for step in region.how}
    made = {value for node in own for value in node.outputs}
    torn = {value for value, axis in axis_of.items() if any(dim != 1 for dim in (static_shape(value) or ())[:axis])}
    copied = sum(nbytes(value) or 0 for value in torn if value not in made)
    stride = twice = 0
    for node, how in ((nodes[step], how) for step, how in region.how.items()):
        for index, axis in how.inputs.items() if how.sums else ():  # products sum up the same elements at a time
            length = (static_shape(node.inputs[index] or ir.Value()) or ())[axis]
            stride = math.lcm(stride or 1, STRIDE // math.gcd(STRIDE, length // region.size))
        for value in (node.outputs[index] for index in how.outputs):
            place = number[str(value.name)]
            read = value.is_graph_output() or any(reader not in own for reader in value.consumers())
            if read and storage.of_value[place] >= 0:
                is_over = storage.buffers[storage.of_value[place]].start < begin
                twice += graph.sizes[place] * ((value in torn) + is_over)
    return dataclasses.replace(part, exits=part.exits + twice, stride=stride, copied=copied)
