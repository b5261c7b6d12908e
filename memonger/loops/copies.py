"""Images that are read once more much later, computed a second time for that in place of kept.

A U-Net's first images are its largest, and wait for its last nodes; what makes them from the model's input is a small
part of the whole work. Where the copies run by rows, as what reads them does, such an image never exists whole.
"""

import itertools
from collections.abc import Mapping

import onnx_ir as ir

from memonger.graph.schedule import depth_first
from memonger.ir.operators import facts
from memonger.ir.values import nbytes, static_shape, subgraphs
from memonger.tiling.writer import SliceWriter

_FAR = 4
"""What is read again after one of so many parts of all nodes, or later, has waited long."""

_LARGE = 16
"""An image counts if it has one of so many parts of the bytes that the model needs, or more."""


def with_copies(
    model: ir.Model, seconds: Mapping[str, float], most_seconds: float, whole: float
) -> tuple[ir.Model, float] | None:
    """The model with nodes that compute large images again where they are read much later, and what these take longer.

    Args:
        model: With static shapes, in the order in which it is to run. Not changed.
        seconds: What each node takes, by name.
        most_seconds: What copies may take, all together.
        whole: Bytes that the model needs at once.

    Returns: None where there is no such image, or all take longer.
    """
    copy = model.clone()
    nodes, writer = list(copy.graph), SliceWriter(copy)
    step_of, taken, spent = {node: step for step, node in enumerate(nodes)}, dict[ir.Node, ir.Node](), 0.0
    images = [v for node in nodes for v in node.outputs if len(static_shape(v) or ()) == 4]
    for value in sorted(images, key=lambda v: -(nbytes(v) or 0)):
        steps = sorted({step_of[user] for user in value.consumers()})
        late = next((b for a, b in itertools.pairwise(steps) if (b - a) * _FAR >= len(nodes)), None)
        if late is None or (nbytes(value) or 0) * _LARGE < whole:
            continue
        chain = depth_first(nodes, [value])
        more = sum(seconds.get(str(node.name), 0.0) for node in chain if node not in taken)
        is_same = not any(facts(node).random or subgraphs(node) for node in chain)
        if spent + more > most_seconds or not is_same:
            continue
        spent += more
        again = dict[ir.Value, ir.Value]()
        for node in sorted(chain, key=step_of.__getitem__):
            if node not in taken:
                inputs = [again.get(v, v) if v is not None else None for v in node.inputs]
                own = [(f"{v.name}.again" if v.name else "", v) for v in node.outputs]
                outputs = [ir.Value(name=writer.fresh(n) if n else "", type=v.type, shape=v.shape) for n, v in own]
                settings, name = list(node.attributes.values()), writer.fresh(f"{node.name}.again")
                taken[node] = ir.Node(node.domain, node.op_type, inputs, settings, outputs=outputs, name=name)
                copy.graph.insert_before(nodes[late], taken[node])
            again.update(zip(node.outputs, taken[node].outputs, strict=True))
        for user, index in [(use.node, use.idx) for use in value.uses() if step_of.get(use.node, -1) >= late]:
            user.replace_input_with(index, again[value])
    copy.graph.sort()  # what two images are made of stands where the first of them is read
    return (copy, spent) if taken else None
