"""Which outputs of an operator may share an input's memory on onnxruntime: the written list.

Two values share one address in two ways. A *view* has the bytes of its input and both are alive at once: the kernel
copies nothing when both pointers are equal. An *in place* output overwrites an input that dies at this step: right only
where the kernel reads each element, or buffers each row, before it writes it, at every size and number of threads.

The functions look at the operator, its attributes and which inputs and outputs exist. The caller guarantees:

1. both values are dense tensors of the same number of bytes and the same element size, at exactly the same address;
2. in place: no later step reads the input, no view of it is alive, it is neither a graph input nor an initializer;
3. in place: no other *value* that the node reads, and no other output of the node, lies in those bytes. One value at
   several inputs, as in `Mul(x, x)`, is answered here: it keeps its pairs only where the kernel is elementwise.

So broadcasting needs no check of shapes: an input as large as the output isn't broadcast, and a smaller one has its own
bytes. Of several pairs with one output the caller takes one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

CPU = "CPUExecutionProvider"


@dataclass(frozen=True, slots=True)
class AliasRule:
    """One permission: `output` may lie at the address of `input`."""

    domain: str
    op: str
    input: int | None
    """Index of the input; None: any input."""
    output: int
    reason: str
    """Why the kernel allows it."""
    elementwise: bool = False
    """Element i of the output needs element i of the input only: the same value may be read by other inputs too."""
    condition: Callable[[ir.Node], bool] | None = None
    """Asked of the node before the rule holds; None: always."""
    providers: tuple[str, ...] = (CPU,)
    """Execution providers the rule was verified on."""


def _bn_infers(node: ir.Node) -> bool:
    training = node.attributes.get("training_mode")
    return len(_present(node.outputs)) == 1 and (training is None or training.as_int() == 0)


def _present(values: Sequence[ir.Value | None]) -> list[int]:
    return [i for i, value in enumerate(values) if value is not None and value.name != ""]


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_ONE_TO_ONE = "each element is read once, before it is written"
_ROWS = "each row is reduced before it is written"
_SAME_BYTES = "the kernel copies only between different addresses"

_UNARY = _names("""Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Ceil Celu Clip Cos Cosh Elu Erf Exp Floor HardSigmoid
LeakyRelu Log Neg Not Reciprocal Relu Round Selu Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Tan Tanh
ThresholdedRelu""")
_BINARY = _names("Add And Div Mul Or PRelu Pow Sub Xor")

VIEWS: tuple[AliasRule, ...] = tuple(
    AliasRule("", op, 0, 0, _SAME_BYTES) for op in ("Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze")
)

IN_PLACE: tuple[AliasRule, ...] = (
    *(AliasRule("", op, 0, 0, _ONE_TO_ONE, elementwise=True) for op in _UNARY),
    *(AliasRule("", op, i, 0, _ONE_TO_ONE, elementwise=True) for op in _BINARY for i in (0, 1)),
    AliasRule("", "Softmax", 0, 0, _ROWS),
    AliasRule("", "LayerNormalization", 0, 0, _ROWS),
    AliasRule("", "LRN", 0, 0, _ROWS),
    AliasRule("", "BatchNormalization", 0, 0, _ONE_TO_ONE, condition=_bn_infers),
)

HELD_BY_RUNTIME: frozenset[tuple[str, str]] = frozenset({("", "Shape"), ("", "Size")})
"""Operators the runtime runs as soon as it can, on the host: their outputs are never planned."""


def _pairs(rules: tuple[AliasRule, ...], node: ir.Node, provider: str) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    outputs = _present(node.outputs)
    for rule in rules:
        if (rule.domain, rule.op) != (_domain(node), node.op_type) or rule.output not in outputs:
            continue
        if provider in rule.providers and (rule.condition is None or rule.condition(node)):
            found += [(i, rule.output) for i in _inputs(rule, node)]
    return tuple(found)


def _inputs(rule: AliasRule, node: ir.Node) -> list[int]:
    candidates = [i for i in _present(node.inputs) if rule.input in (None, i)]
    return [i for i in candidates if rule.elementwise or sum(v is node.inputs[i] for v in node.inputs) == 1]


def _domain(node: ir.Node) -> str:
    return "" if node.domain == "ai.onnx" else node.domain


def view_pairs(node: ir.Node, provider: str = CPU) -> tuple[tuple[int, int], ...]:
    """(input index, output index) pairs whose values may have one address and both be alive."""
    return _pairs(VIEWS, node, provider)


def inplace_pairs(node: ir.Node, provider: str = CPU) -> tuple[tuple[int, int], ...]:
    """(input index, output index) pairs where the output may overwrite an input that dies at this step."""
    return _pairs(IN_PLACE, node, provider)


def held_by_runtime(node: ir.Node) -> bool:
    """Whether onnxruntime keeps the node's outputs on the host and in its own memory: they are never planned."""
    return (_domain(node), node.op_type) in HELD_BY_RUNTIME


def may_alias_unbound(node: ir.Node) -> bool:
    """Whether onnxruntime may put an output that the caller leaves unbound into an input's memory.

    Such an output is valid only while that input's bytes are: the input's buffer has to outlive the output's last use.
    """
    domain = _domain(node)
    if domain not in ("", "ai.onnx.ml") and not domain.startswith("com.microsoft"):
        return True
    graphs = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    if any(attribute.type in graphs for attribute in node.attributes.values()):
        return True
    values = [*node.inputs, *node.outputs]
    if any(v is not None and v.type is not None and not isinstance(v.type, ir.TensorType) for v in values):
        return True
    return (domain, node.op_type) in _RUNTIME_ALIASES


_RUNTIME_ALIASES = frozenset(
    [(rule.domain, rule.op) for rule in VIEWS]
    + [("", "BatchNormalization"), ("", "Dropout"), ("", "Expand"), ("", "Optional"), ("", "OptionalGetElement")]
    + [("com.microsoft", "ExpandDims")]
)
