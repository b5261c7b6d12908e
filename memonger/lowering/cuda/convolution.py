"""ConvTranspose: on CUDA it is cuDNN's gradient of a convolution's image, which knows symmetric padding alone.

Padding at the end only says where the output stops. So the padding at the beginning is taken for both ends, and the
output's size is set by ``output_padding``, which has to stay below the stride. What is then too much is cut off.
"""

from dataclasses import dataclass

import onnx_ir as ir

from memonger.ir.emitter import Emitter
from memonger.ir.windows import Windows, windows_of
from memonger.lowering.cuda.rules import Written, rule


@dataclass(frozen=True, slots=True)
class _Axis:
    """How one axis is computed: from element ``pad`` of the output without padding, ``size`` elements.

    Attributes:
        pad: Padding at either end.
        extra: ``output_padding``.
        before: Elements to cut off before what is asked for.
        size: Elements asked for.
    """

    pad: int
    extra: int
    before: int
    size: int


def _windows(op: Emitter, node: ir.Node) -> Windows:
    x, w, y = op.given(node, 0), op.given(node, 1), node.outputs[0]
    return windows_of(node, op.dims(y)[2:], op.dims(x)[2:], op.dims(w)[2:], up=True)


def _is_left_to_cpu(op: Emitter, node: ir.Node) -> bool:
    """Padding at the ends differs, or might for all that the provider looks at."""
    x, w = op.given(node, 0), op.given(node, 1)
    if 0 in (*op.dims(x), *op.dims(w)) or len(op.dims(node.outputs[0])) != len(op.dims(x)):
        return False  # onnx's inference (1.23) gives up half-way where output_shape is below the input's
    at = _windows(op, node)
    automatic = op.attribute(node, "auto_pad", "NOTSET").startswith("SAME") or "output_shape" in node.attributes
    return (automatic or at.begin != at.end) and all(_axis(at, a).pad >= 0 for a in range(at.rank))


@rule("ConvTranspose", when=_is_left_to_cpu)
def _conv_transpose(op: Emitter, node: ir.Node) -> Written:
    x, w = op.given(node, 0), op.given(node, 1)
    at = _windows(op, node)
    axes = [_axis(at, a) for a in range(at.rank)]
    pads, extra = [axis.pad for axis in axes], [axis.extra for axis in axes]
    y = op.ConvTranspose(
        x, w, *node.inputs[2:], strides=at.strides, dilations=at.dilations, pads=[*pads, *pads],
        output_padding=extra if any(extra) else None, group=op.attribute(node, "group", 1),
    )  # fmt: skip
    return (_cut(op, y, axes),)


def _axis(at: Windows, a: int) -> _Axis:
    """A negative ``pad``: the output goes on where no input reaches. onnxruntime refuses that."""
    begin, last = at.begin[a], at.strides[a] - 1
    full = (at.count[a] - 1) * at.strides[a] + at.extent[a]  # what the inputs reach, without padding
    stop = begin + at.image[a]
    pad = min(begin, full + last - stop)
    return _Axis(pad, max(0, stop + pad - full), begin - pad, at.image[a])


def _cut(op: Emitter, y: ir.Value, axes: list[_Axis]) -> ir.Value:
    dims = op.dims(y)[2:]
    cut = [a for a, axis in enumerate(axes) if axis.size < dims[a]]
    if not cut:
        return y
    starts, stops = [axes[a].before for a in cut], [axes[a].before + axes[a].size for a in cut]
    return op.Slice(y, op.ints(*starts), op.ints(*stops), op.ints(*(a + 2 for a in cut)))
