"""Sequences and optionals, which onnxruntime's Python has no constructor for: a model of constants makes them.

Imported where a model has them: this takes onnx.
"""

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from memonger.devices import CPU
from memonger.ir.element_types import ElementType
from memonger.runtime import ort
from memonger.runtime.prepared import Kind
from memonger.runtime.weights import session_of


def constant(value: Any, kind: Kind) -> Any:
    """An OrtValue of an array or a list of arrays. Libraries' own errors get through."""
    graph, wanted = ir.Graph([], [], nodes=[], name="constant", opset_imports={"": 21}), _type_of(kind)
    return _computed(graph, _constant_value(graph, value, wanted), wanted).get_outputs()[0]


def read(value: Any, kind: Kind) -> Any:
    """What an OrtValue holds that is no tensor."""
    wanted = _type_of(kind)
    graph = ir.Graph([ir.Value(name="given", type=wanted)], [], nodes=[], name="read", opset_imports={"": 21})
    result = _append(graph, ir.Node("", "Identity", [graph.inputs[0]]))
    return _computed(graph, result, wanted, value).copy_outputs_to_cpu()[0]


def _type_of(kind: Kind) -> ir.TypeProtocol:
    return ir.TensorType(ir.DataType(kind)) if isinstance(kind, ElementType) else kind


def _computed(graph: ir.Graph, result: ir.Value, kind: ir.TypeProtocol, given: Any = None) -> Any:
    """The binding of a run of a small graph, whose input ``given`` is, for one result."""
    result.name, result.type = "result", kind
    graph.outputs.append(result)
    session = session_of(ir.Model(graph, ir_version=10), CPU, ort.SessionSettings(threads=1))
    binding = session.io_binding()
    if given is not None:
        binding.bind_ortvalue_input("given", given)
    binding.bind_output("result")
    session.run_with_iobinding(binding)
    return binding


def _constant_value(graph: ir.Graph, value: Any, kind: ir.TypeProtocol) -> ir.Value:
    if isinstance(kind, ir.OptionalType):
        return _append(graph, ir.Node("", "Optional", [_constant_value(graph, value, kind.elem_type)]))
    if isinstance(kind, ir.SequenceType):
        items = [_constant_value(graph, item, kind.elem_type) for item in value]
        if not items:
            return _append(graph, ir.Node("", "SequenceEmpty", [], [ir.AttrInt64("dtype", int(kind.dtype))]))
        return _append(graph, ir.Node("", "SequenceConstruct", items))
    array = np.asarray(value)
    proto = onnx.numpy_helper.from_array(array.astype(object) if array.dtype.kind in "OUS" else array)
    tensor = ir.from_proto(proto)
    name = f"constant{len(graph.initializers)}"
    constant = ir.Value(name=name, shape=ir.Shape(list(array.shape)), type=ir.TensorType(tensor.dtype))
    constant.const_value = tensor
    tensor.name = name
    graph.register_initializer(constant)
    return _append(graph, ir.Node("", "Identity", [constant]))


def _append(graph: ir.Graph, node: ir.Node) -> ir.Value:
    graph.append(node)
    node.name = f"node{graph.num_nodes()}"
    node.outputs[0].name = f"value{graph.num_nodes()}"
    return node.outputs[0]
