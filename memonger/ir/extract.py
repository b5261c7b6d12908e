"""Some nodes of a model as a model of their own."""

from collections.abc import Collection, Iterable, Sequence

import onnx_ir as ir

from memonger.ir.values import read_values


def extract(
    model: ir.Model, nodes: Sequence[ir.Node], outputs: Iterable[ir.Value], fed: Collection[ir.Value] = ()
) -> ir.Model:
    """A model of copies of these nodes, in this order. Names are the same; tensors are shared.

    Args:
        model: Where they are from.
        nodes: What they or their subgraphs read and none of them writes is an input, or a constant of the model.
        outputs: Values to be outputs: also inputs and constants.
        fed: Constants to be inputs.
    """
    given, written = list(outputs), {value for node in nodes for value in node.outputs}
    read = dict.fromkeys(given)
    for node in nodes:
        own = set(node.inputs)
        read |= dict.fromkeys(v for v in read_values(node) if v in own or v.graph is model.graph)
    outer = [value for value in read if value not in written]
    view = ir.GraphView(
        [value for value in outer if is_fed(value) or value in fed],
        given,
        nodes=nodes,
        initializers=[v for v in outer if v.producer() is None and v.const_value is not None and v not in fed],
        opset_imports=model.graph.opset_imports,
        name=model.graph.name,
    )
    return ir.Model(view.clone(), ir_version=model.ir_version or 10, functions=tuple(model.functions.values()))


def is_fed(value: ir.Value) -> bool:
    """Whether a value is computed or given, and no constant."""
    return value.producer() is not None or value.is_graph_input()
