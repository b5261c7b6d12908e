"""Shifts and bitwise operators of unsigned integers: the provider has no kernel for any, but for arithmetic it has.

A shift by a constant is a product or a quotient with a power of two. A bitwise operator is looked up byte by byte: the
table says, for two bytes a and b, what (a op b) - a is, modulo the type's range; these, at their bytes' places, are
added to the first operand. All of it is exact, so a random mask is the same bits on every device.

Bytes are the axis in front, and as many are looked at as the second operand can have. Single bits would need no table,
but 32 of everything instead of four at most.
"""

import numpy as np
import onnx_ir as ir

from memonger.ir.emitter import Emitter
from memonger.lowering.cuda.rules import Written, rule

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
