"""Products of matrices and convolutions, each written as the other where CUDA's kernels are the better for it.

`memonger.autodiff.rules` writes them so: the sum of a·b over each channel is a convolution with one window and a group
for each channel, and a·bᵀ for a stack of matrices one whose windows are rows. On CUDA they are written as what they
are. cuDNN's convolutions round what they multiply to TF32 unless told otherwise, eleven bits in place of 24: too few
for the first, which BatchNormalization's gradient takes a difference of. There, products are summed in float32, as
BatchNormalization's own kernels do. The second is left what it is elsewhere, a product of matrices. Convolutions whose
weight is a parameter stay.

One matrix times a stack of matrices, the gradients of 1x1 convolutions, is a 1x1 convolution of the stack. As a MatMul
onnxruntime computes it from arrays of addresses, copied from memory of the host that it frees afterwards: a CUDA
graph would read them there again.
"""

import math

import onnx_ir as ir

from memonger.lowering.cuda.rules import Written, rule
from memonger.model.emitter import Emitter
from memonger.model.windows import Windows, windows_of


@rule("Conv", when=lambda op, node: _is_channel_sums(op, node) or _is_matrix_products(op, node), raises_opset=False)
def _conv(op: Emitter, node: ir.Node) -> Written:
    return ((_channel_sums if _is_channel_sums(op, node) else _matrix_products)(op, node),)


def _windows(op: Emitter, node: ir.Node) -> Windows | None:
    """Those of a convolution by channel, of a weight that is computed, without padding, dilation and bias."""
    x, w, y = op.given(node, 0), op.given(node, 1), node.outputs[0]
    if w.producer() is None or len(node.inputs) > 2 or op.attribute(node, "group", 1) != op.dims(x)[1]:
        return None
    at = windows_of(op, node, op.dims(x)[2:], op.dims(y)[2:], op.dims(w)[2:])
    return at if at.kernel == at.extent and not any((*at.begin, *at.end)) and op.size(y) else None


def _is_channel_sums(op: Emitter, node: ir.Node) -> bool:
    """One window, and float32 at least: half precision is summed in float32 by a convolution only."""
    at, x = _windows(op, node), op.given(node, 0)
    outputs = op.dims(node.inputs[1])[0]
    wide = x.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE)
    return at is not None and wide and at.kernel == at.image and outputs == op.dims(x)[1]


def _channel_sums(op: Emitter, node: ir.Node) -> ir.Value:
    x, w = op.given(node, 0), op.given(node, 1)
    channels, _, *image = op.dims(w)
    product = op.Mul(x, op.reshape(w, (1, channels, *image)))
    return op.sum(product, range(2, 2 + len(image)), keepdims=True)


def _is_matrix_products(op: Emitter, node: ir.Node) -> bool:
    """Windows are rows of one image."""
    at, x = _windows(op, node), op.given(node, 0)
    return at is not None and at.kernel == (1, at.image[-1]) and at.is_dense and op.dims(x)[0] == 1


def _matrix_products(op: Emitter, node: ir.Node) -> ir.Value:
    x, w = op.given(node, 0), op.given(node, 1)
    _, count, n, size = op.dims(x)
    a = op.reshape(w, (count, math.prod(op.dims(w)) // (count * size), size))
    b = op.Transpose(op.reshape(x, (count, n, size)), perm=[0, 2, 1])
    return op.reshape(op.MatMul(a, b), op.dims(node.outputs[0]))


_CONVOLVED = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE)


def _is_one_by_many(op: Emitter, node: ir.Node) -> bool:
    """One matrix from the left, a stack from the right, be it of one."""
    a, left, right = op.given(node, 0), op.dims(node.inputs[0]), op.dims(node.inputs[1])
    if not 2 <= len(left) <= len(right) or a.dtype not in _CONVOLVED:
        return False
    stacked = math.prod(right[:-2]) > 1 or len(left) == 2 < len(right)
    return math.prod(left[:-2]) == 1 and stacked and bool(op.size(node.outputs[0]))


@rule("MatMul", when=_is_one_by_many, raises_opset=False)
def _one_by_many(op: Emitter, node: ir.Node) -> Written:
    a, b = op.given(node, 0), op.given(node, 1)
    rows, inner = op.dims(a)[-2:]
    *stack, _, columns = op.dims(b)
    if math.prod(stack) == 1:
        found = op.MatMul(a, op.reshape(b, (inner, columns)))
    else:
        images = op.reshape(b, (math.prod(stack), inner, columns, 1))
        found = op.Conv(images, op.reshape(a, (rows, inner, 1, 1)))
    return (op.reshape(found, op.dims(node.outputs[0])),)
