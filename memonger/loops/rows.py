"""A model whose bands run row slice after row slice in a ``Scan``: images of a batch of one, too.

A band in slices of rows (`memonger.tiling.slices`) computes each row once, and keeps what later slices still read,
as line buffers. All slices but a few do the same, only so many rows further down: these are a loop, whose line buffers
are values that it carries from one slice to the next. The slices before it, which fill the buffers and have the padding
above the image, and those behind it, which empty them and have the padding below, stand before and behind it as nodes.
So no row of padding is computed, nothing is masked, and any height will do.

What a slice reads of a value that is there whole, it gathers by row numbers; its results the loop stacks.
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import onnx_ir as ir

from memonger.ir.marks import CHUNK, OVERLAP, STRIP, WINDOW
from memonger.ir.values import inner_graphs, static_shape
from memonger.loops.writer import OLDEST_OPSET, NotInLoopsError, move_constants
from memonger.tiling.axes import IN_BLOCKS, LARGER, WITHIN, row_rules
from memonger.tiling.cutting import Interval, Slicing
from memonger.tiling.slices import Band, Slice, row_band, row_slices
from memonger.tiling.writer import BandWriter, Piece, SliceWriter

Ends = Literal["nodes", "apart", "turns"]
"""Slices before and behind a loop: nodes, loops of one turn, or turns of the loop itself, in branches."""


def with_row_loops(model: ir.Model, bands: Sequence[Band], ends: Ends = "nodes") -> ir.Model:
    """The model with its bands in loops over rows.

    Args:
        model: With static shapes, in the order that the bands' steps count. Not changed.
        bands: Ascending and disjoint, as `row_rules` allows them.
        ends: Where the slices before and behind a loop stand. As bodies nothing that they make stays but lines and
            results, and weights stand in three bodies in place of two.

    Raises:
        NotInLoopsError: no two slices of a band one after the other do the same; or the model's operator set is older
            than `OLDEST_OPSET`, for turns than `SEQUENCES_OPSET`.
    """
    oldest = SEQUENCES_OPSET if ends == "turns" else OLDEST_OPSET
    opset = model.graph.opset_imports.get("") or oldest
    if opset < oldest:
        raise NotInLoopsError(f"loops need operator set {oldest} or newer, and the model has {opset}.")
    copy = model.clone()
    nodes, rules, writer = list(copy.graph), row_rules(copy), SliceWriter(copy, STRIP)
    blocks = _Blocks(writer)
    there, start, gone, results = set(inner_graphs(copy.graph)), 0, list[ir.Node](), list[ir.Value]()
    for number, band in enumerate(bands):
        own = dict(zip(nodes[band.begin : band.end], rules[band.begin : band.end], strict=True))
        tiled = {node: rule for node, rule in own.items() if isinstance(rule, Slicing)}
        writer.order += nodes[start : band.begin] + [node for node in own if node not in tiled]
        start = band.end
        gone += tiled
        in_loop = _BandInLoop(writer, number, tiled, set(), 1, in_blocks=blocks, ends=ends)
        in_loop.write(band, nodes)
        results += [in_loop.results[value] for value in in_loop.exits if _is_in_blocks(value)]
    writer.order += nodes[start:]
    copy.graph.remove(nodes)
    copy.graph.extend(writer.order)
    for node in gone:
        writer.detach(node)
    for value in results:
        blocks.put(value, set(nodes))
    blocks.finish()
    writer.drop_unread()
    bodies = [body for body in inner_graphs(copy.graph) if body not in there]
    for graph in (copy.graph, *bodies):
        for node in graph:
            for mark in (CHUNK, OVERLAP, STRIP, WINDOW):
                node.metadata_props.pop(mark, None)
    move_constants(writer, bodies)
    for graph in (copy.graph, *bodies):
        _early(graph)
    return copy


def _early(graph: ir.Graph) -> None:
    """Put lines that a loop takes or a body gives where onnxruntime's default order has each as soon as it is there.

    It goes back from what nothing reads and from a node's inputs, those that stand last in the file first.
    """
    step_of = {value: step for step, node in enumerate(graph) for value in node.outputs}
    scans: list[ir.Node | None] = [node for node in graph if node.op_type == "Scan"]
    for scan in scans or [None]:
        values = graph.outputs if scan is None else scan.inputs
        made = [v.producer() for v in values if v is not None and all(n is scan for n in v.consumers())]
        cuts = {node for node in made if node is not None and node.op_type in ("Slice", "Concat", "Identity")}
        read = {node: max(step_of.get(v, -1) for v in node.inputs if v is not None) for node in cuts}
        latest = sorted(cuts, key=lambda node: (read[node], str(node.name)), reverse=True)
        graph.remove(latest)
        if scan is None:
            graph.extend(latest)
        else:
            graph.insert_before(scan, latest)


def in_steady_slices(band: Band, nodes: Mapping[ir.Node, Slicing]) -> Band | None:
    """A band that can run in a loop: as it is or with more rows in each slice; None where there are too few.

    Args:
        band: Of so many rows.
        nodes: Of the band that read images.
    """
    for rows in dict.fromkeys(-(-band.rows // unit) * unit for unit in _UNITS):
        taller = row_band(band.begin, band.end, nodes, rows)
        if taller.counts[0] < _SLICES:
            return None
        slices = _slices(nodes, taller.stages[0].slices[1 : _SLICES + 1])
        begin, end = steady(slices)
        tiles = slices[begin].tiles if end - begin >= _ALIKE else ()
        if tiles and all(copy.rows[1] - copy.rows[0] >= _least_rows(node) for node, copy in tiles):
            return taller
    return None


SEQUENCES_OPSET = 13
"""Loops carry sequences, and branches give them, from this operator set on."""

_UNITS = (1, 2, 4, 8, 16, 32)
"""Of so many rows, images that are half, a quarter, ... as high have whole rows."""

_SLICES, _ALIKE = 6, 2
"""A loop needs so many slices, and as many of these one after the other that do the same."""


def _slices(
    nodes: Mapping[ir.Node, Slicing], rows: Sequence[int], early: Sequence[Mapping[ir.Node, int]] = ()
) -> list[Slice]:
    limits = {node: (_unit(node), _least_rows(node)) for node in nodes}

    def until(node: ir.Node, end: int, height: int) -> int:
        """To which row a node gives rows that is asked for those before ``end``: to its last where few are left."""
        unit, least = limits[node]
        end = min(height, -(-end // unit) * unit)
        return height if height - end < least else end

    return [one for one in row_slices(nodes, rows, until, early) if one.tiles]


_AT_ONCE, _MUCH = 2, 2
"""Lines are filled before a loop by slices that do as much as so many of its own, where one would take so much more."""


def _filling(nodes: Mapping[ir.Node, Slicing], slices: Sequence[Slice]) -> list[dict[ir.Node, int]]:
    """Up to which rows nodes are to be computed before the first slice that gives results, step by step.

    That would need many rows of the first nodes at a time: as many as the last ones lag behind.
    """
    begin, end = steady(slices)
    if end - begin < _ALIKE:
        return []
    rows = {node: copy.rows for node, copy in slices[begin].tiles}
    moves = {node: copy.rows[0] - rows[node][0] for node, copy in slices[begin + 1].tiles}
    times = max(rows[node][0] // move for node, move in moves.items())
    if _largest(nodes, slices[0]) < _MUCH * _largest(nodes, slices[begin]):
        return []
    aims = list[dict[ir.Node, int]]()
    for back in reversed(range(_AT_ONCE, times, _AT_ONCE)):
        there = {node: rows[node][0] - back * move for node, move in moves.items()}
        aims.append({node: count for node, count in there.items() if count >= _least_rows(node)})
    return aims


def _largest(nodes: Mapping[ir.Node, Slicing], one: Slice) -> int:
    """The most elements of a value that a slice makes."""
    parts = ((node, math.prod(static_shape(node.outputs[0]) or ()), copy.rows) for node, copy in one.tiles)
    return max(size // nodes[node].height * (rows[1] - rows[0]) for node, size, rows in parts)


Place = tuple[ir.Value | None, object, object]
"""A value, and where it is read, made or kept."""


def steady(slices: Sequence[Slice]) -> tuple[int, int]:
    """The longest run of slices ``[begin, end)`` that do the same, each so many rows of each value further down."""
    finds, does = list[Mapping[Place, Interval]](), list[tuple[Mapping[Place, Interval], object]]()
    done, kept = dict[ir.Value, int](), dict[ir.Value, int]()
    for one in slices:
        finds.append(_kept_rows(kept, done))
        rows, told = dict[Place, Interval](), list[object]()
        for node, copy in one.tiles:
            rows |= {(node.inputs[index], node, index): read for index, read in copy.inputs.items()}
            rows |= {(value, node, "rows"): copy.rows for value in node.outputs}
            rows |= {(value, node, "made"): copy.made for value in node.outputs}
            done |= dict.fromkeys(node.outputs, copy.rows[1])
            settings = sorted((name, str(value)) for name, value in copy.attributes.items())
            told.append((node, settings, sorted(copy.constants.items()), sorted(copy.without), copy.axes and copy.made))
        does.append((rows, told))
        kept = dict(one.kept)
    finds.append(_kept_rows(kept, done))
    lines = [_moved(a, b) for a, b in itertools.pairwise(finds)]
    pairs = itertools.pairwise(zip(does, finds, strict=False))
    tiles = [_moved({**a, **p}, {**b, **q}) if x == y else None for ((a, x), p), ((b, y), q) in pairs]
    best, begin = (0, 0), 0
    while begin < len(slices):
        end = begin
        while end < len(slices) and lines[end] is not None and lines[end] == lines[begin]:
            if end > begin and (tiles[end - 1] is None or tiles[end - 1] != tiles[begin]):
                break
            end += 1
        best = max(best, (begin, end), key=lambda run: run[1] - run[0])
        begin = max(begin + 1, end - 1)
    return best


def _kept_rows(kept: Mapping[ir.Value, int], done: Mapping[ir.Value, int]) -> dict[Place, Interval]:
    """The rows that are kept of what was computed so far."""
    return {(value, None, "kept"): (first, done[value]) for value, first in kept.items() if first < done.get(value, 0)}


def _moved(one: Mapping[Place, Interval], other: Mapping[Place, Interval]) -> dict[ir.Value | None, int] | None:
    """By how many rows of each value the second is further down than the first; None where that isn't all."""
    if one.keys() != other.keys():
        return None
    moves = dict[ir.Value | None, int]()
    for place, (begin, end) in one.items():
        first, last = other[place]
        if first - begin != last - end or moves.setdefault(place[0], first - begin) != first - begin:
            return None
    return moves


MAKES_BLOCKS = IN_BLOCKS | LARGER | {"Conv", "MaxPool", "AveragePool"}
"""Operators that may write channels in blocks."""

BLOCK = 16
"""Channels of a block, at most."""


def _is_in_blocks(value: ir.Value) -> bool:
    """Whether onnxruntime may have a value's channels in blocks."""
    producer = value.producer()
    is_image = len(static_shape(value) or ()) == 4 and value.dtype == ir.DataType.FLOAT
    return is_image and producer is not None and producer.op_type in MAKES_BLOCKS


def _wants_blocks(node: ir.Node, value: ir.Value) -> bool:
    """Whether a node may round otherwise, or takes longer, where a value's channels aren't in blocks.

    Of channels that fill none that is an addition of images.
    """
    if (static_shape(value) or ())[1] % BLOCK == 0:
        return node.op_type in IN_BLOCKS | LARGER
    return node.op_type == "Add" and all(v is not None and _is_in_blocks(v) for v in node.inputs)


@dataclass(slots=True)
class _Blocks:
    """Lets onnxruntime have images in blocks of channels that nothing else has it lay out so.

    Attributes:
        writer: Of the model.
        made: What it wrote.
    """

    writer: SliceWriter
    made: set[ir.Node] = field(default_factory=set)

    def node(self, value: ir.Value, result: ir.Value) -> ir.Node:
        """A node that writes what it reads: a pool of 1 × 1; where channels fill no blocks, a convolution of 1 × 1."""
        channels, writer = (static_shape(value) or ())[1], self.writer
        if channels % BLOCK == 0:
            name = writer.fresh(f"{result.name}/AveragePool")
            made = ir.node("AveragePool", [value], {"kernel_shape": [1, 1]}, outputs=[result], name=name)
        else:
            same = np.eye(channels, dtype=np.float32)[:, :, None, None]
            weight = writer.initializer(f"{result.name}.weight", ir.Tensor(same))
            made = ir.node("Conv", [value, weight], outputs=[result], name=writer.fresh(f"{result.name}/Conv"))
        self.made.add(made)
        return made

    def put(self, value: ir.Value, nodes: Collection[ir.Node]) -> None:
        """Let those of these nodes that work on channels in blocks read a band's result so."""
        users = [use for use in value.uses() if use.node in nodes and _wants_blocks(use.node, value)]
        producer = value.producer()
        if users and producer is not None:
            result = ir.Value(name=self.writer.fresh(f"{value.name}.blocks"), type=value.type, shape=value.shape)
            self.writer.model.graph.insert_after(producer, self.node(value, result))
            for use in users:
                use.node.replace_input_with(use.idx, result)

    def finish(self) -> None:
        """Let additions read first what isn't written here: the first is the convolution that they are added in."""
        for one in self.made:
            own = one.outputs[0]
            for node in (user for user in own.consumers() if user.op_type == "Add" and user.inputs[0] is own):
                other = node.inputs[1]
                if other is not None and other.producer() not in self.made:
                    node.replace_input_with(0, other)
                    node.replace_input_with(1, own)


_NARROW, _DEEP = 64, 128
"""Products of matrices of no more columns onnxruntime sums up in longer steps than these, where sums are longer."""


def _least_rows(node: ir.Node) -> int:
    """Of how few rows a node computes the products that it computes of the whole, in the same steps.

    What runs within the node that makes its input, as an activation, has as many.
    """
    if node.op_type not in ("Conv", "ConvTranspose") or node.inputs[1] is None:
        alone = (v for v in node.inputs if v is not None and len(v.uses()) == 1) if node.op_type in WITHIN else ()
        return max((_least_rows(made) for v in alone if (made := v.producer()) is not None), default=1)
    weight, width = static_shape(node.inputs[1]) or (), (static_shape(node.outputs[0]) or (1,))[-1]
    is_up = node.op_type == "ConvTranspose"
    summed = weight[0] if is_up else math.prod(weight[1:])
    up = (node.attributes.get_ints("strides") or (1,))[0] if is_up else 1
    return up * (1 + _NARROW * up // width) if summed > _DEEP else 1


def _unit(node: ir.Node) -> int:
    """How many rows a node gives at a time.

    An image that is made so many times larger is made by as many rows at a time, and what is computed of it element by
    element gives as many: so nothing is cut off that was made, and it stays in blocks.
    """
    sizes = [_rows_made(node)]
    if node.op_type in WITHIN:
        sizes += [_rows_made(made) for v in node.inputs if v is not None and (made := v.producer()) is not None]
    return max(sizes)


def _rows_made(node: ir.Node) -> int:
    """How many rows a node makes of each row of an image that it makes larger; 1 of others."""
    dims = [static_shape(v) or () for v in (node.inputs[0], node.outputs[0]) if v is not None]
    if node.op_type not in LARGER or [len(each) for each in dims] != [4, 4]:
        return 1
    (*_, before, _), (*_, after, _) = dims
    return after // before if before and after % before == 0 else 1


_Branch = tuple[list[ir.Node], list[ir.Value]]
"""Nodes of a branch, and what they give."""


def _pieces_of(value: ir.Value) -> ir.SequenceType:
    """The type of a sequence of rows of a value."""
    assert value.dtype is not None
    return ir.SequenceType(ir.TensorType(value.dtype))


@dataclass(slots=True, kw_only=True)
class _BandInLoop(BandWriter):
    """A band of which most slices are written once, as the body of a loop; those around them stand around it, or are
    turns of it."""

    in_blocks: _Blocks
    ends: Ends
    pooled: dict[tuple[ir.Value, Interval], ir.Value] = field(default_factory=dict)
    sequences: dict[ir.Value, ir.Value] = field(default_factory=dict)

    def write(self, band: Band, nodes: Sequence[ir.Node]) -> None:
        """Add the loop, copies of the nodes for the slices before and behind it, and what others read."""
        rows = band.stages[0].slices[1:]
        slices = _slices(self.nodes, rows, _filling(self.nodes, _slices(self.nodes, rows)))
        begin, end = steady(slices)
        if end - begin < _ALIKE:
            raise NotInLoopsError(f"no two slices of {band.rows} rows one after the other do the same.")
        if self.ends == "turns":
            self._add_turns(slices[:begin], slices[begin:end], slices[end:])
        else:
            self._add_each(slices[:begin])
            self._add_loop(slices[begin:end], slices[begin - 1].kept if begin else {})
            self._add_each(slices[end:])
        self.join()

    def _add_each(self, slices: Sequence[Slice]) -> None:
        """Write slices one after the other, each as copies of the nodes: where they are to stand apart, in a loop of
        one turn, of which nothing stays but what is read behind it."""
        writer, outside, wholes = self.writer, self.writer.order, self.wholes
        if self.ends == "apart" and slices:
            writer.order, self.wholes = [], {}
        for one in slices:
            self.pooled.clear()
            self.add(one)
        if outside is writer.order:
            return
        ends = [(v, (first, made[-1].rows[1])) for v, first in slices[-1].kept.items() if (made := self.pieces.get(v))]
        lines = [(v, Piece(rows, self.read(v, self.axes[v], rows))) for v, rows in ends if rows[0] < rows[1]]
        results = [(value, piece) for value, pieces in self.wholes.items() for piece in pieces]
        self.reads.clear()
        self.pieces, given, outputs = {}, list[ir.Value](), list[ir.Value]()
        for _, piece in (*lines, *results):
            assert piece.value is not None
            self._add_end(piece.value, (), given)
            shape = ir.Shape([1, *(static_shape(piece.value) or ())])
            outputs.append(ir.Value(name=writer.fresh(f"{piece.value.name}.once"), type=piece.value.type, shape=shape))
        number, of_all = self._numbers(range(1), 1, 1)
        body = ir.Graph([number], given, nodes=writer.order, name=writer.fresh("rows.body"))
        attributes = [ir.AttrGraph("body", body), ir.AttrInt64("num_scan_inputs", 1)]
        name = writer.fresh(f"rows.{slices[0].tiles[0][0].name}.once")
        writer.order, self.wholes = outside, wholes
        writer.order.append(ir.Node("", "Scan", [of_all], attributes, outputs=outputs, name=name))
        for place, ((value, piece), output) in enumerate(zip((*lines, *results), outputs, strict=True)):
            (begin, end), there = piece.rows, self.pieces if place < len(lines) else self.wholes
            view = self._like(value, piece.rows, f"{value.name}.chunk{begin}_{end}")
            writer.window("Reshape", [output, writer.integers(static_shape(view) or ())], {}, view)
            there.setdefault(value, []).append(Piece(piece.rows, view))

    def _add_turns(self, first: Sequence[Slice], steady: Sequence[Slice], last: Sequence[Slice]) -> None:
        """Write all slices as turns of a ``Loop``: the first, each that does the same, the last.

        It begins without lines, hands them from turn to turn as they are, and ends without any. Results it puts into
        sequences, which are joined behind it.
        """
        writer, outside, before = self.writer, self.writer.order, min(1, len(first))
        turns = before + len(steady) + min(1, len(last))
        turn, is_on, goes_on = [
            ir.Value(name=writer.fresh(f"rows.{name}"), type=ir.TensorType(dtype), shape=ir.Shape([]))
            for name, dtype in (("turn", ir.DataType.INT64), ("is_on", ir.DataType.BOOL), ("goes_on", ir.DataType.BOOL))
        ]
        given = [ir.Value(name=writer.fresh(f"{value.name}.pieces"), type=_pieces_of(value)) for value in self.exits]
        lines, begins, branches = dict[ir.Value, Interval](), list[ir.Value](), dict[int, _Branch]()
        for at, part in ((0, first), (before, steady), (turns - 1, last)):
            if not part:
                continue
            writer.order, self.sequences = [], {} if part is first else dict(zip(self.exits, given, strict=True))
            self.reads.clear()
            self.pieces = {v: [Piece(rows, line)] for (v, rows), line in zip(lines.items(), begins, strict=True)}
            ends = list[ir.Value]()
            if part is steady:
                for own, of_all in self._cut_in_loop(part, before).items():
                    name = writer.fresh(f"{own.name}/Gather")
                    writer.order.insert(0, ir.node("Gather", [of_all, turn], {"axis": 0}, outputs=[own], name=name))
            self._add_each(part[:1] if part is steady else part)
            if part is first:
                there = {v: (row, made[-1].rows[1]) for v, row in part[-1].kept.items() if (made := self.pieces.get(v))}
                lines = {value: rows for value, rows in there.items() if rows[0] < rows[1]}
                begins = [self._like(value, rows, f"{value.name}.line") for value, rows in lines.items()]
            for (value, rows), line in zip(lines.items(), begins, strict=True):
                if part is last:
                    ends.append(self._like(value, (0, 0), f"{value.name}.none"))
                    writer.slice(line, self.axes[value], 0, 0, ends[-1])
                    continue
                if part is steady:
                    done = rows[1]
                    rows = part[0].kept[value], self.pieces[value][-1].rows[1]
                    lines[value] = part[-1].kept[value], done + (rows[1] - done) * len(part)
                self._add_end(self.read(value, self.axes[value], rows), begins, ends)
            for value, pieces in zip(self.exits, given, strict=True):
                if self.sequences.get(value) is pieces:
                    raise NotInLoopsError(f"a slice gives no rows of '{value.name}'.")
                ends.append(self.sequences[value] if value in self.sequences else self._empty(value))
            branches[at] = writer.order, ends
        self.reads.clear()
        self.pooled.clear()
        chosen, ends = branches.pop(before)
        for at in sorted(branches, reverse=True):
            chosen, ends = self._branched(turn, at, branches[at], (chosen, ends))
        writer.order, rows = outside, (0, 0)
        chosen.append(ir.node("Identity", [is_on], outputs=[goes_on], name=writer.fresh(f"{goes_on.name}/Identity")))
        body = ir.Graph([turn, is_on, *begins, *given], [goes_on, *ends], nodes=chosen, name=writer.fresh("rows.body"))
        numbers = {"turns": np.array(turns, np.int64), "on": np.array(True)}
        inputs = [writer.initializer(f"rows.{name}", ir.Tensor(array)) for name, array in numbers.items()]
        outputs = list[ir.Value]()
        for value, rows in lines.items():
            assert value.dtype is not None
            dims = static_shape(self._like(value, (0, 0), "")) or ()
            none = ir.Tensor(np.zeros(dims, value.dtype.numpy()), dtype=value.dtype)
            inputs.append(writer.initializer(f"{value.name}.none", none))
            outputs.append(self._like(value, (0, 0) if last else rows, f"{value.name}.line"))
        for value in self.exits:
            inputs.append(self._empty(value))
            outputs.append(ir.Value(name=writer.fresh(f"{value.name}.pieces"), type=_pieces_of(value)))
        name = writer.fresh(f"rows.{next(iter(self.nodes)).name}")
        writer.order.append(ir.node("Loop", inputs, {"body": body}, outputs=outputs, name=name))
        for value, pieces in zip(self.exits, outputs[len(lines) :], strict=True):
            rows = 0, self.height(value)
            joined = self._like(value, rows, f"{value.name}.chunk0_{rows[1]}")
            writer.window("ConcatFromSequence", [pieces], {"axis": self.axes[value]}, joined)
            self.wholes[value] = [Piece(rows, joined)]

    def _empty(self, value: ir.Value) -> ir.Value:
        """A sequence without any rows of a result."""
        assert value.dtype is not None
        result = ir.Value(name=self.writer.fresh(f"{value.name}.pieces"), type=_pieces_of(value))
        self.writer.window("SequenceEmpty", [], {"dtype": value.dtype.value}, result)
        return result

    def _branched(self, turn: ir.Value, at: int, then: _Branch, other: _Branch) -> _Branch:
        """What gives one in a turn, and the other in all others."""
        writer = self.writer
        is_turn = ir.Value(name=writer.fresh("rows.is_turn"), type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
        number = writer.initializer(f"rows.turn{at}", ir.Tensor(np.array(at, np.int64)))
        equal = ir.node("Equal", [turn, number], outputs=[is_turn], name=writer.fresh(f"{is_turn.name}/Equal"))
        graphs = [ir.Graph([], ends, nodes=nodes, name=writer.fresh("rows.branch")) for nodes, ends in (then, other)]
        attributes = {"then_branch": graphs[0], "else_branch": graphs[1]}
        ends = [ir.Value(name=writer.fresh(str(value.name)), type=value.type) for value in then[1]]
        name = writer.fresh(f"{is_turn.name}/If")
        return [equal, ir.node("If", [is_turn], attributes, outputs=ends, name=name)], ends

    def join(self) -> None:
        """Put together what others read: views of slices, of which onnxruntime's default order has the last first."""
        for value in self.exits:
            pieces = self.wholes[value] if len(self.wholes[value]) > 1 else []
            for number, piece in reversed(list(enumerate(pieces))):
                assert piece.value is not None
                view = self._like(value, piece.rows, f"{piece.value.name}.view")
                dims = static_shape(view) or ()
                self.writer.window("Reshape", [piece.value, self.writer.integers(dims)], {}, view)
                pieces[number] = Piece(piece.rows, view)
        BandWriter.join(self)

    def collect(self, value: ir.Value, piece: Piece) -> None:
        """Keep a slice of what others read: where others are kept in a sequence, behind these.

        The node stands where the slice is there. So onnxruntime's default order has the last slice of a branch first,
        and all that this reads before it, node by node: no image waits until the next slice reads its last rows.
        """
        if self.ends == "turns":
            before = self.sequences[value] if value in self.sequences else self._empty(value)
            self.sequences[value] = ir.Value(name=self.writer.fresh(f"{value.name}.pieces"), type=before.type)
            assert piece.value is not None
            self.writer.window("SequenceInsert", [before, piece.value], {}, self.sequences[value])
            return
        self.wholes.setdefault(value, []).append(piece)

    def operand(self, node: ir.Node, value: ir.Value, axis: int, rows: Interval) -> ir.Value:
        """Some rows of an image; those that were kept in blocks of channels where onnxruntime has the whole so.

        It adds to the result of a convolution within that only what lies in blocks, which rounds otherwise than
        behind it. A pool of 1 × 1 writes blocks, and what it read.
        """
        read = self.read(value, axis, rows)
        made = read.producer()
        if not _is_in_blocks(value) or not _wants_blocks(node, value):
            return read
        if made is not None and "." in made.metadata_props.get(STRIP, ""):
            return read
        if (value, rows) not in self.pooled:
            result = self._like(value, rows, f"{value.name}.blocks")
            self.writer.order.append(self.in_blocks.node(read, result))
            self.pooled[value, rows] = result
        return self.pooled[value, rows]

    def _add_loop(self, slices: Sequence[Slice], kept: Mapping[ir.Value, int]) -> None:
        """Write the first of these slices as a body, and the loop that runs it for all of them."""
        writer, one, count = self.writer, slices[0], len(slices)
        there = {v: (first, pieces[-1].rows[1]) for v, first in kept.items() if (pieces := self.pieces.get(v))}
        lines = {value: rows for value, rows in there.items() if rows[0] < rows[1]}
        inputs, outputs = [self.read(value, self.axes[value], rows) for value, rows in lines.items()], list[ir.Value]()
        begins = [self._like(value, rows, f"{value.name}.line") for value, rows in lines.items()]
        self.pieces = {v: [Piece(rows, begin)] for (v, rows), begin in zip(lines.items(), begins, strict=True)}
        self.reads.clear()
        self.pooled.clear()
        outside, writer.order, wholes, self.wholes = writer.order, [], self.wholes, {}
        numbers = self._cut_in_loop(slices)
        if not numbers:  # a Scan has to read something slice by slice: how many there are shows there
            numbers.update([self._numbers(range(1), 1, count)])
        self.add(one)
        ends = list[ir.Value]()
        for value, (_, done) in lines.items():
            rows = one.kept[value], self.pieces[value][-1].rows[1]
            self._add_end(self.read(value, self.axes[value], rows), begins, ends)
            rows = slices[-1].kept[value], done + (rows[1] - done) * count
            outputs.append(self._like(value, rows, f"{value.name}.line"))
            self.pieces[value] = [Piece(rows, outputs[-1])]
        self.reads.clear()
        self.pooled.clear()
        last, axes, behind = {v: copy.rows for node, copy in slices[-1].tiles for v in node.outputs}, list[int](), []
        for value, (piece,) in self.wholes.items():
            assert piece.value is not None
            rows, axis, dims = (piece.rows[0], last[value][1]), self.axes[value], list(static_shape(piece.value) or ())
            ends.append(self._flat(piece.value, dims, axis))
            stacked = ir.Shape([math.prod(dims[:axis]), count, math.prod(dims[axis:])])
            outputs.append(ir.Value(name=writer.fresh(f"{value.name}.slices"), type=value.type, shape=stacked))
            axes.append(1)
            behind.append((value, rows, outputs[-1]))
        body = ir.Graph([*begins, *numbers], ends, nodes=writer.order, name=writer.fresh("rows.body"))
        attributes = [ir.AttrGraph("body", body), ir.AttrInt64("num_scan_inputs", len(numbers))]
        attributes += [ir.AttrInt64s("scan_output_axes", axes)] if axes else []
        name = writer.fresh(f"rows.{one.tiles[0][0].name}")
        writer.order, self.wholes = outside, wholes
        writer.order.append(ir.Node("", "Scan", [*inputs, *numbers.values()], attributes, outputs=outputs, name=name))
        for value, rows, stacked_value in behind:
            joined = self._like(value, rows, f"{value.name}.chunk{rows[0]}_{rows[1]}")
            writer.window("Reshape", [stacked_value, writer.integers(static_shape(joined) or ())], {}, joined)
            self.wholes.setdefault(value, []).append(Piece(rows, joined))

    def _like(self, value: ir.Value, rows: Interval, name: str) -> ir.Value:
        return self.writer.value(value, self.axes[value], rows[1] - rows[0], name)

    def _flat(self, value: ir.Value, dims: Sequence[int], axis: int) -> ir.Value:
        """A result as a body gives it: a view that stands before all lines in the file, so that these are cut first."""
        shape = [math.prod(dims[:axis]), math.prod(dims[axis:])]
        flat = ir.Value(name=self.writer.fresh(f"{value.name}.flat"), type=value.type, shape=ir.Shape(shape))
        self.writer.window("Reshape", [value, self.writer.integers(shape)], {}, flat)
        return flat

    def _add_end(self, value: ir.Value, begins: Sequence[ir.Value], ends: list[ir.Value]) -> None:
        """Add what a body gives: none of what it takes, and none twice."""
        if value in begins or value in ends:
            copy = ir.Value(name=self.writer.fresh(str(value.name)), type=value.type, shape=value.shape)
            self.writer.window("Identity", [value], {}, copy)
            value = copy
        ends.append(value)

    def _cut_in_loop(self, slices: Sequence[Slice], before: int = 0) -> dict[ir.Value, ir.Value]:
        """Gather what a slice reads of values that are there whole: of row numbers those of all slices.

        Args:
            slices: Those that do the same.
            before: Turns of the loop before them.
        """
        one, numbers, known = slices[0], dict[ir.Value, ir.Value](), dict[tuple[Interval, int], ir.Value]()
        written = {value for node in self.nodes for value in node.outputs}
        for value, intervals in one.reads.items():
            for rows, then in zip(intervals, slices[1].reads[value], strict=True) if value not in written else ():
                begin, end = rows
                if rows == (0, self.height(value)):
                    self.cuts[value, self.axes[value], rows] = Piece(rows, value)
                    continue
                key = rows, then[0] - begin
                if key not in known:
                    first = range(begin - before * key[1], end - before * key[1])
                    known[key], whole = self._numbers(first, key[1], before + len(slices))
                    numbers[known[key]] = whole
                part = self._like(value, rows, f"{value.name}.rows")
                self.writer.window("Gather", [value, known[key]], {"axis": self.axes[value]}, part)
                self.cuts[value, self.axes[value], rows] = Piece(rows, part)
        return numbers

    def _numbers(self, first: range, step: int, count: int) -> tuple[ir.Value, ir.Value]:
        """Numbers of rows that a body takes, and those of all slices: each so many more than of the one before."""
        of_all = np.arange(first.start, first.stop) + np.arange(count)[:, None] * step
        whole = self.writer.initializer(f"rows.{first.start}_{first.stop}_{step}", ir.Tensor(of_all.astype(np.int64)))
        name = self.writer.fresh(f"{whole.name}.slice")
        return ir.Value(name=name, type=whole.type, shape=ir.Shape([len(first)])), whole
