"""What is done to a forward model before it is differentiated: one operator set, and no operator without a rule.

Rules are written for one version of the operators. What has an expansion is written as that, and what has neither rule
nor expansion but a function body in the standard is written out as its body.
"""

from collections.abc import Callable

import onnx_ir as ir

from memonger.autodiff import function_bodies
from memonger.autodiff.registry import EXPANSIONS, RULES
from memonger.ir.emitter import Emitter
from memonger.ir.model import Model
from memonger.ir.operators import facts, operator_name
from memonger.ir.rewrite import Replacer
from memonger.ir.values import static_shape, subgraphs

ROUNDS = 16  # bodies within bodies; the standard's are three deep


def expand(model: ir.Model, op: Emitter, *, keep_random: bool = False) -> None:
    """Write every operator that has an expansion as that; with ``keep_random`` all but random ones."""
    into = Replacer(model.graph, op)
    behind_unknown = False  # whether a node was replaced whose outputs' shapes onnx couldn't tell
    for node in list(model.graph):
        if node in into.gone:
            continue
        if behind_unknown and _infers(node):
            op.infer(node)
        rule = EXPANSIONS.get(operator_name(node))
        unknown = any(v is not None and (v.dtype is None or static_shape(v) is None) for v in node.inputs)
        if rule is None or (keep_random and facts(node).random) or (node.domain and unknown):
            continue
        behind_unknown = behind_unknown or any(v.name and static_shape(v) is None for v in node.outputs)
        with op.at(str(node.name)):
            results = rule(op, node)
        if results is not None:
            into.replace(node, results)
    into.finish()


def _infers(node: ir.Node) -> bool:
    """Whether a standard node's shapes can be told now, and weren't."""
    before = all(v is None or static_shape(v) is not None for v in node.inputs)
    after = all(static_shape(v) is not None for v in node.outputs if v.name)
    return node.domain == "" and before and not after and not subgraphs(node) and not facts(node).sized_at_run_time


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
