"""Some nodes of a model as a model of their own."""

from collections.abc import Iterable, Sequence

import onnx_ir as ir


def extract(
    model: ir.Model, nodes: Sequence[ir.Node], inputs: Iterable[ir.Value], outputs: Iterable[ir.Value]
) -> ir.Model:
    """A model of these nodes, without subgraphs, in this order. Names are the same; tensors are shared.

    Args:
        model: Where they are from.
        nodes: What they read and none of them writes is an input, or a constant of the model.
        inputs: Values to be inputs.
        outputs: Values to be outputs.
    """
    inputs = list(inputs)
    made = {v: _alike(v) for v in (*inputs, *(v for node in nodes for v in node.outputs))}
    constants = dict.fromkeys(v for node in nodes for v in node.inputs if v is not None and v not in made)
    made |= {v: _alike(v) for v in constants}
    copies = [
        ir.Node(
            node.domain, node.op_type, [None if v is None else made[v] for v in node.inputs], node.attributes.values(),
            outputs=[made[v] for v in node.outputs], name=node.name, version=node.version, overload=node.overload,
        )
        for node in nodes
    ]  # fmt: skip
    graph = ir.Graph(
        [made[v] for v in inputs], [made[v] for v in outputs], nodes=copies,
        initializers=[made[v] for v in constants], name=model.graph.name, opset_imports=dict(model.opset_imports),
    )  # fmt: skip
    return ir.Model(graph, ir_version=model.ir_version or 10)


def _alike(value: ir.Value) -> ir.Value:
    return ir.Value(name=value.name, type=value.type, shape=value.shape, const_value=value.const_value)
