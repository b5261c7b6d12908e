"""Bands of a model, and the slices that they run in: what is computed in each, and what of it later ones read.

A *slice* is some elements ``[begin, end)`` of an axis; a *band* is consecutive nodes whose values are cut along axes
that belong together. There are two kinds:

- A `Band` is cut along the batch, or another axis of which each slice needs the same part of everything. Its *stages*
  have slices of their own, fine or coarse; a stage's nodes on one slice are a *chunk*. Chunks run in the order in which
  they are needed: before a chunk, those of the stage before that overlap it.
- A `RowBand` is cut along the rows of images, where slices read beyond what they give. Slice by slice, from the results
  backwards: what earlier slices computed of a value stays, and only the rows behind it that this slice needs are
  computed. Of every value the rows that later slices still read are kept, as a *line buffer*: two for a convolution of
  3×3, as many as the branch lags behind for a residual connection. (Alwani et al. 2016; Goetschalckx and Verhelst 2019,
  depth first with line buffers; bounds inference as in Halide. They lack exact bits and arbitrary graphs.)

Between slices and stages values exist in part only, and nothing is computed twice. What is read outside is joined.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

import onnx_ir as ir

from memonger.errors import PlanError
from memonger.ir.marks import OVERLAP, STRIP, WINDOW
from memonger.ir.values import read_values, static_shape
from memonger.tiling.axes import slicing
from memonger.tiling.cutting import Interval, Refusal, SliceCopy, Slicing, sentence
from memonger.tiling.row_rules import is_slid_over, rows_axis, rows_of


@dataclass(frozen=True, slots=True)
class SliceStage:
    """Consecutive nodes that run on the same slices.

    Attributes:
        begin: The first node, in the model's order.
        end: The node after the last.
        slices: Bounds of the slices, from 0 to the size of the axis; two: the nodes run once, on the whole.
    """

    begin: int
    end: int
    slices: tuple[int, ...]


@dataclass(frozen=True)
class Band:
    """Consecutive stages whose values are cut along axes that belong together.

    Attributes:
        axes: The axis of each value that is cut, by name: of what the band reads at least, as
            `memonger.tiling.axes.axes_of` gives them. A value has a multiple of `size` elements along its axis.
        stages: Each begins where the one before ends.
        sums: Whether products over the axis are summed up slice by slice.
    """

    axes: Mapping[str, int]
    stages: tuple[SliceStage, ...]
    sums: bool = False

    @property
    def begin(self) -> int:
        """The first node."""
        return self.stages[0].begin

    @property
    def end(self) -> int:
        """The node after the last."""
        return self.stages[-1].end

    @property
    def size(self) -> int:
        """Elements of the axis."""
        return self.stages[-1].slices[-1]

    @property
    def counts(self) -> tuple[int, ...]:
        """How many slices each stage has."""
        return tuple(len(stage.slices) - 1 for stage in self.stages)


@dataclass(frozen=True, slots=True)
class RowBand:
    """Consecutive nodes that run in slices of rows, and those between them that depend on no image.

    Attributes:
        begin: The first.
        end: Behind the last.
        slices: How many.
        rows: Of the tallest result in each slice but the last.
    """

    begin: int
    end: int
    slices: int
    rows: int

    @property
    def counts(self) -> tuple[int, ...]:
        """How many slices it has."""
        return (self.slices,)


Tile = tuple[ir.Node, SliceCopy]


@dataclass(frozen=True, slots=True)
class Slice:
    """One slice of a band.

    Attributes:
        tiles: What runs, in order.
        reads: Of each image the rows that are read, by different nodes.
        kept: Of each image the first row that later slices read.
    """

    tiles: tuple[Tile, ...]
    reads: Mapping[ir.Value, tuple[Interval, ...]]
    kept: Mapping[ir.Value, int]


def emission(stages: Sequence[SliceStage]) -> Iterator[tuple[int, int, int]]:
    """The chunks of a band as (stage, begin, end) in the order in which they run: each as late as it may."""
    done = [0] * len(stages)  # how far each stage has come
    place = [0] * len(stages)
    while done[-1] < stages[-1].slices[-1]:
        stage = len(stages) - 1
        while stage and done[stage - 1] < stages[stage].slices[place[stage] + 1]:
            stage -= 1
        begin, end = stages[stage].slices[place[stage] : place[stage] + 2]
        place[stage] += 1
        done[stage] = end
        yield stage, begin, end


def check_bands(bands: Sequence[Band], count: int, names: Collection[str]) -> None:
    """Check that bands fit a model of so many nodes, and values of these names.

    Raises:
        PlanError: bands or stages aren't consecutive, or bounds don't ascend; or there is no value that they cut.
    """
    reached = 0
    for number, band in enumerate(bands):
        if not band.stages:
            raise PlanError(f"band {number} has no stages.")
        for place, stage in enumerate(band.stages):
            where, bounds = f"stage {place} of band {number}", stage.slices
            if place and stage.begin != reached:
                raise PlanError(f"{where} begins at node {stage.begin}, and the stage before ends at {reached}.")
            if stage.begin < reached:
                raise PlanError(f"{where} begins at node {stage.begin}, and the band before ends at {reached}.")
            if not stage.begin < stage.end <= count:
                raise PlanError(f"{where} is nodes {stage.begin} to {stage.end}, of a model with {count}.")
            if len(bounds) < 2 or bounds[0] != 0 or any(a >= b for a, b in pairwise(bounds)):
                raise PlanError(f"the bounds of the slices of {where} must ascend from 0, and are {list(bounds)}.")
            if bounds[-1] != (size := band.size if band.stages[-1].slices else 0):
                last = f"those of the band's last stage at {size}"
                raise PlanError(f"the slices of {where} end at {bounds[-1]}, and {last}.")
            reached = stage.end
        unknown = next((name for name in band.axes if name not in names), None)
        if unknown is not None:
            raise PlanError(f"band {number} cuts '{unknown}', and the model has no such value.")


def cut_nodes(number: int, band: Band, nodes: Sequence[ir.Node]) -> dict[ir.Node, Slicing]:
    """The nodes of a band that run on slices, and how they are cut; the others run once, before its first chunk.

    What a node needs whole of the band's own values is computed whole, with all of the band that it takes.

    Args:
        number: Of the band, for messages.
        band: Its nodes are cut as its axes say.
        nodes: All of the model's.

    Raises:
        PlanError: a node can't be cut, or needs whole what its own band computes for others in slices: the message
            names it.
    """
    axis_of, answers, made = dict[ir.Value, int](), dict[ir.Node, Slicing](), dict[ir.Value, ir.Node]()

    def run_once(value: ir.Value, reader: ir.Node, answer: Slicing) -> None:
        chain, pending = dict[ir.Node, Slicing](), [made[value]]
        while pending:
            node = pending.pop()
            if node not in chain:
                chain[node] = answers[node]
                pending += [made[v] for v in read_values(node) if v in made]
        others = {n: a for n, a in answers.items() if n not in chain} | {reader: answer}
        for written in (v for v in made if made[v] in chain):
            for other in written.consumers():
                if other in others and any(other.inputs[index] is written for index in others[other].inputs):
                    raise PlanError(
                        f"node '{reader.name}' ({reader.op_type}) needs '{value.name}' whole, and the same band "
                        f"computes it from slices of '{written.name}': end the band before this node."
                    )
        for node in chain:
            del answers[node]
        for written in [v for v, node in made.items() if node in chain]:
            del made[written]

    for node in nodes[band.begin : band.end]:
        for value in (v for v in node.inputs if v is not None and str(v.name) in band.axes):
            axis_of.setdefault(value, band.axes[str(value.name)])
            unit_of(value, axis_of[value], band.size, number)
        axes = {i: axis_of[v] for i, v in enumerate(node.inputs) if v is not None and v in axis_of}
        answer = slicing(node, axes, band.size, band.sums) if axes else None
        if isinstance(answer, Slicing):
            for index in sorted(answer.whole):
                value_read_whole = node.inputs[index]
                if value_read_whole is not None and value_read_whole in made:
                    run_once(value_read_whole, node, answer)
            answers[node] = answer
            made.update((node.outputs[index], node) for index in (*answer.outputs, *answer.sums))
            for index, axis in answer.outputs.items():
                asked = band.axes.get(str(node.outputs[index].name), axis)
                if asked != axis:
                    raise PlanError(
                        f"band {number} cuts '{node.outputs[index].name}' along axis {asked}, and node "
                        f"'{node.name}' ({node.op_type}) gives slices of axis {axis}."
                    )
                axis_of[node.outputs[index]] = axis
        elif (read := next((v for v in read_values(node) if v in made), None)) is not None:
            why = f"node '{node.name}' ({node.op_type}) reads '{read.name}', which exists in slices only"
            raise PlanError(f"{why if answer is None else answer}.")
    if not answers:
        raise PlanError(f"no node of band {number} reads a value that is cut.")
    return answers


def unit_of(value: ir.Value, axis: int, size: int, number: int) -> int:
    """Elements of a value for each of the axis of a band of that number, which has so many.

    Raises:
        PlanError: it has no such axis, or no multiple of these.
    """
    dims = static_shape(value)
    if dims is None or not 0 <= axis < len(dims) or dims[axis] % size:
        shape = "unknown" if dims is None else list(dims)
        raise PlanError(
            f"band {number} cuts '{value.name}' along axis {axis} into {size} parts at most, and its shape is {shape}."
        )
    return dims[axis] // size


def row_rules(model: ir.Model, refused: Mapping[str, str] = MappingProxyType({})) -> list[Slicing | Refusal | None]:
    """For each node of a model how it gives rows, or why it can't; None: it reads no image.

    Args:
        model: With static shapes.
        refused: Nodes by name that are to have images whole, and why.
    """
    answers: list[Slicing | Refusal | None] = []
    axis_of, in_order = dict[ir.Value | None, int](), set[ir.Value | None]()
    for node in model.graph:
        axes = {index: axis_of.get(value, rows_axis(value)) for index, value in enumerate(node.inputs)}
        read = {index: axis for index, axis in axes.items() if axis is not None}
        if STRIP in node.metadata_props or WINDOW in node.metadata_props:
            answers.append(Refusal(f"node '{node.name}' is of a slice already"))
            continue
        images = [value for index in read if (value := node.inputs[index]) is not None]
        is_in_order = any(value in in_order or is_slid_over(value) for value in images)
        answer = rows_of(node, read, in_order=is_in_order) if read else None
        if isinstance(answer, Slicing) and str(node.name) in refused:
            answer = sentence(node, refused[str(node.name)])
        answers.append(answer)
        if isinstance(answer, Slicing):
            axis_of.update((node.outputs[index], axis) for index, axis in answer.outputs.items())
            in_order.update(node.outputs if is_in_order else ())
    return answers


def axes_of_nodes(nodes: Mapping[ir.Node, Slicing]) -> dict[ir.Value, int]:
    """The axis of what nodes read and write in slices."""
    axes = dict[ir.Value, int]()
    for node, rule in nodes.items():
        axes.update((value, axis) for index, axis in rule.inputs.items() if (value := node.inputs[index]) is not None)
        axes.update((node.outputs[index], axis) for index, axis in rule.outputs.items())
    return axes


def rows_in(value: ir.Value, nodes: Mapping[ir.Node, Slicing]) -> int:
    """How many rows a result has."""
    node = value.producer()
    assert node is not None
    return nodes[node].height


def exits_of(nodes: Mapping[ir.Node, Slicing]) -> list[ir.Value]:
    """What nodes that run in slices compute for others, in order."""
    made = (node.outputs[index] for node, how in nodes.items() for index in sorted(how.outputs))
    return [v for v in made if v.is_graph_output() or any(node not in nodes for node in v.consumers())]


def needs_own(nodes: Mapping[ir.Node, Slicing]) -> bool:
    """Whether one of the nodes reads whole what others of them compute in rows: they can't be one band."""
    whole = (node.inputs[index] for node, rule in nodes.items() for index in rule.whole)
    return any(value is not None and value.producer() in nodes for value in whole)


def row_slices(
    nodes: Mapping[ir.Node, Slicing], parts: Sequence[tuple[int, int]],
    least: Callable[[ir.Node], int] = lambda node: 1, early: Sequence[Mapping[ir.Node, int]] = (),
) -> list[Slice]:  # fmt: skip
    """The slices of a band, one after the other.

    Args:
        nodes: Its nodes that read images, in order.
        parts: Of each slice the part of all rows of the results that is there behind it, as a fraction.
        least: How many rows a node gives at least, if it has as many: where fewer are left, it gives these, too.
        early: Of each slice before these the rows of nodes that are there behind it.
    """
    order, exits, again = list(nodes), exits_of(nodes), {node for node in nodes if runs_again(node, nodes)}
    done, slices = dict[ir.Node, int](), list[tuple[tuple[Tile, ...], dict[ir.Value, tuple[Interval, ...]]]]()
    results = [{value: rows_in(value, nodes) * part // whole for value in exits} for part, whole in parts]
    wanted = [*((dict[ir.Value, int](), one) for one in early), *((one, dict[ir.Node, int]()) for one in results)]
    for until, aims in wanted:
        tiles, reads = list[Tile](), dict[ir.Value, tuple[Interval, ...]]()
        for node in reversed(order):
            begin, end = done.get(node, 0), max(aims.get(node, 0), *(until.get(value, 0) for value in node.outputs))
            if node in again:
                begin = min((low for low, _ in reads.get(node.outputs[0], ())), default=end)
            if end <= begin:
                continue
            end = nodes[node].height if nodes[node].height - end < least(node) else end
            copy = nodes[node].copy(begin, end)
            done[node] = copy.rows[1]
            tiles.append((node, copy))
            for index, rows in copy.inputs.items():
                value = node.inputs[index]
                assert value is not None
                until[value] = max(rows[1], until.get(value, 0))
                if rows not in reads.setdefault(value, ()):
                    reads[value] = (*reads[value], rows)
        slices.append((tuple(reversed(tiles)), reads))
    made, kept, passing = list[Slice](), dict[ir.Value, int](), {node.outputs[0] for node in again}
    for own, reads in reversed(slices):
        made.append(Slice(own, reads, dict(kept)))
        for value, intervals in reads.items():
            if value in passing:
                continue
            kept[value] = min(kept.get(value, math.inf), *(begin for begin, _ in intervals))  # type: ignore[assignment]
    return made[::-1]


def runs_again(node: ir.Node, nodes: Mapping[ir.Node, Slicing]) -> bool:
    """Whether a node gives its rows once more for a slice that reads them again: to keep them takes as much.

    So does one that moves rows for one other, and what is marked, where only nodes of the band read it.
    """
    value = node.outputs[0]
    is_moved = node.op_type == "ReorderInput" and len(value.uses()) == 1
    if not (is_moved or OVERLAP in node.metadata_props) or value.is_graph_output():
        return False
    return all(user in nodes for user in value.consumers())


def slice_rows(nodes: Mapping[ir.Node, Slicing], count: int, cores: int) -> int:
    """How many rows of the tallest result each of about so many slices has.

    onnxruntime gives each core the same number of rows of an image, and one waits for the other where those aren't
    equal. So of every image that a slice computes it has a multiple of the cores in rows; of the smallest ones not,
    where the slices would have more than twice as many rows for it. With no cores it is the fewest rows that give no
    more slices.
    """
    height = max(rows_in(value, nodes) for value in exits_of(nodes))
    rows = -(-height // count)
    if not cores:
        return rows
    heights = sorted({rule.height for rule in nodes.values()})
    units = (cores * max(1, height // other) for other in heights if max(height, other) % min(height, other) == 0)
    unit = next((unit for unit in units if unit <= 2 * rows), 1)
    return min(height, -(-rows // unit) * unit)


def bounds(nodes: Mapping[ir.Node, Slicing], rows: int) -> list[tuple[int, int]]:
    """What is there behind each slice of so many rows of the tallest result, as `row_slices` takes it."""
    height = max(rows_in(value, nodes) for value in exits_of(nodes))
    return [(min(end, height), height) for end in range(rows, height + rows, rows)]
