"""What is done to a forward model before it is differentiated: one operator set, and no operator without a rule.

Rules are written for one version of the operators. What has an expansion is written as that, and what has neither rule
nor expansion but a function body in the standard is written out as its body.
"""

from collections.abc import Callable, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from memonger.autodiff.registry import EXPANSIONS, RULES
from memonger.errors import PlanError
from memonger.ir.emitter import Emitter
from memonger.ir.marks import inline
from memonger.ir.model import Model
from memonger.ir.operators import facts, operator_name
from memonger.ir.rewrite import Replacer, insert_for
from memonger.ir.values import static_shape, subgraphs
from memonger.model import load
from memonger.shapes.inference import infer_shapes

ROUNDS = 16  # bodies within bodies; the standard's are three deep


def expand_operators(model: Model, op: Emitter, *, keep_random: bool = False) -> bool:
    """A pass: every operator that has an expansion is written as that; with ``keep_random`` all but random ones."""
    behind_unknown = False  # whether a node was replaced whose outputs' shapes onnx couldn't tell

    def write(op: Emitter, node: ir.Node) -> Sequence[ir.Value | None] | None:
        nonlocal behind_unknown
        if behind_unknown and _infers(node):
            op.infer(node)
        rule = EXPANSIONS.get(operator_name(node))
        unknown = any(v is not None and (v.dtype is None or static_shape(v) is None) for v in node.inputs)
        if rule is None or (keep_random and facts(node).random) or (node.domain and unknown):
            return None
        behind_unknown = behind_unknown or any(v.name and static_shape(v) is None for v in node.outputs)
        return rule(op, node)

    return Replacer(model.graph, op).replace_each(write) > 0


def _infers(node: ir.Node) -> bool:
    """Whether a standard node's shapes can be told now, and weren't."""
    before = all(v is None or static_shape(v) is not None for v in node.inputs)
    after = all(static_shape(v) is not None for v in node.outputs if v.name)
    return node.domain == "" and before and not after and not subgraphs(node) and not facts(node).sized_at_run_time


def write_out_bodies(model: Model, op: Emitter, needed: Callable[[], list[ir.Node]]) -> bool:
    """A pass: needed nodes that have no rule but a function body are that, as often as bodies hold such nodes."""
    opset = int(model.ir.opset_imports[""])
    for number in range(ROUNDS):
        without = [n for n in needed() if not (facts(n).without_gradient or (n.domain == "" and n.op_type in RULES))]
        known = [node for node in without if body_of(node, opset) is not None]
        if not known:
            return number > 0
        write_out(model, known)
        op.learn_names(model.ir)
    return True


_DOMAIN = "memonger.body"


def body_of(node: ir.Node, opset: int) -> onnx.FunctionProto | None:
    """The standard's function body of a node, at the newest version that ``opset`` allows; None where it has none."""
    if node.domain not in ("", "ai.onnx") or not onnx.defs.has(node.op_type, opset, ""):
        return None
    schema: Any = onnx.defs.get_schema(node.op_type, opset, "")  # onnx's stubs lack what follows
    versions = [v for v in schema.function_opset_versions if v <= opset]
    dependent = [v for v in schema.context_dependent_function_opset_versions if v <= opset]
    if versions:
        data = schema.get_function_with_opset_version(max(versions))
    elif dependent:
        types = [_type_bytes(value) for value in node.inputs]
        proto = ir.serde.serialize_node(node).SerializeToString()
        data = schema.get_context_dependent_function_with_opset_version(max(dependent), proto, types)
    else:
        return None
    return onnx.FunctionProto.FromString(data) if data else None


def _type_bytes(value: ir.Value | None) -> bytes:
    if value is None or value.dtype is None:
        return onnx.TypeProto().SerializeToString()
    return onnx.helper.make_tensor_type_proto(int(value.dtype), static_shape(value)).SerializeToString()


def write_out(model: Model, nodes: Sequence[ir.Node]) -> None:
    """Replace nodes of the model's graph by their bodies; types and shapes are inferred anew.

    Raises:
        PlanError: a body needs another operator set than the model's.
    """
    opset = int(model.ir.opset_imports[""])
    for number, node in enumerate(nodes):
        proto = body_of(node, opset)
        if proto is None:
            raise PlanError(f"{model.name}: operator {node.op_type} (node '{node.name}') has no function body.")
        function = _as_function(proto, f"{node.op_type}_{number}", opset, len(node.outputs))
        model.ir.functions[function.identifier()] = function
        # The node's attributes, and for the others the standard's defaults: a body refers to either
        schema = onnx.defs.get_schema(node.op_type, opset, "")
        defaults = [a.default_value for name, a in sorted(schema.attributes.items()) if name not in node.attributes]
        call = ir.Node(
            _DOMAIN,
            function.name,
            node.inputs,
            [*node.attributes.values(), *(ir.serde.deserialize_attribute(a) for a in defaults if a.name)],
            num_outputs=len(node.outputs),
            name=node.name,
        )
        for old, new in zip(node.outputs, call.outputs, strict=True):
            new.type, new.shape = old.type, old.shape
        insert_for(node, [call], call.outputs)
        model.graph.remove(node, safe=True)
    model.ir.opset_imports.setdefault(_DOMAIN, 1)
    inline(model.ir)
    model.ir.opset_imports.pop(_DOMAIN, None)
    load.lift_constants(model)
    infer_shapes(model)


def _as_function(proto: onnx.FunctionProto, name: str, opset: int, outputs: int) -> ir.Function:
    """The body as a function with that many outputs: bodies don't write the outputs that the node leaves out."""
    proto.domain, proto.name = _DOMAIN, name
    del proto.opset_import[:], proto.output[outputs:]
    proto.output[:] = [result or f"left_out_{k}" for k, result in enumerate(proto.output)]
    proto.opset_import.append(onnx.helper.make_opsetid("", opset))
    written = {result for node in proto.node for result in node.output}
    left_out = [result for result in proto.output if result not in written]
    proto.node.extend(onnx.helper.make_node("Constant", [], [result], value_float=0.0) for result in left_out)
    return ir.serde.deserialize_function(proto)
