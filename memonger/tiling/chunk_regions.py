"""Regions around the steps with most bytes that can run in slices, each along an axis of its own.

A network whose inputs are cut along one axis may have values on which that axis can't be followed: windows of an image
encoder's attention mix its rows, and what has most bytes is queries times keys. A training step has no such axis at
all: an update is pointwise along its parameter, the loss and its gradients are rows, a weight's gradient has output
channels. So the question is asked the other way round: of the step with most bytes alive, along which axis of what it
reads or writes could it run in slices, and which of its neighbours with it?
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import onnx_ir as ir

from memonger.graph.graph import Graph
from memonger.graph.liveness import Storage, assign_storage, live_bytes, storage_in_window
from memonger.graph.schedule import schedule_graph
from memonger.ir.values import nbytes, static_shape
from memonger.tiling.axes import Axes, slicing
from memonger.tiling.cutting import Refusal, Slicing
from memonger.tiling.slices import axes_of_nodes
from memonger.tiling.stages import StepSpan, measured

STRIDE = 128
"""onnxruntime's products sum up so many elements before they add them to the result, whole or in slices."""

REACH = 96
"""Steps before and behind the one with most bytes that a region may have."""

HIGH = 0.7
"""Steps with such a part of the bytes of the worst one belong to its region if they can."""

GAIN = 0.97
"""A region has to lower the bytes of its worst step at least to such a part."""

MOST_REGIONS = 200


def regions_of(
    model: ir.Model, graph: Graph, refused: Mapping[str, str]
) -> tuple[list[int], Axes, tuple[StepSpan, ...]]:
    """Find regions, from the worst step on, until one can't be lowered.

    Args:
        model: Its nodes are the schedule.
        graph: Of the model.
        refused: Nodes by name that aren't to be cut, and why.

    Returns: The model's steps in an order in which its regions are ranges; how each node is cut, in the model's order;
        and the regions, ascending.
    """
    nodes, order = list(model.graph), list(range(len(graph.nodes)))
    regions: list[tuple[_Region, float]] = []
    needed, floor = live_bytes(assign_storage(graph).buffers, len(order)), 0.0
    for _ in range(MOST_REGIONS):
        place = {step: at for at, step in enumerate(order)}
        least_at = {place[step]: least for region, least in regions for step in region.how}
        worst = max((at for at in range(len(order)) if at not in least_at), key=needed.__getitem__, default=-1)
        floor = max([floor, *least_at.values()])
        if worst < 0 or needed[worst] <= floor:
            break
        low = max((at + 1 for at in least_at if at < worst), default=0)
        high = min((at for at in least_at if at > worst), default=len(order))
        begin, end = max(low, worst - REACH), min(high, worst + REACH)
        window, decided = order[begin:end], storage_in_window(graph, order, begin, end)
        best = None
        for region in _candidates(nodes, graph, order[worst], window, needed[begin:end].tolist(), refused):
            trial = _reordered(window, graph, region, order[worst])
            storage, live = decided(trial)
            part = _range(graph, storage, begin + trial.index(next(iter(region.how))), region, nodes)
            least = part.least(len(part.levels[-1]) - 1)
            rank = round(least / needed[worst], 2), -len(region.how)
            if least < GAIN * needed[worst] and (best is None or rank < best[0]):
                best = rank, least, region, trial, live
        if best is None:
            floor = float(needed[worst])
            continue
        regions.append((best[2], best[1]))
        order[begin:end], needed[begin:end] = best[3], best[4]
    how = {step: answer for region, _ in regions for step, answer in region.how.items()}
    now, place = schedule_graph(graph, order), {step: at for at, step in enumerate(order)}
    storage = assign_storage(now)
    begins = ((place[next(iter(region.how))], region) for region, _ in regions)
    ranges = sorted((_range(now, storage, at, region, nodes) for at, region in begins), key=lambda part: part.begin)
    return order, Axes(1, tuple(map(how.get, range(len(order)))), {}), tuple(ranges)


class _Region(NamedTuple):
    """Steps that are cut together into so many parts at most, in order, and how each is cut."""

    size: int
    how: dict[int, Slicing]


def _candidates(
    nodes: Sequence[ir.Node], graph: Graph, worst: int, window: Sequence[int], needed: Sequence[int],
    refused: Mapping[str, str],
) -> Iterator[_Region]:  # fmt: skip
    """Regions that have this step, along each axis of the large values that it reads or writes.

    Each step of the window needs so many bytes.
    """
    is_high = {step: own >= HIGH * needed[window.index(worst)] for step, own in zip(window, needed, strict=True)}
    steps = {nodes[step]: step for step in window}
    seen = set[tuple[tuple[int, ...], int]]()
    size_of = dict(zip(graph.values, graph.sizes, strict=True))
    values = [v for v in (*nodes[worst].outputs, *nodes[worst].inputs) if v is not None and static_shape(v)]
    largest = max((size_of.get(str(v.name), 0) for v in values), default=0)

    def is_large(value: ir.Value) -> bool:
        return size_of.get(str(value.name), 0) * 8 >= largest > 0

    large = filter(is_large, (value for step in window for value in nodes[step].outputs))
    lengths = {length for value in large for length in static_shape(value) or () if length > 1}
    for value in dict.fromkeys(filter(is_large, values)):
        for axis, length in enumerate(static_shape(value) or ()):
            # An axis that is two of another value, as rows and columns are, can be followed there in so many parts
            parts = [own for own in (length, *sorted(lengths - {length}, reverse=True)) if length % own == 0]
            for size, sums, back in itertools.product(parts, (True, False), (True, False)) if length > 1 else ():
                grown = _Growth(steps, size_of, is_high, refused, size, sums, back)
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


def _reordered(window: Sequence[int], graph: Graph, region: _Region, worst: int) -> list[int]:
    """An order of a window in which a region's steps stand one after the other.

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
    return [*window[:first], *early, *region.how, *late, *window[last + 1 :]]


def _range(graph: Graph, storage: Storage, begin: int, region: _Region, nodes: Sequence[ir.Node]) -> StepSpan:
    """What a region needs that begins at a step; its workspace only where the graph is in that order.

    Slices can't be written into the whole of a value, or read where it lies, whose axis isn't the outermost; nor into
    what was written over something that is now read whole.
    """
    axis_of = axes_of_nodes({nodes[step]: how for step, how in region.how.items()})
    axes = Axes(region.size, (), {str(value.name): axis for value, axis in axis_of.items()})
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
