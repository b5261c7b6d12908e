"""LSTM, GRU and RNN with options that few networks have, a step at a time.

Peepholes, sequences of different lengths, clipping, coupled gates, batches first and other activations. Layers without
them are written in fewer and faster nodes by `recurrent` and `lstm`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import onnx_ir as ir

from memonger.ir.emitter import Emitter
from memonger.ir.values import input_at

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
FUNCTIONS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}
PLAIN = {name.lower(): name for name in ("Sigmoid", "Tanh", "Relu", "Softsign", "Softplus")}
WITH_NUMBERS = {"leakyrelu": (0.01, None), "thresholdedrelu": (1.0, None), "elu": (1.0, None),
                "hardsigmoid": (0.2, 0.5), "affine": (1.0, 0.0), "scaledtanh": (1.0, 1.0)}  # fmt: skip
"""Functions with an alpha, and a beta where it isn't None; their defaults."""

KNOWN = frozenset({*PLAIN, *WITH_NUMBERS})

Function = Callable[[ir.Value], ir.Value]
State = tuple[ir.Value, ir.Value | None]


@dataclass(frozen=True, slots=True)
class _RecurrentRun:
    """One direction: its output at each step, its last state, and an LSTM's last cell, each ``[N, H]``."""

    outputs: Sequence[ir.Value]
    last: ir.Value
    cell: ir.Value | None


def written(op: Emitter, node: ir.Node) -> tuple[ir.Value | None, ...]:
    """The layer's outputs."""
    batch_first = bool(op.attribute(node, "layout", 0))
    given = [input_at(node, i) for i in range(8)]
    if batch_first:
        for i in (0, 5, 6):
            part = given[i]
            given[i] = None if part is None else op.transpose(part, (1, 0, 2))
    kind = op.attribute(node, "direction", "forward")
    ways = {"forward": [False], "reverse": [True]}.get(kind, [False, True])
    runs = [_run(op, node, given, d, back) for d, back in enumerate(ways)]
    steps, (batch, hidden) = len(runs[0].outputs), op.dims(runs[0].last)
    y = op.concat([op.reshape(op.concat(run.outputs, 0), (steps, 1, batch, hidden)) for run in runs], 1)
    lasts = [op.concat([op.reshape(run.last, (1, batch, hidden)) for run in runs], 0)]
    cells = [op.reshape(run.cell, (1, batch, hidden)) for run in runs if run.cell is not None]
    lasts += [op.concat(cells, 0)] if cells else []
    if batch_first:
        y = op.transpose(y, (2, 0, 1, 3))
        lasts = [op.transpose(v, (1, 0, 2)) for v in lasts]
    return (y, *lasts)[: len(node.outputs)]


def _run(op: Emitter, node: ir.Node, given: Sequence[ir.Value | None], d: int, backwards: bool) -> _RecurrentRun:
    """Direction ``d``, run."""
    x, lengths, kind = op.given(node, 0) if given[0] is None else given[0], given[4], node.op_type
    (steps, batch, width), hidden = op.dims(x), op.dims(given[2])[2]
    w, r, b, h, c, p = (of_direction(op, given[i], d) for i in (1, 2, 3, 5, 6, 7))
    count = GATES[kind] * hidden
    of_x, of_h = (None, None) if b is None else op.split(b, [count] * 2, 0)
    product = op.MatMul(op.reshape(x, (steps * batch, width)), op.transpose(_sure(w), (1, 0)))
    rows = op.split(product if of_x is None else op.Add(product, of_x), [batch] * steps, 0)
    zeros = op.constant([[0.0] * hidden] * batch, x.dtype)
    state: State = (zeros if h is None else h, (zeros if c is None else c) if kind == "LSTM" else None)
    step = {"LSTM": _lstm, "GRU": _gru, "RNN": _rnn}[kind]
    settings = op, node, _functions(op, node, d), op.transpose(_sure(r), (1, 0)), of_h, p
    outputs: list[ir.Value] = []
    for t in reversed(range(steps)) if backwards else range(steps):
        after, made = step(*settings, rows[t], state), state
        if lengths is None:
            state = after
        else:  # past a sequence's end its state stays, and its output is zero
            runs = op.reshape(op.Less(op.constant(t, lengths.dtype), lengths), (batch, 1))
            kept = [None if n is None or o is None else op.Where(runs, n, o) for n, o in zip(after, made, strict=True)]
            state = _sure(kept[0]), kept[1]
        outputs.append(after[0] if lengths is None else op.Where(runs, after[0], zeros))
    return _RecurrentRun(outputs[::-1] if backwards else outputs, *state)


def _sure(value: ir.Value | None) -> ir.Value:
    assert value is not None
    return value


def of_direction(op: Emitter, x: ir.Value | None, d: int) -> ir.Value | None:
    """What direction ``d`` has of a value with its directions along the first axis; a view where there is one."""
    if x is None:
        return None
    count, *rest = op.dims(x)
    return op.reshape(x if count == 1 else op.slice(x, 0, d, d + 1), rest)


def _lstm(
    op: Emitter, node: ir.Node, functions: Sequence[Function], r: ir.Value, bias: ir.Value | None, p: ir.Value | None,
    row: ir.Value, state: State,
) -> State:  # fmt: skip
    h, c = state[0], _sure(state[1])
    hidden = op.dims(h)[1]
    total = op.Add(row, _product(op, h, r, bias))
    i, o, f, g = op.split(total, [hidden] * 4, 1)
    peep = op.split(p, [hidden] * 3, 0) if p is not None else None
    bound = partial(_clipped, op, node)
    i = functions[0](bound(i if peep is None else op.Add(i, op.Mul(peep[0], c))))
    f = functions[0](bound(f if peep is None else op.Add(f, op.Mul(peep[2], c))))
    if op.attribute(node, "input_forget", 0):
        f = op.Sub(1.0, i)
    new = op.Add(op.Mul(f, c), op.Mul(i, functions[1](bound(g))))
    o = functions[0](bound(o if peep is None else op.Add(o, op.Mul(peep[1], new))))
    return op.Mul(o, functions[2](new)), new


def _gru(
    op: Emitter, node: ir.Node, functions: Sequence[Function], r: ir.Value, bias: ir.Value | None, _: object,
    row: ir.Value, state: State,
) -> State:  # fmt: skip
    h, bound = state[0], partial(_clipped, op, node)
    hidden = op.dims(h)[1]
    sizes = [2 * hidden, hidden]
    (of_gates, of_new), (x_gates, x_new) = op.split(r, sizes, 1), op.split(row, sizes, 1)
    b_gates, b_new = (None, None) if bias is None else op.split(bias, sizes, 0)
    gates = functions[0](bound(op.Add(x_gates, _product(op, h, of_gates, b_gates))))
    z, reset = op.split(gates, [hidden] * 2, 1)
    if op.attribute(node, "linear_before_reset", 0):
        part = op.Mul(reset, _product(op, h, of_new, b_new))
    else:
        part = _product(op, op.Mul(reset, h), of_new, b_new)
    new = functions[1](bound(op.Add(x_new, part)))
    return op.Add(new, op.Mul(z, op.Sub(h, new))), None


def _rnn(
    op: Emitter, node: ir.Node, functions: Sequence[Function], r: ir.Value, bias: ir.Value | None, _: object,
    row: ir.Value, state: State,
) -> State:  # fmt: skip
    return functions[0](_clipped(op, node, op.Add(row, _product(op, state[0], r, bias)))), None


def _product(op: Emitter, h: ir.Value, r: ir.Value, bias: ir.Value | None) -> ir.Value:
    made = op.MatMul(h, r)
    return made if bias is None else op.Add(made, bias)


def _clipped(op: Emitter, node: ir.Node, x: ir.Value) -> ir.Value:
    bound = op.attribute(node, "clip", 0.0)
    return op.Clip(x, op.constant(-bound, x.dtype), op.constant(bound, x.dtype)) if bound else x


def _functions(op: Emitter, node: ir.Node, d: int) -> list[Function]:
    """Direction ``d``'s activations, each with its numbers: those are listed for the functions that have any."""
    default = FUNCTIONS[node.op_type]
    given: list[str] = op.attribute(node, "activations", [])
    names = given or [*default, *default]
    alphas: list[float] = op.attribute(node, "activation_alpha", [])
    betas: list[float] = op.attribute(node, "activation_beta", [])
    numbers = iter(alphas), iter(betas)
    made: list[Function] = []
    for name in names:
        key = name.lower()
        defaults = WITH_NUMBERS.get(key, (None, None))
        alpha, beta = (None if n is None else next(left, n) for n, left in zip(defaults, numbers, strict=True))
        made.append(partial(_function, op, key, alpha, beta))
    return made[d * len(default) : (d + 1) * len(default)]


def _function(op: Emitter, key: str, alpha: float | None, beta: float | None, x: ir.Value) -> ir.Value:
    if key in PLAIN:
        return op.emit(PLAIN[key], x)
    if key == "affine":
        return op.Add(op.Mul(x, alpha), beta)
    if key == "scaledtanh":
        return op.Mul(op.Tanh(op.Mul(x, beta)), alpha)
    names = {"leakyrelu": "LeakyRelu", "thresholdedrelu": "ThresholdedRelu", "elu": "Elu", "hardsigmoid": "HardSigmoid"}
    return op.emit(names[key], x, alpha=alpha, beta=beta)
