"""The intermediate values of a run, for who looks for the first one that is wrong: a planned run's, a stock run's."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from memonger.devices import Device
from memonger.ir.names import fresh
from memonger.ir.values import dense
from memonger.plan import Plan
from memonger.runtime import feeds as feeding
from memonger.runtime import ort
from memonger.runtime.arena import ArenaTensor
from memonger.runtime.backend import backend
from memonger.runtime.binding import input_memory
from memonger.runtime.engine import Engine
from memonger.runtime.executable import Executable, LoadedPlan
from memonger.runtime.partition import whole
from memonger.runtime.program import SessionGroup, expose, program_of
from memonger.runtime.store import Store
from memonger.runtime.weights import LEND_ALL
from memonger.units import MiB

AT_ONCE = 256 * MiB
"""Bytes of values that are kept beside one run. Where there are more, the model runs again for the next ones."""


def parts(plan: Plan, names: Collection[str]) -> Iterator[list[str]]:
    """Planned values among ``names`` in the order they are written, as many at a time as `AT_ONCE` takes."""
    graph, part, size = plan.graph, list[str](), 0
    for value in (value for writes in graph.writes for value in writes):
        if value not in plan.offsets or graph.values[value] not in names:
            continue
        if part and size + graph.sizes[value] > AT_ONCE:
            yield part
            part, size = [], 0
        part.append(graph.values[value])
        size += graph.sizes[value]
    if part:
        yield part


def planned_values(
    plan: Plan, names: Sequence[str], feeds: feeding.Feeds, device: Device, threads: int
) -> dict[str, np.ndarray]:
    """Run a plan, and copy values right after they were written: others may be written over them in the arena.

    The copies are made by a node behind each of these, and lie behind the arena. Inputs that persist in a training
    session are ordinary inputs here, with their defaults.

    Args:
        plan: Not verified: whoever looks for a fault may have one.
        names: Planned values.
        feeds: The inputs, as of `memonger.Session`.
        device: Where to run.
        threads: Threads within a node; 0 is the plan's own.

    Raises:
        SessionError: as `memonger.Session.run`.
    """
    program, model = program_of(plan), plan.model.clone()
    copies = _copies(model, names)
    store = Store((tensor for tensor in program.planned if tensor.name in copies), device)
    end = -(-plan.arena_bytes // plan.alignment) * plan.alignment
    arena = backend(device).arena(end + store.nbytes)
    kept = tuple(
        ArenaTensor(copies[name], tensor.dtype, tensor.shape, end + tensor.offset)
        for name, tensor in store.tensors.items()
    )
    program = replace(program, outputs=tuple(copies.values()), planned=(*program.planned, *kept))
    expose(model, program.planned)
    group = SessionGroup(model, (0,), (program,))
    cuda = plan.stamp.cuda if plan.stamp is not None else None
    engine = Engine(group, device, threads or plan.threads, False, cuda)
    loaded = LoadedPlan(program, (whole(program),), (engine,))
    executable = Executable(loaded, arena, inputs_at=input_memory([program], device))
    executable.run(executable.checked(feeds))
    found = executable.results({}, copy=True)
    return {name: found[copy] for name, copy in copies.items()}


def _copies(model: ir.Model, names: Sequence[str]) -> dict[str, str]:
    """Put a copying node behind each value, in place; the name of each copy."""
    graph, wanted, copies = model.graph, set(names), dict[str, str]()
    taken = {str(value.name) for node in graph for value in node.outputs} | {str(v.name) for v in graph.inputs}
    taken |= set(graph.initializers) | {str(node.name) for node in graph}
    model.opset_imports.setdefault("", 20)
    for node in list(graph):
        for value in node.outputs:
            if value.name not in wanted:
                continue
            name = fresh(f"{value.name}.seen", taken)
            copying = ir.Node("", "Identity", [value], name=name)
            copying.outputs[0].name, copying.outputs[0].type, copying.outputs[0].shape = name, value.type, value.shape
            graph.insert_after(node, copying)
            copies[str(value.name)] = name
    return copies


def stock_values(model: ir.Model, names: Sequence[str], feeds: feeding.Feeds, device: Device) -> dict[str, np.ndarray]:
    """Run a model on stock onnxruntime with nothing optimized, these values among its outputs.

    Raises:
        SessionError: onnxruntime refuses the model, or the run fails.
    """
    copy = model.clone()
    copy.metadata_props.clear()
    wanted = set(names)
    found = [value for node in copy.graph for value in node.outputs if value.name in wanted]
    copy.graph.outputs[:] = found
    session = ort.make_session(copy, device, ort.SessionSettings(lending=LEND_ALL, entries=ort.RUN_ONCE))
    fetched = [str(value.name) for value in found]
    return dict(zip(fetched, session.run(fetched, dict(feeds)), strict=True))


def values_of(model: ir.Model) -> set[str]:
    """Names of the values that nodes of a model write, ordinary tensors of whole bytes."""
    return {
        str(value.name)
        for node in model.graph
        for value in node.outputs
        if value.name
        and (value.type is None or (dense(value) and value.dtype is not None and value.dtype.bitwidth >= 8))
    }
