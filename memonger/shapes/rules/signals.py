"""Shapes of Fourier transforms, windows, and what is made of spectra."""

from collections.abc import Sequence
from typing import Any

from memonger.shapes.shaping import Compute, NoRuleError, Shape, Site, shape_rule, shape_rules


@shape_rule("DFT")
def _dft(site: Site) -> Compute:
    one_sided, inverse = site.integer("onesided", 0), site.integer("inverse", 0)
    fixed = site.integer("axis", 1) if site.opset < 20 else -2

    def compute(shapes: Sequence[Any], contents: Sequence[Any]) -> Sequence[Shape]:
        shape, (length, axis) = list(shapes[0]), (*contents[1:3], None, None)[:2]
        at = (fixed if axis is None else axis.item()) % len(shape)
        is_one_sided_inverse = one_sided and inverse
        shape[at] = length.item() if length is not None else 2 * (shape[at] - 1) if is_one_sided_inverse else shape[at]
        if one_sided and not inverse:
            shape[at] = shape[at] // 2 + 1
        shape[-1] = 1 if is_one_sided_inverse else 2
        return (tuple(shape),)

    return compute


@shape_rule("STFT")
def _stft(site: Site) -> Compute:
    one_sided = site.integer("onesided", 1)

    def compute(shapes: Sequence[Any], contents: Sequence[Any]) -> Sequence[Shape]:
        batch, length = shapes[0][:2]
        if len(contents) > 3 and contents[3] is not None:
            frame = contents[3].item()
        else:
            frame = shapes[2][0] if site.has(2) else length
        windows = (length - frame) // contents[1].item() + 1
        return ((batch, windows, frame // 2 + 1 if one_sided else frame, 2),)

    return compute


@shape_rule("com.microsoft::Rfft", "com.microsoft::Irfft")
def _real_transform(site: Site) -> Compute:
    if site.integer("signal_ndim", 1) != 1 or not site.integer("onesided", 1):
        raise NoRuleError("more than one axis, or both sides")
    if site.op_type == "Rfft":
        return lambda shapes, _: ((*shapes[0][:-1], shapes[0][-1] // 2 + 1, 2),)
    return lambda shapes, _: ((*shapes[0][:-2], 2 * (shapes[0][-2] - 1)),)


shape_rules({
    "BlackmanWindow HammingWindow HannWindow": lambda _, contents: ((contents[0].item(),),),
    "MelWeightMatrix": lambda _, contents: ((contents[1].item() // 2 + 1, contents[0].item()),),
})  # fmt: skip
