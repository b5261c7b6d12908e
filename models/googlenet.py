"""GoogLeNet (Szegedy et al. 2015, "Going Deeper with Convolutions") as the paper and Caffe's bvlc_googlenet have it:
5×5 branches, local response normalization, biases and no batch normalization; 6,998,552 parameters without the two
auxiliary heads, which are left out."""

import onnx_ir as ir

from models import layers
from models.builder import Builder

_INCEPTIONS = (
    ("3a", 64, 96, 128, 16, 32, 32),
    ("3b", 128, 128, 192, 32, 96, 64),
    ("4a", 192, 96, 208, 16, 48, 64),
    ("4b", 160, 112, 224, 24, 64, 64),
    ("4c", 128, 128, 256, 24, 64, 64),
    ("4d", 112, 144, 288, 32, 64, 64),
    ("4e", 256, 160, 320, 32, 128, 128),
    ("5a", 256, 160, 320, 32, 128, 128),
    ("5b", 384, 192, 384, 48, 128, 128),
)
"""The paper's table 1: name, then the columns #1x1, #3x3 reduce, #3x3, #5x5 reduce, #5x5, pool proj."""

_CEIL = (0, 0, 1, 1)
"""Padding with which a pooling of kernel 3 and stride 2 rounds sizes up, as Caffe's does."""


def googlenet(net: Builder, *, image: int = 224, classes: int = 1000, width: float = 1.0, dropout: float = 0.4) -> None:
    """Write the network; `width` multiplies all hidden channels."""
    x = _stem(net, layers.image_input(net, 3, image), width)
    for name, *channels in _INCEPTIONS:
        with net.scope(f"inception{name}"):
            x = _inception(net, x, [max(1, round(c * width)) for c in channels])
        if name in ("3b", "4e"):
            x = net.mark(layers.max_pool(net, x, f"pool{name[0]}", 3, 2, _CEIL))
    x = layers.global_pool(net, x, "pool5")
    x = layers.dropout(net, x, "dropout", dropout)
    layers.classify(net, layers.linear(net, x, "classifier", classes))


def _stem(net: Builder, x: ir.Value, width: float) -> ir.Value:
    narrow, wide = max(1, round(64 * width)), max(1, round(192 * width))
    with net.scope("stem"):
        x = layers.conv_relu(net, x, "conv1", narrow, 7, stride=2)
        x = net.mark(layers.max_pool(net, x, "pool1", 3, 2, _CEIL))
        x = _lrn(net, x, "norm1")
        x = layers.conv_relu(net, x, "conv2_reduce", narrow, 1)
        x = layers.conv_relu(net, x, "conv2", wide, 3)
        x = _lrn(net, x, "norm2")
        return net.mark(layers.max_pool(net, x, "pool2", 3, 2, _CEIL))


def _lrn(net: Builder, x: ir.Value, name: str) -> ir.Value:
    return net.op("LRN", [x], name, size=5, alpha=1e-4, beta=0.75, bias=1.0)


def _inception(net: Builder, x: ir.Value, channels: list[int]) -> ir.Value:
    c1, reduce3, c3, reduce5, c5, projection = channels
    branches = [
        layers.conv_relu(net, x, "1x1", c1, 1),
        layers.conv_relu(net, layers.conv_relu(net, x, "3x3_reduce", reduce3, 1), "3x3", c3, 3),
        layers.conv_relu(net, layers.conv_relu(net, x, "5x5_reduce", reduce5, 1), "5x5", c5, 5),
        layers.conv_relu(net, layers.max_pool(net, x, "pool", 3, 1, (1,) * 4), "pool_projection", projection, 1),
    ]
    return net.mark(layers.concat(net, branches, "concat"))
