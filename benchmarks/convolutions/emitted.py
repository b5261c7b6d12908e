"""What memonger itself emits for the gradients of one convolution."""

import onnx
import onnx_ir as ir

import memonger.autodiff.rules  # noqa: F401  (registers the rules that `backward` looks up)
from benchmarks.convolutions.binding import expose
from benchmarks.convolutions.layers import Layer
from memonger.autodiff.backward import backward
from memonger.devices import CPU, Device
from memonger.ir.emitter import Emitter
from memonger.ir.model import Model
from memonger.lowering import cuda


def emitted(layer: Layer, quantity: str, device: Device = CPU) -> tuple[onnx.ModelProto, str]:
    """The model of a layer's ``dx`` or ``dw`` for a device, every value an output, and the name of the gradient."""
    shapes = layer.shapes
    x, w, y = (
        ir.Value(name=name, shape=ir.Shape(list(dims)), type=ir.TensorType(ir.DataType.FLOAT))
        for name, dims in zip("xwy", shapes.values(), strict=True)
    )
    settings = {"strides": [layer.stride] * 2, "pads": [layer.pad] * 4, "group": layer.groups}
    node = ir.node("Conv", [x, w], settings, outputs=[y], name="conv")
    model = ir.Model(ir.Graph([x, w], [y], nodes=[node], opset_imports={"": 20}, name="emitted"), ir_version=10)
    op = Emitter(model)
    dy = op.input("dy", ir.DataType.FLOAT, shapes["dy"])
    wrt = {"dx": x, "dw": w}[quantity]
    gradient = backward(op, [node], [wrt], {y: dy})[wrt]
    model.graph.outputs[:] = [gradient]
    name = str(gradient.name)
    model.graph.remove(node, safe=True)
    model.graph.extend(op.nodes)
    model.graph.inputs[:] = [value for value in (dy, x, w) if value.uses()]
    if device.kind == "cuda":
        cuda.write_out_for_cuda(Model(model, "emitted"))
    proto = ir.to_proto(model)
    expose(proto)
    return proto, name
