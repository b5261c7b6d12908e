"""The operators of a randomly wired cell as TensorFlow Lite's converter orders them, for `benchmarks.planning.orders`.

Runs under a Python that has TensorFlow, in a process of its own. It reads JSON from its standard input: ``{"wires":
[[0, 1], ...], "nodes": 32, "channels": 78, "size": 56}``. It prints the bytes of each tensor, the tensors that are fed,
and what each operator reads and writes, in their order in the file.
"""

import json
import sys
from typing import Any

import keras
import tensorflow as tf
from tensorflow.lite.python import schema_py_generated as schema

BYTES = {schema.TensorType.FLOAT32: 4, schema.TensorType.INT32: 4, schema.TensorType.INT64: 8}


def network(asked: dict[str, Any]) -> Any:
    """The Keras model: as a stage of `benchmarks.planning.orders.wired`, with the channels last."""
    layers, channels, side = keras.layers, asked["channels"], 2 * asked["size"]
    image, outs = keras.Input((side, side, channels), 1), list[Any]()
    for node in range(asked["nodes"]):
        early = [outs[min(wire)] for wire in asked["wires"] if max(wire) == node]
        read = layers.Add()(early) if len(early) > 1 else (early or [image])[0]
        read = layers.DepthwiseConv2D(3, 1 if early else 2, "same", use_bias=False)(layers.ReLU()(read))
        outs.append(layers.BatchNormalization()(layers.Conv2D(channels, 1, use_bias=False)(read)))
    read_again = {min(wire) for wire in asked["wires"]}
    ends = [out for node, out in enumerate(outs) if node not in read_again]
    return keras.Model(image, layers.Average()(ends) if len(ends) > 1 else ends[0])


def operators(content: bytes) -> dict[str, Any]:
    """What a TensorFlow Lite file says of its only graph."""
    graph = schema.Model.GetRootAsModel(content, 0).Subgraphs(0)
    steps = [graph.Operators(index) for index in range(graph.OperatorsLength())]
    tensors = [graph.Tensors(index) for index in range(graph.TensorsLength())]
    return {
        "bytes": [BYTES[tensor.Type()] * int(tensor.ShapeAsNumpy().prod()) for tensor in tensors],
        "inputs": graph.InputsAsNumpy().tolist(),
        "reads": [step.InputsAsNumpy().tolist() for step in steps],
        "writes": [step.OutputsAsNumpy().tolist() for step in steps],
    }


def main() -> None:
    """Read, convert, print."""
    converter = tf.lite.TFLiteConverter.from_keras_model(network(json.load(sys.stdin)))
    print("\n" + json.dumps(operators(converter.convert())))


if __name__ == "__main__":
    main()
