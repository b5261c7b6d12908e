"""ResNets for CIFAR: three stages of equal depth at 32×32, 16×16 and 8×8.

- resnet110: 6n + 2 layers with parameter-free shortcuts, option A (He et al. 2016, "Deep Residual Learning for Image
  Recognition", section 4.2); 1,727,962 parameters, the paper's 1.7M.
- resnet1001: 9n + 2 layers of pre-activation bottlenecks (He et al. 2016, "Identity Mappings in Deep Residual
  Networks"); the paper's 10.2M parameters.
"""

import numpy as np
import onnx_ir as ir

from models import layers
from models.builder import Builder, static_dim

_CHANNELS = (16, 32, 64)


def resnet_cifar(net: Builder, *, depth: int, image: int = 32, classes: int = 10, width: float = 1.0) -> None:
    """Write the network of 6n + 2 layers; `width` multiplies all hidden channels."""
    count = _units(depth, 6)
    x = layers.image_input(net, 3, image)
    with net.scope("stem"):
        x = layers.conv(net, x, "conv", max(1, round(_CHANNELS[0] * width)), 3)
        x = net.mark(layers.relu(net, layers.batch_norm(net, x, "bn"), "relu"))
    for stage, channels in enumerate(_CHANNELS, 1):
        for unit in range(1, count + 1):
            stride = 2 if stage > 1 and unit == 1 else 1
            with net.scope(f"stage{stage}/unit{unit}"):
                x = _basic_unit(net, x, max(1, round(channels * width)), stride, layers.damping(3 * count))
    x = layers.global_pool(net, x, "pool")
    layers.classify(net, layers.linear(net, x, "classifier", classes))


def preact_resnet_cifar(net: Builder, *, depth: int, image: int = 32, classes: int = 10, width: float = 1.0) -> None:
    """Write the network of 9n + 2 layers; `width` multiplies all hidden channels."""
    count = _units(depth, 9)
    x = layers.image_input(net, 3, image)
    x = net.mark(layers.conv(net, x, "stem/conv", max(1, round(_CHANNELS[0] * width)), 3))
    for stage, channels in enumerate(_CHANNELS, 1):
        for unit in range(1, count + 1):
            stride = 2 if stage > 1 and unit == 1 else 1
            with net.scope(f"stage{stage}/unit{unit}"):
                x = _preact_unit(net, x, max(1, round(channels * width)), stride, layers.damping(3 * count))
    x = layers.relu(net, layers.batch_norm(net, x, "final/bn"), "final/relu")
    x = layers.global_pool(net, x, "pool")
    layers.classify(net, layers.linear(net, x, "classifier", classes))


def _units(depth: int, layers_a_unit: int) -> int:
    count, rest = divmod(depth - 2, layers_a_unit)
    if rest or count < 1:
        raise ValueError(f"depth {depth} is not {layers_a_unit}n + 2")
    return count


def _basic_unit(net: Builder, x: ir.Value, channels: int, stride: int, scale: float) -> ir.Value:
    y = layers.conv(net, x, "conv1", channels, 3, stride=stride)
    y = layers.relu(net, layers.batch_norm(net, y, "bn1"), "relu1")
    y = layers.conv(net, y, "conv2", channels, 3, gain=1.0)
    y = layers.batch_norm(net, y, "bn2", scale=scale)
    shortcut = x if stride == 1 else _subsample(net, x, channels)
    return net.mark(layers.relu(net, layers.add(net, y, shortcut, "add"), "relu"))


def _subsample(net: Builder, x: ir.Value, channels: int) -> ir.Value:
    """Option A: every second pixel, and zeros for the new channels."""
    bounds = ([0, 0], [np.iinfo(np.int64).max] * 2, [2, 3], [2, 2])
    names = ("starts", "ends", "axes", "steps")
    inputs = [net.constant(np.array(b, np.int64), f"shortcut.{n}") for b, n in zip(bounds, names, strict=True)]
    x = net.op("Slice", [x, *inputs], "shortcut.slice")
    new = channels - static_dim(x, 1)
    pads = net.constant(np.array([0, new // 2, 0, 0, 0, new - new // 2, 0, 0], np.int64), "shortcut.pads")
    return net.op("Pad", [x, pads], "shortcut.pad")


def _preact_unit(net: Builder, x: ir.Value, channels: int, stride: int, scale: float) -> ir.Value:
    """BN-ReLU-convolution three times; where the shape changes, the shortcut starts at the first activation."""
    y = layers.relu(net, layers.batch_norm(net, x, "bn1"), "relu1")
    if stride != 1 or static_dim(x, 1) != 4 * channels:
        x = layers.conv(net, y, "shortcut.conv", 4 * channels, 1, stride=stride)
    y = layers.conv(net, y, "conv1", channels, 1)
    y = layers.relu(net, layers.batch_norm(net, y, "bn2"), "relu2")
    y = layers.conv(net, y, "conv2", channels, 3, stride=stride)
    y = layers.relu(net, layers.batch_norm(net, y, "bn3"), "relu3")
    y = layers.conv(net, y, "conv3", 4 * channels, 1, gain=layers.RELU_GAIN * scale)
    return net.mark(layers.add(net, y, x, "add"))
