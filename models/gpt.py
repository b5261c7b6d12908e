"""A GPT-2-like language model (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"): pre-norm
blocks under a causal mask, and an output layer that shares the embedding's weights. gpt2 is GPT-2 small, of 124,439,808
parameters; gpt is a small one of the same form. Sequences have a fixed length, and there is no cache of keys."""

import onnx_ir as ir

from models import layers, transformer
from models.builder import Builder, normal, static_dim


def gpt(
    net: Builder,
    *,
    num_layers: int = 4,
    heads: int = 4,
    width: int = 128,
    seq_len: int = 128,
    vocabulary: int = 1000,
    dropout: float = 0.1,
) -> None:
    """Write the network: from `tokens` to logits [batch, seq_len, vocabulary]; `labels` are the next tokens.

    Raises:
        ValueError: if `heads` don't divide `width`.
    """
    tokens = layers.token_input(net, seq_len)
    table = net.parameter("embedding.weight", (vocabulary, width), normal(width**-0.5))
    positions = transformer.learned(net, "position.weight", seq_len, width, 0.5 * width**-0.5)
    config = transformer.Block(
        heads=heads,
        hidden=4 * width,
        causal=True,
        gelu="tanh",
        epsilon=1e-5,
        dropout=dropout,
        scale=layers.damping(2 * num_layers),
    )
    x = layers.add(net, net.op("Gather", [table, tokens], "embedding"), positions, "embedded")
    x = net.mark(layers.dropout(net, x, "embedded.dropout", dropout))
    for layer in range(num_layers):
        with net.scope(f"layer{layer}"):
            x = transformer.block(net, x, config)
    _decode(net, transformer.layer_norm(net, x, "norm", 1e-5), table)


def _decode(net: Builder, x: ir.Value, table: ir.Value) -> None:
    """Score every word at every token by its own embedding, as one product over all tokens."""
    seq_len, width = static_dim(x, 1), static_dim(x, 2)
    rows = layers.reshape(net, x, "rows", [-1, width])
    scores = net.op("Gemm", [rows, table], "decoder", transB=1)
    if not net.training:
        logits = layers.reshape(net, scores, "logits", [-1, seq_len, static_dim(table, 0)])
        logits.shape = ir.Shape([net.batch, seq_len, static_dim(table, 0)])
        net.output(logits)
        return
    labels = net.input("labels", [net.batch, seq_len], ir.DataType.INT64)
    flat = layers.reshape(net, labels, "labels.flat", [-1])
    net.output(net.op("SoftmaxCrossEntropyLoss", [scores, flat], "loss"))
