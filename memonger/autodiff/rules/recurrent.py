"""GRU and RNN, unrolled over their sequences into products and functions of elements; what LSTM shares with them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from memonger.autodiff.registry import Gradient, expansion, gradient
from memonger.autodiff.rules import recurrent_steps
from memonger.autodiff.rules.recurrent_steps import FUNCTIONS, GATES
from memonger.errors import PlanError
from memonger.ir.emitter import Emitter
from memonger.ir.values import input_at

DEFAULTS = (("clip", 0.0), ("layout", 0), ("input_forget", 0))
KNOWN_FUNCTIONS = {"sigmoid": "Sigmoid", "tanh": "Tanh", "relu": "Relu"}


@gradient("GRU", "RNN")
def _unrolled(op: Emitter, node: ir.Node, *_: object) -> Gradient:
    refuse(op, node)
    raise AssertionError("it is unrolled before it is differentiated")


def refuse(op: Emitter, node: ir.Node) -> None:
    """Refuse a recurrent layer that can't be unrolled.

    Raises:
        PlanError: what of it can't be.
    """
    obstacle = _obstacle(op, node)
    if obstacle is not None:
        raise PlanError(f"node '{node.name}' ({node.op_type}): {obstacle}.")


def _obstacle(op: Emitter, node: ir.Node) -> str | None:
    """What keeps the node from being unrolled."""
    activations: list[str] = op.attribute(node, "activations", [])
    unknown = [name for name in activations if name.lower() not in recurrent_steps.KNOWN]
    if unknown:
        return f"activation {unknown[0]} has no gradient rule: {', '.join(sorted(recurrent_steps.KNOWN))} have"
    if node.op_type != "LSTM" and op.attribute(node, "clip", 0.0):
        return "clip has no gradient rule: onnxruntime's kernel clips otherwise than the standard says; leave it out"
    return None


def _is_plain(op: Emitter, node: ir.Node) -> bool:
    """Whether the layer has no option that `recurrent_steps` is for."""
    if any(op.attribute(node, name, default) != default for name, default in DEFAULTS) or input_at(node, 7) is not None:
        return False
    activations: list[str] = op.attribute(node, "activations", [])
    if any(name.lower() not in KNOWN_FUNCTIONS for name in activations):
        return False
    lengths, steps = input_at(node, 4), op.dims(node.inputs[0])[0]
    content = op.content(lengths)
    return lengths is None or (content is not None and bool((content == steps).all()))


@expansion("LSTM")
def _lstm(op: Emitter, node: ir.Node) -> tuple[ir.Value | None, ...] | None:
    """Where it is plain, it is unrolled when it is differentiated: see `lstm`."""
    return None if _obstacle(op, node) or _is_plain(op, node) else recurrent_steps.written(op, node)


@expansion("GRU", "RNN")
def _unroll(op: Emitter, node: ir.Node) -> tuple[ir.Value | None, ...] | None:
    if _obstacle(op, node) is not None:
        return None
    if not _is_plain(op, node):
        return recurrent_steps.written(op, node)
    runs = directions(op, node)
    inputs = [[by_direction(op, node, k, d) for k in range(6)] for d in range(len(runs))]
    layers = [_layer(op, node, inputs[d], d) for d in range(len(runs))]
    steps, batch, _ = op.dims(node.inputs[0])
    hidden = op.dims(node.inputs[2])[2]
    hs, lasts = [], []
    for layer, backwards in zip(layers, runs, strict=True):
        h, outputs = layer.initial, []
        for t in reversed(range(steps)) if backwards else range(steps):
            h = layer.step(op, layer, t, h)
            outputs.append(h)
        hs.append(outputs[::-1] if backwards else outputs)
        lasts.append(h)
    results: list[ir.Value | None] = [None, None]
    if is_used(node, 0):
        results[0] = op.concat([op.reshape(op.concat(h, 0), (steps, 1, batch, hidden)) for h in hs], 1)
    if is_used(node, 1):
        results[1] = op.concat([op.reshape(h, (1, batch, hidden)) for h in lasts], 0)
    return tuple(results[: len(node.outputs)])


@dataclass(frozen=True, slots=True)
class _RecurrentLayer:
    """One direction of a recurrent layer.

    Attributes:
        inputs: For each part of the gates, its value at each step before the state is added: ``[N, width]``.
        recurrent: The weight of the state for each part: ``[width, H]``.
        bias: What is added to the state's product in the last part, if not added to the inputs already.
        functions: Names of the activations.
        initial: The state before the first step: ``[N, H]``.
        step: From the state before a step to that after it.
    """

    inputs: tuple[Sequence[ir.Value], ...]
    recurrent: tuple[ir.Value, ...]
    bias: ir.Value | None
    functions: tuple[str, ...]
    initial: ir.Value
    step: Callable[[Emitter, "_RecurrentLayer", int, ir.Value], ir.Value]


def _layer(op: Emitter, node: ir.Node, inputs: Sequence[ir.Value | None], d: int) -> _RecurrentLayer:
    """``inputs`` are the node's, those of this direction alone; None where it shares them or has none."""
    kind, x, (w, r) = node.op_type, op.given(node, 0), weights(op, node, d)
    steps, batch, width = op.dims(x)
    (_, hidden), gates = op.dims(r), GATES[kind]
    reset_after = bool(op.attribute(node, "linear_before_reset", 0))
    parts = [2 * hidden, hidden] if kind == "GRU" else [gates * hidden]
    bias: Sequence[ir.Value] | None = None
    rest: ir.Value | None = None
    if inputs[3] is not None:
        of_x, of_h = op.split(inputs[3], [gates * hidden] * 2, 0)
        if kind == "GRU" and reset_after:
            (zr, n), (h_zr, rest) = op.split(of_x, parts, 0), op.split(of_h, parts, 0)
            bias = [op.Add(zr, h_zr), n]
        else:
            bias = op.split(op.Add(of_x, of_h), parts, 0)
    rows = op.reshape(x, (steps * batch, width))
    products = [
        op.Gemm(rows, weight, *([bias[k]] if bias else []), transB=1) for k, weight in enumerate(op.split(w, parts, 0))
    ]
    return _RecurrentLayer(
        inputs=tuple(op.split(product, [batch] * steps, 0) for product in products),
        recurrent=tuple(op.split(r, parts, 0)),
        bias=rest,
        functions=functions(op, node, d),
        initial=inputs[5] if inputs[5] is not None else op.constant([[0.0] * hidden] * batch, x.dtype),
        step={"GRU": _reset_after_step if reset_after else _gru_step, "RNN": _rnn_step}[kind],
    )


def directions(op: Emitter, node: ir.Node) -> list[bool]:
    """For each direction of the layer whether it goes backwards through time."""
    direction = op.attribute(node, "direction", "forward")
    return {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]


def functions(op: Emitter, node: ir.Node, d: int) -> tuple[str, ...]:
    """The names of direction ``d``'s activations."""
    default = FUNCTIONS[node.op_type]
    given: list[str] = op.attribute(node, "activations", [])
    if not given:
        return default
    return tuple(KNOWN_FUNCTIONS[name.lower()] for name in given[d * len(default) : (d + 1) * len(default)])


def _gru_step(op: Emitter, layer: _RecurrentLayer, t: int, h: ir.Value) -> ir.Value:
    """Gates in the order z, r, h; the reset gate before the product with the state."""
    z, r = _gru_gates(op, layer, t, h)
    n = op.Gemm(op.Mul(r, h), layer.recurrent[1], layer.inputs[1][t], transB=1)
    return _mixed(op, layer, z, n, h)


def _reset_after_step(op: Emitter, layer: _RecurrentLayer, t: int, h: ir.Value) -> ir.Value:
    """The reset gate after the product, as PyTorch has it."""
    z, r = _gru_gates(op, layer, t, h)
    product = op.Gemm(h, layer.recurrent[1], *([layer.bias] if layer.bias is not None else []), transB=1)
    return _mixed(op, layer, z, op.Add(layer.inputs[1][t], op.Mul(r, product)), h)


def _gru_gates(op: Emitter, layer: _RecurrentLayer, t: int, h: ir.Value) -> tuple[ir.Value, ...]:
    gates = op.Gemm(h, layer.recurrent[0], layer.inputs[0][t], transB=1)
    return op.split(op.emit(layer.functions[0], gates), [op.dims(h)[1]] * 2, 1)


def _mixed(op: Emitter, layer: _RecurrentLayer, z: ir.Value, n: ir.Value, h: ir.Value) -> ir.Value:
    candidate = op.emit(layer.functions[1], n)
    return op.Add(candidate, op.Mul(z, op.Sub(h, candidate)))


def _rnn_step(op: Emitter, layer: _RecurrentLayer, t: int, h: ir.Value) -> ir.Value:
    product = op.Gemm(h, layer.recurrent[0], layer.inputs[0][t], transB=1)
    return op.emit(layer.functions[0], product)


def is_used(node: ir.Node, index: int) -> bool:
    """Whether anything reads an output of the node."""
    return index < len(node.outputs) and (bool(node.outputs[index].uses()) or node.outputs[index].is_graph_output())


def by_direction(op: Emitter, node: ir.Node, index: int, d: int) -> ir.Value | None:
    """What direction ``d`` has of an input with its directions along the first axis; a view where there is one."""
    return None if index in (0, 4) else recurrent_steps.of_direction(op, input_at(node, index), d)


def weights(op: Emitter, node: ir.Node, d: int) -> tuple[ir.Value, ir.Value]:
    """W and R of direction ``d``."""
    w, r = by_direction(op, node, 1, d), by_direction(op, node, 2, d)
    if w is None or r is None:
        raise PlanError(f"node '{node.name}' ({node.op_type}) lacks a weight: it can't be run.")
    return w, r
