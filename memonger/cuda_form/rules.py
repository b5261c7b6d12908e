"""The rules of the CUDA form: operator → what it is written as, where onnxruntime's CUDA provider can't run it.

    @rule("BatchNormalization")
    def _batch_normalization(op, node):
        ...
        return y, mean, variance

A rule returns one value for each output of the node, None where nobody uses it; or None alone to leave the node as it
is, because the provider runs it, or because there is nothing to write it as. Every node it sees has outputs of known
types and static shapes.
"""

from collections.abc import Callable

import onnx_ir as ir

from memonger.gradients.emitter import Emitter

Written = tuple[ir.Value | None, ...] | None
Rule = Callable[[Emitter, ir.Node], Written]

RULES: dict[str, Rule] = {}
"""The rule of each operator of the default domain that has one."""


def rule(*op_types: str) -> Callable[[Rule], Rule]:
    """Register a rule. A second rule for one operator raises."""

    def register(function: Rule) -> Rule:
        for op_type in op_types:
            if op_type in RULES:
                raise ValueError(f"operator {op_type} has a rule already")
            RULES[op_type] = function
        return function

    return register


def is_used(value: ir.Value) -> bool:
    """Whether anybody reads a value, or the model gives it out."""
    return bool(value.name) and (bool(value.uses()) or value.is_graph_output())
