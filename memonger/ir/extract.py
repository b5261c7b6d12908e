"""Some nodes of a model as a model of their own."""

from collections.abc import Collection, Iterable, Sequence

import onnx_ir as ir


def extract(
    model: ir.Model, nodes: Sequence[ir.Node], outputs: Iterable[ir.Value], fed: Collection[ir.Value] = ()
) -> ir.Model:
    """A model of these nodes, without subgraphs, in this order. Names are the same; tensors are shared.

    Args:
        model: Where they are from.
        nodes: What they read and none of them writes is an input, or a constant of the model.
        outputs: Values to be outputs.
        fed: Constants to be inputs.
    """
    written = dict.fromkeys(v for node in nodes for v in node.outputs)
    read = dict.fromkeys(v for node in nodes for v in node.inputs if v is not None and v not in written)
    inputs = [v for v in read if is_fed(v) or v in fed]
    constants = [v for v in read if not is_fed(v) and v not in fed]
    made = {v: _alike(v) for v in (*read, *written)}
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


def is_fed(value: ir.Value) -> bool:
    """Whether a value is computed or given, and no constant."""
    return value.producer() is not None or value.is_graph_input()


def _alike(value: ir.Value) -> ir.Value:
    return ir.Value(name=value.name, type=value.type, shape=value.shape, const_value=value.const_value)
