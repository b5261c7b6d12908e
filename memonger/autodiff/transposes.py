"""Transposes of a forward model, written so that little is transposed in a training step.

onnxruntime's Gemm reads a matrix transposed as fast as it stands. PyTorch's exporter writes a linear layer as
``MatMul(x, Transpose(weight))``: the weight would be transposed at every step, and its gradient back.
"""

import math

import onnx_ir as ir

from memonger.ir.emitter import Emitter
from memonger.ir.model import Model
from memonger.ir.rewrite import Replacer
from memonger.ir.values import is_floating, static_shape, swapped_axes


def move_transposes_to_products(model: Model, op: Emitter) -> bool:
    """A pass: Transposes of stacks of matrices come right before the products that read them: gradients cancel them.

    Attention is exported with a Reshape to one stack before the Transpose, one back behind it, and then a scale.
    """

    def write(op: Emitter, node: ir.Node) -> tuple[ir.Value] | None:
        if node.domain:
            return None
        y = _of_stacks(op, node) if node.op_type == "Reshape" else _scaled_before(op, node)
        return None if y is None else (y,)

    return Replacer(model.graph, op).replace_each(write) > 0


def _of_stacks(op: Emitter, node: ir.Node) -> ir.Value | None:
    """``Reshape(Transpose(Reshape(x)))`` that transposes the matrices of x, as one Transpose; None for any other."""
    inner = _only_producer(node.inputs[0], "Transpose")
    outer = None if inner is None else _only_producer(inner.inputs[0], "Reshape")
    if inner is None or outer is None:
        return None
    x = op.given(outer, 0)
    *stacks, rows, columns = op.dims(x) if len(op.dims(x)) > 2 else (0, 0)
    perm, moved = inner.attributes.get_ints("perm"), op.dims(outer.outputs[0])
    as_one = stacks and moved == (math.prod(stacks), rows, columns) and list(perm or ()) == [0, 2, 1]
    if not as_one or op.dims(node.outputs[0]) != (*stacks, columns, rows):
        return None
    return op.transpose(x, swapped_axes(len(stacks) + 2))


def _scaled_before(op: Emitter, node: ir.Node) -> ir.Value | None:
    """``Mul(Transpose(x), number)`` that only products read as ``Transpose(Mul(x, number))``; None for any other."""
    if node.op_type != "Mul" or not all(user.op_type == "MatMul" for user, _ in node.outputs[0].uses()):
        return None
    for moved, number in (node.inputs, node.inputs[::-1]):
        inner = _only_producer(moved, "Transpose")
        if inner is not None and op.size(number) == 1 and len(op.dims(number)) <= len(op.dims(moved)):
            perm = op.attribute(inner, "perm", list(range(len(op.dims(moved))))[::-1])
            return op.transpose(op.Mul(inner.inputs[0], number), perm)
    return None


def _only_producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node of that operator that writes a value with one reader."""
    node = None if value is None or len(value.uses()) != 1 or value.is_graph_output() else value.producer()
    return node if node is not None and node.op_type == op_type and not node.domain else None


def fold_transposes_into_products(model: Model, op: Emitter) -> bool:
    """A pass: products read transposed matrices by Gemm's ``transA`` and ``transB``; Transposes nobody reads go."""

    def write(op: Emitter, node: ir.Node) -> tuple[ir.Value] | None:
        if node.domain or node.op_type not in ("MatMul", "Gemm"):
            return None
        a, b = (_matrix_behind(v) for v in node.inputs[:2])
        if a is None and b is None:
            return None
        y = _gemm(op, node, a, b) if node.op_type == "Gemm" else _product(op, node, a, b)
        return None if y is None else (y,)

    return Replacer(model.graph, op).replace_each(write) > 0


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
