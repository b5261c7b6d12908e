"""Operators that the provider has no kernel for, or refuses with some settings, as what they mean.

**ConvTranspose** is cuDNN's gradient of a convolution's image, which knows symmetric padding alone. Padding at the end
only says where the output stops. So the padding at the beginning is taken for both ends, and the output's size is set
by ``output_padding``, which has to stay below the stride. What is then too much is cut off.

**Shifts and bitwise operators** of unsigned integers have no kernel, but arithmetic has. A shift by a constant is a
product or a quotient with a power of two. A bitwise operator is looked up byte by byte: the table says, for two bytes a
and b, what (a op b) - a is, modulo the type's range; these, at their bytes' places, are added to the first operand. All
of it is exact, so a random mask is the same bits on every device. Bytes are the axis in front, and as many are looked
at as the second operand can have. Single bits would need no table, but 32 of everything instead of four at most.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from memonger.ir.emitter import Emitter
from memonger.ir.windows import Windows, windows_of
from memonger.lowering.cuda.rules import Written, rule


@rule("LRN", when=lambda op, node: op.attribute(node, "size", 1) % 2 == 0)
def _lrn(op: Emitter, node: ir.Node) -> Written:
    """cuDNN has a middle channel, so an even number of them is refused.

    The mean is that of a pool over neighbouring channels, whose padding, unequal at its ends, is written before it.
    """
    x, size = op.given(node, 0), op.attribute(node, "size", 1)
    batch, channels = op.dims(x)[:2]
    before = (size - 1) // 2
    squares = op.reshape(op.Mul(x, x), (batch, 1, channels, -1))
    padded = op.Pad(squares, op.ints(0, 0, before, 0, 0, 0, size - 1 - before, 0))
    mean = op.reshape(op.AveragePool(padded, kernel_shape=[size, 1]), op.dims(x))
    base = op.Add(op.Mul(mean, op.attribute(node, "alpha", 1e-4)), op.attribute(node, "bias", 1.0))
    return (op.Mul(x, op.Pow(base, -op.attribute(node, "beta", 0.75))),)


@rule("Mean")
def _mean(op: Emitter, node: ir.Node) -> Written:
    values = [op.given(node, i) for i in range(len(node.inputs))]
    total = op.Sum(*values) if len(values) > 1 else values[0]
    return (op.Div(total, float(len(values))),)


@rule("LpNormalization")
def _lp_normalization(op: Emitter, node: ir.Node) -> Written:
    """Where all numbers are 0, so is the result."""
    x, axis = op.given(node, 0), op.attribute(node, "axis", -1)
    reduce = op.ReduceL1 if op.attribute(node, "p", 2) == 1 else op.ReduceL2
    norm = reduce(x, op.ints(axis), keepdims=1)
    return (op.Div(x, op.Where(op.Equal(norm, 0.0), op.constant(1.0, x.dtype), norm)),)


@rule("Celu")
def _celu(op: Emitter, node: ir.Node) -> Written:
    alpha = op.attribute(node, "alpha", 1.0)
    return (op.Mul(op.Elu(op.Div(op.given(node, 0), alpha)), alpha),)


def _split_sizes(op: Emitter, node: ir.Node) -> list[int]:
    axis = op.attribute(node, "axis", 0)
    return [op.dims(value)[axis] if value.name else 0 for value in node.outputs]


def _copies_sizes(op: Emitter, node: ir.Node) -> bool:
    """Parts of several sizes along any axis but the last: the kernel is told of them by four copies from the host."""
    axis = op.attribute(node, "axis", 0) % len(op.dims(node.inputs[0]))
    after = math.prod(op.dims(node.inputs[0])[axis + 1 :])
    return after > 1 and all(v.name for v in node.outputs) and len(set(_split_sizes(op, node))) > 1


@rule("Split", when=_copies_sizes, raises_opset=False)
def _split(op: Emitter, node: ir.Node) -> Written:
    """Slices: a CUDA graph would hold the addresses that are copied from."""
    x, axis = op.given(node, 0), op.attribute(node, "axis", 0) % len(op.dims(node.inputs[0]))
    sizes = _split_sizes(op, node)
    stops = list(itertools.accumulate(sizes))
    return tuple(op.slice(x, axis, stop - size, stop) for stop, size in zip(stops, sizes, strict=True))


@dataclass(frozen=True, slots=True)
class _Axis:
    """How one axis is computed: from element ``pad`` of the output without padding, ``size`` elements.

    Attributes:
        pad: Padding at either end.
        extra: ``output_padding``.
        before: Elements to cut off before what is asked for.
        size: Elements asked for.
    """

    pad: int
    extra: int
    before: int
    size: int


def _windows(op: Emitter, node: ir.Node) -> Windows:
    x, w, y = op.given(node, 0), op.given(node, 1), node.outputs[0]
    return windows_of(node, op.dims(y)[2:], op.dims(x)[2:], op.dims(w)[2:], up=True)


def _is_left_to_cpu(op: Emitter, node: ir.Node) -> bool:
    """Padding at the ends differs, or might for all that the provider looks at."""
    x, w = op.given(node, 0), op.given(node, 1)
    if 0 in (*op.dims(x), *op.dims(w)) or len(op.dims(node.outputs[0])) != len(op.dims(x)):
        return False  # onnx's inference (1.23) gives up half-way where output_shape is below the input's
    at = _windows(op, node)
    automatic = op.attribute(node, "auto_pad", "NOTSET").startswith("SAME") or "output_shape" in node.attributes
    return (automatic or at.begin != at.end) and all(_axis(at, a).pad >= 0 for a in range(at.rank))


@rule("ConvTranspose", when=_is_left_to_cpu)
def _conv_transpose(op: Emitter, node: ir.Node) -> Written:
    x, w = op.given(node, 0), op.given(node, 1)
    at = _windows(op, node)
    axes = [_axis(at, a) for a in range(at.rank)]
    pads, extra = [axis.pad for axis in axes], [axis.extra for axis in axes]
    y = op.ConvTranspose(
        x, w, *node.inputs[2:], strides=at.strides, dilations=at.dilations, pads=[*pads, *pads],
        output_padding=extra if any(extra) else None, group=op.attribute(node, "group", 1),
    )  # fmt: skip
    return (_cut(op, y, axes),)


def _axis(at: Windows, a: int) -> _Axis:
    """A negative ``pad``: the output goes on where no input reaches. onnxruntime refuses that."""
    begin, last = at.begin[a], at.strides[a] - 1
    full = (at.count[a] - 1) * at.strides[a] + at.extent[a]  # what the inputs reach, without padding
    stop = begin + at.image[a]
    pad = min(begin, full + last - stop)
    return _Axis(pad, max(0, stop + pad - full), begin - pad, at.image[a])


def _cut(op: Emitter, y: ir.Value, axes: list[_Axis]) -> ir.Value:
    dims = op.dims(y)[2:]
    cut = [a for a, axis in enumerate(axes) if axis.size < dims[a]]
    if not cut:
        return y
    starts, stops = [axes[a].before for a in cut], [axes[a].before + axes[a].size for a in cut]
    return op.Slice(y, op.ints(*starts), op.ints(*stops), op.ints(*(a + 2 for a in cut)))


_WIDTHS = {ir.DataType.UINT32: 32, ir.DataType.UINT64: 64}  # the provider has Mod for these alone
_SHIFTED = {**_WIDTHS, ir.DataType.UINT8: 8}

_OPERATORS = {"BitwiseAnd": np.bitwise_and, "BitwiseOr": np.bitwise_or, "BitwiseXor": np.bitwise_xor}


def _is_by_a_constant(op: Emitter, node: ir.Node) -> bool:
    x, by = op.given(node, 0), _number(op, op.given(node, 1))
    return by is not None and by < _SHIFTED.get(x.dtype or ir.DataType.UNDEFINED, 0)


@rule("BitShift", when=_is_by_a_constant)
def _bit_shift(op: Emitter, node: ir.Node) -> Written:
    x, by = op.given(node, 0), op.given(node, 1)
    factor = _constant(op, x, np.array(1 << (_number(op, by) or 0)).reshape(op.dims(by)))
    return (op.Div(x, factor) if op.attribute(node, "direction", "") == "RIGHT" else op.Mul(x, factor),)


def _number(op: Emitter, value: ir.Value) -> int | None:
    """The content of a constant single number."""
    content = op.content(value)
    return int(content.reshape(-1)[0]) if content is not None and content.size == 1 else None


def _constant(op: Emitter, like: ir.Value, content: np.ndarray) -> ir.Value:
    assert like.dtype is not None
    return op.constant(content.astype(like.dtype.numpy()))


@rule(*_OPERATORS, when=lambda op, node: op.given(node, 0).dtype in _WIDTHS)
def _bitwise(op: Emitter, node: ir.Node) -> Written:
    a, b = (op.given(node, i) for i in (0, 1))
    width = _WIDTHS[a.dtype or ir.DataType.UNDEFINED]
    if _number(op, a) is not None:
        a, b = b, a
    bits = width if node.op_type == "BitwiseAnd" else _bits(op, b, width)
    rank, count = len(op.dims(node.outputs[0])), max(1, -(-bits // 8))
    places = _constant(op, a, np.array([1 << 8 * k for k in range(count)], np.uint64).reshape(-1, *[1] * rank))
    first, second = (op.Mod(op.Div(v, places) if count > 1 else v, _constant(op, a, np.array(256))) for v in (a, b))
    index = op.cast(op.Add(op.Mul(first, _constant(op, a, np.array(256))), second), ir.DataType.INT32)
    changes = op.Gather(_table(op, node.op_type, a), index, axis=0)
    if count == 1:
        return (op.Add(a, changes),)
    changes = op.Mul(changes, places)
    for k in range(count):
        a = op.Add(a, op.Gather(changes, op.constant(k, ir.DataType.INT64), axis=0))
    return (a,)


def _bits(op: Emitter, value: ir.Value, width: int) -> int:
    """How many bits a value can have, from the lowest on."""
    number = _number(op, value)
    if number is not None:
        return number.bit_length()
    source = value.producer()
    if source is None or source.domain != "" or len(source.inputs) != 2 or source.inputs[1] is None:
        return width
    by = _number(op, source.inputs[1])
    if by is None:
        return width
    if source.op_type == "Div":  # a shift, written out
        return max(0, width - by.bit_length() + 1)
    if source.op_type == "BitShift" and op.attribute(source, "direction", "") == "RIGHT":
        return max(0, width - by)
    return width


def _table(op: Emitter, op_type: str, like: ir.Value) -> ir.Value:
    a, b = np.meshgrid(np.arange(256), np.arange(256), indexing="ij")
    return _constant(op, like, (_OPERATORS[op_type](a, b) - a).reshape(-1))
