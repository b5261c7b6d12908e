"""A language model of LSTM layers unrolled over time (Hochreiter and Schmidhuber 1997, "Long Short-Term Memory"), as
mxnet-memonger's example_lstm.py has it: for each step and layer two matrix products, a split into gates, and the
state's update. Gates stand in that example's order: in, transform, forget, out. As there, each step's states are one
mirror stage of the step's name. The example's own size is seq_len=1000, num_hidden=1024, num_layers=4.

Differences: words come as ids and are looked up, where the example multiplies one-hot vectors; input and output
share the vocabulary's size.
"""

from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from models import layers
from models.builder import Builder, normal, static_dim


class _State(NamedTuple):
    c: ir.Value
    h: ir.Value


class _Weights(NamedTuple):
    input: ir.Value
    input_bias: ir.Value
    hidden: ir.Value
    hidden_bias: ir.Value


class _Decoder(NamedTuple):
    weight: ir.Value
    bias: ir.Value


def lstm(
    net: Builder,
    *,
    seq_len: int = 32,
    num_hidden: int = 256,
    num_layers: int = 2,
    vocabulary: int = 1000,
    num_embed: int | None = None,
    concat_decode: bool = False,
    dropout: float = 0.0,
) -> None:
    """Write the network: from `tokens` and the first states to logits [seq_len × batch, vocabulary] and last states.

    Args:
        net: where to.
        seq_len: steps.
        num_hidden: width of the states.
        num_layers: layers.
        vocabulary: words, in and out.
        num_embed: width of a word's vector; `num_hidden` if not given.
        concat_decode: decode all steps by one product (faster, more memory), or each step by its own.
        dropout: ratio between layers and before decoding, in the training form.
    """
    embed = num_hidden if num_embed is None else num_embed
    tokens = layers.token_input(net, seq_len)
    states = [_first_state(net, layer, num_hidden) for layer in range(num_layers)]
    table = net.parameter("embedding.weight", (vocabulary, embed), normal(1.0))
    weights = [_weights(net, layer, embed if layer == 0 else num_hidden, num_hidden) for layer in range(num_layers)]
    hidden = []
    for step in range(seq_len):
        with net.scope(f"t{step}"):
            x = net.op("Gather", [table, _column(net, tokens, step, "token")], "embedding")
            hidden.append(_step(net, x, states, weights, dropout, str(step)))
    _decode(net, hidden, vocabulary, concat_decode)
    for layer, state in enumerate(states):
        net.output(state.c, f"layer{layer}/last_c")
        net.output(state.h, f"layer{layer}/last_h")


def _first_state(net: Builder, layer: int, width: int) -> _State:
    return _State(
        net.input(f"layer{layer}/init_c", [net.batch, width]), net.input(f"layer{layer}/init_h", [net.batch, width])
    )


def _weights(net: Builder, layer: int, fan_in: int, width: int) -> _Weights:
    with net.scope(f"layer{layer}"):
        return _Weights(
            net.parameter("i2h.weight", (4 * width, fan_in), normal(fan_in**-0.5)),
            net.parameter("i2h.bias", (4 * width,), normal(0.1)),
            net.parameter("h2h.weight", (4 * width, width), normal(width**-0.5)),
            net.parameter("h2h.bias", (4 * width,), normal(0.1)),
        )


def _column(net: Builder, table: ir.Value, step: int, name: str) -> ir.Value:
    """Return one step of [batch, seq_len], as [batch]."""
    return net.op("Gather", [table, net.constant(np.array(step, np.int64), "index")], name, axis=1)


def _step(
    net: Builder, x: ir.Value, states: list[_State], weights: list[_Weights], dropout: float, stage: str
) -> ir.Value:
    """Advance all layers by one step, replacing their states, and return the last one's output."""
    for layer, (state, weight) in enumerate(zip(states, weights, strict=True)):
        with net.scope(f"layer{layer}"):
            if layer:
                x = layers.dropout(net, x, "dropout", dropout)
            states[layer] = _cell(net, x, state, weight)
        x = net.mark(states[layer].h, stage)
        net.mark(states[layer].c, stage)
    return layers.dropout(net, x, "dropout", dropout)


def _cell(net: Builder, x: ir.Value, state: _State, weight: _Weights) -> _State:
    i2h = net.op("Gemm", [x, weight.input, weight.input_bias], "i2h", transB=1)
    h2h = net.op("Gemm", [state.h, weight.hidden, weight.hidden_bias], "h2h", transB=1)
    suffixes = [".in", ".transform", ".forget", ".out"]
    gates = net.multi_op("Split", [layers.add(net, i2h, h2h, "gates")], "slice", suffixes, axis=1, num_outputs=4)
    in_gate = net.op("Sigmoid", [gates[0]], "in_gate")
    transform = net.op("Tanh", [gates[1]], "in_transform")
    forget_gate = net.op("Sigmoid", [gates[2]], "forget_gate")
    out_gate = net.op("Sigmoid", [gates[3]], "out_gate")
    kept, new = net.op("Mul", [forget_gate, state.c], "kept"), net.op("Mul", [in_gate, transform], "new")
    c = layers.add(net, kept, new, "c")
    return _State(c, net.op("Mul", [out_gate, net.op("Tanh", [c], "c.tanh")], "h"))


def _decode(net: Builder, hidden: list[ir.Value], vocabulary: int, concat_decode: bool) -> None:
    """Output the logits, step after step, or in the training form the loss, its mean over steps and batch."""
    width = static_dim(hidden[0], 1)
    decoder = _Decoder(
        net.parameter("decoder.weight", (vocabulary, width), normal(width**-0.5)),
        net.parameter("decoder.bias", (vocabulary,), normal(0.02)),
    )
    if concat_decode:
        logits = net.op("Gemm", [layers.concat(net, hidden, "decoder/concat", 0), *decoder], "decoder", transB=1)
        labels = [_flat_labels(net, len(hidden))] if net.training else []
        _finish(net, [logits], labels)
        return
    steps = [net.op("Gemm", [h, *decoder], f"t{step}/decoder", transB=1) for step, h in enumerate(hidden)]
    _finish(net, steps, _step_labels(net, len(hidden)) if net.training else [])


def _labels(net: Builder, seq_len: int) -> ir.Value:
    return net.input("labels", [net.batch, seq_len], ir.DataType.INT64)


def _flat_labels(net: Builder, seq_len: int) -> ir.Value:
    turned = net.op("Transpose", [_labels(net, seq_len)], "labels.transpose", perm=[1, 0])
    return layers.reshape(net, turned, "labels.flat", [-1])


def _step_labels(net: Builder, seq_len: int) -> list[ir.Value]:
    labels = _labels(net, seq_len)
    return [_column(net, labels, step, f"t{step}/label") for step in range(seq_len)]


def _finish(net: Builder, logits: list[ir.Value], labels: list[ir.Value]) -> None:
    if not net.training:
        net.output(layers.concat(net, logits, "logits", 0) if len(logits) > 1 else logits[0], "logits")
        return
    losses = [
        net.op("SoftmaxCrossEntropyLoss", [x, y], f"t{step}/loss")
        for step, (x, y) in enumerate(zip(logits, labels, strict=True))
    ]
    total = net.op("Sum", losses, "loss.sum") if len(losses) > 1 else losses[0]
    count = net.constant(np.array(len(losses), np.float32), "loss.count")
    net.output(net.op("Div", [total, count], "loss"))
