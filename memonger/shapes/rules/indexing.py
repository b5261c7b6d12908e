"""Shapes of what picks elements, and of what makes tensors from numbers."""

import math
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from memonger.shapes.contents import constant
from memonger.shapes.shaping import Compute, NoRuleError, Shape, Site, shape_rule, shape_rules


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
