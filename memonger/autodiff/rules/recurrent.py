"""LSTM, GRU and RNN, unrolled over their sequences into products and functions of each element."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from memonger.autodiff.registry import Gradient, expansion, gradient
from memonger.errors import PlanError
from memonger.model.emitter import Emitter

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
FUNCTIONS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}
STATES = {"LSTM": 2, "GRU": 1, "RNN": 1}
KNOWN_FUNCTIONS = {"sigmoid": "Sigmoid", "tanh": "Tanh", "relu": "Relu"}

States = tuple[ir.Value, ...]
"""What a step hands to the next: h, and for an LSTM c."""


@gradient("LSTM", "GRU", "RNN")
def _refuse(op: Emitter, node: ir.Node, *_: object) -> Gradient:
    raise PlanError(f"node '{node.name}' ({node.op_type}): {_obstacle(op, node)} has no gradient rule.")


def _obstacle(op: Emitter, node: ir.Node) -> str | None:
    """What keeps the node from being unrolled."""
    for name, default in (("clip", 0.0), ("layout", 0), ("input_forget", 0)):
        if op.attribute(node, name, default) != default:
            return f"{name}={op.attribute(node, name, default)} (only {default} has one)"
    activations: list[str] = op.attribute(node, "activations", [])
    unknown = [f for f in activations if f.lower() not in KNOWN_FUNCTIONS]
    if unknown:
        return f"activation {unknown[0]} (only {', '.join(KNOWN_FUNCTIONS.values())} have one)"
    if _input(node, 7) is not None:
        return "a peephole (input P; leave it out)"
    lengths, steps = _input(node, 4), op.dims(node.inputs[0])[0]
    content = op.content(lengths)
    if lengths is not None and (content is None or (content != steps).any()):
        return f"sequence_lens that isn't {steps} for every sequence (leave it out)"
    return None


@expansion("LSTM", "GRU", "RNN")
def _unroll(op: Emitter, node: ir.Node) -> tuple[ir.Value | None, ...] | None:
    if _obstacle(op, node) is not None:
        return None
    direction = op.attribute(node, "direction", "forward")
    ways = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]
    inputs = [None if i in (0, 4, 7) else _by_direction(op, value) for i, value in enumerate(node.inputs)]
    inputs += [None] * (7 - len(inputs))
    layers = [_layer(op, node, [i[d] if i else None for i in inputs], d) for d in range(len(ways))]
    steps, batch, _ = op.dims(node.inputs[0])
    hidden = op.dims(node.inputs[2])[2]
    hs, lasts = [], []
    for layer, backwards in zip(layers, ways, strict=True):
        states, outputs = layer.initial, []
        for t in reversed(range(steps)) if backwards else range(steps):
            states = layer.step(op, layer, t, states)
            outputs.append(states[0])
        hs.append(outputs[::-1] if backwards else outputs)
        lasts.append(states)
    results: list[ir.Value | None] = [None]
    if _is_used(node, 0):
        sequences = [op.reshape(_concat(op, h, 0), (steps, 1, batch, hidden)) for h in hs]
        results = [_concat(op, sequences, 1)]
    for k in range(STATES[node.op_type]):
        last = [op.reshape(states[k], (1, batch, hidden)) for states in lasts]
        results.append(_concat(op, last, 0) if _is_used(node, k + 1) else None)
    return tuple(results[: len(node.outputs)])


@dataclass(frozen=True, slots=True)
class _Layer:
    """One direction of a recurrent layer.

    Attributes:
        inputs: For each part of the gates, its value at each step before the state is added: ``[N, width]``.
        recurrent: The weight of the state for each part: ``[width, H]``.
        bias: What is added to the state's product in the last part, if not added to the inputs already.
        functions: Names of the activations.
        initial: The states before the first step: ``[N, H]``.
        step: From the states before a step to those after it.
    """

    inputs: tuple[Sequence[ir.Value], ...]
    recurrent: tuple[ir.Value, ...]
    bias: ir.Value | None
    functions: tuple[str, ...]
    initial: States
    step: Callable[[Emitter, "_Layer", int, States], States]


def _layer(op: Emitter, node: ir.Node, inputs: Sequence[ir.Value | None], d: int) -> _Layer:
    """``inputs`` are the node's, those of this direction alone; None where it shares them or has none."""
    kind, x, w, r = node.op_type, op.given(node, 0), inputs[1], inputs[2]
    steps, batch, width = op.dims(x)
    (_, hidden), gates = op.dims(r), GATES[kind]
    reset_after = bool(op.attribute(node, "linear_before_reset", 0))
    parts = [2 * hidden, hidden] if kind == "GRU" else [gates * hidden]
    bias: list[ir.Value] | None = None
    rest: ir.Value | None = None
    if inputs[3] is not None:
        of_x, of_h = _split(op, inputs[3], [gates * hidden] * 2, 0)
        if kind == "GRU" and reset_after:
            (zr, n), (h_zr, rest) = _split(op, of_x, parts, 0), _split(op, of_h, parts, 0)
            bias = [op.Add(zr, h_zr), n]
        else:
            bias = _split(op, op.Add(of_x, of_h), parts, 0)
    rows = op.reshape(x, (steps * batch, width))
    products = [
        op.Gemm(rows, weight, *([bias[k]] if bias else []), transB=1)
        for k, weight in enumerate(_split(op, w, parts, 0))
    ]
    return _Layer(
        inputs=tuple(_split(op, product, [batch] * steps, 0) for product in products),
        recurrent=tuple(_split(op, r, parts, 0)),
        bias=rest,
        functions=_functions(op, node, d),
        initial=_initial(op, inputs[5 : 5 + STATES[kind]], x, batch, hidden),
        step={"LSTM": _lstm_step, "GRU": _reset_after_step if reset_after else _gru_step, "RNN": _rnn_step}[kind],
    )


def _functions(op: Emitter, node: ir.Node, d: int) -> tuple[str, ...]:
    default = FUNCTIONS[node.op_type]
    given: list[str] = op.attribute(node, "activations", [])
    if not given:
        return default
    return tuple(KNOWN_FUNCTIONS[name.lower()] for name in given[d * len(default) : (d + 1) * len(default)])


def _initial(op: Emitter, given: Sequence[ir.Value | None], x: ir.Value, batch: int, hidden: int) -> States:
    """What is given, else zeros."""
    dtype = x.dtype or ir.DataType.FLOAT
    return tuple(op.constant([[0.0] * hidden] * batch, dtype) if value is None else value for value in given)


def _lstm_step(op: Emitter, layer: _Layer, t: int, states: States) -> States:
    """Gates in the order i, o, f, c."""
    h, c = states
    hidden = op.dims(h)[1]
    f, g, k = layer.functions
    gates = op.Gemm(h, layer.recurrent[0], layer.inputs[0][t], transB=1)
    gating, candidate = _split(op, gates, [3 * hidden, hidden], 1)
    i, o, forget = _split(op, op.emit(f, gating), [hidden] * 3, 1)
    c = op.Add(op.Mul(forget, c), op.Mul(i, op.emit(g, candidate)))
    return op.Mul(o, op.emit(k, c)), c


def _gru_step(op: Emitter, layer: _Layer, t: int, states: States) -> States:
    """Gates in the order z, r, h; the reset gate before the product with the state."""
    (h,) = states
    z, r = _gru_gates(op, layer, t, h)
    n = op.Gemm(op.Mul(r, h), layer.recurrent[1], layer.inputs[1][t], transB=1)
    return (_mixed(op, layer, z, n, h),)


def _reset_after_step(op: Emitter, layer: _Layer, t: int, states: States) -> States:
    """The reset gate after the product, as PyTorch has it."""
    (h,) = states
    z, r = _gru_gates(op, layer, t, h)
    product = op.Gemm(h, layer.recurrent[1], *([layer.bias] if layer.bias is not None else []), transB=1)
    return (_mixed(op, layer, z, op.Add(layer.inputs[1][t], op.Mul(r, product)), h),)


def _gru_gates(op: Emitter, layer: _Layer, t: int, h: ir.Value) -> list[ir.Value]:
    gates = op.Gemm(h, layer.recurrent[0], layer.inputs[0][t], transB=1)
    return _split(op, op.emit(layer.functions[0], gates), [op.dims(h)[1]] * 2, 1)


def _mixed(op: Emitter, layer: _Layer, z: ir.Value, n: ir.Value, h: ir.Value) -> ir.Value:
    candidate = op.emit(layer.functions[1], n)
    return op.Add(candidate, op.Mul(z, op.Sub(h, candidate)))


def _rnn_step(op: Emitter, layer: _Layer, t: int, states: States) -> States:
    product = op.Gemm(states[0], layer.recurrent[0], layer.inputs[0][t], transB=1)
    return (op.emit(layer.functions[0], product),)


def _input(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _is_used(node: ir.Node, index: int) -> bool:
    return index < len(node.outputs) and (bool(node.outputs[index].uses()) or node.outputs[index].is_graph_output())


def _by_direction(op: Emitter, x: ir.Value | None) -> list[ir.Value] | None:
    """``x[0], x[1]``; a view where there is one direction."""
    if x is None:
        return None
    directions, *rest = op.dims(x)
    return [op.reshape(part, rest) for part in _split(op, x, [1] * directions, 0)]


def _split(op: Emitter, x: ir.Value | None, sizes: Sequence[int], axis: int) -> list[ir.Value]:
    if x is None:
        raise PlanError("a recurrent layer lacks a weight: it can't be run.")
    return [x] if len(sizes) == 1 else list(op.several("Split", len(sizes), x, op.ints(*sizes), axis=axis))


def _concat(op: Emitter, parts: Sequence[ir.Value], axis: int) -> ir.Value:
    return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=axis)
