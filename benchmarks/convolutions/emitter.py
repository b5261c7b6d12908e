"""Writes the model of one formulation: nodes by calls, every value an output."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from benchmarks.convolutions.binding import Array, expose

Formulation = Callable[..., str]  # (emitter, *input names) -> the name of the output


class Emitter:
    """Writes nodes: ``op("Conv", x, w, pads=...)`` returns the name of the output."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def __call__(self, kind: str, *inputs: str, **attributes: object) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], f"n{len(self.nodes)}", **attributes))
        return name

    def constant(self, value: object, dtype: object = np.int64) -> str:
        """An initializer: shapes, axes, scalars and matrices of zeros and ones; never weights."""
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def floats(self, value: object) -> str:
        """A float32 constant."""
        return self.constant(value, np.float32)

    def reshape(self, x: str, *shape: int) -> str:
        """A view."""
        return self("Reshape", x, self.constant(shape))

    def transpose(self, x: str, *perm: int) -> str:
        """A transposed copy."""
        return self("Transpose", x, perm=perm)

    def sum(self, x: str, *axes: int, keep: bool = False) -> str:
        """ReduceSum."""
        return self("ReduceSum", x, self.constant(axes), keepdims=int(keep))

    def scale(self, x: str, factor: float) -> str:
        """Multiply by a number."""
        return self("Mul", x, self.floats(factor))

    def pad(self, x: str, *pads: int) -> str:
        """Zeros around x: the starts of all axes, then the ends."""
        return self("Pad", x, self.constant(pads))

    def slice(self, x: str, axes: Sequence[int], starts: Sequence[int], stops: Sequence[int], step: int = 1) -> str:
        """Slice with one step for all axes."""
        return self("Slice", x, *map(self.constant, (starts, stops, axes, [step] * len(axes))))


def model_of(formulation: Formulation, inputs: Mapping[str, Array]) -> tuple[onnx.ModelProto, str]:
    """The model of one formulation, every value an output, and the name of the output asked for."""
    op = Emitter()
    name = formulation(op, *inputs)
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in inputs.items()
    ]
    wanted = [helper.make_empty_tensor_value_info(name)]
    graph = helper.make_graph(op.nodes, "formulation", infos, wanted, op.constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    expose(model)
    return model, name
