"""What is done to a forward model before it is differentiated: one operator set, and no operator without a rule.

Rules are written for one version of the operators. What has an expansion is written as that, and what has neither rule
nor expansion but a function body in the standard is written out as its body.
"""

from collections.abc import Callable, Sequence

import onnx_ir as ir

from memonger.autodiff.registry import EXPANSIONS, RULES
from memonger.ir.emitter import Emitter
from memonger.ir.model import Model
from memonger.ir.operators import facts, operator_name
from memonger.ir.rewrite import Replacer
from memonger.ir.values import static_shape, subgraphs
from memonger.model.bodies import write_out
from memonger.shapes.inference import infer_shapes


def expand_operators(model: Model, op: Emitter, *, keep_random: bool = False) -> bool:
    """A pass: every operator that has an expansion is written as that; with ``keep_random`` all but random ones."""
    behind_unknown = False  # whether a node was replaced whose outputs' shapes onnx couldn't tell

    def write(op: Emitter, node: ir.Node) -> Sequence[ir.Value | None] | None:
        nonlocal behind_unknown
        if behind_unknown and _infers(node):
            op.infer(node)
        rule = EXPANSIONS.get(operator_name(node))
        unknown = any(v is not None and (v.dtype is None or static_shape(v) is None) for v in node.inputs)
        if rule is None or (keep_random and facts(node).random) or (node.domain and unknown):
            return None
        behind_unknown = behind_unknown or any(v.name and static_shape(v) is None for v in node.outputs)
        return rule(op, node)

    return Replacer(model.graph, op).replace_each(write) > 0


def _infers(node: ir.Node) -> bool:
    """Whether a standard node's shapes can be told now, and weren't."""
    before = all(v is None or static_shape(v) is not None for v in node.inputs)
    after = all(static_shape(v) is not None for v in node.outputs if v.name)
    return node.domain == "" and before and not after and not subgraphs(node) and not facts(node).sized_at_run_time


def write_out_bodies(model: Model, op: Emitter, needed: Callable[[], list[ir.Node]]) -> bool:
    """A pass: needed nodes that have no rule but a function body are that, as often as bodies hold such nodes."""

    def without_rule() -> list[ir.Node]:
        return [n for n in needed() if not (facts(n).without_gradient or (n.domain == "" and n.op_type in RULES))]

    def infer(model: Model) -> None:
        infer_shapes(model)
        op.learn_names(model.ir)

    return write_out(model, without_rule, infer)
