"""Shapes of reductions."""

from collections.abc import Sequence
from typing import Any

from memonger.shapes.shaping import Compute, Shape, Site, shape_rule, shape_rules


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
