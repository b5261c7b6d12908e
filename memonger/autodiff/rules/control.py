"""Subgraphs that run a number of times that is known before: written out, once for each time."""

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from memonger.autodiff.registry import expansion
from memonger.errors import PlanError
from memonger.ir.emitter import SMALL, Emitter
from memonger.ir.values import subgraphs

LARGEST = 100_000  # nodes that a loop is written out as


@expansion("If")
def _if(op: Emitter, node: ir.Node) -> tuple[ir.Value | None, ...] | None:
    condition = op.content(op.given(node, 0))
    if condition is None:
        return None
    branch = node.attributes["then_branch" if condition.all() else "else_branch"].as_graph()
    run = _written(op, node, branch, 1)
    return None if run is None else tuple(run([]))


@expansion("Scan")
def _scan(op: Emitter, node: ir.Node) -> tuple[ir.Value | None, ...] | None:
    body, count = node.attributes["body"].as_graph(), op.attribute(node, "num_scan_inputs", 1)
    inputs = [op.given(node, i) for i in range(len(node.inputs))]
    states, scanned = inputs[: len(inputs) - count], inputs[len(inputs) - count :]
    axes = _each(op, node, "scan_input_axes", scanned)
    length = op.dims(scanned[0])[axes[0]]
    run = _written(op, node, body, length)
    if run is None or not length:
        return None
    parts = [_parts(op, x, axis) for x, axis in zip(scanned, axes, strict=True)]
    backwards = _each(op, node, "scan_input_directions", scanned)
    parts = [part[::-1] if back else part for part, back in zip(parts, backwards, strict=True)]
    rows: list[list[ir.Value]] = []
    for each in zip(*parts, strict=True):
        results = run([*states, *each])
        states, row = results[: len(states)], results[len(states) :]
        rows.append(row)
    stacks = [list(stack) for stack in zip(*rows, strict=True)]
    axes, turned = (_each(op, node, f"scan_output_{name}", stacks) for name in ("axes", "directions"))
    made = [
        _stacked(op, stack[::-1] if back else stack, axis)
        for stack, axis, back in zip(stacks, axes, turned, strict=True)
    ]
    return (*states, *made)


@expansion("Loop")
def _loop(op: Emitter, node: ir.Node) -> tuple[ir.Value | None, ...] | None:
    body, (count, condition, *states) = node.attributes["body"].as_graph(), node.inputs
    trips, first = op.content(count), op.content(condition)
    if trips is None or (condition is not None and (first is None or not first.all())) or not _goes_on(op, body):
        return None
    run = _written(op, node, body, int(trips.reshape(())))
    if run is None or int(trips.reshape(())) <= 0:
        return None
    values = [v for v in states if v is not None]
    rows: list[list[ir.Value]] = []
    for t in range(int(trips.reshape(()))):
        _, *results = run([op.constant(t, ir.DataType.INT64), op.constant(True, ir.DataType.BOOL), *values])
        values, row = results[: len(values)], results[len(values) :]
        rows.append(row)
    return (*values, *(_stacked(op, stack, 0) for stack in zip(*rows, strict=True)))


def _goes_on(op: Emitter, body: ir.Graph) -> bool:
    """Whether a loop's own condition never ends it."""
    value: ir.Value | None = body.outputs[0]
    while value is not None and (node := value.producer()) is not None and node.op_type in ("Identity", "Cast"):
        value = node.inputs[0]
    if value is None or value is body.inputs[1]:
        return value is not None
    made = value.producer()
    content = made.attributes["value"].as_tensor().numpy() if made is not None and made.op_type == "Constant" else None
    content = op.content(value) if content is None else content
    return content is not None and bool(content.all())


def _each(op: Emitter, node: ir.Node, name: str, values: Sequence[object]) -> list[int]:
    """An attribute with a number for each of some values; 0 where it is left out. Axes count from the end, too."""
    given: list[int] = op.attribute(node, name, [])
    found = list(given) or [0] * len(values)
    ranks = [len(op.dims(v)) if isinstance(v, ir.Value) else 0 for v in values]
    return [n % rank if n < 0 and rank else n for n, rank in zip(found, ranks, strict=True)]


def _parts(op: Emitter, x: ir.Value, axis: int) -> list[ir.Value]:
    dims = op.dims(x)
    return [op.reshape(part, dims[:axis] + dims[axis + 1 :]) for part in op.split(x, [1] * dims[axis], axis)]


def _stacked(op: Emitter, parts: Sequence[ir.Value], axis: int) -> ir.Value:
    dims = list(op.dims(parts[0]))
    axis %= len(dims) + 1
    return op.concat([op.reshape(part, (*dims[:axis], 1, *dims[axis:])) for part in parts], axis)


def _written(
    op: Emitter, node: ir.Node, body: ir.Graph, times: int
) -> Callable[[Sequence[ir.Value]], list[ir.Value]] | None:
    """What emits a subgraph's nodes for given inputs, and returns its outputs; None where it holds what can't be.

    Raises:
        PlanError: it would be too many nodes.
    """
    if any(each.domain or subgraphs(each) for each in body):
        return None
    if times * len(body) > LARGEST:
        raise PlanError(
            f"operator {node.op_type} (node '{node.name}') runs {len(body)} nodes {times} times: gradients of up to "
            f"{LARGEST} nodes are written. Take fewer steps at a time."
        )

    def run(inputs: Sequence[ir.Value]) -> list[ir.Value]:
        value_of: dict[ir.Value, ir.Value] = dict(zip(body.inputs, inputs, strict=True))
        for constant in body.initializers.values():
            if constant.const_value is not None:
                value_of[constant] = op.constant(constant.const_value.numpy())
        for each in body:
            results = _emitted(op, each, [None if v is None else value_of.get(v, v) for v in each.inputs])
            value_of.update(zip(each.outputs, results, strict=False))
        return [value_of.get(v, v) for v in body.outputs]

    return run


def _emitted(op: Emitter, node: ir.Node, inputs: Sequence[ir.Value | None]) -> tuple[ir.Value, ...]:
    if node.op_type == "Constant" and "value" in node.attributes:
        return (op.constant(node.attributes["value"].as_tensor().numpy()),)
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    contents = [op.content(v) for v in inputs]
    if contents and all(c is not None and c.size <= SMALL for c in contents):
        from onnx.reference import ReferenceEvaluator  # here: most models need none, and it takes a while to import

        proto = ir.serde.serialize_node(node)
        for k in range(len(proto.input)):
            proto.input[k] = f"given{k}"
        feeds = {f"given{k}": content for k, content in enumerate(contents)}
        results = ReferenceEvaluator(proto, opsets={"": op.opset}).run(None, feeds)
        return tuple(op.constant(np.asarray(result)) for result in results)
    return op.several(node.op_type, len(node.outputs), *inputs, **attributes)
