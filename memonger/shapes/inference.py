"""Static shapes by ONNX's own inference, with shape arithmetic folded."""

import math
import re
from collections.abc import Callable
from functools import partial

import onnx
import onnx_ir as ir

from memonger.errors import LoadError
from memonger.ir import checks, onnx_process
from memonger.ir.checks import PLAIN, root_cause
from memonger.ir.model import Model
from memonger.ir.tensors import in_memory
from memonger.ir.values import INFERENCE_ERRORS, SMALL, all_values, dense, graphs, static_shape, tensor_shape
from memonger.shapes.folding import fold_shape_arithmetic, run_time_sized
from memonger.shapes.runtime_types import complete_types

LONG = 1 << 20
"""Inference goes element by element through the content of vectors: longer ones take more memory than they should."""


def forget_symbolic(model: ir.Model) -> None:
    """Drop every shape with a symbolic dimension: inference fills it in anew from the inputs' sizes."""
    for graph in graphs(model):
        for node in graph:
            for value in node.outputs:
                if value.shape is not None and static_shape(value) is None:
                    value.shape = None


def infer_shapes(model: Model) -> bool:
    """A pass: values have every type and shape that ONNX's own inference can tell; shape arithmetic is folded.

    What a file declares of values in between is often stale: the shapes of the batch it was exported with. It counts
    only for sizes that inference can't tell from the inputs, and in bodies of ``If``, ``Loop`` and ``Scan`` not at all.

    Raises:
        LoadError: shapes or types that contradict each other, with the node that shows it, or that can't be.
    """
    ranks = {value: len(value.shape) for value in model.graph.outputs if value.shape is not None}
    nodes, was_unknown = len(model.graph), _has_unknown(model.graph)
    forget_symbolic(model.ir)
    declared = _forget_declared(model.graph)
    for body in graphs(model.ir):
        _forget_declared(body)
    complaint = _infer_and_fold(model)
    if _has_unknown(model.graph) and _restore(model.ir, declared):
        complaint = _infer_and_fold(model)
    if complaint is not None and _has_unknown(model.graph):
        raise LoadError(_contradiction(model.name, complaint)) from complaint
    for value in model.graph.outputs:  # onnx's checker wants their ranks
        if value.shape is None and value in ranks:
            value.shape = ir.Shape([None] * ranks[value])
    checks.check_sizes(model)
    is_other = any(value.shape is None or value.shape.dims != shape.dims for value, shape in declared.items())
    return was_unknown or is_other or len(model.graph) != nodes


def _infer_and_fold(model: Model) -> Exception | None:
    complete_types(model.graph)
    complaint = infer_once(model)
    while complete_types(model.graph):
        complaint = infer_once(model)
    while fold_shape_arithmetic(model.ir) and _has_unknown(model.graph):
        complaint = infer_once(model)
    return complaint


def _forget_declared(graph: ir.Graph) -> dict[ir.Value, ir.Shape]:
    """Shapes that the file declares. A 0 says nothing: some exporters write it where they didn't know the size."""
    declared = {}
    for value in (v for node in graph for v in node.outputs):
        if value.shape is not None and dense(value):
            shape, value.shape = value.shape, None
            if 0 not in shape.dims:
                declared[value] = shape
    return declared


def _restore(model: ir.Model, declared: dict[ir.Value, ir.Shape]) -> bool:
    """Give declared sizes back to values that are still without one, those that only the run can tell left out.

    Where a size depends on a default that callers may override, the declaration means that none of them does.
    """
    dynamic = run_time_sized(model, overridden=False)
    fitting = [v for v, shape in declared.items() if static_shape(v) is None and _fits(shape, v.shape)]
    restored = [value for value in fitting if value not in dynamic]
    for value in restored:
        value.shape = declared[value]
    return bool(restored)


def _fits(declared: ir.Shape, inferred: ir.Shape | None) -> bool:
    if inferred is None:
        return True
    pairs = zip(declared, inferred, strict=False)
    return len(declared) == len(inferred) and all(not isinstance(known, int) or known == dim for dim, known in pairs)


def _has_unknown(graph: ir.Graph) -> bool:
    return any(dense(v) and static_shape(v) is None for v in all_values(graph)) or any(
        v.type is None for v in all_values(graph) if v.name
    )


def infer_once(model: Model) -> Exception | None:
    """ONNX's own inference alone: types and shapes are filled in, nodes stay as they are.

    Returns: what its strict mode says of anything but the model's nodes, if it does: it can't read the bodies of some
        old operators that ONNX defines as functions. That matters only where a size stays unknown.

    Raises:
        LoadError: shapes or types that contradict each other.
    """
    try:
        skeleton = _skeleton(model.ir)
    except SERIALIZING_ERRORS as error:
        raise LoadError(f"{model.name} is not a valid ONNX model: {root_cause(error)}.") from error
    onnx_infer: Callable[..., onnx.ModelProto] = onnx.shape_inference.infer_shapes
    if model.foreign and not _is_plain(model.ir):  # it could end this process
        onnx_infer = partial(onnx_process.call, "infer_shapes")
    # At most how many elements a vector has whose content inference follows: joined vectors make longer ones
    lengths = {v: 1 if v.const_value is None else v.const_value.size for v in model.graph.initializers.values()}
    lengths = {value: size for value, size in lengths.items() if size <= SMALL}
    longest = 0
    for node in model.graph:
        inputs = [lengths.get(value, 1) for value in node.inputs if value is not None]
        most = (sum(inputs) if node.op_type == "Concat" else max(inputs)) if inputs else 1
        longest = max(longest, most)
        lengths.update(dict.fromkeys(node.outputs, most))
    follows = longest <= LONG
    complaint: Exception | None = None
    try:
        inferred = onnx_infer(skeleton, strict_mode=True, data_prop=follows)
    except INFERENCE_ERRORS:
        complaint = _complaint(skeleton, onnx_infer)
        if complaint is not None and _COMPLAINT.search(str(complaint)):
            raise LoadError(_contradiction(model.name, complaint)) from complaint
        try:
            inferred = onnx_infer(skeleton, data_prop=follows)
        except INFERENCE_ERRORS as error:
            raise LoadError(_contradiction(model.name, error)) from error
    info_of = {info.name: info for info in (*inferred.graph.value_info, *inferred.graph.output)}
    for value in (value for node in model.graph for value in node.outputs):
        info = info_of.get(value.name or "")
        fresh = None if info is None else ir.serde.deserialize_value_info_proto(info, None)
        if fresh is not None and fresh.type is not None:
            value.type = fresh.type
        if fresh is not None and fresh.shape is not None and static_shape(value) is None:
            value.shape = fresh.shape
    return complaint


def _is_plain(model: ir.Model) -> bool:
    """Whether inference can do no harm: none but well-known operators, and no vectors that are followed for long."""
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        dims = static_shape(value) or ()
        followed = value.dtype is None or (value.dtype.is_integer() and math.prod(dims) > SMALL)
        if followed or max(dims, default=0) > LONG:
            return False
    return all(node.domain == "" and node.op_type in PLAIN for node in model.graph)


def _complaint(skeleton: onnx.ModelProto, onnx_infer: Callable[..., onnx.ModelProto]) -> Exception | None:
    """What inference says of shapes alone: where it follows values it complains of models that are right."""
    try:
        onnx_infer(skeleton, strict_mode=True)
    except INFERENCE_ERRORS as error:
        return error
    return None


SERIALIZING_ERRORS = (ir.serde.SerdeError, ValueError, TypeError)

# How onnx writes a complaint about a node of the model; one about a function's body has another list in place of text.
_HEAD = "[ShapeInferenceError] Inference error(s): "

_COMPLAINT = re.compile(rf"^(?:{re.escape(_HEAD)})?\(op_type:[^)]*\): (?!\[\w+\] Inference error)", re.MULTILINE)


def _contradiction(name: str, complaint: Exception) -> str:
    """The first of onnx's complaints, on one line."""
    if isinstance(complaint, onnx_process.DiedError):
        return f"{name} can't be read: {complaint}, as shapes below zero or an input left out would make it."
    lines = str(complaint).strip().removeprefix(_HEAD).splitlines()
    return f"{name}: its shapes or types contradict each other: {lines[0].rstrip('.') if lines else complaint!r}."


def _skeleton(model: ir.Model) -> onnx.ModelProto:
    """The model as a proto, with its big initializers as inputs: their data is never touched."""
    graph = model.graph
    big = [v for v in graph.initializers.values() if v.const_value is None or v.const_value.size > SMALL]
    inputs = len(graph.inputs)
    tensors = [value.const_value for value in big]
    order = list(graph.initializers.values())
    outside = {value: value.const_value for value in order if isinstance(value.const_value, ir.ExternalTensor)}
    try:
        for value in outside.keys() - set(big):
            value.const_value = in_memory(outside[value])  # inference reads no files
        for value, tensor in zip(big, tensors, strict=True):
            if tensor is not None:
                value.shape, value.dtype = tensor_shape(tensor), tensor.dtype
            del graph.initializers[str(value.name)]
            if not value.is_graph_input():
                graph.inputs.append(value)
        proto = ir.serde.serialize_model(model)
        for node in proto.graph.node:
            if node.op_type == "SimplifiedLayerNormalization" and not node.domain:
                node.op_type = "LayerNormalization"  # onnx has no other; shapes are as this one's
        return proto
    finally:
        while len(graph.inputs) > inputs:
            graph.inputs.pop()  # deleting a slice would leave the values marked as inputs
        graph.initializers.clear()
        for value, tensor in outside.items():
            value.const_value = tensor
        for value in order:
            graph.initializers[str(value.name)] = value
