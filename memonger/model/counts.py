"""Integers that count how much of other inputs is valid: what a run is fed for them where nobody gives any.

Zeros, which are a valid index anywhere, are no such count: attention over no keys at all is refused by its kernels.
"""

from collections import deque
from collections.abc import Iterator

import onnx_ir as ir

from memonger.ir.operators import facts
from memonger.ir.values import static_shape

PAST, ROTARY = 3, 7
"""Inputs of attention that keeps keys: the past ones (batch, heads, length, width), and angles of so many positions."""


def counts_of(graph: ir.Graph) -> dict[str, int]:
    """The number that every element of an input has, by the input's name: only inputs that counts are computed from.

    A mask, of which counts are sums, has ones. What is read as a count itself counts all keys: those of the past and
    one for each of the queries.
    """
    found: dict[str, int] = {}
    for node in graph:
        for place, less in facts(node).counts:
            value = node.inputs[place] if place < len(node.inputs) else None
            for source, passed in _inputs_before(value):
                if source.dtype is not None and source.dtype.is_integer() and str(source.name) not in found:
                    is_summed = not passed.isdisjoint(("ReduceSum", "CumSum"))
                    found[str(source.name)] = 1 if is_summed else _keys(node) - less
    return found


def _inputs_before(value: ir.Value | None) -> Iterator[tuple[ir.Value, frozenset[str]]]:
    """The graph's inputs that a value's content is computed from, the nearest first, and the operators in between."""
    pending, seen = deque([(value, frozenset[str]())]), set[ir.Value]()
    while pending:
        one, passed = pending.popleft()
        if one is None or one in seen:
            continue
        seen.add(one)
        if one.is_graph_input():
            yield one, passed
        node = one.producer()
        if node is not None and not facts(node).shape_only:
            pending.extend((each, passed | {node.op_type}) for each in node.inputs)


def _keys(node: ir.Node) -> int:
    """How many keys an attention reads, as far as the shapes of its inputs say: past ones and new ones."""

    def dim(value: ir.Value | None, axis: int) -> int:
        shape = None if value is None else static_shape(value)
        return shape[axis] if shape is not None and -len(shape) <= axis < len(shape) else 0

    if node.domain == "":
        return dim(node.inputs[1], -2)
    query, past, rotary = (node.inputs[place] if place < len(node.inputs) else None for place in (0, PAST, ROTARY))
    before = (dim(one, 1) for one, _ in _inputs_before(query) if one.shape is not None and one.shape.rank() in (2, 3))
    new, old, turned = dim(query, 1) or next(before, 1), dim(past, 2), dim(rotary, 0)
    return old + new if not turned or old + new <= turned else max(old, new)
