"""Fourier transforms, which are linear: their gradients are transforms back."""

import numpy as np
import onnx_ir as ir

from memonger.autodiff.registry import Gradient, expansion, gradient
from memonger.autodiff.rules.movement import constants, pad
from memonger.ir.emitter import Emitter
from memonger.ir.values import input_at

SHORT = 256  # numbers up to which a transform of a length that is no power of two is a product with its matrix


@gradient("DFT")
def _dft(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    """The sums run over as many numbers as before; the real part where the input has no other."""
    dims = op.dims(node.inputs[0])
    *_, parts = dims
    given = constants(op, node, 2, "axis")
    axis = (given[0] if given else -2) % len(dims)
    inverse, one_sided = op.attribute(node, "inverse", 0), op.attribute(node, "onesided", 0)
    number = op.constant(np.array(axis, np.int64))
    if inverse and one_sided:  # from half a spectrum to real numbers: what stands for two counts twice
        size = op.dims(dy)[axis]
        dx = op.DFT(dy, None, number, onesided=1)
        twice = [1.0 if k == 0 or 2 * k == size else 2.0 for k in range(size // 2 + 1)]
        column = [-1 if a == axis else 1 for a in range(len(dims))]
        dx = op.Mul(dx, op.constant((np.array(twice) / size).reshape(column).tolist(), dy.dtype))
    else:
        length = constants(op, node, 1, "dft_length")
        size = length[0] if length else dims[axis]
        spare = size - op.dims(dy)[axis]
        whole = pad(op, dy, [0] * len(dims), [spare if a == axis else 0 for a in range(len(dims))])
        factor = 1.0 / size if inverse else float(size)
        dx = op.Mul(op.DFT(whole, None, number, inverse=1 - inverse), factor)
    if parts == 1:
        dx = op.slice(dx, len(dims) - 1, 0, 1)
    missing = [n - m for n, m in zip(dims, op.dims(dx), strict=True)]
    return pad(op, dx, [0] * len(dims), missing)


@expansion("DFT")
def _as_product(op: Emitter, node: ir.Node) -> tuple[ir.Value, ...] | None:
    """A product with the transform's matrix where it is short and no power of two: there onnxruntime's kernel goes by
    way of a convolution, whose errors are 10 times as large."""
    x, settings = op.given(node, 0), [input_at(node, k) for k in (1, 2)]
    length, number = (None if value is None else op.content(value) for value in settings)
    if any(value is not None and op.content(value) is None for value in settings):
        return None
    dims = op.dims(x)
    axis = (-2 if number is None else int(number.reshape(()))) % len(dims)
    inverse, one_sided = op.attribute(node, "inverse", 0), op.attribute(node, "onesided", 0)
    size = dims[axis] if length is None else int(length.reshape(()))
    if inverse and one_sided:
        size = op.dims(node.outputs[0])[axis]
    if size & (size - 1) == 0 or max(size, dims[axis]) > SHORT:
        return None
    matrix = _matrix(dims[axis], dims[-1], size, inverse=bool(inverse), one_sided=bool(one_sided))
    order = [a for a in range(len(dims) - 1) if a != axis] + [axis, len(dims) - 1]  # the axis beside the parts
    rows = op.reshape(op.transpose(x, order), (op.size(x) // len(matrix), len(matrix)))
    product = op.MatMul(rows, op.constant(matrix.astype((x.dtype or ir.DataType.FLOAT).numpy())))
    parts = 1 if inverse and one_sided else 2
    y = op.reshape(product, (*[dims[a] for a in order[:-2]], matrix.shape[1] // parts, parts))
    return (op.transpose(y, np.argsort(order).tolist()),)


def _matrix(count: int, parts: int, size: int, *, inverse: bool, one_sided: bool) -> np.ndarray:
    """What a transform of ``size`` multiplies rows of ``[count, parts]`` numbers with, in float64."""
    unit = np.eye(count * parts).reshape(-1, count, parts)
    numbers = unit[..., 0] + (1j * unit[..., 1] if parts == 2 else 0)
    if inverse and one_sided:  # from half a spectrum to real numbers
        return np.fft.irfft(numbers, size)
    result = (np.fft.ifft if inverse else np.fft.fft)(numbers, size)
    result = result[:, : size // 2 + 1] if one_sided else result
    return np.stack([result.real, result.imag], -1).reshape(len(unit), -1)


@expansion("STFT")
def _stft(op: Emitter, node: ir.Node) -> tuple[ir.Value, ...] | None:
    """A transform of overlapping frames, each times the window."""
    signal, step = op.given(node, 0), (constants(op, node, 1, "frame_step") or (1,))[0]
    window, length = input_at(node, 2), constants(op, node, 3, "frame_length")
    batch, total, *parts = op.dims(signal)
    size = length[0] if length else op.dims(window)[0]
    frames = np.add.outer(np.arange(0, total - size + 1, step), np.arange(size))
    rows = op.Gather(op.reshape(signal, (batch, total, *(parts or [1]))), op.constant(frames), axis=1)
    if window is not None:
        rows = op.Mul(rows, op.reshape(window, (size, 1)))
    one_sided = op.attribute(node, "onesided", 1)
    return (op.DFT(rows, None, op.constant(np.array(2, np.int64)), onesided=one_sided),)
