"""Operators that reduce over some axes, or run along one, and can be cut along the others."""

from memonger.tiling.cutting import Cut, Slicing, axis_rule, axis_rules
from memonger.tiling.rules.pointwise import broadcast


def _keep(cut: Cut, working: int, *, verb: str, outputs: tuple[int, ...] | None = None) -> Slicing:
    """The first input's axis is the outputs' too, if it isn't the one that the operator works along."""
    working = cut.positive(working)
    if cut.axis == working:
        cut.refuse(f"{verb} axis {cut.axis}")
    return cut.all_along(cut.axis, [0], outputs)


@axis_rule("Softmax LogSoftmax Hardmax")
def _softmax(cut: Cut) -> Slicing:
    """Before operator set 13 over the given axis and all that follow."""
    if cut.opset >= 13:
        return _keep(cut, cut.integer("axis", -1), verb="reduces over")
    return _trailing(cut, cut.integer("axis", 1))


def _trailing(cut: Cut, first: int) -> Slicing:
    """Over an axis and all that follow."""
    if cut.axis >= cut.positive(first):
        cut.refuse(f"reduces over axis {cut.axis}")
    return cut.all_along(cut.axis, [0])


@axis_rule("com.microsoft::SkipLayerNormalization com.microsoft::SkipSimplifiedLayerNormalization")
def _skip_normalization(cut: Cut) -> Slicing:
    """The second input, which is added, may be broadcast to the first."""
    slices = broadcast(cut, [0, 1])
    if slices.outputs[0] == len(cut.out()) - 1:
        cut.refuse(f"reduces over axis {cut.axis}")
    return slices


@axis_rule("MeanVarianceNormalization")
def _mean_variance(cut: Cut) -> Slicing:
    if cut.axis in [cut.positive(axis) for axis in cut.integers("axes", [0, 2, 3]) or []]:
        cut.refuse(f"takes statistics over axis {cut.axis}")
    return cut.all_along(cut.axis, [0])


_AXES_ARE_AN_INPUT = {"ReduceSum": 13}


@axis_rule(
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum",
    "ReduceSumSquare",
)
def _reduce(cut: Cut) -> Slicing:
    axes = cut.setting("axes", 1, _AXES_ARE_AN_INPUT.get(cut.node.op_type, 18))
    if not axes:
        axes = [] if cut.integer("noop_with_empty_axes", 0) else list(range(len(cut.dims(0))))
    return _without(cut, [cut.positive(axis) for axis in axes])


def _without(cut: Cut, reduced: list[int]) -> Slicing:
    if cut.axis in reduced:
        cut.refuse(f"reduces over axis {cut.axis}")
    gone = 0 if cut.integer("keepdims", 1) else sum(axis < cut.axis for axis in reduced)
    return cut.along({0: cut.axis}, {0: cut.axis - gone})


@axis_rule("Trilu")
def _triangle(cut: Cut) -> Slicing:
    """The last two axes are a matrix, of which a slice has another diagonal."""
    if cut.axis >= len(cut.dims(0)) - 2:
        cut.refuse(f"keeps a triangle of axes that axis {cut.axis} is one of")
    return cut.all_along(cut.axis, [0])


axis_rules({
    "ArgMax ArgMin": lambda cut: _without(cut, [cut.positive(cut.integer("axis", 0))]),
    "CumSum": lambda cut: _keep(cut, int(cut.constant(1).reshape(-1)[0]), verb="adds up along"),
    "LpNormalization": lambda cut: _keep(cut, cut.integer("axis", -1), verb="reduces over"),
    "TopK": lambda cut: _keep(cut, cut.integer("axis", -1), verb="picks the largest along"),
    "LayerNormalization RMSNormalization SimplifiedLayerNormalization com.microsoft::QLinearSoftmax":
        lambda cut: _trailing(cut, cut.integer("axis", -1)),
})  # fmt: skip
