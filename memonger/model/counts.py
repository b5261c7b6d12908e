"""Integers that count how much of other inputs is valid: what a run is fed for them where nobody gives any.

Zeros, which are a valid index anywhere, are no such count: attention over no keys at all is refused by its kernels.
"""

from collections.abc import Iterator

import onnx_ir as ir

from memonger.model.operators import facts
from memonger.model.values import static_shape

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
            for source, is_summed in _sources(value):
                found.setdefault(str(source.name), 1 if is_summed else _keys(node) - less)
    return found


def _sources(value: ir.Value | None) -> Iterator[tuple[ir.Value, bool]]:
    """Inputs of integers that a count is computed from, and whether they are summed up on the way."""
    pending, seen = [(value, False)], set[ir.Value]()
    while pending:
        one, is_summed = pending.pop()
        if one is None or one in seen:
            continue
        seen.add(one)
        if one.is_graph_input() and one.dtype is not None and one.dtype.is_integer():
            yield one, is_summed
        node = one.producer()
        if node is not None and not facts(node).shape_only:
            summed = is_summed or node.op_type in ("ReduceSum", "CumSum")
            pending += [(each, summed) for each in node.inputs]


def _keys(node: ir.Node) -> int:
    """How many keys an attention reads, as far as the shapes of its inputs say: past ones and new ones."""

    def dim(place: int, axis: int) -> int:
        value = node.inputs[place] if place < len(node.inputs) else None
        shape = None if value is None else static_shape(value)
        return shape[axis] if shape is not None and -len(shape) <= axis < len(shape) else 0

    if node.domain == "":
        return dim(1, -2)
    new, past, turned = max(1, dim(0, 1)), dim(PAST, 2), dim(ROTARY, 0)
    return past + new if not turned or past + new <= turned else max(past, new)
