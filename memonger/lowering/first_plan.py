"""A plan before anything is measured, under which the calibrating run takes a fraction of the memory.

Unplanned, a training step holds on to most of what its forward pass computes until the backward pass has read it.
Computing that again takes a third longer and, of large networks, a tenth of the memory. So a step that would take far
more without runs under such a plan, and so does whatever a device has no room for otherwise.
"""

from collections.abc import Collection
from dataclasses import dataclass

import onnx_ir as ir

from memonger.devices import Device
from memonger.errors import LoadError
from memonger.graph.schedule import schedule_model
from memonger.ir import training_roles
from memonger.ir.model import Model
from memonger.ir.values import nbytes
from memonger.plan import graph_of
from memonger.runtime.arena import ArenaTensor
from memonger.runtime.program import arena_tensors, expose
from memonger.schedule import Request
from memonger.schedule.decide import decide
from memonger.schedule.marks import place
from memonger.schedule.solution import IN_SLICES
from memonger.shapes.inference import infer_once
from memonger.units import MiB

FEW = 512 * MiB
"""Bytes of values that an unplanned run may hold in any case."""

WELL_OVER = 2.0
"""A run that holds so many times the arena of a first plan isn't made without."""


@dataclass(frozen=True, slots=True)
class FirstPlan:
    """What runs in place of a model.

    Attributes:
        model: The model in the plan's order, what runs again included, with every planned value among its outputs.
        planned: Where these lie in the arena.
        arena_bytes: The arena's size.
        unplanned_bytes: The most that is alive at once where nothing runs again: an unplanned run holds no less.
        again: Names of the nodes that repeat others.
    """

    model: ir.Model
    planned: tuple[ArenaTensor, ...]
    arena_bytes: int
    unplanned_bytes: int
    again: frozenset[str]


def first_plan(model: Model, lowered: Model, device: Device, host: Collection[str] = ()) -> FirstPlan:
    """A plan with little memory that is found at once.

    Args:
        model: The model before it was lowered, which may say where its stages end.
        lowered: The same lowered, every node named. Not changed.
        device: Where it is to run.
        host: Names of values that lie in the host's memory though the model runs elsewhere.

    Raises:
        LoadError: sizes can't be inferred.
    """
    copy = Model(lowered.ir.clone(), "the optimized model")
    infer_once(copy)
    roles = training_roles.read(copy.ir, lowered.name)
    stages = place(model.ir, copy.ir, model.name).stages
    request = Request(graph_of(copy.ir, roles, None, None, host, device), stages=stages)
    strategies = ("none",) if roles is None else ("none", "sweep")
    found = (decide(request, strategy, "best", IN_SLICES) for strategy in strategies)
    solution = min(found, key=lambda one: one.arena_bytes)
    schedule_model(copy.ir, solution.schedule, solution.graph)
    planned = arena_tensors(copy.ir, solution.graph, solution.offsets)
    expose(copy.ir, planned)
    again = frozenset(name for name, first in zip(solution.graph.nodes, solution.graph.again, strict=True) if first)
    return FirstPlan(copy.ir, planned, solution.arena_bytes, request.peak_bytes, again)


def plan_if_well_over(model: Model, lowered: Model, device: Device) -> FirstPlan | None:
    """The first plan of a training step on the host; None where an unplanned run isn't well over it, or none is known.

    Args:
        model: The step before it was lowered, with its sizes.
        lowered: The same lowered.
        device: The host.
    """
    if not model.is_differentiated or sum(nbytes(v) or 0 for node in model.graph for v in node.outputs) < FEW:
        return None
    try:
        found = first_plan(model, lowered, device)
    except LoadError:
        return None
    return found if found.unplanned_bytes >= max(FEW, WELL_OVER * found.arena_bytes) else None
