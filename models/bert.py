"""BERT (Devlin et al. 2019, "BERT: Pre-training of Deep Bidirectional Transformers"), with the head that sorts a text
into classes: post-norm blocks over words, positions and a type. bert_large is BERT-large uncased with two classes, of
335,143,938 parameters."""

import numpy as np
import onnx_ir as ir

from models import layers, transformer
from models.builder import Builder, normal

_EPSILON = 1e-12


def bert(
    net: Builder,
    *,
    num_layers: int = 24,
    heads: int = 16,
    width: int = 1024,
    seq_len: int = 128,
    longest: int = 512,
    vocabulary: int = 30522,
    classes: int = 2,
    dropout: float = 0.1,
) -> None:
    """Write the network: from `tokens` to a text's classes.

    Raises:
        ValueError: if `heads` don't divide `width`, or `seq_len` is above `longest`.
    """
    if seq_len > longest:
        raise ValueError(f"{seq_len} tokens are more than the {longest} positions")
    config = transformer.Block(
        heads=heads, hidden=4 * width, causal=False, gelu="none", epsilon=_EPSILON, dropout=dropout,
        scale=layers.damping(2 * num_layers), norm_first=False,
    )  # fmt: skip
    words = _rows(net, "word", vocabulary, width, layers.token_input(net, seq_len))
    places = _rows(net, "position", longest, width, net.constant(np.arange(seq_len), "positions"))
    kinds = _rows(net, "type", 2, width, net.constant(np.zeros(seq_len, np.int64), "types"))
    x = layers.add(net, layers.add(net, words, places, "placed"), kinds, "embedded")
    x = transformer.layer_norm(net, x, "norm", _EPSILON)
    x = net.mark(layers.dropout(net, x, "embedded.dropout", dropout))
    for layer in range(num_layers):
        with net.scope(f"layer{layer}"):
            x = transformer.block(net, x, config)
    x = net.op("Gather", [x, net.constant(np.array(0, np.int64), "first")], "first_token", axis=1)
    x = net.op("Tanh", [layers.linear(net, x, "pooler", width)], "pooled")
    layers.classify(net, layers.linear(net, layers.dropout(net, x, "pooled.dropout", dropout), "classifier", classes))


def _rows(net: Builder, name: str, rows: int, width: int, indices: ir.Value) -> ir.Value:
    table = net.parameter(f"{name}.weight", (rows, width), normal(width**-0.5))
    return net.op("Gather", [table, indices], name)
