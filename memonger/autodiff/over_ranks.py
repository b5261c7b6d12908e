"""Means over ranks amid a model: Identity nodes that are marked until a plan makes collectives of them.

Where y is the mean of x over the ranks, each rank's loss depends on every rank's x. The gradient of all losses together
by one rank's x is the mean over the ranks of the gradients by y: the same collective.
"""

import onnx_ir as ir

from memonger.ir.emitter import Emitter

KEY = "memonger.mean_over_ranks"


def over_ranks(op: Emitter, x: ir.Value) -> ir.Value:
    """The mean of a value over the ranks; alone it is the value itself."""
    y = op.Identity(x)
    node = y.producer()
    assert node is not None
    node.metadata_props[KEY] = "1"
    return y


def is_over_ranks(node: ir.Node) -> bool:
    """Whether `over_ranks` wrote the node."""
    return node.op_type == "Identity" and KEY in node.metadata_props


def means_over_ranks(model: ir.Model) -> tuple[str, ...]:
    """Names of the means, in the order of the nodes."""
    return tuple(str(node.outputs[0].name) for node in model.graph if is_over_ranks(node))
