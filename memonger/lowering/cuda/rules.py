"""The rules of the CUDA form: operator or composite → what it is written as for onnxruntime's CUDA provider.

    @rule("BatchNormalization", when=_is_refused)
    def _batch_normalization(op, node):
        ...
        return y, mean, variance

A rule returns one value for each output of the node, None where nobody uses it. ``when`` says of a node whether it is
written out; it emits nothing. All inputs and outputs of the nodes they see are of known types and static shapes.

A composite is a node that a gradient rule wrote in the form that is fastest on the CPU, and marked with the name of
what it computes (`memonger.ir.marks.COMPOSITE`). The rule of that name writes what is best on CUDA.
"""

from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from memonger.ir.emitter import Emitter
from memonger.ir.marks import COMPOSITE

Written = tuple[ir.Value | None, ...]
Write = Callable[[Emitter, ir.Node], Written]
When = Callable[[Emitter, ir.Node], bool]


@dataclass(frozen=True, slots=True)
class Rule:
    """What an operator is written as, when, and whether the model's operator set is raised for it."""

    write: Write
    when: When
    raises_opset: bool


RULES: dict[str, Rule] = {}
"""The rule of each operator of the default domain, and of each composite, that has one."""


def kind_of(node: ir.Node) -> str:
    """What a node's rule is looked up by: the composite that it computes, else its operator."""
    return node.metadata_props.get(COMPOSITE, node.op_type)


def rule(*op_types: str, when: When = lambda op, node: True, raises_opset: bool = True) -> Callable[[Write], Write]:
    """Register a rule. A second rule for one operator raises."""

    def register(function: Write) -> Write:
        for op_type in op_types:
            if op_type in RULES:
                raise ValueError(f"operator {op_type} has a rule already")
            RULES[op_type] = Rule(function, when, raises_opset)
        return function

    return register


def is_used(value: ir.Value) -> bool:
    """Whether anybody reads a value, or the model gives it out."""
    return bool(value.name) and (bool(value.uses()) or value.is_graph_output())
