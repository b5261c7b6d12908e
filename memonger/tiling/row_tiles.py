"""Row tiles: a band of a model, run for some rows of its results after the other, each row of each value once.

Slice by slice, from the band's results backwards: what earlier slices computed of a value stays, and only the rows
behind it that this slice needs are computed. Of every value the rows that later slices still read are kept, as a *line
buffer*: two for a convolution of 3×3, as many as the branch lags behind for a residual connection. So a slice of
large images exists at a time, at batch 1, too, and nothing is computed twice. (Alwani et al. 2016; Goetschalckx and
Verhelst 2019, depth first with line buffers; bounds inference as in Halide. They lack exact bits and arbitrary graphs.)

Line buffers are ordinary values: slices and joins of what the copies write. In onnxruntime's blocked layout (channels
in blocks of 8 or 16, innermost) these are of a view of the same bytes: ``[batch * channels / block, height, width *
block]``.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from memonger.ir.marks import CHUNK, STRIP, WINDOW, Chunk, chunk_of
from memonger.ir.values import static_shape
from memonger.tiling.chunk_writer import SliceWriter, told_shape
from memonger.tiling.cutting import Refusal
from memonger.tiling.row_rules import BLOCKED, Interval, RowCopy, RowRule, is_slid_over, rows_axis, rows_of

_INDEX = 16
"""A row is written into its whole where it lies if it has so many times the bytes of the numbers that say where."""


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


def row_rules(model: ir.Model) -> list[RowRule | Refusal | None]:
    """For each node of a model how it gives rows, or why it can't; None: it reads no image."""
    answers: list[RowRule | Refusal | None] = []
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
        answers.append(answer)
        if isinstance(answer, RowRule):
            axis_of.update((node.outputs[index], axis) for index, axis in answer.outputs.items())
            in_order.update(node.outputs if is_in_order else ())
    return answers


def axes_of_rows(nodes: Mapping[ir.Node, RowRule]) -> dict[ir.Value, int]:
    """The axis of the rows of what nodes read and write in rows."""
    axes = dict[ir.Value, int]()
    for node, rule in nodes.items():
        axes.update((value, axis) for index, axis in rule.inputs.items() if (value := node.inputs[index]) is not None)
        axes.update((node.outputs[index], axis) for index, axis in rule.outputs.items())
    return axes


def rows_in(value: ir.Value, nodes: Mapping[ir.Node, RowRule]) -> int:
    """How many rows a result has."""
    node = value.producer()
    assert node is not None
    return nodes[node].height


Tile = tuple[ir.Node, RowCopy]


@dataclass(frozen=True, slots=True)
class RowSlice:
    """One slice of a band.

    Attributes:
        tiles: What runs, in order.
        reads: Of each image the rows that are read, by different nodes.
        kept: Of each image the first row that later slices read.
    """

    tiles: tuple[Tile, ...]
    reads: Mapping[ir.Value, tuple[Interval, ...]]
    kept: Mapping[ir.Value, int]


def exits_of(nodes: Mapping[ir.Node, RowRule]) -> list[ir.Value]:
    """What nodes that run in slices compute for others, in order."""
    made = (v for node in nodes for v in node.outputs)
    return [v for v in made if v.is_graph_output() or any(node not in nodes for node in v.consumers())]


def needs_own(nodes: Mapping[ir.Node, RowRule]) -> bool:
    """Whether one of the nodes reads whole what others of them compute in rows: they can't be one band."""
    whole = (node.inputs[index] for node, rule in nodes.items() for index in rule.whole)
    return any(value is not None and value.producer() in nodes for value in whole)


def row_slices(
    nodes: Mapping[ir.Node, RowRule], parts: Sequence[tuple[int, int]],
    least: Callable[[ir.Node], int] = lambda node: 1,
) -> list[RowSlice]:  # fmt: skip
    """The slices of a band, one after the other.

    Args:
        nodes: Its nodes that read images, in order.
        parts: Of each slice the part of all rows of the results that is there behind it, as a fraction.
        least: How many rows a node gives at least, if it has as many: where fewer are left, it gives these, too.
    """
    order, exits, again = list(nodes), exits_of(nodes), {node for node in nodes if _runs_again(node, nodes)}
    done, slices = dict[ir.Node, int](), list[tuple[tuple[Tile, ...], dict[ir.Value, tuple[Interval, ...]]]]()
    for part, whole in parts:
        until = {value: rows_in(value, nodes) * part // whole for value in exits}
        tiles, reads = list[Tile](), dict[ir.Value, tuple[Interval, ...]]()
        for node in reversed(order):
            begin, end = done.get(node, 0), max(until.get(value, 0) for value in node.outputs)
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
    made, kept, passing = list[RowSlice](), dict[ir.Value, int](), {node.outputs[0] for node in again}
    for own, reads in reversed(slices):
        made.append(RowSlice(own, reads, dict(kept)))
        for value, intervals in reads.items():
            if value in passing:
                continue
            kept[value] = min(kept.get(value, math.inf), *(begin for begin, _ in intervals))  # type: ignore[assignment]
    return made[::-1]


def _runs_again(node: ir.Node, nodes: Mapping[ir.Node, RowRule]) -> bool:
    """Whether a node moves its rows once more for a slice that reads them again: to keep them takes as much."""
    value = node.outputs[0]
    if node.op_type != "ReorderInput" or value.is_graph_output():
        return False
    return len(value.uses()) == 1 and value.consumers()[0] in nodes


def slice_rows(nodes: Mapping[ir.Node, RowRule], count: int, cores: int) -> int:
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


def bounds(nodes: Mapping[ir.Node, RowRule], rows: int) -> list[tuple[int, int]]:
    """What is there behind each slice of so many rows of the tallest result, as `row_slices` takes it."""
    height = max(rows_in(value, nodes) for value in exits_of(nodes))
    return [(min(end, height), height) for end in range(rows, height + rows, rows)]


def in_row_tiles(model: ir.Model, bands: Sequence[RowBand], block: int) -> ir.Model:
    """The model with the nodes of bands in slices.

    Copies, and what they write, are named ``<name>.chunk<begin>_<end>`` by their rows; all nodes that are added have
    `marks.STRIP`, those of a slice also `marks.CHUNK`, so that slices of one form can share a session. What cuts values
    that are there whole comes before the slice, with `marks.WINDOW`. Constants and outputs are the model's.

    Args:
        model: A lowered model, in the order in which it runs. Not changed.
        bands: In order, disjoint, as `row_rules` allows them.
        block: Channels of a block in onnxruntime's blocked layout.
    """
    copy = model.clone()
    nodes, rules, writer = list(copy.graph), row_rules(copy), SliceWriter(copy, STRIP)
    blocked, start, gone = blocked_values(nodes), 0, list[ir.Node]()
    first = 1 + max((chunk.band for chunk in map(chunk_of, nodes) if chunk is not None), default=-1)
    for number, band in enumerate(bands, first):
        own = dict(zip(nodes[band.begin : band.end], rules[band.begin : band.end], strict=True))
        tiled = {node: rule for node, rule in own.items() if isinstance(rule, RowRule)}
        writer.order += nodes[start : band.begin] + [node for node in own if node not in tiled]
        start = band.end
        gone += tiled
        BandWriter(writer, number, tiled, blocked, block).write(band.rows)
    writer.order += nodes[start:]
    copy.graph.remove(nodes)
    copy.graph.extend(writer.order)
    for node in gone:
        writer.detach(node)
    writer.drop_unread()
    return copy


def blocked_values(nodes: Sequence[ir.Node]) -> set[ir.Value]:
    """The values in the blocked layout: what its operators write, and what others write of it."""
    images: set[ir.Value] = set()
    for node in nodes:
        is_made = node.domain == BLOCKED and node.op_type != "ReorderOutput"
        if is_made or (node.domain != BLOCKED and any(v in images for v in node.inputs)):
            images.update(v for v in node.outputs if rows_axis(v) is not None)
    return images


@dataclass(slots=True)
class Piece:
    """Some rows of a value that exist: as a value of its rank, as a view of its bytes along whose axis rows lie, or
    both."""

    rows: Interval
    value: ir.Value | None = None
    view: ir.Value | None = None


@dataclass(slots=True)
class BandWriter:
    """A band that is written.

    Attributes:
        number: Of the band.
        nodes: Those of the band that read images, in order.
        blocked: Values in the blocked layout.
        pieces: What exists of each value that the band writes, in order of rows.
        entries: The others, of which there are all rows.
        cuts: Of these what this slice reads.
        reads: What was cut or joined for this slice.
        wholes: Of what is computed for others the whole so far: its slices, or what they are written into.
        exits: What others read, and results of the model.
        results: The same as it is there in the end.
        axes: The axis of the rows of each value.
    """

    writer: SliceWriter
    number: int
    nodes: Mapping[ir.Node, RowRule]
    blocked: set[ir.Value]
    block: int
    pieces: dict[ir.Value, list[Piece]] = field(default_factory=dict)
    entries: dict[ir.Value, Piece] = field(default_factory=dict)
    cuts: dict[tuple[ir.Value, Interval], Piece] = field(default_factory=dict)
    reads: dict[tuple[ir.Value, Interval], ir.Value] = field(default_factory=dict)
    wholes: dict[ir.Value, list[Piece]] = field(default_factory=dict)
    exits: list[ir.Value] = field(init=False)
    results: dict[ir.Value, ir.Value] = field(default_factory=dict)
    axes: dict[ir.Value, int] = field(init=False)

    def __post_init__(self) -> None:
        self.exits, self.axes = exits_of(self.nodes), axes_of_rows(self.nodes)

    def height(self, value: ir.Value) -> int:
        """How many rows a value has."""
        return (static_shape(value) or ())[self.axes[value]]

    def write(self, rows: int) -> None:
        """Add copies of the nodes for slices of so many rows, and put together what others read."""
        parts = bounds(self.nodes, rows)
        begin = 0
        for one, (end, _) in zip(row_slices(self.nodes, parts), parts, strict=True):
            chunk, begin = Chunk(self.number, 0, begin, end), end
            start = self.cut_entries(one)
            self.add(one)
            for made in self.writer.order[start:]:
                made.metadata_props[CHUNK] = chunk.mark
        self.join()

    def add(self, one: RowSlice) -> None:
        """Add copies of the nodes for a slice, for which entries are cut."""
        later = dict[ir.Value, list[Piece]]()
        for node, copy in one.tiles:
            for value, piece in self._copied(node, copy):
                if _runs_again(node, self.nodes):
                    self.pieces.pop(value, None)
                later[value] = list(self._kept(value, [*self.pieces.get(value, ()), piece], one.kept.get(value)))
                self.pieces.setdefault(value, []).append(piece)
                if value in self.exits:
                    self.collect(value, piece)
        for value in [value for value in one.reads if value in self.pieces and value not in later]:
            later[value] = list(self._kept(value, self.pieces[value], one.kept.get(value)))
        self.pieces.update(later)
        self.reads.clear()
        self.cuts.clear()

    def join(self) -> None:
        """Put together what others read."""
        for value in self.exits:
            self._join(value)

    def cut_entries(self, one: RowSlice) -> int:
        """Cut what a slice reads of values that are there whole, before all that it runs; where that begins."""
        written = {value for node in self.nodes for value in node.outputs}
        for value, intervals in one.reads.items():
            for rows in intervals if value not in written else ():
                whole = self.entries.setdefault(value, Piece((0, self.height(value)), value))
                self.cuts[value, rows] = self._cut(value, whole, rows)
                if rows != whole.rows:
                    self.writer.order[-1].metadata_props[WINDOW] = "1"
        return len(self.writer.order)

    def _copied(self, node: ir.Node, copy: RowCopy) -> Iterator[tuple[ir.Value, Piece]]:
        """Add a copy of a node; what it gives of each of its outputs."""
        writer, (begin, end) = self.writer, copy.made
        inputs = list(node.inputs)
        for index, rows in copy.inputs.items():
            value = inputs[index]
            assert value is not None
            inputs[index] = self.operand(node, value, rows)
        for index, axis in copy.axes.items():
            value = inputs[index]
            assert value is not None
            inputs[index] = writer.part(value, axis, begin, end, f"{value.name}.chunk{begin}_{end}")
        for index, numbers in copy.constants.items():
            inputs[index] = writer.integers(numbers)
        inputs = [value for index, value in enumerate(inputs) if index not in copy.without]
        suffix = f".chunk{copy.rows[0]}_{copy.rows[1]}"
        outputs = [
            writer.value(v, self.axes[v], end - begin, f"{v.name}{suffix}") if v.name else ir.Value(name="")
            for v in node.outputs
        ]
        inputs, kind = told_shape(writer, node, inputs, static_shape(outputs[0]) or ())
        kept = [attribute for name, attribute in node.attributes.items() if name not in copy.attributes]
        changed = ir.convenience.convert_attributes({k: v for k, v in copy.attributes.items() if v is not None})
        made = ir.Node(
            node.domain, kind, inputs, [*kept, *changed], overload=node.overload, outputs=outputs, version=node.version,
            name=writer.fresh(f"{node.name}{suffix}"),
            metadata_props={**node.metadata_props, STRIP: f"{copy.rows[0]}.{copy.rows[1]}"},
        )  # fmt: skip
        writer.order.append(made)
        for value, output in zip(node.outputs, outputs, strict=True):
            if not value.name:
                continue
            piece = Piece(copy.made, output)
            yield value, piece if copy.rows == copy.made else self._cut(value, piece, copy.rows)

    def operand(self, node: ir.Node, value: ir.Value, rows: Interval) -> ir.Value:
        """Some rows of an image as a copy of a node reads them."""
        return self.read(value, rows)

    def read(self, value: ir.Value, rows: Interval) -> ir.Value:
        """Some rows of an image: what is there, a slice of it, or slices joined."""
        if (value, rows) not in self.reads:
            there = [p for p in self.pieces.get(value, ()) if p.rows[0] < rows[1] and rows[0] < p.rows[1]]
            parts = [self._cut(value, p, (max(p.rows[0], rows[0]), min(p.rows[1], rows[1]))) for p in there]
            piece = self.cuts.get((value, rows)) or (parts[0] if len(parts) == 1 else self._joined(value, parts))
            assert piece.rows == rows, (value.name, piece.rows, rows)
            self.reads[value, rows] = self._as_value(value, piece)
        return self.reads[value, rows]

    def _kept(self, value: ir.Value, pieces: Sequence[Piece], first: int | None) -> Iterator[Piece]:
        """What stays of pieces for later slices: of one of which most rows aren't read any more, a copy of the rest."""
        for piece in pieces:
            begin, end = piece.rows
            if first is not None and first < end:
                yield self._cut(value, piece, (first, end)) if first - begin >= end - first else piece

    def _cut(self, value: ir.Value, piece: Piece, rows: Interval) -> Piece:
        """Some rows of a piece."""
        if rows == piece.rows:
            return piece
        source, axis = self._as_view(value, piece)
        name = f"{value.name}.chunk{rows[0]}_{rows[1]}/rows"
        part = self.writer.value(source, axis, rows[1] - rows[0], name)
        self.writer.slice(source, axis, rows[0] - piece.rows[0], rows[1] - piece.rows[0], part)
        return self._seen(value, part, rows)

    def _joined(self, value: ir.Value, pieces: Sequence[Piece]) -> Piece:
        """Pieces as one."""
        views, rows = [self._as_view(value, piece) for piece in pieces], (pieces[0].rows[0], pieces[-1].rows[1])
        axis, name = views[0][1], f"{value.name}.chunk{rows[0]}_{rows[1]}/joined"
        joined = self.writer.value(views[0][0], axis, rows[1] - rows[0], name)
        self.writer.window("Concat", [view for view, _ in views], {"axis": axis}, joined)
        return self._seen(value, joined, rows)

    def _seen(self, value: ir.Value, made: ir.Value, rows: Interval) -> Piece:
        return Piece(rows, view=made) if value in self.blocked else Piece(rows, made)

    def _as_view(self, value: ir.Value, piece: Piece) -> tuple[ir.Value, int]:
        """Rows as their bytes lie, and the axis along which they do."""
        if value not in self.blocked:
            assert piece.value is not None
            return piece.value, self.axes[value]
        if piece.view is None:
            assert piece.value is not None
            batch, channels, height, width = static_shape(piece.value) or ()
            dims = (batch * channels // self.block, height, width * self.block)
            piece.view = self._reshaped(value, piece.value, dims, f"{piece.value.name}/view")
        return piece.view, 1

    def _as_value(self, value: ir.Value, piece: Piece) -> ir.Value:
        """Rows as nodes read them."""
        if piece.value is None:
            assert piece.view is not None
            dims = list(static_shape(value) or ())
            dims[self.axes[value]] = piece.rows[1] - piece.rows[0]
            name = f"{value.name}.chunk{piece.rows[0]}_{piece.rows[1]}/read"
            piece.value = self._reshaped(value, piece.view, dims, name)
        return piece.value

    def _reshaped(self, value: ir.Value, source: ir.Value, dims: Sequence[int], name: str) -> ir.Value:
        made = ir.Value(name=self.writer.fresh(name), type=value.type, shape=ir.Shape(dims))
        self.writer.window("Reshape", [source, self.writer.integers(dims)], {}, made)
        return made

    def collect(self, value: ir.Value, piece: Piece) -> None:
        """Put a slice to what is there of the whole: written into it, where that pays."""
        pieces = self.wholes.setdefault(value, [])
        view, axis = self._as_view(value, piece)
        dims = static_shape(view) or ()
        row = math.prod(dims[axis + 1 :]) * (value.dtype.bitwidth if value.dtype is not None else 0) // 8
        opset = self.writer.model.graph.opset_imports.get("") or 0
        if opset < 11 or row < _INDEX * 8 * (axis + 1) or piece.rows == (0, self.height(value)):
            pieces.append(piece)
            return
        rows, height = piece.rows, self.height(value)
        whole = self.writer.value(view, axis, height, f"{value.name}.chunk0_{rows[1]}/whole")
        if not pieces:  # what isn't written yet are zeros
            pads = [0] * (2 * len(dims))
            pads[len(dims) + axis] = height - rows[1]
            self.writer.window("Pad", [view, self.writer.integers(pads)], {}, whole)
        else:
            index = np.stack(np.meshgrid(*map(np.arange, dims[: axis + 1]), indexing="ij"), -1)
            index[..., axis] += rows[0]
            name = f"{value.name}.index.chunk{rows[0]}_{rows[1]}"
            numbers = self.writer.initializer(name, ir.Tensor(index.astype(np.int64)))
            before, _ = self._as_view(value, pieces[0])
            self.writer.window("ScatterND", [before, numbers, view], {}, whole)
        self.wholes[value] = [self._seen(value, whole, (0, height))]

    def _join(self, value: ir.Value) -> None:
        """Put what others read under its name."""
        pieces = self.wholes[value]
        joined = self._as_value(value, pieces[0] if len(pieces) == 1 else self._joined(value, pieces))
        value.name, joined.name = None, value.name
        joined.shape = value.shape
        if value in self.blocked:
            self.blocked.add(joined)
        ir.convenience.replace_all_uses_with(value, joined, replace_graph_outputs=True)
        self.results[value] = joined
