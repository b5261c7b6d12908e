"""Activation functions; those with a short formula stand in `elementwise`.

The rules need the output wherever it tells the slope: most networks keep it anyway.
"""

import math

import onnx_ir as ir

from memonger.autodiff.registry import Gradient, gradient
from memonger.autodiff.rules import masks
from memonger.ir.emitter import Emitter


@gradient("LeakyRelu")
def _leaky_relu(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    alpha = op.attribute(node, "alpha", 0.01)
    y = node.outputs[0]
    if 0 <= alpha <= 1 and y.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        slope = op.Clip(op.Mul(y, masks.STEEP), op.constant(alpha, y.dtype), op.constant(1.0, y.dtype))
        return op.Mul(dy, slope)
    return op.Where(op.Greater(node.inputs[0], 0.0), dy, op.Mul(dy, alpha))


@gradient("PRelu")
def _prelu(op: Emitter, node: ir.Node, dy: ir.Value) -> tuple[Gradient, ...]:
    x, slope = node.inputs
    return op.Where(op.Greater(x, 0.0), dy, op.Mul(dy, slope)), op.Mul(dy, op.Min(x, 0.0))


@gradient("ThresholdedRelu")
def _thresholded_relu(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    alpha = op.attribute(node, "alpha", 1.0)
    above = node.outputs[0] if alpha >= 0 else op.Sub(node.inputs[0], alpha)
    return op.Mul(dy, masks.positive(op, above))


@gradient("Elu")
def _elu(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    """alpha * e^x is y + alpha below 0."""
    alpha = op.attribute(node, "alpha", 1.0)
    x, y = node.inputs[0], node.outputs[0]
    if alpha == 1:
        return op.Mul(dy, op.Add(op.Min(y, 0.0), 1.0))
    return op.Where(op.Greater(x, 0.0), dy, op.Mul(dy, op.Add(y, alpha)))


@gradient("Celu")
def _celu(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    """e^(x / alpha) is y / alpha + 1 below 0."""
    below = op.Min(node.outputs[0], 0.0)
    return op.Mul(dy, op.Add(op.Mul(below, 1.0 / op.attribute(node, "alpha", 1.0)), 1.0))


@gradient("Selu")
def _selu(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    """gamma * alpha * e^x is y + gamma * alpha below 0."""
    alpha = op.attribute(node, "alpha", 1.67326319217681884765625)
    gamma = op.attribute(node, "gamma", 1.05070102214813232421875)
    x, y = node.inputs[0], node.outputs[0]
    slope = op.Where(op.Greater(x, 0.0), op.constant(gamma, y.dtype), op.Add(y, gamma * alpha))
    return op.Mul(dy, slope)


@gradient("HardSigmoid")
def _hard_sigmoid(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    mask = masks.inside(op, node.outputs[0], 0.0, 1.0)
    return op.Mul(op.Mul(dy, mask), op.attribute(node, "alpha", 0.2))


@gradient("HardSwish")
def _hard_swish(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    """x / 3 + ½ is 2h - ½ where h, the clipped x / 6 + ½, is between 0 and 1; beyond, the slope is h."""
    h = op.HardSigmoid(node.inputs[0], alpha=1.0 / 6, beta=0.5)
    more = op.Mul(op.Sub(h, 0.5), masks.inside(op, h, 0.0, 1.0))
    return op.Mul(dy, op.Add(h, more))


@gradient("Softsign")
def _softsign(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    """1 / (1 + |x|) is 1 - |y|."""
    root = op.Sub(1.0, op.Abs(node.outputs[0]))
    return op.Mul(dy, op.Mul(root, root))


@gradient("Mish")
def _mish(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    """With n = e^x (e^x + 2), tanh(softplus(x)) is n / (n + 2); for x > 20 it is 1, and e^x would grow too big."""
    x = node.inputs[0]
    e = op.Exp(op.Min(x, 20.0))
    n = op.Mul(e, op.Add(e, 2.0))
    t = op.Div(n, op.Add(n, 2.0))
    inner = op.Mul(op.Sigmoid(x), op.Sub(1.0, op.Mul(t, t)))
    return op.Mul(dy, op.Add(t, op.Mul(x, inner)))


@gradient("Swish")
def _swish(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    """The slope is s + alpha * y * (1 - s), where s is the sigmoid."""
    alpha = op.attribute(node, "alpha", 1.0)
    x, y = node.inputs[0], node.outputs[0]
    s = op.Sigmoid(x if alpha == 1 else op.Mul(x, alpha))
    rest = op.Mul(y if alpha == 1 else op.Mul(y, alpha), op.Sub(1.0, s))
    return op.Mul(dy, op.Add(s, rest))


@gradient("Gelu")
def _gelu(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    rule = _gelu_tanh if op.attribute(node, "approximate", "none") == "tanh" else _gelu_exact
    return rule(op, node, dy)


def _gelu_exact(op: Emitter, node: ir.Node, dy: ir.Value) -> ir.Value:
    """Φ(x) + x φ(x), where with u = x / √2: Φ = (1 + erf(u)) / 2 and x φ = u e^(-u²) / √π."""
    u = op.Mul(node.inputs[0], math.sqrt(0.5))
    below = op.Mul(op.Add(op.Erf(u), 1.0), 0.5)
    density = op.Mul(op.Exp(op.Neg(op.Mul(u, u))), 1.0 / math.sqrt(math.pi))
    return op.Mul(dy, op.Add(below, op.Mul(u, density)))


def _gelu_tanh(op: Emitter, node: ir.Node, dy: ir.Value) -> ir.Value:
    """(1 + tanh(z)) / 2 is s = sigmoid(2z), and 2z is ax + bx³ / 3: the slope is s + y (1 - s) (a + bx²)."""
    a = 2.0 * math.sqrt(2.0 / math.pi)
    b = 3.0 * 0.044715 * a
    x, y = node.inputs[0], node.outputs[0]
    square = op.Mul(x, x)
    s = op.Sigmoid(op.Mul(x, op.Add(op.Mul(square, b / 3.0), a)))
    inner = op.Mul(op.Sub(1.0, s), op.Add(op.Mul(square, b), a))
    return op.Mul(dy, op.Add(s, op.Mul(y, inner)))
