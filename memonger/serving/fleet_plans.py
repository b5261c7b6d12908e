"""What a fleet is told of the plans of a model, and has them loaded from: see `memonger.runtime.prepare_apart`."""

import hashlib
from collections.abc import Iterator, Sequence

import onnx_ir as ir

from memonger.devices import CPU
from memonger.errors import SessionError
from memonger.ir.element_types import ElementType
from memonger.ir.values import required_inputs, static_shape
from memonger.plan import LIMIT_MARGIN, Plan, is_sized_at_run_time, limit_of
from memonger.plan_file import graph_digest, weight_digests
from memonger.runtime import program
from memonger.runtime.arena import ArenaTensor
from memonger.runtime.prepare import check_stamp, device_of, prepare
from memonger.runtime.prepared import Prepared, SessionGroup, SessionRequest
from memonger.runtime.weights import LendRead
from memonger.serving.fleet_memory import Need, PlansOfModel


def prepare_model(
    plans: Sequence[Plan], wanted: SessionRequest
) -> tuple[PlansOfModel, Iterator[Prepared | SessionGroup]]:
    """What a fleet's model needs; then, as they are asked for, the plans and what each onnxruntime session is made of.

    Raises:
        SessionError: a plan keeps a state, or isn't for the CPU.
        PlanFileError, RuntimeUnavailableError: as `memonger.Session`.
    """
    for plan in plans:
        if plan.state:
            raise SessionError(
                f"{plan.name} keeps a state: a fleet's models don't, as anybody may run them. Make a Session."
            )
        device = device_of(plan, None)
        if not device.is_host:
            raise SessionError(f"{plan.name} is planned for {device}: a fleet runs on the CPU.")
        check_stamp(plan, device)
    graph, is_fixed = plans[0].model.graph, len(plans) == 1 and not wanted.pads and not plans[0].ranges
    model = PlansOfModel(
        key=_key(plans, wanted.pads),
        need=need_of(plans),
        inputs=tuple(str(value.name) for value in required_inputs(graph)),
        outputs={str(value.name): _tensor(value) if is_fixed else None for value in graph.outputs},
    )
    return model, _records(plans, wanted)


def _records(plans: Sequence[Plan], wanted: SessionRequest) -> Iterator[Prepared | SessionGroup]:
    # What is lent is memory of its own, which models share; weights that stay in files are shared as the file's pages
    lending = None if any(plan.window is not None for plan in plans) else LendRead()
    prepared, groups = prepare(plans, CPU, check_order=wanted.check_order, lending=lending)
    yield prepared
    yield from groups


def need_of(plans: Sequence[Plan]) -> Need:
    """What plans of one model need: weights of those that differ in shapes alone once, the largest of all else."""
    groups = [members[0] for members in program.alike(plans)] if len(plans) > 1 else [0]
    return Need(
        weights=sum(plans[index].kept_parameter_bytes for index in groups),
        session=max(plan.session_bytes or 0 for plan in plans),
        arena=max(plan.arena_bytes for plan in plans),
        workspace=max(plan.workspace_bytes or 0 for plan in plans),
        window=max((plan.window.nbytes for plan in plans if plan.window is not None), default=0),
        in_files=sum(plans[index].parameter_bytes - plans[index].kept_parameter_bytes for index in groups),
        own=_own(plans),
    )


def _own(plans: Sequence[Plan]) -> int | None:
    """What the plans' limits are, or where they have none, what a run showed: of those whose inputs decide sizes."""
    if not any(is_sized_at_run_time(plan.model) for plan in plans):
        return None
    limit = limit_of(plans)
    seen = max((plan.workspace_bytes or 0) + plan.run_time_bytes for plan in plans)
    return seen + LIMIT_MARGIN if limit is None else limit


def _tensor(value: ir.Value) -> ArenaTensor | None:
    shape = static_shape(value)
    return ArenaTensor(str(value.name), ElementType(value.dtype), shape) if shape is not None and value.dtype else None


def _key(plans: Sequence[Plan], pad: bool) -> str:
    """A digest of all that plans do: nodes, weights (as their files say, which was checked), addresses, device."""
    digest = hashlib.sha256(f"{pad};{len(plans)};".encode())
    for plan in plans:
        offsets = sorted((plan.graph.values[value], offset) for value, offset in plan.offsets.items())
        weights = sorted((plan.weight_digests or weight_digests(plan.model)).items())
        made_for = (plan.stamp, plan.threads, dict(plan.ranges))
        digest.update(repr((graph_digest(plan.model), weights, offsets, *made_for)).encode())
    return digest.hexdigest()
