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

from collections.abc import Callable, Mapping

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


_SEQUENCES = "works on sequences or optional values, and gradients are of tensors"
_OPTIMIZER = "is an optimizer's step, not part of a network: differentiate(optimizer=...) writes one"
_QUANTIZED = "computes with integers of few bits, where gradients are zero or in jumps: train before quantizing"
_ACTIVATION = "is differentiated with Relu, Tanh, Sigmoid, LeakyRelu, HardSigmoid or Clip as its activation"
_CACHE = "updates a decoder's cache as it generates, and isn't part of training: export the model without its cache"

OPEN: Mapping[str, str] = {
    "If": "chooses between branches when it runs: only one with a constant condition is differentiated",
    "Loop": "runs as often as it is told: only one with constant counts and condition is differentiated",
    "MaxRoiPool": "has no gradient rule: onnxruntime has its kernel in float32 alone; RoiAlign came after it",
    "QuantizeLinear": "rounds to few bits, and changes in jumps only: train before quantizing",
    "DynamicQuantizeLinear": "rounds to few bits, and changes in jumps only: train before quantizing",
    "Unique": "has outputs of a size that only the run can tell, and gradients need static shapes",
    "Compress": "chooses elements when it runs: only one with a constant condition is differentiated",
    "CumProd": "has an axis that isn't constant: make it an initializer alone",
    "DeformConv": "is differentiated for images with two axes alone",
    "RoiAlign": "is differentiated with mode='avg' and a sampling_ratio above 0: else data decides what is read",
    "MelWeightMatrix": "makes a table from settings, and isn't differentiated by frequencies",
    "QLinearMatMul": _QUANTIZED,
    "Scan": "holds subgraphs or operators of other domains, or has no step, and isn't written out",
    "com.microsoft::Attention": "is differentiated without past, key lengths in place of a mask, and rotary embedding",
    "com.microsoft::MultiHeadAttention": "is differentiated with queries, keys and values apart, and a mask by key",
    "com.microsoft::FusedMatMul": "is differentiated without transBatchA and transBatchB",
    "com.microsoft::FusedConv": _ACTIVATION,
    "com.microsoft::FusedGemm": _ACTIVATION,
    "com.microsoft::RotaryEmbedding": "is differentiated where it turns whole heads, unscaled and not packed",
    "Optional": _SEQUENCES,
    "OptionalGetElement": _SEQUENCES,
    "ConcatFromSequence": _SEQUENCES,
    "SequenceAt": _SEQUENCES,
    "SequenceConstruct": _SEQUENCES,
    "SequenceErase": _SEQUENCES,
    "SequenceInsert": _SEQUENCES,
    "SequenceMap": _SEQUENCES,
    "SplitToSequence": _SEQUENCES,
    "BitCast": "reads the bits of a number as another type's, and has no slope",
    "ai.onnx.preview.training::Adagrad": _OPTIMIZER,
    "ai.onnx.preview.training::Adam": _OPTIMIZER,
    "ai.onnx.preview.training::Momentum": _OPTIMIZER,
    "ai.onnx.preview::FlexAttention": "is a preview whose definition may change: write it as Attention",
    "com.microsoft::GroupQueryAttention": _CACHE,
    "com.microsoft::DecoderMaskedMultiHeadAttention": _CACHE,
    "com.microsoft::QAttention": _QUANTIZED,
    "com.microsoft::MatMulNBits": _QUANTIZED,
    "com.microsoft::DynamicQuantizeMatMul": _QUANTIZED,
    "com.microsoft::MatMulIntegerToFloat": _QUANTIZED,
}
"""Operators with floating-point inputs and outputs that have no gradient here, and why: one sentence each. It
follows the operator's name in errors, and stands in docs/OPERATORS.md."""
