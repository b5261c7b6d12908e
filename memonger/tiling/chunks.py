"""Chunks: a stretch of a model run on one slice of an axis after the other, so that only slices of its values exist.

A *slice* is some elements ``[begin, end)`` of an axis; a *stage* is consecutive nodes with one list of slices; a
*chunk* is a stage's nodes on one slice; a *band* is consecutive stages, whose values are cut along axes that belong
together: the batch, or the rows. Chunks are written in the order in which they are needed: before a chunk, those of the
stage before that overlap it. Between stages, fine or coarse, values exist in slices only. What is read outside is
joined.

The result is a plain model that any runtime runs; its order of nodes is the schedule.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import onnx_ir as ir

from memonger.errors import PlanError
from memonger.ir.marks import AGAIN, CHUNK, Chunk, chunk_of
from memonger.ir.values import all_values, read_values, static_shape
from memonger.tiling.axes import slicing
from memonger.tiling.chunk_writer import SliceWriter, told_shape
from memonger.tiling.cutting import Refusal, Slicing


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
    def size(self) -> int:
        """Elements of the axis."""
        return self.stages[-1].slices[-1]


def chunked(model: ir.Model, bands: Sequence[Band], is_ranged: bool = False) -> ir.Model:
    """A model in which the nodes of each band run on slices, one chunk after the other.

    Inputs, outputs, weights and metadata are the model's. A copy of a node, and what it writes, is named
    ``<name>.chunk<begin>_<end>``; in its metadata `marks.CHUNK` is ``<band>.<stage>.<begin>.<end>``. The Slice and
    Concat nodes that are added have `marks.WINDOW`: they stand before the chunk that reads them, or behind the band. A
    joined value keeps its name. Constants are sliced here. Nodes of a band that don't depend on what is cut run once,
    before its first chunk; a stage of one slice isn't copied.

    Args:
        model: A lowered model: all nodes named, every value with a static shape. Not changed.
        bands: In the model's order, disjoint.
        is_ranged: Whether axes may be shorter than they are. A slice then has those of its elements that there are: a
            Slice's bounds end with its axis. Of what the model's nodes compute for it, no shape is told.

    Raises:
        PlanError: bands or stages that aren't consecutive, bounds that don't ascend, a node that can't be cut, or that
            needs whole what its own band computes: the message names them.
    """
    copy = model.clone()
    nodes = list(copy.graph)
    _check_bands(bands, len(nodes))
    writer = SliceWriter(copy, is_ranged=is_ranged)
    _check_names(bands, {str(v.name) for v in all_values(copy.graph)})
    start = 0
    first = 1 + max((chunk.band for node in nodes if (chunk := chunk_of(node)) is not None), default=-1)
    for number, band in enumerate(bands):
        writer.order += nodes[start : band.stages[0].begin]
        start = band.stages[-1].end
        _write_band(writer, first + number, band, nodes)
    writer.order += nodes[start:]
    copy.graph.remove(list(copy.graph))
    copy.graph.extend(writer.order)
    writer.drop_unread()
    return copy


@dataclass(slots=True)
class _Walk:
    """Through the nodes of a band: which are copied.

    Attributes:
        answers: How each node that is copied is cut; the others run once, before the first chunk.
        made: What is written in slices, and the node that writes it.
    """

    answers: dict[ir.Node, Slicing] = field(default_factory=dict)
    made: dict[ir.Value, ir.Node] = field(default_factory=dict)

    def add(self, node: ir.Node, answer: Slicing | Refusal | None) -> None:
        """Take the next node.

        Raises:
            PlanError: it can't be part of the band; nothing has changed then.
        """
        if isinstance(answer, Slicing):
            for index in sorted(answer.whole):
                value = node.inputs[index]
                if value is not None and value in self.made:
                    self._run_once(value, node, answer)
            self.answers[node] = answer
            self.made.update((node.outputs[index], node) for index in (*answer.outputs, *answer.sums))
            return
        read = next((v for v in read_values(node) if v in self.made), None)
        if read is not None and answer is not None:
            raise PlanError(f"{answer}.")
        if read is not None:
            raise PlanError(f"node '{node.name}' ({node.op_type}) reads '{read.name}', which exists in slices only.")

    def _run_once(self, value: ir.Value, reader: ir.Node, answer: Slicing) -> None:
        """Compute whole what a node needs whole, with all of the band that it takes, if nobody reads slices of that."""
        chain, pending = {}, [self.made[value]]
        while pending:
            node = pending.pop()
            if node not in chain:
                chain[node] = self.answers[node]
                pending += [self.made[v] for v in read_values(node) if v in self.made]
        others = {n: a for n, a in self.answers.items() if n not in chain} | {reader: answer}
        for written in (v for v in self.made if self.made[v] in chain):
            for other in written.consumers():
                if other in others and any(other.inputs[index] is written for index in others[other].inputs):
                    raise PlanError(
                        f"node '{reader.name}' ({reader.op_type}) needs '{value.name}' whole, and the same band "
                        f"computes it from slices of '{written.name}': end the band before this node."
                    )
        for node in chain:
            del self.answers[node]
        self.made = {v: node for v, node in self.made.items() if node not in chain}


def _check_bands(bands: Sequence[Band], count: int) -> None:
    reached = 0
    for number, band in enumerate(bands):
        if not band.stages:
            raise PlanError(f"band {number} has no stages.")
        for place, stage in enumerate(band.stages):
            where = f"stage {place} of band {number}"
            if place and stage.begin != reached:
                raise PlanError(f"{where} begins at node {stage.begin}, and the stage before ends at {reached}.")
            if stage.begin < reached:
                raise PlanError(f"{where} begins at node {stage.begin}, and the band before ends at {reached}.")
            if not stage.begin < stage.end <= count:
                raise PlanError(f"{where} is nodes {stage.begin} to {stage.end}, of a model with {count}.")
            _check_bounds(where, stage.slices, band.size if band.stages[-1].slices else 0)
            reached = stage.end


def _check_names(bands: Sequence[Band], names: Collection[str]) -> None:
    for number, band in enumerate(bands):
        unknown = next((name for name in band.axes if name not in names), None)
        if unknown is not None:
            raise PlanError(f"band {number} cuts '{unknown}', and the model has no such value.")


def _check_bounds(where: str, bounds: tuple[int, ...], size: int) -> None:
    if len(bounds) < 2 or bounds[0] != 0 or any(a >= b for a, b in pairwise(bounds)):
        raise PlanError(f"the bounds of the slices of {where} must ascend from 0, and are {list(bounds)}.")
    if bounds[-1] != size:
        raise PlanError(f"the slices of {where} end at {bounds[-1]}, and those of the band's last stage at {size}.")


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


@dataclass(slots=True)
class _BandWriter:
    """A band that is written.

    Attributes:
        stage_of: The stage of each value that the band writes in slices.
        axis_of: The axis of each value that is cut.
        pieces: What was written: (value, axis, begin, end) → slice.
        sums: What is summed up → the sum so far.
    """

    writer: SliceWriter
    number: int
    band: Band
    stage_of: dict[ir.Value, int] = field(default_factory=dict)
    axis_of: dict[ir.Value, int] = field(default_factory=dict)
    pieces: dict[tuple[ir.Value, int, int, int], ir.Value] = field(default_factory=dict)
    sums: dict[ir.Value, ir.Value] = field(default_factory=dict)

    def scale(self, value: ir.Value, axis: int) -> int:
        """Elements of the value for each of the band's axis."""
        dims = static_shape(value)
        if dims is None or not 0 <= axis < len(dims) or dims[axis] % self.band.size:
            shape = "unknown" if dims is None else list(dims)
            raise PlanError(
                f"band {self.number} cuts '{value.name}' along axis {axis} into {self.band.size} parts at most, "
                f"and its shape is {shape}."
            )
        return dims[axis] // self.band.size

    def read(self, value: ir.Value, axis: int, begin: int, end: int) -> ir.Value:
        """A slice of a value; what it takes is added once."""
        if begin == 0 and end == self.band.size and value not in self.stage_of:
            return value
        key = (value, axis, begin, end)
        piece = self.pieces.get(key)
        if piece is None:
            piece = self._part_of_whole(*key) if value not in self.stage_of else self._from_pieces(*key)
            self.pieces[key] = piece
        return piece

    def _part_of_whole(self, value: ir.Value, axis: int, begin: int, end: int) -> ir.Value:
        unit = self.scale(value, axis)
        name = _chunk_name(value.name, begin, end)
        if value.const_value is not None and not value.is_graph_input():
            return self.writer.part(value, axis, begin * unit, end * unit, name)
        made = self.writer.value(value, axis, (end - begin) * unit, name)
        self.writer.slice(value, axis, begin * unit, end * unit, made)
        return made

    def _from_pieces(self, value: ir.Value, axis: int, begin: int, end: int) -> ir.Value:
        unit, parts = self.scale(value, axis), []
        for low, high in pairwise(self.band.stages[self.stage_of[value]].slices):
            first, last = max(low, begin), min(high, end)
            if first >= last:
                continue
            part = self.pieces.get((value, axis, first, last))
            if part is None:
                part = self.writer.value(value, axis, (last - first) * unit, _chunk_name(value.name, first, last))
                source = self.pieces[value, axis, low, high]
                self.writer.slice(source, axis, (first - low) * unit, (last - low) * unit, part)
                self.pieces[value, axis, first, last] = part
            parts.append(part)
        if len(parts) == 1:
            return parts[0]
        made = self.writer.value(value, axis, (end - begin) * unit, _chunk_name(value.name, begin, end))
        self.writer.window("Concat", parts, {"axis": axis}, made)
        return made

    def join(self, value: ir.Value) -> None:
        """Put all slices of a value together under its name, for those that read it outside the band."""
        self.replace(value, self.read(value, self.axis_of[value], 0, self.band.size))

    @staticmethod
    def replace(value: ir.Value, whole: ir.Value) -> None:
        """Let what the band wrote stand for a value, under its name."""
        if whole is value:
            return
        value.name, whole.name = None, value.name
        ir.convenience.replace_all_uses_with(value, whole, replace_graph_outputs=True)


def _chunk_name(name: str | None, begin: int, end: int) -> str:
    return f"{name}.chunk{begin}_{end}"


def _write_band(writer: SliceWriter, number: int, band: Band, nodes: list[ir.Node]) -> None:
    state = _BandWriter(writer, number, band)
    steps = nodes[band.stages[0].begin : band.stages[-1].end]
    answers = _answers(state, steps)
    stages = [[(n, answers[n]) for n in nodes[stage.begin : stage.end] if n in answers] for stage in band.stages]
    for place, chosen in enumerate(stages):
        state.stage_of.update((node.outputs[index], place) for node, answer in chosen for index in answer.outputs)
    writer.order += [node for node in steps if node not in answers]
    start = len(writer.order)
    exits = [v for v in state.stage_of if v.is_graph_output() or any(n not in answers for n in v.consumers())]
    for stage, begin, end in emission(band.stages):
        _ChunkWriter(state, stage, begin, end).write(stages[stage])
    for value in exits:
        state.join(value)
    for value, whole in state.sums.items():
        state.replace(value, whole)
    writer.order[start:start] = writer.early
    writer.early.clear()
    kept = set(writer.order)
    for node in answers:
        if node not in kept:
            writer.detach(node)


def _answers(state: _BandWriter, nodes: list[ir.Node]) -> Mapping[ir.Node, Slicing]:
    """The nodes of a band that are copied, and how they are cut."""
    walk, given = _Walk(), state.band.axes
    for node in nodes:
        for value in (v for v in node.inputs if v is not None and str(v.name) in given and v not in state.axis_of):
            state.axis_of[value] = given[str(value.name)]
            state.scale(value, state.axis_of[value])
        axes = {i: state.axis_of[v] for i, v in enumerate(node.inputs) if v is not None and v in state.axis_of}
        answer = slicing(node, axes, state.band.size, state.band.sums) if axes else None
        walk.add(node, answer)
        for index, axis in answer.outputs.items() if isinstance(answer, Slicing) else ():
            value = node.outputs[index]
            asked = given.get(str(value.name), axis)
            if asked != axis:
                raise PlanError(
                    f"band {state.number} cuts '{value.name}' along axis {asked}, and node "
                    f"'{node.name}' ({node.op_type}) gives slices of axis {axis}."
                )
            state.axis_of[value] = axis
    if not walk.answers:
        raise PlanError(f"no node of band {state.number} reads a value that is cut.")
    return walk.answers


@dataclass(frozen=True, slots=True)
class _ChunkWriter:
    """A stage's nodes on the slice ``[begin, end)``."""

    band: _BandWriter
    stage: int
    begin: int
    end: int

    def write(self, nodes: Sequence[tuple[ir.Node, Slicing]]) -> None:
        """Add the copies of the nodes, after all that they read of other stages; of the whole, the nodes themselves."""
        written = []
        for node, answer in nodes:
            inputs = list(node.inputs)
            for index, axis in answer.inputs.items():
                value = inputs[index]
                assert value is not None
                inputs[index] = self.band.read(value, axis, self.begin, self.end)
            if (self.begin, self.end) == (0, self.band.band.size):
                for index, value in enumerate(inputs):
                    node.replace_input_with(index, value)
                written.append(node)
            else:
                written.append(self._copy(node, self._added_to(node, inputs, answer), answer))
            for index, axis in answer.outputs.items():
                self.band.pieces[node.outputs[index], axis, self.begin, self.end] = written[-1].outputs[index]
            self.band.sums.update((node.outputs[index], written[-1].outputs[index]) for index in answer.sums)
        self.band.writer.order += written

    def _added_to(self, node: ir.Node, inputs: list[ir.Value | None], answer: Slicing) -> list[ir.Value | None]:
        """The inputs of a copy: a Gemm adds its product to the sum of those before it."""
        added = [self.band.sums[node.outputs[index]] for index in answer.sums if self.begin]
        return [*inputs[:2], *added] if added else inputs

    def _copy(self, node: ir.Node, inputs: list[ir.Value | None], answer: Slicing) -> ir.Node:
        writer, outputs = self.band.writer, []
        for index, value in enumerate(node.outputs):
            if not value.name:
                outputs.append(ir.Value(name=""))
                continue
            name = _chunk_name(value.name, self.begin, self.end)
            if index in answer.sums:
                outputs.append(ir.Value(name=writer.fresh(name), type=value.type, shape=value.shape))
                continue
            axis = answer.outputs[index]
            length = (self.end - self.begin) * self.band.scale(value, axis)
            outputs.append(writer.value(value, axis, length, name))
        inputs, kind = told_shape(writer, node, inputs, static_shape(outputs[0]) or (), answer.outputs.get(0))
        marks = {**node.metadata_props, CHUNK: Chunk(self.band.number, self.stage, self.begin, self.end).mark}
        if AGAIN in marks:
            marks[AGAIN] = _chunk_name(marks[AGAIN], self.begin, self.end)
        return ir.Node(
            node.domain,
            kind,
            inputs,
            [a for a in node.attributes.values() if not (answer.sums and self.begin and a.name == "beta")],
            overload=node.overload,
            outputs=outputs,
            version=node.version,
            name=writer.fresh(_chunk_name(node.name, self.begin, self.end)),
            doc_string=node.doc_string,
            metadata_props=marks,
        )
