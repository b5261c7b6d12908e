"""Runs a planned model on onnxruntime with every planned value at its address in one arena."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from memonger import shapes
from memonger.device import Device, parse_device
from memonger.errors import PlanFileError, RuntimeUnavailableError, SessionError
from memonger.plan import Plan
from memonger.runtime import feeds as feeding
from memonger.runtime import ort, profile
from memonger.runtime.arena import HostArena
from memonger.runtime.optimize import floating_names, inner_names
from memonger.scratch import ScratchFolder

Threads = Literal["lock", "arena"]


@dataclass(frozen=True, slots=True)
class _Planned:
    """A value bound into the arena: where, and as what."""

    name: str
    dtype: ir.DataType
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Program:
    """All a session keeps of a plan: not the model, whose weights onnxruntime holds by then."""

    inputs: tuple[feeding.Input, ...]
    outputs: tuple[str, ...]
    held_kinds: Mapping[str, ir.TypeProtocol | None]
    planned: tuple[_Planned, ...]
    order: tuple[str, ...]
    unordered: frozenset[str]
    arena_bytes: int


class Session:
    """A planned model, ready to run.

    The first run is profiled: if onnxruntime didn't execute the planned order, its results are not returned and the
    session refuses to run.

    Args:
        plan: A plan, or the path of a planned file. It is verified before any address is used.
        device: Where to run; the plan's own device if None (the CPU for portable plans).
        threads: What threads that call `run` at once share. ``lock``: one arena, one run at a time. ``arena``: an
            arena a thread, each of ``plan.arena_bytes``, freed when its thread ends.
        intra_op_threads: Threads within a node; 0 is the plan's own setting.

    Raises:
        PlanFileError: the plan is bound to another machine, runtime or provider.
        VerificationError: the plan is wrong.
        RuntimeUnavailableError: no onnxruntime, or no such device.
        SessionError: onnxruntime refuses the model.
    """

    def __init__(
        self,
        plan: Plan | str | Path,
        *,
        device: str | Device | None = None,
        threads: Threads = "lock",
        intra_op_threads: int = 0,
    ) -> None:
        if threads not in ("lock", "arena"):
            raise SessionError(f"threads={threads!r} can't be: 'lock' or 'arena'.")
        plan = plan if isinstance(plan, Plan) else Plan.load(plan)
        plan.verify()
        self.device = _device(plan, device)
        check_stamp(plan, self.device)
        self._program = _program(plan)
        self._profile: ScratchFolder | None = ScratchFolder()
        self._refused: str | None = None
        options = ort.Options(
            in_order=True,
            threads=intra_op_threads or plan.threads,
            profile=self._profile.path / "first_run",
        )
        self._session = ort.make_session(_exposed(plan.model, self._program.planned), self.device, options)
        self._lock = threading.Lock()
        self._lanes = threading.local()
        self._shared = _Lane(self._session, self._program) if threads == "lock" else None

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the model's inputs."""
        return tuple(value.name for value in self._program.inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the model's outputs, each once."""
        return self._program.outputs

    @property
    def arena(self) -> HostArena:
        """The arena this thread runs in."""
        return self._lane().arena

    def run(
        self, inputs: feeding.Feeds, outputs: Mapping[str, np.ndarray] | None = None, *, copy: bool = True
    ) -> dict[str, Any]:
        """Run the model once.

        Args:
            inputs: An array for each input, read where it lies if it is contiguous.
            outputs: Arrays of yours that outputs are written to directly, by name.
            copy: False returns arrays that lie in the arena itself: valid until the next run begins.

        Returns: the outputs by name, in the model's order.

        Raises:
            SessionError: a wrong name, shape or type; the runtime failed; or it didn't follow the planned order.
        """
        feeding.check_feeds(self._program.inputs, inputs, "the model")
        self._check_targets(outputs or {})
        if self._refused is not None:
            raise SessionError(self._refused)
        if self._profile is not None or self._shared is not None:
            with self._lock:
                return self._run(inputs, outputs or {}, copy)
        return self._run(inputs, outputs or {}, copy)

    def _run(self, inputs: feeding.Feeds, outputs: Mapping[str, np.ndarray], copy: bool) -> dict[str, Any]:
        lane = self._lane()
        lane.bind(inputs, outputs)
        try:
            self._session.run_with_iobinding(lane.binding)
        except Exception as error:  # pybind exceptions share no base class
            raise SessionError(f"onnxruntime failed: {str(error).strip()}") from error
        if self._profile is not None:
            self._check_order()
        return lane.results(outputs, copy)

    def _lane(self) -> "_Lane":
        if self._shared is not None:
            return self._shared
        lane: _Lane | None = getattr(self._lanes, "lane", None)
        if lane is None:
            lane = self._lanes.lane = _Lane(self._session, self._program)
        return lane

    def _check_order(self) -> None:
        """Compare the order the first run took with the schedule."""
        assert self._profile is not None
        runs = profile.read_profile(Path(self._session.end_profiling()))
        self._profile.remove()
        self._profile = None
        left_out = self._program.unordered
        planned = [name for name in self._program.order if name not in left_out]
        executed = list(profile.executed_order(runs, left_out))
        if planned != executed:
            self._refused = _order_message(planned, executed)
            raise SessionError(self._refused)

    def _check_targets(self, outputs: Mapping[str, np.ndarray]) -> None:
        planned = {value.name: value for value in self._program.planned}
        for name, array in outputs.items():
            if name not in self._program.outputs:
                raise SessionError(f"the model has no output '{name}'; it has {', '.join(self._program.outputs)}.")
            value = planned.get(name)
            if value is None:
                raise SessionError(f"output '{name}' has no planned size, so it can't be written to a given array.")
            if array.shape != value.shape or array.dtype != value.dtype.numpy():
                raise SessionError(
                    f"output '{name}' is {value.dtype.numpy()}{list(value.shape)}, the array given for it is "
                    f"{array.dtype}{list(array.shape)}."
                )
            if not (array.flags.c_contiguous and array.flags.writeable):
                raise SessionError(f"the array given for output '{name}' has to be contiguous and writable.")


class _Lane:
    """One arena and the bindings into it: what one run at a time needs."""

    def __init__(self, session: Any, program: _Program) -> None:
        self.program = program
        self.arena = HostArena(program.arena_bytes)
        self.binding = session.io_binding()
        self.kinds = {value.name: value.kind for value in program.inputs}
        self.places = {value.name: value for value in program.planned}
        self.held = [name for name in program.outputs if name not in self.places]
        self.elsewhere: set[str] = set()
        self.fed: set[str] = set()
        # Held outputs first: their place among the bound ones is where the results are read from.
        for name in self.held:
            self.binding.bind_output(name)
        for value in program.planned:
            self._bind_to_arena(value)

    def _bind_to_arena(self, value: _Planned) -> None:
        self._bind(value, self.arena.address + value.offset)

    def _bind(self, value: _Planned, address: int) -> None:
        self.binding.bind_output(value.name, "cpu", 0, ort.enum_of(value.dtype), list(value.shape), address)

    def bind(self, inputs: feeding.Feeds, outputs: Mapping[str, np.ndarray]) -> None:
        if self.fed - set(inputs):
            self.binding.clear_binding_inputs()
        self.fed = set(inputs)
        for name, feed in inputs.items():
            self.binding.bind_ortvalue_input(name, feeding.to_ortvalue(feed, self.kinds[name]))
        for name in self.held:
            self.binding.bind_output(name)  # a fresh one: the last run's belongs to the caller
        for name in self.elsewhere - set(outputs):
            self._bind_to_arena(self.places[name])
        for name, array in outputs.items():
            self._bind(self.places[name], array.ctypes.data)
        self.elsewhere = set(outputs)

    def results(self, outputs: Mapping[str, np.ndarray], copy: bool) -> dict[str, Any]:
        values = self.binding.get_outputs_as_ortvaluevector() if self.held else ()
        found: dict[str, Any] = {
            name: feeding.to_python(ort.wrap(values[index]), self.program.held_kinds.get(name))
            for index, name in enumerate(self.held)
        }
        for name in self.program.outputs:
            if name in found:
                continue
            if name in outputs:
                found[name] = outputs[name]
                continue
            place = self.places[name]
            array = _array(self.arena, place)
            found[name] = array.copy() if copy else array
        return {name: found[name] for name in self.program.outputs}


def _array(arena: HostArena, place: _Planned) -> np.ndarray:
    if place.dtype.bitwidth < 8:
        raise SessionError(f"output '{place.name}' of type {place.dtype.name} can't be read as an array.")
    return arena.view(place.offset, place.dtype.numpy(), place.shape)


def _device(plan: Plan, device: str | Device | None) -> Device:
    chosen = parse_device(device if device is not None else plan.device)
    return parse_device("cpu") if chosen.kind == "none" else chosen


def check_stamp(plan: Plan, device: Device) -> None:
    """The plan was made for this runtime, provider and processor.

    Raises:
        PlanFileError: it names what differs.
        RuntimeUnavailableError: sessions on the device aren't built yet.
    """
    if device.kind != "cpu":
        raise RuntimeUnavailableError(f"sessions on {device} are not supported yet: run on the CPU (--device cpu).")
    stamp = plan.stamp
    if stamp is None:
        return
    here = {"runtime": ort.runtime_name(), "provider": device.provider, "machine": ort.machine_digest()}
    for key, found in here.items():
        planned = getattr(stamp, key)
        if planned != found:
            raise PlanFileError(
                f"the plan is bound to another {key}: it was made for {planned}, this is {found}. Plan the model again "
                "here, or make a portable plan (--device none)."
            )


def _program(plan: Plan) -> _Program:
    graph = plan.model.graph
    return _Program(
        inputs=feeding.inputs_of(graph),
        outputs=tuple(dict.fromkeys(str(value.name) for value in graph.outputs)),
        held_kinds={str(value.name): value.type for value in graph.outputs},
        planned=_planned_values(plan),
        order=plan.graph.nodes,
        unordered=frozenset(inner_names(plan.model) | floating_names(plan.model)),
        arena_bytes=plan.arena_bytes,
    )


def _planned_values(plan: Plan) -> tuple[_Planned, ...]:
    by_name = {str(v.name): v for node in plan.model.graph for v in node.outputs}
    found = []
    for number, offset in plan.offsets.items():
        value = by_name[plan.graph.values[number]]
        dims = shapes.static_shape(value)
        assert dims is not None
        assert value.dtype is not None
        found.append(_Planned(str(value.name), value.dtype, dims, offset))
    return tuple(found)


def _exposed(model: ir.Model, planned: tuple[_Planned, ...]) -> ir.Model:
    """The model with every planned value among its outputs."""
    copy = model.clone()
    outputs = {value.name for value in copy.graph.outputs}
    by_name = {value.name: value for node in copy.graph for value in node.outputs}
    copy.graph.outputs.extend(by_name[value.name] for value in planned if value.name not in outputs)
    copy.metadata_props.clear()
    return copy


def _order_message(planned: list[str], executed: list[str]) -> str:
    step = next((i for i, (a, b) in enumerate(zip(planned, executed, strict=False)) if a != b), len(planned))
    wanted = planned[step] if step < len(planned) else "the end"
    ran = executed[step] if step < len(executed) else "the end"
    return (
        f"onnxruntime didn't run the planned order: at step {step} the plan has '{wanted}', it ran '{ran}' "
        f"({len(planned)} nodes planned, {len(executed)} run). Nothing was returned. Plan the model for this device "
        "(--device cpu), which takes over what the runtime inserts or inlines."
    )
