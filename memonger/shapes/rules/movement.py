"""Shapes of what moves, joins, cuts, repeats and picks elements, and of what makes tensors from numbers."""

import math
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from memonger.shapes.contents import constant
from memonger.shapes.rules.pointwise import broadcast
from memonger.shapes.shaping import Compute, NoRuleError, Shape, Site, shape_rule, shape_rules

_MS = "com.microsoft::"


@shape_rule("Reshape")
def _reshape(site: Site) -> Compute:
    keeps_zeros = site.integer("allowzero", 0)
    fixed = site.integers("shape")

    def compute(shapes: Sequence[Any], contents: Sequence[Any]) -> Sequence[Shape]:
        source = shapes[0]
        target = list(fixed) if fixed is not None else contents[1].tolist()
        if not keeps_zeros:
            target = [source[axis] if dim == 0 else dim for axis, dim in enumerate(target)]
        if -1 in target:
            others = -math.prod(target)
            count = math.prod(source)
            if others <= 0 or count % others:
                raise ValueError(f"{list(source)} isn't reshaped to {target}")
            target[target.index(-1)] = count // others
        if math.prod(target) != math.prod(source):
            raise ValueError(f"{list(source)} isn't reshaped to {target}")
        return (tuple(target),)

    return compute


@shape_rule("Flatten")
def _flatten(site: Site) -> Compute:
    axis = site.integer("axis", 1)

    def compute(shapes: Sequence[Any], _: Sequence[Any]) -> Sequence[Shape]:
        at = axis if axis >= 0 else axis + len(shapes[0])
        return ((math.prod(shapes[0][:at]), math.prod(shapes[0][at:])),)

    return compute


@shape_rule("Transpose")
def _transpose(site: Site) -> Compute:
    perm = site.integers("perm")
    if perm is None:
        return lambda shapes, _: (shapes[0][::-1],)
    return lambda shapes, _: (tuple(shapes[0][axis] for axis in perm),)


@shape_rule("Squeeze")
def _squeeze(site: Site) -> Compute:
    def compute(shapes: Sequence[Any], contents: Sequence[Any]) -> Sequence[Shape]:
        shape, axes = shapes[0], site.integers_at("axes", contents)
        left_out = {a for a, d in enumerate(shape) if d == 1} if axes is None else {a % len(shape) for a in axes}
        if any(shape[axis] != 1 for axis in left_out):
            raise ValueError(f"an axis of {list(shape)} is squeezed that isn't 1")
        return (tuple(dim for axis, dim in enumerate(shape) if axis not in left_out),)

    return compute


@shape_rule("Unsqueeze")
def _unsqueeze(site: Site) -> Compute:
    def compute(shapes: Sequence[Any], contents: Sequence[Any]) -> Sequence[Shape]:
        axes = site.integers_at("axes", contents) or ()
        rank, rest = len(shapes[0]) + len(axes), iter(shapes[0])
        new = {axis % rank for axis in axes}
        return (tuple(1 if axis in new else next(rest) for axis in range(rank)),)

    return compute


@shape_rule(_MS + "ExpandDims")
def _expand_dims(site: Site) -> Compute:
    def compute(shapes: Sequence[Any], contents: Sequence[Any]) -> Sequence[Shape]:
        at = int(contents[1]) % (len(shapes[0]) + 1)
        return ((*shapes[0][:at], 1, *shapes[0][at:]),)

    return compute


@shape_rule("Concat")
def _concat(site: Site) -> Compute:
    axis = site.integer("axis", 0)

    def compute(shapes: Sequence[Any], _: Sequence[Any]) -> Sequence[Shape]:
        first = shapes[0]
        at = axis % len(first)
        for other in shapes[1:]:
            if (other[:at], other[at + 1 :]) != (first[:at], first[at + 1 :]) and not (0 in first or 0 in other):
                raise ValueError(f"{list(other)} isn't joined to {list(first)} along axis {at}")
        return ((*first[:at], sum(shape[at] for shape in shapes), *first[at + 1 :]),)

    return compute


@shape_rule(_MS + "QLinearConcat")
def _quantized_concat(site: Site) -> Compute:
    joined = _concat(site)
    return lambda shapes, contents: joined(shapes[2::3], contents)


@shape_rule("Split")
def _split(site: Site) -> Compute:
    axis, count = site.integer("axis", 0), site.outputs

    def compute(shapes: Sequence[Any], contents: Sequence[Any]) -> Sequence[Shape]:
        shape = shapes[0]
        at = axis % len(shape)
        sizes: Sequence[int] = site.integers_at("split", contents) or ()
        if not sizes:
            part = -(-shape[at] // count)
            sizes = [part] * (count - 1) + [shape[at] - part * (count - 1)]
        if sum(sizes) != shape[at] or min(sizes) < 0:
            raise ValueError(f"{shape[at]} isn't split into {list(sizes)}")
        return [(*shape[:at], size, *shape[at + 1 :]) for size in sizes]

    return compute


@shape_rule("Slice")
def _slice(site: Site) -> Compute:
    fixed = tuple(site.integers(name) for name in ("starts", "ends", "axes"))

    def compute(shapes: Sequence[Any], contents: Sequence[Any]) -> Sequence[Shape]:
        result = list(shapes[0])
        if fixed[0] is not None:
            starts, ends, axes, steps = (*fixed, None)
        else:
            given = [None if each is None else each.ravel().tolist() for each in contents[1:5]]
            starts, ends, axes, steps = given + [None] * (4 - len(given))
        for number, (start, end) in enumerate(zip(starts or (), ends or (), strict=True)):
            axis = axes[number] % len(result) if axes is not None else number
            step = steps[number] if steps is not None else 1
            result[axis] = _cut(result[axis], start, end, step)
        return (tuple(result),)

    return compute


def _cut(size: int, start: int, end: int, step: int) -> int:
    """How many elements of so many a slice takes."""
    low, high = (0, size) if step > 0 else (-1, size - 1)
    start, end = (min(max(at + size if at < 0 else at, low), high) for at in (start, end))
    return max(0, -((start - end) // step))


@shape_rule("Pad", _MS + "Pad")
def _pad(site: Site) -> Compute:
    fixed = site.integers("pads") or site.integers("paddings")

    def compute(shapes: Sequence[Any], contents: Sequence[Any]) -> Sequence[Shape]:
        result = list(shapes[0])
        pads = list(fixed) if fixed is not None else contents[1].ravel().tolist()
        axes = contents[3].ravel().tolist() if len(contents) > 3 and contents[3] is not None else range(len(result))
        half = len(pads) // 2
        for number, axis in enumerate(axes):
            result[axis] += pads[number] + pads[number + half]
        return (tuple(result),)

    return compute


@shape_rule(_MS + "UnfoldTensor")
def _unfold(site: Site) -> Compute:
    axis, size, step = site.integer("dim", -1), site.integer("size", 1), site.integer("step", 1)

    def compute(shapes: Sequence[Any], _: Sequence[Any]) -> Sequence[Shape]:
        shape = list(shapes[0])
        shape[axis] = (shape[axis] - size) // step + 1
        return ((*shape, size),)

    return compute


@shape_rule("CenterCropPad")
def _center_crop_pad(site: Site) -> Compute:
    axes = site.integers("axes")

    def compute(shapes: Sequence[Any], contents: Sequence[Any]) -> Sequence[Shape]:
        result = list(shapes[0])
        for axis, size in zip(axes if axes is not None else range(len(result)), contents[1].tolist(), strict=True):
            result[axis] = size
        return (tuple(result),)

    return compute


shape_rules({
    "Expand": lambda shapes, contents: (broadcast(shapes[0], tuple(contents[1].tolist())),),
    "Tile": lambda shapes, contents: (
        tuple(dim * by for dim, by in zip(shapes[0], contents[1].tolist(), strict=True)),
    ),
})  # fmt: skip


@shape_rule("Gather")
def _gather(site: Site) -> Compute:
    axis = site.integer("axis", 0)

    def compute(shapes: Sequence[Any], _: Sequence[Any]) -> Sequence[Shape]:
        data, indices = shapes
        at = axis % len(data)
        return ((*data[:at], *indices, *data[at + 1 :]),)

    return compute


@shape_rule("com.microsoft::GatherBlockQuantized")
def _gather_quantized(site: Site) -> Compute:
    """Bytes hold two numbers of four bits, or four of two, along the last axis."""
    axis, of_byte = site.integer("gather_axis", 0), 1
    if site.kinds[0] in (None, ir.DataType.UINT8):
        if site.kinds[0] is None:
            raise NoRuleError("numbers of a type that the model doesn't declare")
        of_byte = 8 // site.integer("bits", 4)

    def compute(shapes: Sequence[Any], _: Sequence[Any]) -> Sequence[Shape]:
        data, indices = (*shapes[0][:-1], shapes[0][-1] * of_byte), shapes[1]
        at = axis % len(data)
        return ((*data[:at], *indices, *data[at + 1 :]),)

    return compute


@shape_rule("com.microsoft::GatherPacked")
def _gather_packed(site: Site) -> Compute:
    columns = site.integer("K", 0)
    return lambda shapes, _: ((*shapes[1], columns),)


@shape_rule("GatherND", "com.microsoft::GatherND")
def _gather_nd(site: Site) -> Compute:
    batch = site.integer("batch_dims", 0)
    return lambda shapes, _: ((*shapes[1][:-1], *shapes[0][batch + shapes[1][-1] :]),)


@shape_rule("OneHot")
def _one_hot(site: Site) -> Compute:
    axis = site.integer("axis", -1)

    def compute(shapes: Sequence[Any], contents: Sequence[Any]) -> Sequence[Shape]:
        at = axis % (len(shapes[0]) + 1)
        return ((*shapes[0][:at], contents[1].ravel().tolist()[0], *shapes[0][at:]),)

    return compute


@shape_rule("TopK")
def _top_k(site: Site) -> Compute:
    axis, fixed = site.integer("axis", -1), site.integer("k", 0)

    def compute(shapes: Sequence[Any], contents: Sequence[Any]) -> Sequence[Shape]:
        shape = list(shapes[0])
        shape[axis] = contents[1].ravel().tolist()[0] if len(contents) > 1 else fixed
        return (tuple(shape),) * site.outputs

    return compute


@shape_rule("Shape")
def _shape(site: Site) -> Compute:
    start, end = site.integer("start", 0), site.integer("end", 1 << 30)
    return lambda shapes, _: ((len(shapes[0][start:end]),),)


@shape_rule("RandomNormal", "RandomUniform")
def _random(site: Site) -> Compute:
    shape = site.integers("shape") or ()
    return lambda shapes, _: (shape,)


@shape_rule("Range", "com.microsoft::Range")
def _range(_: Site) -> Compute:
    def compute(shapes: Sequence[Any], contents: Sequence[Any]) -> Sequence[Shape]:
        start, limit = contents[0].item(), contents[1].item()
        step = contents[2].item() if len(contents) > 2 and contents[2] is not None else 1
        if any(isinstance(number, float) for number in (start, limit, step)):
            return ((max(0, math.ceil((limit - start) / step)),),)
        return ((max(0, -((start - limit) // step)),),)

    return compute


@shape_rule("Constant")
def _constant(site: Site) -> Compute:
    shape = constant(site).shape
    return lambda *_: (shape,)


@shape_rule("Multinomial")
def _multinomial(site: Site) -> Compute:
    samples = site.integer("sample_size", 1)
    return lambda shapes, _: ((shapes[0][0], samples),)


@shape_rule("com.microsoft::EmbedLayerNormalization", "com.microsoft::QEmbedLayerNormalization")
def _embed_layer_normalization(site: Site) -> Compute:
    """Token numbers (batch, length) and embeddings (words, width) → states, a length for each of the batch, sums."""

    def compute(shapes: Sequence[Any], _: Sequence[Any]) -> Sequence[Shape]:
        batch, length = shapes[0]
        states = (batch, length, shapes[2][1])
        return (states, (batch,), states)[: site.outputs]

    return compute


shape_rules({
    "ConstantOfShape": lambda _, contents: (tuple(contents[0].tolist()),),
    "EyeLike": lambda shapes, _: shapes[:1],
    "GatherElements": lambda shapes, _: shapes[1:2],
    "Size": lambda shapes, _: ((),),
    "com.microsoft::TorchEmbedding": lambda shapes, _: ((*shapes[1], shapes[0][1]),),
    "com.microsoft::WordConvEmbedding": lambda shapes, _: ((shapes[0][0], shapes[1][0]),),
})  # fmt: skip
