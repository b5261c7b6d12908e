"""U-Net (Ronneberger et al. 2015, "U-Net: Convolutional Networks for Biomedical Image Segmentation"): 31,030,658
parameters with the paper's one input channel and two classes. (The 31,031,685 often given for Keras versions has one
more 3×3 convolution to two channels before a single class.) Convolutions are padded, so that the logits have the
image's size and skips are joined without cropping; the paper's are not."""

import onnx_ir as ir

from models import layers
from models.builder import Builder


def unet(
    net: Builder,
    *,
    image: int = 512,
    classes: int = 2,
    channels: int = 1,
    width: float = 1.0,
    depth: int = 4,
    dropout: float = 0.5,
) -> None:
    """Write the network.

    Args:
        net: where to.
        image: height and width, a multiple of 2^depth.
        classes: logits of each pixel.
        channels: the image's.
        width: multiplies all hidden channels.
        depth: poolings.
        dropout: ratio at the end of the contracting path, in the training form.

    Raises:
        ValueError: if `image` isn't such a multiple.
    """
    if image % 2**depth:
        raise ValueError(f"image size {image} is not a multiple of {2**depth}")
    levels = [max(1, round(64 * 2**level * width)) for level in range(depth + 1)]
    x = layers.image_input(net, channels, image)
    skips = []
    for level, features in enumerate(levels[:-1], 1):
        with net.scope(f"down{level}"):
            skips.append(net.mark(_double_conv(net, x, features)))
            x = net.mark(layers.max_pool(net, skips[-1], "pool", 2, 2))
    with net.scope("bottom"):
        x = net.mark(layers.dropout(net, _double_conv(net, x, levels[-1]), "dropout", dropout))
    for level, features in reversed(list(enumerate(levels[:-1], 1))):
        with net.scope(f"up{level}"):
            x = net.mark(_up(net, x, skips[level - 1], features))
    layers.classify(net, layers.conv(net, x, "classifier", classes, 1, bias=True, gain=1.0))


def _double_conv(net: Builder, x: ir.Value, channels: int) -> ir.Value:
    return layers.conv_relu(net, layers.conv_relu(net, x, "conv1", channels, 3), "conv2", channels, 3)


def _up(net: Builder, x: ir.Value, skip: ir.Value, channels: int) -> ir.Value:
    x = layers.conv_transpose(net, x, "upconv", channels, 2)
    return _double_conv(net, layers.concat(net, [skip, x], "concat"), channels)
