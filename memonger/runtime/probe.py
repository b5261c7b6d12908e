"""A model that has onnxruntime load what a device's kernels need."""

from typing import Any

import numpy as np
import onnx_ir as ir

from memonger.devices import Device
from memonger.runtime import ort
from memonger.runtime.weights import session_of


def session_of_probe(device: Device) -> Any:
    """A convolution and a product: what makes onnxruntime load cuDNN and cuBLAS, which stay, as its context does.

    Returns: an ``onnxruntime.InferenceSession``, whose input is ``x``, float32 of shape [1, 4, 8, 8], and output ``y``.
    """
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1, 4, 8, 8]))
    weight = ir.Value(name="w", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([4, 4, 3, 3]))
    weight.const_value = ir.tensor(np.full((4, 4, 3, 3), 0.1, np.float32), name="w")
    convolved = ir.Node("", "Conv", [x, weight], [ir.AttrInt64s("pads", [1, 1, 1, 1])], name="convolution")
    product = ir.Node("", "MatMul", [convolved.outputs[0], convolved.outputs[0]], name="product")
    convolved.outputs[0].name, product.outputs[0].name = "c", "y"
    product.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph(
        [x], product.outputs, nodes=[convolved, product], initializers=[weight], opset_imports={"": 20}, name="probe"
    )
    return session_of(ir.Model(graph, ir_version=10), device, ort.SessionSettings())
