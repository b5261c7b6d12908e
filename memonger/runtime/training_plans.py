"""Training plans, read for a trainer: who keeps what persists, and partitions that end where a step is looked at.

A step is cut before its first update, and where ranks begin and await a collective. By its first update the loss is
known, and the norm that gradients are clipped by. Whoever runs the step looks at them, and where they aren't finite the
partitions behind, with all updates in them, don't run: nothing in the model has to ask. Between two partitions the
gradients of a bucket lie where the engine of the ranks adds them up.
"""

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx
import onnx_ir as ir

from memonger.devices import Cuda, Device
from memonger.errors import SessionError
from memonger.graph.collectives import collectives_of, expanded
from memonger.graph.graph import needed_by
from memonger.ir.element_types import ElementType
from memonger.ir.operators import RANKS
from memonger.ir.tensors import content
from memonger.ir.training_roles import Training
from memonger.ir.values import dense, static_shape, subgraphs
from memonger.model import forward_model
from memonger.plan import Plan
from memonger.runtime import process_memory
from memonger.runtime.arena import Arena, ArenaTensor
from memonger.runtime.as_written import check_as_written
from memonger.runtime.detached import Detached, detach
from memonger.runtime.loaded_model import check_room
from memonger.runtime.partition import partitions
from memonger.runtime.prepare import check_stamp, device_of, reads_of, room_of, verified
from memonger.runtime.prepared import Bucket, CutPlan, PersistentPart, Program, SessionGroup
from memonger.runtime.program import inputs_of, program_of, without_defaults
from memonger.runtime.state_file import file_arena, in_files, store_of
from memonger.runtime.store import Store
from memonger.runtime.weights import message
from memonger.words import option

_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Shares:
    """What can be dealt out where several ranks share the optimizer's state (ZeRO, stage 1: Rajbhandari et al. 2020).

    The gradients of a bucket are dealt out in the order in which they lie, so that each rank's lie side by side, as
    near to equal bytes as whole tensors allow. A parameter and its optimizer state belong to the rank that has its
    gradient. ZeRO itself cuts tensors; here an update runs as it was planned, on whole ones.

    Attributes:
        buckets: Of each bucket its gradients in order: what they are for, parameters and their state, and their bytes.
    """

    buckets: tuple[tuple[tuple[tuple[str, ...], int], ...], ...]

    @staticmethod
    def of(plan: Plan, roles: Training) -> "Shares":
        """The shares of a plan; there are none in one without collectives."""
        graph, of_gradient = plan.graph, dict[str, list[str]]()
        for parameter, gradient in roles.whole_gradients.items():
            of_gradient.setdefault(gradient, []).append(parameter)
        found = []
        for each in (one for one in collectives_of(graph) if not one.is_mean):
            names = [(graph.values[graph.firsts[value]], graph.sizes[value]) for value in each.members]
            own = [
                (n if n in of_gradient else n.rpartition(".sent")[0], size) for n, size in names
            ]  # or copies of them
            found.append(tuple((_with_state(of_gradient[name], roles), size) for name, size in own))
        return Shares(tuple(found))

    def owners(self, size: int) -> dict[str, int]:
        """The rank that keeps each tensor, of so many ranks."""
        found = {}
        for members in self.buckets:
            for (names, _), owner in zip(members, _dealt([nbytes for _, nbytes in members], size), strict=True):
                found.update(dict.fromkeys(names, owner))
        return found

    def of_members(self, bucket: Bucket, size: int) -> list[int]:
        """The rank that gets each gradient of a bucket."""
        return _dealt([tensor.nbytes for tensor in bucket.members], size)


def _dealt(sizes: list[int], ranks: int) -> list[int]:
    """The rank of each of some sizes: that whose equal part of the whole has its middle."""
    total, begin, found = max(1, sum(sizes)), 0, []
    for size in sizes:
        found.append(min(ranks - 1, (2 * begin + size) * ranks // (2 * total)))
        begin += size
    return found


def _with_state(parameters: list[str], roles: Training) -> tuple[str, ...]:
    """Parameters, and the optimizer's tensors for them."""
    longest = sorted(roles.parameters, key=len, reverse=True)
    owner = {name: next((p for p in longest if name.startswith(f"{p}.")), None) for name in roles.state}
    return (*parameters, *(name for name, parameter in owner.items() if parameter in parameters))


@dataclass(frozen=True, slots=True)
class TrainingPlans:
    """What a trainer keeps of its plans: all that `read_plans` has written out, so that no model is kept.

    Attributes:
        roles: Of each plan.
        names: Of every persistent input.
        weights: Parameters and statistics, each rank's together, as they are before the first step.
        state: All else that persists, which can be given back between steps.
        cuts: The plans, cut into partitions.
        forward: The forward model, packed; ``frozen``: where its large weights are.
        cuda: How that provider is set up.
        rate: The default learning rate.
        loss_scale: That of the first step; None where the loss isn't scaled.
        arena_bytes: Of the largest arena.
        arena: That arena, where values of a step wait in a file behind it; else None, and it isn't made yet.
        digest: Of plans with collectives: equal for equal plans.
        whole: Every tensor of the whole state, by name, whoever keeps it.
        shares: Who keeps what where ranks share the optimizer's state; ``owners``: the rank that keeps each tensor.
    """

    roles: list[Training]
    names: tuple[str, ...]
    weights: Store
    state: Store
    cuts: list[CutPlan]
    forward: onnx.ModelProto | None
    frozen: forward_model.FrozenWeights | None
    device: Device
    cuda: Cuda
    name: str
    rate: float | None
    loss_scale: float | None
    threads: int
    arena_bytes: int
    arena: Arena | None
    digest: str
    whole: dict[str, ArenaTensor]
    shares: Shares
    owners: dict[str, int]


def read_plans(
    plan: Plan | str | Path,
    accumulation: Plan | str | Path | None,
    device: str | Device | None,
    share: tuple[int, int] | None,
    check_order: bool,
    folder: str | Path,
) -> Detached:
    """`TrainingPlans`, written out.

    Args:
        plan, accumulation, device, check_order: See `memonger.TrainingSession`.
        share: This rank and their number, where each updates a part of the parameters.
        folder: Where what is updated lies that the plans leave in a file.

    Raises:
        SessionError: the plans aren't for training, of different models, or for another device; the machine or the
            folder lacks room.
    """
    plans = [verified(one) for one in (plan, accumulation) if one is not None]
    process_memory.settle()  # what reading left would grow with what follows, and stay in part
    roles = [one.training for one in plans if one.training is not None and one.training.loss is not None]
    if len(roles) < len(plans):
        raise SessionError(
            "the plan is not of a training model with a loss: differentiate the model first "
            "(memonger.differentiate(model, loss=..., optimizer=...))."
        )
    first, where = plans[0], device_of(plans[0], device)
    for one in plans:
        check_stamp(one, where)
        if check_order:
            check_as_written(one, where)
    check_room(room_of(plans), where)
    cuda = first.stamp.cuda if first.stamp is not None and first.stamp.cuda is not None else Cuda()
    forward, frozen = forward_model.packed(forward_model.extract(first.model, first.name), first.files)
    shares = Shares.of(first, roles[0])
    owners = {} if share is None else shares.owners(share[1])
    others = {name for name, owner in owners.items() if share is not None and owner != share[0]}
    tensors = _persistent(plans, roles)
    accumulated = {name for own in roles for name in own.accumulated.values()}
    whole = {name: tensor for name, tensor in tensors.items() if name not in accumulated}
    states_of_others = others - set(roles[0].parameters)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in states_of_others}
    in_file = dict.fromkeys(name for one in plans for name in one.state_in_file)
    stores = _stores(first.model, roles[0], tensors, owners, where, in_file, folder)
    size, arena, places = max(one.arena_bytes for one in plans), None, in_files(*stores)
    waiting: list[dict[str, ArenaTensor]] = [{} for _ in plans]
    if any(one.values_in_file for one in plans) and hasattr(process_memory.libc(), "mmap"):
        arena, waiting = file_arena(size, [_waiting(one) for one in plans], folder, "values of a step")
    cuts = [
        cut_step(
            one, {*own.persistent, *own.scalars.values()},
            {new for old, new in own.updates.items() if old in others},
            places if arena is None else places | arena.places(laid.values()), laid.values(),
        )
        for one, own, laid in zip(plans, roles, waiting, strict=True)
    ]  # fmt: skip
    read = TrainingPlans(
        roles, tuple(tensors), *stores, cuts, forward, frozen, where, cuda, first.name,
        _default(first.model, roles[0], "learning_rate"), _default(first.model, roles[0], "loss_scale"), first.threads,
        size, arena, " ".join(map(plan_digest, plans)) if first.graph.collectives else "", whole, shares, owners,
    )  # fmt: skip
    kept = () if frozen is None else frozen.files
    return detach(read, arena, *(one.arena for one in stores), *kept)


def _waiting(plan: Plan) -> Iterator[ArenaTensor]:
    """What a plan's step makes that waits in a file."""
    of_name = {str(value.name): value for node in plan.model.graph for value in node.outputs}
    for name in plan.values_in_file:
        value = of_name[name]
        assert value.dtype is not None
        yield ArenaTensor(name, ElementType(value.dtype), static_shape(value) or ())


def cut_step(
    plan: Plan,
    own: Collection[str],
    left_out: Collection[str] = (),
    in_file: Mapping[str, tuple[str, int, int]] = MappingProxyType({}),
    waiting: Iterable[ArenaTensor] = (),
) -> CutPlan:
    """Cut a training plan, verified by the caller. Its models are messages, so that none is kept.

    Args:
        plan: The plan.
        own: Inputs that the session binds itself: the model's own defaults are left out.
        left_out: Outputs that another rank computes: what only they need doesn't run here.
        in_file: What is updated or waits in a file: see `memonger.runtime.state_file.in_files`.
        waiting: What waits there for later steps, where it lies behind the arena's memory.

    Raises:
        SessionError: the model can't be written for onnxruntime.
    """
    program, parts, model = program_of(plan), _persistent_parts(plan), without_defaults(plan.model, set(own))
    program = replace(program, planned=(*program.planned, *waiting))
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
        (partition, SessionGroup(message(part), (0,), (partition.program,), is_partition=True))
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
        reads=reads_of(plan, plan, in_file),
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
        tensor = ArenaTensor(graph.values[part], ElementType(value.dtype), static_shape(value) or (), byte)
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
        inputs=inputs_of(graph),
        outputs=tuple(dict.fromkeys(str(value.name) for value in graph.outputs if value.name in program.outputs)),
        planned=tuple(tensor for tensor in program.planned if tensor.name in written),
        order=order,
        first_update=sum(step[stands_for.get(name, name)] < program.first_update for name in order),
        replacing=program.replacing & written,
    )


def _steps(program: Program) -> dict[str, int]:
    return {name: step for step, name in enumerate(program.order)}


def _persistent(plans: Sequence[Plan], roles: Sequence[Training]) -> dict[str, ArenaTensor]:
    """Every persistent input of the plans, by name."""
    persistent: dict[str, ir.Value] = {}
    for plan, own in zip(plans, roles, strict=True):
        inputs = {str(value.name): value for value in plan.model.graph.inputs}
        for name in own.persistent:
            if name not in inputs:
                raise SessionError(f"the plan's training roles name '{name}', which is no input: differentiate again.")
            other = persistent.setdefault(name, inputs[name])
            if other.dtype != inputs[name].dtype or other.shape != inputs[name].shape:
                raise SessionError(f"the plans are of different models: '{name}' is of another type or shape.")
    if any(own.parameters != roles[0].parameters for own in roles):
        raise SessionError("the plans are of different models: their parameters differ.")
    if any((own.loss_weight is None) != (roles[0].loss_weight is None) for own in roles):
        raise SessionError("the plans are of different models: only one has a loss that labels say the mean of.")
    if len(plans) > 1 and not roles[0].accumulated:
        raise SessionError("an accumulation plan goes with one of a model differentiated with accumulate='apply'.")
    tensors = {}
    for name, value in persistent.items():
        shape = static_shape(value)
        if shape is None or value.dtype is None or not dense(value):
            raise SessionError(f"'{name}' persists, but its size is unknown: differentiate the model again.")
        tensors[name] = ArenaTensor(name, ElementType(value.dtype), shape)
    return tensors


def _stores(
    model: ir.Model, roles: Training, tensors: Mapping[str, ArenaTensor], owners: Mapping[str, int], device: Device,
    in_file: Mapping[str, object], folder: str | Path,
) -> tuple[Store, Store]:  # fmt: skip
    """Weights, each rank's together, and all else that persists; each with what it is before the first step.

    Raises:
        SessionError: a file for what is ``in_file`` can't be had in the folder, or ranks would share what is there.
    """
    if owners and not in_file.keys().isdisjoint(roles.parameters):
        raise SessionError(
            f"{model.graph.name} is planned for so little memory that parameters stay in a file, and ranks that share "
            f"the optimizer's state send them to each other: leave shard_optimizer out, or plan with a larger "
            f"{option('budget')}."
        )
    weights = dict.fromkeys((*sorted(roles.parameters, key=lambda name: owners.get(name, 0)), *roles.statistics))
    others = (tensor for name, tensor in tensors.items() if name not in weights)
    stores = (
        store_of((tensors[name] for name in weights), in_file, device, folder),
        store_of(others, in_file, device, folder),
    )
    for name in roles.persistent:
        start = model.graph.initializers.get(name)
        if name in tensors and start is not None and start.const_value is not None:  # else it begins as zeros
            _fill(stores[name not in weights], name, start.const_value)
    return stores


def _fill(store: Store, name: str, tensor: ir.TensorProtocol) -> None:
    """Write a weight's content. From a file it is read, not mapped: mapped pages would count as this process's.

    Raises:
        PlanFileError: it can't be read.
    """
    if isinstance(tensor, ir.ExternalTensor) and tensor.dtype.bitwidth >= 8:
        whole = np.frombuffer(b"".join(content(tensor)), tensor.dtype.numpy())
        store.fill(name, whole.reshape(tensor.shape.numpy()))
    else:
        store.fill(name, tensor.numpy())


def _default(model: ir.Model, roles: Training, role: str) -> float | None:
    """What a scalar is where a session isn't told."""
    value = model.graph.initializers.get(roles.scalars.get(role, ""))
    if value is None or value.const_value is None:
        return None
    if value.const_value.size != 1:
        raise SessionError(f"'{value.name}', the {role}, is {list(value.const_value.shape)}, not one number.")
    return float(value.const_value.numpy().item())


def plan_digest(plan: Plan) -> str:
    """A digest of what a plan runs and where everything lies, 64 hexadecimal digits."""
    record = plan.record()
    return hashlib.sha256(
        repr((record.graph_digest, record.arena_bytes, sorted(record.offsets.items()))).encode()
    ).hexdigest()
