"""Operators that move, repeat, join and cut: their adjoints move back, and add up what was repeated."""

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from memonger.autodiff.registry import Gradient, gradient
from memonger.errors import PlanError
from memonger.ir.emitter import Emitter
from memonger.ir.values import input_at

TO_THE_START = -(2**63) + 1  # as the stop of a Slice that runs backwards


def constants(op: Emitter, node: ir.Node, index: int, what: str) -> tuple[int, ...] | None:
    """The numbers in input ``index``; None where it is absent.

    Raises:
        PlanError: they aren't constant.
    """
    value = input_at(node, index)
    content = op.content(value)
    if value is not None and content is None:
        raise PlanError(
            f"operator {node.op_type} (node '{node.name}') has no gradient rule with {what} that aren't constant: "
            f"'{value.name}' is an input or computed. Make it an initializer alone."
        )
    return None if content is None else tuple(int(number) for number in content.reshape(-1))


def pad(op: Emitter, x: ir.Value, before: Sequence[int], after: Sequence[int]) -> ir.Value:
    """``x`` with zeros around it, or where counts are negative cut; ``x`` itself where they are all 0."""
    if not any(before) and not any(after):
        return x
    if max(*before, *after) <= 0:
        axes = [a for a, (b, e) in enumerate(zip(before, after, strict=True)) if b or e]
        stops = [size + e for size, e in zip(op.dims(x), after, strict=True)]
        return op.Slice(
            x, op.ints(*(-before[a] for a in axes)), op.ints(*(stops[a] for a in axes)), op.ints(*axes)
        )  # fmt: skip
    return op.Pad(x, op.ints(*before, *after))


def place(op: Emitter, x: ir.Value, axis: int, start: int, size: int) -> ir.Value:
    """``x`` among zeros: at ``start`` of an axis of that size."""
    dims = op.dims(x)
    before, after = [0] * len(dims), [0] * len(dims)
    before[axis], after[axis] = start, size - start - dims[axis]
    return pad(op, x, before, after)


def zeros(op: Emitter, dims: Sequence[int], dtype: ir.DataType | None) -> ir.Value:
    """Zeros of that shape."""
    kind = dtype or ir.DataType.FLOAT
    return op.ConstantOfShape(op.ints(*dims), value=ir.tensor(np.zeros(1, kind.numpy()), dtype=kind))


@gradient("Reshape", "Flatten", "Squeeze", "Unsqueeze")
def _view(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    return op.reshape(dy, op.dims(node.inputs[0]))


@gradient("Transpose")
def _transpose(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    perm = op.attribute(node, "perm", list(range(len(op.dims(dy))))[::-1])
    return op.transpose(dy, [perm.index(axis) for axis in range(len(perm))])


@gradient("Expand")
def _expand(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    return dy  # the driver sums


@gradient("Tile")
def _tile(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    dims = op.dims(node.inputs[0])
    repeats = [total // max(size, 1) for total, size in zip(op.dims(dy), dims, strict=True)]
    axes = [a for a, count in enumerate(repeats) if count != 1]
    split = [n for a, size in enumerate(dims) for n in ((repeats[a], size) if a in axes else (size,))]
    summed = [a + position for position, a in enumerate(axes)]
    return op.sum(op.reshape(dy, split), summed)


@gradient("Concat")
def _concat(op: Emitter, node: ir.Node, dy: ir.Value) -> tuple[Gradient, ...]:
    axis = op.attribute(node, "axis", 0) % len(op.dims(dy))
    sizes = [op.dims(x)[axis] for x in node.inputs]
    if all(op.wants(k) for k in range(len(sizes))):
        return op.split(dy, sizes, axis)
    starts = np.cumsum([0, *sizes]).tolist()
    return tuple(
        op.slice(dy, axis, starts[k], starts[k + 1]) if op.wants(k) else None for k in range(len(sizes))
    )  # fmt: skip


@gradient("Split")
def _split(op: Emitter, node: ir.Node, *dys: ir.Value | None) -> Gradient:
    axis = op.attribute(node, "axis", 0) % len(op.dims(node.inputs[0]))
    starts = np.cumsum([0, *(op.dims(y)[axis] for y in node.outputs)]).tolist()
    given = [(k, dy) for k, dy in enumerate(dys) if dy is not None]
    if len(given) == 1:
        k, dy = given[0]
        return place(op, dy, axis, starts[k], starts[-1])
    dtype = given[0][1].dtype
    parts = [
        dy if dy is not None else zeros(op, op.dims(y), dtype) for dy, y in zip(dys, node.outputs, strict=True)
    ]  # fmt: skip
    return op.concat(parts, axis)


@gradient("Slice")
def _slice(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    """Put back: backward slices turned around, gaps of a step filled with zeros by a padded axis of size 1."""
    dims = op.dims(node.inputs[0])
    if op.size(dy) == 0:
        return zeros(op, dims, dy.dtype)
    spans = ranges(op, node, dims)
    back = [a for a, r in enumerate(spans) if r.step < 0]
    if back:
        many = [op.ints(*[n] * len(back)) for n in (-1, TO_THE_START, -1)]
        dy = op.Slice(dy, many[0], many[1], op.ints(*back), many[2])
        spans = [r[::-1] if r.step < 0 else r for r in spans]
    before = [r.start for r in spans]
    if any(r.step > 1 for r in spans):
        dy, before = _spaced(op, dy, spans, dims)
    after = [size - start - now for size, start, now in zip(dims, before, op.dims(dy), strict=True)]
    return pad(op, dy, before, after)


def ranges(op: Emitter, node: ir.Node, dims: Sequence[int]) -> list[range]:
    """The positions a Slice takes, an axis each."""
    starts, stops = constants(op, node, 1, "starts") or (), constants(op, node, 2, "ends") or ()
    axes = constants(op, node, 3, "axes") or tuple(range(len(starts)))
    steps = constants(op, node, 4, "steps") or (1,) * len(starts)
    each_axis = [range(size) for size in dims]
    for axis, start, stop, step in zip(axes, starts, stops, steps, strict=True):
        each_axis[axis] = range(dims[axis])[start:stop:step]
    return each_axis


def _spaced(
    op: Emitter, x: ir.Value, ranges: Sequence[range], dims: Sequence[int]
) -> tuple[ir.Value, list[int]]:  # fmt: skip
    """``x`` with its elements a step apart, and where it then starts in ``dims``."""
    split, before, after, merged, starts = [], [], [], [], []
    for r, size in zip(ranges, dims, strict=True):
        total = len(r) * r.step
        lead = r.start if total == size else 0  # then nothing is left to pad
        split += [len(r)] if r.step == 1 else [len(r), 1]
        before += [0] if r.step == 1 else [0, lead]
        after += [0] if r.step == 1 else [0, r.step - 1 - lead]
        merged.append(total)
        starts.append(r.start - lead)
    return op.reshape(pad(op, op.reshape(x, split), before, after), merged), starts


@gradient("Pad")
def _pad(op: Emitter, node: ir.Node, dy: ir.Value) -> tuple[Gradient, ...]:
    dims = op.dims(node.inputs[0])
    given = constants(op, node, 1, "pads") or ()
    axes = constants(op, node, 3, "axes") or tuple(range(len(dims)))
    before, after = [0] * len(dims), [0] * len(dims)
    for k, axis in enumerate(axes):
        before[axis], after[axis] = given[k], given[k + len(axes)]
    mode = op.attribute(node, "mode", "constant")
    if mode == "constant":
        dx = pad(op, dy, [-n for n in before], [-n for n in after])
        if not op.wants(2):
            return (dx,)
        everything = list(range(len(dims)))
        return dx, None, op.Sub(op.sum(dy, everything), op.sum(dx, everything))
    for axis, size in enumerate(dims):
        dy = _fold(op, node, dy, axis, size, (before[axis], after[axis]), mode)
    return (dy,)


def _fold(
    op: Emitter, node: ir.Node, dy: ir.Value, axis: int, size: int, pads: tuple[int, int], mode: str
) -> ir.Value:  # fmt: skip
    """Add what stands in the borders of one axis to what it is a copy of."""
    left, right = pads
    if pads == (0, 0):
        return dy
    most = {"reflect": size - 1, "wrap": size}.get(mode, max(pads))
    if min(pads) < 0 or max(pads) > most:
        raise PlanError(
            f"operator Pad (node '{node.name}') has no gradient rule with attribute mode='{mode}' and pads {left}, "
            f"{right} on axis {axis} of size {size}: pads from 0 to {most} would work, or mode='constant'."
        )
    total = op.slice(dy, axis, left, left + size)
    ends = {"reflect": (1, size - 1 - right), "edge": (0, size - 1), "wrap": (size - left, 0)}[mode]
    for start, count, at in ((0, left, ends[0]), (left + size, right, ends[1])):
        if count:
            border = op.slice(dy, axis, start, start + count)
            if mode == "edge":
                border = op.sum(border, [axis], keepdims=True)
            if mode == "reflect":
                border = op.slice(border, axis, -1, TO_THE_START, -1)
            total = op.Add(total, place(op, border, axis, at, size))
    return total


@gradient("DepthToSpace")
def _depth_to_space(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    size = op.attribute(node, "blocksize", 1)
    if op.attribute(node, "mode", "DCR") == "DCR":
        return op.SpaceToDepth(dy, blocksize=size)
    n, c, h, w = op.dims(dy)
    blocks = op.reshape(dy, (n, c, h // size, size, w // size, size))
    return op.reshape(op.transpose(blocks, [0, 1, 3, 5, 2, 4]), op.dims(node.inputs[0]))


@gradient("SpaceToDepth")
def _space_to_depth(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    mode = op.attribute(node, "mode", "DCR")
    return op.DepthToSpace(dy, blocksize=op.attribute(node, "blocksize", 1), mode=mode)


@gradient("ReverseSequence")
def _reverse_sequence(op: Emitter, node: ir.Node, dy: ir.Value) -> tuple[Gradient, ...]:
    batch, time = op.attribute(node, "batch_axis", 1), op.attribute(node, "time_axis", 0)
    return op.ReverseSequence(dy, node.inputs[1], batch_axis=batch, time_axis=time), None


@gradient("Col2Im")
def _col2im(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    """Each window's elements read back, zeros from the padding."""
    image, kernel = constants(op, node, 1, "image_shape") or (), constants(op, node, 2, "block_shape") or ()
    rank = len(image)
    strides, dilations = (op.attribute(node, name, []) or [1] * rank for name in ("strides", "dilations"))
    pads = op.attribute(node, "pads", []) or [0] * (2 * rank)
    before, after = [0, 0, *pads[:rank]], [0, 0, *pads[rank:]]
    padded = pad(op, dy, before, after)
    sizes = op.dims(padded)[2:]
    places = np.zeros((1, 1), np.int64)  # [elements of a window, windows]
    for size, k, s, d in zip(sizes, kernel, strides, dilations, strict=True):
        along = np.add.outer(np.arange(k) * d, np.arange((size - (k - 1) * d - 1) // s + 1) * s)
        outer = places[:, None, :, None] * size + along[None, :, None, :]
        places = outer.reshape(places.shape[0] * along.shape[0], -1)
    batch, channels = op.dims(dy)[:2]
    flat = op.reshape(padded, (batch, channels, math.prod(sizes)))
    return op.reshape(op.Gather(flat, op.constant(places), axis=2), op.dims(node.inputs[0]))
