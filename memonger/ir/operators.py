"""Facts about ONNX operators that several stages ask for: one table, by domain and type.

An operator without a row has none of these facts. What takes a rule rather than a fact stands with the rules: which
outputs may share an input's memory in `memonger.graph.aliasing`, how many FLOPs a node takes in `memonger.graph.costs`,
gradients in `memonger.autodiff.rules`, and what CUDA wants otherwise in `memonger.lowering.cuda`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import onnx_ir as ir

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Operator:
    """What is true of every node of one operator, whatever its attributes. Numbers are indices of inputs.

    Attributes:
        random: It draws random numbers (Dropout in training form only): another run gives others, unless it is seeded.
            It is never folded into a constant, and never run twice.
        sized_at_run_time: What its inputs hold decides the size of its outputs, even where that is an input's shape.
        sized_by: Inputs whose content, not only their shape, decides the size of an output.
        sized_anyway: Outputs whose size those inputs don't decide.
        counts: Inputs that say how many keys are valid, each with how many less it says.
        settings: Inputs that are settings or running statistics: a float initializer that is only read there is not
            trained.
        once_attributes: Inputs that were attributes in older operator sets.
        shape_only: It reads the shape of its input, not its content. onnxruntime runs it on the host as soon as it can,
            and keeps its output in its own memory.
        reads_part: It reads no more of its first input than it writes.
        cheap: Running it again costs next to nothing: normalizations, activations, concatenations and views, as in
            Pleiss et al. 2017, "Memory-Efficient Implementation of DenseNets". Sums are not: running a residual sum
            again takes the sum before it, and so on to the first.
        without_gradient: Its outputs don't change with its inputs, or change in jumps only.
    """

    random: bool = False
    sized_at_run_time: bool = False
    sized_by: tuple[int, ...] = ()
    sized_anyway: tuple[int, ...] = ()
    counts: tuple[tuple[int, int], ...] = ()
    settings: tuple[int, ...] = ()
    once_attributes: tuple[int, ...] = ()
    shape_only: bool = False
    reads_part: bool = False
    cheap: bool = False
    without_gradient: bool = False


RANKS = "memonger.ranks"
"""Domain of the nodes that stand for collectives between ranks; see `memonger.graph.collectives`."""

BEGIN, WAIT, MEAN = "Begin", "Wait", "Mean"
"""What their types begin with; behind that stands the bucket's number, or `MEAN` and a number where it is no bucket."""


def operator_name(node: ir.Node) -> str:
    """The node's operator as the table and `Graph.ops` write it: ``domain::type``, or ``type`` in ONNX's own domain."""
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type


def facts(node: ir.Node) -> Operator:
    """The facts about a node's operator."""
    return facts_of(operator_name(node))


def facts_of(name: str) -> Operator:
    """The facts about the operator of that name; see `operator_name`."""
    return OPERATORS.get(name, _NOTHING_KNOWN)


_NOTHING_KNOWN = Operator()


def rule_of_operators(rules: dict[str, Any], kind: str, names: Iterable[str]) -> Callable[[F], F]:
    """A decorator: the function becomes the rule of these operators. A second rule for one operator raises.

    Args:
        rules: The table that it is entered in.
        kind: What rules of the table are called, as ``a shape rule``.
        names: The operators, by `operator_name`.
    """

    def register(rule: F) -> F:
        for name in names:
            if name in rules:
                raise ValueError(f"operator {name} has {kind} already")
            rules[name] = rule
        return rule

    return register


def _all(names: str, **facts: Any) -> dict[str, Operator]:
    """A row for each of these operators."""
    return dict.fromkeys(names.split(), Operator(**facts))


OPERATORS: Mapping[str, Operator] = {
    **_all(
        "AffineGrid CenterCropPad ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin "
        "ReduceProd ReduceSum ReduceSumSquare Tile TopK com.microsoft::ExpandDims",
        sized_by=(1,),
    ),
    **_all(
        "And ArgMax ArgMin BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Ceil Equal EyeLike Floor Greater "
        "GreaterOrEqual Hardmax IsInf IsNaN Less LessOrEqual Not Or Round Sign Xor",
        without_gradient=True,
    ),
    **_all("BatchNormalization", settings=(3, 4), cheap=True),
    **_all(
        "Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike",
        random=True,
        without_gradient=True,
    ),
    **_all("BlackmanWindow HammingWindow HannWindow", sized_by=(0,)),
    **_all(
        "Cast Celu Concat Elu Erf Exp Flatten Gelu HardSigmoid HardSwish Identity InstanceNormalization LRN "
        "LayerNormalization LeakyRelu Mish Mul PRelu Relu Selu Sigmoid Softplus Softsign Tanh Transpose",
        cheap=True,
    ),
    **_all("Clip", settings=(1, 2), once_attributes=(1, 2), cheap=True),
    **_all("Col2Im DFT", sized_by=(1, 2)),
    **_all(
        "Compress ConcatFromSequence If ImageDecoder Loop Optional OptionalGetElement OptionalHasElement Scan "
        "SequenceAt SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength SequenceMap "
        "SplitToSequence StringNormalizer StringSplit Unique ai.onnx.ml::CastMap ai.onnx.ml::DictVectorizer "
        "ai.onnx.ml::ZipMap com.microsoft::BeamSearch com.microsoft::BifurcationDetector "
        "com.microsoft::DynamicTimeWarping com.microsoft::GreedySearch com.microsoft::RemovePadding "
        "com.microsoft::Sampling com.microsoft::Tokenizer com.microsoft::Unique com.microsoft::WhisperBeamSearch",
        sized_at_run_time=True,
    ),
    **_all("ConstantOfShape", sized_by=(0,), without_gradient=True),
    **_all(
        "DequantizeLinear QuantizeLinear RotaryEmbedding com.microsoft::DequantizeLinear com.microsoft::QuantizeLinear",
        settings=(1, 2),
    ),
    **_all("Dropout", random=True, settings=(1,)),
    **_all("Expand Reshape Split Squeeze Unsqueeze", sized_by=(1,), cheap=True),
    **_all("Gather GatherElements GatherND com.microsoft::GatherND", reads_part=True),
    **_all("MaxUnpool", sized_by=(2,)),
    **_all("MelWeightMatrix", sized_by=(0, 1, 2, 3, 4), settings=(3, 4)),
    **_all("NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss", settings=(2,)),
    **_all("NonMaxSuppression", sized_at_run_time=True, settings=(3, 4)),
    **_all("NonZero", sized_at_run_time=True, without_gradient=True),
    **_all("OneHot", sized_by=(1,), settings=(1, 2), without_gradient=True),
    **_all("Pad", sized_by=(1, 3), settings=(2,), once_attributes=(2,)),
    **_all("Range", sized_by=(0, 1, 2), settings=(0, 1, 2), without_gradient=True),
    **_all("Resize", sized_by=(1, 2, 3), settings=(1, 2)),
    **_all("STFT", sized_by=(1, 3)),
    **_all("Shape Size", shape_only=True, without_gradient=True),
    **_all("Slice", sized_by=(1, 2, 3, 4), reads_part=True, cheap=True),
    **_all("Upsample", sized_by=(1,), settings=(1,)),
    **_all("com.microsoft::ConvTransposeWithDynamicPads com.microsoft::MatMulFpQ4", sized_by=(2,)),
    **_all("com.microsoft::CropAndResize", sized_by=(3,)),
    **_all("Attention", counts=((6, 0),)),
    **_all("com.microsoft::GroupQueryAttention", sized_by=(6,), sized_anyway=(0,), counts=((5, 1), (6, 0))),
    **_all("com.microsoft::SparseAttention", counts=((7, 0), (8, 0))),
    **_all("com.microsoft::Pad", sized_by=(1,), settings=(2,)),
    **_all("com.microsoft::Range", sized_by=(0, 1, 2), settings=(0, 1, 2)),
    **_all("com.microsoft::RelativePositionBias", sized_by=(1, 2)),
    **_all("com.microsoft::RotaryEmbedding", settings=(2, 3)),
}
