"""Weight gradients of one group made for a device with fast matrix products: the windows copied out, then products.

On the CPU `conv` has what copies less. Gemm reads its second operand transposed, which MatMul can't.
"""

from collections.abc import Callable

from benchmarks.formulations.harness import Emitter
from benchmarks.formulations.layers import Layer


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
    if layer.stride > 1:
        x = op.slice(x, [2, 3], [0, 0], [layer.side] * 2, layer.stride)
    return op.reshape(_by_rows(op, _rows(op, dy, layer.k), _rows(op, x, layer.c)), layer.k, layer.c, 1, 1)


def dw_einsum(layer: Layer, op: Emitter, dy: str, x: str) -> str:
    """1x1: Einsum, which finds its own transposes."""
    if layer.stride > 1:
        x = op.slice(x, [2, 3], [0, 0], [layer.side] * 2, layer.stride)
    dy, x = (op.reshape(v, layer.n, channels, layer.out**2) for v, channels in ((dy, layer.k), (x, layer.c)))
    return op.reshape(op("Einsum", dy, x, equation="nkp,ncp->kc"), layer.k, layer.c, 1, 1)


def dw_taps(layer: Layer, op: Emitter, dy: str, x: str) -> str:
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


def weight_gradients(layer: Layer) -> dict[str, Callable[..., str]]:
    """The candidates."""
    if layer.kernel == 1:
        return {"exchanged": dw_exchanged, "Gemm": dw_gemm, "Einsum": dw_einsum}
    return {"exchanged": dw_exchanged, "Gemm a tap": dw_taps, "im2col Gemm": dw_windows}
