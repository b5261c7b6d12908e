"""Products of matrices."""

import onnx_ir as ir

from memonger.gradients.emitter import Emitter
from memonger.gradients.registry import Gradient, gradient


@gradient("Gemm")
def _gemm(op: Emitter, node: ir.Node, dy: ir.Value) -> tuple[Gradient, ...]:
    a, b = node.inputs[:2]
    alpha, beta = op.attribute(node, "alpha", 1.0), op.attribute(node, "beta", 1.0)
    trans_a, trans_b = op.attribute(node, "transA", 0), op.attribute(node, "transB", 0)
    if trans_a:
        da = op.Gemm(b, dy, alpha=alpha, transA=trans_b, transB=1)
    else:
        da = op.Gemm(dy, b, alpha=alpha, transB=1 - trans_b)
    if trans_b:
        db = op.Gemm(dy, a, alpha=alpha, transA=1, transB=trans_a)
    else:
        db = op.Gemm(a, dy, alpha=alpha, transA=1 - trans_a)
    return da, db, dy if beta == 1.0 else op.Mul(dy, beta)


@gradient("LogSoftmax")
def _log_softmax(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    axis = op.attribute(node, "axis", -1)
    y = node.outputs[0]
    return op.Sub(dy, op.Mul(op.Exp(y), op.ReduceSum(dy, op.ints(axis), keepdims=1)))


@gradient("GatherElements")
def _gather_elements(op: Emitter, node: ir.Node, dy: ir.Value) -> tuple[Gradient, ...]:
    x, indices = node.inputs
    zeros = op.ConstantOfShape(op.ints(*op.dims(x)), value=ir.tensor([0.0], dtype=dy.dtype))
    return op.ScatterElements(zeros, indices, dy, axis=op.attribute(node, "axis", 0), reduction="add"), None


@gradient("Neg")
def _neg(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    return op.Neg(dy)


@gradient("ReduceMean")
def _mean(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    x = node.inputs[0]
    return op.expand(op.Mul(dy, 1.0 / op.size(x)), op.dims(x))
