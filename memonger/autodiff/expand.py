"""What is done to a forward model before it is differentiated: one operator set, and no operator without a rule.

Rules are written for one version of the operators. What has an expansion is written as that, and what has neither rule
nor expansion but a function body in the standard is written out as its body.
"""

from collections.abc import Callable

import onnx_ir as ir

from memonger.autodiff import function_bodies
from memonger.autodiff.registry import EXPANSIONS, RULES
from memonger.model.emitter import Emitter
from memonger.model.marks import spread
from memonger.model.model import Model
from memonger.model.operators import facts, operator_name

ROUNDS = 16  # bodies within bodies; the standard's are three deep


def expand(model: ir.Model, op: Emitter, *, keep_random: bool = False) -> None:
    """Write every operator that has an expansion as that; with ``keep_random`` all but random ones."""
    replaced: dict[ir.Value, ir.Value] = {}
    gone = []
    for node in list(model.graph):
        rule = EXPANSIONS.get(operator_name(node))
        if rule is None or (keep_random and facts(node).random):
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
    spread(node, made, [each for each in made if results[0] in each.outputs])
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


def write_out_bodies(model: Model, needed: Callable[[], list[ir.Node]]) -> None:
    """Write out the function bodies of needed nodes that have no rule, as often as bodies hold such nodes."""
    opset = int(model.ir.opset_imports[""])
    for _ in range(ROUNDS):
        without = [node for node in needed() if not _has_rule(node)]
        known = [node for node in without if function_bodies.body_of(node, opset) is not None]
        if not known:
            return
        function_bodies.write_out(model, known)


def _has_rule(node: ir.Node) -> bool:
    return facts(node).without_gradient or (node.domain == "" and node.op_type in RULES)
