"""Facts about ONNX operators that several stages ask for: one table, by domain and type.

An operator without a row has none of these facts. What takes a rule rather than a fact stands with the rules: which
outputs may share an input's memory in `memonger.graph.aliasing`, how many FLOPs a node takes in `memonger.graph.costs`,
gradients in `memonger.autodiff.rules`, and what CUDA wants otherwise in `memonger.lowering.cuda`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir


@dataclass(frozen=True, slots=True)
class Operator:
    """What is true of every node of one operator, whatever its attributes. Numbers are indices of inputs.

    Attributes:
        random: It draws random numbers (Dropout in training form only): another run gives others, unless it is seeded.
            It is never folded into a constant, and never run twice.
        sized_at_run_time: What its inputs hold decides the size of its outputs, even where that is an input's shape.
        sized_by: Inputs whose content, not only their shape, decides the size of an output.
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
    settings: tuple[int, ...] = ()
    once_attributes: tuple[int, ...] = ()
    shape_only: bool = False
    reads_part: bool = False
    cheap: bool = False
    without_gradient: bool = False


RANKS = "memonger.ranks"
"""Domain of the nodes that stand for collectives between ranks; see `memonger.graph.collectives`."""

BEGIN, WAIT = "Begin", "Wait"
"""What their types begin with; behind that stands the bucket's number."""


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

OPERATORS: Mapping[str, Operator] = {
    "AffineGrid": Operator(sized_by=(1,)),
    "And": Operator(without_gradient=True),
    "ArgMax": Operator(without_gradient=True),
    "ArgMin": Operator(without_gradient=True),
    "BatchNormalization": Operator(settings=(3, 4), cheap=True),
    "Bernoulli": Operator(random=True, without_gradient=True),
    "BitShift": Operator(without_gradient=True),
    "BitwiseAnd": Operator(without_gradient=True),
    "BitwiseNot": Operator(without_gradient=True),
    "BitwiseOr": Operator(without_gradient=True),
    "BitwiseXor": Operator(without_gradient=True),
    "BlackmanWindow": Operator(sized_by=(0,)),
    "Cast": Operator(cheap=True),
    "Ceil": Operator(without_gradient=True),
    "Celu": Operator(cheap=True),
    "CenterCropPad": Operator(sized_by=(1,)),
    "Clip": Operator(settings=(1, 2), once_attributes=(1, 2), cheap=True),
    "Col2Im": Operator(sized_by=(1, 2)),
    "Compress": Operator(sized_at_run_time=True),
    "Concat": Operator(cheap=True),
    "ConcatFromSequence": Operator(sized_at_run_time=True),
    "ConstantOfShape": Operator(sized_by=(0,), without_gradient=True),
    "DFT": Operator(sized_by=(1, 2)),
    "DequantizeLinear": Operator(settings=(1, 2)),
    "Dropout": Operator(random=True, settings=(1,)),
    "Elu": Operator(cheap=True),
    "Equal": Operator(without_gradient=True),
    "Erf": Operator(cheap=True),
    "Exp": Operator(cheap=True),
    "Expand": Operator(sized_by=(1,), cheap=True),
    "EyeLike": Operator(without_gradient=True),
    "Flatten": Operator(cheap=True),
    "Floor": Operator(without_gradient=True),
    "Gather": Operator(reads_part=True),
    "GatherElements": Operator(reads_part=True),
    "GatherND": Operator(reads_part=True),
    "Gelu": Operator(cheap=True),
    "Greater": Operator(without_gradient=True),
    "GreaterOrEqual": Operator(without_gradient=True),
    "HammingWindow": Operator(sized_by=(0,)),
    "HannWindow": Operator(sized_by=(0,)),
    "HardSigmoid": Operator(cheap=True),
    "HardSwish": Operator(cheap=True),
    "Hardmax": Operator(without_gradient=True),
    "Identity": Operator(cheap=True),
    "If": Operator(sized_at_run_time=True),
    "ImageDecoder": Operator(sized_at_run_time=True),
    "InstanceNormalization": Operator(cheap=True),
    "IsInf": Operator(without_gradient=True),
    "IsNaN": Operator(without_gradient=True),
    "LRN": Operator(cheap=True),
    "LayerNormalization": Operator(cheap=True),
    "LeakyRelu": Operator(cheap=True),
    "Less": Operator(without_gradient=True),
    "LessOrEqual": Operator(without_gradient=True),
    "Loop": Operator(sized_at_run_time=True),
    "MaxUnpool": Operator(sized_by=(2,)),
    "MelWeightMatrix": Operator(sized_by=(0, 1, 2, 3, 4), settings=(3, 4)),
    "Mish": Operator(cheap=True),
    "Mul": Operator(cheap=True),
    "Multinomial": Operator(random=True, without_gradient=True),
    "NegativeLogLikelihoodLoss": Operator(settings=(2,)),
    "NonMaxSuppression": Operator(sized_at_run_time=True, settings=(3, 4)),
    "NonZero": Operator(sized_at_run_time=True, without_gradient=True),
    "Not": Operator(without_gradient=True),
    "OneHot": Operator(sized_by=(1,), settings=(1, 2), without_gradient=True),
    "Optional": Operator(sized_at_run_time=True),
    "OptionalGetElement": Operator(sized_at_run_time=True),
    "Or": Operator(without_gradient=True),
    "PRelu": Operator(cheap=True),
    "Pad": Operator(sized_by=(1, 3), settings=(2,), once_attributes=(2,)),
    "QuantizeLinear": Operator(settings=(1, 2)),
    "RandomNormal": Operator(random=True, without_gradient=True),
    "RandomNormalLike": Operator(random=True, without_gradient=True),
    "RandomUniform": Operator(random=True, without_gradient=True),
    "RandomUniformLike": Operator(random=True, without_gradient=True),
    "Range": Operator(sized_by=(0, 1, 2), settings=(0, 1, 2), without_gradient=True),
    "ReduceL1": Operator(sized_by=(1,)),
    "ReduceL2": Operator(sized_by=(1,)),
    "ReduceLogSum": Operator(sized_by=(1,)),
    "ReduceLogSumExp": Operator(sized_by=(1,)),
    "ReduceMax": Operator(sized_by=(1,)),
    "ReduceMean": Operator(sized_by=(1,)),
    "ReduceMin": Operator(sized_by=(1,)),
    "ReduceProd": Operator(sized_by=(1,)),
    "ReduceSum": Operator(sized_by=(1,)),
    "ReduceSumSquare": Operator(sized_by=(1,)),
    "Relu": Operator(cheap=True),
    "Reshape": Operator(sized_by=(1,), cheap=True),
    "Resize": Operator(sized_by=(1, 2, 3), settings=(1, 2)),
    "RotaryEmbedding": Operator(settings=(1, 2)),
    "Round": Operator(without_gradient=True),
    "STFT": Operator(sized_by=(1, 3)),
    "Scan": Operator(sized_at_run_time=True),
    "Selu": Operator(cheap=True),
    "SequenceAt": Operator(sized_at_run_time=True),
    "SequenceMap": Operator(sized_at_run_time=True),
    "Shape": Operator(shape_only=True, without_gradient=True),
    "Sigmoid": Operator(cheap=True),
    "Sign": Operator(without_gradient=True),
    "Size": Operator(shape_only=True, without_gradient=True),
    "Slice": Operator(sized_by=(1, 2, 3, 4), reads_part=True, cheap=True),
    "SoftmaxCrossEntropyLoss": Operator(settings=(2,)),
    "Softplus": Operator(cheap=True),
    "Softsign": Operator(cheap=True),
    "Split": Operator(sized_by=(1,), cheap=True),
    "SplitToSequence": Operator(sized_at_run_time=True),
    "Squeeze": Operator(sized_by=(1,), cheap=True),
    "StringSplit": Operator(sized_at_run_time=True),
    "Tanh": Operator(cheap=True),
    "Tile": Operator(sized_by=(1,)),
    "TopK": Operator(sized_by=(1,)),
    "Transpose": Operator(cheap=True),
    "Unique": Operator(sized_at_run_time=True),
    "Unsqueeze": Operator(sized_by=(1,), cheap=True),
    "Upsample": Operator(sized_by=(1,), settings=(1,)),
    "Xor": Operator(without_gradient=True),
    "com.microsoft::DequantizeLinear": Operator(settings=(1, 2)),
    "com.microsoft::ExpandDims": Operator(sized_by=(1,)),
    "com.microsoft::GatherND": Operator(reads_part=True),
    "com.microsoft::Pad": Operator(sized_by=(1,), settings=(2,)),
    "com.microsoft::QuantizeLinear": Operator(settings=(1, 2)),
    "com.microsoft::Range": Operator(sized_by=(0, 1, 2), settings=(0, 1, 2)),
    "com.microsoft::RotaryEmbedding": Operator(settings=(2, 3)),
    "com.microsoft::Unique": Operator(sized_at_run_time=True),
}
