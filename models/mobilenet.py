"""MobileNet-v2 (Sandler et al. 2018, "MobileNetV2: Inverted Residuals and Linear Bottlenecks"): 3,504,872 parameters
at width 1, as torchvision has it."""

import onnx_ir as ir

from models import layers
from models.builder import Builder, static_dim

_STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""The paper's table 2: expansion, channels, units, first stride."""

_RESIDUALS = 10


def mobilenet_v2(
    net: Builder, *, image: int = 224, classes: int = 1000, width: float = 1.0, dropout: float = 0.2
) -> None:
    """Write the network; `width` multiplies all hidden channels, but the last layer's 1280 only where it is above 1."""
    x = layers.image_input(net, 3, image)
    x = net.mark(_conv_bn_relu(net, x, "stem", _divisible(32 * width), 3, stride=2))
    for stage, (expansion, channels, units, first_stride) in enumerate(_STAGES, 1):
        for unit in range(1, units + 1):
            stride = first_stride if unit == 1 else 1
            with net.scope(f"stage{stage}/unit{unit}"):
                x = _unit(net, x, _divisible(channels * width), expansion, stride)
    x = net.mark(_conv_bn_relu(net, x, "head", _divisible(1280 * max(1.0, width)), 1))
    x = layers.global_pool(net, x, "pool")
    x = layers.dropout(net, x, "dropout", dropout)
    layers.classify(net, layers.linear(net, x, "classifier", classes))


def _divisible(channels: float) -> int:
    """Return the multiple of 8 nearest to `channels`, but not less than nine tenths of it."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * channels else rounded + 8


def _conv_bn_relu(
    net: Builder, x: ir.Value, scope: str, channels: int, kernel: int, *, stride: int = 1, group: int = 1
) -> ir.Value:
    with net.scope(scope):
        x = layers.conv(net, x, "conv", channels, kernel, stride=stride, group=group)
        return layers.relu6(net, layers.batch_norm(net, x, "bn"), "relu6")


def _unit(net: Builder, x: ir.Value, channels: int, expansion: int, stride: int) -> ir.Value:
    """Expand by 1×1, filter each channel by 3×3, project by 1×1; a shortcut where shapes agree."""
    hidden = static_dim(x, 1) * expansion
    residual = stride == 1 and static_dim(x, 1) == channels
    y = x if expansion == 1 else _conv_bn_relu(net, x, "expand", hidden, 1)
    y = _conv_bn_relu(net, y, "depthwise", hidden, 3, stride=stride, group=hidden)
    y = layers.conv(net, y, "project/conv", channels, 1)
    y = layers.batch_norm(net, y, "project/bn", scale=layers.damping(_RESIDUALS) if residual else 1.0)
    return net.mark(layers.add(net, x, y, "add") if residual else y)
