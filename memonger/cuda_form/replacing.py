"""Putting what was emitted in a node's place."""

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from memonger import marks
from memonger.gradients.emitter import Emitter


def put_in_place(graph: ir.Graph, node: ir.Node, results: Sequence[ir.Value | None], op: Emitter) -> None:
    """Replace a node by what was emitted since.

    Args:
        graph: The node's.
        node: What is replaced. Its outputs' names and its metadata go to what stands for them.
        results: A value for each output of the node, written by what was emitted; None where nobody uses it.
        op: What was emitted is taken from it.
    """
    made, op.nodes = op.nodes, []
    marks.spread(node, made, [each for each in made if results[0] in each.outputs])
    graph.insert_before(node, made)
    for old, new in zip(node.outputs, results, strict=False):
        if new is not None:
            old.name, new.name = None, old.name
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    read = [v for v in node.inputs if v is not None]
    graph.remove(node, safe=True)
    drop_unread(graph, read)


def drop_unread(graph: ir.Graph, values: Iterable[ir.Value]) -> None:
    """Remove the nodes that compute what nobody reads, and then what only those read."""
    pending = list(values)
    while pending:
        node = pending.pop().producer()
        if node is None or node.graph is not graph or any(v.uses() or v.is_graph_output() for v in node.outputs):
            continue
        pending.extend(v for v in node.inputs if v is not None)
        graph.remove(node, safe=True)
