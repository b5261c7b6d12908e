"""Convolutions, forward, input gradient (dx) and weight gradient (dw), in standard operators, in several ways."""

from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.convolutions.emitter import Emitter
from benchmarks.convolutions.layers import Layer
from benchmarks.convolutions.winograd import winograd

Ways = dict[str, Callable[..., str]]  # by name: (layer, emitter, *input names) -> the name of the output


def forward(layer: Layer, op: Emitter, x: str, w: str) -> str:
    """The operator itself."""
    return op("Conv", x, w, strides=[layer.stride] * 2, pads=[layer.pad] * 4, group=layer.groups)


def flipped(layer: Layer, op: Emitter, w: str) -> str:
    """[k, c, h, w] -> [c, k, h, w] with the taps in reverse: a product with a constant beats Slice and Gather."""
    taps = layer.kernel**2
    reverse = op("MatMul", op.reshape(w, layer.k * layer.c, taps), op.floats(np.eye(taps)[::-1]))
    return op.transpose(op.reshape(reverse, layer.k, layer.c, layer.kernel, layer.kernel), 1, 0, 2, 3)


def dx_transposed(layer: Layer, op: Emitter, dy: str, w: str) -> str:
    """ConvTranspose."""
    left = layer.side + 2 * layer.pad - layer.kernel - (layer.out - 1) * layer.stride
    return op(
        "ConvTranspose",
        dy,
        w,
        strides=[layer.stride] * 2,
        pads=[layer.pad] * 4,
        output_padding=[left] * 2,
        group=layer.groups,
    )


def dx_flipped(layer: Layer, op: Emitter, dy: str, w: str) -> str:
    """Stride 1: a convolution with the flipped taps."""
    return op("Conv", dy, flipped(layer, op, w), pads=[layer.kernel - 1 - layer.pad] * 4)


def dx_matmul(layer: Layer, op: Emitter, dy: str, w: str) -> str:
    """1x1, stride 1: a product for each image."""
    left = op.transpose(op.reshape(w, layer.k, layer.c), 1, 0)
    return op.reshape(
        op("MatMul", left, op.reshape(dy, layer.n, layer.k, layer.out**2)), layer.n, layer.c, layer.side, layer.side
    )


def dx_col2im(layer: Layer, op: Emitter, dy: str, w: str) -> str:
    """What ConvTranspose does inside, in two operators."""
    left = op.transpose(op.reshape(w, layer.k, layer.c * layer.kernel**2), 1, 0)
    columns = op("MatMul", left, op.reshape(dy, layer.n, layer.k, layer.out**2))
    shapes = op.constant([layer.side] * 2), op.constant([layer.kernel] * 2)
    return op("Col2Im", columns, *shapes, pads=[layer.pad] * 4, strides=[layer.stride] * 2)


def dx_parities(layer: Layer, op: Emitter, dy: str, w: str) -> str:
    """Stride 2: each parity of rows and columns is a convolution with the taps of that parity; then interleave."""
    half, turned, rows = layer.side // 2, op.transpose(w, 1, 0, 2, 3), []
    parities = [[k for k in range(layer.kernel - 1, -1, -1) if (k - parity - layer.pad) % 2 == 0] for parity in (0, 1)]
    for y, ys in enumerate(parities):
        columns = []
        for x, xs in enumerate(parities):
            part = op.slice(
                turned,
                [2, 3],
                [ys[0], xs[0]],
                [ys[-1] - 2 if ys[-1] > 1 else -99, xs[-1] - 2 if xs[-1] > 1 else -99],
                -2,
            )
            first, last = zip(
                *((((p + layer.pad - t[0]) // 2), (p + layer.pad - t[-1]) // 2) for p, t in ((y, ys), (x, xs))),
                strict=True,
            )
            pads = [-offset for offset in first] + [offset + half - layer.out for offset in last]
            columns.append(op.reshape(op("Conv", dy, part, pads=pads), layer.n, layer.c, half, half, 1))
        rows.append(op.reshape(op("Concat", *columns, axis=4), layer.n, layer.c, half, 1, layer.side))
    return op.reshape(op("Concat", *rows, axis=3), layer.n, layer.c, layer.side, layer.side)


def dw_channels_last(layer: Layer, op: Emitter, dy: str, x: str) -> str:
    """x with its channels last is an image of n channels and side*c columns, over which dy is the kernel: im2col then
    copies runs of kernel*c floats, where the other layouts copy runs of kernel floats."""
    end = max(layer.end, 0)
    image = op.reshape(op.transpose(x, 0, 2, 3, 1), 1, layer.n, layer.side, layer.side * layer.c)
    weight = op.transpose(dy, 1, 0, 2, 3)
    pads, steps = [layer.pad, layer.pad * layer.c, end, end * layer.c], [layer.stride, layer.stride * layer.c]
    taps = op.reshape(
        op("Conv", image, weight, pads=pads, dilations=steps), layer.k, *[layer.kernel + end - layer.end] * 2, layer.c
    )
    if end != layer.end:
        taps = op.slice(taps, [1, 2], [0, 0], [layer.kernel] * 2)
    return op.transpose(taps, 0, 3, 1, 2)


def dw_swapped(layer: Layer, op: Emitter, dy: str, x: str) -> str:
    """Stride 1: the same with x as the kernel over dy; gives the taps in reverse."""
    image = op.reshape(op.transpose(dy, 0, 2, 3, 1), 1, layer.n, layer.out, layer.out * layer.k)
    pad = layer.kernel - 1 - layer.pad
    taps = op("Conv", image, op.transpose(x, 1, 0, 2, 3), pads=[pad, pad * layer.k] * 2, dilations=[1, layer.k])
    taps = op.transpose(op.reshape(taps, layer.c, layer.kernel**2, layer.k), 2, 0, 1)
    reverse = op(
        "MatMul", op.reshape(taps, layer.k * layer.c, layer.kernel**2), op.floats(np.eye(layer.kernel**2)[::-1])
    )
    return op.reshape(reverse, layer.k, layer.c, layer.kernel, layer.kernel)


def dw_volume(layer: Layer, op: Emitter, dy: str, x: str) -> str:
    """A three-dimensional convolution over x as [1, n, c, side, side]."""
    end = max(layer.end, 0)
    image = op.reshape(x, 1, layer.n, layer.c, layer.side, layer.side)
    weight = op.reshape(op.transpose(dy, 1, 0, 2, 3), layer.k, layer.n, 1, layer.out, layer.out)
    taps = op(
        "Conv", image, weight, pads=[0, layer.pad, layer.pad, 0, end, end], dilations=[1, layer.stride, layer.stride]
    )
    return op.reshape(taps, layer.k, layer.c, layer.kernel, layer.kernel)


def product(op: Emitter, a: str, b: str, groups: int, rows: int, columns: int, depth: int) -> str:
    """[g, rows, depth] times [g, columns, depth] transposed -> [g, rows, columns], without a Transpose.

    A convolution of one input channel a group, without padding and strides, whose kernel is as wide as its image is run
    by onnxruntime as a product with the image as transposed operand (MlasConvPrepare, GemmDirect)."""
    image, weight = op.reshape(b, 1, groups, columns, depth), op.reshape(a, groups * rows, 1, 1, depth)
    return op.reshape(op("Conv", image, weight, group=groups), groups, rows, columns)


def _strided(layer: Layer, op: Emitter, x: str) -> str:
    return op.slice(x, [2, 3], [0, 0], [layer.side] * 2, layer.stride) if layer.stride > 1 else x


def dw_product(layer: Layer, op: Emitter, dy: str, x: str) -> str:
    """1x1: dy times x transposed, image by image, then summed; the operand with more channels is the filters."""
    x, pixels = _strided(layer, op, x), layer.out**2
    if layer.k >= layer.c:
        return op.reshape(op.sum(product(op, dy, x, layer.n, layer.k, layer.c, pixels), 0), layer.k, layer.c, 1, 1)
    return op.reshape(
        op.transpose(op.sum(product(op, x, dy, layer.n, layer.c, layer.k, pixels), 0), 1, 0), layer.k, layer.c, 1, 1
    )


def dw_one_matmul(layer: Layer, op: Emitter, dy: str, x: str) -> str:
    """1x1: one product over all pixels of all images."""
    left = op.reshape(op.transpose(dy, 1, 0, 2, 3), layer.k, -1)
    right = op.reshape(op.transpose(_strided(layer, op, x), 0, 2, 3, 1), -1, layer.c)
    return op.reshape(op("MatMul", left, right), layer.k, layer.c, 1, 1)


def dw_batched(layer: Layer, op: Emitter, dy: str, x: str) -> str:
    """1x1: MatMul with a Transpose, image by image, then summed."""
    right = op.transpose(op.reshape(_strided(layer, op, x), layer.n, layer.c, layer.out**2), 0, 2, 1)
    return op.reshape(
        op.sum(op("MatMul", op.reshape(dy, layer.n, layer.k, layer.out**2), right), 0), layer.k, layer.c, 1, 1
    )


# Weight gradients for a device with fast matrix products: the windows copied out, then products. On the CPU those above
# copy less. Gemm reads its second operand transposed, which MatMul can't.


def dw_exchanged(layer: Layer, op: Emitter, dy: str, x: str) -> str:
    """A convolution of x by dy, batch and channels exchanged in both, the stride as dilation."""
    end = max(layer.end, 0)
    image, weight = op.transpose(x, 1, 0, 2, 3), op.transpose(dy, 1, 0, 2, 3)
    taps = op("Conv", image, weight, pads=[layer.pad, layer.pad, end, end], dilations=[layer.stride] * 2)
    if end != layer.end:
        taps = op.slice(taps, [2, 3], [0, 0], [layer.kernel] * 2)
    return op.transpose(taps, 1, 0, 2, 3)


def dw_gemm(layer: Layer, op: Emitter, dy: str, x: str) -> str:
    """1x1: one product over all pixels of all images, both operands as rows of channels."""
    x = _strided(layer, op, x)
    return op.reshape(_by_rows(op, _rows(op, dy, layer.k), _rows(op, x, layer.c)), layer.k, layer.c, 1, 1)


def dw_einsum(layer: Layer, op: Emitter, dy: str, x: str) -> str:
    """1x1: Einsum, which finds its own transposes."""
    x = _strided(layer, op, x)
    dy, x = (op.reshape(v, layer.n, channels, layer.out**2) for v, channels in ((dy, layer.k), (x, layer.c)))
    return op.reshape(op("Einsum", dy, x, equation="nkp,ncp->kc"), layer.k, layer.c, 1, 1)


def dw_gemm_a_tap(layer: Layer, op: Emitter, dy: str, x: str) -> str:
    """A product for each tap."""
    left = _rows(op, dy, layer.k)
    parts = [op.reshape(_by_rows(op, left, tap), layer.k, layer.c, 1) for tap in _taps(layer, op, x)]
    return op.reshape(op("Concat", *parts, axis=2), layer.k, layer.c, layer.kernel, layer.kernel)


def dw_windows(layer: Layer, op: Emitter, dy: str, x: str) -> str:
    """One product with all taps: the windows as a matrix (im2col) of kernel² times x's size."""
    windows = op("Concat", *_taps(layer, op, x), axis=0)
    taps = op.reshape(_by_rows(op, _rows(op, dy, layer.k), windows), layer.k, layer.kernel**2, layer.c)
    return op.reshape(op.transpose(taps, 0, 2, 1), layer.k, layer.c, layer.kernel, layer.kernel)


def _rows(op: Emitter, x: str, channels: int) -> str:
    """[n, c, h, w] -> [c, n*h*w], whole images moved."""
    return op.reshape(op.transpose(x, 1, 0, 2, 3), channels, -1)


def _by_rows(op: Emitter, a: str, b: str) -> str:
    """[m, n*o*o] times [l, n*o*o] transposed."""
    return op("Gemm", a, b, transB=1)


def _taps(layer: Layer, op: Emitter, x: str) -> list[str]:
    """What each tap reads of x, as rows of channels."""
    end, reach = max(layer.end, 0), (layer.out - 1) * layer.stride + 1
    padded = op.pad(op.transpose(x, 1, 0, 2, 3), 0, 0, layer.pad, layer.pad, 0, 0, end, end)
    found = []
    for tap in range(layer.kernel**2):
        i, j = divmod(tap, layer.kernel)
        part = op.slice(padded, [2, 3], [i, j], [i + reach, j + reach], layer.stride)
        found.append(op.reshape(part, layer.c, -1))
    return found


# Depthwise convolutions, 3x3.


def depthwise_dx_flipped(layer: Layer, op: Emitter, dy: str, w: str) -> str:
    """Stride 1: a convolution with the flipped taps."""
    reverse = op("MatMul", op.reshape(w, layer.c, 9), op.floats(np.eye(9)[::-1]))
    return op("Conv", dy, op.reshape(reverse, layer.c, 1, 3, 3), pads=[1] * 4, group=layer.c)


def depthwise_dx_banded(layer: Layer, op: Emitter, dy: str, w: str) -> str:
    """Rows of dx are rows of dy times a banded matrix of the taps, made by a product with a constant of zeros and ones.
    The convolution's kernel is as wide as its image: onnxruntime multiplies without im2col, see `product`."""
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


def depthwise_dw_columns(layer: Layer, op: Emitter, dy: str, x: str) -> str:
    """A Slice for each column of taps; then dy is a kernel as wide as the image, and no im2col is made (see
    `product`). Rows of zeros between dy's stand for the stride."""
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


def depthwise_dw_images(layer: Layer, op: Emitter, dy: str, x: str) -> str:
    """Every image of every channel a group, dy the kernel."""
    images, end = layer.n * layer.c, max(layer.end, 0)
    image, weight = op.reshape(x, 1, images, layer.side, layer.side), op.reshape(dy, images, 1, layer.out, layer.out)
    taps = op("Conv", image, weight, pads=[1, 1, end, end], dilations=[layer.stride] * 2, group=images)
    return op.reshape(op.sum(op.reshape(taps, layer.n, layer.c, 9), 0), layer.c, 1, 3, 3)


def depthwise_dw_taps(layer: Layer, op: Emitter, dy: str, x: str) -> str:
    """A product and a sum for each tap."""
    padded, parts, reach = op.pad(x, 0, 0, 1, 1, 0, 0, 1, 1), [], (layer.out - 1) * layer.stride + 1
    for i, j in np.ndindex(3, 3):
        tap = op.slice(padded, [2, 3], [i, j], [i + reach, j + reach], layer.stride)
        parts.append(op.reshape(op.sum(op("Mul", dy, tap), 0, 2, 3), layer.c, 1))
    return op.reshape(op("Concat", *parts, axis=1), layer.c, 1, 3, 3)


def input_gradients(layer: Layer) -> Ways:
    """Every way to compute a layer's input gradient."""
    found: Ways = {"ConvTranspose": dx_transposed}
    if layer.groups > 1:
        found |= {"Conv": depthwise_dx_flipped} if layer.stride == 1 else {}
        return found | ({"banded": depthwise_dx_banded} if layer.out <= 28 else {})
    if layer.kernel == 1:
        return found | ({"MatMul": dx_matmul, "Conv": dx_flipped} if layer.stride == 1 else {})
    found["Col2Im"] = dx_col2im
    if layer.stride > 1:
        return found | {"parities": dx_parities}
    return found | {"Conv": dx_flipped, "Winograd 2": partial(winograd, 2), "Winograd 4": partial(winograd, 4)}


def weight_gradients(layer: Layer) -> Ways:
    """Every way to compute a layer's weight gradient."""
    if layer.groups > 1:
        return {"columns": depthwise_dw_columns, "images": depthwise_dw_images, "taps": depthwise_dw_taps}
    if layer.kernel == 1:
        found: Ways = {"A·Bᵀ": dw_product, "one MatMul": dw_one_matmul, "MatMul": dw_batched}
        return found | {"exchanged": dw_exchanged, "Gemm": dw_gemm, "Einsum": dw_einsum}
    found = {"channels last": dw_channels_last, "Conv3d": dw_volume}
    found |= {"swapped": dw_swapped} if layer.stride == 1 else {}
    return found | {"exchanged": dw_exchanged, "Gemm a tap": dw_gemm_a_tap, "im2col Gemm": dw_windows}
