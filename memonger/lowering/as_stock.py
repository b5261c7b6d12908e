"""What a plain model will take in stock onnxruntime on the CPU, before it runs.

A session is made, as onnxruntime's optimizer decides which nodes there are, and never run. Shapes follow from those of
the inputs, and `memonger.graph.stock` replays what a run asks the runtime's memory for, bodies of loops included.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from memonger.allocation.onnxruntime_arena import best_first_piece, onnxruntime_bytes
from memonger.devices import CPU, Cuda
from memonger.errors import MemongerError
from memonger.files import ScratchFolder
from memonger.graph import stock
from memonger.ir.model import Model
from memonger.ir.names import name_nodes
from memonger.ir.operators import operator_name
from memonger.ir.passes import run_passes
from memonger.ir.values import graphs, static_shape, subgraphs
from memonger.lowering.device_form import OptimizeWithOnnxruntime, settle_bodies
from memonger.runtime import onnxruntime
from memonger.shapes.inference import output_type
from memonger.shapes.shaping import Shape
from memonger.shapes.sizes import give_shapes


@dataclass(frozen=True, slots=True)
class Expected:
    """What a run is expected to take in stock onnxruntime beyond the loaded model and its inputs, outputs included.

    Attributes:
        run_bytes: With default options.
        without_arena: With onnxruntime's arena off (``enable_cpu_mem_arena``).
        first_piece: Bytes to request first, and to give back, with which a run takes least; 0: that takes no less, or
            wasn't wanted.
        with_first_piece: What it takes then, with default options.
        sums: Convolutions that the optimizer makes one node with a sum behind them, which rounds otherwise than two.
    """

    run_bytes: int
    without_arena: int
    first_piece: int
    with_first_piece: int
    sums: int = 0


def expected(
    model: ir.Model, inputs: Mapping[str, Shape], threads: int, *, with_piece: bool = False
) -> Expected | None:  # fmt: skip
    """What a run of a model is expected to take.

    Args:
        model: A plain model. Not changed.
        inputs: The shape of each input, by name.
        threads: Threads within a node.
        with_piece: Whether a first piece is looked for, which takes several replays.

    Returns: None where onnxruntime isn't there or refuses the model, or a size is unknown that only a run can tell.
    """
    if not onnxruntime.is_available():
        return None
    folder = ScratchFolder()
    try:
        optimize = OptimizeWithOnnxruntime(CPU, "ORT_ENABLE_ALL", folder.path / "optimized.onnx", Cuda())
        made = run_passes(Model(model, "the model"), "lower", optimize, settle_bodies, name_nodes).ir
        in_file = stock.dims_in_file(made.graph)
        for graph in graphs(made):
            _complete(graph, made.opset_imports)
        while not give_shapes(made, inputs):
            completed = [_complete(graph, made.opset_imports) for graph in graphs(made)]
            if not any(completed):
                return None
        frame, freed = stock.request_frame(made, None, as_written=True, threads=threads, in_file=in_file)
        with_arena, without = (onnxruntime_bytes(frame, arena=arena, freed=freed) for arena in (True, False))
        first = best_first_piece(frame, with_arena, freed) if with_piece else (0, with_arena)
        convolutions = [node for graph in graphs(made) for node in graph if node.op_type in ("Conv", "FusedConv")]
        sums = sum(len(node.inputs) > 3 and node.inputs[3] is not None for node in convolutions)
        return Expected(with_arena, without, *first, sums)
    except MemongerError:
        return None
    finally:
        folder.remove()


def _complete(graph: ir.Graph, opsets: Mapping[str, int]) -> bool:
    """Say what the optimizer leaves out: types, and how many channels there are in blocks; and of what branches give in
    several sizes the largest. Returns whether it did."""
    weights = [
        value.const_value.shape.numpy()
        for node in graph
        if operator_name(node) == "com.microsoft.nchwc::Conv"
        for value in node.inputs[1:2]
        if value is not None and value.const_value is not None
    ]
    block, found = math.gcd(16, *(shape[0] for shape in weights)), False
    for node in graph:
        for place, value in enumerate(node.outputs):
            if value.type is None and (dtype := _type(node, place, opsets)) is not None:
                value.type, found = ir.TensorType(dtype), True
            if node.op_type == "If" and static_shape(value) is None:
                given = [static_shape(branch.outputs[place]) for branch in subgraphs(node)]
                shapes = sorted((shape for shape in given if shape is not None), key=math.prod)
                if len(shapes) == len(given):
                    value.shape, found = ir.Shape(shapes[-1]), True
        if operator_name(node) == "com.microsoft.nchwc::ReorderInput" and node.outputs[0].shape is None:
            read = None if node.inputs[0] is None else static_shape(node.inputs[0])
            place = -1 if node.attributes.get_int("channels_last", 0) else 1
            channels = _channels(node.outputs[0]) or (read[place] if read else 0)
            if channels:
                node.outputs[0].shape, found = ir.Shape([None, -(-channels // block) * block, None, None]), True
    return found


def _type(node: ir.Node, place: int, opsets: Mapping[str, int]) -> ir.DataType | None:
    """The type of an output, as its operator's schema says; None where that doesn't."""
    if node.domain == "com.microsoft.nchwc":
        return ir.DataType.FLOAT
    if node.op_type == "Cast":
        return ir.DataType(node.attributes.get_int("to", 1))
    if node.op_type == "ConstantOfShape":
        content = node.attributes.get("value")
        return ir.DataType.FLOAT if content is None else content.as_tensor().dtype
    if node.domain:
        return output_type(node, place)
    try:
        schema = onnx.defs.get_schema(node.op_type, opsets.get("", 1))
    except onnx.defs.SchemaError:
        return None
    kind = schema.outputs[min(place, len(schema.outputs) - 1)].type_str
    for index, value in enumerate(node.inputs):
        if value is not None and schema.inputs[min(index, len(schema.inputs) - 1)].type_str == kind:
            return value.dtype if value.const_value is None else value.const_value.dtype
    allowed = [one for each in schema.type_constraints if each.type_param_str == kind for one in each.allowed_type_strs]
    name = (allowed[0] if len(allowed) == 1 else kind).removeprefix("tensor(").removesuffix(")").upper()
    return ir.DataType[name] if name in ir.DataType.__members__ else None


def _channels(value: ir.Value) -> int:
    """Of a value in blocks, as the weights of those say that read it, or what pools make of it; 0 where none does."""
    for node, index in value.uses():
        weight = node.inputs[1].const_value if node.op_type == "Conv" and node.inputs[1] is not None else None
        if index in (0, 3) and weight is not None:  # the fourth is added to what it gives
            groups, (outer, inner, *_) = node.attributes.get_int("group", 1), weight.shape.numpy()
            return outer if index or (groups > 1 and inner == 1) else groups * inner
        if node.op_type in ("AveragePool", "GlobalAveragePool", "MaxPool") and (found := _channels(node.outputs[0])):
            return found
    return 0
