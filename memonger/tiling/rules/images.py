"""Convolutions, pools and other operators on images: each image of a batch by itself, along axis 0."""

from memonger.tiling.cutting import Cut, Slicing, axis_rule, axis_rules


def batch(cut: Cut, *inputs: int) -> Slicing:
    """These inputs, and all outputs, are cut along axis 0."""
    if cut.axis != 0:
        cut.refuse(f"works on whole images, and can't be cut along axis {cut.axis}")
    return cut.all_along(0, inputs)


@axis_rule("Conv")
def _conv(cut: Cut) -> Slicing:
    """By images; or by output channels, where the weight is cut along them: gradients of weights are written so."""
    if cut.axes.get(1) == 0 and cut.integer("group", 1) == 1:
        return cut.along({1: 0} | ({2: 0} if cut.has(2) else {}), {0: 1}, whole=(0,))
    return batch(cut, 0)


@axis_rule("MaxPool")
def _max_pool(cut: Cut) -> Slicing:
    if 1 in cut.outputs:
        cut.refuse("numbers the elements of its input through all images of the batch (axis 0)")
    return batch(cut, 0)


@axis_rule("Resize Upsample")
def _resize(cut: Cut) -> Slicing:
    if cut.dims(0)[:1] != cut.out()[:1]:
        cut.refuse("changes the size of axis 0")
    return batch(cut, 0)


axis_rules({
    "AveragePool ConvTranspose DepthToSpace GlobalAveragePool GlobalLpPool GlobalMaxPool GroupNormalization "
    "InstanceNormalization LRN LpPool SpaceToDepth Col2Im ConvInteger QLinearConv com.microsoft::NhwcMaxPool "
    "com.microsoft::QLinearAveragePool com.microsoft::QLinearGlobalAveragePool com.microsoft.nchwc::AveragePool "
    "com.microsoft.nchwc::GlobalAveragePool com.microsoft.nchwc::GlobalMaxPool com.microsoft.nchwc::MaxPool "
    "com.microsoft.nchwc::ReorderInput com.microsoft.nchwc::ReorderOutput com.microsoft.nchwc::Upsample":
        lambda cut: batch(cut, 0),
    "com.microsoft::FusedConv com.microsoft.nchwc::Conv": lambda cut: batch(cut, 0, 3),  # the fourth input is added
    "DeformConv": lambda cut: batch(cut, 0, 2, 4),
    "GridSample": lambda cut: batch(cut, 0, 1),
})  # fmt: skip
