"""Weights that lie in the host's memory, and are copied to the device where steps read them."""

from collections.abc import Sequence

import onnx_ir as ir

from memonger.graph.weight_window import COPY, Read
from memonger.ir.names import fresh
from memonger.ir.values import all_values


def copy_from_host(model: ir.Model, reads: Sequence[Read]) -> None:
    """Have a node copy each of some weights right before the steps that read it, anew for each range of steps.

    onnxruntime leaves a weight that nothing but copies reads in the host's memory, mapped where it lies in a file. It
    runs copies in the order of the device's other nodes, so that their results are values of the arena as any other.
    Once there is a schedule, some may be put ahead in it (`memonger.planner.ahead`).

    Args:
        model: For the device; changed. Its nodes are named.
        reads: Those of its `memonger.graph.weight_window.device_reads` that are copied.
    """
    nodes, values = list(model.graph), {str(v.name) for v in all_values(model.graph)}
    names = {str(node.name) for node in nodes}
    for read in reads:
        weight = model.graph.initializers[read.name]
        assert weight.const_value is not None
        for first, last in read.ranges:
            kind = weight.type or ir.TensorType(weight.const_value.dtype)
            shape = ir.Shape(weight.const_value.shape.numpy())
            copied = ir.Value(name=fresh(f"{read.name}@device", values), type=kind, shape=shape)
            copy = ir.node(COPY, [weight], outputs=[copied], name=fresh(f"copy of {read.name}", names))
            model.graph.insert_before(nodes[first], copy)
            for node in nodes[first : last + 1]:
                for index, value in enumerate(node.inputs):
                    if value is weight:
                        node.replace_input_with(index, copied)
