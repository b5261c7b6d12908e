"""Winograd's minimal filtering F(2×2, 3×3) for the input gradient of a convolution.

From Lavin & Gray 2015, arXiv:1509.09308. It multiplies 16 times where a plain convolution does 36 times. The rows of
all channels and images are stacked into one image of one channel: its transform is one convolution, which leaves the
transform's index outermost, as the stack of products wants it. F(4×4, 3×3) is left out: its error is larger.
"""

import numpy as np
import onnx_ir as ir

from memonger.model.emitter import Emitter

INPUT = np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, -1, 0, 1]])
KERNEL = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]])
OUTPUT = np.array([[1, 1, 1, 0], [0, 1, -1, 1]])


def winograd(op: Emitter, dy: ir.Value, w: ir.Value) -> ir.Value:
    """The gradient of an image ``[N, C, H, W]`` convolved by ``w`` ``[K, C, 3, 3]`` at strides 1, padded by 1.

    Its largest intermediate values are 4 times as large as dy and as the image.
    """
    (batch, outputs, height, width), inner = op.dims(dy), op.dims(w)[1]
    dtype = dy.dtype or ir.DataType.FLOAT
    tiles, down = (width + 1) // 2, (height + 2) // 2
    pitch = 2 * down  # rows of an image in the stack: the row of zeros above it is below the image before
    taps = op.Transpose(op.reshape(w, (outputs * inner, 9)), perm=[1, 0])
    flipped = op.MatMul(op.constant(np.kron(KERNEL, KERNEL)[:, ::-1].tolist(), dtype), taps)
    weights = op.Transpose(op.reshape(flipped, (16, outputs, inner)), perm=[0, 2, 1])
    rows = op.Pad(op.transpose(dy, (1, 0, 2, 3)), op.ints(0, 0, 1, 0, 0, 0, pitch - height - 1, 0))
    stack = op.reshape(rows, (1, 1, outputs * batch * pitch, width))
    transform = op.constant(np.kron(INPUT, INPUT).reshape(16, 1, 4, 4).tolist(), dtype)
    seen = op.Conv(stack, transform, strides=[2, 2], pads=[0, 1, 2, 2 * tiles + 1 - width])
    products = op.MatMul(weights, op.reshape(seen, (16, outputs, batch * down * tiles)))
    back = op.constant(np.kron(OUTPUT, OUTPUT).tolist(), dtype)
    made = op.MatMul(back, op.reshape(products, (16, inner * batch * down * tiles)))
    made = op.Transpose(op.reshape(made, (2, 2, inner * batch * down * tiles)), perm=[0, 2, 1])
    made = op.Transpose(op.reshape(made, (2, inner * batch * down, 2 * tiles)), perm=[1, 0, 2])
    image = op.reshape(made, (inner, batch, pitch, 2 * tiles))
    image = op.Slice(image, op.ints(0, 0), op.ints(height, width), op.ints(2, 3))
    return op.Transpose(image, perm=[1, 0, 2, 3])
