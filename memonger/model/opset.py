"""One operator set: gradients, and what is written for a device, are for one version of the operators."""

import onnx
import onnx_ir as ir

from memonger.errors import PlanError
from memonger.ir import checks
from memonger.ir.model import Model
from memonger.ir.operators import facts
from memonger.ir.values import all_values, graphs
from memonger.model import load
from memonger.shapes.inference import infer_shapes

OPSET = 20
"""The newest operator set for whose every operator used here onnxruntime 1.23 and later has a CPU kernel."""


def raise_opset(model: Model) -> bool:
    """A pass: the model is in operator set `OPSET`, or in its own where that is newer. Names, marks and weights stay.

    Raises:
        PlanError: onnx's converter can't raise it.
    """
    opset = model.ir.opset_imports.get("")
    if opset is None or opset >= OPSET:
        model.ir.opset_imports[""] = max(opset or OPSET, OPSET)
        return False
    if all(_is_same(node, opset) for graph in graphs(model.ir) for node in graph):
        model.ir.opset_imports[""] = OPSET
        for graph in graphs(model.ir):
            for node in graph:
                node.version = None
    else:
        _convert(model, opset)
    return True


def _is_same(node: ir.Node, opset: int) -> bool:
    """Whether the operator is in both sets, in one version."""
    if node.domain != "" or node.op_type in checks.RUNTIME_OPERATORS:
        return True
    versions = [
        onnx.defs.get_schema(node.op_type, number, "").since_version
        for number in (opset, OPSET)
        if onnx.defs.has(node.op_type, number, "")
    ]
    return len(versions) == 2 and versions[0] == versions[1]


def _convert(model: Model, opset: int) -> None:
    if opset < 9 and any(node.op_type == "Scan" for node in model.graph):
        raise PlanError(
            f"{model.name} is in opset {opset}, and gradients need {OPSET}: onnx's converter doesn't raise it, as "
            "its Scan has an axis for the batch. Export it again with a newer opset."
        )
    metadata_of = {v.name: node.metadata_props for node in model.graph for v in node.outputs if node.metadata_props}
    graph_name, types = model.graph.name, {v.name: v.dtype for v in all_values(model.graph)}
    constants = {v.name for v in model.graph.initializers.values() if v.meta.get("constant")}
    try:
        load.convert(model, OPSET)
    except load.CONVERSION_ERRORS as error:
        raise PlanError(
            f"{model.name} is in opset {opset}, and gradients need {OPSET}: onnx's converter can't raise it: "
            f"{str(error).strip()}. Export it again with a newer opset."
        ) from error
    model.ir.ir_version = max(model.ir.ir_version or 0, load.MIN_IR_VERSION)
    model.graph.name = graph_name
    for node in model.graph:
        node.metadata_props.update(metadata_of.get(node.outputs[0].name, {}) if node.outputs else {})
    for value in model.graph.initializers.values():
        if value.name in constants:
            value.meta["constant"] = True
    load.lift_constants(model)
    # onnx's converter writes what was an attribute in float32, whatever the type of the first input
    for node in model.ir.graph:
        for index in facts(node).once_attributes:
            setting, first = (node.inputs[k] if k < len(node.inputs) else None for k in (index, 0))
            wanted = None if first is None else types.get(first.name)
            if setting is None or setting.const_value is None or wanted is None or setting.dtype == wanted:
                continue
            content = setting.const_value.numpy().astype(wanted.numpy())
            setting.const_value = ir.tensor(content, dtype=wanted, name=setting.name)
            setting.type = ir.TensorType(wanted)
    checks.sort_nodes(model)
    infer_shapes(model)
