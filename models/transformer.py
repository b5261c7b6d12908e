"""The transformer block that bert, gpt and vit share (Vaswani et al. 2017, "Attention Is All You Need"; Xiong et al.
2020, "On Layer Normalization in the Transformer Architecture"), attention written out in standard operators."""

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from models import layers
from models.builder import Builder, normal, static_dim, uniform

_MASKED = -1e9


@dataclass(frozen=True, slots=True)
class Block:
    """What the blocks of one network have in common.

    Attributes:
        heads: attention heads, a divisor of the width.
        hidden: width of the feed-forward layer.
        causal: whether a token sees only itself and those before it.
        gelu: "none" for the exact GELU, "tanh" for its approximation (Hendrycks and Gimpel 2016).
        epsilon: added to the variance by normalizations.
        dropout: ratio after attention's softmax and each branch, in the training form.
        scale: of each branch's last weights.
        norm_first: whether normalizations stand before branches, or behind the sums.
    """

    heads: int
    hidden: int
    causal: bool
    gelu: str
    epsilon: float
    dropout: float
    scale: float
    norm_first: bool = True


def block(net: Builder, x: ir.Value, config: Block) -> ir.Value:
    """Attention and a feed-forward layer, each beside a shortcut and behind a normalization, or before one."""
    for number, (name, branch) in enumerate((("attention", attention), ("mlp", _feed_forward)), 1):
        y = layer_norm(net, x, f"norm{number}", config.epsilon) if config.norm_first else x
        y = layers.dropout(net, branch(net, y, config), f"{name}/out.dropout", config.dropout)
        x = layers.add(net, x, y, f"add{number}")
        x = net.mark(x if config.norm_first else layer_norm(net, x, f"norm{number}", config.epsilon))
    return x


def layer_norm(net: Builder, x: ir.Value, name: str, epsilon: float) -> ir.Value:
    """Normalize each token, then scale and shift by parameters."""
    width = (static_dim(x, -1),)
    weight = net.parameter(f"{name}.weight", width, uniform(0.8, 1.2))
    bias = net.parameter(f"{name}.bias", width, normal(0.1))
    return net.op("LayerNormalization", [x, weight, bias], name, axis=-1, epsilon=epsilon)


def attention(net: Builder, x: ir.Value, config: Block) -> ir.Value:
    """Multi-head self-attention: softmax(Q·Kᵀ / √head_width, masked where causal) · V, then a linear map.

    Raises:
        ValueError: if the heads don't divide the width.
    """
    tokens, width = static_dim(x, 1), static_dim(x, 2)
    if width % config.heads:
        raise ValueError(f"{config.heads} heads don't divide a width of {width}")
    with net.scope("attention"):
        qkv = layers.linear(net, x, "qkv", 3 * width)
        parts = net.multi_op("Split", [qkv], "split", [".q", ".k", ".v"], axis=2, num_outputs=3)
        perms = ("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])
        q, k, v = (
            _heads(net, part, name, [0, tokens, config.heads, width // config.heads], perm)
            for part, (name, perm) in zip(parts, perms, strict=True)
        )
        y = net.op("MatMul", [_weights(net, q, k, config), v], "mixed")
        y = net.op("Transpose", [y], "mixed.transpose", perm=[0, 2, 1, 3])
        y = layers.reshape(net, y, "mixed.merge", [0, tokens, width])
        return layers.linear(net, y, "out", width, gain=config.scale)


def _heads(net: Builder, x: ir.Value, name: str, shape: list[int], perm: list[int]) -> ir.Value:
    return net.op("Transpose", [layers.reshape(net, x, f"{name}.heads", shape)], name, perm=perm)


def _weights(net: Builder, q: ir.Value, k: ir.Value, config: Block) -> ir.Value:
    """Return the attention of each token to each, [batch, heads, tokens, tokens]."""
    tokens, head_width = static_dim(q, 2), static_dim(q, 3)
    scale = net.constant(np.array(1.0 / math.sqrt(head_width), np.float32), "scale")
    scores = net.op("Mul", [net.op("MatMul", [q, k], "scores"), scale], "scores.scaled")
    if config.causal:
        visible = net.constant(np.tri(tokens, dtype=np.bool_), "visible")
        masked = net.constant(np.array(_MASKED, np.float32), "masked")
        scores = net.op("Where", [visible, scores, masked], "scores.masked")
    return layers.dropout(net, net.op("Softmax", [scores], "softmax", axis=-1), "dropout", config.dropout)


def _feed_forward(net: Builder, x: ir.Value, config: Block) -> ir.Value:
    with net.scope("mlp"):
        y = net.op("Gelu", [layers.linear(net, x, "fc", config.hidden)], "gelu", approximate=config.gelu)
        return layers.linear(net, y, "out", static_dim(x, 2), gain=config.scale * layers.RELU_GAIN)


def learned(net: Builder, name: str, tokens: int, width: int, std: float) -> ir.Value:
    """Return a parameter [1, tokens, width], to be added to every sequence."""
    return net.parameter(name, (1, tokens, width), normal(std))
