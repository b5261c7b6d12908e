"""VGG (Simonyan and Zisserman 2015, "Very Deep Convolutional Networks for Large-Scale Image Recognition"): stages of
3×3 convolutions between poolings, then three linear layers. Configurations A, D and E are vgg11, vgg16 and vgg19, of
132,863,336, 138,357,544 and 143,667,240 parameters. At image sizes other than 224 the first linear layer is as wide as
the features are."""

from collections.abc import Sequence

import onnx_ir as ir

from models import layers
from models.builder import Builder

_CHANNELS = (64, 128, 256, 512, 512)


def vgg(
    net: Builder,
    *,
    stages: Sequence[int],
    image: int = 224,
    classes: int = 1000,
    width: float = 1.0,
    dropout: float = 0.5,
) -> None:
    """Write the network; `stages` are the convolutions before each pooling, `width` multiplies all hidden channels."""
    x = layers.image_input(net, 3, image)
    for stage, (depth, channels) in enumerate(zip(stages, _CHANNELS, strict=True), 1):
        with net.scope(f"stage{stage}"):
            x = _stage(net, x, depth, max(1, round(channels * width)))
    x = net.op("Flatten", [x], "flatten", axis=1)
    for name in ("fc1", "fc2"):
        x = layers.linear(net, x, name, max(1, round(4096 * width)), gain=layers.RELU_GAIN)
        x = net.mark(layers.relu(net, x, f"{name}.relu"))
        x = layers.dropout(net, x, f"{name}.dropout", dropout)
    layers.classify(net, layers.linear(net, x, "fc3", classes))


def _stage(net: Builder, x: ir.Value, depth: int, channels: int) -> ir.Value:
    for unit in range(1, depth + 1):
        x = layers.conv_relu(net, x, f"conv{unit}", channels, 3)
    return net.mark(layers.max_pool(net, x, "pool", 2, 2))
