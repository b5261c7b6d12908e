"""The backward pass over one graph: reverse accumulation (Linnainmaa 1970; Griewank & Walther 2008).

Nodes are visited from last to first. Each has the gradients of its outputs by then; its rule gives those of its inputs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from itertools import pairwise

import onnx_ir as ir

from memonger.autodiff.registry import OPEN, RULES
from memonger.errors import PlanError
from memonger.graph.graph import needed_by
from memonger.ir.emitter import Emitter
from memonger.ir.operators import facts, operator_name
from memonger.ir.values import is_floating, read_values, static_shape

Finished = Callable[[ir.Value, ir.Value], None]


class Sums:
    """The gradients found so far, by value.

    Most are added up as they come. Two kinds wait until the gradient is asked for:

    - Products aᵀ·b of few rows, such as every step of a recurrent layer adds to the gradient of its weight, are summed
      by one product of all their rows, which writes the sum once.
    - Parts among zeros, the gradients of slices, are joined where they lie side by side.
    """

    def __init__(self, op: Emitter, seeds: Mapping[ir.Value, ir.Value]) -> None:
        self._op = op
        self._sums = dict(seeds)
        self._products: dict[ir.Value, list[ir.Node]] = {}
        self._parts: dict[ir.Value, list[ir.Node]] = {}

    def __contains__(self, value: ir.Value) -> bool:
        return value in self._sums or value in self._products or value in self._parts

    def add(self, value: ir.Value, gradient: ir.Value) -> None:
        """Add what a reader gives, which may have the shape that broadcasting gave."""
        op = self._op
        gradient = op.cast(op.sum_to(gradient, op.dims(value)), value.dtype)
        node = gradient.producer()
        if node is not None and _has_few_rows(op, node):
            self._products.setdefault(value, []).append(node)
        elif node is not None and _part(op, node) is not None:
            self._parts.setdefault(value, []).append(node)
        else:
            self._sums[value] = op.Add(self._sums[value], gradient) if value in self._sums else gradient

    def take(self, value: ir.Value, *, keep: bool = False) -> ir.Value:
        """The whole gradient; it is forgotten here unless kept."""
        terms = [self._sums[value]] if value in self._sums else []
        if value in self._products:  # last come first: the readers were visited backwards
            terms.append(self._product(self._products.pop(value)[::-1]))
        if value in self._parts:
            terms.append(self._joined(self._parts.pop(value)))
        self._sums[value] = reduce(self._op.Add, terms)
        return self._sums[value] if keep else self._sums.pop(value)

    def _product(self, nodes: Sequence[ir.Node]) -> ir.Value:
        if len(nodes) == 1:
            return nodes[0].outputs[0]
        a, b = (self._op.concat([node.inputs[k] for node in nodes], 0) for k in (0, 1))
        return self._op.Gemm(a, b, transA=1)

    def _joined(self, nodes: Sequence[ir.Node]) -> ir.Value:
        op, parts = self._op, [part for node in nodes if (part := _part(self._op, node)) is not None]
        parts.sort(key=lambda part: part[1])
        axis, first, *_ = parts[0]
        follow = all(a[0] == b[0] and a[2] == b[1] for a, b in pairwise(parts))
        if len(nodes) == 1 or not follow:
            return reduce(op.Add, (node.outputs[0] for node in nodes))
        whole, dims = op.concat([x for *_, x in parts], axis), op.dims(nodes[0].outputs[0])
        if op.dims(whole) == dims:
            return whole
        before, after = [0] * len(dims), [0] * len(dims)
        before[axis], after[axis] = first, dims[axis] - parts[-1][2]
        return op.Pad(whole, op.ints(*before, *after))


def _has_few_rows(op: Emitter, node: ir.Node) -> bool:
    """Whether a node is a product aᵀ·b of matrices with fewer rows than columns: most of its time goes into writing."""
    if node.op_type != "Gemm" or len(node.inputs) > 2 or op.attribute(node, "alpha", 1.0) != 1.0:
        return False
    if not op.attribute(node, "transA", 0) or op.attribute(node, "transB", 0):
        return False
    (rows, m), (_, n) = (op.dims(v) for v in node.inputs)
    return rows < min(m, n)


def _part(op: Emitter, node: ir.Node) -> tuple[int, int, int, ir.Value] | None:
    """Of zeros around a value along one axis: the axis, where the value starts and stops, and the value."""
    if node.op_type != "Pad" or len(node.inputs) != 2 or op.attribute(node, "mode", "constant") != "constant":
        return None
    pads, x = op.content(node.inputs[1]), op.given(node, 0)
    dims = op.dims(x)
    if pads is None or pads.min() < 0:
        return None
    axes = [a for a in range(len(dims)) if pads[a] or pads[a + len(dims)]]
    if len(axes) != 1:
        return None
    start = int(pads[axes[0]])
    return axes[0], start, start + dims[axes[0]], x


def active_values(nodes: Iterable[ir.Node], wrt: Iterable[ir.Value]) -> set[ir.Value]:
    """Values of floating-point or unknown type that change with one of ``wrt``, jumps left out.

    ``nodes`` are in topological order.
    """
    active = set(wrt)
    for node in nodes:
        if facts(node).without_gradient:
            continue
        if any(v in active for v in read_values(node)):
            active.update(v for v in node.outputs if v.name and (v.dtype is None or is_floating(v)))
    return active


def needed_nodes(nodes: Sequence[ir.Node], active: set[ir.Value], seeds: Iterable[ir.Value]) -> list[ir.Node]:
    """The nodes between what is differentiated by and ``seeds``, in order: those that need a rule."""
    wanted = {value for value in seeds if value in active}
    needed = []
    for node in reversed(nodes):
        if any(v in wanted for v in node.outputs) and any(v in active for v in read_values(node)):
            needed.append(node)
            wanted.update(v for v in read_values(node) if v in active)
    return needed[::-1]


def backward(
    op: Emitter,
    nodes: Sequence[ir.Node],
    wrt: Sequence[ir.Value],
    seeds: Mapping[ir.Value, ir.Value],
    finished: Finished | None = None,
) -> dict[ir.Value, ir.Value]:
    """Emit the backward pass.

    Args:
        op: Where it goes.
        nodes: The forward nodes, in topological order.
        wrt: Values to differentiate by: graph inputs and initializers.
        seeds: The gradient of each value the pass begins at.
        finished: Called as ``finished(value, gradient)`` as soon as the gradient of one of ``wrt`` is whole: after that
            no emitted node reads the value.

    Returns: the gradient of each of ``wrt`` that has one.

    Raises:
        PlanError: an operator without a gradient; it names the node.
    """
    active = active_values(nodes, wrt)
    needed = needed_nodes(nodes, active, seeds)
    gradients = Sums(op, {value: seed for value, seed in seeds.items() if value in active})
    closing = _closing(needed, wrt)
    gradient_of: dict[ir.Value, ir.Value] = {}
    kept = frozenset(wrt)

    def finish(value: ir.Value) -> None:
        if value in gradients:
            gradient_of[value] = gradients.take(value)
            if finished is not None:
                finished(value, gradient_of[value])

    for node in reversed(needed):
        _through(op, node, active, gradients, kept)
        for value in closing.get(node, ()):
            finish(value)
    for value in wrt:  # one that is a seed itself, and read by no node
        finish(value)
    return {value: gradient_of[value] for value in wrt if value in gradient_of}


def _closing(needed: Sequence[ir.Node], wrt: Sequence[ir.Value]) -> dict[ir.Node, list[ir.Value]]:
    """For each node, the values whose first reader it is."""
    waiting = dict.fromkeys(wrt)
    closing: dict[ir.Node, list[ir.Value]] = {}
    for node in needed:
        for value in dict.fromkeys(v for v in node.inputs if v is not None):
            if value in waiting:
                del waiting[value]
                closing.setdefault(node, []).append(value)
    return closing


def _through(op: Emitter, node: ir.Node, active: set[ir.Value], gradients: Sums, wrt: frozenset[ir.Value]) -> None:
    """Take the gradients of a node's outputs to its inputs."""
    dys = [gradients.take(v, keep=v in wrt) if v in gradients else None for v in node.outputs]
    wanted = [v is not None and v in active for v in node.inputs]
    if all(dy is None for dy in dys):
        return
    with op.at(f"grad/{node.name}", wanted):
        results = RULES[node.op_type](op, node, *dys)
        given = results if isinstance(results, tuple | list) else (results,)
        for value, gradient, needs in zip(node.inputs, given, wanted, strict=False):
            if value is not None and gradient is not None and needs:
                gradients.add(value, gradient)


def check_rules(needed: Sequence[ir.Node], wrt: Sequence[ir.Value], name: str) -> None:
    """Every node on the way has a rule.

    Raises:
        PlanError: it names operator, domain, opset and node, and what could be frozen or cut.
    """
    for node in needed:
        if node.domain == "" and node.op_type in RULES:
            continue
        graph = node.graph
        opset = graph.opset_imports.get(node.domain) if graph is not None else None
        read = {value for each in (node, *needed_by(read_values(node))) for value in read_values(each)}
        behind = [value for value in wrt if value in read]
        names = ", ".join(f"'{v.name}'" for v in behind[:5]) + (
            f" and {len(behind) - 5} more" if len(behind) > 5 else ""
        )
        why = OPEN.get(operator_name(node), "has no gradient rule, nor a function body to differentiate through")
        raise PlanError(
            f"{name}: operator {node.op_type} (domain '{node.domain or 'ai.onnx'}', opset {opset}, node '{node.name}') "
            f"{why}. It stands between the loss and {names}: freeze those (frozen=[...]), or cut the model before "
            f"'{node.outputs[0].name}'."
        )


def check_size(output: ir.Value, name: str) -> None:
    """The size of an output that is differentiated is known.

    Raises:
        PlanError: it names the operator that writes it.
    """
    node = output.producer()
    if node is None or static_shape(output) is not None:
        return
    unsized = "has outputs of a size that only the run can tell, and gradients need static shapes"
    why = OPEN.get(operator_name(node), unsized)
    raise PlanError(
        f"{name}: operator {node.op_type} (domain '{node.domain or 'ai.onnx'}', node '{node.name}') {why}. The size of "
        f"output '{output.name}' is unknown."
    )
