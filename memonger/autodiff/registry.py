"""The registry of gradient rules: one rule an operator, and the list of operators that have no gradient.

A rule is given the forward node and the gradients of its outputs, and returns the gradient of each input:

    @gradient("Mul")
    def _mul(op, node, dy):
        a, b = node.inputs
        return op.Mul(dy, b), op.Mul(dy, a)

One positional argument follows for each output the node has, None where nothing depends on that output. One gradient is
returned for each input; None says there is none, and inputs beyond those returned have none. A gradient may have the
shape that broadcasting gave: the driver sums it back. It also accumulates, and drops what nobody reads.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

import onnx_ir as ir

from memonger.model.emitter import Emitter

Gradient = ir.Value | None
Rule = Callable[..., Gradient | tuple[Gradient, ...]]
R = TypeVar("R", bound=Rule)

RULES: dict[str, Rule] = {}
"""The rule of each operator of the default domain."""

WITHOUT_GRADIENT: set[str] = set()
"""Operators whose outputs don't change, or change in jumps only: nothing flows back through them."""

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


def without_gradient(op_types: Iterable[str]) -> None:
    """Say of operators that nothing flows back through them."""
    for op_type in op_types:
        _check_new(op_type)
        WITHOUT_GRADIENT.add(op_type)


def _check_new(op_type: str) -> None:
    if op_type in RULES or op_type in WITHOUT_GRADIENT:
        raise ValueError(f"operator {op_type} has a gradient rule already")
