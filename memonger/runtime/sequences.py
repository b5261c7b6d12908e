"""Sequences and optionals, which onnxruntime's Python has no constructor for: small models make and read them.

Imported where a model has them: this takes onnx.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import onnx_ir as ir

from memonger.devices import CPU
from memonger.ir.element_types import ElementType
from memonger.runtime import ort
from memonger.runtime.onnxruntime import onnxruntime
from memonger.runtime.prepared import Kind
from memonger.runtime.weights import session_of

_KEPT = 16
"""Sessions of such models that are kept: each run takes one for each sequence among inputs and outputs."""

Layers = tuple[str, ...]
"""What a type is around its tensors, from outside to inside: ``sequence``, ``optional``."""

Form = int | tuple["Form", ...]
"""What a value is made of: the place of a tensor among all, or the forms of a sequence's elements."""


def constant(value: Any, kind: Kind) -> Any:
    """An OrtValue of an array or a list of arrays. Libraries' own errors get through."""
    layers, element = _taken_apart(kind)
    arrays = list[np.ndarray]()
    form = _form(value, layers, arrays)
    return _run(_making(layers, element, form), [_tensor(array) for array in arrays]).get_outputs()[0]


def read(value: Any, kind: Kind) -> Any:
    """What an OrtValue holds that is no tensor."""
    return _run(_reading(*_taken_apart(kind)), [value]).copy_outputs_to_cpu()[0]


def _taken_apart(kind: Kind) -> tuple[Layers, int]:
    """What is around the tensors of a type, and their elements' type."""
    layers = list[str]()
    while isinstance(kind, ir.SequenceType | ir.OptionalType):
        layers.append("sequence" if isinstance(kind, ir.SequenceType) else "optional")
        kind = kind.elem_type
    return tuple(layers), int(kind if isinstance(kind, ElementType) else kind.dtype)


def _type_of(layers: Layers, element: int) -> ir.TypeProtocol:
    kind: ir.TypeProtocol = ir.TensorType(ir.DataType(element))
    for layer in reversed(layers):
        kind = ir.SequenceType(kind) if layer == "sequence" else ir.OptionalType(kind)
    return kind


def _form(value: Any, layers: Layers, arrays: list[np.ndarray]) -> Form:
    """What a value is made of; its tensors are appended to ``arrays``."""
    inside = tuple(layer for layer in layers if layer != "optional")
    if inside:
        return tuple(_form(item, inside[1:], arrays) for item in value)
    arrays.append(np.asarray(value))
    return len(arrays) - 1


def _tensor(array: np.ndarray) -> Any:
    """An OrtValue over an array's memory, or over that of a copy that lies in one piece."""
    kind = ElementType.from_numpy(array.dtype)
    if kind == ElementType.STRING:
        return ort.texts(array)
    row = array if array.flags.c_contiguous else array.copy(order="C")
    return onnxruntime().OrtValue.ortvalue_from_numpy_with_onnx_type(row, int(kind))


def _run(session: Any, given: Sequence[Any]) -> Any:
    """The binding of a run of a small model, for its result."""
    binding = session.io_binding()
    for number, value in enumerate(given):
        binding.bind_ortvalue_input(f"given{number}", value)
    binding.bind_output("result")
    session.run_with_iobinding(binding)
    return binding


@lru_cache(_KEPT)
def _making(layers: Layers, element: int, form: Form) -> Any:
    """A session that makes a value of tensors."""
    graph = _graph()
    return _session(graph, _made(graph, layers, element, form), _type_of(layers, element))


@lru_cache(_KEPT)
def _reading(layers: Layers, element: int) -> Any:
    """A session that gives what it is given."""
    graph, kind = _graph(), _type_of(layers, element)
    return _session(graph, _append(graph, ir.Node("", "Identity", [_input(graph, kind)])), kind)


def _graph() -> ir.Graph:
    return ir.Graph([], [], nodes=[], name="sequences", opset_imports={"": 21})


def _input(graph: ir.Graph, kind: ir.TypeProtocol) -> ir.Value:
    graph.inputs.append(ir.Value(name=f"given{len(graph.inputs)}", type=kind))
    return graph.inputs[-1]


def _session(graph: ir.Graph, result: ir.Value, kind: ir.TypeProtocol) -> Any:
    """Without an arena, which would keep what values took for as long as the session is there."""
    result.name, result.type = "result", kind
    graph.outputs.append(result)
    return session_of(ir.Model(graph, ir_version=10), CPU, ort.SessionSettings(threads=1, arena=False))


def _made(graph: ir.Graph, layers: Layers, element: int, form: Form) -> ir.Value:
    if layers and layers[0] == "optional":
        return _append(graph, ir.Node("", "Optional", [_made(graph, layers[1:], element, form)]))
    if isinstance(form, tuple):
        items = [_made(graph, layers[1:], element, each) for each in form]
        if not items:
            return _append(graph, ir.Node("", "SequenceEmpty", [], [ir.AttrInt64("dtype", element)]))
        return _append(graph, ir.Node("", "SequenceConstruct", items))
    given = _input(graph, ir.TensorType(ir.DataType(element)))
    return _append(graph, ir.Node("", "Identity", [given]))  # a copy of its own


def _append(graph: ir.Graph, node: ir.Node) -> ir.Value:
    graph.append(node)
    node.name = f"node{graph.num_nodes()}"
    node.outputs[0].name = f"value{graph.num_nodes()}"
    return node.outputs[0]
