"""A decoder as onnxruntime-genai's model builder writes it: products of int4 or float32, and attention that keeps its
keys."""

from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a decoder: layers, heads of queries, of keys and values, a head's width, the model's, words, and tokens; and
    whether weights of products are int4, or float32."""

    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head: int = 16
    width: int = 64
    hidden: int = 128
    words: int = 96
    longest: int = 128
    is_int4: bool = True

    @property
    def state(self) -> dict[str, str]:
        """Its caches: what each becomes for the next run."""
        names = [f"{layer}.{which}" for layer in range(self.layers) for which in ("key", "value")]
        return {f"past_key_values.{name}": f"present.{name}" for name in names}


class _Builder:
    """Nodes and initializers under the builder's names."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.nodes: list[onnx.NodeProto] = []
        self.held: list[onnx.TensorProto] = []
        self.rng = np.random.default_rng(7)

    def hold(self, name: str, array: np.ndarray) -> str:
        self.held.append(numpy_helper.from_array(array, name))
        return name

    def node(
        self, kind: str, inputs: list[str], outputs: list[str], path: str, domain: str = "", **more: object
    ) -> str:
        self.nodes.append(helper.make_node(kind, inputs, outputs, name=f"{path}/{kind}", domain=domain, **more))
        return outputs[0]

    def product(self, path: str, source: str, rows: int, columns: int) -> str:
        """A product: of int4 in blocks of 32, or of float32."""
        if not self.sizes.is_int4:
            scale = np.float32(rows**-0.5)
            weight = self.hold(f"{path}.weight", self.rng.standard_normal((rows, columns), np.float32) * scale)
            return self.node("MatMul", [source, weight], [f"{path}/output_0"], path)
        weight = self.hold(f"{path}.qweight", self.rng.integers(0, 255, (columns, rows // 32, 16), np.uint8))
        scales = self.hold(f"{path}.scales", self.rng.uniform(0.01, 0.03, columns * rows // 32).astype(np.float32))
        return self.node(
            "MatMulNBits", [source, weight, scales], [f"{path}/output_0"], path, "com.microsoft",
            K=rows, N=columns, bits=4, block_size=32, accuracy_level=4,
        )  # fmt: skip

    def norm(self, path: str, source: str, skip: str | None) -> tuple[str, str]:
        """A norm, of a sum where something is skipped to; the sum comes with it."""
        weight = self.hold(f"{path}.weight", self.rng.uniform(0.5, 1.5, self.sizes.width).astype(np.float32))
        out, total = f"{path}/output_0", f"{path}/output_3"
        if skip is None:
            kind, inputs, outputs, domain = "SimplifiedLayerNormalization", [source, weight], [out], ""
            total = source
        else:
            kind, inputs, domain = "SkipSimplifiedLayerNormalization", [source, skip, weight], "com.microsoft"
            outputs = [out, "", "", total]
        more: dict[str, object] = {"epsilon": 1e-6} | ({"axis": -1, "stash_type": 1} if skip is None else {})
        return self.node(kind, inputs, outputs, path, domain, **more), total


def decoder(sizes: Sizes = Sizes()) -> onnx.ModelProto:
    """The model; its dimensions are batch_size, sequence_length, past_sequence_length and total_sequence_length."""
    b, width = _Builder(sizes), sizes.width
    queries, keys = sizes.heads * sizes.head, sizes.kv_heads * sizes.head
    mask = "/model/attn_mask_reformat/attn_mask_subgraph"
    b.hold("one", np.array([1], np.int64))
    b.hold("axis", np.array(1, np.int64))
    lengths = b.node("ReduceSum", ["attention_mask", "one"], [f"{mask}/sum"], mask, keepdims=0)
    lengths = b.node("Sub", [lengths, "one"], [f"{mask}/sub"], mask)
    lengths = b.node("Cast", [lengths], [f"{mask}/seqlens_k"], f"{mask}/a", to=TensorProto.INT32)
    total = b.node("Shape", ["attention_mask"], [f"{mask}/shape"], mask)
    total = b.node("Gather", [total, "axis"], [f"{mask}/gather"], mask, axis=0)
    total = b.node("Cast", [total], [f"{mask}/total_seq_len"], f"{mask}/b", to=TensorProto.INT32)
    angles = np.outer(np.arange(sizes.longest), 10000.0 ** (-np.arange(sizes.head // 2) / (sizes.head // 2))).astype(
        np.float32
    )
    b.hold("cos_cache", np.cos(angles))
    b.hold("sin_cache", np.sin(angles))
    b.hold("model.embed_tokens.weight", b.rng.standard_normal((sizes.words, width), np.float32))
    states = b.node("Gather", ["model.embed_tokens.weight", "input_ids"], ["embedded"], "/model/embed_tokens")
    skip: str | None = None
    inputs, outputs = [], []
    for layer in range(sizes.layers):
        path = f"/model/layers.{layer}"
        normed, states = b.norm(f"{path}/input_layernorm", states, skip)
        q = b.product(f"{path}/attn/q_proj", normed, width, queries)
        k = b.product(f"{path}/attn/k_proj", normed, width, keys)
        v = b.product(f"{path}/attn/v_proj", normed, width, keys)
        past = [f"past_key_values.{layer}.{which}" for which in ("key", "value")]
        present = [f"present.{layer}.{which}" for which in ("key", "value")]
        attended = b.node(
            "GroupQueryAttention", [q, k, v, *past, lengths, total, "cos_cache", "sin_cache"],
            [f"{path}/attn/output_0", *present], f"{path}/attn", "com.microsoft", num_heads=sizes.heads,
            kv_num_heads=sizes.kv_heads, do_rotary=1, rotary_interleaved=0, scale=sizes.head**-0.5,
        )  # fmt: skip
        attended = b.product(f"{path}/attn/o_proj", attended, queries, width)
        normed, states = b.norm(f"{path}/post_attention_layernorm", states, attended)
        gate, up = (b.product(f"{path}/mlp/{which}", normed, width, sizes.hidden) for which in ("gate_proj", "up_proj"))
        act = b.node("Sigmoid", [gate], [f"{path}/mlp/sigmoid"], f"{path}/mlp")
        act = b.node("Mul", [gate, act], [f"{path}/mlp/silu"], f"{path}/mlp/act")
        act = b.node("Mul", [act, up], [f"{path}/mlp/mul"], f"{path}/mlp")
        skip = b.product(f"{path}/mlp/down_proj", act, sizes.hidden, width)
        for names, length, values in ((past, "past", inputs), (present, "total", outputs)):
            shape = ["batch_size", sizes.kv_heads, f"{length}_sequence_length", sizes.head]
            values += [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in names]
    normed, _ = b.norm("/model/norm", states, skip)
    logits = b.product("/lm_head", normed, width, sizes.words)
    b.nodes[-1].output[0] = logits = "logits"
    int64, size = TensorProto.INT64, "batch_size"
    ids = helper.make_tensor_value_info("input_ids", int64, [size, "sequence_length"])
    mask_info = helper.make_tensor_value_info("attention_mask", int64, [size, "total_sequence_length"])
    result = helper.make_tensor_value_info(logits, TensorProto.FLOAT, [size, "sequence_length", sizes.words])
    graph = helper.make_graph(b.nodes, "main_graph", [ids, mask_info, *inputs], [result, *outputs], b.held)
    sets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=sets, ir_version=10)
