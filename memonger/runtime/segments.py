"""A plan run in segments: onnxruntime sessions over one arena, each with a stretch of the schedule.

A training step has two. The first ends before anything that persists is written over: by then the loss is known, and
the norm that gradients are clipped by. Whoever runs the step looks at them, and where they aren't finite the second
segment, with all updates in it, doesn't run: nothing in the model has to ask.

A step with collectives is cut where one begins and where one is waited for as well: between two segments the gradients
of a bucket lie where the engine of the ranks adds them up.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from memonger.devices import Cuda
from memonger.errors import SessionError
from memonger.graph.collectives import collectives_of, expanded
from memonger.graph.graph import needed_by, read_values
from memonger.ir.operators import RANKS
from memonger.ir.values import static_shape, subgraphs
from memonger.plan import Plan
from memonger.runtime import feeds as feeding
from memonger.runtime import ort
from memonger.runtime.arena import Arena, ArenaTensor
from memonger.runtime.binding import Binding, input_memory, without_defaults
from memonger.runtime.engine import Engine
from memonger.runtime.program import Program, SessionGroup, expose, program_of
from memonger.runtime.store import Store
from memonger.runtime.weights import Message, message


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of a schedule as a model of its own.

    Attributes:
        model: Its nodes; what they read of earlier segments is an input.
        program: What of the plan's program is this segment's.
        received: Planned values of earlier segments that it reads, where they lie in the arena.
        handed: Names of values of earlier segments that it reads and onnxruntime holds.
    """

    model: ir.Model
    program: Program
    received: tuple[ArenaTensor, ...]
    handed: tuple[str, ...]


def segments_of(model: ir.Model, program: Program, cuts: Sequence[int]) -> Iterator[Segment]:
    """A model with every planned value among its outputs, cut before these steps; each segment made as it is asked for.

    Args:
        model: Its nodes are the schedule.
        program: Of the whole plan.
        cuts: Steps, ascending; the beginning and the end needn't be named.
    """
    steps = len(program.order)
    bounds = [0, *(cut for cut in dict.fromkeys(cuts) if 0 < cut < steps), steps]
    nodes = list(model.graph)
    written = {value: step for step, node in enumerate(nodes) for value in node.outputs}
    last_read = {value: step for step, node in enumerate(nodes) for value in read_values(node)}
    for begin, end in pairwise(bounds):
        read = dict.fromkeys(value for node in nodes[begin:end] for value in read_values(node))
        earlier = [value for value in read if written.get(value, end) < begin]
        own = [value for node in nodes[begin:end] for value in node.outputs]
        outputs = [value for value in model.graph.outputs if begin <= written.get(value, begin) < end]
        given = dict.fromkeys([*outputs, *(value for value in own if last_read.get(value, begin) >= end)])
        copy = _part(model, nodes[begin:end], earlier, list(given), {*read, *given})
        yield _segment(copy, replace(program, order=program.order[begin:end]), begin, earlier, own)


def _segment(
    model: ir.Model, program: Program, begin: int, earlier: Sequence[ir.Value], own: Sequence[ir.Value]
) -> Segment:
    """A segment of which the model is made.

    Args:
        model: The segment alone.
        program: Of the whole plan, but for the order.
        begin: Its first step.
        earlier: What it reads of earlier segments.
        own: What its nodes write.
    """
    written, names = {str(value.name) for value in own}, {str(value.name) for value in earlier}
    received = tuple(tensor for tensor in program.planned if tensor.name in names)
    handed = names - {tensor.name for tensor in received}
    planned = {tensor.name for tensor in program.planned}
    kept = [str(value.name) for value in model.graph.outputs if value.name not in planned]
    part = replace(
        program,
        inputs=tuple(value for value in feeding.inputs_of(model.graph) if value.name not in names),
        outputs=tuple(dict.fromkeys([*(v for v in program.outputs if v in written), *kept])),
        planned=tuple(tensor for tensor in program.planned if tensor.name in written),
        first_update=max(0, program.first_update - begin),
        replacing=program.replacing & written,
    )
    return Segment(model, part, received, tuple(sorted(handed)))


def _part(
    model: ir.Model, nodes: Sequence[ir.Node], earlier: Sequence[ir.Value], given: Sequence[ir.Value],
    used: Collection[ir.Value],
) -> ir.Model:  # fmt: skip
    """A copy of these nodes alone, with the model's inputs and initializers that are used."""
    graph = model.graph
    view = ir.GraphView(
        [*(value for value in graph.inputs if value in used), *earlier],
        given,
        nodes=nodes,
        initializers=[value for value in graph.initializers.values() if value in used],
        opset_imports=graph.opset_imports,
        name=graph.name,
    )
    return ir.Model(view.clone(), ir_version=model.ir_version, functions=tuple(model.functions.values()))


def _remove(graph: ir.Graph, nodes: Sequence[ir.Node]) -> None:
    """Take nodes out, with what their subgraphs read."""
    graph.remove(nodes)
    pending = list(nodes)
    while pending:
        node = pending.pop()
        for index in range(len(node.inputs)):
            node.replace_input_with(index, None)
        pending.extend(inner for subgraph in subgraphs(node) for inner in subgraph)


def _drop_unread(graph: ir.Graph) -> None:
    """Leave out inputs and initializers that nothing reads."""

    def is_read(value: ir.Value) -> bool:
        return bool(value.uses()) or value.is_graph_output()

    graph.inputs[:] = [value for value in graph.inputs if is_read(value)]
    for name in [name for name, value in graph.initializers.items() if not is_read(value)]:
        del graph.initializers[name]


@dataclass(frozen=True, slots=True)
class PersistentPart:
    """Bytes of what persists that are read, and may be written over, where they lie: no node cuts or joins them.

    Attributes:
        tensor: Their name and shape; the offset is the first byte in the whole.
        whole: Name of the input that they are a part of.
        new: Name of the output that is written over them; None where none is.
    """

    tensor: ArenaTensor
    whole: str
    new: str | None


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that lie side by side in the arena, and that ranks add up together.

    Attributes:
        members: Their places, in that order.
        begin: Number of the segment before which the collective begins: the gradients are whole then.
        wait: Number of the segment that reads the sums.
        is_mean: Whether it is no gradients, but a mean that all ranks need.
    """

    members: tuple[ArenaTensor, ...]
    begin: int
    wait: int
    is_mean: bool


class Exchange(Protocol):
    """What ranks do between segments."""

    def before(self, segment: int) -> None:
        """Called before each segment, and once behind the last one."""
        ...

    def give_up(self) -> None:
        """Called where the step ends before its updates: whatever has begun is to be waited for."""
        ...


@dataclass(frozen=True, slots=True)
class SegmentedPlan:
    """A plan cut into segments, without its model.

    Attributes:
        program: Of the whole plan.
        segments: Of each segment the program, what it receives and what it is handed.
        kept: Parts of what persists: see `PersistentPart`.
        models: Of each segment, to be loaded.
        settings: How the CUDA provider is set up.
        gate: Number of the segments that run before anything is updated.
        buckets: What ranks add up, in the order in which that begins.
    """

    program: Program
    segments: tuple[tuple[Program, tuple[ArenaTensor, ...], tuple[str, ...]], ...]
    kept: tuple[PersistentPart, ...]
    models: tuple[Message, ...]
    settings: Cuda | None
    gate: int
    buckets: tuple[Bucket, ...]


def cut(plan: Plan, own: Collection[str], left_out: Collection[str] = ()) -> SegmentedPlan:
    """Cut a training plan, verified by the caller, before its first update and at its collectives.

    Args:
        plan: The plan.
        own: Inputs that the session binds itself: the model's own defaults are left out.
        left_out: Outputs that another rank computes: what only they need doesn't run here.

    Raises:
        SessionError: the model can't be written for onnxruntime.
    """
    program, kept = program_of(plan), _kept(plan)
    whole = without_defaults(plan.model, set(own))
    expose(whole, program.planned)
    if kept:
        program = _without_parts(whole, program, kept)
    if left_out:
        program = _without_outputs(whole, program, left_out)
    program, step_of = _expanded(whole, program)
    collectives, nodes = collectives_of(plan.graph), plan.graph.nodes
    steps = [(step_of[nodes[each.begin]], step_of[nodes[each.wait]]) for each in collectives]
    parts = [
        (message(part.model), (part.program, part.received, part.handed))
        for part in segments_of(whole, program, sorted({program.first_update, *chain.from_iterable(steps)}))
    ]
    ends = list(accumulate(len(part.order) for _, (part, *_) in parts))
    place = {tensor.name: tensor for tensor in program.planned}
    buckets = tuple(
        Bucket(
            tuple(place[plan.graph.values[member]] for member in collective.members),
            bisect_right(ends, begin),
            bisect_right(ends, wait),
            collective.is_mean,
        )
        for collective, (begin, wait) in zip(collectives, steps, strict=True)
    )
    return SegmentedPlan(
        program=program,
        segments=tuple(record for _, record in parts),
        kept=kept,
        models=tuple(data for data, _ in parts),
        settings=plan.stamp.cuda if plan.stamp is not None else None,
        gate=max(1, bisect_right(ends, program.first_update)),
        buckets=buckets,
    )


def _without_outputs(model: ir.Model, program: Program, left_out: Collection[str]) -> Program:
    """Take out the nodes that only these outputs need; the nodes of collectives stay. The model is changed."""
    graph = model.graph
    wanted = needed_by(v for v in graph.outputs if v.name in program.outputs and v.name not in left_out)
    wanted |= needed_by(v for node in graph if node.domain == RANKS for v in node.outputs)
    gone = [node for node in graph if node not in wanted]
    names, written = {str(node.name) for node in gone}, {str(value.name) for node in gone for value in node.outputs}
    graph.outputs[:] = [value for value in graph.outputs if value.name not in written]
    _remove(graph, gone)
    _drop_unread(graph)
    return replace(
        program,
        inputs=feeding.inputs_of(graph),
        outputs=tuple(name for name in program.outputs if name not in written),
        planned=tuple(tensor for tensor in program.planned if tensor.name not in written),
        order=tuple(name for name in program.order if name not in names),
        first_update=program.first_update - sum(name in names for name in program.order[: program.first_update]),
        replacing=program.replacing - written,
    )


def _expanded(model: ir.Model, program: Program) -> tuple[Program, dict[str, int]]:
    """The program without the nodes of collectives, and the step before which each of them stood."""
    instead, gone = expanded(model)
    order, step_of = list[str](), dict[str, int]()
    first_update = 0
    for step, name in enumerate(program.order):
        first_update = len(order) if step == program.first_update else first_update
        step_of[name] = len(order)
        order += instead.get(name, (name,))
    if program.first_update == len(program.order):
        first_update = len(order)
    planned = tuple(tensor for tensor in program.planned if tensor.name not in gone)
    return replace(program, order=tuple(order), first_update=first_update, planned=planned), step_of


def _kept(plan: Plan) -> tuple[PersistentPart, ...]:
    """The parts and views of what persists, and its new content as a whole where parts of that were written."""
    graph, values = plan.graph, {str(v.name): v for node in plan.model.graph for v in node.outputs}
    new_of = {old: new for pairs in graph.updates for old, new in pairs}
    torn = {whole for part, whole, _ in graph.kept if part in new_of and whole in new_of}
    found = []
    for part, whole, byte in [*graph.kept, *((new_of[whole], whole, 0) for whole in sorted(torn))]:
        value, new = values[graph.values[part]], new_of.get(part)
        assert value.dtype is not None
        tensor = ArenaTensor(graph.values[part], value.dtype, static_shape(value) or (), byte)
        found.append(PersistentPart(tensor, graph.values[whole], None if new is None else graph.values[new]))
    return tuple(found)


def _without_parts(model: ir.Model, program: Program, kept: Sequence[PersistentPart]) -> Program:
    """Make parts inputs, and their new contents outputs; returns what of the program is left. The model is changed."""
    graph = model.graph
    values = {value.name: value for node in graph for value in node.outputs}
    gone = dict.fromkeys(values[part.tensor.name].producer() for part in kept)
    names = {str(node.name) for node in gone if node is not None}
    for part in kept:
        value = values[part.tensor.name]
        graph.inputs.append(ir.Value(name=value.name, type=value.type, shape=value.shape))
        graph.outputs[:] = [other for other in graph.outputs if other is not value]
        value.replace_all_uses_with(graph.inputs[-1])
    new = [part.new for part in kept if part.new is not None]
    graph.outputs.extend(values[name] for name in new)
    _remove(graph, [node for node in gone if node is not None])
    _drop_unread(graph)
    joined = {part.tensor.name for part in kept}
    return replace(
        program,
        inputs=feeding.inputs_of(graph),
        outputs=tuple(dict.fromkeys([*(name for name in program.outputs if name not in joined), *new])),
        order=tuple(name for name in program.order if name not in names),
        first_update=program.first_update - sum(name in names for name in program.order[: program.first_update]),
        replacing=program.replacing - joined,
    )


def _with_parts(
    fixed: Mapping[str, Store], updates: Mapping[str, str], kept: Sequence[PersistentPart]
) -> tuple[dict[str, Store], dict[str, str]]:
    """What persists, and what is written over it, parts included."""
    found, of_store = dict(fixed), dict[Store, list[ArenaTensor]]()
    for part in kept:
        store = fixed[part.whole]
        at = store.tensors[part.whole].offset + part.tensor.offset
        of_store.setdefault(store, []).append(part.tensor._replace(offset=at))
    for store, tensors in of_store.items():
        found |= dict.fromkeys((tensor.name for tensor in tensors), store.parts(tensors))
    return found, {**updates, **{part.tensor.name: part.new for part in kept if part.new is not None}}


class Segments:
    """A training plan ready to run, one segment after the other.

    Args:
        plan: What `cut` made of it, of these names: those of ``fixed`` and ``scalars``.
        arena: Where to run; its device is where.
        threads: Threads within a node.
        fixed: See `memonger.runtime.binding.Binding`.
        scalars: See there.
        updates: See there.
        check_order: Compare the order of the first run with the plan.

    Attributes:
        inputs: What the caller feeds.
        buckets: What ranks add up.
    """

    def __init__(
        self,
        plan: SegmentedPlan,
        arena: Arena,
        threads: int,
        *,
        fixed: Mapping[str, Store],
        scalars: Mapping[str, np.ndarray],
        updates: Mapping[str, str],
        check_order: bool,
    ) -> None:
        program, parts, kept, own = plan.program, plan.segments, plan.kept, {*fixed, *scalars}
        fixed, updates = _with_parts(fixed, updates, kept)
        self.fixed, self.arena, self._bindings = fixed, arena, list[Binding]()
        own |= {part.tensor.name for part in kept}
        self.inputs = tuple(value for value in program.inputs if value.name not in own)
        self._late = {old: tensor for old, new in updates.items() for tensor in program.planned if tensor.name == new}
        handed = {name for *_, names in parts for name in names}
        self._held = [handed.intersection(part.outputs) for part, *_ in parts]
        self._done, self._gate, self._runs = 0, plan.gate, False
        self.buckets = plan.buckets
        memory, pool = input_memory([replace(program, inputs=self.inputs)], arena.device), None
        limit = None if program.limit is None or not arena.device.is_host else ort.Limit(program.limit)
        with ort.making_sessions():
            for model, (part, received, _) in zip(plan.models, parts, strict=True):
                group = SessionGroup(model, (0,), (part,))
                engine = Engine(
                    group, arena.device, threads, check_order, plan.settings, is_segment=True, pool=pool, limit=limit
                )
                binding = Binding(
                    part, engine, arena, fixed=fixed, scalars=scalars, updates=updates, received=received,
                    inputs_at=memory,
                )  # fmt: skip
                self._bindings.append(binding)
                pool = engine.pool
        self._bindings[-1].engine.reserve()

    @property
    def engines(self) -> tuple[Engine, ...]:
        """What runs the segments, in order."""
        return tuple(binding.engine for binding in self._bindings)

    def segment_of(self, name: str) -> int:
        """The number of the segment that gives an output; 0 where none does."""
        return next((n for n, binding in enumerate(self._bindings) if name in binding.program.outputs), 0)

    def checked(self, inputs: feeding.Feeds) -> feeding.Feeds:
        """Inputs as `run` takes them.

        Raises:
            SessionError: a wrong name, type or shape; the plan doesn't run any more.
        """
        inputs = feeding.in_place(inputs, self.arena.device)
        feeding.check_feeds(self.inputs, inputs, "the model")
        for engine in self.engines:
            engine.check_usable()
        return inputs

    def run(self, inputs: feeding.Feeds, goes_on: Callable[[], bool], exchange: Exchange | None = None) -> None:
        """Run one segment after the other.

        Args:
            inputs: What `checked` returned.
            goes_on: Asked before anything is updated: where it says no, no more is run.
            exchange: What ranks do between segments; None where there is one rank alone.

        Raises:
            SessionError: the runtime failed, or didn't follow the planned order; see `changes_anything`.
        """
        self._done, self._runs = 0, False
        handed: dict[str, Any] = {}
        for binding, held in zip(self._bindings, self._held, strict=True):
            if exchange is not None:
                exchange.before(self._done)
            self._runs = True
            binding.run({i.name: inputs[i.name] for i in binding.inputs if i.name in inputs}, handed=handed)
            self._runs = False
            handed |= binding.held(held)
            self._done += 1
            if self._done == self._gate and not goes_on():
                if exchange is not None:
                    exchange.give_up()
                return
        if exchange is not None:
            exchange.before(self._done)
        for old, tensor in self._late.items():
            self.fixed[old].copy_in(old, self.arena.address + tensor.offset)

    @property
    def changes_anything(self) -> bool:
        """Whether the last run, which failed, may have written over what persists."""
        if not self._runs:  # between two segments
            return self._done > self._gate
        return self._done >= self._gate and self._bindings[self._done].changes_anything

    def result(self, name: str) -> np.ndarray:
        """An output of the last run, where it lies if that is the host: valid until the next run.

        Raises:
            SessionError: it belongs to a segment that wasn't run.
        """
        for binding in self._bindings[: self._done]:
            if name in binding.program.outputs:
                return binding.result(name)
        raise SessionError(f"there is no '{name}' of this step: it ended when its loss was seen.")

    def bind(self) -> None:
        """Bind everything to where it lies now: again after memory was given back and taken anew."""
        for binding in self._bindings:
            binding.bind()
