"""Bodies that the standard gives operators as functions of others, written in their place."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from memonger.ir.marks import inline
from memonger.ir.model import Model
from memonger.ir.names import fresh
from memonger.ir.rewrite import insert_for
from memonger.ir.values import all_values, graphs, static_shape
from memonger.model.load import lift_constants
from memonger.shapes.inference import infer_shapes

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


def write_loop(model: Model, node: ir.Node) -> None:
    """Replace a ``SequenceMap`` of the model's graph by the ``Loop`` that the standard says it is.

    Its function body can't be read on its own: the node's own body, which stands in it, reads values around the node.
    """
    taken = {str(value.name) for graph in graphs(model.ir) for value in all_values(graph)}
    body = node.attributes["body"].as_graph()

    def value(what: str, kind: ir.TypeProtocol | None, scalar: bool = True) -> ir.Value:
        name = fresh(f"{node.outputs[0].name}/{what}", taken)
        return ir.Value(name=name, type=kind, shape=ir.Shape([]) if scalar else None)

    def made(operator: str, *inputs: ir.Value, output: ir.Value, **attributes: int) -> ir.Node:
        return ir.node(operator, inputs, attributes or None, outputs=[output])

    whole, truth = ir.TensorType(ir.DataType.INT64), ir.TensorType(ir.DataType.BOOL)
    turn, going, goes_on = value("turn", whole), value("going", truth), value("goes_on", truth)
    count, begin = value("count", whole), value("begin", truth)
    empty, before, after = ([value(what, out.type, False) for out in node.outputs] for what in ("empty", "in", "out"))
    elements = []
    for given, read in zip(node.inputs, body.inputs, strict=True):
        assert given is not None
        if isinstance(given.type, ir.SequenceType):
            elements.append(made("SequenceAt", given, turn, output=value("element", given.type.elem_type, False)))
        replacement = elements[-1].outputs[0] if isinstance(given.type, ir.SequenceType) else given
        read.replace_all_uses_with(replacement, replace_graph_outputs=True)
    steps, results, weights = list(body), list(body.outputs), list(body.initializers.values())
    body.outputs.clear()
    body.initializers.clear()
    body.remove(steps)
    inserts = [made("SequenceInsert", *each[:2], output=each[2]) for each in zip(before, results, after, strict=True)]
    inside = [made("Identity", going, output=goes_on), *elements, *steps, *inserts]
    loop = ir.Graph(
        [turn, going, *before], [goes_on, *after], nodes=inside, initializers=weights,
        name=fresh(f"{node.outputs[0].name}/body", taken),
    )  # fmt: skip
    call = ir.node("Loop", [count, begin, *empty], {"body": loop}, num_outputs=len(node.outputs), name=node.name)
    for old, new in zip(node.outputs, call.outputs, strict=True):
        new.type, new.shape = old.type, old.shape
    (first,) = node.inputs[:1]
    assert first is not None
    start = [
        made("SequenceLength", first, output=count),
        ir.node("Constant", [], {"value": ir.tensor(True)}, outputs=[begin]),
        *(made("SequenceEmpty", output=each, dtype=int(each.dtype or 1)) for each in empty),
    ]
    insert_for(node, [*start, call], call.outputs)
    model.graph.remove(node, safe=True)
    lift_constants(model)


def write_out(
    model: Model, wanted: Callable[[], Iterable[ir.Node]], infer: Callable[[Model], object] = infer_shapes
) -> bool:
    """Replace nodes by their bodies, as often as bodies hold such nodes.

    Args:
        model: The model. It is changed.
        wanted: The nodes that are to be their bodies, where they have one.
        infer: What tells the types and shapes of what is written.

    Returns: whether there are any.
    """
    found, opset = False, int(model.ir.opset_imports.get("", 0))
    while bodies := [(node, body) for node in wanted() if (body := body_of(node, opset)) is not None]:
        _write_out(model, bodies, opset)
        infer(model)
        found = True
    return found


def _write_out(model: Model, bodies: Sequence[tuple[ir.Node, onnx.FunctionProto]], opset: int) -> None:
    for number, (node, proto) in enumerate(bodies):
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
        parent = node.graph
        assert parent is not None
        insert_for(node, [call], call.outputs)
        parent.remove(node, safe=True)
    model.ir.opset_imports.setdefault(_DOMAIN, 1)
    inline(model.ir)
    model.ir.opset_imports.pop(_DOMAIN, None)
    lift_constants(model)


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
