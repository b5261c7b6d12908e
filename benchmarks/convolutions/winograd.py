"""Winograd's minimal filtering (Lavin and Gray 2015, arXiv:1509.09308) for the input gradient of a 3x3 convolution.

F(2x2, 3x3) multiplies 16 times where the plain convolution does 36 times, F(4x4, 3x3) 36 times instead of 144. The rows
of all channels and images are stacked into one image of one channel, whose transform is one convolution that leaves the
transform's index outermost, as the batched product wants it: no transpose of the expanded data.
"""

import numpy as np

from benchmarks.convolutions.emitter import Emitter
from benchmarks.convolutions.layers import Layer

INPUT = {
    2: [[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, -1, 0, 1]],
    4: [
        [4, 0, -5, 0, 1, 0],
        [0, -4, -4, 1, 1, 0],
        [0, 4, -4, -1, 1, 0],
        [0, -2, -1, 2, 1, 0],
        [0, 2, -1, -2, 1, 0],
        [0, 4, 0, -5, 0, 1],
    ],
}
KERNEL = {
    2: [[1, 0, 0], [1 / 2, 1 / 2, 1 / 2], [1 / 2, -1 / 2, 1 / 2], [0, 0, 1]],
    4: [
        [1 / 4, 0, 0],
        [-1 / 6, -1 / 6, -1 / 6],
        [-1 / 6, 1 / 6, -1 / 6],
        [1 / 24, 1 / 12, 1 / 6],
        [1 / 24, -1 / 12, 1 / 6],
        [0, 0, 1],
    ],
}
OUTPUT = {
    2: [[1, 1, 1, 0], [0, 1, -1, 1]],
    4: [[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]],
}


def winograd(m: int, layer: Layer, op: Emitter, dy: str, w: str) -> str:
    """dx of a 3x3 convolution of stride 1 and padding 1, in tiles of m by m."""
    size = (m + 2) ** 2
    tiles = -(-layer.side // m)  # in a row
    pitch = (
        -(-(layer.side + 1) // m) * m
    )  # rows an image takes in the stack: one zero row above is its neighbour's below
    down = pitch // m
    kernel = np.kron(KERNEL[m], KERNEL[m])[:, ::-1]  # of the flipped taps
    u = op("MatMul", op.floats(kernel), op.transpose(op.reshape(w, layer.k * layer.c, 9), 1, 0))
    u = op.transpose(op.reshape(u, size, layer.k, layer.c), 0, 2, 1)
    stack = op.pad(op.transpose(dy, 1, 0, 2, 3), 0, 0, 1, 0, 0, 0, pitch - layer.side - 1, 0)
    stack = op.reshape(stack, 1, 1, layer.k * layer.n * pitch, layer.side)
    weight = op.floats(np.kron(INPUT[m], INPUT[m]).reshape(size, 1, m + 2, m + 2))
    v = op("Conv", stack, weight, strides=[m, m], pads=[0, 1, 2, tiles * m + 1 - layer.side])
    y = op("MatMul", u, op.reshape(v, size, layer.k, layer.n * down * tiles))
    y = op("MatMul", op.floats(np.kron(OUTPUT[m], OUTPUT[m])), op.reshape(y, size, -1))
    y = op.transpose(op.reshape(y, m, m, layer.c * layer.n * down * tiles), 0, 2, 1)  # columns of a row together
    y = op.transpose(op.reshape(y, m, layer.c * layer.n * down, tiles * m), 1, 0, 2)  # then rows
    y = op.slice(op.reshape(y, layer.c, layer.n, pitch, tiles * m), [2, 3], [0, 0], [layer.side] * 2)
    return op.transpose(y, 1, 0, 2, 3)
