"""Static shapes: inference, folding of shape arithmetic, and which sizes only the run can tell."""

import itertools
import logging
import math
import re
from collections.abc import Iterator

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from memonger.errors import LoadError

logger = logging.getLogger(__name__)

SMALL = 1024  # elements; larger tensors are never part of shape arithmetic

# The size of the output depends on the values of every input, whatever is done.
ALWAYS_DYNAMIC = {
    "NonZero", "Unique", "Compress", "NonMaxSuppression", "StringSplit", "Loop", "Scan", "If", "SequenceAt",
    "ConcatFromSequence", "SplitToSequence", "OptionalGetElement", "ImageDecoder", "SequenceMap", "Optional",
}  # fmt: skip

# Inputs whose values (not only shapes) decide the size of an output.
SHAPE_INPUTS: dict[str, tuple[int, ...]] = {
    "AffineGrid": (1,), "BlackmanWindow": (0,), "CenterCropPad": (1,), "Col2Im": (1, 2), "ConstantOfShape": (0,),
    "DFT": (1, 2), "Expand": (1,), "HammingWindow": (0,), "HannWindow": (0,), "MaxUnpool": (2,),
    "MelWeightMatrix": (0, 1, 2, 3, 4), "OneHot": (1,), "Pad": (1, 3), "Range": (0, 1, 2), "Reshape": (1,),
    "Resize": (1, 2, 3), "STFT": (1, 3), "Slice": (1, 2, 3, 4), "Split": (1,), "Squeeze": (1,), "Tile": (1,),
    "TopK": (1,), "Unsqueeze": (1,), "Upsample": (1,),
    "ReduceL1": (1,), "ReduceL2": (1,), "ReduceLogSum": (1,), "ReduceLogSumExp": (1,), "ReduceMax": (1,),
    "ReduceMean": (1,), "ReduceMin": (1,), "ReduceProd": (1,), "ReduceSum": (1,), "ReduceSumSquare": (1,),
}  # fmt: skip

RANDOM = {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial"}


def dense(value: ir.Value) -> bool:
    """Whether the value is an ordinary tensor of numbers, whose bytes can be planned."""
    return isinstance(value.type, ir.TensorType) and value.dtype not in (
        None,
        ir.DataType.UNDEFINED,
        ir.DataType.STRING,
    )


def is_floating(value: ir.Value) -> bool:
    """Whether the value is a tensor of floating-point numbers."""
    return value.dtype is not None and value.dtype.is_floating_point()


def static_shape(value: ir.Value) -> tuple[int, ...] | None:
    """The value's shape where every dimension is a number, else None."""
    if value.shape is None:
        return None
    dims = tuple(dim for dim in value.shape if isinstance(dim, int))
    return dims if len(dims) == len(value.shape) else None


def tensor_shape(tensor: ir.TensorProtocol) -> ir.Shape:
    """The shape of a concrete tensor, to put on a value."""
    return ir.Shape([int(dim) for dim in tensor.shape.numpy()])


def nbytes(value: ir.Value) -> int | None:
    """Bytes of a dense tensor with a static shape, else None. Sub-byte types are packed."""
    dims = static_shape(value)
    if dims is None or value.dtype is None or not dense(value):
        return None
    count = 1
    for dim in dims:
        count *= dim
    return (count * value.dtype.bitwidth + 7) // 8


def all_values(graph: ir.Graph) -> Iterator[ir.Value]:
    """Inputs, initializers and node outputs of one graph, subgraphs left out."""
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def forget_symbolic(model: ir.Model) -> None:
    """Drop every shape with a symbolic dimension: inference fills it in anew from the inputs' sizes."""
    for graph in model.graphs():
        for node in graph:
            for value in node.outputs:
                if value.shape is not None and static_shape(value) is None:
                    value.shape = None


def infer(model: ir.Model, name: str) -> None:
    """Infer every type and shape ONNX's own inference can, and fold shape arithmetic.

    What a file declares of values in between is often stale: the shapes of the batch it was exported with. It counts
    only for sizes that inference can't tell from the inputs.

    Raises:
        LoadError: shapes or types that contradict each other, with the node that shows it.
    """
    forget_symbolic(model)
    declared = _forget_declared(model)
    complaint = _infer_and_fold(model, name)
    if _has_unknown(model) and _restore(model, declared):
        complaint = _infer_and_fold(model, name)
    if complaint is not None and _has_unknown(model):
        raise LoadError(_contradiction(name, complaint)) from complaint


def _infer_and_fold(model: ir.Model, name: str) -> Exception | None:
    complaint = infer_once(model, name)
    while fold_shape_arithmetic(model):
        if _has_unknown(model):
            complaint = infer_once(model, name)
    return complaint


def _forget_declared(model: ir.Model) -> dict[ir.Value, ir.Shape]:
    declared = {}
    for value in (v for node in model.graph for v in node.outputs):
        if value.shape is not None and dense(value):
            declared[value], value.shape = value.shape, None
    return declared


def _restore(model: ir.Model, declared: dict[ir.Value, ir.Shape]) -> bool:
    """Give declared sizes back to values that are still without one, those that only the run can tell left out.

    Where they hang on a default that a caller may override, the declaration says that nobody will.
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


def _has_unknown(model: ir.Model) -> bool:
    return any(dense(v) and static_shape(v) is None for v in all_values(model.graph)) or any(
        v.type is None for v in all_values(model.graph) if v.name
    )


def infer_once(model: ir.Model, name: str) -> Exception | None:
    """ONNX's own inference alone: types and shapes are filled in, nodes stay as they are.

    Returns: what its strict mode says of anything but the model's nodes, if it does: it can't read the bodies of some
        old operators that ONNX defines as functions. That matters only where a size stays unknown.

    Raises:
        LoadError: shapes or types that contradict each other.
    """
    skeleton = _skeleton(model)
    complaint: Exception | None = None
    try:
        inferred = onnx.shape_inference.infer_shapes(skeleton, strict_mode=True, data_prop=True)
    except INFERENCE_ERRORS:
        complaint = _complaint(skeleton)
        if complaint is not None and _COMPLAINT.search(str(complaint)):
            raise LoadError(_contradiction(name, complaint)) from complaint
        inferred = onnx.shape_inference.infer_shapes(skeleton, data_prop=True)
    _merge_all(model, inferred)
    return complaint


def _complaint(skeleton: onnx.ModelProto) -> Exception | None:
    """What inference says of shapes alone: where it follows values it complains of models that are right."""
    try:
        onnx.shape_inference.infer_shapes(skeleton, strict_mode=True)
    except INFERENCE_ERRORS as error:
        return error
    return None


INFERENCE_ERRORS = (onnx.shape_inference.InferenceError, RuntimeError, ValueError)

# How onnx writes a complaint about a node of the model; one about a function's body has another list in place of text.
_HEAD = "[ShapeInferenceError] Inference error(s): "
_COMPLAINT = re.compile(rf"^(?:{re.escape(_HEAD)})?\(op_type:[^)]*\): (?!\[\w+\] Inference error)", re.MULTILINE)


def _contradiction(name: str, complaint: Exception) -> str:
    """The first of onnx's complaints, on one line."""
    lines = str(complaint).strip().removeprefix(_HEAD).splitlines()
    return f"{name}: its shapes or types contradict each other: {lines[0].rstrip('.') if lines else complaint!r}."


def _merge_all(model: ir.Model, inferred: onnx.ModelProto) -> None:
    known = {info.name: info for info in (*inferred.graph.value_info, *inferred.graph.output)}
    for node in model.graph:
        for value in node.outputs:
            info = known.get(value.name or "")
            if info is not None:
                _merge(value, info)


def _merge(value: ir.Value, info: onnx.ValueInfoProto) -> None:
    fresh = ir.serde.deserialize_value_info_proto(info, None)
    if fresh.type is not None:
        value.type = fresh.type
    if static_shape(value) is None and fresh.shape is not None:
        value.shape = fresh.shape


def _skeleton(model: ir.Model) -> onnx.ModelProto:
    """The model as a proto, with its big initializers as inputs: their data is never touched."""
    graph = model.graph
    big = [v for v in graph.initializers.values() if v.const_value is None or v.const_value.size > SMALL]
    inputs = len(graph.inputs)
    tensors = [value.const_value for value in big]
    order = list(graph.initializers.values())
    try:
        for value, tensor in zip(big, tensors, strict=True):
            if tensor is not None:
                value.shape, value.dtype = tensor_shape(tensor), tensor.dtype
            del graph.initializers[str(value.name)]
            if not value.is_graph_input():
                graph.inputs.append(value)
        return ir.to_proto(model)
    finally:
        while len(graph.inputs) > inputs:
            graph.inputs.pop()  # deleting a slice would leave the values marked as inputs
        graph.initializers.clear()
        for value in order:
            graph.initializers[str(value.name)] = value


def constants(model: ir.Model) -> dict[ir.Value, np.ndarray]:
    """Small initializers that no caller may override, with their data."""
    return {
        value: value.const_value.numpy()
        for value in model.graph.initializers.values()
        if value.const_value is not None and value.const_value.size <= SMALL and not value.is_graph_input()
    }


def input_independent(model: ir.Model, *, overridden: bool = True) -> set[ir.Value]:
    """Values that are the same whatever the inputs hold: constants, static shapes, and what is computed from them.

    ``overridden``: whether callers may override initializers that are inputs as well.
    """
    known = {v for v in model.graph.initializers.values() if not (overridden and v.is_graph_input())}
    for node in model.graph:
        if node.op_type in RANDOM or subgraphs(node):
            continue
        first = node.inputs[0] if node.op_type in ("Shape", "Size") else None
        if (first is not None and static_shape(first) is not None) or all(v is None or v in known for v in node.inputs):
            known.update(node.outputs)
    return known


def fold_shape_arithmetic(model: ir.Model) -> bool:
    """Hand operators whose sizes hang on values the values that constants and static shapes give, as initializers.

    Only integers and booleans are computed: their arithmetic is exact. Nothing else that reads the same values is
    touched: onnxruntime takes less of a model whose conditions have become constants.

    Returns: whether anything was folded.
    """
    values, known = constants(model), set(model.graph.initializers.values())
    evaluated = []
    for node in model.graph:
        results = _evaluate(model, node, values)
        if results is not None and len(results) == len(node.outputs):
            values.update(zip(node.outputs, results, strict=True))
            evaluated.append(node)
    made: dict[ir.Value, ir.Value] = {}
    taken = {str(value.name) for value in all_values(model.graph)}
    for node in list(model.graph.all_nodes()):
        for place in SHAPE_INPUTS.get(node.op_type, ()):
            value = node.inputs[place] if place < len(node.inputs) and node.domain == "" else None
            if value is None or value in known or value not in values:
                continue
            if value not in made:
                made[value] = _constant(model, value, values[value], taken)
            node.replace_input_with(place, made[value])
    outputs = set(model.graph.outputs)
    for node in reversed(evaluated):
        if not any(value.uses() or value in outputs for value in node.outputs):
            model.graph.remove(node, safe=True)
    return bool(made)


def _constant(model: ir.Model, value: ir.Value, array: np.ndarray, taken: set[str]) -> ir.Value:
    name = next(name for k in itertools.count() if (name := f"{value.name}.constant{k or ''}") not in taken)
    taken.add(name)
    tensor = ir.tensor(array, name=name)
    constant = ir.Value(name=name, shape=tensor_shape(tensor), type=ir.TensorType(tensor.dtype), const_value=tensor)
    model.graph.register_initializer(constant)
    return constant


def _evaluate(model: ir.Model, node: ir.Node, values: dict[ir.Value, np.ndarray]) -> list[np.ndarray] | None:
    if node.op_type == "Shape" and node.domain == "" and node.inputs[0] is not None:
        dims = static_shape(node.inputs[0])
        if dims is None:
            return None
        start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", len(dims))
        return [np.array(dims[slice(start, end)], np.int64)]
    if node.op_type == "Size" and node.domain == "" and node.inputs[0] is not None:
        dims = static_shape(node.inputs[0])
        return None if dims is None else [np.array(math.prod(dims), np.int64)]
    if node.domain != "" or node.op_type in RANDOM or subgraphs(node) or not node.inputs:
        return None
    if any(v is not None and v not in values for v in node.inputs):
        return None
    if any(v.dtype is not None and not _exact(v.dtype) for v in node.outputs):
        return None
    arrays = {str(v.name): values[v] for v in node.inputs if v is not None}
    return _run_reference(model, node, arrays)


def _exact(dtype: ir.DataType) -> bool:
    return dtype.is_integer() or dtype == ir.DataType.BOOL


def _run_reference(model: ir.Model, node: ir.Node, arrays: dict[str, np.ndarray]) -> list[np.ndarray] | None:
    proto = ir.to_proto(node)
    assert isinstance(proto, onnx.NodeProto)
    outputs = [onnx.helper.make_empty_tensor_value_info(name) for name in proto.output]
    inputs = [
        onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in arrays.items()
    ]
    graph = onnx.helper.make_graph([proto], "fold", inputs, outputs)
    opset = onnx.helper.make_opsetid("", model.opset_imports[""])
    try:
        evaluator = ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=[opset]))
        results = [np.asarray(array) for array in evaluator.run(None, arrays)]
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
        logger.debug("node %s isn't folded: %s", node.name, error)
        return None
    if any(array.size > SMALL or array.dtype.kind not in "iub" for array in results):
        return None
    return results


def subgraphs(node: ir.Node) -> list[ir.Graph]:
    """Bodies of If, Loop, Scan and their like."""
    found: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            found.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            found.extend(attribute.as_graphs())
    return found


def run_time_sized(model: ir.Model, *, overridden: bool = True) -> set[ir.Value]:
    """Values whose size only a run can tell: it hangs on what the inputs hold, or on an operator nobody knows.

    ``overridden``: as for `input_independent`.
    """
    dynamic: set[ir.Value] = set()
    open_nodes = [n for n in model.graph if any(static_shape(v) is None for v in n.outputs if v.name)]
    independent = input_independent(model, overridden=overridden) if open_nodes else set()
    for node in open_nodes:
        if _decides_at_run_time(node, independent) or any(v in dynamic for v in node.inputs if v is not None):
            dynamic.update(v for v in node.outputs if static_shape(v) is None)
    return dynamic


def _decides_at_run_time(node: ir.Node, independent: set[ir.Value]) -> bool:
    if node.op_type in ALWAYS_DYNAMIC or subgraphs(node):
        return True
    if any(v is not None and not dense(v) and v.type is not None for v in (*node.inputs, *node.outputs)):
        return True
    deciding = (node.inputs[i] for i in SHAPE_INPUTS.get(node.op_type, ()) if i < len(node.inputs))
    return any(v is not None and v not in independent for v in deciding)
