"""What is done to a forward model before it is differentiated: one operator set, and no operator without a rule.

Rules are written for one version of the operators. What has an expansion is written as that, and what has neither rule
nor expansion but a function body in the standard is written out as its body.
"""

from collections.abc import Callable, Collection, Mapping

import onnx
import onnx_ir as ir

from memonger import checks, load, marks, shapes
from memonger.errors import PlanError
from memonger.gradients import functions
from memonger.gradients.emitter import Emitter
from memonger.gradients.registry import EXPANSIONS, RULES, WITHOUT_GRADIENT

OPSET = 20
"""The newest operator set for whose every operator used here onnxruntime 1.23 and later has a CPU kernel."""

CONVERTED_SETTINGS = {"Clip": (1, 2), "Pad": (2,)}
"""Inputs that were attributes before."""

ROUNDS = 16  # bodies within bodies; the standard's are three deep


def raise_opset(model: ir.Model, name: str) -> ir.Model:
    """The model in operator set `OPSET`, or in its own where that is newer. Names, marks and weights stay.

    Raises:
        PlanError: onnx's converter can't raise it.
    """
    opset = model.opset_imports.get("")
    if opset is None or opset >= OPSET:
        model.opset_imports[""] = max(opset or OPSET, OPSET)
        return model
    if all(_is_same(node, opset) for graph in model.graphs() for node in graph):
        model.opset_imports[""] = OPSET
        for graph in model.graphs():
            for node in graph:
                node.version = None
        return model
    return _converted(model, name, opset)


def _is_same(node: ir.Node, opset: int) -> bool:
    """Whether the operator is in both sets, in one version."""
    if node.domain != "":
        return True
    versions = [
        onnx.defs.get_schema(node.op_type, number, "").since_version
        for number in (opset, OPSET)
        if onnx.defs.has(node.op_type, number, "")
    ]
    return len(versions) == 2 and versions[0] == versions[1]


def _converted(model: ir.Model, name: str, opset: int) -> ir.Model:
    marks = {v.name: node.metadata_props for node in model.graph for v in node.outputs if node.metadata_props}
    metadata, graph_name = dict(model.metadata_props), model.graph.name
    constants = {v.name for v in model.graph.initializers.values() if v.meta.get("constant")}
    try:
        made = load.convert(model, OPSET)
    except (RuntimeError, ValueError) as error:
        raise PlanError(
            f"{name} is in opset {opset}, and gradients need {OPSET}: onnx's converter can't raise it: "
            f"{str(error).strip()}. Export it again with a newer opset."
        ) from error
    made.ir_version = max(made.ir_version or 0, load.MIN_IR_VERSION)
    made.graph.name = graph_name
    made.metadata_props.update(metadata)
    for node in made.graph:
        node.metadata_props.update(marks.get(node.outputs[0].name, {}) if node.outputs else {})
    for value in made.graph.initializers.values():
        if value.name in constants:
            value.meta["constant"] = True
    load.lift_constants(made, name)
    _match_settings(made, {v.name: v.dtype for v in shapes.all_values(model.graph)})
    checks.sort(made, name)
    shapes.infer(made, name)
    return made


def _match_settings(model: ir.Model, types: Mapping[str | None, ir.DataType | None]) -> None:
    """onnx's converter writes what was an attribute in float32, whatever the type of the first input."""
    for node in model.graph:
        for index in CONVERTED_SETTINGS.get(node.op_type, ()):
            value, first = (node.inputs[k] if k < len(node.inputs) else None for k in (index, 0))
            wanted = None if first is None else types.get(first.name)
            if value is None or value.const_value is None or wanted is None or value.dtype == wanted:
                continue
            content = value.const_value.numpy().astype(wanted.numpy())
            value.const_value = ir.tensor(content, dtype=wanted, name=value.name)
            value.type = ir.TensorType(wanted)


def expand(model: ir.Model, op: Emitter, keep: Collection[str] = ()) -> None:
    """Write every operator that has an expansion as that, those in ``keep`` left out."""
    replaced: dict[ir.Value, ir.Value] = {}
    gone = []
    for node in list(model.graph):
        rule = EXPANSIONS.get(node.op_type) if node.domain == "" and node.op_type not in keep else None
        if rule is None:
            continue
        with op.at(str(node.name)):
            results = rule(op, node)
        if results is not None:
            replaced.update(_replace(model.graph, node, results, op))
            gone.append(node)
    if gone:
        model.graph.outputs[:] = [replaced.get(value, value) for value in model.graph.outputs]
        model.graph.remove(gone, safe=True)


def _replace(
    graph: ir.Graph, node: ir.Node, results: tuple[ir.Value | None, ...], op: Emitter
) -> dict[ir.Value, ir.Value]:
    """Put what was emitted in the node's place, but for graph outputs: old value → new one. Values keep their names."""
    made, op.nodes = op.nodes, []
    graph.insert_before(node, made)
    marks.spread(node, made, [each for each in made if results[0] in each.outputs])
    fresh = made_values(made)
    pairs = {old: new for old, new in zip(node.outputs, results, strict=False) if new is not None}
    for old, new in pairs.items():
        if new in fresh:
            old.name, new.name = f"{old.name}.replaced", old.name
        for user, index in old.uses():
            user.replace_input_with(index, new)
    return pairs


def made_values(nodes: list[ir.Node]) -> set[ir.Value]:
    """What the nodes write."""
    return {value for node in nodes for value in node.outputs}


def write_out_bodies(model: ir.Model, name: str, needed: Callable[[], list[ir.Node]]) -> None:
    """Write out the function bodies of needed nodes that have no rule, as often as bodies hold such nodes."""
    opset = int(model.opset_imports[""])
    for _ in range(ROUNDS):
        without = [node for node in needed() if not _has_rule(node)]
        known = [node for node in without if functions.body_of(node, opset) is not None]
        if not known:
            return
        functions.write_out(model, known, name)


def _has_rule(node: ir.Node) -> bool:
    return node.domain == "" and (node.op_type in RULES or node.op_type in WITHOUT_GRADIENT)
