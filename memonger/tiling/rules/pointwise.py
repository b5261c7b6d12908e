"""Operators whose elements are computed one by one, with shapes broadcast against the output's from the right."""

from collections.abc import Iterable

from memonger.tiling.cutting import Cut, Slicing, axis_rule, axis_rules


def broadcast(cut: Cut, inputs: Iterable[int], outputs: Iterable[int] | None = None) -> Slicing:
    """All inputs that have the elements of the output's axis are cut; those with one element there are read whole."""
    dims = cut.out()
    axes = {axis + len(dims) - len(cut.dims(index)) for index, axis in cut.axes.items()}
    if len(axes) > 1:
        cut.refuse(f"reads values that are cut along different axes: {sorted(axes)} of its output")
    axis = axes.pop()
    sliced = {}
    for index in inputs:
        own = cut.dims(index)
        place = axis - len(dims) + len(own)
        if place >= 0 and own[place] == dims[axis]:
            sliced[index] = place
    return cut.along(sliced, dict.fromkeys(cut.outputs if outputs is None else outputs, axis))


@axis_rule(
    "QuantizeLinear DequantizeLinear com.microsoft::QuantizeLinear com.microsoft::DequantizeLinear",
)
def _quantize(cut: Cut) -> Slicing:
    """One scale for all; one for each element of an axis; or one for each block of an axis, of the input's rank."""
    axis, sliced = cut.axis, {0: cut.axis}
    of_scales = cut.positive(cut.integer("axis", 1)) if len(cut.dims(0)) > 1 else 0
    for index in (1, 2):
        dims = cut.dims(index) if cut.has(index) else ()
        if len(dims) == 1 and dims[0] > 1 and axis == of_scales:
            sliced[index] = 0
        elif len(dims) > 1:
            if axis == of_scales:
                cut.refuse(f"has scales for blocks of axis {axis}")
            sliced[index] = axis
    return cut.along(sliced, {0: axis})


@axis_rule("BatchNormalization")
def _batch_normalization(cut: Cut) -> Slicing:
    """With given statistics each channel is a line; without, a batch is one whole."""
    if cut.integer("training_mode", 0) or len(cut.outputs) > 1:
        cut.refuse(f"takes statistics over its input, which is cut along axis {cut.axis}")
    sliced = {0: cut.axis}
    if cut.axis == 1:
        sliced.update(dict.fromkeys(range(1, 5), 0))
    return cut.along(sliced, {0: cut.axis})


axis_rules({
    "Abs Acos Acosh Add And Asin Asinh Atan Atanh BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Cast Ceil Celu "
    "Clip Cos Cosh Div Dropout Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid HardSwish Identity "
    "IsInf IsNaN LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not Or PRelu Pow Reciprocal Relu Round "
    "Selu Shrink Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Sub Sum Tan Tanh ThresholdedRelu Where Xor "
    "com.microsoft::BiasGelu com.microsoft::FastGelu com.microsoft::Gelu com.microsoft::QuickGelu "
    "ai.onnx.ml::Binarizer":
        lambda cut: broadcast(cut, cut.inputs),
    "CastLike Expand com.microsoft::QLinearSigmoid com.microsoft::QLinearLeakyRelu": lambda cut: broadcast(cut, [0]),
    "com.microsoft::QLinearAdd com.microsoft::QLinearMul": lambda cut: broadcast(cut, [0, 3]),
})  # fmt: skip
