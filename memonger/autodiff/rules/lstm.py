"""LSTM, forward and backward unrolled over its sequence.

States and gates are ``[width, N]``, not ``[N, width]``: a product of few samples then has the weight on its left, where
onnxruntime's CPU reads it as it stands. On its right the weight is packed anew at every step, which takes as long as
the product. A step of the backward pass has six nodes: what it multiplies gradients by is computed for `BLOCK` steps at
once, and the gradients of weights and input are products of all steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from memonger.autodiff.registry import Gradient, gradient
from memonger.autodiff.rules import masks
from memonger.autodiff.rules.recurrent import by_direction, concat, directions, functions, is_used, refuse, split
from memonger.model.emitter import Emitter
from memonger.model.replacing import insert_for

BLOCK = 16  # steps whose factors are there at a time

Parts = Sequence[ir.Value | None]


@dataclass(frozen=True, slots=True)
class _Step:
    """What the backward pass needs of a step, each ``[H, N]``: the states before it, its gates and tanh(c).

    Gates are called as in the standard: i, o, f and the candidate g. ``h`` is the state after the step.
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
class _Run:
    """One direction of a layer, run.

    Attributes:
        rows: The input, ``[T·N, D]``.
        weights: W and R: ``[4H, D]`` and ``[4H, H]``.
        functions: Of the gates, of the candidate, and of c.
        steps: In the order of time, which a backwards direction goes through from its end.
        backwards: Whether it does.
        c: The last state.
    """

    rows: ir.Value
    weights: tuple[ir.Value, ir.Value]
    functions: tuple[str, ...]
    steps: Sequence[_Step]
    backwards: bool
    c: ir.Value

    @property
    def in_order(self) -> Sequence[_Step]:
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
    steps, batch, hidden = len(runs[0].steps), op.dims(node.inputs[0])[1], op.dims(node.inputs[2])[2]
    found = []
    for d, run in enumerate(runs):
        of_run = [None if part is None else op.reshape(op.slice(part, axis, d, d + 1), shape) for part, axis, shape in (
            (dy, 1, (steps, batch, hidden)), (dh, 0, (batch, hidden)), (dc, 0, (batch, hidden)),
        )]  # fmt: skip
        found.append(_backward(op, run, *of_run))
    return _joined(op, node, found)


def _run(op: Emitter, node: ir.Node, d: int) -> _Run:
    """Emit the steps of direction ``d``."""
    x, w, r, b, h, c = (
        value if k == 0 else by_direction(op, value, d)
        for k, value in ((k, node.inputs[k] if k < len(node.inputs) else None) for k in (0, 1, 2, 3, 5, 6))
    )
    (length, batch, width), hidden = op.dims(x), op.dims(r)[1]
    rows = op.reshape(x, (length * batch, width))
    biases = [None, None] if b is None else _bias(op, b, hidden)
    inputs = [
        split(op, op.Gemm(weight, rows, *([] if bias is None else [bias]), transB=1), [batch] * length, 1)
        for weight, bias in zip(split(op, w, [3 * hidden, hidden], 0), biases, strict=True)
    ]
    recurrent = split(op, r, [3 * hidden, hidden], 0)
    of_gates, of_candidate, of_c = names = functions(op, node, d)
    h, c = (_turned(op, s) if s is not None else op.constant([[0.0] * batch] * hidden, x.dtype) for s in (h, c))
    backwards = directions(op, node)[d]
    steps: list[_Step] = []
    for t in reversed(range(length)) if backwards else range(length):
        before = h, c
        gates = op.emit(of_gates, op.Gemm(recurrent[0], h, inputs[0][t]))
        g = op.emit(of_candidate, op.Gemm(recurrent[1], h, inputs[1][t]))
        i, o, f = split(op, gates, [hidden] * 3, 0)
        c = op.Add(op.Mul(f, c), op.Mul(i, g))
        squashed = op.emit(of_c, c)
        h = op.Mul(o, squashed)
        steps.append(_Step(*before, i, o, f, g, squashed, h))
    return _Run(rows, (w, r), names, steps[::-1] if backwards else steps, backwards, c)


def _bias(op: Emitter, b: ir.Value, hidden: int) -> list[ir.Value]:
    """What is added to the products with the gates' and the candidate's weights: ``[3H, 1]`` and ``[H, 1]``."""
    total = op.Add(*split(op, b, [4 * hidden] * 2, 0))
    return split(op, op.reshape(total, (4 * hidden, 1)), [3 * hidden, hidden], 0)


def _turned(op: Emitter, matrix: ir.Value) -> ir.Value:
    return op.transpose(matrix, (1, 0))


def _outputs(op: Emitter, node: ir.Node, runs: Sequence[_Run]) -> list[ir.Value | None]:
    """Y, Y_h and Y_c, those that are used."""
    length, (hidden, batch) = len(runs[0].steps), op.dims(runs[0].c)
    results: list[ir.Value | None] = [None] * len(node.outputs)
    if is_used(node, 0):
        stacks = [op.reshape(concat(op, [s.h for s in run.steps], 0), (length, hidden, batch)) for run in runs]
        turned = [op.transpose(stack, (0, 2, 1)) for stack in stacks]
        results[0] = concat(op, [op.reshape(y, (length, 1, batch, hidden)) for y in turned], 1)
    for k, last in ((1, [run.in_order[-1].h for run in runs]), (2, [run.c for run in runs])):
        if is_used(node, k):
            results[k] = concat(op, [op.reshape(_turned(op, s), (1, batch, hidden)) for s in last], 0)
    return results


def _backward(op: Emitter, run: _Run, dy: Gradient, dh: Gradient, dc: Gradient) -> _Gradients:
    """The gradients of a direction's inputs from those of its outputs: ``[T, N, H]``, ``[N, H]``, ``[N, H]``."""
    length, (hidden, batch) = len(run.steps), op.dims(run.c)
    dys: Parts = [None] * length
    if dy is not None:
        stack = op.reshape(op.transpose(dy, (0, 2, 1)), (length * hidden, batch))
        dys = split(op, stack, [hidden] * length, 0)[:: -1 if run.backwards else 1]
    weight = _turned(op, run.weights[1])
    flow = None if dh is None else _turned(op, dh)  # into h, and
    kept = None if dc is None else _turned(op, dc)  # into c, from the steps after
    into_gates: list[ir.Value] = []
    for t, step, into_c, factors in _factors(op, run):
        if flow is None or dys[t] is None:
            flow = dys[t] if flow is None else flow
        elif not into_gates:
            flow = op.Add(flow, dys[t])
        if flow is None:
            flow = op.constant([[0.0] * batch] * hidden, run.c.dtype)
        through = op.Mul(flow, into_c)
        of_c = through if kept is None else op.Add(through, kept)
        kept = op.Mul(of_c, step.f)
        into_gates.append(op.Mul(op.Concat(of_c, flow, of_c, of_c, axis=0), factors))
        if t or op.wants(5):
            flow = op.Gemm(weight, into_gates[-1], *([dys[t - 1]] if t and dys[t - 1] is not None else []))
    gates = concat(op, into_gates if run.backwards else into_gates[::-1], 1)
    return _of_inputs(op, run, gates, flow, kept)


def _factors(op: Emitter, run: _Run) -> Iterator[tuple[int, _Step, ir.Value, ir.Value]]:
    """The steps from last to first, each with what takes the gradient of h to c and those of c, h, c, c to the gates.

    The latter are those of i, o, f and g: ``[4H, N]``.
    """
    steps, (hidden, batch) = run.in_order, op.dims(run.c)
    of_gates, of_candidate, of_c = run.functions
    for stop in range(len(steps), 0, -BLOCK):
        block = steps[max(0, stop - BLOCK) : stop]
        count = len(block)

        def stack(*parts: str, block: Sequence[_Step] = block) -> ir.Value:
            values = [getattr(step, part) for step in block for part in parts]
            return op.reshape(concat(op, values, 0), (len(block), len(parts) * hidden, batch))

        slopes = _slope(op, of_gates, stack("i", "o", "f")), _slope(op, of_candidate, stack("g"))
        factors = op.Mul(concat(op, slopes, 1), stack("g", "c_squashed", "c_before", "i"))
        into_c = op.Mul(_slope(op, of_c, stack("c_squashed")), stack("o"))
        each = [
            split(op, op.reshape(x, (count * rows, batch)), [rows] * count, 0)
            for x, rows in ((into_c, hidden), (factors, 4 * hidden))
        ]
        for k in reversed(range(count)):
            yield stop - count + k, block[k], each[0][k], each[1][k]


def _slope(op: Emitter, name: str, y: ir.Value) -> ir.Value:
    """The derivative of a function where its value is ``y``."""
    if name == "Relu":
        return masks.positive(op, y)
    return op.Mul(y, op.Sub(1.0, y)) if name == "Sigmoid" else op.Sub(1.0, op.Mul(y, y))


def _of_inputs(op: Emitter, run: _Run, gates: ir.Value, dh: ir.Value, dc: ir.Value | None) -> _Gradients:
    """From the gradients of all steps' gates, ``[4H, T·N]``, and of the first states."""
    w, _ = run.weights
    before = concat(op, [step.h_before for step in run.steps], 1)
    b = op.sum(gates, (1,)) if op.wants(3) else None
    return _Gradients(
        x=op.Gemm(gates, w, transA=1) if op.wants(0) else None,
        w=op.Gemm(gates, run.rows) if op.wants(1) else None,
        r=op.Gemm(gates, before, transB=1) if op.wants(2) else None,
        b=None if b is None else op.Concat(b, b, axis=0),
        h=_turned(op, dh) if op.wants(5) else None,
        c=None if dc is None or not op.wants(6) else _turned(op, dc),
    )


def _joined(op: Emitter, node: ir.Node, found: Sequence[_Gradients]) -> tuple[Gradient, ...]:
    """The gradients of the node's inputs from those of its directions."""

    def join(name: str) -> Gradient:
        parts = [part for gradients in found if (part := getattr(gradients, name)) is not None]
        return concat(op, [op.reshape(part, (1, *op.dims(part))) for part in parts], 0) if parts else None

    of_x = [gradients.x for gradients in found if gradients.x is not None]
    dx = op.reshape(op.Sum(*of_x) if len(of_x) > 1 else of_x[0], op.dims(node.inputs[0])) if of_x else None
    return dx, join("w"), join("r"), join("b"), None, join("h"), join("c")
