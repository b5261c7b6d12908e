"""Networks that keep a state from one run to the next: an LSTM by one step, and decoders with caches, a token a run."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Stream = tuple[onnx.ModelProto, dict[str, str], list[dict[str, np.ndarray]]]
"""One step, which output each input becomes in the next, and what the caller gives step by step."""


def lstm_step(width: int = 512, layers: int = 2) -> Stream:
    """One time step of an LSTM, its state as inputs and outputs; and what the caller gives."""
    rng, nodes, weights, state, x = np.random.default_rng(0), list[onnx.NodeProto](), list[Any](), {}, "x"
    inputs, outputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, width])], []
    for layer in range(layers):
        for name, shape in (("W", (1, 4 * width, width)), ("R", (1, 4 * width, width)), ("B", (1, 8 * width))):
            array = (rng.standard_normal(shape) / width**0.5).astype(np.float32)
            weights.append(numpy_helper.from_array(array, f"{name}{layer}"))
        h, c = f"h{layer}", f"c{layer}"
        given = [x, f"W{layer}", f"R{layer}", f"B{layer}", "", h, c]
        made = [f"y{layer}", f"{h}_next", f"{c}_next"]
        nodes.append(helper.make_node("LSTM", given, made, name=f"lstm{layer}", hidden_size=width))
        nodes.append(helper.make_node("Squeeze", [f"y{layer}", "one"], [f"x{layer}"], name=f"squeeze{layer}"))
        x = f"x{layer}"
        for name in (h, c):
            state[name] = f"{name}_next"
            inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1, width]))
            outputs.append(helper.make_tensor_value_info(f"{name}_next", TensorProto.FLOAT, [1, 1, width]))
    weights.append(numpy_helper.from_array(np.array([1]), "one"))
    outputs.append(helper.make_tensor_value_info(x, TensorProto.FLOAT, [1, 1, width]))
    graph = helper.make_graph(nodes, "lstm_step", inputs, outputs, weights)
    steps = [{"x": rng.standard_normal((1, 1, width)).astype(np.float32)} for _ in range(32)]
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), state, steps


class _Decoder:
    """A GPT-2-like decoder as it is written, layer after layer."""

    def __init__(self, cache: str, width: int, heads: int, length: int) -> None:
        self.cache, self.width = cache, width
        per = width // heads
        self.shapes: dict[str, Callable[[Any], list[Any]]] = {
            "fixed": lambda _: [1, heads, length, per],
            "tokens": lambda tokens: [1, tokens, heads, per],
            "heads": lambda tokens: [1, heads, tokens, per],
        }
        self.rng, self.nodes, self.state = np.random.default_rng(0), list[onnx.NodeProto](), dict[str, str]()
        self.inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, width])]
        if cache == "fixed":
            self.inputs.append(helper.make_tensor_value_info("at", TensorProto.INT64, [1, heads, 1, 3]))
            self.inputs.append(helper.make_tensor_value_info("mask", TensorProto.FLOAT, [1, 1, 1, length]))
        self.outputs = list[onnx.ValueInfoProto]()
        self.weights = [
            numpy_helper.from_array(np.array([1, 1, heads, per]), "split"),
            numpy_helper.from_array(np.array([1, 1, width]), "join"),
            numpy_helper.from_array(np.ones(width, np.float32), "scale"),
        ]

    def node(self, op: str, given: list[str], name: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, given, [name], name=f"{op}_{name}", **attributes))
        return name

    def product(self, given: str, weight: str, shape: tuple[int, int], name: str) -> str:
        array = (self.rng.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32)
        self.weights.append(numpy_helper.from_array(array, weight))
        return self.node("MatMul", [given, weight], name)

    def cached(self, kind: str, i: int, row: str) -> str:
        """The keys or values of all tokens: those of the cache and this token's."""
        old, new = f"{kind}cache{i}", f"{kind}cache{i}_next"
        self.state[old] = new
        if self.cache == "fixed":
            self.node("ScatterND", [old, "at", row], new)
        else:
            self.node("Concat", [old, row], new, axis=1 if self.cache == "tokens" else 2)
        shape = self.shapes[self.cache]
        self.inputs.append(helper.make_tensor_value_info(old, TensorProto.FLOAT, shape("past")))
        self.outputs.append(helper.make_tensor_value_info(new, TensorProto.FLOAT, shape("past + 1")))
        return new

    def attention(self, n: str, i: int) -> str:
        """What each head mixes from the values, before the heads are joined."""
        rows, width, in_front = {}, self.width, self.cache == "tokens"
        for kind in "qkv":
            flat = self.product(n, f"w{kind}{i}", (width, width), f"{kind}{i}")
            rows[kind] = self.node("Reshape", [flat, "split"], f"{kind}h{i}")
            if kind == "q" or not in_front:
                rows[kind] = self.node("Transpose", [rows[kind]], f"{kind}t{i}", perm=[0, 2, 1, 3])
        keys, values = (self.cached(kind, i, rows[kind]) for kind in "kv")
        keys = self.node("Transpose", [keys], f"kk{i}", perm=[0, 2, 3, 1] if in_front else [0, 1, 3, 2])
        scores = self.node("MatMul", [rows["q"], keys], f"s{i}")
        if self.cache == "fixed":
            scores = self.node("Add", [scores, "mask"], f"m{i}")
        elif in_front:
            values = self.node("Transpose", [values], f"vv{i}", perm=[0, 2, 1, 3])
        return self.node("MatMul", [self.node("Softmax", [scores], f"p{i}"), values], f"o{i}")

    def layer(self, x: str, i: int) -> str:
        width = self.width
        n = self.node("LayerNormalization", [x, "scale"], f"n{i}", axis=-1)
        turned = self.node("Transpose", [self.attention(n, i)], f"ot{i}", perm=[0, 2, 1, 3])
        joined = self.node("Reshape", [turned, "join"], f"oj{i}")
        x = self.node("Add", [x, self.product(joined, f"wo{i}", (width, width), f"a{i}")], f"x{i}")
        wide = self.node("Gelu", [self.product(x, f"up{i}", (width, 4 * width), f"u{i}")], f"g{i}")
        return self.node("Add", [x, self.product(wide, f"down{i}", (4 * width, width), f"d{i}")], f"z{i}")

    def made(self, x: str) -> onnx.ModelProto:
        self.outputs.append(helper.make_tensor_value_info(x, TensorProto.FLOAT, [1, 1, self.width]))
        graph = helper.make_graph(self.nodes, "decoder_step", self.inputs, self.outputs, self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def decoder_step(cache: str = "fixed", width: int = 512, layers: int = 6, heads: int = 8, length: int = 512) -> Stream:
    """One token of a GPT-2-like decoder: keys and values of all tokens before lie in caches.

    These have a ``fixed`` length, or grow, with ``tokens`` or with ``heads`` in front of the other.
    """
    decoder, x = _Decoder(cache, width, heads, length), "x"
    for i in range(layers):
        x = decoder.layer(x, i)
    steps: list[dict[str, np.ndarray]] = []
    for token in range(length):  # all of the cache: what was never written takes no memory
        steps.append({"x": decoder.rng.standard_normal((1, 1, width)).astype(np.float32)})
        if cache != "fixed":
            continue
        at = np.array([[[0, head, token]] for head in range(heads)]).reshape(1, heads, 1, 3)
        mask = np.where(np.arange(length) <= token, 0, -1e9).astype(np.float32).reshape(1, 1, 1, length)
        steps[-1].update({"at": at, "mask": mask})
    return decoder.made(x), decoder.state, steps


STREAM: dict[str, Callable[[], Stream]] = {
    "lstm": lstm_step,
    "decoder": decoder_step,
    "grows, tokens in front": partial(decoder_step, "tokens"),
    "grows, heads in front": partial(decoder_step, "heads"),
}
"""By name."""
