"""Programs, read off plans: where each value is bound, and one model that runs all plans of one structure.

Plans of one model for several batches mostly differ in shapes alone, and in a few small constants (a Reshape's target).
Such plans share one onnxruntime session, and so one copy of the weights: shapes are dropped from its model, and the
constants that differ are fed as inputs.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from memonger.errors import SessionError
from memonger.graph.aliasing import floating_names
from memonger.graph.graph import Graph
from memonger.ir.element_types import ElementType
from memonger.ir.names import inner_names
from memonger.ir.operators import facts
from memonger.ir.tensors import is_large
from memonger.ir.values import attribute_bytes, dense, has_loop, static_shape, subgraphs
from memonger.model.counts import counts_of
from memonger.plan import Plan
from memonger.runtime.arena import ArenaTensor
from memonger.runtime.cuda.replay import copies_from_host
from memonger.runtime.prepared import Input, Kind, Program


def inputs_of(graph: ir.Graph) -> tuple[Input, ...]:
    """The inputs of a graph. Those with an initializer are not required: that is their default."""
    counts = counts_of(graph)
    return tuple(
        Input(
            name=str(value.name),
            kind=kind_of(value.type),
            shape=static_shape(value),
            required=value.name not in graph.initializers,
            numpy=value.dtype.numpy() if value.dtype is not None and dense(value) else None,
            fill=counts.get(str(value.name), 0),
        )
        for value in graph.inputs
    )


def kind_of(kind: ir.TypeProtocol | None) -> Kind | None:
    """A value's type as `Kind` has it."""
    return ElementType(kind.dtype) if isinstance(kind, ir.TensorType) else kind


def program_of(plan: Plan, varying: Sequence[str] = ()) -> Program:
    """The program of a plan; ``varying`` names the constants that are fed."""
    graph, copying = plan.model.graph, copies_from_host(plan.model.graph)
    constants = {}
    for name in varying:
        tensor = graph.initializers[name].const_value
        assert tensor is not None
        constants[name] = np.array(tensor.numpy())
    return Program(
        inputs=inputs_of(graph),
        outputs=tuple(dict.fromkeys(str(value.name) for value in graph.outputs)),
        kinds={str(value.name): kind_of(value.type) for value in graph.outputs},
        uncomputed=frozenset(str(value.name) for value in graph.outputs if value.producer() is None),
        planned=arena_tensors(plan.model, plan.graph, plan.offsets),
        constants=constants,
        order=plan.graph.nodes,
        unordered=frozenset(inner_names(plan.model) | floating_names(plan.model)),
        has_loop=has_loop(plan.model),
        arena_bytes=plan.arena_bytes,
        workspace_bytes=(plan.workspace_bytes or 0) + plan.run_time_bytes,
        limit=plan.limit,
        is_accounted=plan.workspace is not None and not _held_by_runtime(plan),
        first_update=next((step for step, pairs in enumerate(plan.graph.updates) if pairs), len(plan.graph.nodes)),
        replacing=frozenset(plan.graph.values[new] for pairs in plan.graph.updates for _, new in pairs),
        growing=frozenset(plan.graph.values[new] for pairs in plan.graph.appends for _, new in pairs),
        output_shapes={str(value.name): static_shape(value) for value in graph.outputs},
        copies_from_host=f"node '{copying.name}' ({copying.op_type})" if copying is not None else "",
    )


def arena_tensors(model: ir.Model, graph: Graph, offsets: Mapping[int, int]) -> tuple[ArenaTensor, ...]:
    """The planned values of a scheduled model where they lie in the arena; ``offsets`` are by their numbers."""
    by_name, tensors = {str(v.name): v for node in model.graph for v in node.outputs}, list[ArenaTensor]()
    for number, offset in offsets.items():
        value = by_name[graph.values[number]]
        dims = static_shape(value)
        assert dims is not None
        assert value.dtype is not None
        tensors.append(ArenaTensor(str(value.name), ElementType(value.dtype), dims, offset))
    return tuple(tensors)


def _held_by_runtime(plan: Plan) -> bool:
    """Whether the runtime holds a value of its own on the device, one that isn't empty: those of subgraphs, say."""
    graph = plan.graph
    if any(subgraphs(node) for node in plan.model.graph):
        return True
    by_name = {value.name: value for node in plan.model.graph for value in node.outputs}
    waiting = plan.values_in_file
    for value in (v for writes in graph.writes for v in writes):
        name = graph.values[value]
        if graph.planned[value] or value in graph.persistent or name in plan.host or name in waiting:
            continue
        output = by_name[name]
        if not graph.sizes[value] and static_shape(output) is not None:
            continue
        producer = output.producer()
        if producer is None or not facts(producer).shape_only:
            return True
    return False


def alike(plans: Sequence[Plan]) -> list[list[int]]:
    """Numbers of plans of one structure and one set of weights together, in the order of their first members.

    A plan for ranges of sizes is by itself: its session may meet any shape.
    """
    found: list[list[int]] = []
    for index, plan in enumerate(plans):
        same = next((members for members in found if _same(plans[members[0]], plan)), None)
        if same is None:
            found.append([index])
        else:
            same.append(index)
    return found


def programs_alike(plans: Sequence[Plan]) -> tuple[list[str], tuple[Program, ...]]:
    """Of plans that are alike the constants in which they differ, which are fed, and the programs."""
    first, *others = [plan.model.graph.initializers for plan in plans]
    large = set(_large(first))
    varying = [name for name in first if name not in large and any(not _equal(first, o, name) for o in others)]
    return varying, tuple(program_of(plan, varying) for plan in plans)


def session_model(plan: Plan, program: Program, varying: Sequence[str] = (), any_shape: bool = False) -> ir.Model:
    """A copy of a plan's model as a session runs it; see `expose`."""
    model = plan.model.clone()
    expose(model, program.planned, varying, any_shape)
    return model


def check_family(plans: Sequence[Plan]) -> None:
    """The plans are of one model, each for other input shapes or ranges of sizes.

    Raises:
        SessionError: no plans; other inputs or outputs; two plans for the same shapes.
    """
    if not plans:
        raise SessionError("a session needs at least one plan.")
    known, seen = None, dict[object, int]()
    for index, plan in enumerate(plans):
        inputs = inputs_of(plan.model.graph)
        names = [(one.name, one.kind) for one in inputs], [value.name for value in plan.model.graph.outputs]
        known = names if known is None else known
        if names != known:
            raise SessionError(f"plan {index} is of another model than plan 0: their inputs or outputs differ.")
        key = tuple(value.shape for value in inputs), tuple(plan.ranges.items())
        if key in seen:
            raise SessionError(f"plans {seen[key]} and {index} are for the same input shapes.")
        seen[key] = index


def _same(one: Plan, other: Plan) -> bool:
    """Whether two plans run the same nodes in the same order on the same weights, whatever the shapes."""
    if one.ranges or other.ranges or one.stamp != other.stamp or one.threads != other.threads:
        return False
    if _structure(one) != _structure(other):
        return False
    mine, theirs = one.model.graph.initializers, other.model.graph.initializers
    return all(_equal(mine, theirs, name) for name in _large(mine))


def _structure(plan: Plan) -> list[object]:
    graph = plan.model.graph
    nodes: list[object] = [
        (
            node.op_identifier(),
            node.name,
            tuple(None if v is None else v.name for v in node.inputs),
            tuple((v.name, v.dtype) for v in node.outputs),
            tuple(sorted(map(attribute_bytes, node.attributes.values()))),
        )
        for node in graph
    ]
    planned = tuple(sorted(plan.graph.values[value] for value in plan.offsets))
    constants = tuple(sorted((name, value.dtype) for name, value in graph.initializers.items()))
    return [*nodes, planned, constants, _large(graph.initializers)]


def _large(constants: Mapping[str, ir.Value]) -> list[str]:
    return sorted(name for name, v in constants.items() if v.const_value is None or is_large(v.const_value))


def _equal(mine: Mapping[str, ir.Value], theirs: Mapping[str, ir.Value], name: str) -> bool:
    a, b = mine[name].const_value, theirs[name].const_value
    if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return a is b or a.tobytes() == b.tobytes()


def is_cast(node: ir.Node | None) -> bool:
    """Whether a node is a Cast, whose output has to be one of the model's."""
    return node is not None and node.op_type == "Cast" and not node.domain


def expose(
    model: ir.Model, planned: Sequence[ArenaTensor], varying: Sequence[str] = (), any_shape: bool = False
) -> None:
    """Put every planned value among the outputs of a model, for all shapes if several plans share it.

    What a Cast writes is one as well, whoever holds it: onnxruntime takes out Casts after Casts that aren't returned.
    """
    graph = model.graph
    outputs = {value.name for value in graph.outputs}
    by_name = {value.name: value for node in graph for value in node.outputs}
    casts = (node.outputs[0].name for node in graph if is_cast(node))
    names = dict.fromkeys([*(tensor.name for tensor in planned), *casts])
    graph.outputs.extend(by_name[name] for name in names if name not in outputs)
    model.metadata_props.clear()
    for name in varying:
        value = graph.initializers.pop(name)
        assert value.const_value is not None
        value.type, value.shape, value.const_value = ir.TensorType(value.const_value.dtype), None, None
        graph.inputs.append(value)
    if any_shape:
        for value in (*graph.inputs, *by_name.values()):
            value.shape = None


def without_defaults(model: ir.Model, names: Collection[str]) -> ir.Model:
    """The model with inputs that have no defaults: those would be a second copy of what is bound."""
    copy = model.clone()
    for value in copy.graph.inputs:
        if value.name in names and value.name in copy.graph.initializers:
            del copy.graph.initializers[str(value.name)]
            value.const_value = None
    return copy
