"""Shape arithmetic: which sizes constants decide, and which only the run can tell."""

import itertools
import logging
import math
from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir

from memonger.ir.operators import facts
from memonger.ir.values import INFERENCE_ERRORS, SMALL, add_initializer, all_values, dense, static_shape, subgraphs

logger = logging.getLogger(__name__)

EVALUATED = frozenset({
    "Abs", "Add", "And", "ArgMax", "ArgMin", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor", "Cast",
    "CastLike", "Clip", "Compress", "Concat", "ConstantOfShape", "CumSum", "Div", "Equal", "Expand", "EyeLike",
    "Flatten", "Gather", "GatherElements", "GatherND", "Greater", "GreaterOrEqual", "Identity", "IsInf", "IsNaN",
    "Less", "LessOrEqual", "MatMul", "Max", "Mean", "Min", "Mod", "Mul", "Neg", "NonZero", "Not", "OneHot", "Or", "Pad",
    "Pow", "Range", "ReduceL1", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare",
    "Reshape", "ReverseSequence", "Scatter", "ScatterElements", "ScatterND", "Sign", "Slice", "Split", "Squeeze", "Sub",
    "Sum", "Tile", "TopK", "Transpose", "Trilu", "Unique", "Unsqueeze", "Where", "Xor",
})  # fmt: skip
"""Operators that are evaluated: they take no more than their inputs and outputs, and read nothing else."""

BOUNDED = frozenset({"Compress", "NonZero", "Unique"})
"""Operators of those whose outputs' sizes inference can't tell, and which are as small as their inputs."""


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
    fixed = {v for v in model.graph.initializers.values() if not (overridden and v.is_graph_input())}
    for node in model.graph:
        if facts(node).random or subgraphs(node):
            continue
        first = node.inputs[0] if facts(node).shape_only else None
        if (first is not None and static_shape(first) is not None) or all(v is None or v in fixed for v in node.inputs):
            fixed.update(node.outputs)
    return fixed


def fold_shape_arithmetic(model: ir.Model) -> bool:
    """Where the content of an input decides the size of an output, make that content an initializer.

    This is done where constants and static shapes decide the content.

    Only integers and booleans are computed: their arithmetic is exact. Other readers of the same values are left as
    they are: onnxruntime accepts fewer models whose conditions have become constants.

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
    names = {str(value.name) for value in all_values(model.graph)}
    for node in list(model.graph.all_nodes()):
        for place in facts(node).sized_by:
            value = node.inputs[place] if place < len(node.inputs) and node.domain == "" else None
            if value is None or value in known or value not in values:
                continue
            if value not in made:
                made[value] = _constant(model, value, values[value], names)
            node.replace_input_with(place, made[value])
    outputs = set(model.graph.outputs)
    for node in reversed(evaluated):
        if not any(value.uses() or value in outputs for value in node.outputs):
            model.graph.remove(node, safe=True)
    return bool(made)


def _constant(model: ir.Model, value: ir.Value, array: np.ndarray, taken: set[str]) -> ir.Value:
    name = next(name for k in itertools.count() if (name := f"{value.name}.constant{k or ''}") not in taken)
    taken.add(name)
    return add_initializer(model.graph, name, array)


def _evaluate(model: ir.Model, node: ir.Node, values: dict[ir.Value, np.ndarray]) -> list[np.ndarray] | None:
    if node.domain != "":
        return None
    if node.op_type == "Shape" and node.inputs[0] is not None:
        dims = static_shape(node.inputs[0])
        if dims is None:
            return None
        start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", len(dims))
        return [np.array(dims[slice(start, end)], np.int64)]
    if node.op_type == "Size" and node.inputs[0] is not None:
        dims = static_shape(node.inputs[0])
        return None if dims is None else [np.array(math.prod(dims), np.int64)]
    if node.op_type not in EVALUATED or not node.inputs:
        return None
    if any(v is not None and v not in values for v in node.inputs):
        return None
    if any(v.dtype is not None and not _exact(v.dtype) for v in node.outputs):
        return None
    arrays = {str(v.name): values[v] for v in node.inputs if v is not None}
    if node.op_type not in BOUNDED and not _is_small(model, node, arrays):
        return None
    return _run_reference(model, node, arrays)


def _is_small(model: ir.Model, node: ir.Node, arrays: Mapping[str, np.ndarray]) -> bool:
    """Whether all that a node would write is small; a file of 300 bytes may ask for 16 GB."""
    opset = model.opset_imports[""]
    proto = ir.serde.serialize_node(node)
    contents = {name: onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()}
    types = {
        name: onnx.helper.make_tensor_type_proto(content.data_type, list(content.dims))
        for name, content in contents.items()
    }
    try:
        written = onnx.shape_inference.infer_node_outputs(
            onnx.defs.get_schema(node.op_type, opset, ""), proto, types, contents,
            opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=10,
        )  # fmt: skip
    except INFERENCE_ERRORS as error:
        logger.debug("node %s isn't folded: %s", node.name, error)
        return False
    shapes = [written[name].tensor_type.shape if name in written else None for name in proto.output if name]
    return all(
        shape is not None
        and all(dim.HasField("dim_value") for dim in shape.dim)
        and 0 <= math.prod(dim.dim_value for dim in shape.dim) <= SMALL
        for shape in shapes
    )


def _exact(dtype: ir.DataType) -> bool:
    return dtype.is_integer() or dtype == ir.DataType.BOOL


def _run_reference(model: ir.Model, node: ir.Node, arrays: dict[str, np.ndarray]) -> list[np.ndarray] | None:
    proto = ir.serde.serialize_node(node)
    outputs = [onnx.helper.make_empty_tensor_value_info(name) for name in proto.output]
    inputs = [
        onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in arrays.items()
    ]
    from onnx.reference import ReferenceEvaluator  # here: most models need none, and it takes a while to import

    graph = onnx.helper.make_graph([proto], "fold", inputs, outputs)
    opset = onnx.helper.make_opsetid("", model.opset_imports[""])
    try:
        evaluator = ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=[opset]))
        results = [np.asarray(array) for array in evaluator.run(None, arrays)]
    except Exception as error:  # of the evaluator's kernels each raises its own
        logger.debug("node %s isn't folded: %s", node.name, error)
        return None
    if any(array.size > SMALL or array.dtype.kind not in "iub" for array in results):
        return None
    return results


def run_time_sized(model: ir.Model, *, overridden: bool = True) -> set[ir.Value]:
    """Values whose size only a run can tell: it depends on what the inputs hold, or on another such value.

    ``overridden``: as for `input_independent`.
    """
    dynamic: set[ir.Value] = set()
    open_nodes = [n for n in model.graph if any(static_shape(v) is None for v in n.outputs if v.name)]
    independent = input_independent(model, overridden=overridden) if open_nodes else set()
    for node in open_nodes:
        decides, given = _decides_at_run_time(node, independent), [v for v in node.inputs if v is not None]
        if decides or any(v in dynamic for v in given):
            anyway = facts(node).sized_anyway if dynamic.isdisjoint(given) else ()
            dynamic.update(v for at, v in enumerate(node.outputs) if static_shape(v) is None and at not in anyway)
    return dynamic


def _decides_at_run_time(node: ir.Node, independent: set[ir.Value]) -> bool:
    if facts(node).sized_at_run_time or subgraphs(node):
        return True
    if any(v is not None and not dense(v) and v.type is not None for v in (*node.inputs, *node.outputs)):
        return True
    deciding = (node.inputs[i] for i in facts(node).sized_by if i < len(node.inputs))
    return any(v is not None and v not in independent for v in deciding)
