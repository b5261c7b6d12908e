"""The registry of gradient rules: one rule an operator.

A rule is given the forward node and the gradients of its outputs, and returns the gradient of each input:

    @gradient("Mul")
    def _mul(op, node, dy):
        a, b = node.inputs
        return op.Mul(dy, b), op.Mul(dy, a)

One positional argument follows for each output the node has, None where nothing depends on that output. One gradient is
returned for each input; None says there is none, and inputs beyond those returned have none. A gradient may have the
shape that broadcasting gave: the driver sums it back. It also accumulates, and drops what nobody reads.
Operators that have no gradient say so in `memonger.model.operators`.
"""

from collections.abc import Callable
from typing import TypeVar

import onnx_ir as ir

from memonger.model.emitter import Emitter
from memonger.model.operators import facts_of

Gradient = ir.Value | None
Rule = Callable[..., Gradient | tuple[Gradient, ...]]
R = TypeVar("R", bound=Rule)

RULES: dict[str, Rule] = {}
"""The rule of each operator of the default domain."""

Expansion = Callable[[Emitter, ir.Node], tuple[ir.Value | None, ...] | None]

EXPANSIONS: dict[str, Expansion] = {}
"""Operators that are written as others before differentiation: what stands in their place is also what runs."""


def gradient(*op_types: str) -> Callable[[R], R]:
    """Register a rule. A second rule for one operator raises."""

    def register(rule: R) -> R:
        for op_type in op_types:
            _check_new(op_type)
            RULES[op_type] = rule
        return rule

    return register


def expansion(*op_types: str) -> Callable[[Expansion], Expansion]:
    """Register what an operator is written as before differentiation.

    It returns one value for each output of the node (None where nobody uses it), or None to leave the node as it is.
    """

    def register(rule: Expansion) -> Expansion:
        for op_type in op_types:
            if op_type in EXPANSIONS:
                raise ValueError(f"operator {op_type} has an expansion already")
            EXPANSIONS[op_type] = rule
        return rule

    return register


def _check_new(op_type: str) -> None:
    if op_type in RULES:
        raise ValueError(f"operator {op_type} has a gradient rule already")
    if facts_of(op_type).without_gradient:
        raise ValueError(f"operator {op_type} is without a gradient in memonger.model.operators")
