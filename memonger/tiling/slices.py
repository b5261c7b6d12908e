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

Which values are images that come in rows, and how a node gives some rows of its outputs.

Axis 2 of an image ``[batch, channels, height, width]`` is its rows, of a volume its depth, of a sequence that a
convolution reads its time. Behind a transpose or a reshape of such an image they may be another axis. What an
operator's rule doesn't cut along that axis is a barrier: it needs images whole.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import onnx_ir as ir

from memonger.ir.marks import OVERLAP, STRIP, WINDOW
from memonger.ir.operators import operator_name
from memonger.ir.values import static_shape
from memonger.plan_file import ROWS
from memonger.tiling.axes import slicing
from memonger.tiling.cutting import Cut, Interval, NotCutError, Refusal, SliceCopy, Slicing, sentence

BLOCKED = "com.microsoft.nchwc"
"""Domain of the operators on images whose channels lie in blocks."""

_WINDOWS = frozenset(
    ["AveragePool", "Conv", "ConvInteger", "ConvTranspose", "LpPool", "MaxPool", "QLinearConv",
     "com.microsoft::FusedConv", "com.microsoft.nchwc::Conv"]
)  # fmt: skip
"""Operators whose windows slide over images, and over sequences."""


def rows_axis(value: ir.Value | None) -> int | None:
    """The axis of a value's rows, if nobody cut what it is made of; None where it is no image of several rows."""
    shape = None if value is None or value.const_value is not None else static_shape(value)
    if value is None or shape is None or not 3 <= len(shape) <= 5:
        return None
    if len(shape) == 3 and not is_slid_over(value):
        return None
    is_grid = any(node.op_type == "GridSample" and index == 1 for node, index in value.uses())
    return (1 if is_grid else ROWS) if shape[1 if is_grid else ROWS] > 1 else None


def is_slid_over(value: ir.Value) -> bool:
    """Whether windows read a value, so that its rows are in order."""
    return any(index == 0 and operator_name(node) in _WINDOWS for node, index in value.uses())


def rows_of(node: ir.Node, axes: Mapping[int, int], *, in_order: bool) -> Slicing | Refusal:
    """How a node gives some rows of its outputs.

    Args:
        node: With static shapes.
        axes: Those of its inputs that come in rows, one at least, each with the axis of these.
        in_order: Whether some of these rows are made or read by windows, so that it pays to follow them where they are
            moved to another axis.

    Returns: a sentence where it can't give rows by themselves.
    """
    cut = Cut(node, axes, 1)
    try:
        height = cut.dims(min(axes))[cut.axis]
        made = slicing(node, axes, height, halo=True)
        if isinstance(made, Refusal):
            return made
        if not made.height:
            # What computes each row of its outputs from the same row of its inputs, and of others maybe all
            if cut.node.op_type in ("Reshape", "Expand", "Transpose") and not in_order:
                cut.refuse("mixes the rows of an image")
            images = {index: axis for index, axis in cut.axes.items() if index not in made.whole}
            if any(cut.dims(index)[axis] != height for index, axis in images.items()) or not images:
                cut.refuse("gives no image with the rows of its input")
            if not made.outputs or any(cut.out(index)[axis] != height for index, axis in made.outputs.items()):
                cut.refuse("gives no image with the rows of its input")
            constants = {index: axis for index, axis in made.inputs.items() if index not in images}
            for index in constants:
                cut.constant(index)  # computed ones aren't cut

            def rows(begin: int, end: int) -> SliceCopy:
                return SliceCopy((begin, end), (begin, end), dict.fromkeys(images, (begin, end)), constants)

            made = Slicing(made.outputs, images, made.whole, height=height, by_rows=rows)
        if made.height < 2 or not (in_order or all(rows_axis(v) is not None for v in node.outputs if v.name)):
            cut.refuse("gives what isn't an image of several rows")
        return made
    except NotCutError as error:
        return sentence(node, str(error))


def row_bytes(value: ir.Value, axis: int) -> int:
    """Bytes of a row of an image, whose rows are this axis."""
    shape, dtype = static_shape(value) or (), value.dtype
    assert dtype is not None
    return -(-math.prod(shape[:axis]) * math.prod(shape[axis + 1 :]) * dtype.bitwidth // 8)


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
        axes: The axis of each value that is cut, by name. A value has a multiple of `size` elements along its axis.
        stages: Each begins where the one before ends.
    """

    axes: Mapping[str, int]
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
