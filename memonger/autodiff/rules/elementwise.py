"""Sums, products and other functions of each element, activation functions among them.

Rules of activation functions need the output wherever it tells the slope: most networks keep it anyway.
"""

import math
from collections.abc import Callable, Mapping
from functools import reduce

import numpy as np
import onnx_ir as ir

from memonger.autodiff.over_ranks import is_over_ranks, over_ranks
from memonger.autodiff.registry import Gradient, expansion, gradient
from memonger.autodiff.rules import masks
from memonger.ir.emitter import Emitter
from memonger.ir.values import input_at

_SLOPES: Mapping[str, Callable[[Emitter, ir.Value, ir.Value, ir.Value], ir.Value]] = {
    "Abs": lambda op, x, y, dy: op.Mul(dy, masks.sign(op, x)),
    "Acos": lambda op, x, y, dy: op.Neg(op.Div(dy, op.Sqrt(op.Sub(1.0, op.Mul(x, x))))),
    "Acosh": lambda op, x, y, dy: op.Div(dy, op.Sqrt(op.Sub(op.Mul(x, x), 1.0))),
    "Asin": lambda op, x, y, dy: op.Div(dy, op.Sqrt(op.Sub(1.0, op.Mul(x, x)))),
    "Asinh": lambda op, x, y, dy: op.Div(dy, op.Sqrt(op.Add(op.Mul(x, x), 1.0))),
    "Atan": lambda op, x, y, dy: op.Div(dy, op.Add(op.Mul(x, x), 1.0)),
    "Atanh": lambda op, x, y, dy: op.Div(dy, op.Sub(1.0, op.Mul(x, x))),
    "Cos": lambda op, x, y, dy: op.Neg(op.Mul(dy, op.Sin(x))),
    "Cosh": lambda op, x, y, dy: op.Mul(dy, op.Sinh(x)),
    "Erf": lambda op, x, y, dy: op.Mul(dy, op.Mul(op.Exp(op.Neg(op.Mul(x, x))), 2.0 / math.sqrt(math.pi))),
    "Exp": lambda op, x, y, dy: op.Mul(dy, y),
    "Log": lambda op, x, y, dy: op.Div(dy, x),
    "Neg": lambda op, x, y, dy: op.Neg(dy),
    "Reciprocal": lambda op, x, y, dy: op.Neg(op.Mul(dy, op.Mul(y, y))),
    "Relu": lambda op, x, y, dy: op.Mul(dy, masks.positive(op, y)),
    "Sigmoid": lambda op, x, y, dy: op.Mul(dy, op.Mul(y, op.Sub(1.0, y))),
    "Sin": lambda op, x, y, dy: op.Mul(dy, op.Cos(x)),
    "Sinh": lambda op, x, y, dy: op.Mul(dy, op.Cosh(x)),
    "Softplus": lambda op, x, y, dy: op.Mul(dy, op.Sigmoid(x)),
    "Sqrt": lambda op, x, y, dy: op.Div(op.Mul(dy, 0.5), y),
    "Tan": lambda op, x, y, dy: op.Mul(dy, op.Add(op.Mul(y, y), 1.0)),
    "Tanh": lambda op, x, y, dy: op.Mul(dy, op.Sub(1.0, op.Mul(y, y))),
}
"""The gradient of functions of one number: the emitter, input, output and the output's gradient → the input's."""


@gradient(*_SLOPES)
def _function(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    return _SLOPES[node.op_type](op, op.given(node, 0), node.outputs[0], dy)


@gradient("Add", "Sum")
def _add(op: Emitter, node: ir.Node, dy: ir.Value) -> tuple[Gradient, ...]:
    return (dy,) * len(node.inputs)


@gradient("Sub")
def _sub(op: Emitter, node: ir.Node, dy: ir.Value) -> tuple[Gradient, ...]:
    return dy, op.Neg(op.sum_to(dy, op.dims(node.inputs[1]))) if op.wants(1) else None


@gradient("Mul")
def _mul(op: Emitter, node: ir.Node, dy: ir.Value) -> tuple[Gradient, ...]:
    a, b = node.inputs
    if a is b:
        return op.Mul(dy, op.Mul(a, 2.0)), None
    return op.Mul(dy, b), op.Mul(dy, a)


@gradient("Div")
def _div(op: Emitter, node: ir.Node, dy: ir.Value) -> tuple[Gradient, ...]:
    b, y = node.inputs[1], node.outputs[0]
    da = op.Div(dy, b)
    return da, op.Neg(op.sum_to(op.Mul(da, y), op.dims(b))) if op.wants(1) else None


@gradient("Mod")
def _mod(op: Emitter, node: ir.Node, dy: ir.Value) -> tuple[Gradient, ...]:
    """The quotient is a whole number, found from what Mod left."""
    a, b = node.inputs
    if not op.wants(1):
        return dy, None
    quotient = op.Round(op.Div(op.Sub(a, node.outputs[0]), b))
    return dy, op.Neg(op.sum_to(op.Mul(dy, quotient), op.dims(b)))


@gradient("Pow")
def _pow(op: Emitter, node: ir.Node, dy: ir.Value) -> tuple[Gradient, ...]:
    return _pow_base(op, node, dy) if op.wants(0) else None, _pow_exponent(op, node, dy) if op.wants(1) else None


def _pow_base(op: Emitter, node: ir.Node, dy: ir.Value) -> ir.Value:
    """e * x^(e-1), and 0 where e is 0, whatever x is."""
    x, e = op.given(node, 0), op.given(node, 1)
    content = op.content(e)
    if content is not None and content.size == 1:
        return _pow_constant(op, node, dy, float(content.reshape(())))
    slope = op.Mul(op.Pow(x, op.Sub(e, 1)), op.cast(e, dy.dtype))
    if content is None or not np.all(content):
        slope = op.Where(op.Equal(e, 0), op.constant(0.0, dy.dtype), slope)
    return op.Mul(dy, slope)


def _pow_constant(op: Emitter, node: ir.Node, dy: ir.Value, e: float) -> ir.Value:
    """Pow takes 30 times as long as Mul: what can be written without is."""
    x, y = node.inputs[0], node.outputs[0]
    if e == 0:
        return op.Mul(dy, 0.0)
    if e == 1:
        return dy
    if e == 2:
        return op.Mul(dy, op.Mul(x, 2.0))
    if e == 0.5:
        return op.Div(op.Mul(dy, 0.5), y)
    if e == -1:
        return op.Neg(op.Mul(dy, op.Mul(y, y)))
    if e == -0.5:
        return op.Mul(op.Mul(dy, op.Mul(y, y)), op.Mul(y, -0.5))
    return op.Mul(dy, op.Mul(op.Pow(x, e - 1), e))


def _pow_exponent(op: Emitter, node: ir.Node, dy: ir.Value) -> ir.Value:
    """y * log(x), and 0 where x is 0 and e isn't negative; NaN where x is negative."""
    x, e = node.inputs
    vanishes = op.And(op.Equal(x, 0.0), op.GreaterOrEqual(e, 0))
    return op.Mul(dy, op.Mul(node.outputs[0], op.Log(op.Where(vanishes, op.constant(1.0, dy.dtype), x))))


@gradient("Mean")
def _mean(op: Emitter, node: ir.Node, dy: ir.Value) -> tuple[Gradient, ...]:
    return (op.Mul(dy, 1.0 / len(node.inputs)),) * len(node.inputs)


@gradient("Max", "Min")
def _extremum(op: Emitter, node: ir.Node, dy: ir.Value) -> tuple[Gradient, ...]:
    """The inputs that are the extremum share the gradient evenly, as with torch.maximum."""
    if len(node.inputs) == 1:
        return (dy,)
    if len(node.inputs) > 2:
        ties = [masks.equal(op, op.given(node, k), node.outputs[0]) for k in range(len(node.inputs))]
        share = op.Div(dy, reduce(op.Add, ties))
        return tuple(op.Mul(share, mask) for mask in ties)
    a, b = op.given(node, 0), op.given(node, 1)
    of_a = op.Mul(dy, masks.share_of_greater(op, a, b) if node.op_type == "Max" else masks.share_of_greater(op, b, a))
    return of_a, op.Sub(dy, of_a)


@gradient("Where")
def _where(op: Emitter, node: ir.Node, dy: ir.Value) -> tuple[Gradient, ...]:
    condition = op.given(node, 0)
    of_a = op.Mul(dy, op.cast(condition, dy.dtype)) if op.wants(1) else None
    if not op.wants(2):
        return None, of_a
    return None, of_a, op.Mul(dy, op.cast(op.Not(condition), dy.dtype)) if of_a is None else op.Sub(dy, of_a)


@gradient("Cast", "CastLike", "Identity")
def _same(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    return over_ranks(op, dy) if is_over_ranks(node) else dy  # the driver casts


@gradient("CumSum")
def _cum_sum(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    reverse, exclusive = op.attribute(node, "reverse", 0), op.attribute(node, "exclusive", 0)
    return op.CumSum(dy, node.inputs[1], reverse=1 - reverse, exclusive=exclusive)


@expansion("CumProd")
def _cum_prod(op: Emitter, node: ir.Node) -> tuple[ir.Value, ...] | None:
    """A product for each element of the axis, over those before it: zeros need no case of their own."""
    x, axis = op.given(node, 0), op.content(op.given(node, 1))
    if axis is None:
        return None
    dims, at = op.dims(x), int(axis.reshape(())) % len(op.dims(x))
    shape = [dims[at] if a in (at, at + 1) else 1 for a in range(len(dims) + 1)]
    counted = np.tri(dims[at], k=-1 if op.attribute(node, "exclusive", 0) else 0, dtype=bool)
    counted = counted.T if op.attribute(node, "reverse", 0) else counted
    rows = op.reshape(x, (*dims[:at], 1, *dims[at:]))
    factors = op.Where(op.constant(counted.reshape(shape)), rows, op.constant(1.0, x.dtype))
    return (op.ReduceProd(factors, op.ints(at + 1), keepdims=0),)


@gradient("Clip")
def _clip(op: Emitter, node: ir.Node, dy: ir.Value) -> tuple[Gradient, ...]:
    """Nothing flows where y is a bound, as with torch's hardtanh and relu6: so ``x`` isn't needed."""
    y, given = node.outputs[0], [input_at(node, k) for k in (1, 2)]
    bounds = [op.content(v) for v in given]
    if all(v is None or bound is not None for v, bound in zip(given, bounds, strict=True)):
        mask = masks.inside(op, y, *(None if bound is None else float(bound.reshape(())) for bound in bounds))
        return (dy if mask is None else op.Mul(dy, mask),)
    low, high = given
    above = None if high is None else op.GreaterOrEqual(y, high)
    below = None if low is None else op.LessOrEqual(y, low)
    if above is not None and below is not None:
        below = op.And(below, op.Not(above))
    outside = [v for v in (below, above) if v is not None]
    dx = op.Mul(dy, op.cast(op.Not(reduce(op.Or, outside)), dy.dtype))
    return dx, *(None if v is None else op.Mul(dy, op.cast(v, dy.dtype)) for v in (below, above))


@gradient("Trilu")
def _trilu(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    return op.Trilu(dy, *node.inputs[1:], upper=op.attribute(node, "upper", 1))


@expansion("DequantizeLinear")
def _dequantize(op: Emitter, node: ir.Node) -> tuple[ir.Value, ...] | None:
    """Numbers less the zero point, times the scale: one for all, for each place on an axis, or for blocks there."""
    x, scale, zero = op.given(node, 0), op.given(node, 1), input_at(node, 2)
    kind = node.outputs[0].dtype or scale.dtype
    wide = op.cast(op.cast(x, ir.DataType.FLOAT), kind)
    if zero is not None:
        wide = op.Sub(wide, op.cast(op.cast(_spread(op, node, zero), ir.DataType.FLOAT), kind))
    return (op.Mul(wide, _spread(op, node, op.cast(scale, kind))),)


def _spread(op: Emitter, node: ir.Node, setting: ir.Value) -> ir.Value:
    dims, given, block = op.dims(node.inputs[0]), op.dims(setting), op.attribute(node, "block_size", 0)
    if op.size(setting) == 1 and len(given) < 2:
        return op.reshape(setting, ())
    axis = op.attribute(node, "axis", 1) % len(dims)
    if len(given) == 1:
        return op.reshape(setting, (-1, *[1] * (len(dims) - axis - 1)))
    blocks = op.reshape(setting, (*given[: axis + 1], 1, *given[axis + 1 :]))
    wide = op.expand(blocks, (*given[: axis + 1], block, *given[axis + 1 :]))
    whole = op.reshape(wide, (*given[:axis], given[axis] * block, *given[axis + 1 :]))
    return whole if op.dims(whole) == dims else op.slice(whole, axis, 0, dims[axis])


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
