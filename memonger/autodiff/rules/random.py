"""Random operators: as a hash of key, step and element index, so that they give the same numbers whenever they run.

Counter-based generators are due to Salmon et al. 2011 ("Parallel random numbers: as easy as 1, 2, 3"). This one is fast
on a runtime that makes a pass over memory for each operator: rows and columns of the tensor, seen as a matrix, get two
32-bit numbers each, (a, m) and (b, n), by two full rounds of Murmur3's mixing. An element's number is then

    x = (a + b) * m        x = x + (x >> 15)        x = x * n        modulo 2³²

What is only compared with a threshold needs random upper bits, and leaves the second step out: then, in four passes
with the comparison, x = (a·m)·n + m·(b·n), and of any two rows or columns the numbers are independent but for their
lowest bits. It is no generator for cryptography.
"""

import math
import zlib
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from memonger.autodiff.registry import Gradient, expansion, gradient
from memonger.errors import PlanError
from memonger.ir.emitter import Emitter
from memonger.ir.operators import facts
from memonger.ir.values import input_at

_UINT32 = ir.DataType.UINT32
_GOLDEN = 0x9E3779B9  # 2³² over the golden ratio, odd: multiples of it are spread evenly


def salt_of(node: ir.Node, draw: int = 0) -> int:
    """What sets the node's numbers apart from those of others: a checksum of its name, of its seed where it has one."""
    seed = node.attributes.get("seed")
    return zlib.crc32(f"{node.name}/{draw}/{None if seed is None else seed.value}".encode())


def fix_seeds(model: ir.Model) -> None:
    """Give every random operator without a seed one that depends on its name alone."""
    for node in model.graph:
        if facts(node).random and "seed" not in node.attributes:
            if node.op_type == "Dropout":
                node.attributes.add(ir.AttrInt64("seed", salt_of(node) & 0x7FFFFFFF))
            else:
                node.attributes.add(ir.AttrFloat32("seed", float(salt_of(node) & 0xFFFFFF)))


def counters(salt: int, count: int) -> np.ndarray:
    """``count`` uint32 numbers of SplitMix64 (Steele, Lea & Flood 2014) begun at ``salt``: where the hash begins."""
    x = (np.uint64(salt << 32) + np.arange(1, count + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(32)).astype(np.uint32)


def hashed(op: Emitter, dims: Sequence[int], salt: int, *, upper: bool = False) -> ir.Value:
    """A uint32 tensor of random bits, a function of the scalars ``random_key`` and ``step``, of salt and index.

    ``upper``: the upper bits are all that counts.
    """
    if 0 in dims:
        return op.constant(np.zeros(dims, np.uint32))
    left, right = _split(dims)
    rows, columns = math.prod(left), math.prod(right)
    start = op.constant(counters(salt, 2 * (rows + columns)))
    step = op.cast(op.scalar("step", ir.DataType.INT64), _UINT32)
    bits = _mixed(op, op.Add(start, op.Mul(step, _GOLDEN)))
    bits = op.BitwiseOr(_mixed(op, op.Add(bits, op.scalar("random_key", _UINT32))), 1)  # odd: products lose no bits
    a, m, b, n = parts = op.several("Split", 4, bits, op.ints(rows, rows, columns, columns), axis=0)
    op.composite("RandomBits", parts[0])
    a, m = (op.reshape(v, (*left, *[1] * len(right))) for v in (a, m))
    b, n = (op.reshape(v, (*[1] * len(left), *right)) for v in (b, n))
    x = op.Mul(op.Add(a, b), m)
    if not upper:
        x = op.Add(x, op.BitShift(x, 15, direction="RIGHT"))
    return op.reshape(op.Mul(x, n), dims)


def _mixed(op: Emitter, x: ir.Value) -> ir.Value:
    """Murmur3's finalizer (Appleby 2008): every bit of the result depends on every bit."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = op.Mul(op.BitwiseXor(x, op.BitShift(x, shift, direction="RIGHT")), factor)
    return op.BitwiseXor(x, op.BitShift(x, 16, direction="RIGHT"))


def _split(dims: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The axes of rows and of columns, with the fewest rows and columns; an axis is divided where that saves much."""
    best = min(range(len(dims) + 1), key=lambda k: math.prod(dims[:k]) + math.prod(dims[k:]))
    left, right = tuple(dims[:best]), tuple(dims[best:])
    size = math.prod(dims)
    if math.prod(left) + math.prod(right) > 8 * math.isqrt(size) and size > 4096:
        rows = next(k for k in range(math.isqrt(size), 0, -1) if size % k == 0)
        if rows + size // rows < math.prod(left) + math.prod(right):
            return (rows,), (size // rows,)
    return left, right


def uniform(op: Emitter, dims: Sequence[int], salt: int) -> ir.Value:
    """Float32 multiples of 2⁻²⁴, in [0, 1)."""
    bits = op.BitShift(hashed(op, dims, salt), 8, direction="RIGHT")
    return op.Mul(op.cast(bits, ir.DataType.FLOAT), 2.0**-24)


def normal(op: Emitter, dims: Sequence[int], node: ir.Node) -> ir.Value:
    """Float32 standard normal numbers (Box & Muller 1958)."""
    radius = op.Sqrt(op.Mul(op.Log(op.Add(uniform(op, dims, salt_of(node, 0)), 2.0**-25)), -2.0))
    return op.Mul(radius, op.Cos(op.Mul(uniform(op, dims, salt_of(node, 1)), 2 * math.pi)))


def _training(op: Emitter, node: ir.Node) -> bool:
    """Whether a Dropout drops."""
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return False
    content = op.content(node.inputs[2])
    if content is None:
        raise PlanError(
            f"operator Dropout (node '{node.name}'): whether it drops is an input of the model. Make its input "
            "training_mode a constant: memonger.to_training_mode does that."
        )
    return bool(content.all())


def _ratio(node: ir.Node, op: Emitter) -> float | ir.Value:
    """The probability with which a Dropout drops: a number where it is known."""
    ratio = input_at(node, 1)
    content = 0.5 if ratio is None else op.content(ratio)
    if content is None:
        assert ratio is not None
        return op.reshape(ratio, ())
    number = float(np.asarray(content, np.float64).reshape(-1)[0])
    if not 0.0 <= number < 1.0:
        raise PlanError(f"operator Dropout (node '{node.name}'): ratio {number} must be at least 0 and below 1.")
    return number


def _scale(op: Emitter, ratio: float | ir.Value, dtype: ir.DataType | None) -> float | ir.Value:
    """What is kept grows by this."""
    if isinstance(ratio, float):
        return 1.0 / (1.0 - ratio)
    return op.cast(op.Div(1.0, op.Sub(1.0, op.cast(ratio, ir.DataType.FLOAT))), dtype)


@expansion("Dropout")
def _dropout(op: Emitter, node: ir.Node) -> tuple[ir.Value | None, ...] | None:
    if not _training(op, node):
        return None
    x, ratio = node.inputs[0], _ratio(node, op)
    assert x is not None
    if ratio == 0.0:
        kept = op.constant(np.ones(op.dims(x), np.bool_)) if len(node.outputs) > 1 else None
        return op.Identity(x), kept
    if isinstance(ratio, float):
        threshold: float | ir.Value = min(round(ratio * 2**32), 2**32 - 1)
    else:
        threshold = op.cast(op.Mul(op.cast(ratio, ir.DataType.DOUBLE), 2.0**32), _UINT32)
    keep = op.GreaterOrEqual(hashed(op, op.dims(x), salt_of(node), upper=True), threshold)
    y = op.Mul(op.Mul(x, op.cast(keep, x.dtype)), _scale(op, ratio, x.dtype))
    return y, keep


@gradient("Dropout")
def _dropout_gradient(op: Emitter, node: ir.Node, dy: ir.Value, *_: Gradient) -> Gradient:
    """Of the inference form, and of a training form that stays as it is."""
    if not _training(op, node):
        return dy
    mask = op.cast(op.add_output(node, 1, "mask"), dy.dtype)
    return op.Mul(op.Mul(dy, mask), _scale(op, _ratio(node, op), dy.dtype))


@expansion("RandomNormal", "RandomNormalLike")
def _random_normal(op: Emitter, node: ir.Node) -> tuple[ir.Value]:
    y = node.outputs[0]
    drawn = normal(op, op.dims(y), node)
    return (_moved(op, drawn, op.attribute(node, "scale", 1.0), op.attribute(node, "mean", 0.0), y.dtype),)


@expansion("RandomUniform", "RandomUniformLike")
def _random_uniform(op: Emitter, node: ir.Node) -> tuple[ir.Value]:
    y = node.outputs[0]
    low, high = op.attribute(node, "low", 0.0), op.attribute(node, "high", 1.0)
    return (_moved(op, uniform(op, op.dims(y), salt_of(node)), high - low, low, y.dtype),)


def _moved(op: Emitter, x: ir.Value, scale: float, shift: float, dtype: ir.DataType | None) -> ir.Value:
    x = x if scale == 1.0 else op.Mul(x, scale)
    return op.cast(x if shift == 0.0 else op.Add(x, shift), dtype)


@expansion("Bernoulli")
def _bernoulli(op: Emitter, node: ir.Node) -> tuple[ir.Value]:
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    drawn = uniform(op, op.dims(x), salt_of(node))
    return (op.cast(op.Less(drawn, op.cast(x, ir.DataType.FLOAT)), y.dtype),)


@expansion("Multinomial")
def _multinomial(op: Emitter, node: ir.Node) -> tuple[ir.Value]:
    """The inverse of the cumulated probabilities at uniform numbers."""
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    rows, classes = op.dims(x)
    upto = op.CumSum(op.Softmax(op.cast(x, ir.DataType.FLOAT), axis=1), op.constant(1, ir.DataType.INT64))
    drawn = op.reshape(uniform(op, op.dims(y), salt_of(node)), (rows, op.dims(y)[1], 1))
    passed = op.GreaterOrEqual(drawn, op.reshape(upto, (rows, 1, classes)))
    number = op.ReduceSum(op.cast(passed, ir.DataType.INT64), op.ints(2), keepdims=0)
    return (op.cast(op.Min(number, classes - 1), y.dtype),)
