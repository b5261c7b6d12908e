"""Shape arithmetic: which sizes constants decide, and which only the run can tell."""

import itertools

import onnx_ir as ir

from memonger.errors import PlanError
from memonger.ir.operators import facts
from memonger.ir.values import add_initializer, all_values, dense, static_shape, subgraphs
from memonger.shapes.sizes import Sizes


def input_independent(model: ir.Model, *, overridden: bool = True) -> set[ir.Value]:
    """Values that are the same whatever the inputs hold: constants, static shapes, and what is computed from them.

    ``overridden``: whether callers may override initializers that are inputs as well.
    """
    fixed = {v for v in model.graph.initializers.values() if not (overridden and v.is_graph_input())}
    for node in model.graph:
        if facts(node).random or subgraphs(node):
            continue
        first = node.inputs[0] if facts(node).shape_only else None
        if (first is not None and static_shape(first) is not None) or all(v is None or v in fixed for v in node.inputs):
            fixed.update(node.outputs)
    return fixed


def fold_shape_arithmetic(model: ir.Model) -> bool:
    """Give values the shapes that rules tell; where the content of an input decides the size of an output, make that
    content an initializer.

    This is done where constants and static shapes decide the content, and it is integers or booleans. Other readers of
    the same values are left as they are: onnxruntime accepts fewer models whose conditions have become constants.

    Returns: whether anything was folded.
    """
    graph, known = model.graph, set(model.graph.initializers.values())
    lacking = [value for value in all_values(graph) if value.name and dense(value) and static_shape(value) is None]
    deciding = [
        (node, place, value)
        for node in graph.all_nodes()
        for place in facts(node).sized_by
        if place < len(node.inputs) and (value := node.inputs[place]) is not None and value not in known
        if node.domain == "" and (writer := value.producer()) is not None and writer.graph is graph
    ]
    if not lacking and not deciding:
        return False
    described = {str(v.name): shape for v in all_values(graph) if (shape := static_shape(v)) is not None}
    try:
        shapes, contents = Sizes(model, contents_alone=not lacking).as_far_as_known(described)
    except PlanError:
        return False  # malformed attributes: whoever runs the node says so
    for value in lacking:
        if (shape := shapes.get(str(value.name))) is not None:
            value.shape = ir.Shape(list(shape))
    made: dict[ir.Value, ir.Value] = {}
    names = {str(value.name) for value in all_values(graph)}
    for node, place, value in deciding:
        content = contents.get(str(value.name))
        if content is None or content.dtype.kind not in "iub":
            continue
        if value not in made:
            name = next(name for k in itertools.count() if (name := f"{value.name}.constant{k or ''}") not in names)
            names.add(name)
            made[value] = add_initializer(graph, name, content)
        node.replace_input_with(place, made[value])
    outputs = set(graph.outputs)
    for node in reversed(graph):
        is_computed = bool(node.outputs) and node.outputs[0].name in contents
        if is_computed and not any(value.uses() or value in outputs for value in node.outputs):
            graph.remove(node, safe=True)
    return bool(made)


def run_time_sized(model: ir.Model, *, overridden: bool = True) -> set[ir.Value]:
    """Values whose size only a run can tell: it depends on what the inputs hold, or on another such value.

    ``overridden``: as for `input_independent`.
    """
    dynamic: set[ir.Value] = set()
    open_nodes = [n for n in model.graph if any(static_shape(v) is None for v in n.outputs if v.name)]
    independent = input_independent(model, overridden=overridden) if open_nodes else set()
    for node in open_nodes:
        given = [value for value in node.inputs if value is not None]
        deciding = (node.inputs[place] for place in facts(node).sized_by if place < len(node.inputs))
        decides = (
            facts(node).sized_at_run_time
            or bool(subgraphs(node))
            or any(value.type is not None and not dense(value) for value in (*given, *node.outputs))
            or any(value is not None and value not in independent for value in deciding)
        )
        if decides or any(value in dynamic for value in given):
            anyway = facts(node).sized_anyway if dynamic.isdisjoint(given) else ()
            dynamic.update(v for at, v in enumerate(node.outputs) if static_shape(v) is None and at not in anyway)
    return dynamic
