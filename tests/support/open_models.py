"""Small models with an open batch, for tests of `memonger.fit`."""

import numpy as np
import onnx

from tests.support.planning_models import chain


def block() -> onnx.ModelProto:
    """A residual block of convolutions on images of an open batch."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]>
        block (float[batch,3,8,8] x) => (float[batch,4] y) {
            a = Conv<pads=[1,1,1,1]>(x, "first")
            b = Relu(a)
            c = Conv<pads=[1,1,1,1]>(b, "second")
            d = Tanh(c)
            e = Conv<pads=[1,1,1,1]>(d, "second")
            s = Add(e, b)
            p = GlobalAveragePool(s)
            y = Flatten(p)
        }"""
    )
    for name, shape in (("first", (4, 3, 3, 3)), ("second", (4, 4, 3, 3))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(shape, np.float32), name))
    return model


def layers(count: int = 5) -> onnx.ModelProto:
    """Layers whose gradients need what the forward pass computed, on an open batch."""
    model = chain(count)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    return model
