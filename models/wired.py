"""Randomly wired networks (Xie et al. 2019, "Exploring Randomly Wired Neural Networks for Image Recognition").

Stages of 32 nodes, 78 channels at first; a node is a Sum of what it reads, Relu, a separable 3×3 convolution and a
batch normalization.
"""

from collections.abc import Sequence

import networkx as nx
import numpy as np
import onnx
from onnx import TensorProto, helper

WIRED = {
    "Watts-Strogatz": lambda count, seed: nx.connected_watts_strogatz_graph(count, 4, 0.75, seed=seed),
    "Erdős-Rényi": lambda count, seed: nx.gnp_random_graph(count, 0.2, seed=seed),
    "Barabási-Albert": lambda count, seed: nx.barabasi_albert_graph(count, 5, seed=seed),
}
"""Generators with the settings that are best in the paper."""

CELL, CHANNELS, SIZE = 32, 78, 56
"""Nodes of a stage; of its first one channels, and the sides of its maps."""


def wired(kind: str, stages: Sequence[int], seed: int, channels: int = CHANNELS, size: int = SIZE) -> onnx.ModelProto:
    """A randomly wired network: stages of so many nodes, each of half the size of the one before it."""
    steps, weights, value, width = [], list[onnx.TensorProto](), "x", channels
    for stage, count in enumerate(stages):
        wires = WIRED[kind](count, 100 * seed + stage)
        wide, ends = channels << stage, list[str]()
        for node in range(count):
            name = f"s{stage}n{node}"
            early = [f"s{stage}n{other}.out" for other in sorted(wires[node]) if other < node]
            steps += _node(name, early or [value], weights, width if not early else wide, wide, 1 if early else 2)
            if not any(other > node for other in wires[node]):
                ends.append(f"{name}.out")
        value, width = f"s{stage}.mean", wide
        steps.append(helper.make_node("Mean", ends, [value], name=value))
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, channels, 2 * size, 2 * size])]
    outputs = [helper.make_tensor_value_info(value, TensorProto.FLOAT, None)]
    graph = helper.make_graph(steps, "wired", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def _node(
    name: str, sources: Sequence[str], weights: list[onnx.TensorProto], narrow: int, wide: int, stride: int
) -> list[onnx.NodeProto]:
    def weight(part: str, *shape: int) -> str:
        weights.append(onnx.numpy_helper.from_array(np.ones(shape, np.float32), f"{name}.{part}"))
        return f"{name}.{part}"

    depthwise = [f"{name}.relu", weight("depthwise", narrow, 1, 3, 3)]
    pointwise = [f"{name}.conv", weight("pointwise", wide, narrow, 1, 1)]
    statistics = [weight(part, wide) for part in ("scale", "bias", "mean", "variance")]
    make, pads = helper.make_node, [1, 1, 1, 1]
    return [
        make("Sum", sources, [f"{name}.sum"], name=f"{name}.sum"),
        make("Relu", [f"{name}.sum"], [f"{name}.relu"], name=f"{name}.relu"),
        make("Conv", depthwise, [f"{name}.conv"], name=f"{name}.conv", group=narrow, pads=pads, strides=[stride] * 2),
        make("Conv", pointwise, [f"{name}.wide"], name=f"{name}.wide"),
        make("BatchNormalization", [f"{name}.wide", *statistics], [f"{name}.out"], name=f"{name}.out"),
    ]
