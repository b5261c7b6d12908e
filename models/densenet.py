"""DenseNet (Huang et al. 2017, "Densely Connected Convolutional Networks"): bottleneck layers and compression.

densenet121 and densenet201 are torchvision's, of 7,978,856 and 20,013,928 parameters. densenet_bc100 is the paper's
DenseNet-BC for CIFAR of depth 100 and growth 12, of 769,162 parameters (the paper's 0.8M).
"""

from collections.abc import Sequence

import onnx_ir as ir

from models import layers
from models.builder import Builder, static_dim


def densenet(
    net: Builder,
    *,
    blocks: Sequence[int],
    growth: int,
    cifar: bool = False,
    image: int = 224,
    classes: int = 1000,
    dropout: float = 0.0,
) -> None:
    """Write the network.

    Args:
        net: where to.
        blocks: dense layers of each block.
        growth: channels each layer adds; the stem has twice as many, a bottleneck four times as many.
        cifar: whether the stem is one 3×3 convolution instead of a 7×7 one and a pooling.
        image: height and width.
        classes: logits.
        dropout: ratio after each dense layer, in the training form (the paper's 0.2 without augmentation).
    """
    x = _stem(net, layers.image_input(net, 3, image), 2 * growth, cifar)
    for block, count in enumerate(blocks, 1):
        for layer in range(1, count + 1):
            with net.scope(f"block{block}/layer{layer}"):
                x = _dense_layer(net, x, growth, dropout)
        if block < len(blocks):
            with net.scope(f"transition{block}"):
                x = _transition(net, x)
    x = layers.relu(net, layers.batch_norm(net, x, "final/bn"), "final/relu")
    x = layers.global_pool(net, x, "pool")
    layers.classify(net, layers.linear(net, x, "classifier", classes))


def _stem(net: Builder, x: ir.Value, channels: int, cifar: bool) -> ir.Value:
    with net.scope("stem"):
        if cifar:
            return net.mark(layers.conv(net, x, "conv", channels, 3))
        x = layers.conv(net, x, "conv", channels, 7, stride=2)
        x = layers.relu(net, layers.batch_norm(net, x, "bn"), "relu")
        return net.mark(layers.max_pool(net, x, "pool", 3, 2, (1,) * 4))


def _dense_layer(net: Builder, x: ir.Value, growth: int, dropout: float) -> ir.Value:
    y = layers.relu(net, layers.batch_norm(net, x, "bn1"), "relu1")
    y = layers.conv(net, y, "conv1", 4 * growth, 1)
    y = layers.relu(net, layers.batch_norm(net, y, "bn2"), "relu2")
    y = layers.conv(net, y, "conv2", growth, 3)
    y = layers.dropout(net, y, "dropout", dropout)
    return net.mark(layers.concat(net, [x, y], "concat"))


def _transition(net: Builder, x: ir.Value) -> ir.Value:
    y = layers.relu(net, layers.batch_norm(net, x, "bn"), "relu")
    y = layers.conv(net, y, "conv", static_dim(x, 1) // 2, 1)
    return net.mark(layers.average_pool(net, y, "pool", 2))
