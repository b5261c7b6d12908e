"""Strips: a band of a model, run for some rows of its results after the other, with what these rows need.

A *strip* is some rows of an image. Convolutions read rows around those that they write, so that neighbouring strips
overlap, and what lies in both is computed twice. In exchange just a strip of large images exists at a time, at batch 1,
too. Each strip is computed from the beginning of the band to its end, as MCUNetV2 does by patches with the first
layers of a network (Lin et al. 2021, arXiv:2110.15352).

In onnxruntime's blocked layout (channels in blocks of 8 or 16, innermost) rows are cut and joined in a view of the same
bytes: ``[batch * channels / block, height, width * block]``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from memonger.ir.marks import STRIP
from memonger.ir.values import static_shape
from memonger.plan_file import ROWS
from memonger.tiling.chunk_writer import SliceWriter, told_shape
from memonger.tiling.cutting import Refusal
from memonger.tiling.image_rows import BLOCKED, Interval, RowRule, is_image, rows_of


@dataclass(frozen=True, slots=True)
class ImageBand:
    """Consecutive nodes that can run in strips, and those between them that depend on no image.

    Attributes:
        begin: The first.
        end: Behind the last.
        images: For each of them those of its inputs that are images; none: it runs once, before the strips.
    """

    begin: int
    end: int
    images: tuple[frozenset[int], ...]

    def exits(self, model: ir.Model) -> list[ir.Value]:
        """What they compute of images for others, in order."""
        own = dict(zip(list(model.graph)[self.begin : self.end], self.images, strict=True))
        made = (v for node, images in own.items() if images for v in node.outputs)
        return [v for v in made if v.is_graph_output() or any(node not in own for node in v.consumers())]


def images_read(model: ir.Model) -> list[frozenset[int] | Refusal]:
    """For each node of a model the inputs that are images, or why it can't run in strips of them."""
    answers: list[frozenset[int] | Refusal] = []
    for node in model.graph:
        read = frozenset(index for index, value in enumerate(node.inputs) if is_image(value))
        answer: RowRule | Refusal | None = None
        if STRIP in node.metadata_props:
            answer = Refusal(f"node '{node.name}' is of a strip already")
        elif read:
            shape = static_shape(node.outputs[0]) or ()
            answer = rows_of(node, read, (0, shape[ROWS] if len(shape) > ROWS else 1))
        answers.append(answer if isinstance(answer, Refusal) else read)
    return answers


def in_strips(model: ir.Model, band: ImageBand, count: int, block: int) -> ir.Model:
    """The model with a copy of the band for each strip.

    Copies, and what they write, are named ``<name>.chunk<begin>_<end>`` by their rows; all nodes that are added have
    `marks.STRIP`. Constants and outputs are the model's.

    Args:
        model: A lowered model, in the order in which it runs. Not changed.
        band: As `images_read` allows it.
        count: Strips. What the band computes for others has as many rows at least.
        block: Channels of a block in onnxruntime's blocked layout.
    """
    copy = model.clone()
    nodes = list(copy.graph)
    exits, writer = band.exits(copy), SliceWriter(copy, STRIP)
    images = dict(zip(nodes[band.begin : band.end], band.images, strict=True))
    writer.order += nodes[: band.begin] + [node for node, read in images.items() if not read]
    blocked, parts = _blocked(nodes[: band.end]), {value: list[ir.Value]() for value in exits}
    for number in range(count):
        strip = _Strip(writer, images, blocked, block)
        asked = {value: _share(value, number, count) for value in exits}
        strip.write(asked)
        for value, rows in asked.items():
            parts[value].append(strip.rows(value, rows))
    for value, pieces in parts.items():
        _join(_Strip(writer, images, blocked, block), value, pieces)
    writer.order += nodes[band.end :]
    copy.graph.remove(nodes)
    copy.graph.extend(writer.order)
    for node in (node for node, read in images.items() if read):
        writer.detach(node)
    writer.drop_unread()
    return copy


def _share(value: ir.Value, number: int, count: int) -> Interval:
    height = _dims(value)[ROWS]
    return height * number // count, height * (number + 1) // count


def _dims(value: ir.Value) -> tuple[int, ...]:
    return static_shape(value) or ()


def _blocked(nodes: Sequence[ir.Node]) -> set[ir.Value]:
    """The values in the blocked layout: what its operators write, and what others write of it."""
    images: set[ir.Value] = set()
    for node in nodes:
        is_view = STRIP in node.metadata_props and node.op_type == "Reshape" and is_image(node.outputs[0])
        is_made = is_view or (node.domain == BLOCKED and node.op_type != "ReorderOutput")
        if is_made or (node.domain != BLOCKED and any(v in images and is_image(v) for v in node.inputs)):
            images.update(v for v in node.outputs if is_image(v))
    return images


@dataclass(slots=True)
class _Strip:
    """One strip that is written.

    Attributes:
        images: The nodes of the band, and those of their inputs that are images.
        blocked: Values in the blocked layout.
        pieces: Of each value what exists of it, and which rows that is.
        cut: Slices of these.
    """

    writer: SliceWriter
    images: dict[ir.Node, frozenset[int]]
    blocked: set[ir.Value]
    block: int
    pieces: dict[ir.Value, tuple[ir.Value, Interval]] = field(default_factory=dict)
    cut: dict[tuple[ir.Value, Interval], ir.Value] = field(default_factory=dict)

    def write(self, asked: dict[ir.Value, Interval]) -> None:
        """Add copies of the nodes that these rows need, each for all the rows that are needed of it."""
        needed, chosen = dict(asked), list[tuple[ir.Node, RowRule]]()
        for node in reversed([node for node, read in self.images.items() if read]):
            wanted = [needed[value] for value in node.outputs if value in needed]
            if not wanted:
                continue
            how = rows_of(node, self.images[node], _hull(wanted))
            assert isinstance(how, RowRule), how
            chosen.append((node, how))
            for index, rows in how.inputs.items():
                value = node.inputs[index]
                assert value is not None
                needed[value] = _hull([rows, needed.get(value, rows)])
        for node, how in reversed(chosen):
            self._copy(node, how)

    def rows(self, value: ir.Value, rows: Interval) -> ir.Value:
        """Some rows of an image: what is there, or a slice of it."""
        whole, (begin, end) = self.pieces.get(value, (value, (0, _dims(value)[ROWS])))
        if rows == (begin, end):
            return whole
        if (value, rows) not in self.cut:
            part = self.writer.value(value, ROWS, rows[1] - rows[0], f"{value.name}.chunk{rows[0]}_{rows[1]}")
            source, axis, is_view = self.seen(value, whole)
            cut = self.writer.value(source, axis, rows[1] - rows[0], f"{part.name}/cut") if is_view else part
            self.writer.slice(source, axis, rows[0] - begin, rows[1] - begin, cut)
            if is_view:
                self.writer.window("Reshape", [cut, self._shape(part)], {}, part)
            self.cut[value, rows] = part
        return self.cut[value, rows]

    def seen(self, value: ir.Value, part: ir.Value) -> tuple[ir.Value, int, bool]:
        """Rows of a value as their bytes lie, the axis along which those are cut, and whether it is another view."""
        if value not in self.blocked:
            return part, ROWS, False
        batch, channels, height, width = _dims(part)
        dims = (batch * channels // self.block, height, width * self.block)
        view = ir.Value(name=self.writer.fresh(f"{part.name}/view"), type=value.type, shape=ir.Shape(dims))
        self.writer.window("Reshape", [part, self._shape(view)], {}, view)
        return view, 1, True

    def _shape(self, value: ir.Value) -> ir.Value:
        return self.writer.integers(_dims(value))

    def _copy(self, node: ir.Node, how: RowRule) -> None:
        writer, (begin, end) = self.writer, how.made
        inputs = list(node.inputs)
        for index, rows in how.inputs.items():
            value = inputs[index]
            assert value is not None
            inputs[index] = self.rows(value, rows)
        for index, axis in how.axes.items():
            value = inputs[index]
            assert value is not None
            inputs[index] = writer.part(value, axis, begin, end, f"{value.name}.chunk{begin}_{end}")
        suffix = f".chunk{begin}_{end}"
        outputs = [
            writer.value(v, ROWS, end - begin, f"{v.name}{suffix}") if v.name else ir.Value(name="")
            for v in node.outputs
        ]
        inputs, kind = told_shape(writer, node, inputs, _dims(outputs[0]))
        kept = [attribute for name, attribute in node.attributes.items() if name not in how.attributes]
        changed = ir.convenience.convert_attributes({k: v for k, v in how.attributes.items() if v is not None})
        made = ir.Node(
            node.domain, kind, inputs, [*kept, *changed], overload=node.overload, outputs=outputs, version=node.version,
            name=writer.fresh(f"{node.name}{suffix}"),
            metadata_props={**node.metadata_props, STRIP: f"{begin}.{end}"},
        )  # fmt: skip
        writer.order.append(made)
        for value, output in zip(node.outputs, outputs, strict=True):
            self.pieces[value] = output, how.made


def _hull(intervals: Sequence[Interval]) -> Interval:
    return min(begin for begin, _ in intervals), max(end for _, end in intervals)


def _join(strip: _Strip, value: ir.Value, pieces: Sequence[ir.Value]) -> None:
    """Put the strips of a value together under its name."""
    seen = [strip.seen(value, piece) for piece in pieces]
    parts, axis, is_view = [part for part, _, _ in seen], seen[0][1], seen[0][2]
    whole = ir.Value(type=value.type, shape=value.shape)
    value.name, whole.name = None, value.name
    joined = whole
    if is_view:
        joined = strip.writer.value(parts[0], axis, sum(_dims(part)[axis] for part in parts), f"{whole.name}/joined")
    strip.writer.window("Concat", parts, {"axis": axis}, joined)
    if is_view:
        strip.writer.window("Reshape", [joined, strip.writer.integers(_dims(whole))], {}, whole)
    ir.convenience.replace_all_uses_with(value, whole, replace_graph_outputs=True)
