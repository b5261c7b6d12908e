"""Layers that several families share, each a few nodes. Images are NCHW, sequences are [batch, tokens, width].

Weights are drawn as He et al. 2015 ("Delving Deep into Rectifiers") draw them: std = gain / √fan_in, where the gain √2
is for what a ReLU follows. With running statistics of mean 0 and variance 1 a normalization in inference form
changes no scale, so residual branches are damped by their number instead (`damping`).
"""

import math
import zlib
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from models.builder import Builder, filled, normal, static_dim, uniform

RELU_GAIN = math.sqrt(2.0)
_BIAS_STD = 0.02


def damping(units: int) -> float:
    """Return the scale of a residual branch with which `units` of them grow the variance by at most e."""
    return 1.0 / math.sqrt(units)


def conv(
    net: Builder,
    x: ir.Value,
    name: str,
    channels: int,
    kernel: int,
    *,
    stride: int = 1,
    pad: int | None = None,
    group: int = 1,
    bias: bool = False,
    gain: float = RELU_GAIN,
) -> ir.Value:
    """Convolve with square kernels. `pad` defaults to what keeps the size at stride 1."""
    fan_in = static_dim(x, 1) // group
    std = gain / math.sqrt(fan_in * kernel * kernel)
    inputs = [x, net.parameter(f"{name}.weight", (channels, fan_in, kernel, kernel), normal(std))]
    if bias:
        inputs.append(net.parameter(f"{name}.bias", (channels,), normal(_BIAS_STD)))
    pads = [kernel // 2 if pad is None else pad] * 4
    return net.op("Conv", inputs, name, group=group, **_window(net, x, name, kernel, stride, pads))


def _window(
    net: Builder, x: ir.Value, name: str, kernel: int, stride: int, pads: Sequence[int]
) -> dict[str, Sequence[int]]:
    """Return the attributes of a square sliding window. Raises ValueError where ONNX would infer a size that isn't."""
    for axis in (2, 3):
        size = static_dim(x, axis)
        if size + pads[axis - 2] + pads[axis] < kernel:
            raise ValueError(f"{net.path(name)} slides {kernel} over {size}: the image is too small")
    return {"kernel_shape": [kernel] * 2, "strides": [stride] * 2, "pads": list(pads)}


def conv_transpose(net: Builder, x: ir.Value, name: str, channels: int, kernel: int) -> ir.Value:
    """Enlarge an image `kernel` times by a transposed convolution whose stride is its kernel."""
    fan_in = static_dim(x, 1)
    weight = net.parameter(f"{name}.weight", (fan_in, channels, kernel, kernel), normal(1.0 / math.sqrt(fan_in)))
    bias = net.parameter(f"{name}.bias", (channels,), normal(_BIAS_STD))
    return net.op("ConvTranspose", [x, weight, bias], name, kernel_shape=[kernel] * 2, strides=[kernel] * 2)


def batch_norm(net: Builder, x: ir.Value, name: str, *, scale: float = 1.0) -> ir.Value:
    """Normalize over the batch; in the training form also output the next running statistics.

    ONNX's momentum of 0.9 is what PyTorch calls 0.1.
    """
    channels = (static_dim(x, 1),)
    inputs = [
        x,
        net.parameter(f"{name}.weight", channels, uniform(0.8 * scale, 1.2 * scale)),
        net.parameter(f"{name}.bias", channels, normal(0.1 * scale)),
        net.parameter(f"{name}.running_mean", channels, filled(0.0)),
        net.parameter(f"{name}.running_var", channels, filled(1.0)),
    ]
    if not net.training:
        return net.op("BatchNormalization", inputs, name, epsilon=1e-5)
    suffixes = ["", ".next_mean", ".next_var"]
    y, mean, var = net.multi_op("BatchNormalization", inputs, name, suffixes, epsilon=1e-5, training_mode=1)
    net.statistic(mean)
    net.statistic(var)
    return y


def relu(net: Builder, x: ir.Value, name: str) -> ir.Value:
    """Return max(x, 0)."""
    return net.op("Relu", [x], name)


def relu6(net: Builder, x: ir.Value, name: str) -> ir.Value:
    """Return min(max(x, 0), 6)."""
    low = net.constant(np.array(0.0, np.float32), "zero")
    high = net.constant(np.array(6.0, np.float32), "six")
    return net.op("Clip", [x, low, high], name)


def conv_relu(net: Builder, x: ir.Value, name: str, channels: int, kernel: int, *, stride: int = 1) -> ir.Value:
    """Convolution with a bias, then ReLU: `<name>` and `<name>.relu`."""
    return relu(net, conv(net, x, name, channels, kernel, stride=stride, bias=True), f"{name}.relu")


def max_pool(
    net: Builder, x: ir.Value, name: str, kernel: int, stride: int, pads: Sequence[int] = (0,) * 4
) -> ir.Value:
    """Maximum over windows; `pads` are top, left, bottom, right."""
    return net.op("MaxPool", [x], name, **_window(net, x, name, kernel, stride, pads))


def average_pool(net: Builder, x: ir.Value, name: str, kernel: int) -> ir.Value:
    """Mean over windows that touch and don't overlap."""
    return net.op("AveragePool", [x], name, **_window(net, x, name, kernel, kernel, (0,) * 4))


def add(net: Builder, a: ir.Value, b: ir.Value, name: str) -> ir.Value:
    """Return a + b."""
    return net.op("Add", [a, b], name)


def concat(net: Builder, parts: Sequence[ir.Value], name: str, axis: int = 1) -> ir.Value:
    """Join along `axis`: by default, channels."""
    return net.op("Concat", parts, name, axis=axis)


def reshape(net: Builder, x: ir.Value, name: str, shape: Sequence[int]) -> ir.Value:
    """Reshape; 0 keeps a dimension, −1 is what remains."""
    return net.op("Reshape", [x, net.constant(np.array(shape, np.int64), f"{name}.shape")], name)


def dropout(net: Builder, x: ir.Value, name: str, ratio: float) -> ir.Value:
    """Drop with probability `ratio` in the training form, seeded by the node's name; nothing in the inference form."""
    if not net.training or ratio == 0.0:
        return x
    rate = net.constant(np.array(ratio, np.float32), "dropout_ratio")
    mode = net.constant(np.array(True), "dropout_training")
    seed = (zlib.crc32(net.path(name).encode()) ^ net.seed) & 0x7FFFFFFF
    return net.op("Dropout", [x, rate, mode], name, seed=seed)


def linear(net: Builder, x: ir.Value, name: str, features: int, *, gain: float = 1.0) -> ir.Value:
    """Map the last dimension: by Gemm for rows (weight [out, in]), by MatMul and Add for sequences ([in, out])."""
    rows = len(x.shape or ()) == 2
    fan_in = static_dim(x, -1)
    shape = (features, fan_in) if rows else (fan_in, features)
    weight = net.parameter(f"{name}.weight", shape, normal(gain / math.sqrt(fan_in)))
    bias = net.parameter(f"{name}.bias", (features,), normal(_BIAS_STD))
    if rows:
        return net.op("Gemm", [x, weight, bias], name, transB=1)
    return add(net, net.op("MatMul", [x, weight], f"{name}.matmul"), bias, name)


def global_pool(net: Builder, x: ir.Value, name: str) -> ir.Value:
    """Mean over height and width, as rows [batch, channels]."""
    return net.op("Flatten", [net.op("GlobalAveragePool", [x], name)], f"{name}.flatten", axis=1)


def image_input(net: Builder, channels: int, image: int) -> ir.Value:
    """Add the input `image`, float32 [batch, channels, image, image]."""
    return net.input("image", [net.batch, channels, image, image])


def token_input(net: Builder, tokens: int) -> ir.Value:
    """Add the input `tokens`, int64 [batch, tokens]."""
    return net.input("tokens", [net.batch, tokens], ir.DataType.INT64)


def classify(net: Builder, logits: ir.Value) -> None:
    """End a network: output `logits`, or in the training form the mean cross entropy `loss` against `labels`.

    Labels are int64, of the logits' shape without axis 1: [batch], or [batch, height, width].
    """
    if not net.training:
        net.output(logits, "logits")
        return
    dims = list(logits.shape or ())
    shape = [net.batch, *(static_dim(logits, axis) for axis in range(2, len(dims)))]
    labels = net.input("labels", shape, ir.DataType.INT64)
    net.output(net.op("SoftmaxCrossEntropyLoss", [logits, labels], "loss"))
