"""Plans made ready to be loaded: files are read and checked, models written for onnxruntime, and the rest let go.

What comes of it is plain data (`memonger.runtime.prepared`). Who has planned files and nothing of onnx loaded has this
done in a process of its own: see `memonger.runtime.prepare_apart`.
"""

import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType

import onnx_ir as ir

from memonger.devices import CPU, Device, parse_device
from memonger.errors import PlanError, PlanFileError, SessionError, VerificationError
from memonger.graph.verify import verify
from memonger.graph.weight_window import in_order, weight_reads
from memonger.ir.maps import maps_of
from memonger.ir.operators import facts
from memonger.ir.packed import packed_by_way
from memonger.model.kept_state import check_state, every_name
from memonger.plan import Plan, graph_of, limit_of
from memonger.runtime import ort
from memonger.runtime.as_written import check_as_written
from memonger.runtime.backend import backend
from memonger.runtime.partition import cut_ahead, cut_chunks, is_chunked
from memonger.runtime.prepared import (
    FileSpan,
    PlanBytes,
    Prepared,
    PreparedPlan,
    Program,
    ReadSchedule,
    SessionGroup,
    SessionRequest,
    WeightRead,
    whole,
)
from memonger.runtime.program import alike, check_family, programs_alike, session_model
from memonger.runtime.ranged import RangedProgram
from memonger.runtime.weights import Lending, message
from memonger.shapes.ranges import described
from memonger.words import option

Source = Plan | str | Path | Sequence[Plan | str | Path]


def prepare_session(plans: Sequence[Plan], wanted: SessionRequest) -> tuple[Prepared, Iterator[SessionGroup]]:
    """What a session of plans (`plans_of`) is made of; see `prepare`.

    Raises:
        SessionError, PlanFileError, RuntimeUnavailableError: as `memonger.Session`.
    """
    device = device_of(plans[0], wanted.device)
    for one in plans:
        check_stamp(one, device)
    return prepare(plans, device, check_order=wanted.check_order, state=_state(plans, wanted))


def prepare(
    plans: Sequence[Plan],
    device: Device,
    *,
    check_order: bool,
    state: Mapping[str, str] | None = None,
    lending: Lending | None = None,
) -> tuple[Prepared, Iterator[SessionGroup]]:
    """What plans of one model are loaded from.

    Args:
        plans: Verified, and for this device.
        device: Where they are to run.
        check_order: Check that onnxruntime adds no node to their models, see `memonger.runtime.as_written`.
        state: Of the only plan, input → the output that is its content in the next run.
        lending: Which weights sessions read where they lie; None: each has copies of all.

    Returns: the plans, and what each onnxruntime session is made of, which is written when it is asked for.

    Raises:
        SessionError: onnxruntime would add nodes to a model.
    """
    first, plans = plans[0], sorted(plans, key=lambda plan: bool(plan.ranges))
    for plan in plans if check_order else ():
        check_as_written(plan, device)
    found: dict[int, PreparedPlan] = {}
    groups: list[Iterable[SessionGroup]] = []
    mapped = dict(enumerate(plans))  # whose weights the session of each has
    for index, plan in enumerate(plans):
        if plan.ranges:
            ranged = RangedProgram(plan)
            found[index] = whole(ranged.base, plan.batch, ranged)
            groups.append(_numbered(ranged.groups(plan, lending), index))
        elif device.is_host and is_chunked(plan):
            cut = cut_chunks(plan, lending)
            found[index] = PreparedPlan(cut.program, cut.steps, plan.batch)
            groups.append(_numbered(cut.groups, index))
        elif len(plans) == 1 and not state and (cut_plan := cut_ahead(plan, lending)) is not None:
            found[index] = PreparedPlan(cut_plan.program, cut_plan.steps, plan.batch, ahead=cut_plan.ahead)
            groups.append(_numbered(cut_plan.groups, index))
    rest = [index for index in range(len(plans)) if index not in found]
    for places in alike([plans[index] for index in rest]):
        members = [rest[place] for place in places]
        varying, programs = programs_alike([plans[index] for index in members])
        for index, program in zip(members, programs, strict=True):
            found[index] = whole(program, plans[index].batch)
        groups.append(_shared(plans[members[0]], members, programs, varying, lending))
        mapped |= dict.fromkeys(members, plans[members[0]])
    batches = [str(one.batch) for one in plans if one.batch is not None and not one.ranges]
    said = [f"batch{'es' if len(batches) > 1 else ''} {', '.join(batches)}"] if batches else []
    prepared = Prepared(
        name=first.name,
        device=device,
        threads=first.threads,
        sizes=(*said, *(described(one.ranges) for one in plans if one.ranges)),
        plans=tuple(replace(found[index], reads=reads_of(plan, mapped[index])) for index, plan in enumerate(plans)),
        room=room_of(plans),
        cuda=plans[0].stamp.cuda if plans[0].stamp is not None else None,
        limit=limit_of(plans),
        state=dict(state or {}),
        maps=maps_of(first.model, first.name),
        draws=any(facts(node).random for plan in plans for node in plan.model.graph),
    )
    return prepared, chain.from_iterable(groups)


def reads_of(
    plan: Plan, mapped: Plan, state: Mapping[str, tuple[str, int, int]] = MappingProxyType({})
) -> ReadSchedule | None:
    """How the weights of a plan are read that stay in its file; None where all are in memory.

    Those of a plan for a CUDA device its nodes read: of it the files are known.

    Args:
        plan: The plan.
        mapped: The one whose file its session has: itself, or another that differs in shapes.
        state: Of what a step updates or makes that lies in a file: the file, its first byte there, and its bytes.

    Raises:
        SessionError: the plan isn't in a file.
    """
    if plan.window is None:
        names = plan.host_weights if mapped.weight_digests is not None else ()  # else nobody knows where they lie
        tensors = (mapped.model.graph.initializers[name].const_value for name in names)
        paths = (os.path.realpath(one.path) for one in tensors if isinstance(one, ir.ExternalTensor))
        found = tuple(dict.fromkeys(paths))
        return ReadSchedule(0, found, ()) if found else None
    if mapped.weight_digests is None and len(plan.state_in_file) + len(plan.values_in_file) < len(plan.window.weights):
        raise SessionError(
            f"{plan.name} is planned for less memory than its weights take: they stay in the plan's file, and this "
            "plan has none. Save it (plan.save('planned.onnx')), and make the session of that file."
        )
    named, files, reads = set(plan.window.weights), dict[str, int](), list[WeightRead]()
    digests = mapped.weight_digests or {}
    weights = mapped.model.graph.initializers
    copies = {  # onnxruntime finds them by content: equal weights have one
        (digests.get(name), way): one for name, value in weights.items() for way, one in packed_by_way(value).items()
    }
    waiting = set(plan.values_in_file)  # of which no step has made any yet
    for first, last, read in in_order(weight_reads(plan.model, plan.graph)):
        if read.name not in named or not read.resident:  # no step reads it, where a kernel has read it at load
            continue
        if read.updated or read.made:
            if read.name in state:  # else this system holds no window
                path, begin, length = state[read.name]
                span = FileSpan(files.setdefault(path, len(files)), begin, length, ahead=True)
                reads.append(WeightRead(first, last, span, read.resident, is_own=True, is_made=read.name in waiting))
                waiting.discard(read.name)
            continue
        tensor = weights[read.name].const_value
        if not isinstance(tensor, ir.ExternalTensor):
            raise PlanFileError(f"{plan.name}: its weight '{read.name}' is to stay in a file, and lies in none.")
        file, place = files.setdefault(os.path.realpath(tensor.path), len(files)), (tensor.offset or 0, tensor.nbytes)
        if read.transposed is not None and (packed := copies.get((digests.get(read.name), read.transposed))):
            place = packed.offset, packed.length
        reads.append(WeightRead(first, last, FileSpan(file, *place, ahead=read.whole), read.resident))
    return ReadSchedule(plan.window.nbytes, tuple(files), tuple(reads)) if reads else None


def _numbered(groups: Iterable[SessionGroup], number: int) -> Iterator[SessionGroup]:
    """The groups of one plan by its number."""
    return (replace(group, members=(number,)) for group in groups)


def _shared(
    plan: Plan, members: Sequence[int], programs: tuple[Program, ...], varying: Sequence[str], lending: Lending | None
) -> Iterator[SessionGroup]:
    """The one session of plans that are alike."""
    told = message(session_model(plan, programs[0], varying, len(members) > 1), lending)
    yield SessionGroup(told, tuple(members), programs)


def plans_of(plan: Source, check_weights: bool) -> list[Plan]:
    """The plans of a session, each verified, all of one model."""
    given = [plan] if isinstance(plan, Plan | str | Path) else plan
    if not isinstance(given, Sequence) or not all(isinstance(one, Plan | str | Path) for one in given):
        kinds = "a plan, the path of a planned file, or a list of them"
        raise SessionError(f"a session is made of {kinds}, not of {reprlib.repr(plan)}.")
    plans = [verified(one, check_weights) for one in given]
    check_family(plans)
    return plans


def _state(plans: Sequence[Plan], wanted: SessionRequest) -> Mapping[str, str]:
    """The state that is kept; a plan made for one has no other."""
    planned = plans[0].state
    state: Mapping[str, str] | None = None
    if wanted.state is not None:
        state = every_name(plans[0].model, wanted.state)
    if state is None or dict(state) == planned:
        state = planned
    elif planned:
        raise SessionError(f"the plan was made for the state {planned}, and keeps no other: leave state out.")
    else:
        try:
            check_state(plans[0].model, state, plans[0].ranges, plans[0].name)
        except PlanError as error:
            raise SessionError(str(error)) from error
    if not state:
        return {}
    if is_chunked(plans[0]):
        raise SessionError(
            f"chunks of {plans[0].name} share sessions, which keep no state: make the plan with it ({option('state')})."
        )
    if len(plans) > 1 or wanted.has_arenas or wanted.pads:
        reason = "one plan, threads='lock' and no pad"
        raise SessionError(f"a session that keeps a state takes {reason}: each stream needs a session of its own.")
    return state


def room_of(plans: Sequence[Plan]) -> PlanBytes:
    """What plans need of a device."""
    return PlanBytes(
        max(plan.arena_bytes for plan in plans),
        max(plan.workspace_bytes or 0 for plan in plans),
        max(plan.resident_parameter_bytes for plan in plans),
        max(plan.input_bytes for plan in plans),
    )


def verified(plan: Plan | str | Path, check_weights: bool = True) -> Plan:
    """The plan, checked; a file, and its weights if so asked, is checked as it is read."""
    if not isinstance(plan, Plan):
        return Plan.load(plan, check_weights=check_weights)
    plan.verify(check_weights=False)
    return plan


def device_of(plan: Plan, device: str | Device | None) -> Device:
    """Where to run a plan: the device given, or the plan's own; the CPU for portable plans."""
    chosen = parse_device(device if device is not None else plan.device)
    return CPU if chosen.facts.is_portable else chosen


def check_stamp(plan: Plan, device: Device) -> None:
    """Check that the plan was made for this runtime, provider and processor or GPU.

    Raises:
        PlanFileError: it names what differs.
        RuntimeUnavailableError: the device isn't there.
    """
    ort.check_device(device)
    stamp = plan.stamp
    if stamp is None:  # it shares addresses as CPU kernels allow it; those of a CUDA device allow less
        if device.provider != CPU.provider:
            graph = graph_of(plan.model, plan.training, None, plan.workspace, plan.host, device)
            try:
                verify(graph, plan.offsets, plan.arena_bytes, plan.alignment)
            except VerificationError as error:
                raise PlanFileError(
                    f"the portable plan can't run on {device}: {error} Plan the model for that device "
                    f"({option('device', str(device))})."
                ) from error
        return
    here = {"provider": device.provider, "runtime": ort.runtime_name(), "machine": backend(device).machine_name()}
    for key, current in here.items():
        planned = getattr(stamp, key)
        if planned != current:
            raise PlanFileError(
                f"the plan is bound to another {key}: it was made for {planned}, this is {current}. Plan the model "
                f"again here ({option('device', str(device))}), or make a portable plan ({option('device', 'none')})."
            )
