"""A plan's schedule cut into partitions: step spans, each of which one onnxruntime session runs.

Most plans are one partition. Three kinds aren't. A training step ends its first partition before anything that persists
is written over (`memonger.runtime.training_plans`). And a planned model with chunks has a copy of each node for every
chunk, with addresses of its own: in one session each copy of a product would prepack its weights again. Where that is
little (`memonger.graph.session_memory.shares_sessions`), all runs in one session nevertheless: each has threads of its
own, which have to wake up for each run. Where it isn't, the nodes of each chunk are a partition, and partitions of one
structure share a session, which is bound once for each of them. What cuts values into parts, and joins them, is copied
by numpy; a part that lies inside its whole isn't copied at all.

And a plan for a CUDA device may copy weights from the host while steps run that don't read them
(`memonger.graph.ahead`).
"""

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import onnx_ir as ir

from memonger.devices import parse_device
from memonger.graph.ahead import copies_ahead
from memonger.graph.aliasing import windows
from memonger.graph.session_memory import shares_sessions
from memonger.ir.element_types import ElementType
from memonger.ir.extract import extract
from memonger.ir.marks import CHUNK, without_slice
from memonger.ir.parts import elements, is_marked, parts_of
from memonger.ir.values import attribute_bytes, read_values, static_shape, subgraphs
from memonger.plan import Plan
from memonger.runtime.arena import ArenaTensor
from memonger.runtime.feeds import as_bytes
from memonger.runtime.prepared import (
    CopySchedule,
    CutPlan,
    HostBytes,
    HostCopy,
    PartCopy,
    Partition,
    Program,
    SessionGroup,
)
from memonger.runtime.program import is_cast, program_of
from memonger.runtime.weights import Lending, message


def partitions(
    model: ir.Model,
    program: Program,
    spans: Iterable[tuple[int, int]],
    *,
    shared: bool = False,
    fed: Collection[ir.Value] = (),
) -> Iterator[tuple[Partition, ir.Model | None]]:
    """The partitions of step spans, each made as it is asked for, with a model where it is the first of its session.

    Args:
        model: Its nodes are the schedule.
        program: Of the whole plan.
        spans: The first step of each and the step behind its last, ascending. What no node computes is an output of
            the first.
        shared: Whether those of one structure share a session. Slices of constants that may be fed are then: they are
            others for each chunk.
        fed: Constants that are inputs of all that read them, under their names; who binds them knows where they lie.
    """
    nodes = list(model.graph)
    planned = {tensor.name: tensor for tensor in program.planned}
    inputs = {value.name: value for value in program.inputs}
    written = {value: step for step, node in enumerate(nodes) for value in node.outputs}
    last_read = {value: step for step, node in enumerate(nodes) for value in read_values(node)}
    outputs = set(model.graph.outputs)
    unwritten = [value for value in model.graph.outputs if value not in written]
    sessions, constants = dict[Any, tuple[int, list[str]]](), dict[str, np.ndarray]()
    for begin, end in spans:
        inner = dict.fromkeys(value for node in nodes[begin:end] for value in node.outputs)
        read = dict.fromkeys([*unwritten, *(v for node in nodes[begin:end] for v in read_values(node))])
        slices = {v for v in read if shared and _is_slice_of_constant(v)}
        outer = [v for v in read if written.get(v, end) < begin or v.name in inputs or v in slices]
        exposed = [
            v
            for v in inner
            if v.name in planned or v in outputs or last_read.get(v, begin) >= end or is_cast(v.producer())
        ]
        exposed += unwritten
        key = _structure(nodes[begin:end], outer, inner, dict.fromkeys(exposed), planned) if shared else begin
        first = key not in sessions
        if first:
            sessions[key] = len(sessions), [str(value.name) for value in (*outer, *inner)]
        session, names = sessions[key]
        name_of = dict(zip((*outer, *inner), names, strict=True)) | {v: str(v.name) for v in unwritten}
        for value in slices:
            if value.name not in constants and value.const_value is not None:
                constants[str(value.name)] = np.array(value.const_value.numpy())
        held = [value for value in exposed if value.name not in planned]
        own = {str(value.name) for value in inner}
        part = replace(
            program,
            inputs=tuple(replace(inputs[str(v.name)], name=name_of[v]) for v in outer if v.name in inputs),
            outputs=tuple(name_of[v] for v in exposed if v.name in program.outputs or v.name not in planned),
            planned=tuple(planned[str(v.name)]._replace(name=name_of[v]) for v in inner if v.name in planned),
            constants={name_of[v]: constants[str(v.name)] for v in outer if v in slices},
            order=program.order[begin:end],
            first_update=max(0, program.first_update - begin),
            replacing=program.replacing & own,
        )
        partition = Partition(
            part,
            borrowed=tuple(planned[str(v.name)]._replace(name=name_of[v]) for v in outer if v.name in planned),
            live_ins={name_of[v]: str(v.name) for v in outer if v.name not in planned and v not in slices},
            live_outs={name_of[v]: str(v.name) for v in held},
            session=session,
        )
        yield partition, extract(model, nodes[begin:end], exposed, {*slices, *fed}) if first else None
        unwritten = []


def _structure(
    nodes: Sequence[ir.Node],
    outer: Sequence[ir.Value],
    inner: Iterable[ir.Value],
    exposed: Collection[ir.Value],
    planned: Collection[str],
) -> tuple[object, ...]:
    """The same for partitions that one session can run; weights are known by their names."""
    number: dict[ir.Value, int] = {value: index for index, value in enumerate((*outer, *inner))}
    return (
        tuple((v.dtype, static_shape(v), str(v.type)) for v in outer),
        tuple((v.name in planned, v in exposed, v.dtype, static_shape(v)) for v in inner),
        tuple(v.name for v in exposed if v not in inner),
        tuple(
            (
                node.op_identifier(), node.version, len(node.outputs),
                tuple(None if v is None else number.get(v, v.name) for v in node.inputs),
                tuple(attribute_bytes(attribute) for _, attribute in sorted(node.attributes.items())),
            )
            for node in nodes
        ),
    )  # fmt: skip


_ELEMENTWISE = frozenset(
    {"Add", "And", "Div", "Equal", "Expand", "Max", "Min", "Mul", "Or", "Pow", "ScatterND", "Sub", "Where"}
)
"""Operators whose kernels do the same for a constant input as for a computed one: nothing is packed beforehand."""

_FED = frozenset({ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.BOOL})


def _is_slice_of_constant(value: ir.Value) -> bool:
    """Whether it is a constant that was cut for its chunk, and may be fed: so that chunks can share a session."""
    name = str(value.name)
    if value.producer() is not None or value.const_value is None or without_slice(name) == name:
        return False
    readers = (user for user, _ in value.uses())
    return value.const_value.dtype in _FED and all(not one.domain and one.op_type in _ELEMENTWISE for one in readers)


def is_chunked(plan: Plan) -> bool:
    """Whether a plan has copies that are to share a session, and can: no node has subgraphs, no input a default."""
    graph = plan.model.graph
    if not shares_sessions(plan.model) or any(map(subgraphs, graph)):
        return False
    return not any(value.name in graph.initializers for value in graph.inputs)


def cut_chunks(plan: Plan, lending: Lending | None = None) -> CutPlan:
    """Cut a plan that is chunked: the nodes of one chunk each are a partition, and between them parts are copied.

    The models of its sessions are written when they are asked for. ``lending``: see `memonger.runtime.weights.message`.
    """
    program = program_of(plan)
    planned = {tensor.name: tensor for tensor in program.planned}
    inputs = {value.name for value in program.inputs}

    def mark_of(node: ir.Node) -> str | None:
        """What tells a node's partition from its neighbours; None for one that is a copy."""
        parts = parts_of(node) if is_marked(node) else ()
        copies = all(
            (part.whole.name in planned or (part.is_cut and part.whole.name in inputs))
            and part.part.name in planned
            and part.whole.dtype is not None
            and part.whole.dtype.bitwidth >= 8
            for part in parts
        )
        return None if parts and copies else node.metadata_props.get(CHUNK, "")

    def copies_of(node: ir.Node) -> Iterator[PartCopy]:
        """Not of the parts that lie inside their whole."""
        inside = {part: byte for part, _, byte in windows(node)}
        for one in parts_of(node):
            source, part = planned.get(str(one.whole.name), str(one.whole.name)), planned[str(one.part.name)]
            if isinstance(source, ArenaTensor) and part.offset - source.offset == inside.get(one.part):
                continue
            index = elements(one.axis, one.begin, one.begin + part.shape[one.axis])
            yield PartCopy(source, part, index, one.is_cut)

    spans, steps, end = list[tuple[int, int]](), list[PartCopy | None](), 0
    for mark, group in groupby(plan.model.graph, mark_of):
        nodes = list(group)
        begin, end = end, end + len(nodes)
        if mark is None:
            steps += [copy for node in nodes for copy in copies_of(node)]
        else:
            spans.append((begin, end))
            steps.append(None)
    found = list(partitions(plan.model, program, spans, shared=True))
    groups = (
        SessionGroup(message(model, lending), (0,), (one.program,), is_partition=True)
        for one, model in found
        if model is not None
    )
    in_order = iter(found)
    return CutPlan(program, tuple(next(in_order)[0] if step is None else step for step in steps), groups=groups)


def may_run_ahead(plan: Plan) -> bool:
    """Whether a session can copy weights of a plan ahead; otherwise nodes do so in order, whatever is marked.

    It can't where a step is trained, sizes or a state may change, bodies read weights, or the runtime holds values on
    the device by itself: those would have to be handed from session to session.
    """
    graph = plan.model.graph
    if parse_device(plan.device).is_host or plan.mode != "inference" or plan.ranges or plan.state or plan.run_time:
        return False
    if any(map(subgraphs, graph)) or any(value.name in graph.initializers for value in graph.inputs):
        return False
    return program_of(plan).is_accounted


def cut_ahead(plan: Plan, lending: Lending | None = None) -> CutPlan | None:
    """Cut a plan where weights are copied ahead of its steps; None where none is, or may be.

    The models of its sessions are written when they are asked for. ``lending``: see `memonger.runtime.weights.message`.
    """
    found = copies_ahead(plan.model, plan.host)
    if found is None or not may_run_ahead(plan):
        return None
    program = program_of(plan)
    planned = {tensor.name: tensor for tensor in program.planned}
    copies = list[HostCopy]()
    for node, begin, wait in found.copies:
        weight, place = node.inputs[0], planned.get(str(node.outputs[0].name))
        if weight is None or weight.const_value is None or place is None:
            return None
        source = _bytes_of(weight.const_value)
        copies.append(HostCopy(str(weight.name), place.offset, place.nbytes, source, begin, wait))
    fed = [
        (ArenaTensor(str(value.name), ElementType(tensor.dtype), tuple(tensor.shape.numpy())), _bytes_of(tensor))
        for value in found.fed
        if (tensor := value.const_value) is not None
    ]
    parts = list(partitions(plan.model, program, found.spans, fed=found.fed))
    groups = (
        SessionGroup(message(model, lending), (0,), (one.program,), is_partition=True)
        for one, model in parts
        if model is not None
    )
    ahead = CopySchedule(found.staging_bytes, tuple(copies), tuple(fed))
    return CutPlan(program, tuple(one for one, _ in parts), groups=groups, ahead=ahead)


def _bytes_of(tensor: ir.TensorProtocol) -> HostBytes:
    if isinstance(tensor, ir.ExternalTensor):
        return os.path.realpath(tensor.path), tensor.offset or 0
    return as_bytes(tensor.numpy()) if tensor.dtype.bitwidth >= 8 else np.frombuffer(tensor.tobytes(), np.uint8)
