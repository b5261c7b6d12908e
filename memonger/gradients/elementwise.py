"""Sums, products and other functions of each element."""

import onnx_ir as ir

from memonger.gradients.emitter import Emitter
from memonger.gradients.registry import Gradient, gradient, without_gradient

without_gradient(
    [
        "And",
        "ArgMax",
        "ArgMin",
        "BitShift",
        "BitwiseAnd",
        "BitwiseNot",
        "BitwiseOr",
        "BitwiseXor",
        "Ceil",
        "ConstantOfShape",
        "Equal",
        "EyeLike",
        "Floor",
        "Greater",
        "GreaterOrEqual",
        "IsInf",
        "IsNaN",
        "Less",
        "LessOrEqual",
        "NonZero",
        "Not",
        "OneHot",
        "Or",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
        "Range",
        "Round",
        "Shape",
        "Sign",
        "Size",
        "Xor",
    ]
)


@gradient("Add", "Sum")
def _add(op: Emitter, node: ir.Node, dy: ir.Value) -> tuple[Gradient, ...]:
    return (dy,) * len(node.inputs)


@gradient("Sub")
def _sub(op: Emitter, node: ir.Node, dy: ir.Value) -> tuple[Gradient, ...]:
    return dy, op.Neg(dy)


@gradient("Mul")
def _mul(op: Emitter, node: ir.Node, dy: ir.Value) -> tuple[Gradient, ...]:
    a, b = node.inputs
    return op.Mul(dy, b), op.Mul(dy, a)


@gradient("Relu")
def _relu(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    y = node.outputs[0]
    return op.Mul(dy, op.cast(op.Greater(y, 0.0), dy.dtype))
