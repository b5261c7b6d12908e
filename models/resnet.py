"""ResNet for ImageNet (He et al. 2016, "Deep Residual Learning for Image Recognition"), the stride on the 3×3
convolution as torchvision has it: 11,689,512, 21,797,672, 25,557,032, 44,549,160 and 60,192,808 parameters for 18, 34,
50, 101 and 152 layers. resnet200 has the four stages [3, 24, 36, 3] of mxnet-memonger's example_resnet.py."""

from collections.abc import Sequence

import onnx_ir as ir

from models import layers
from models.builder import Builder, static_dim

_CHANNELS = (64, 128, 256, 512)


def resnet(
    net: Builder,
    *,
    units: Sequence[int],
    bottleneck: bool,
    image: int = 224,
    classes: int = 1000,
    width: float = 1.0,
) -> None:
    """Write the network; `units` are the residual units of each stage, `width` multiplies all hidden channels."""
    x = _stem(net, layers.image_input(net, 3, image), max(1, round(64 * width)))
    unit_of = bottleneck_unit if bottleneck else basic_unit
    scale = layers.damping(sum(units))
    for stage, (count, channels) in enumerate(zip(units, _CHANNELS, strict=True), 1):
        for unit in range(1, count + 1):
            stride = 2 if stage > 1 and unit == 1 else 1
            with net.scope(f"stage{stage}/unit{unit}"):
                x = unit_of(net, x, max(1, round(channels * width)), stride, scale)
    x = layers.global_pool(net, x, "pool")
    layers.classify(net, layers.linear(net, x, "classifier", classes))


def _stem(net: Builder, x: ir.Value, channels: int) -> ir.Value:
    with net.scope("stem"):
        x = layers.conv(net, x, "conv", channels, 7, stride=2)
        x = layers.relu(net, layers.batch_norm(net, x, "bn"), "relu")
        return net.mark(layers.max_pool(net, x, "pool", 3, 2, (1,) * 4))


def basic_unit(net: Builder, x: ir.Value, channels: int, stride: int, scale: float) -> ir.Value:
    """Two 3×3 convolutions beside a shortcut; the branch's last normalization has scale `scale`."""
    y = layers.conv(net, x, "conv1", channels, 3, stride=stride)
    y = layers.relu(net, layers.batch_norm(net, y, "bn1"), "relu1")
    y = layers.conv(net, y, "conv2", channels, 3, gain=1.0)
    y = layers.batch_norm(net, y, "bn2", scale=scale)
    return _join(net, y, _projection(net, x, channels, stride))


def bottleneck_unit(net: Builder, x: ir.Value, channels: int, stride: int, scale: float) -> ir.Value:
    """1×1, 3×3 and a 1×1 convolution to four times the channels, beside a shortcut."""
    y = layers.conv(net, x, "conv1", channels, 1)
    y = layers.relu(net, layers.batch_norm(net, y, "bn1"), "relu1")
    y = layers.conv(net, y, "conv2", channels, 3, stride=stride)
    y = layers.relu(net, layers.batch_norm(net, y, "bn2"), "relu2")
    y = layers.conv(net, y, "conv3", 4 * channels, 1, gain=1.0)
    y = layers.batch_norm(net, y, "bn3", scale=scale)
    return _join(net, y, _projection(net, x, 4 * channels, stride))


def _projection(net: Builder, x: ir.Value, channels: int, stride: int) -> ir.Value:
    """Option B: the identity where shapes agree, else a 1×1 convolution."""
    if stride == 1 and static_dim(x, 1) == channels:
        return x
    x = layers.conv(net, x, "shortcut.conv", channels, 1, stride=stride, gain=1.0)
    return layers.batch_norm(net, x, "shortcut.bn")


def _join(net: Builder, branch: ir.Value, shortcut: ir.Value) -> ir.Value:
    return net.mark(layers.relu(net, layers.add(net, branch, shortcut, "add"), "relu"))
