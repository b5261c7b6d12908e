"""The operators of a randomly wired network as TensorFlow Lite's converter orders them, for `benchmarks.orders`.

Runs under a Python that has TensorFlow, in a process of its own. It reads JSON, ``{"stages": [[[0, 1], ...], ...],
"nodes": [32, ...], "channels": 78, "size": 56}``, from its standard input: the wires of each stage. It prints the bytes
of each tensor, the tensors that are fed, and what each operator reads and writes, in their order in the file.
"""

import json
import sys
from typing import Any

import keras
import tensorflow as tf
from tensorflow.lite.python import schema_py_generated as schema

BYTES = {schema.TensorType.FLOAT32: 4, schema.TensorType.INT32: 4, schema.TensorType.INT64: 8}


def network(asked: dict[str, Any]) -> Any:
    """The Keras model: as `benchmarks.orders.wired`, with the channels last."""
    layers, value = keras.layers, keras.Input((2 * asked["size"], 2 * asked["size"], asked["channels"]), 1)
    image = value
    for stage, (wires, count) in enumerate(zip(asked["stages"], asked["nodes"], strict=True)):
        wide, outs = asked["channels"] << stage, list[Any]()
        for node in range(count):
            early = [outs[a if b == node else b] for a, b in wires if max(a, b) == node]
            read = layers.Add()(early) if len(early) > 1 else (early or [value])[0]
            read = layers.DepthwiseConv2D(3, 1 if early else 2, "same", use_bias=False)(layers.ReLU()(read))
            outs.append(layers.BatchNormalization()(layers.Conv2D(wide, 1, use_bias=False)(read)))
        inner = {min(a, b) for a, b in wires}
        ends = [out for node, out in enumerate(outs) if node not in inner]
        value = layers.Average()(ends) if len(ends) > 1 else ends[0]
    return keras.Model(image, value)


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
