"""A training plan cut into partitions: before its first update, and where ranks begin and await a collective.

By the first update the loss is known, and the norm that gradients are clipped by. Whoever runs the step looks at them,
and where they aren't finite the partitions behind, with all updates in them, don't run: nothing in the model has to
ask. Between two partitions the gradients of a bucket lie where the engine of the ranks adds them up.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from types import MappingProxyType

import onnx_ir as ir

from memonger.graph.collectives import collectives_of, expanded
from memonger.graph.graph import needed_by
from memonger.ir.operators import RANKS
from memonger.ir.values import static_shape, subgraphs
from memonger.plan import Plan
from memonger.runtime import feeds as feeding
from memonger.runtime.arena import ArenaTensor
from memonger.runtime.partition import Bucket, CutPlan, PersistentPart, partitions
from memonger.runtime.program import Program, SessionGroup, program_of, without_defaults
from memonger.runtime.store import Store
from memonger.runtime.weights import message

_NOTHING: Mapping[str, str] = MappingProxyType({})


def cut_step(plan: Plan, own: Collection[str], left_out: Collection[str] = ()) -> CutPlan:
    """Cut a training plan, verified by the caller. Its models are messages, so that none is kept.

    Args:
        plan: The plan.
        own: Inputs that the session binds itself: the model's own defaults are left out.
        left_out: Outputs that another rank computes: what only they need doesn't run here.

    Raises:
        SessionError: the model can't be written for onnxruntime.
    """
    program, parts, model = program_of(plan), _persistent_parts(plan), without_defaults(plan.model, set(own))
    if parts:
        program = _without_parts(model, program, parts)
    if left_out:
        wanted = needed_by(v for v in model.graph.outputs if v.name in program.outputs and v.name not in left_out)
        wanted |= needed_by(v for node in model.graph if node.domain == RANKS for v in node.outputs)
        program = _without_nodes(model, program, [node for node in model.graph if node not in wanted])
    collectives, nodes, old_step = collectives_of(plan.graph), plan.graph.nodes, _steps(program)
    instead, _ = expanded(model)
    stands_for = {new: old for old, names in instead.items() for new in names}
    program = _fitted(model, program, stands_for)
    starts = [old_step[stands_for.get(name, name)] for name in program.order]
    ends_of = [[bisect_left(starts, old_step[nodes[step]]) for step in (each.begin, each.wait)] for each in collectives]
    bounds = sorted({0, program.first_update, *chain.from_iterable(ends_of), len(program.order)})
    found = [
        (partition, SessionGroup(message(part), (0,), (partition.program,)))
        for partition, part in partitions(model, program, pairwise(bounds))
        if part is not None
    ]
    ends = list(accumulate(len(partition.program.order) for partition, _ in found))
    place = {tensor.name: tensor for tensor in program.planned}
    buckets = tuple(
        Bucket(
            tuple(place[plan.graph.values[member]] for member in collective.members),
            bisect_right(ends, begin),
            bisect_right(ends, wait),
            collective.is_mean,
        )
        for collective, (begin, wait) in zip(collectives, ends_of, strict=True)
    )
    return CutPlan(
        program=program,
        steps=tuple(partition for partition, _ in found),
        groups=tuple(group for _, group in found),
        gate=max(1, bisect_right(ends, program.first_update)),
        parts=parts,
        buckets=buckets,
        cuda=plan.stamp.cuda if plan.stamp is not None else None,
    )


def with_parts(
    fixed: Mapping[str, Store], updates: Mapping[str, str], parts: Sequence[PersistentPart]
) -> tuple[dict[str, Store], dict[str, str]]:
    """What persists, and what is written over it, parts included."""
    found, of_store = dict(fixed), dict[Store, list[ArenaTensor]]()
    for part in parts:
        store = fixed[part.whole]
        at = store.tensors[part.whole].offset + part.tensor.offset
        of_store.setdefault(store, []).append(part.tensor._replace(offset=at))
    for store, tensors in of_store.items():
        found |= dict.fromkeys((tensor.name for tensor in tensors), store.parts(tensors))
    return found, {**updates, **{part.tensor.name: part.new for part in parts if part.new is not None}}


def _persistent_parts(plan: Plan) -> tuple[PersistentPart, ...]:
    """The parts and views of what persists, and its new content as a whole where parts of that were written."""
    graph, values = plan.graph, {str(v.name): v for node in plan.model.graph for v in node.outputs}
    new_of = {old: new for pairs in graph.updates for old, new in pairs}
    torn = {source for part, source, _ in graph.kept if part in new_of and source in new_of}
    found = []
    for part, source, byte in [*graph.kept, *((new_of[source], source, 0) for source in sorted(torn))]:
        value, new = values[graph.values[part]], new_of.get(part)
        assert value.dtype is not None
        tensor = ArenaTensor(graph.values[part], value.dtype, static_shape(value) or (), byte)
        found.append(PersistentPart(tensor, graph.values[source], None if new is None else graph.values[new]))
    return tuple(found)


def _without_parts(model: ir.Model, program: Program, parts: Sequence[PersistentPart]) -> Program:
    """Make parts inputs, and their new contents outputs; returns what of the program is left. The model is changed."""
    graph = model.graph
    values = {value.name: value for node in graph for value in node.outputs}
    gone = dict.fromkeys(values[part.tensor.name].producer() for part in parts)
    for part in parts:
        value = values[part.tensor.name]
        graph.inputs.append(ir.Value(name=value.name, type=value.type, shape=value.shape))
        graph.outputs[:] = [other for other in graph.outputs if other is not value]
        value.replace_all_uses_with(graph.inputs[-1])
    new = [part.new for part in parts if part.new is not None]
    graph.outputs.extend(values[name] for name in new)
    program = replace(program, outputs=tuple(dict.fromkeys([*program.outputs, *new])))
    return _without_nodes(model, program, [node for node in gone if node is not None])


def _without_nodes(model: ir.Model, program: Program, gone: Iterable[ir.Node]) -> Program:
    """Take nodes out of a model, with inputs and initializers that only they read; what of the program is left."""
    graph, pending = model.graph, list(gone)
    written = {value for node in pending for value in node.outputs}
    graph.outputs[:] = [value for value in graph.outputs if value not in written]
    graph.remove(pending)
    while pending:
        node = pending.pop()
        for index in range(len(node.inputs)):
            node.replace_input_with(index, None)
        pending.extend(inner for subgraph in subgraphs(node) for inner in subgraph)
    unread = {v for v in (*graph.inputs, *graph.initializers.values()) if not (v.uses() or v.is_graph_output())}
    graph.inputs[:] = [value for value in graph.inputs if value not in unread]
    for name in [name for name, value in graph.initializers.items() if value in unread]:
        del graph.initializers[name]
    return _fitted(model, program)


def _fitted(model: ir.Model, program: Program, stands_for: Mapping[str, str] = _NOTHING) -> Program:
    """A program of a model of which nodes were taken out, or stand for another one each: its name by theirs."""
    graph, step = model.graph, _steps(program)
    order = tuple(str(node.name) for node in graph)
    written = {value.name for node in graph for value in node.outputs}
    return replace(
        program,
        inputs=feeding.inputs_of(graph),
        outputs=tuple(dict.fromkeys(str(value.name) for value in graph.outputs if value.name in program.outputs)),
        planned=tuple(tensor for tensor in program.planned if tensor.name in written),
        order=order,
        first_update=sum(step[stands_for.get(name, name)] < program.first_update for name in order),
        replacing=program.replacing & written,
    )


def _steps(program: Program) -> dict[str, int]:
    return {name: step for step, name in enumerate(program.order)}
