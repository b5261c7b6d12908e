"""The random bits of a model, mixed in one go.

Each random operator begins with counters of its own and mixes them as all others do (`memonger.autodiff.rules.random`).
A device takes as long for a short vector as for a longer one, and written out for CUDA the mixing is some hundred
nodes. The vectors hold about four times the square root of what is dropped: that they all are there from the first to
the last costs next to nothing.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from memonger.ir.emitter import Emitter
from memonger.ir.rewrite import Replacer
from memonger.lowering.cuda.rules import kind_of


@dataclass(frozen=True, slots=True)
class _Mixing:
    """How the random bits of one operator are made.

    Attributes:
        split: The node that cuts them into parts.
        start: The constant vector of counters they are made from.
        counters: Its content.
        nodes: The nodes from there to the bits that compute vectors, in order.
    """

    split: ir.Node
    start: ir.Value
    counters: np.ndarray
    nodes: tuple[ir.Node, ...]


def merge(into: Replacer) -> None:
    """Mix the counters of all random operators as one vector, and cut the parts of each out of that."""
    op = into.op
    splits = [node for node in into.graph if kind_of(node) == "RandomBits"]
    mixings = [mixing for split in splits if (mixing := _mixing(op, split)) is not None]
    if len(mixings) < 2:
        return
    # What the first mixes its counters by, over the counters of all
    first = mixings[0]
    made = {first.start: op.constant(np.concatenate([mixing.counters for mixing in mixings]))}
    for node in first.nodes:
        inputs = [v if v is None else made.get(v, v) for v in node.inputs]
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        made[node.outputs[0]] = op.emit(node.op_type, *inputs, **attributes)
    whole = made[first.nodes[-1].outputs[0]]
    into.insert(mixings[0].nodes[-1])
    start = 0
    for mixing in mixings:
        parts = []
        with op.at(str(mixing.split.name)):
            for part in mixing.split.outputs:
                parts.append(op.slice(whole, 0, start, start + op.size(part)))
                start += op.size(part)
        into.replace(mixing.split, parts)


def _mixing(op: Emitter, split: ir.Node) -> _Mixing | None:
    """None where a tool has changed the model such that bits or counters aren't made as they were written."""
    nodes: dict[ir.Node, None] = {}
    end = op.given(split, 0).producer()
    pending = [] if end is None else [end]
    while pending:
        sources = (v.producer() for v in _vectors(op, pending[-1]))
        missing = [node for node in sources if node is not None and node not in nodes]
        pending.extend(missing)
        if not missing:
            nodes[pending.pop()] = None
    start = next((v for node in nodes for v in _vectors(op, node)), None)
    counters = op.content(start)
    return None if start is None or counters is None else _Mixing(split, start, counters, tuple(nodes))


def _vectors(op: Emitter, node: ir.Node) -> list[ir.Value]:
    return [v for v in node.inputs if v is not None and op.dims(v) != ()]
