"""Vision transformer (Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words"): patches, a class token, learned
positions, pre-norm blocks. vit_b16 is ViT-B/16, of 86,567,656 parameters; vit is a small one of the same form."""

import numpy as np
import onnx_ir as ir

from models import layers, transformer
from models.builder import Builder, static_dim

_EPSILON = 1e-6


def vit(
    net: Builder,
    *,
    image: int = 32,
    patch: int = 4,
    num_layers: int = 6,
    heads: int = 4,
    width: int = 128,
    classes: int = 10,
    dropout: float = 0.1,
) -> None:
    """Write the network.

    Raises:
        ValueError: if `patch` doesn't divide `image`, or `heads` don't divide `width`.
    """
    if image % patch:
        raise ValueError(f"patches of {patch} don't divide an image of {image}")
    config = transformer.Block(
        heads=heads,
        hidden=4 * width,
        causal=False,
        gelu="none",
        epsilon=_EPSILON,
        dropout=dropout,
        scale=layers.damping(2 * num_layers),
    )
    x = _embed(net, layers.image_input(net, 3, image), patch, width)
    x = net.mark(layers.dropout(net, x, "embedded.dropout", dropout))
    for layer in range(num_layers):
        with net.scope(f"layer{layer}"):
            x = transformer.block(net, x, config)
    x = transformer.layer_norm(net, x, "norm", _EPSILON)
    x = net.op("Gather", [x, net.constant(np.array(0, np.int64), "first")], "class_token", axis=1)
    layers.classify(net, layers.linear(net, x, "classifier", classes))


def _embed(net: Builder, x: ir.Value, patch: int, width: int) -> ir.Value:
    """Return [batch, 1 + patches, width]. The class token is added to a row of zeros: no shape is read at run time."""
    with net.scope("patches"):
        x = layers.conv(net, x, "conv", width, patch, stride=patch, pad=0, bias=True, gain=1.0)
        x = layers.reshape(net, x, "rows", [0, width, -1])
        x = net.op("Transpose", [x], "transpose", perm=[0, 2, 1])
    count = static_dim(x, 1)
    x = _pad_tokens(net, x, "patches/pad", 1, 0)
    token = _pad_tokens(net, transformer.learned(net, "class_token.weight", 1, width, 1.0), "token/pad", 0, count)
    x = layers.add(net, x, token, "with_token")
    return layers.add(net, x, transformer.learned(net, "position.weight", count + 1, width, 0.5), "embedded")


def _pad_tokens(net: Builder, x: ir.Value, name: str, before: int, after: int) -> ir.Value:
    pads = net.constant(np.array([0, before, 0, 0, after, 0], np.int64), f"{name}.pads")
    return net.op("Pad", [x, pads], name)
