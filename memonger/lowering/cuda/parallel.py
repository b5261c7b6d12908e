"""Elementwise chains that differ only in the constant vector they begin with, computed as one chain over all of them.

That is what random operators are made of: each begins with counters of its own and mixes them as all others do
(`memonger.autodiff.rules.random`). A device takes as long for a short vector as for a longer one, and written out for
CUDA the mixing is some hundred nodes. The vectors hold about four times the square root of what is dropped: that they
all are there from the first to the last costs next to nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from memonger.model.emitter import Emitter
from memonger.model.replacing import Replacer
from memonger.model.values import static_shape

_ELEMENTWISE = frozenset({"Add", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Div", "Mod", "Mul", "Sub"})
_INTEGER = (ir.DataType.UINT32, ir.DataType.UINT64)


@dataclass(slots=True)
class _Chains:
    """What is known of a graph's values.

    Attributes:
        keys: Value → a number that two values share if they are computed alike, from equal scalars and any vector.
        roots: Value of a chain → the constant vector it begins with.
        numbers: What a key stands for → it.
    """

    keys: dict[ir.Value, int] = field(default_factory=dict)
    roots: dict[ir.Value, ir.Value] = field(default_factory=dict)
    numbers: dict[object, int] = field(default_factory=dict)

    def number(self, what: object) -> int:
        return self.numbers.setdefault(what, len(self.numbers))


def merge(into: Replacer) -> None:
    """Compute parallel chains as one."""
    chains = _Chains()
    for node in into.graph:
        _follow(chains, node, into.op)
    groups: dict[int, list[ir.Value]] = {}
    for value in chains.roots:
        readers = _readers(value, chains)
        if readers and not value.is_graph_output() and all(reader.graph is into.graph for reader in readers):
            groups.setdefault(chains.keys[value], []).append(value)
    for ends in groups.values():
        if len(ends) > 1:
            _merge(into, ends, chains)


def _follow(chains: _Chains, node: ir.Node, op: Emitter) -> None:
    """Find out what a node's output is."""
    if node.domain != "" or len(node.outputs) != 1 or node.op_type not in (*_ELEMENTWISE, "Cast"):
        return
    output, inputs = node.outputs[0], [v for v in node.inputs if v is not None]
    keys = [_key(chains, value, op) for value in inputs]
    roots = {chains.roots.get(value, value) for value in inputs if static_shape(value) != ()}
    if None in keys or len(roots) > 1 or (roots and node.op_type == "Cast"):
        return
    settings = tuple((name, repr(attribute.value)) for name, attribute in sorted(node.attributes.items()))
    chains.keys[output] = chains.number((node.op_type, settings, *keys))
    if roots:
        chains.roots[output] = roots.pop()


def _key(chains: _Chains, value: ir.Value, op: Emitter) -> int | None:
    """A chain's value or a scalar by how it is computed, any constant vector as such; None for all others."""
    if value in chains.keys:
        return chains.keys[value]
    dims, known = static_shape(value), op.known(value)
    if dims == ():
        return chains.number((str(value.dtype), known.tobytes()) if known is not None else value)
    if known is None or dims is None or len(dims) != 1 or dims[0] < 2 or value.dtype not in _INTEGER:
        return None
    return chains.number(("vector", str(value.dtype)))


def _readers(end: ir.Value, chains: _Chains) -> list[ir.Node]:
    """Who reads a chain's value without being of one."""
    return [user for user in dict.fromkeys(user for user, _ in end.uses()) if user.outputs[0] not in chains.roots]


def _merge(into: Replacer, ends: list[ir.Value], chains: _Chains) -> None:
    """Compute the chains that end with these values as one, and cut out of its end what their readers read."""
    whole = _again(ends, chains, into.op)
    place = ends[0].producer()
    assert place is not None
    into.insert(place)
    start = 0
    for end in ends:
        stop = start + into.op.size(end)
        for reader in _readers(end, chains):
            _cut(into, reader, end, whole, start)
        start = stop
    into.drop_unread(ends)


def _again(ends: list[ir.Value], chains: _Chains, op: Emitter) -> ir.Value:
    """The first of the chains, over the vectors of all of them."""
    vectors = [op.known(chains.roots[end]) for end in ends]
    made = {chains.roots[ends[0]]: op.constant(np.concatenate([v for v in vectors if v is not None]))}
    for node in _nodes(ends[0], chains):
        inputs = [v if v is None else made.get(v, v) for v in node.inputs]
        made[node.outputs[0]] = op.emit(node.op_type, *inputs, **{k: a.value for k, a in node.attributes.items()})
    return made[ends[0]]


def _nodes(end: ir.Value, chains: _Chains) -> list[ir.Node]:
    """The nodes of a chain, in order."""
    found: dict[ir.Node, None] = {}
    pending = [end]
    while pending:
        value = pending[-1]
        node = value.producer()
        assert node is not None
        missing = [v for v in node.inputs if v in chains.roots and v.producer() not in found]
        if missing:
            pending.extend(v for v in missing if v is not None)
            continue
        pending.pop()
        found[node] = None
    return list(found)


def _cut(into: Replacer, reader: ir.Node, end: ir.Value, whole: ir.Value, start: int) -> None:
    """Give one reader its part. A Split's outputs are cut out at once."""
    op = into.op
    with op.at(str(reader.name)):
        sizes = op.known(reader.inputs[1]) if reader.op_type == "Split" and len(reader.inputs) > 1 else None
        if sizes is None:
            part = op.slice(whole, 0, start, start + op.size(end))
            into.insert(reader)
            for index, value in enumerate(reader.inputs):
                if value is end:
                    reader.replace_input_with(index, part)
            return
        parts = tuple(op.slice(whole, 0, a, b) for a, b in _ranges(start, [int(n) for n in sizes]))
    into.replace(reader, parts)


def _ranges(start: int, sizes: list[int]) -> Iterator[tuple[int, int]]:
    for size in sizes:
        yield start, start + size
        start += size
