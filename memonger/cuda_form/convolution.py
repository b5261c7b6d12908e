"""ConvTranspose: on CUDA it is cuDNN's gradient of a convolution's image, which knows symmetric padding alone.

Padding at the end only says where the output stops. So the padding at the beginning is taken for both ends, and the
output's size is set by ``output_padding``, which has to stay below the stride. What is then too much is cut off.
"""

from dataclasses import dataclass

import onnx_ir as ir

from memonger.cuda_form.rules import Written, rule
from memonger.gradients.emitter import Emitter
from memonger.gradients.windows import Windows, windows_of


@dataclass(frozen=True, slots=True)
class _Axis:
    """How one axis is computed: from element ``pad`` of the output without padding, ``size`` elements.

    Attributes:
        pad: Padding at either end.
        extra: ``output_padding``.
        before: Elements to cut off before what is asked for.
        size: Elements asked for.
        missing: Elements beyond the last that an input reaches: they hold the bias alone.
    """

    pad: int
    extra: int
    before: int
    size: int
    missing: int


@rule("ConvTranspose")
def _conv_transpose(op: Emitter, node: ir.Node) -> Written:
    x, w = op.given(node, 0), op.given(node, 1)
    image, count, kernel = op.dims(node.outputs[0])[2:], op.dims(x)[2:], op.dims(w)[2:]
    at = windows_of(op, node, image, count, kernel, up=True)
    if _runs_as_it_is(op, node, at) or 0 in (*op.dims(x), *op.dims(w), *image):
        return None
    axes = [_axis(at, a) for a in range(at.rank)]
    pads, extra = [axis.pad for axis in axes], [axis.extra for axis in axes]
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    missing = any(axis.missing for axis in axes)
    y = op.ConvTranspose(
        x, w, None if missing else bias, strides=at.strides, dilations=at.dilations, pads=[*pads, *pads],
        output_padding=extra if any(extra) else None, group=op.attribute(node, "group", 1),
    )  # fmt: skip
    y = _cut(op, y, axes)
    if missing:
        y = op.Pad(y, op.ints(*[0] * (at.rank + 4), *(axis.missing for axis in axes)))
        y = y if bias is None else op.Add(y, op.reshape(bias, (op.size(bias), *[1] * at.rank)))
    return (y,)


def _runs_as_it_is(op: Emitter, node: ir.Node, at: Windows) -> bool:
    if op.attribute(node, "auto_pad", "NOTSET").startswith("SAME") or "output_shape" in node.attributes:
        return False
    extra = op.attribute(node, "output_padding", None) or [0] * at.rank
    return at.begin == at.end and all(e < s for e, s in zip(extra, at.strides, strict=True))


def _axis(at: Windows, a: int) -> _Axis:
    begin, stride = at.begin[a], at.strides[a]
    full = (at.count[a] - 1) * stride + at.extent[a]  # what the inputs reach, without padding
    stop = begin + at.image[a]
    pad = max(0, min(begin, full + stride - 1 - stop))
    extra = min(max(0, stop + pad - full), stride - 1)
    reached = min(full + extra - pad, stop)
    return _Axis(pad, extra, begin - pad, at.image[a], stop - reached)


def _cut(op: Emitter, y: ir.Value, axes: list[_Axis]) -> ir.Value:
    dims = op.dims(y)[2:]
    stops = [axis.before + axis.size - axis.missing for axis in axes]
    cut = [a for a, axis in enumerate(axes) if axis.before or stops[a] < dims[a]]
    if not cut:
        return y
    part: ir.Value = op.Slice(
        y, op.ints(*(axes[a].before for a in cut)), op.ints(*(stops[a] for a in cut)), op.ints(*(a + 2 for a in cut))
    )
    return part
