"""Shapes of convolutions, pooling, resizing, and of onnxruntime's blocked layouts, whose channels come in blocks."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from memonger.shapes.shaping import Compute, Shape, Site, shape_rule, shape_rules

_MS, _NCHWC = "com.microsoft::", "com.microsoft.nchwc::"

_Window = Callable[[tuple[int, ...], tuple[int, ...]], tuple[int, ...]]


def _windows(site: Site, is_pool: bool = False) -> _Window:
    """A function of spatial sizes and the window's size: how many windows there are along each axis.

    Where padding is to be found, onnxruntime finds a pool's as if its windows weren't dilated.
    """
    strides, dilations, pads = site.integers("strides"), site.integers("dilations"), site.integers("pads")
    auto, ceil = site.text("auto_pad", "NOTSET"), site.integer("ceil_mode", 0)

    def count(sizes: tuple[int, ...], kernel: tuple[int, ...]) -> tuple[int, ...]:
        rank, found = len(sizes), []
        for axis, (size, width) in enumerate(zip(sizes, kernel, strict=True)):
            stride = strides[axis] if strides else 1
            reach = (dilations[axis] if dilations else 1) * (width - 1) + 1
            before, after = (pads[axis], pads[axis + rank]) if pads and auto == "NOTSET" else (0, 0)
            if auto.startswith("SAME"):
                total = (-(-size // stride) - 1) * stride + (width if is_pool else reach) - size
                before, after = (total // 2, -(-total // 2))[:: -1 if auto == "SAME_LOWER" else 1]
            left = size + before + after - reach
            if left <= -(stride if ceil else 1):  # rounded up, one that reaches beyond the end counts
                raise ValueError(f"a window of {reach} is larger than {size + before + after}")
            windows = (-(-left // stride) if ceil else left // stride) + 1
            found.append(windows - (bool(ceil) and (windows - 1) * stride >= size + before))
        return tuple(found)

    return count


def _convolution(site: Site, image: int, weight: int) -> Compute:
    count = _windows(site)

    def compute(shapes: Sequence[Any], _: Sequence[Any]) -> Sequence[Shape]:
        x, w = shapes[image], shapes[weight]
        return ((x[0], w[0], *count(x[2:], w[2:])),)

    return compute


@shape_rule("Conv", "ConvInteger", "DeformConv", _MS + "FusedConv", _NCHWC + "Conv")
def _conv(site: Site) -> Compute:
    return _convolution(site, 0, 1)


@shape_rule("QLinearConv")
def _quantized_conv(site: Site) -> Compute:
    return _convolution(site, 0, 3)


@shape_rule(_MS + "QLinearConv", _MS + "NhwcConv", _MS + "NhwcFusedConv")
def _conv_of_microsoft(site: Site) -> Compute:
    weight = 3 if site.op_type == "QLinearConv" else 1
    if site.integer("channels_last", int(site.op_type != "QLinearConv")):
        count = _windows(site)

        def compute(shapes: Sequence[Any], _: Sequence[Any]) -> Sequence[Shape]:
            x, w = shapes[0], shapes[weight]
            return ((x[0], *count(x[1:-1], w[2:]), w[0]),)

        return compute
    return _convolution(site, 0, 3)


@shape_rule("ConvTranspose", _MS + "ConvTransposeWithDynamicPads")
def _conv_transpose(site: Site) -> Compute:
    strides, dilations, pads = site.integers("strides"), site.integers("dilations"), site.integers("pads")
    more, group = site.integers("output_padding"), site.integer("group", 1)
    wanted, auto = site.integers("output_shape"), site.text("auto_pad", "NOTSET")
    at_pads = 2 if site.op_type == "ConvTransposeWithDynamicPads" and site.has(2) else None

    def compute(shapes: Sequence[Any], contents: Sequence[Any]) -> Sequence[Shape]:
        x, w = shapes[0], shapes[1]
        rank, found = len(x) - 2, []
        own = pads if at_pads is None else contents[at_pads].tolist()
        for axis, (size, width) in enumerate(zip(x[2:], w[2:], strict=True)):
            stride = strides[axis] if strides else 1
            if wanted:
                found.append(wanted[axis - rank])
                continue
            reach = (dilations[axis] if dilations else 1) * (width - 1) + 1
            cut = own[axis] + own[axis + rank] if own and auto == "NOTSET" else 0
            made = stride * (size - 1) + (more[axis] if more else 0) + reach - cut
            found.append(min(made, size * stride) if auto.startswith("SAME") else made)
        return ((x[0], w[1] * group, *found),)

    return compute


@shape_rule(
    "AveragePool", "LpPool", "MaxPool", _MS + "MaxpoolWithMask", _MS + "NhwcMaxPool", _MS + "QLinearAveragePool",
    _NCHWC + "AveragePool", _NCHWC + "MaxPool",
)  # fmt: skip
def _pool(site: Site) -> Compute:
    count, kernel = _windows(site, is_pool=True), site.integers("kernel_shape") or ()
    last = site.integer("channels_last", 0) or site.op_type == "NhwcMaxPool"

    def compute(shapes: Sequence[Any], _: Sequence[Any]) -> Sequence[Shape]:
        x = shapes[0]
        shape = (x[0], *count(x[1:-1], kernel), x[-1]) if last else (*x[:2], *count(x[2:], kernel))
        return (shape,) * site.outputs

    return compute


@shape_rule(
    "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", _MS + "QLinearGlobalAveragePool",
    _NCHWC + "GlobalAveragePool", _NCHWC + "GlobalMaxPool",
)  # fmt: skip
def _global_pool(site: Site) -> Compute:
    if site.integer("channels_last", 0):
        return lambda shapes, _: ((shapes[0][0], *[1] * (len(shapes[0]) - 2), shapes[0][-1]),)
    return lambda shapes, _: ((*shapes[0][:2], *[1] * (len(shapes[0]) - 2)),)


@shape_rule("MaxUnpool")
def _max_unpool(site: Site) -> Compute:
    kernel, strides, pads = site.integers("kernel_shape") or (), site.integers("strides"), site.integers("pads")

    def compute(shapes: Sequence[Any], contents: Sequence[Any]) -> Sequence[Shape]:
        if len(contents) > 2 and contents[2] is not None:
            return (tuple(contents[2].tolist()),)
        x, found = shapes[0], []
        for axis, (size, width) in enumerate(zip(x[2:], kernel, strict=True)):
            cut = pads[axis] + pads[axis + len(kernel)] if pads else 0
            found.append((size - 1) * (strides[axis] if strides else 1) + width - cut)
        return ((*x[:2], *found),)

    return compute


@shape_rule(_NCHWC + "ReorderInput")
def _reorder_input(site: Site) -> Compute:
    channels = site.fixed(0, 1)  # rounded up to blocks, whose width is the processor's
    if site.integer("channels_last", 0):
        return lambda shapes, _: ((shapes[0][0], channels, *shapes[0][1:-1]),)
    return lambda shapes, _: ((shapes[0][0], channels, *shapes[0][2:]),)


@shape_rule(_NCHWC + "ReorderOutput")
def _reorder_output(site: Site) -> Compute:
    channels = site.integer("channels", 0)
    if site.integer("channels_last", 0):
        return lambda shapes, _: ((shapes[0][0], *shapes[0][2:], channels),)
    return lambda shapes, _: ((shapes[0][0], channels, *shapes[0][2:]),)


@shape_rule(_NCHWC + "Upsample")
def _upsample_in_blocks(site: Site) -> Compute:
    scales = site.integers("scales") or ()
    return lambda shapes, _: (tuple(dim * scale for dim, scale in zip(shapes[0], scales, strict=True)),)


@shape_rule("Resize")
def _resize(site: Site) -> Compute:
    axes, policy = site.integers("axes"), site.text("keep_aspect_ratio_policy", "stretch")
    crops = site.text("coordinate_transformation_mode", "") == "tf_crop_and_resize"
    at_region, at_scales, at_sizes = (None, 1, None) if site.opset < 11 else (1, 2, 3)

    def compute(shapes: Sequence[Any], contents: Sequence[Any]) -> Sequence[Shape]:
        result = list(shapes[0])
        along = [axis % len(result) for axis in axes] if axes is not None else list(range(len(result)))
        sizes = contents[at_sizes] if at_sizes is not None and at_sizes < len(contents) else None
        if sizes is not None and sizes.size:
            wanted = list(zip(along, sizes.tolist(), strict=True))
            if policy != "stretch":  # all axes by one ratio: the smallest, or the largest
                choose = min if policy == "not_larger" else max
                by = choose(size / result[axis] for axis, size in wanted)
                wanted = [(axis, math.floor(result[axis] * by + 0.5)) for axis, _ in wanted]
            for axis, size in wanted:
                result[axis] = size
            return (tuple(result),)
        region = contents[at_region].tolist() if crops and at_region is not None else None
        for number, (axis, scale) in enumerate(zip(along, contents[at_scales], strict=True)):
            if region is None:
                result[axis] = _scaled(result[axis], scale)
            else:
                part = region[number + len(along)] - region[number]
                result[axis] = math.floor(result[axis] * part * float(scale))
        return (tuple(result),)

    return compute


@shape_rule("Upsample")
def _upsample(site: Site) -> Compute:
    fixed = site.floats("scales")

    def compute(shapes: Sequence[Any], contents: Sequence[Any]) -> Sequence[Shape]:
        scales = fixed if fixed is not None else contents[1]
        return (tuple(_scaled(dim, by) for dim, by in zip(shapes[0], scales, strict=True)),)

    return compute


def _scaled(size: int, by: float) -> int:
    """A size times a scale as single precision has it."""
    numerator, denominator = float(np.float32(by)).as_integer_ratio()
    if size * numerator < 1 << 24:  # then it has the product exactly
        return size * numerator // denominator
    return math.floor(np.float32(size) * np.float32(by))


@shape_rule("DepthToSpace")
def _depth_to_space(site: Site) -> Compute:
    by = site.integer("blocksize", 1)
    return lambda shapes, _: ((shapes[0][0], _divided(shapes[0][1], by * by), shapes[0][2] * by, shapes[0][3] * by),)


@shape_rule("SpaceToDepth")
def _space_to_depth(site: Site) -> Compute:
    by = site.integer("blocksize", 1)
    return lambda shapes, _: (
        (shapes[0][0], shapes[0][1] * by * by, _divided(shapes[0][2], by), _divided(shapes[0][3], by)),
    )


def _divided(size: int, by: int) -> int:
    if size % by:
        raise ValueError(f"{size} can't be divided by {by}")
    return size // by


@shape_rule("RoiAlign")
def _roi_align(site: Site) -> Compute:
    height, width = site.integer("output_height", 1), site.integer("output_width", 1)
    return lambda shapes, _: ((shapes[1][0], shapes[0][1], height, width),)


@shape_rule("MaxRoiPool")
def _max_roi_pool(site: Site) -> Compute:
    pooled = site.integers("pooled_shape") or ()
    return lambda shapes, _: ((shapes[1][0], shapes[0][1], *pooled),)


@shape_rule("Col2Im")
def _col2im(_: Site) -> Compute:
    def compute(shapes: Sequence[Any], contents: Sequence[Any]) -> Sequence[Shape]:
        image, block = contents[1].tolist(), contents[2].tolist()
        return ((shapes[0][0], _divided(shapes[0][1], math.prod(block)), *image),)

    return compute


shape_rules({
    "AffineGrid": lambda shapes, contents: (
        (shapes[0][0], *contents[1].tolist()[2:], len(contents[1].tolist()) - 2),
    ),
    "com.microsoft::CropAndResize": lambda shapes, contents: (
        (shapes[1][0], shapes[0][1], *contents[3].tolist()),
    ),
    "GridSample com.microsoft::GridSample": lambda shapes, _: ((*shapes[0][:2], *shapes[1][1:-1]),),
})  # fmt: skip
