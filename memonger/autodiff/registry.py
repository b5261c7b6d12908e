"""The registry of gradient rules: one rule an operator.

A rule is given the forward node and the gradients of its outputs, and returns the gradient of each input:

    @gradient("Mul")
    def _mul(op, node, dy):
        a, b = node.inputs
        return op.Mul(dy, b), op.Mul(dy, a)

One positional argument follows for each output the node has, None where nothing depends on that output. One gradient is
returned for each input; None says there is none, and inputs beyond those returned have none. A gradient may have the
shape that broadcasting gave: the driver sums it back. It also accumulates, and drops what nobody reads.
Operators that have no gradient say so in `memonger.ir.operators`.
"""

from collections.abc import Callable

import onnx_ir as ir

from memonger.ir.emitter import Emitter
from memonger.ir.operators import F, facts_of, rule_of_operators

Gradient = ir.Value | None
Rule = Callable[..., Gradient | tuple[Gradient, ...]]

RULES: dict[str, Rule] = {}
"""The rule of each operator of the default domain."""

Expansion = Callable[[Emitter, ir.Node], tuple[ir.Value | None, ...] | None]

EXPANSIONS: dict[str, Expansion] = {}
"""Operators that are written as others before differentiation: what stands in their place is also what runs."""


def gradient(*op_types: str) -> Callable[[F], F]:
    """Register a rule. A second rule for one operator raises, and one for an operator that has no gradient."""
    for op_type in op_types:
        if facts_of(op_type).without_gradient:
            raise ValueError(f"operator {op_type} is without a gradient in memonger.ir.operators")
    return rule_of_operators(RULES, "a gradient rule", op_types)


def expansion(*op_types: str) -> Callable[[F], F]:
    """Register what an operator is written as before differentiation.

    It returns one value for each output of the node (None where nobody uses it), or None to leave the node as it is.
    """
    return rule_of_operators(EXPANSIONS, "an expansion", op_types)
