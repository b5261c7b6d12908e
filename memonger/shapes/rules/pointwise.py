"""Shapes of what works element by element, normalizations included, and of reductions."""

from collections.abc import Sequence
from typing import Any

from memonger.shapes.shaping import Compute, Shape, Site, shape_rule, shape_rules

_MS = "com.microsoft::"

_LIKE_FIRST = (
    "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Bernoulli", "BitCast", "BitwiseNot", "Cast", "CastLike",
    "Ceil", "Celu", "Clip", "Cos", "Cosh", "CumProd", "CumSum", "DequantizeLinear", "Dropout", "Elu", "Erf", "Exp",
    "Floor", "Gelu", "GroupNormalization", "HardSigmoid", "HardSwish", "Hardmax", "Identity", "InstanceNormalization",
    "IsInf", "IsNaN", "LRN", "LeakyRelu", "Log", "LogSoftmax", "LpNormalization", "MeanVarianceNormalization",
    "Mish", "Neg", "Not", "PRelu", "QuantizeLinear", "RMSNormalization", "RandomNormalLike", "RandomUniformLike",
    "Reciprocal", "Relu", "ReverseSequence", "RotaryEmbedding", "Round", "Scatter", "ScatterElements", "ScatterND",
    "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh", "Softmax", "Softplus",
    "Softsign", "Sqrt", "Swish", "Tan", "Tanh", "TensorScatter", "ThresholdedRelu", "Trilu",
)  # fmt: skip

_LIKE_FIRST_OF_MICROSOFT = (
    "BiasAdd", "BiasDropout", "BiasGelu", "BiasSoftmax", "BranchwiseRMSNorm", "DequantizeLinear", "EngramGate",
    "FastGelu", "GatedAdd", "GatedRMSNorm", "Gelu", "GroupNorm", "HyperConnectionPostMix", "Inverse",
    "LinearAttentionGate",
    "LongformerAttention", "MRotaryEmbedding", "MoE", "MoEPacked", "MurmurHash3", "QLinearLeakyRelu", "QLinearSigmoid",
    "QLinearSoftmax", "QMoE", "QuantizeLinear", "QuickGelu", "RotaryEmbedding", "SampleOp", "ScaledSiLU",
    "SkipGroupNorm", "Trilu",
)  # fmt: skip


@shape_rule(*_LIKE_FIRST, *(_MS + name for name in _LIKE_FIRST_OF_MICROSOFT))
def _like_first(site: Site) -> Compute:
    if site.outputs == 1:
        return lambda shapes, _: shapes[:1]
    return lambda shapes, _: (shapes[0],) * site.outputs


def broadcast(*shapes: Shape) -> Shape:
    """What shapes are broadcast to, by numpy's rule.

    Raises:
        ValueError: they don't go together.
    """
    first = shapes[0]
    if all(shape == first for shape in shapes):
        return first
    rank = max(map(len, shapes))
    result = [1] * rank
    for shape in shapes:
        for axis, dim in enumerate(shape, rank - len(shape)):
            if result[axis] == 1:
                result[axis] = dim
            elif dim not in (1, result[axis]):
                raise ValueError(f"{list(shape)} isn't broadcast to {result}")
    return tuple(result)


@shape_rule("LayerNormalization", "SimplifiedLayerNormalization")
def _layer_normalization(site: Site) -> Compute:
    axis = site.integer("axis", -1)

    def compute(shapes: Sequence[Any], _: Sequence[Any]) -> Sequence[Shape]:
        shape = shapes[0]
        first = axis % len(shape)
        statistics = shape[:first] + (1,) * (len(shape) - first)
        return (shape, statistics, statistics)[: site.outputs]

    return compute


@shape_rule(_MS + "SkipLayerNormalization", _MS + "SkipSimplifiedLayerNormalization")
def _skip_normalization(site: Site) -> Compute:
    def compute(shapes: Sequence[Any], _: Sequence[Any]) -> Sequence[Shape]:
        shape = shapes[0]
        statistics = (*shape[:-1], 1)
        return (shape, statistics, statistics, shape)[: site.outputs]

    return compute


@shape_rule(_MS + "SwiGLU")
def _swiglu(site: Site) -> Compute:
    if site.has(1):
        return lambda shapes, _: shapes[:1]
    return lambda shapes, _: ((*shapes[0][:-1], shapes[0][-1] // 2),)


@shape_rule("BatchNormalization")
def _batch_normalization(site: Site) -> Compute:
    return lambda shapes, _: (shapes[0], *[shapes[3]] * (site.outputs - 1))


shape_rules({
    "Add And BitShift BitwiseAnd BitwiseOr BitwiseXor Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min "
    "Mod Mul Or Pow Sub Sum SwiGLU Where Xor com.microsoft::ComplexMul "
    "com.microsoft::ComplexMulConj": lambda shapes, _: (broadcast(*shapes),),
    "com.microsoft::QLinearAdd com.microsoft::QLinearMul": lambda shapes, _: (broadcast(shapes[0], shapes[3]),),
    "com.microsoft::MulInteger": lambda shapes, _: (broadcast(shapes[0], shapes[2]),),
    "com.microsoft::QLinearWhere": lambda shapes, _: (broadcast(shapes[0], shapes[1], shapes[4]),),
    "com.microsoft::BiasSplitGelu": lambda shapes, _: ((*shapes[0][:-1], shapes[0][-1] // 2),),
    "com.microsoft::GemmaRotaryEmbedding": lambda shapes, _: (shapes[1], shapes[3]),
    "com.microsoft::IsAllFinite": lambda *_: ((),),
    "com.microsoft::NGramRepeatBlock": lambda shapes, _: shapes[1:2],
    "DynamicQuantizeLinear": lambda shapes, _: (shapes[0], (), ()),
})  # fmt: skip


@shape_rule(
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
    "ReduceSum", "ReduceSumSquare", "com.microsoft::QLinearReduceMean",
    "com.microsoft::ReduceSumInteger",
)  # fmt: skip
def _reduce(site: Site) -> Compute:
    is_quantized = site.op_type == "QLinearReduceMean"
    keep, does_nothing = site.integer("keepdims", 1), site.integer("noop_with_empty_axes", 0)

    def compute(shapes: Sequence[Any], contents: Sequence[Any]) -> Sequence[Shape]:
        shape = shapes[0]
        axes: Sequence[int] = (site.integers("axes") if is_quantized else site.integers_at("axes", contents)) or ()
        if not axes and not does_nothing:
            axes = range(len(shape))
        gone = {axis % len(shape) for axis in axes}
        if keep:
            return (tuple(1 if axis in gone else dim for axis, dim in enumerate(shape)),)
        return (tuple(dim for axis, dim in enumerate(shape) if axis not in gone),)

    return compute


@shape_rule("ArgMax", "ArgMin")
def _arg(site: Site) -> Compute:
    axis, keep = site.integer("axis", 0), site.integer("keepdims", 1)

    def compute(shapes: Sequence[Any], _: Sequence[Any]) -> Sequence[Shape]:
        shape = shapes[0]
        at = axis % len(shape)
        return ((*shape[:at], *([1] if keep else []), *shape[at + 1 :]),)

    return compute


@shape_rule("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
def _loss(site: Site) -> Compute:
    is_whole = site.text("reduction", "mean") == "none"
    return lambda shapes, _: (shapes[1] if is_whole else (), shapes[0])[: site.outputs]


shape_rules({"Det": lambda shapes, _: (shapes[0][:-2],)})
