"""Depthwise convolutions (3x3): forward, input gradient, weight gradient."""

from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.formulations.conv import dx_transposed, layer_cases
from benchmarks.formulations.harness import Case, Emitter
from benchmarks.formulations.layers import Layer, depthwise


def dx_flipped(layer: Layer, op: Emitter, dy: str, w: str) -> str:
    """Stride 1: a convolution with the flipped taps."""
    reverse = op("MatMul", op.reshape(w, layer.c, 9), op.floats(np.eye(9)[::-1]))
    return op("Conv", dy, op.reshape(reverse, layer.c, 1, 3, 3), pads=[1] * 4, group=layer.c)


def dx_banded(layer: Layer, op: Emitter, dy: str, w: str) -> str:
    """Rows of dx are rows of dy times a banded matrix of the taps, made by a product with a constant of zeros and ones.
    The convolution's kernel is as wide as its image: onnxruntime multiplies without im2col, see `conv.product`."""
    s, o = layer.stride, layer.out
    reach = 3 if s == 1 else 2  # rows of dy that s rows of dx need
    band = np.zeros((3, 3, s, layer.side, reach, o), np.float32)  # tap, row and column of dx, row and column of dy
    for i, j, row, column in np.ndindex(3, 3, s, layer.side):
        y, x = row + 1 - i, column + 1 - j  # in units of dx
        if y % s == 0 and x % s == 0 and 0 <= x // s < o:
            band[i, j, row, column, y // s + (s == 1), x // s] = 1
    kernel = op("MatMul", op.reshape(w, layer.c, 9), op.floats(band.reshape(9, -1)))
    rows = op.pad(dy, 0, 0, int(s == 1), 0, 0, 0, 1, 0)
    dx = op(
        "Conv", rows, op.reshape(kernel, layer.c * s * layer.side, 1, reach, o), group=layer.c
    )  # [n, (c, row, column), o, 1]
    return op.reshape(
        op.transpose(op.reshape(dx, layer.n, layer.c, s * layer.side, o), 0, 1, 3, 2),
        layer.n,
        layer.c,
        layer.side,
        layer.side,
    )


def dw_columns(layer: Layer, op: Emitter, dy: str, x: str) -> str:
    """A Slice for each column of taps; then dy is a kernel as wide as the image, and no im2col is made (see
    `conv.product`). Rows of zeros between dy's stand for the stride."""
    images, s, o = layer.n * layer.c, layer.stride, layer.out
    padded = op.pad(x, 0, 0, 1, 1, 0, 0, 1, 1)
    kernel = op.reshape(dy, images, 1, o, o)
    if s > 1:
        kernel = op.reshape(op.pad(op.reshape(dy, images, o, 1, o), 0, 0, 0, 0, 0, 0, s - 1, 0), images, 1, o * s, o)
    parts = []
    for j in range(3):
        column = op.slice(padded, [3], [j], [j + (o - 1) * s + 1], s)
        part = op("Conv", op.reshape(column, 1, images, layer.side + 2, o), kernel, group=images)
        parts.append(op.reshape(part, layer.n, layer.c, 3, 1))
    return op.reshape(op.sum(op("Concat", *parts, axis=3), 0), layer.c, 1, 3, 3)


def dw_images(layer: Layer, op: Emitter, dy: str, x: str) -> str:
    """Every image of every channel a group, dy the kernel."""
    images, end = layer.n * layer.c, max(layer.end, 0)
    image, weight = op.reshape(x, 1, images, layer.side, layer.side), op.reshape(dy, images, 1, layer.out, layer.out)
    taps = op("Conv", image, weight, pads=[1, 1, end, end], dilations=[layer.stride] * 2, group=images)
    return op.reshape(op.sum(op.reshape(taps, layer.n, layer.c, 9), 0), layer.c, 1, 3, 3)


def dw_taps(layer: Layer, op: Emitter, dy: str, x: str) -> str:
    """A product and a sum for each tap."""
    padded, parts, reach = op.pad(x, 0, 0, 1, 1, 0, 0, 1, 1), [], (layer.out - 1) * layer.stride + 1
    for i, j in np.ndindex(3, 3):
        tap = op.slice(padded, [2, 3], [i, j], [i + reach, j + reach], layer.stride)
        parts.append(op.reshape(op.sum(op("Mul", dy, tap), 0, 2, 3), layer.c, 1))
    return op.reshape(op("Concat", *parts, axis=1), layer.c, 1, 3, 3)


def cases(batch: int) -> Iterator[Case]:
    """Every depthwise layer."""
    for layer in depthwise(batch):
        dx: dict[str, Callable[..., str]] = {"ConvTranspose": dx_transposed}
        if layer.stride == 1:
            dx["Conv"] = dx_flipped
        if layer.out <= 28:
            dx["banded"] = dx_banded
        dw = {"columns": dw_columns, "images": dw_images, "taps": dw_taps}
        wide = "Conv" if layer.stride == 1 else "ConvTranspose"
        rules = "banded" if layer.out <= 14 else wide, "columns" if layer.stride == 1 else "images"
        yield from layer_cases("depthwise", layer, (dx, rules[0]), (dw, rules[1]))
