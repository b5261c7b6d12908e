"""Nodes that nothing reads are removed."""

import onnx_ir as ir
from onnx_ir.passes import common as passes

from memonger.ir.model import Model


def remove_unused(model: Model) -> bool:
    """A pass: no nodes and initializers that nothing reads, and no outputs of nodes that may be left out.

    onnx-ir's pass removes one node after the other, and reads all the graph's outputs for each: a step with 7,000 of
    them spends most of its time there. So the nodes go at once first, and the pass does the rest.
    """
    outputs, unread = set(model.graph.outputs), set[ir.Node]()
    for node in reversed(model.graph):
        if not any(value in outputs or any(use.node not in unread for use in value.uses()) for value in node.outputs):
            unread.add(node)
    model.graph.remove(unread, safe=True)
    return passes.RemoveUnusedNodesPass()(model.ir).modified or bool(unread)
