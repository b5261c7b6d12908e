"""A small model run on a CUDA device: what every session takes there, libraries and context, is there afterwards."""

import numpy as np
import onnx_ir as ir

from memonger.devices import Device
from memonger.runtime import ort


def model() -> ir.Model:
    """A convolution and a product: what makes onnxruntime load cuDNN and cuBLAS."""
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
    return ir.Model(graph, ir_version=10)


def run(device: Device) -> np.ndarray:
    """The model's output on a device, for an input of ones.

    Raises:
        RuntimeUnavailableError: the device isn't there.
    """
    session = ort.make_session(model(), device, ort.Options())
    (output,) = session.run(["y"], {"x": np.ones((1, 4, 8, 8), np.float32)})
    return np.asarray(output)
