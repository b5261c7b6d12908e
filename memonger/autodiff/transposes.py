"""Products of transposed matrices: onnxruntime's Gemm reads a matrix transposed as fast as it stands.

PyTorch's exporter writes a linear layer as ``MatMul(x, Transpose(weight))``: the weight would be transposed at every
step, and its gradient back.
"""

import math

import onnx_ir as ir

from memonger.model.emitter import Emitter
from memonger.model.replacing import Replacer
from memonger.model.values import is_floating, static_shape


def fold_into_products(model: ir.Model, op: Emitter) -> None:
    """Let products read transposed matrices by Gemm's ``transA`` and ``transB``; Transposes nobody reads go."""
    into = Replacer(model.graph, op)
    for node in list(model.graph):
        if node.domain or node.op_type not in ("MatMul", "Gemm") or node in into.gone:
            continue
        a, b = (_matrix_behind(v) for v in node.inputs[:2])
        if a is None and b is None:
            continue
        with op.at(str(node.name)):
            y = _gemm(op, node, a, b) if node.op_type == "Gemm" else _product(op, node, a, b)
        if y is not None:
            into.replace(node, (y,))
    into.finish()


def _matrix_behind(value: ir.Value | None) -> ir.Value | None:
    """The matrix that ``value`` is the transposed of, if it is of one."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != "Transpose" or node.domain or value is None or not is_floating(value):
        return None
    shape, perm = static_shape(value), node.attributes.get_ints("perm", (1, 0))
    return node.inputs[0] if shape is not None and len(shape) == 2 and tuple(perm) == (1, 0) else None


def _gemm(op: Emitter, node: ir.Node, a: ir.Value | None, b: ir.Value | None) -> ir.Value:
    given = {name: op.attribute(node, name, default) for name, default in (("alpha", 1.0), ("beta", 1.0))}
    return op.Gemm(
        node.inputs[0] if a is None else a,
        node.inputs[1] if b is None else b,
        *node.inputs[2:],
        transA=op.attribute(node, "transA", 0) ^ (a is not None),
        transB=op.attribute(node, "transB", 0) ^ (b is not None),
        **given,
    )


def _product(op: Emitter, node: ir.Node, a: ir.Value | None, b: ir.Value | None) -> ir.Value | None:
    """A MatMul as a Gemm of all rows on its left; None where its right operand is no matrix."""
    left, right = op.given(node, 0), op.given(node, 1)
    if len(op.dims(right)) != 2:
        return None
    *leading, inner = op.dims(left)
    rows = op.reshape(left, (math.prod(leading), inner)) if a is None else a
    product = op.Gemm(rows, right if b is None else b, transA=int(a is not None), transB=int(b is not None))
    return op.reshape(product, op.dims(node.outputs[0]))
