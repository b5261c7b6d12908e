"""Products of matrices and convolutions, each written as the other where CUDA's kernels are the better for it.

`memonger.autodiff.rules` writes two composites as convolutions. ``ChannelSums``, the sum of a·b over each channel, has
one window and a group for each channel; ``RowProducts``, a·bᵀ for a stack of matrices, has rows for windows. On CUDA
they are written as what they are. cuDNN's convolutions round what they multiply to TF32 unless told otherwise, eleven
bits in place of 24: too few for the first, which BatchNormalization's gradient takes a difference of. There, products
are summed in float32, as BatchNormalization's own kernels do. The second is left what it is elsewhere, a product of
matrices. All other convolutions stay.

One matrix times a stack of matrices, the gradients of 1x1 convolutions, is a 1x1 convolution of the stack. As a MatMul
onnxruntime computes it from arrays of addresses, copied from memory of the host that it frees afterwards: a CUDA
graph would read them there again.
"""

import math

import onnx_ir as ir

from memonger.ir.emitter import Emitter
from memonger.lowering.cuda.rules import Written, rule


def _is_wide(op: Emitter, node: ir.Node) -> bool:
    """Float32 at least: half precision is summed in float32 by a convolution only."""
    return op.given(node, 0).dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE)


@rule("ChannelSums", when=_is_wide, raises_opset=False)
def _channel_sums(op: Emitter, node: ir.Node) -> Written:
    x, w = op.given(node, 0), op.given(node, 1)
    channels, _, *image = op.dims(w)
    product = op.Mul(x, op.reshape(w, (1, channels, *image)))
    return (op.sum(product, range(2, 2 + len(image)), keepdims=True),)


@rule("RowProducts", raises_opset=False)
def _row_products(op: Emitter, node: ir.Node) -> Written:
    x, w = op.given(node, 0), op.given(node, 1)
    _, count, n, size = op.dims(x)
    a = op.reshape(w, (count, op.dims(w)[0] // count, size))
    b = op.Transpose(op.reshape(x, (count, n, size)), perm=[0, 2, 1])
    return (op.reshape(op.MatMul(a, b), op.dims(node.outputs[0])),)


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
        product = op.MatMul(a, op.reshape(b, (inner, columns)))
    else:
        images = op.reshape(b, (math.prod(stack), inner, columns, 1))
        product = op.Conv(images, op.reshape(a, (rows, inner, 1, 1)))
    return (op.reshape(product, op.dims(node.outputs[0])),)
