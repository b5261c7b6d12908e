"""Bands of a model, and the slices that they run in: what is computed in each, and what of it later ones read.

A *slice* is some elements ``[begin, end)`` of an axis; a *band* is consecutive nodes whose values are cut along axes
that belong together. Its *stages* have slices of their own, fine or coarse; a stage's nodes on one slice are a *chunk*.
Chunks run in the order in which they are needed: before a chunk, those of the stage before that overlap it.

Along the batch, or another axis of which each slice needs the same part of everything, that is all. Along the rows of
images slices read beyond what they give. Slice by slice, from the results backwards: what earlier slices computed of a
value stays, and only the rows behind it that this slice needs are computed. Of every value the rows that later slices
still read are kept, as a *line buffer*: two for a convolution of 3×3, as many as the branch lags behind for a residual
connection; but what is marked gives its rows again (`memonger.tiling.overlap`). (Alwani et al. 2016; Goetschalckx and
Verhelst 2019, depth first with line buffers; bounds inference as in Halide. They lack exact bits and arbitrary graphs.)

Between slices and stages values exist in part only. What is read outside is joined.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from memonger.ir.marks import OVERLAP
from memonger.tiling.cutting import Interval, SliceCopy, Slicing


@dataclass(frozen=True, slots=True)
class SliceStage:
    """Consecutive nodes that run on the same slices, and those between them that depend on nothing that is cut.

    Attributes:
        begin: The first node, in the model's order.
        end: The node after the last.
        slices: Bounds of the slices, from 0 to the size of the axis (of rows: those of the tallest result); two: the
            nodes run once, on the whole.
    """

    begin: int
    end: int
    slices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Band:
    """Consecutive stages, each of which begins where the one before ends; one, where slices are of rows."""

    stages: tuple[SliceStage, ...]

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
        """Elements of the axis, of which each value that is cut has a multiple; or rows of the tallest result."""
        return self.stages[-1].slices[-1]

    @property
    def counts(self) -> tuple[int, ...]:
        """How many slices each stage has."""
        return tuple(len(stage.slices) - 1 for stage in self.stages)

    @property
    def rows(self) -> int:
        """Of the tallest result in each slice but the last, where slices are of rows."""
        return self.stages[0].slices[1]


def row_band(begin: int, end: int, nodes: Mapping[ir.Node, Slicing], rows: int) -> Band:
    """A band of slices of so many rows of its tallest result; ``nodes`` are those of its nodes that read images."""
    height = tallest(nodes)
    return Band((SliceStage(begin, end, (*range(0, height, rows), height)),))


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


def tallest(nodes: Mapping[ir.Node, Slicing]) -> int:
    """How many rows the result has that has most."""
    return max(rows_in(value, nodes) for value in exits_of(nodes))


def row_slices(
    nodes: Mapping[ir.Node, Slicing], ends: Sequence[int],
    until: Callable[[ir.Node, int, int], int] = lambda node, end, height: end,
    early: Sequence[Mapping[ir.Node, int]] = (),
) -> list[Slice]:  # fmt: skip
    """The slices of a band, one after the other.

    Args:
        nodes: Its nodes that read images, in order.
        ends: Of each slice the rows of the tallest result that are there behind it; of others as large a part.
        until: From a node, the row that it is to give rows to, and how many it has, to the row that it gives them to.
        early: Of each slice before these the rows of nodes that are there behind it.
    """
    order, exits, again = list(nodes), exits_of(nodes), {node for node in nodes if runs_again(node, nodes)}
    done, slices = dict[ir.Node, int](), list[tuple[tuple[Tile, ...], dict[ir.Value, tuple[Interval, ...]]]]()
    height = tallest(nodes)
    results = [{value: rows_in(value, nodes) * end // height for value in exits} for end in ends]
    wanted = [*((dict[ir.Value, int](), one) for one in early), *((one, dict[ir.Node, int]()) for one in results)]
    for needed, aims in wanted:
        tiles, reads = list[Tile](), dict[ir.Value, tuple[Interval, ...]]()
        for node in reversed(order):
            begin, end = done.get(node, 0), max(aims.get(node, 0), *(needed.get(value, 0) for value in node.outputs))
            if node in again:
                begin = min((low for low, _ in reads.get(node.outputs[0], ())), default=end)
            if end <= begin:
                continue
            copy = nodes[node].copy(begin, until(node, end, nodes[node].height))
            done[node] = copy.rows[1]
            tiles.append((node, copy))
            for index, rows in copy.inputs.items():
                value = node.inputs[index]
                assert value is not None
                needed[value] = max(rows[1], needed.get(value, 0))
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
    height = tallest(nodes)
    rows = -(-height // count)
    if not cores:
        return rows
    heights = sorted({rule.height for rule in nodes.values()})
    units = (cores * max(1, height // other) for other in heights if max(height, other) % min(height, other) == 0)
    unit = next((unit for unit in units if unit <= 2 * rows), 1)
    return min(height, -(-rows // unit) * unit)
