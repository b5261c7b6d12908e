"""Models with bands in slices: copies of nodes, what cuts what they read, and what joins what they write.

The result is a plain model that any runtime runs; its order of nodes is the schedule. What is kept for later slices is
ordinary values: slices and joins of what copies write. In onnxruntime's blocked layout (channels in blocks of 8 or 16,
innermost) these are of a view of the same bytes: ``[batch * channels / block, height, width * block]``.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from memonger.graph.aliasing import windows
from memonger.ir import training_roles
from memonger.ir.emitter import as_attributes
from memonger.ir.marks import AGAIN, CHUNK, OVERLAP, STRIP, WINDOW, Chunk, chunk_of
from memonger.ir.names import fresh
from memonger.ir.parts import elements
from memonger.ir.tensors import FILES
from memonger.ir.values import all_values, graphs, static_shape, tensor_shape
from memonger.lowering.cpu_convolutions import block_size
from memonger.model.kept_state import state_of
from memonger.tiling.axes import BLOCKED, LARGER, rows_axis
from memonger.tiling.cutting import Interval, Refusal, SliceCopy, Slicing
from memonger.tiling.slice_check import CheckedCopy, Elements
from memonger.tiling.slices import Band, Slice, axes_of_nodes, emission, exits_of, row_slices, runs_again

_INDEX = 16
"""A row is written into its whole where it lies if it has so many times the bytes of the numbers that say where."""


@dataclass(slots=True)
class SliceWriter:
    """The model that is written.

    Attributes:
        model: Its nodes are replaced by ``order`` at the end.
        mark: What the nodes have in their metadata that cut and join.
        is_ranged: Whether the axis may be shorter than it is, so that the last slices that have any elements are cut
            short: shapes are told without it.
        order: Nodes in the order in which they run.
        early: Slices of what persists from step to step, to stand before any node that writes over parts of it.
    """

    model: ir.Model
    mark: str = WINDOW
    is_ranged: bool = False
    order: list[ir.Node] = field(default_factory=list)
    early: list[ir.Node] = field(default_factory=list)
    _persistent: frozenset[str] = field(init=False)
    _taken: set[str] = field(init=False)
    _constants: dict[tuple[int, ...], ir.Value] = field(default_factory=dict)
    _parts: dict[tuple[ir.Value, int, int, int], ir.Value] = field(default_factory=dict)
    _read: dict[ir.Value, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        roles = training_roles.read(self.model, str(self.model.graph.name))
        self._persistent = frozenset(roles.updates if roles is not None else state_of(self.model, ""))
        self._taken = {str(v.name) for v in all_values(self.model.graph)}
        self._taken.update(str(node.name) for graph in graphs(self.model) for node in graph)
        self._taken.update(str(v.name) for graph in graphs(self.model) for node in graph for v in node.outputs)

    def fresh(self, name: str) -> str:
        """A name that nothing else has."""
        return fresh(name, self._taken)

    def integers(self, numbers: Sequence[int]) -> ir.Value:
        """A constant, one for the same numbers."""
        key = tuple(numbers)
        if key not in self._constants:
            self._constants[key] = self.initializer(
                f"chunk.{'_'.join(map(str, key))}", ir.Tensor(np.array(key, np.int64))
            )
        return self._constants[key]

    def part(self, whole: ir.Value, axis: int, begin: int, end: int, name: str) -> ir.Value:
        """The elements ``[begin, end)`` of a constant's axis: one constant for all bands that read them."""
        key = (whole, axis, begin, end)
        if key not in self._parts:
            assert whole.const_value is not None
            self._parts[key] = self.initializer(name, sliced(whole.const_value, axis, begin, end))
        return self._parts[key]

    def initializer(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        """A new constant."""
        tensor.name = self.fresh(name)
        kind = ir.TensorType(tensor.dtype)
        value = ir.Value(name=tensor.name, type=kind, shape=tensor_shape(tensor), const_value=tensor)
        self.model.graph.register_initializer(value)
        return value

    def window(
        self, op: str, inputs: Sequence[ir.Value], attributes: Mapping[str, int | list[int]], result: ir.Value
    ) -> None:
        """Add a node that cuts, joins or views."""
        name = self.fresh(f"{result.name}/{op}")
        given = as_attributes(attributes)
        made = ir.node(op, inputs, given, outputs=[result], name=name, metadata_props={self.mark: "1"})
        persists = op == "Slice" and inputs[0].name in self._persistent
        (self.early if persists and windows(made) else self.order).append(made)

    def slice(self, source: ir.Value, axis: int, begin: int, end: int, result: ir.Value) -> None:
        """Add a node that takes the elements ``[begin, end)`` of an axis."""
        if (self.model.graph.opset_imports.get("") or 10) >= 10:
            bounds = [self.integers([number]) for number in (begin, end, axis)]
            self.window("Slice", [source, *bounds], {}, result)
        else:
            self.window("Slice", [source], {"starts": [begin], "ends": [end], "axes": [axis]}, result)

    def value(self, like: ir.Value, axis: int, length: int, name: str) -> ir.Value:
        """A value of the type of another, with another number of elements along an axis."""
        dims = list(static_shape(like) or ())
        dims[axis] = length
        return ir.Value(name=self.fresh(name), type=like.type, shape=ir.Shape(dims))

    def detach(self, node: ir.Node) -> None:
        """Let a node that isn't written any more read nothing."""
        self._read.update((v, None) for v in node.inputs if v is not None)
        for index in range(len(node.inputs)):
            node.replace_input_with(index, None)

    def read_no_more(self, value: ir.Value) -> None:
        """A node that read a value doesn't any more: it goes with the rest in `drop_unread`, if nobody does."""
        self._read[value] = None

    def drop_unread(self) -> None:
        """Remove the constants of which only slices are read, and nodes that nothing reads any more: of told shapes."""
        waiting = list(self._read)
        while waiting:
            value = waiting.pop()
            node = value.producer()
            if node is None:
                if value.is_initializer() and not (value.uses() or value.is_graph_input() or value.is_graph_output()):
                    del self.model.graph.initializers[str(value.name)]
            elif node.graph is not None and not any(v.uses() or v.is_graph_output() for v in node.outputs):
                waiting += [v for v in node.inputs if v is not None]
                self.model.graph.remove(node, safe=True)


def sliced(tensor: ir.TensorProtocol, axis: int, begin: int, end: int) -> ir.TensorProtocol:
    """The elements ``[begin, end)`` of an axis of a constant: of one in a file where they are one stretch of it."""
    dims = [int(dim) for dim in tensor.shape.numpy()]
    inner = math.prod(dims[axis + 1 :]) * tensor.dtype.bitwidth
    if isinstance(tensor, ir.ExternalTensor) and math.prod(dims[:axis]) == 1 and inner % 8 == 0:
        dims[axis] = end - begin
        offset, length = (tensor.offset or 0) + begin * inner // 8, (end - begin) * inner // 8
        shape = ir.Shape(dims)
        part = type(tensor)(
            tensor.location, offset, length, tensor.dtype, shape=shape, name="", base_dir=tensor.base_dir
        )
        if FILES in tensor.meta:
            part.meta[FILES] = tensor.meta[FILES]
        return part
    return ir.Tensor(tensor.numpy()[elements(axis, begin, end)].copy(), dtype=tensor.dtype)


def told_shape(
    writer: SliceWriter, node: ir.Node, inputs: list[ir.Value | None], dims: Sequence[int], axis: int | None = None
) -> tuple[list[ir.Value | None], str]:
    """The inputs and the type of a copy that writes this shape: some operators are told their output's.

    Args:
        writer: What writes the copy.
        node: What it is a copy of.
        inputs: The copy's.
        dims: The shape of its output.
        axis: That along which it is cut.
    """
    kind = node.op_type
    if node.domain or kind not in ("Expand", "Reshape", "Resize", "Squeeze"):
        return inputs, kind
    if writer.is_ranged and axis is not None:  # what is left of a product; what an Expand's input has
        dims = [(1 if kind == "Expand" else -1) if number == axis else dim for number, dim in enumerate(dims)]
    if kind == "Squeeze":  # without axes it would drop that of a slice of one element
        told = len(inputs) > 1 or "axes" in node.attributes
        return (inputs, kind) if told else ([*inputs, writer.integers(dims)], "Reshape")
    place = 3 if kind == "Resize" else 1
    if place < len(inputs) and inputs[place] is not None:
        axes = node.attributes.get_ints("axes") or range(len(dims))
        inputs[place] = writer.integers([dims[axis] for axis in axes])
    return inputs, kind


@dataclass(frozen=True, slots=True)
class InBands:
    """A model with bands in slices.

    Attributes:
        model: The model.
        copies: Of each band the copies of nodes, in the order in which they run.
    """

    model: ir.Model
    copies: tuple[tuple[CheckedCopy, ...], ...]


def in_slices(
    model: ir.Model, bands: Sequence[Band], rules: Sequence[Slicing | Refusal | None], is_ranged: bool = False
) -> InBands:
    """A model in which the nodes of each band run on slices, one slice after the other.

    Inputs, outputs, weights and metadata are the model's. A copy of a node, and what it writes, is named
    ``<name>.chunk<begin>_<end>``; in its metadata `marks.CHUNK` is ``<band>.<stage>.<begin>.<end>``, and
    `marks.STRIP` its rows. The nodes that cut and join have `marks.WINDOW`: they stand before the chunk that reads
    them, or behind the band; those between copies that keep rows for later slices have `marks.STRIP`. A joined value
    keeps its name. Constants are sliced here. Nodes of a band that don't depend on what is cut run once, before its
    first chunk; a stage of one slice isn't copied.

    Args:
        model: A lowered model, in the order in which it runs: all nodes named, every value with a static shape. Not
            changed.
        bands: In the model's order, disjoint; all along rows, or none.
        rules: How each node is cut, or gives rows. None in a band reads whole what the same band computes in slices.
        is_ranged: Whether axes may be shorter than they are. A slice then has those of its elements that there are: a
            Slice's bounds end with its axis. Of what the model's nodes compute for it, no shape is told. Of bands of
            rows that is the axis of images.
    """
    copy = model.clone()
    nodes = list(copy.graph)
    own_rules = (rule for band in bands for rule in rules[band.begin : band.end])
    by_rows = any(isinstance(rule, Slicing) and rule.height for rule in own_rules)
    writer = SliceWriter(copy, STRIP if by_rows else WINDOW, is_ranged)
    blocked, block = _blocked(nodes if by_rows else ())
    first, start = 1 + max((chunk.band for chunk in map(chunk_of, nodes) if chunk is not None), default=-1), 0
    written, gone = list[tuple[CheckedCopy, ...]](), list[ir.Node]()
    for number, band in enumerate(bands, first):
        own = nodes[band.begin : band.end]
        answers = zip(own, rules[band.begin : band.end], strict=True)
        cut = {node: rule for node, rule in answers if isinstance(rule, Slicing)}
        writer.order += nodes[start : band.begin] + [node for node in own if node not in cut]
        start = band.end
        one = BandWriter(writer, number, cut, blocked, block, 0 if by_rows else band.size)
        one.write(band, nodes)
        written.append(tuple(one.written))
        gone += cut
    writer.order += nodes[start:]
    copy.graph.remove(nodes)
    copy.graph.extend(writer.order)
    for node in writer.order:
        node.metadata_props.pop(OVERLAP, None)
    kept = set(writer.order)
    for node in gone:
        if node not in kept:
            writer.detach(node)
    writer.drop_unread()
    return InBands(copy, tuple(written))


def _blocked(nodes: Sequence[ir.Node]) -> tuple[set[ir.Value], int]:
    """The values in the blocked layout: what its operators write, and others make of it; and channels of a block."""
    images: set[ir.Value] = set()
    for node in nodes:
        is_made = node.domain == BLOCKED and node.op_type != "ReorderOutput"
        if is_made or (node.domain != BLOCKED and any(v in images for v in node.inputs)):
            images.update(v for v in node.outputs if rows_axis(v) is not None)
    return images, block_size() if any(node.domain == BLOCKED for node in nodes) else 1


@dataclass(slots=True)
class Piece:
    """Some parts of a value that exist: as a value of its rank, as a view of its bytes along whose axis rows lie, or
    both."""

    rows: Interval
    value: ir.Value | None = None
    view: ir.Value | None = None


Place = tuple[ir.Value, int, Interval]
"""A value, an axis of it, and which parts of that."""


@dataclass(slots=True)
class BandWriter:
    """A band that is written.

    Attributes:
        number: Of the band.
        nodes: Those of the band that are cut, in order.
        blocked: Values in the blocked layout.
        block: Channels of a block in that.
        size: Parts of the axis of a `Band`; 0: it is one of rows. Of a `Band` what a chunk reads is cut and joined
            before it, and stays; of rows as late as can be, for this slice.
        pieces: What exists of each value that the band writes, in order.
        entries: The others, of which there is all.
        cuts: What was cut of either.
        reads: What was cut or joined.
        wholes: Of what is computed for others the whole so far: its slices, or what they are written into.
        exits: What others read, and results of the model.
        results: The same as it is there in the end.
        axes: The axis of each value that is cut.
        sums: What is summed up → the sum so far.
        written: The copies.
    """

    writer: SliceWriter
    number: int
    nodes: Mapping[ir.Node, Slicing]
    blocked: set[ir.Value]
    block: int
    size: int = 0
    pieces: dict[ir.Value, list[Piece]] = field(default_factory=dict)
    entries: dict[ir.Value, Piece] = field(default_factory=dict)
    cuts: dict[Place, Piece] = field(default_factory=dict)
    reads: dict[Place, ir.Value] = field(default_factory=dict)
    wholes: dict[ir.Value, list[Piece]] = field(default_factory=dict)
    exits: list[ir.Value] = field(init=False)
    results: dict[ir.Value, ir.Value] = field(default_factory=dict)
    axes: dict[ir.Value, int] = field(init=False)
    sums: dict[ir.Value, ir.Value] = field(default_factory=dict)
    written: list[CheckedCopy] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.exits, self.axes = exits_of(self.nodes), axes_of_nodes(self.nodes)

    def height(self, value: ir.Value) -> int:
        """How many parts a value has."""
        return self.size or (static_shape(value) or ())[self.axes[value]]

    def unit(self, value: ir.Value, axis: int) -> int:
        """Elements of a value for each part of its axis."""
        return (static_shape(value) or ())[axis] // self.size if self.size else 1

    def write(self, band: Band, nodes: Sequence[ir.Node]) -> None:
        """Add copies of the nodes for all chunks, and put together what others read; of ``nodes`` the band is some."""
        chunks, first = list(emission(band.stages)), len(self.writer.order)
        if self.size:
            stages = [[node for node in nodes[one.begin : one.end] if node in self.nodes] for one in band.stages]
            copies = (tuple((n, self.nodes[n].copy(begin, end)) for n in stages[at]) for at, begin, end in chunks)
            slices = [Slice(tiles, {}, {}) for tiles in copies]
        else:
            slices = row_slices(self.nodes, [end for *_, end in chunks])
        for (stage, begin, end), one in zip(chunks, slices, strict=True):
            self.add(one, Chunk(self.number, stage, begin, end).mark)
        self.join()
        for value, whole in self.sums.items():
            self._replace(value, whole)
        self.writer.order[first:first] = self.writer.early
        self.writer.early.clear()

    def add(self, one: Slice, chunk: str = "") -> None:
        """Add copies of the nodes for a slice, with the mark of their chunk; of rows what isn't cut for it yet is."""
        writer = self.writer
        if self.size:
            order = list[ir.Node]()
            for node, copy in one.tiles:
                for value, piece in self._copied(node, copy, order, chunk):
                    self.pieces.setdefault(value, []).append(piece)
            writer.order += order
            return
        self._cut_entries(one)
        start, later = len(writer.order), dict[ir.Value, list[Piece]]()
        for node, copy in one.tiles:
            for value, piece in self._copied(node, copy, writer.order):
                if runs_again(node, self.nodes):
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
        for made in writer.order[start:]:
            made.metadata_props[CHUNK] = chunk

    def join(self) -> None:
        """Put together what others read."""
        for value in self.exits:
            axis = self.axes[value]
            if self.size:
                self._replace(value, self.read(value, axis, (0, self.size)))
            else:
                pieces = self.wholes[value]
                whole = pieces[0] if len(pieces) == 1 else self._joined(value, pieces)
                self._replace(value, self._as_value(value, axis, whole))

    def _replace(self, value: ir.Value, whole: ir.Value) -> None:
        """Let what was written stand for a value, under its name."""
        self.results[value] = whole
        if whole is value:
            return
        value.name, whole.name = None, value.name
        whole.shape = value.shape
        if value in self.blocked:
            self.blocked.add(whole)
        ir.convenience.replace_all_uses_with(value, whole, replace_graph_outputs=True)

    def _cut_entries(self, one: Slice) -> None:
        """Cut what a slice of rows reads of values that are there whole, before all that it runs."""
        written = {value for node in self.nodes for value in node.outputs}
        for value, rows in ((v, rows) for v, intervals in one.reads.items() if v not in written for rows in intervals):
            whole, axis = self.entries.setdefault(value, Piece((0, self.height(value)), value)), self.axes[value]
            if (value, axis, rows) in self.cuts:
                continue
            piece = self.cuts[value, axis, rows] = self._cut(value, axis, whole, rows)
            part = piece.view if piece.value is None else piece.value
            if rows != whole.rows and part is not None and (cut := part.producer()) is not None:
                cut.metadata_props[WINDOW] = "1"

    def _copied(
        self, node: ir.Node, copy: SliceCopy, order: list[ir.Node], chunk: str = ""
    ) -> Iterator[tuple[ir.Value, Piece]]:
        """Add a copy of a node, or itself where it gives all; what it gives of each of its outputs."""
        writer, how, (begin, end) = self.writer, self.nodes[node], copy.made
        inputs, suffix = list(node.inputs), f".chunk{copy.rows[0]}_{copy.rows[1]}"
        for index, rows in copy.inputs.items():
            value = inputs[index]
            assert value is not None
            inputs[index] = self.operand(node, value, how.inputs[index], rows)
        for index, axis in copy.axes.items():
            value = inputs[index]
            assert value is not None
            inputs[index] = writer.part(value, axis, begin, end, f"{value.name}.chunk{begin}_{end}")
        for index, numbers in copy.constants.items():
            inputs[index] = writer.integers(numbers)
        inputs = [value for index, value in enumerate(inputs) if index not in copy.without]
        if self.size and copy.rows == (0, self.size):
            for index, value in enumerate(inputs):
                node.replace_input_with(index, value)
            made = node
        else:
            adds = bool(how.sums) and begin > 0  # a Gemm adds its product to the sum of those before it
            inputs = [*inputs[:2], *(self.sums[node.outputs[i]] for i in how.sums)] if adds else inputs
            outputs = list[ir.Value]()
            for index, value in enumerate(node.outputs):
                name = f"{value.name}{suffix}"
                if not value.name:
                    outputs.append(ir.Value(name=""))
                elif index in how.sums:
                    outputs.append(ir.Value(name=writer.fresh(name), type=value.type, shape=value.shape))
                else:
                    axis = how.outputs[index]
                    outputs.append(writer.value(value, axis, (end - begin) * self.unit(value, axis), name))
            inputs, kind = told_shape(writer, node, inputs, static_shape(outputs[0]) or (), how.outputs.get(0))
            kept = [a for k, a in node.attributes.items() if k not in copy.attributes and not (adds and k == "beta")]
            changed = ir.convenience.convert_attributes(as_attributes(copy.attributes))
            marks = {**node.metadata_props, **({CHUNK: chunk} if chunk else {STRIP: f"{copy.rows[0]}.{copy.rows[1]}"})}
            if AGAIN in marks:
                marks[AGAIN] += suffix
            made = ir.Node(
                node.domain, kind, inputs, [*kept, *changed], overload=node.overload, outputs=outputs,
                version=node.version, name=writer.fresh(f"{node.name}{suffix}"), doc_string=node.doc_string,
                metadata_props=marks,
            )  # fmt: skip
            self.written.append(self._record(node, copy, made))
        order.append(made)
        self.sums.update((node.outputs[index], made.outputs[index]) for index in how.sums)
        for index, axis in how.outputs.items():
            value, piece = node.outputs[index], Piece(copy.made, made.outputs[index])
            yield value, piece if copy.rows == copy.made else self._cut(value, axis, piece, copy.rows)

    def _record(self, node: ir.Node, copy: SliceCopy, made: ir.Node) -> CheckedCopy:
        """What is known of a copy."""

        def part(value: ir.Value | None, axis: int, rows: Interval) -> Elements:
            assert value is not None
            unit = self.unit(value, axis)
            return Elements(axis, rows[0] * unit, rows[1] * unit, self.block if value in self.blocked else 1)

        how, (begin, end) = self.nodes[node], copy.rows
        given = begin - copy.made[0], end - copy.made[0]
        told = tuple(sorted((name, str(value)) for name, value in copy.attributes.items()))
        # these compute with the numbers of rows: other rows of other slices may be rounded otherwise
        place = copy.rows if how.height and node.op_type in LARGER else None
        return CheckedCopy(
            made, str(node.name), (end - begin) / (self.size or how.height),
            (given, copy.made[1] - copy.made[0], told, place),
            {index: part(node.inputs[index], how.inputs[index], rows) for index, rows in copy.inputs.items()},
            {index: part(node.outputs[index], axis, copy.rows) for index, axis in how.outputs.items()},
            {i: part(node.outputs[i], axis, given) for i, axis in how.outputs.items() if copy.rows != copy.made},
        )  # fmt: skip

    def operand(self, node: ir.Node, value: ir.Value, axis: int, rows: Interval) -> ir.Value:
        """Some parts of a value as a copy of a node reads them."""
        return self.read(value, axis, rows)

    def read(self, value: ir.Value, axis: int, rows: Interval) -> ir.Value:
        """Some parts of a value: what is there, a slice of it, or slices joined."""
        key = value, axis, rows
        if key not in self.reads:
            self.reads[key] = self._as_value(value, axis, self._part(value, axis, rows))
        return self.reads[key]

    def _part(self, value: ir.Value, axis: int, rows: Interval) -> Piece:
        if (value, axis, rows) in self.cuts:
            return self.cuts[value, axis, rows]
        if value not in self.pieces:
            if value.const_value is not None and not value.is_graph_input() and rows != (0, self.size):
                begin, end = (row * self.unit(value, axis) for row in rows)
                name = f"{value.name}.chunk{rows[0]}_{rows[1]}"
                return Piece(rows, self.writer.part(value, axis, begin, end, name))
            return self._cut(value, axis, Piece((0, self.size), value), rows)
        pieces = self.pieces[value]
        first = bisect_right(pieces, rows[0], key=lambda piece: piece.rows[1])
        there = pieces[first : bisect_left(pieces, rows[1], first, key=lambda piece: piece.rows[0])]
        parts = [self._cut(value, axis, p, (max(p.rows[0], rows[0]), min(p.rows[1], rows[1]))) for p in there]
        piece = parts[0] if len(parts) == 1 else self._joined(value, parts)
        assert piece.rows == rows, (value.name, piece.rows, rows)
        return piece

    def _kept(self, value: ir.Value, pieces: Sequence[Piece], first: int | None) -> Iterator[Piece]:
        """What stays of pieces for later slices: of one of which most rows aren't read any more, a copy of the rest."""
        for piece in pieces:
            begin, end = piece.rows
            if first is not None and first < end:
                is_large = first - begin >= end - first
                yield self._cut(value, self.axes[value], piece, (first, end)) if is_large else piece

    def _cut(self, value: ir.Value, axis: int, piece: Piece, rows: Interval) -> Piece:
        """Some parts of a piece; of a `Band` the same for all that read them."""
        if rows == piece.rows or (self.size and (value, axis, rows) in self.cuts):
            return piece if rows == piece.rows else self.cuts[value, axis, rows]
        (source, along), unit = self._as_view(value, axis, piece), self.unit(value, axis)
        name = f"{value.name}.chunk{rows[0]}_{rows[1]}{'' if self.size else '/rows'}"
        begin, end = ((row - piece.rows[0]) * unit for row in rows)
        part = self.writer.value(source, along, end - begin, name)
        self.writer.slice(source, along, begin, end, part)
        found = self._piece(value, rows, part)
        if self.size:
            self.cuts[value, axis, rows] = found
        return found

    def _joined(self, value: ir.Value, pieces: Sequence[Piece]) -> Piece:
        """Pieces as one."""
        views = [self._as_view(value, self.axes[value], piece) for piece in pieces]
        rows, axis = (pieces[0].rows[0], pieces[-1].rows[1]), views[0][1]
        name = f"{value.name}.chunk{rows[0]}_{rows[1]}{'' if self.size else '/joined'}"
        joined = self.writer.value(views[0][0], axis, (rows[1] - rows[0]) * self.unit(value, axis), name)
        self.writer.window("Concat", [view for view, _ in views], {"axis": axis}, joined)
        return self._piece(value, rows, joined)

    def _piece(self, value: ir.Value, rows: Interval, made: ir.Value) -> Piece:
        """What was cut or joined of a value."""
        return Piece(rows, view=made) if value in self.blocked else Piece(rows, made)

    def _as_view(self, value: ir.Value, axis: int, piece: Piece) -> tuple[ir.Value, int]:
        """Rows as their bytes lie, and the axis along which they do."""
        if value not in self.blocked:
            assert piece.value is not None
            return piece.value, axis
        if piece.view is None:
            assert piece.value is not None
            batch, channels, height, width = static_shape(piece.value) or ()
            dims = (batch * channels // self.block, height, width * self.block)
            piece.view = self._reshaped(value, piece.value, dims, f"{piece.value.name}/view")
        return piece.view, 1

    def _as_value(self, value: ir.Value, axis: int, piece: Piece) -> ir.Value:
        """Rows as nodes read them."""
        if piece.value is None:
            assert piece.view is not None
            dims = list(static_shape(value) or ())
            dims[axis] = piece.rows[1] - piece.rows[0]
            name = f"{value.name}.chunk{piece.rows[0]}_{piece.rows[1]}/read"
            piece.value = self._reshaped(value, piece.view, dims, name)
        return piece.value

    def _reshaped(self, value: ir.Value, source: ir.Value, dims: Sequence[int], name: str) -> ir.Value:
        made = ir.Value(name=self.writer.fresh(name), type=value.type, shape=ir.Shape(dims))
        told = [-1, *dims[1:]] if self.writer.is_ranged else dims
        self.writer.window("Reshape", [source, self.writer.integers(told)], {}, made)
        return made

    def collect(self, value: ir.Value, piece: Piece) -> None:
        """Put a slice to what is there of the whole: written into it, where that pays."""
        pieces = self.wholes.setdefault(value, [])
        view, axis = self._as_view(value, self.axes[value], piece)
        dims = static_shape(view) or ()
        row = math.prod(dims[axis + 1 :]) * (value.dtype.bitwidth if value.dtype is not None else 0) // 8
        opset = self.writer.model.graph.opset_imports.get("") or 0
        is_whole = piece.rows == (0, self.height(value))
        if is_whole or self.writer.is_ranged or opset < 11 or row < _INDEX * 8 * (axis + 1):
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
            before, _ = self._as_view(value, self.axes[value], pieces[0])
            self.writer.window("ScatterND", [before, numbers, view], {}, whole)
        self.wholes[value] = [self._piece(value, (0, height), whole)]
