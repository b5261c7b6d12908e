"""Shapes of convolutions, pooling, resizing, and of onnxruntime's blocked layouts, whose channels come in blocks."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from memonger.model.shaping import Compute, NoRuleError, Shape, Site, shape_rule, shape_rules

_MS, _NCHWC = "com.microsoft::", "com.microsoft.nchwc::"

_Window = Callable[[tuple[int, ...], tuple[int, ...]], tuple[int, ...]]


def _windows(site: Site) -> _Window:
    """A function of spatial sizes and the window's size: how many windows there are along each axis."""
    strides, dilations, pads = site.integers("strides"), site.integers("dilations"), site.integers("pads")
    auto, ceil = site.text("auto_pad", "NOTSET"), site.integer("ceil_mode", 0)

    def count(sizes: tuple[int, ...], kernel: tuple[int, ...]) -> tuple[int, ...]:
        rank, found = len(sizes), []
        for axis, (size, width) in enumerate(zip(sizes, kernel, strict=True)):
            stride = strides[axis] if strides else 1
            reach = (dilations[axis] if dilations else 1) * (width - 1) + 1
            if auto.startswith("SAME"):
                found.append(-(-size // stride))
                continue
            before, after = (pads[axis], pads[axis + rank]) if pads and auto == "NOTSET" else (0, 0)
            left = size + before + after - reach
            if left < 0:
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


@shape_rule("Conv", "ConvInteger", _MS + "FusedConv", _NCHWC + "Conv")
def _conv(site: Site) -> Compute:
    return _convolution(site, 0, 1)


@shape_rule("QLinearConv")
def _quantized_conv(site: Site) -> Compute:
    return _convolution(site, 0, 3)


@shape_rule(_MS + "QLinearConv")
def _quantized_conv_of_microsoft(site: Site) -> Compute:
    if site.integer("channels_last", 0):
        count = _windows(site)

        def compute(shapes: Sequence[Any], _: Sequence[Any]) -> Sequence[Shape]:
            x, w = shapes[0], shapes[3]
            return ((x[0], *count(x[1:-1], w[2:]), w[0]),)

        return compute
    return _convolution(site, 0, 3)


@shape_rule("ConvTranspose")
def _conv_transpose(site: Site) -> Compute:
    strides, dilations, pads = site.integers("strides"), site.integers("dilations"), site.integers("pads")
    more, group = site.integers("output_padding"), site.integer("group", 1)
    wanted, auto = site.integers("output_shape"), site.text("auto_pad", "NOTSET")

    def compute(shapes: Sequence[Any], _: Sequence[Any]) -> Sequence[Shape]:
        x, w = shapes[0], shapes[1]
        rank, found = len(x) - 2, []
        for axis, (size, width) in enumerate(zip(x[2:], w[2:], strict=True)):
            stride = strides[axis] if strides else 1
            if wanted:
                found.append(wanted[axis - rank])
            elif auto.startswith("SAME"):
                found.append(size * stride)
            else:
                reach = (dilations[axis] if dilations else 1) * (width - 1) + 1
                cut = pads[axis] + pads[axis + rank] if pads and auto == "NOTSET" else 0
                found.append(stride * (size - 1) + (more[axis] if more else 0) + reach - cut)
        return ((x[0], w[1] * group, *found),)

    return compute


@shape_rule(
    "AveragePool", "LpPool", "MaxPool", _MS + "NhwcMaxPool", _MS + "QLinearAveragePool", _NCHWC + "AveragePool",
    _NCHWC + "MaxPool",
)  # fmt: skip
def _pool(site: Site) -> Compute:
    count, kernel = _windows(site), site.integers("kernel_shape") or ()
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
    if policy != "stretch" or site.text("coordinate_transformation_mode", "") == "tf_crop_and_resize":
        raise NoRuleError("another keep_aspect_ratio_policy than 'stretch', or a region to crop")
    at_scales, at_sizes = (1, None) if site.opset < 11 else (2, 3)

    def compute(shapes: Sequence[Any], contents: Sequence[Any]) -> Sequence[Shape]:
        result = list(shapes[0])
        along = [axis % len(result) for axis in axes] if axes is not None else range(len(result))
        sizes = contents[at_sizes] if at_sizes is not None and at_sizes < len(contents) else None
        if sizes is not None and sizes.size:
            for axis, size in zip(along, sizes.tolist(), strict=True):
                result[axis] = size
        else:
            for axis, scale in zip(along, contents[at_scales], strict=True):
                result[axis] = _scaled(result[axis], scale)
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


shape_rules({"GridSample": lambda shapes, _: ((*shapes[0][:2], *shapes[1][1:-1]),)})
