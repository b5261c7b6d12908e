"""LSTM, forward and backward unrolled over its sequence.

States and gates are ``[width, N]``, not ``[N, width]``: a product of few samples then has the weight on its left, where
onnxruntime's CPU reads it as it stands. On its right the weight is packed anew at every step, which takes half as long
as the product of 16 samples. A step of the backward pass has six nodes: what it multiplies gradients by is computed for
`BLOCK` steps at once, and the gradients of weights and input are products of all steps.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import onnx_ir as ir

from memonger.autodiff.registry import Gradient, gradient
from memonger.autodiff.rules import masks
from memonger.autodiff.rules.movement import ranges
from memonger.autodiff.rules.recurrent import by_direction, directions, functions, is_used, refuse, weights
from memonger.ir.emitter import Emitter
from memonger.ir.rewrite import insert_for

BLOCK = 16  # steps whose factors are there at a time

GATES = ("i", "o", "f", "g")
"""In the order of the standard's weights."""

FACTORS = {"i": "g", "o": "c_squashed", "f": "c_before", "g": "i", "c_squashed": "o"}
"""What a part of a step is multiplied by on its way to c or, those of o and c_squashed, to h."""


@dataclass(frozen=True, slots=True)
class _TimeStep:
    """What the backward pass needs of a step, each ``[H, N]``: the states before it, its gates and tanh(c).

    Gates are called as in the standard: i, o, f, and g where that has c. ``h`` is the state after the step.
    """

    h_before: ir.Value
    c_before: ir.Value
    i: ir.Value
    o: ir.Value
    f: ir.Value
    g: ir.Value
    c_squashed: ir.Value
    h: ir.Value


@dataclass(frozen=True, slots=True)
class _LstmRun:
    """One direction of a layer, run.

    Attributes:
        rows: The input, ``[T·N, D]``.
        weights: W and R: ``[4H, D]`` and ``[4H, H]``, with their gates in the order ``gates``.
        gates: An order of `GATES`.
        functions: The name of what a part of a step is a value of.
        steps: In the order of time, which a backwards direction goes through from its end.
        backwards: Whether it does.
        c: The last state.
    """

    rows: ir.Value
    weights: tuple[ir.Value, ir.Value]
    gates: tuple[str, ...]
    functions: Mapping[str, str]
    steps: Sequence[_TimeStep]
    backwards: bool
    c: ir.Value

    @property
    def in_order(self) -> Sequence[_TimeStep]:
        """The steps in the order they ran."""
        return self.steps[::-1] if self.backwards else self.steps


@dataclass(frozen=True, slots=True)
class _Gradients:
    """The gradients of one direction's inputs; None where none is wanted."""

    x: Gradient = None
    w: Gradient = None
    r: Gradient = None
    b: Gradient = None
    h: Gradient = None
    c: Gradient = None


@gradient("LSTM")
def _lstm(op: Emitter, node: ir.Node, dy: Gradient, dh: Gradient = None, dc: Gradient = None) -> tuple[Gradient, ...]:
    refuse(op, node)
    backward_nodes, op.nodes = op.nodes, []
    with op.at(str(node.name), op.wanted):
        runs = [_run(op, node, d) for d in range(len(directions(op, node)))]
        results = _outputs(op, node, runs)
    forward_nodes, op.nodes = op.nodes, backward_nodes
    insert_for(node, forward_nodes, results)
    found = [
        _backward(op, run, *given)
        for run, *given in zip(
            runs, *(_by_run(op, part, axis, len(runs)) for part, axis in ((dy, 1), (dh, 0), (dc, 0))), strict=True
        )
    ]
    return _joined(op, node, found)


def _by_run(op: Emitter, part: Gradient, axis: int, runs: int) -> Sequence[Gradient]:
    """The gradients of each direction's part of an output, without that axis."""
    if part is None:
        return [None] * runs
    dims = op.dims(part)
    return [op.reshape(x, dims[:axis] + dims[axis + 1 :]) for x in op.split(part, [1] * runs, axis)]


def _run(op: Emitter, node: ir.Node, d: int) -> _LstmRun:
    """Emit the steps of direction ``d``."""
    x, given = op.given(node, 0), [by_direction(op, node, k, d) for k in range(7)]
    (length, batch, width), hidden = op.dims(x), op.dims(node.inputs[2])[2]
    rows = op.reshape(x, (length * batch, width))
    stored, order = _stored(op, weights(op, node, d))
    biases = (None, None) if given[3] is None else _bias(op, given[3], hidden)
    of_x, of_h = (_gates_and_candidate(op, weight, order) for weight in stored)
    inputs = [
        op.split(op.Gemm(weight, rows, *([] if bias is None else [bias]), transB=1), [batch] * length, 1)
        for weight, bias in zip(of_x, biases, strict=True)
    ]
    of_gates, of_candidate, of_c = functions(op, node, d)
    zeros = op.constant([[0.0] * batch] * hidden, x.dtype)
    h, c = (zeros if state is None else _turned(op, state) for state in given[5:7])
    backwards = directions(op, node)[d]
    steps: list[_TimeStep] = []
    for t in reversed(range(length)) if backwards else range(length):
        before = h, c
        gates = op.emit(of_gates, op.Gemm(of_h[0], h, inputs[0][t]))
        g = op.emit(of_candidate, op.Gemm(of_h[1], h, inputs[1][t]))
        i, o, f = op.split(gates, [hidden] * 3, 0)
        c = op.Add(op.Mul(f, c), op.Mul(i, g))
        squashed = op.emit(of_c, c)
        h = op.Mul(o, squashed)
        steps.append(_TimeStep(*before, i, o, f, g, squashed, h))
    names = dict.fromkeys(GATES, of_gates) | {"g": of_candidate, "c_squashed": of_c}
    return _LstmRun(rows, stored, order, names, steps[::-1] if backwards else steps, backwards, c)


def _stored(op: Emitter, given: Sequence[ir.Value]) -> tuple[tuple[ir.Value, ir.Value], tuple[str, ...]]:
    """The weights with their gates in the order in which they are stored, and that order.

    PyTorch's is another one: its exporter cuts a weight into gates, and joins those in the standard's order.
    """
    found = [_source(op, weight) for weight in given]
    if found[0][1] != found[1][1]:
        found = [(weight, GATES) for weight in given]
    return (found[0][0], found[1][0]), found[0][1]


def _source(op: Emitter, weight: ir.Value) -> tuple[ir.Value, tuple[str, ...]]:
    """What a weight was joined from the four gates of, with its order of them; else the weight itself."""
    node = weight.producer()
    if node is None or node.op_type != "Concat" or len(node.inputs) != 4 or op.attribute(node, "axis", 0) != 0:
        return weight, GATES
    found = [_quarter(op, part) for part in node.inputs]
    sources = {part[0] for part in found if part is not None}
    order = dict(sorted((part[1], gate) for part, gate in zip(found, GATES, strict=True) if part is not None))
    return (sources.pop(), tuple(order.values())) if len(sources) == 1 and len(order) == 4 else (weight, GATES)


def _quarter(op: Emitter, part: ir.Value | None) -> tuple[ir.Value, int] | None:
    """What a value is a quarter of the rows of, and which one."""
    node = None if part is None else part.producer()
    if node is None or node.op_type != "Slice" or any(v is not None and op.content(v) is None for v in node.inputs[1:]):
        return None
    source = op.given(node, 0)
    size, *rest = op.dims(source)
    rows, *others = ranges(op, node, (size, *rest))
    if others != [range(n) for n in rest] or rows.step != 1 or 4 * len(rows) != size or rows.start % len(rows):
        return None
    return source, rows.start // len(rows)


def _gates_and_candidate(op: Emitter, weight: ir.Value, order: Sequence[str]) -> tuple[ir.Value, ir.Value]:
    """The rows of a weight for i, o, f, and those for g."""
    hidden = op.dims(weight)[0] // 4
    if tuple(order) == GATES:
        gates, candidate = op.split(weight, [3 * hidden, hidden], 0)
        return gates, candidate
    parts = dict(zip(order, op.split(weight, [hidden] * 4, 0), strict=True))
    return op.concat([parts[gate] for gate in GATES[:3]], 0), parts["g"]


def _bias(op: Emitter, b: ir.Value, hidden: int) -> tuple[ir.Value, ...]:
    """What is added to the products with the gates' and the candidate's weights: ``[3H, 1]`` and ``[H, 1]``."""
    total = op.Add(*op.split(b, [4 * hidden] * 2, 0))
    return op.split(op.reshape(total, (4 * hidden, 1)), [3 * hidden, hidden], 0)


def _turned(op: Emitter, matrix: ir.Value) -> ir.Value:
    return op.transpose(matrix, (1, 0))


def _outputs(op: Emitter, node: ir.Node, runs: Sequence[_LstmRun]) -> list[ir.Value | None]:
    """Y, Y_h and Y_c, those that are used."""
    length, (hidden, batch) = len(runs[0].steps), op.dims(runs[0].c)
    results: list[ir.Value | None] = [None] * len(node.outputs)
    if is_used(node, 0):
        stacks = [op.reshape(op.concat([s.h for s in run.steps], 0), (length, hidden, batch)) for run in runs]
        turned = [op.transpose(stack, (0, 2, 1)) for stack in stacks]
        results[0] = op.concat([op.reshape(y, (length, 1, batch, hidden)) for y in turned], 1)
    for k, last in ((1, [run.in_order[-1].h for run in runs]), (2, [run.c for run in runs])):
        if is_used(node, k):
            results[k] = op.concat([op.reshape(_turned(op, s), (1, batch, hidden)) for s in last], 0)
    return results


def _backward(op: Emitter, run: _LstmRun, dy: Gradient, dh: Gradient, dc: Gradient) -> _Gradients:
    """The gradients of a direction's inputs from those of its outputs: ``[T, N, H]``, ``[N, H]``, ``[N, H]``."""
    length, (hidden, batch) = len(run.steps), op.dims(run.c)
    dys: Sequence[Gradient] = [None] * length
    if dy is not None:
        stack = op.reshape(op.transpose(dy, (0, 2, 1)), (length * hidden, batch))
        dys = op.split(stack, [hidden] * length, 0)[:: -1 if run.backwards else 1]
    weight = _turned(op, run.weights[1])
    flow = _sum(op, [None if dh is None else _turned(op, dh), dys[-1]])
    flow = op.constant([[0.0] * batch] * hidden, run.c.dtype) if flow is None else flow
    kept = None if dc is None else _turned(op, dc)  # what comes to c from the steps after
    into_gates: list[ir.Value] = []
    for t, step, into_c, factors in _factors(op, run):
        through = op.Mul(flow, into_c)
        of_c = through if kept is None else op.Add(through, kept)
        kept = op.Mul(of_c, step.f)
        each = [flow if gate == "o" else of_c for gate in run.gates]
        into_gates.append(op.Mul(op.Concat(*each, axis=0), factors))
        if t or op.wants(5):
            flow = op.Gemm(weight, into_gates[-1], *([dys[t - 1]] if t and dys[t - 1] is not None else []))
    gates = op.concat(into_gates if run.backwards else into_gates[::-1], 1)
    return _of_inputs(op, run, gates, flow, kept)


def _factors(op: Emitter, run: _LstmRun) -> Iterator[tuple[int, _TimeStep, ir.Value, ir.Value]]:
    """The steps from last to first, each with what the gradient of h is multiplied by to be one of c, ``[H, N]``, and
    what those of c, or for o of h, are to be those of the gates before their functions, ``[4H, N]``.
    """
    steps, (hidden, batch) = run.in_order, op.dims(run.c)
    parts = (*run.gates, "c_squashed")
    for stop in range(len(steps), 0, -BLOCK):
        block = steps[max(0, stop - BLOCK) : stop]

        def stack(names: Sequence[str], block: Sequence[_TimeStep] = block) -> ir.Value:
            values = [getattr(step, name) for step in block for name in names]
            return op.reshape(op.concat(values, 0), (len(block), len(names) * hidden, batch))

        slopes = [_slope(op, name, stack(list(group))) for name, group in groupby(parts, run.functions.__getitem__)]
        factors = op.Mul(op.concat(slopes, 1), stack([FACTORS[part] for part in parts]))
        rows = op.reshape(factors, (len(block) * 5 * hidden, batch))
        each = op.split(rows, [4 * hidden, hidden] * len(block), 0)
        for k in reversed(range(len(block))):
            yield stop - len(block) + k, block[k], each[2 * k + 1], each[2 * k]


def _slope(op: Emitter, name: str, y: ir.Value) -> ir.Value:
    """The derivative of a function where its value is ``y``."""
    if name == "Relu":
        return masks.positive(op, y)
    return op.Mul(y, op.Sub(1.0, y)) if name == "Sigmoid" else op.Sub(1.0, op.Mul(y, y))


def _of_inputs(op: Emitter, run: _LstmRun, gates: ir.Value, dh: ir.Value, dc: ir.Value | None) -> _Gradients:
    """From the gradients of all steps' gates, ``[4H, T·N]``, and of the first states."""
    before = op.concat([step.h_before for step in run.steps], 1)
    b = _in_order(op, run, op.sum(gates, (1,))) if op.wants(3) else None
    return _Gradients(
        x=op.Gemm(gates, run.weights[0], transA=1) if op.wants(0) else None,
        w=_in_order(op, run, op.Gemm(gates, run.rows)) if op.wants(1) else None,
        r=_in_order(op, run, op.Gemm(gates, before, transB=1)) if op.wants(2) else None,
        b=None if b is None else op.Concat(b, b, axis=0),
        h=_turned(op, dh) if op.wants(5) else None,
        c=None if dc is None or not op.wants(6) else _turned(op, dc),
    )


def _in_order(op: Emitter, run: _LstmRun, x: ir.Value) -> ir.Value:
    """Four gates of rows in the standard's order."""
    if run.gates == GATES:
        return x
    parts = dict(zip(run.gates, op.split(x, [op.dims(x)[0] // 4] * 4, 0), strict=True))
    return op.concat([parts[gate] for gate in GATES], 0)


def _sum(op: Emitter, parts: Sequence[Gradient]) -> Gradient:
    given = [part for part in parts if part is not None]
    return op.Sum(*given) if len(given) > 1 else next(iter(given), None)


def _joined(op: Emitter, node: ir.Node, found: Sequence[_Gradients]) -> tuple[Gradient, ...]:
    """The gradients of the node's inputs from those of its directions."""

    def join(name: str) -> Gradient:
        parts = [part for gradients in found if (part := getattr(gradients, name)) is not None]
        return op.concat([op.reshape(part, (1, *op.dims(part))) for part in parts], 0) if parts else None

    dx = _sum(op, [gradients.x for gradients in found])
    dx = None if dx is None else op.reshape(dx, op.dims(node.inputs[0]))
    return dx, join("w"), join("r"), join("b"), None, join("h"), join("c")
