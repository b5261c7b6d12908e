"""Which outputs of an operator may share an input's memory on onnxruntime: the written list.

Two values share one address in two ways. A *view* has the bytes of its input and both are alive at once: the kernel
copies nothing when both pointers are equal. An *in place* output overwrites an input that dies at this step: right only
where the kernel reads each element, or buffers each row, before it writes it, at every size and number of threads.

The functions look at the operator, its opset, attributes and types, and at which inputs and outputs exist. The caller
guarantees:

1. both values are dense tensors of the same number of bytes and the same element size, at exactly the same address;
2. in place: no later step reads the input, no view of it is alive, it is neither a graph input nor an initializer;
3. in place: no other *value* that the node reads (a view of the input, say), and no other output of the node, lies in
   those bytes. One value at several inputs, as in `Mul(x, x)`, is answered here: it keeps its pairs only where the
   kernel is elementwise.

So broadcasting needs no check of shapes: an input as large as the output isn't broadcast, whatever unit dimensions
differ, and a smaller one has its own bytes. Of several pairs with one input, or with one output, the caller takes one.

Every entry was compared, bit for bit, with separate memory on onnxruntime 1.31.1's CPU provider (x86-64 with AVX-512,
up to 1,000,003 elements, 1, 2 and 4 threads); of the normalizations, Gemm and the Gelus the source was read too. A
kernel's own `MayInplace` isn't enough: Normalizer declares it and is wrong. Nor is passing on one machine: what fails
with another processor's kernel, by its source, isn't in the list. What isn't, and why, stands behind it.

For the CUDA provider the list holds what its source settles and an H200 has shown (benchmarks/gpu_day/measured): the
views that copy nothing between equal addresses; elementwise kernels, of which each thread writes the element it has
read; Softmax and LogSoftmax of float32, which reduce a row before they write it. More than two inputs of Max, Min and
Sum are accumulated in the output, over inputs not read yet; CumSum, InstanceNormalization and LayerNormalization over
all axes gave other bits there. There are no windows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from memonger.ir.operators import RANKS, facts
from memonger.ir.parts import parts_of
from memonger.ir.values import dense, input_at, static_shape
from memonger.words import listed

CPU = "CPUExecutionProvider"

CUDA = "CUDAExecutionProvider"

_MS = "com.microsoft"

_NCHWC = "com.microsoft.nchwc"

_ML = "ai.onnx.ml"


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


def _present(values: Sequence[ir.Value | None]) -> list[int]:
    return [i for i, value in enumerate(values) if value is not None and value.name != ""]


def _opset(node: ir.Node) -> int | None:
    """The version of the node's operator set, None if neither the node nor its graph says."""
    if node.version is not None or node.graph is None:
        return node.version
    return node.graph.opset_imports.get(node.domain)


def _dtype(node: ir.Node) -> ir.DataType | None:
    first = node.inputs[0] if node.inputs else None
    return None if first is None else first.dtype


def _is_float(node: ir.Node) -> bool:
    return _dtype(node) == ir.DataType.FLOAT


def _normalizes_with_given_statistics(node: ir.Node) -> bool:
    return len(_present(node.outputs)) == 1 and node.attributes.get_int("training_mode", 0) == 0


def _has_opset_8(node: ir.Node) -> bool:
    return (_opset(node) or 0) >= 8


def _has_two_inputs(node: ir.Node) -> bool:
    return len(_present(node.inputs)) == 2 and _has_opset_8(node)


def in_inference_form(node: ir.Node) -> bool:
    """Whether a Dropout is in inference form."""
    training = input_at(node, 2)
    if training is None or training.name == "":
        return True
    constant = None if training.is_graph_input() else training.const_value
    return constant is not None and not constant.numpy().any()


def _moves_unit_dimensions(node: ir.Node) -> bool:
    shape = None if node.inputs[0] is None else node.inputs[0].shape
    if shape is None:
        return False
    perm = node.attributes.get("perm")
    order = range(len(shape))[::-1] if perm is None else perm.as_ints()
    moved = [axis for axis in order if shape[axis] != 1]
    return moved == sorted(moved)


_PLAIN = frozenset(
    {ir.DataType.BOOL, ir.DataType.FLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE}
    | {ir.DataType.INT8, ir.DataType.INT16, ir.DataType.INT32, ir.DataType.INT64}
    | {ir.DataType.UINT8, ir.DataType.UINT16, ir.DataType.UINT32, ir.DataType.UINT64}
)

_SAME_BYTES = "declared an alias by the kernel, which copies only between different addresses"

_COPY = "a plain copy of all bytes, which does nothing between equal addresses"

_ROWS = "each row is reduced to a few numbers before it is written; what follows is elementwise"

_DATA = "the data input is copied if the addresses differ, then the updates are written"

_ADDEND = "the addend is copied if the addresses differ, then the product is accumulated onto it"

_PREFIX = "each slice is read just before its running total is written"

_BUFFERED = "the sum of input and bias is kept in a buffer of its own"


def _rules(
    names: str,
    reason: str,
    *pairs: tuple[int | None, int],
    domain: str = "",
    condition: Callable[[ir.Node], bool] | None = None,
    providers: tuple[str, ...] = (CPU,),
) -> tuple[AliasRule, ...]:
    """One rule for each name and (input, output) pair; (0, 0) where none is given."""
    return tuple(
        AliasRule(domain, name, source, target, reason, condition=condition, providers=providers)
        for name in names.split()
        for source, target in pairs or ((0, 0),)
    )


def _elementwise(names: str, *inputs: int | None, domain: str = "") -> tuple[AliasRule, ...]:
    reason = "each element is read before it, and it alone, is written"
    providers = (CPU,) if domain else (CPU, CUDA)
    return tuple(
        AliasRule(domain, name, source, 0, reason, elementwise=True, providers=providers)
        for name in names.split()
        for source in inputs
    )


VIEWS: tuple[AliasRule, ...] = (
    *_rules("Flatten Identity Reshape Squeeze Unsqueeze", _SAME_BYTES, providers=(CPU, CUDA)),
    *_rules("ExpandDims", _SAME_BYTES, domain=_MS),
    *_rules("BitCast Expand Tile", _COPY),
    *_rules("Cast", _COPY, condition=lambda node: _dtype(node) == node.attributes.get_int("to", 0)),
    *_rules("Concat", _COPY, condition=lambda node: len(node.inputs) == 1),
    *_rules("Dropout", _COPY, condition=in_inference_form),
    *_rules("Transpose", _COPY, condition=_moves_unit_dimensions),
)
"""Where (input, output) of one size are one and the same."""

IN_PLACE: tuple[AliasRule, ...] = (
    *_elementwise("Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Ceil Celu Clip Cos Cosh Elu Erf Exp Floor", 0),
    *_elementwise("HardSigmoid LeakyRelu Log Neg Not Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh", 0),
    *_elementwise("Softplus Softsign Sqrt Tan Tanh ThresholdedRelu", 0),
    *_elementwise("Add And BitShift BitwiseAnd BitwiseOr BitwiseXor Div Equal Greater GreaterOrEqual Less", 0, 1),
    *_elementwise("LessOrEqual Mod Mul Or Pow PRelu Sub Xor", 0, 1),
    *_elementwise("Where", 1, 2),
    *(replace(r, condition=_has_opset_8, providers=(CPU,)) for r in _elementwise("Max Mean Min Sum", None)),
    *(replace(r, condition=_has_two_inputs, providers=(CUDA,)) for r in _elementwise("Max Min Sum", None)),
    *(
        replace(r, condition=lambda node: {_dtype(node), node.attributes.get_int("to", 0)} <= _PLAIN)
        for r in _elementwise("Cast", 0)
    ),
    *_elementwise("Binarizer Imputer Scaler", 0, domain=_ML),
    *_elementwise("QLinearAdd QLinearMul", 0, 3, domain=_MS),
    *_elementwise("QLinearLeakyRelu QLinearSigmoid", 0, domain=_MS),
    *_elementwise("QLinearWhere", 1, 4, domain=_MS),
    *_rules("InstanceNormalization LayerNormalization LpNormalization LRN MeanVarianceNormalization", _ROWS),
    *_rules("RMSNormalization SimplifiedLayerNormalization Softmax", _ROWS),
    *_rules("LogSoftmax", _ROWS, condition=_is_float),
    *_rules("LogSoftmax Softmax", _ROWS, condition=_is_float, providers=(CUDA,)),
    *_rules("QLinearSoftmax", _ROWS, domain=_MS),
    *_rules("BatchNormalization", "scale and shift of each element", condition=_normalizes_with_given_statistics),
    *_rules("BiasGelu", _BUFFERED, domain=_MS),
    *_rules("FastGelu", _BUFFERED, domain=_MS, condition=lambda node: 1 in _present(node.inputs)),
    *_rules(
        "SkipLayerNormalization SkipSimplifiedLayerNormalization", _ROWS, (0, 0), (1, 0), (0, 3), (1, 3), domain=_MS
    ),
    *_rules("CumProd CumSum", _PREFIX, condition=lambda node: node.attributes.get_int("exclusive", 0) == 0),
    *_rules("Scatter ScatterElements ScatterND TensorScatter Trilu", _DATA),
    *_rules("Trilu", _DATA, domain=_MS),
    *_rules("Gemm", _ADDEND, (2, 0), condition=lambda node: _dtype(node) in (ir.DataType.FLOAT, ir.DataType.DOUBLE)),
    *_rules("FusedGemm", _ADDEND, (2, 0), domain=_MS),
    *_rules("FusedConv", _ADDEND, (3, 0), domain=_MS),
    *_rules("Conv", _ADDEND, (3, 0), domain=_NCHWC),
)
"""Where the output may overwrite the input."""

CACHES: tuple[AliasRule, ...] = _rules(
    "GroupQueryAttention", "new rows are written behind those that are counted, which are copied between different "
    "addresses only", (3, 1), (4, 2), domain=_MS,
)  # fmt: skip
"""Where the new content of a persistent input may be written over the old, if none reads beyond what is counted.

Beyond that lies there what lay there before, where memory of its own has zeros: so this isn't in place for any value.
"""

# What looks as if it could, and why it isn't in the list: wholly, or in the case that is named.
#
# - elements move: Concat, DepthToSpace, Gather, GatherElements, Pad, ReverseSequence, Slice (backwards with negative
#   steps), SpaceToDepth, Transpose
# - windows overlap: AveragePool, Conv, MaxPool
# - every output channel reads every input channel: Conv, ConvTranspose (small ones pass)
# - a factor is read for every tile of the output: FusedMatMul, Gemm, MatMul
# - the input is read again after the output was written: FastGelu without bias, Gelu (AVX-512's own kernel doesn't),
#   QuickGelu, LogSoftmax in float64, Max, Mean, Min and Sum before opset 8 (later inputs), Normalizer with L2 (signs)
# - CumProd and CumSum, exclusive: the slice before the one that is written is read
# - Hardmax clears the output, then looks for the maximum
# - RotaryEmbedding: the portable kernel reads each half after it has written the other
# - BatchNormalization in training: once seen to fail, which was not seen again

_RUNTIME_ALIASES: frozenset[tuple[str, str]] = frozenset(
    [(rule.domain, rule.op) for rule in VIEWS]
    + [("", op) for op in ("BatchNormalization", "Optional", "OptionalGetElement")]
)


def _index(rules: tuple[AliasRule, ...]) -> dict[tuple[str, str], tuple[AliasRule, ...]]:
    rules_of: dict[tuple[str, str], tuple[AliasRule, ...]] = {}
    for rule in rules:
        rules_of[rule.domain, rule.op] = (*rules_of.get((rule.domain, rule.op), ()), rule)
    return rules_of


_VIEWS_OF = _index(VIEWS)

_IN_PLACE_OF = _index(IN_PLACE)

_CACHES_OF = _index(CACHES)


def view_pairs(node: ir.Node, provider: str = CPU) -> tuple[tuple[int, int], ...]:
    """(input index, output index) pairs whose values, if of one size, may have one address and both be alive."""
    return _pairs(_VIEWS_OF, node, provider)


def inplace_pairs(node: ir.Node, provider: str = CPU) -> tuple[tuple[int, int], ...]:
    """(input index, output index) pairs where the output may overwrite an input of its size that dies at this step."""
    if node.domain == RANKS:  # each sum lies where the gradient lay; the last output has no bytes
        return tuple((index, index) for index in range(len(node.outputs) - 1))
    return _pairs(_IN_PLACE_OF, node, provider)


def cache_pairs(node: ir.Node, provider: str = CPU) -> tuple[tuple[int, int], ...]:
    """(input index, output index) pairs where the output may be written over a persistent input of its size."""
    return _pairs(_CACHES_OF, node, provider)


def _pairs(
    rules: dict[tuple[str, str], tuple[AliasRule, ...]], node: ir.Node, provider: str
) -> tuple[tuple[int, int], ...]:
    own_rules = rules.get((node.domain, node.op_type))
    if own_rules is None:
        return ()
    outputs = _present(node.outputs)
    pairs: list[tuple[int, int]] = []
    for rule in own_rules:
        if provider in rule.providers and rule.output in outputs and (rule.condition is None or rule.condition(node)):
            candidates = [i for i in _present(node.inputs) if rule.input in (None, i)]
            once = [i for i in candidates if rule.elementwise or sum(v is node.inputs[i] for v in node.inputs) == 1]
            pairs += [(source, rule.output) for source in once]
    return tuple(pairs)


MOST_PARTS = 4096
"""Parts of a node that may lie inside a whole, each of which is compared with all others."""


def windows(node: ir.Node, provider: str = CPU) -> tuple[tuple[ir.Value, ir.Value, int], ...]:
    """(part, whole, byte offset) of a node whose parts may lie inside the whole, both being alive.

    Of a Slice or Split the outputs are parts of its input, of a Concat each input is one of its output. The axis has to
    be the outermost one with more than one element, so that a part's bytes are consecutive in the whole. The kernels
    copy bytes forward, which changes nothing between equal addresses.

    A part read at two inputs of a Concat lies at neither place. Of any other node there are none, whatever its marks,
    nor of one with more than `MOST_PARTS` parts.
    """
    is_narrow = len(node.inputs) + len(node.outputs) <= MOST_PARTS
    parts = parts_of(node) if provider == CPU and is_narrow else ()
    stretches, read = [], Counter(one.part for one in parts)
    for one in parts:
        shape, dtype = static_shape(one.whole), one.whole.dtype
        outermost = shape is not None and dtype is not None and all(dim == 1 for dim in shape[: one.axis])
        if shape is None or dtype is None or not outermost or not dense(one.whole) or dtype.bitwidth % 8:
            continue
        if read[one.part] > 1:
            continue
        stretches.append((one.part, one.whole, one.begin * math.prod(shape[one.axis + 1 :]) * dtype.bitwidth // 8))
    return tuple(stretches)


def why_not_appended(old: ir.Value, new: ir.Value, provider: str = CPU) -> str:
    """Why a run can't write new rows behind a persistent input where that lies; empty where it can.

    It can where the output is a Concat that begins with the input, along the outermost axis with more than one element.
    The kernel then copies the input onto itself, which changes nothing, and the other inputs behind it. Whoever reads
    the input or the output reads the same bytes, before and after.

    Args:
        old: The input.
        new: The output that is its content in the next run.
        provider: Whose kernels run the model.
    """
    node, shape = new.producer(), static_shape(new)
    if node is None or node.domain or node.op_type != "Concat" or len(node.inputs) < 2 or node.inputs[0] is not old:
        made = "no node" if node is None else f"node '{node.name}' ({node.op_type})"
        if node is not None and cache_pairs(node, provider):
            return f"{made} writes behind what is there only where '{old.name}' has its full length from the start"
        return f"'{new.name}' is made by {made}, which is no Concat of '{old.name}' and new rows"
    axis, dtype = node.attributes.get_int("axis", 0), new.dtype
    if provider != CPU or shape is None or dtype is None or not dense(new) or dtype.bitwidth % 8 or old.dtype != dtype:
        return f"node '{node.name}' (Concat) writes no whole bytes on the CPU"
    if old.is_graph_output() or node.inputs.count(old) > 1:
        return f"'{old.name}' is needed as it was after node '{node.name}' (Concat)"
    front = [f"axis {at} of {dim} elements" for at, dim in enumerate(shape[: axis % len(shape)]) if dim != 1]
    if not front:
        return ""
    return (
        f"node '{node.name}' (Concat) appends along axis {axis % len(shape)}, behind {listed(front)}, so that "
        "new rows come between old ones"
    )


def is_declared_view(node: ir.Node) -> bool:
    """Whether onnxruntime makes the output its input under another shape of its own accord."""
    return any(rule.reason == _SAME_BYTES for rule in _VIEWS_OF.get((node.domain, node.op_type), ()))


def may_alias_unbound(node: ir.Node) -> bool:
    """Whether onnxruntime may put an output that the caller leaves unbound into an input's memory.

    Such an output is valid only while that input's bytes are: the input's buffer has to outlive the output's last use.
    Said of views, of anything with subgraphs or with an input or output that isn't a dense tensor, and of operators
    whose kernels onnxruntime doesn't define.
    """
    domain = node.domain
    if domain == RANKS:
        return False
    if domain not in ("", _MS, _NCHWC, _ML) or (domain, node.op_type) in _RUNTIME_ALIASES:
        return True
    graphs = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    if any(attribute.type in graphs for attribute in node.attributes.values()):
        return True
    types = [value.type for value in (*node.inputs, *node.outputs) if value is not None]
    return any(type_ is not None and not isinstance(type_, ir.TensorType) for type_ in types)


def floating_names(model: ir.Model) -> set[str]:
    """Names of the nodes that the runtime runs as soon as it can, wherever they stand."""
    return {str(node.name) for node in model.graph if facts(node).shape_only}
