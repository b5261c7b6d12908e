"""What a session needs of plans: where each value is bound, and one model that runs all plans of one structure.

Plans of one model for several batches mostly differ in shapes alone, and in a few small constants (a Reshape's target).
Such plans share one onnxruntime session, and so one copy of the weights: shapes are dropped from its model, and the
constants that differ are fed as inputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from memonger.errors import SessionError
from memonger.graph.aliasing import floating_names
from memonger.ir.names import inner_names
from memonger.ir.operators import facts
from memonger.ir.tensors import is_large
from memonger.ir.values import attribute_bytes, has_loop, static_shape, subgraphs
from memonger.plan import Plan
from memonger.runtime import feeds as feeding
from memonger.runtime.arena import ArenaTensor
from memonger.runtime.cuda.replay import copies_from_host
from memonger.runtime.weights import Message


@dataclass(frozen=True, slots=True)
class Program:
    """All a session keeps of a plan: not the model, whose weights onnxruntime holds by then.

    Attributes:
        inputs: The model's inputs with the shapes planned for.
        outputs: Names of the model's outputs, each once.
        kinds: Types of the outputs.
        planned: Values bound into the arena, and where.
        constants: Small constants fed at each run, because plans that share a session differ in them.
        order: Names of the nodes as planned.
        unordered: Names of nodes whose order the runtime decides.
        has_loop: Whether a node's body may run more than once.
        arena_bytes: Size of the arena.
        workspace_bytes: Most workspace a step takes beside it, and what only a run can size; 0 if never measured.
        limit: Bytes that onnxruntime may take by itself; None: as much as it asks for.
        is_accounted: Whether arena and workspace are all that a run takes: the workspace was measured, and the runtime
            is left no value to hold that could be large.
        replacing: Outputs that are written over persistent inputs.
        growing: Outputs that are persistent inputs with more behind them, and lie where those do.
        output_shapes: The shapes of outputs, as far as they are known.
        first_update: The first step that writes over a persistent input; the number of steps if none does.
        copies_from_host: The first node that no CUDA graph may replay (`cuda.replay`), named; empty if there is none.
    """

    inputs: tuple[feeding.Input, ...]
    outputs: tuple[str, ...]
    kinds: Mapping[str, ir.TypeProtocol | None]
    planned: tuple[ArenaTensor, ...]
    constants: Mapping[str, np.ndarray]
    order: tuple[str, ...]
    unordered: frozenset[str]
    has_loop: bool
    arena_bytes: int
    workspace_bytes: int
    limit: int | None
    is_accounted: bool
    replacing: frozenset[str]
    growing: frozenset[str]
    output_shapes: Mapping[str, tuple[int, ...] | None]
    first_update: int
    copies_from_host: str


def program_of(plan: Plan, varying: Sequence[str] = ()) -> Program:
    """The program of a plan; ``varying`` names the constants that are fed."""
    graph, copying = plan.model.graph, copies_from_host(plan.model.graph)
    constants = {}
    for name in varying:
        tensor = graph.initializers[name].const_value
        assert tensor is not None
        constants[name] = np.array(tensor.numpy())
    return Program(
        inputs=feeding.inputs_of(graph),
        outputs=tuple(dict.fromkeys(str(value.name) for value in graph.outputs)),
        kinds={str(value.name): value.type for value in graph.outputs},
        planned=_planned(plan),
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


def _held_by_runtime(plan: Plan) -> bool:
    """Whether the runtime holds a value of its own on the device, one that isn't empty: those of subgraphs, say."""
    graph = plan.graph
    if any(subgraphs(node) for node in plan.model.graph):
        return True
    by_name = {value.name: value for node in plan.model.graph for value in node.outputs}
    for value in (v for writes in graph.writes for v in writes):
        name = graph.values[value]
        if graph.planned[value] or value in graph.persistent or name in plan.host:
            continue
        output = by_name[name]
        if not graph.sizes[value] and static_shape(output) is not None:
            continue
        producer = output.producer()
        if producer is None or not facts(producer).shape_only:
            return True
    return False


def _planned(plan: Plan) -> tuple[ArenaTensor, ...]:
    by_name = {str(v.name): v for node in plan.model.graph for v in node.outputs}
    planned = []
    for number, offset in plan.offsets.items():
        value = by_name[plan.graph.values[number]]
        dims = static_shape(value)
        assert dims is not None
        assert value.dtype is not None
        planned.append(ArenaTensor(str(value.name), value.dtype, dims, offset))
    return tuple(planned)


@dataclass(frozen=True, slots=True)
class SessionGroup:
    """Plans that run in one onnxruntime session: its model or message, and the plans' indices and programs.

    ``takes_any_shape``: shapes will be many. onnxruntime would remember something of each.
    """

    model: ir.Model | Message
    members: tuple[int, ...]
    programs: tuple[Program, ...]
    takes_any_shape: bool = False


def group_plans(plans: Sequence[Plan]) -> tuple[SessionGroup, ...]:
    """Plans of one structure and one set of weights together, in the order of their first members.

    A plan for ranges of sizes is by itself: its session may meet any shape.
    """
    parts: list[list[int]] = []
    for index, plan in enumerate(plans):
        same = next((part for part in parts if _same(plans[part[0]], plan)), None)
        if same is None:
            parts.append([index])
        else:
            same.append(index)
    return tuple(_group([plans[index] for index in part], tuple(part)) for part in parts)


def _group(plans: Sequence[Plan], members: tuple[int, ...]) -> SessionGroup:
    varying = _varying(plans)
    programs = tuple(program_of(plan, varying) for plan in plans)
    model = plans[0].model.clone()
    expose(model, programs[0].planned, varying, len(plans) > 1)
    return SessionGroup(model, members, programs)


def check_family(plans: Sequence[Plan]) -> None:
    """The plans are of one model, each for other input shapes or ranges of sizes.

    Raises:
        SessionError: no plans; other inputs or outputs; two plans for the same shapes.
    """
    if not plans:
        raise SessionError("a session needs at least one plan.")
    first = feeding.inputs_of(plans[0].model.graph)
    seen: dict[object, int] = {}
    for index, plan in enumerate(plans):
        inputs = feeding.inputs_of(plan.model.graph)
        if [(i.name, i.kind) for i in inputs] != [(i.name, i.kind) for i in first] or _output_names(
            plan
        ) != _output_names(plans[0]):
            raise SessionError(f"plan {index} is of another model than plan 0: their inputs or outputs differ.")
        key = tuple(value.shape for value in inputs), tuple(plan.ranges.items())
        if key in seen:
            raise SessionError(f"plans {seen[key]} and {index} are for the same input shapes.")
        seen[key] = index


def _output_names(plan: Plan) -> list[str]:
    return [str(value.name) for value in plan.model.graph.outputs]


def _same(one: Plan, other: Plan) -> bool:
    """Whether two plans run the same nodes in the same order on the same weights, whatever the shapes."""
    if one.ranges or other.ranges or one.stamp != other.stamp or one.threads != other.threads:
        return False
    if _structure(one) != _structure(other):
        return False
    mine, theirs = one.model.graph.initializers, other.model.graph.initializers
    return all(_equal(mine[name], theirs[name]) for name in _large(one))


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
    return [*nodes, planned, constants, _large(plan)]


def _large(plan: Plan) -> list[str]:
    values = plan.model.graph.initializers
    return sorted(name for name, v in values.items() if v.const_value is None or is_large(v.const_value))


def _equal(one: ir.Value, other: ir.Value) -> bool:
    a, b = one.const_value, other.const_value
    if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return a is b or a.tobytes() == b.tobytes()


def _varying(plans: Sequence[Plan]) -> tuple[str, ...]:
    """Names of the small constants in which the plans differ."""
    first, large = plans[0].model.graph.initializers, set(_large(plans[0]))
    return tuple(
        name
        for name, value in first.items()
        if name not in large and any(not _equal(value, plan.model.graph.initializers[name]) for plan in plans[1:])
    )


def expose(
    model: ir.Model, planned: Sequence[ArenaTensor], varying: Sequence[str] = (), any_shape: bool = False
) -> None:
    """Put every planned value among the outputs of a model, for all shapes if several plans share it.

    What a Cast writes is one as well, whoever holds it: onnxruntime takes out Casts after Casts that aren't returned.
    """
    graph = model.graph
    outputs = {value.name for value in graph.outputs}
    by_name = {value.name: value for node in graph for value in node.outputs}
    casts = (node.outputs[0].name for node in graph if node.op_type == "Cast" and not node.domain)
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
