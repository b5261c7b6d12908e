"""Runs planned models on onnxruntime with every planned value at its address in one arena."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from memonger.device import Device, parse_device
from memonger.errors import PlanFileError, RuntimeUnavailableError, SessionError
from memonger.plan import Plan
from memonger.runtime import feeds as feeding
from memonger.runtime import ort, profile
from memonger.runtime.arena import HostArena
from memonger.runtime.program import Group, Place, Program, check_family, group_plans
from memonger.scratch import ScratchFolder

Threads = Literal["lock", "arena"]


class Session:
    """A planned model, ready to run; or one model planned for several input shapes, of which each run picks its own.

    Several plans share one arena, as large as the largest needs. Plans that differ in shapes only share one
    onnxruntime session as well, and so one copy of the weights.

    The first run is profiled: if onnxruntime didn't execute the planned order, its results are not returned and the
    session refuses to run.

    Args:
        plan: A plan, the path of a planned file, or several. Each is verified before any address is used.
        device: Where to run; the plan's own device if None (the CPU for portable plans).
        threads: What threads that call `run` at once share. ``lock``: one arena, one run at a time. ``arena``: an
            arena a thread, freed when its thread ends.
        intra_op_threads: Threads within a node; 0 is the plan's own setting.
        check_order: False leaves out the check of the first run, which costs a profile of it (about 2 KB a node stay
            with the process): for a plan whose order was checked on this machine and runtime before.

    Raises:
        PlanFileError: a plan is bound to another machine, runtime or provider.
        VerificationError: a plan is wrong.
        RuntimeUnavailableError: no onnxruntime, or no such device.
        SessionError: onnxruntime refuses the model; the plans are of different models.
    """

    def __init__(
        self,
        plan: Plan | str | Path | Sequence[Plan | str | Path],
        *,
        device: str | Device | None = None,
        threads: Threads = "lock",
        intra_op_threads: int = 0,
        check_order: bool = True,
    ) -> None:
        if threads not in ("lock", "arena"):
            raise SessionError(f"threads={threads!r} can't be: 'lock' or 'arena'.")
        given = [plan] if isinstance(plan, Plan | str | Path) else list(plan)
        plans = [verified(one) for one in given]
        check_family(plans)
        self.device = device_of(plans[0], device)
        for one in plans:
            check_stamp(one, self.device)
        threads_within = intra_op_threads or plans[0].threads
        engines = [Engine(group, self.device, threads_within, check_order) for group in group_plans(plans)]
        placed = {
            index: (engine, program)
            for engine in engines
            for index, program in zip(engine.members, engine.programs, strict=True)
        }
        self._engines = tuple(placed[index][0] for index in range(len(plans)))
        self._programs = tuple(placed[index][1] for index in range(len(plans)))
        self._lock = threading.Lock()
        self._lanes = threading.local()
        self._shared = _Lane(self._programs, self._engines) if threads == "lock" else None

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the model's inputs."""
        return tuple(value.name for value in self._programs[0].inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the model's outputs, each once."""
        return self._programs[0].outputs

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
            SessionError: a wrong name or type; a shape no plan was made for; the runtime failed; or it didn't follow
                the planned order.
        """
        index = self._pick(inputs)
        program, engine = self._programs[index], self._engines[index]
        _check_targets(program, outputs or {})
        if engine.refused is not None:
            raise SessionError(engine.refused)
        if engine.unchecked or self._shared is not None:
            with self._lock:
                return self._lane().run(index, inputs, outputs or {}, copy)
        return self._lane().run(index, inputs, outputs or {}, copy)

    def _pick(self, inputs: feeding.Feeds) -> int:
        if len(self._programs) == 1:
            feeding.check_feeds(self._programs[0].inputs, inputs, "the model")
            return 0
        for index, program in enumerate(self._programs):
            if _fits(program, inputs):
                feeding.check_feeds(program.inputs, inputs, "the model")
                return index
        given = {name: list(feed.shape) for name, feed in inputs.items() if isinstance(feed, np.ndarray)}
        planned = [{v.name: list(v.shape or ()) for v in program.inputs} for program in self._programs]
        raise SessionError(f"no plan was made for the input shapes {given}; there are plans for {planned}.")

    def _lane(self) -> "_Lane":
        if self._shared is not None:
            return self._shared
        lane: _Lane | None = getattr(self._lanes, "lane", None)
        if lane is None:
            lane = self._lanes.lane = _Lane(self._programs, self._engines)
        return lane


class Engine:
    """An onnxruntime session, and whether it was seen to follow the planned order."""

    def __init__(self, group: Group, device: Device, threads: int, check_order: bool) -> None:
        self.members, self.programs = group.members, group.programs
        self.refused: str | None = None
        self._folder = ScratchFolder() if check_order else None
        profile_path = self._folder.path / "first_run" if self._folder is not None else None
        options = ort.Options(in_order=True, threads=threads, profile=profile_path)
        self.session = ort.make_session(group.model, device, options)
        ort.reserve_scratch(self.session, max(program.workspace_bytes for program in group.programs))

    @property
    def unchecked(self) -> bool:
        """Whether no run has been compared with the schedule yet."""
        return self._folder is not None

    def run(self, binding: Any) -> None:
        try:
            self.session.run_with_iobinding(binding)
        except Exception as error:  # pybind exceptions share no base class
            raise SessionError(f"onnxruntime failed: {str(error).strip()}") from error
        if self._folder is not None:
            self._check_order(self._folder)

    def _check_order(self, folder: ScratchFolder) -> None:
        """Compare the order the first run took with the schedule."""
        runs = profile.read_profile(Path(self.session.end_profiling()))
        folder.remove()
        self._folder = None
        program = self.programs[0]
        planned = [name for name in program.order if name not in program.unordered]
        executed = list(profile.executed_order(runs, program.unordered))
        if planned != executed:
            self.refused = _order_message(planned, executed)
            raise SessionError(self.refused)


class _Lane:
    """One arena and the bindings of every plan into it: what one run at a time needs."""

    def __init__(self, programs: Sequence[Program], engines: Sequence[Engine]) -> None:
        self.arena = HostArena(max(program.arena_bytes for program in programs))
        self.bindings = [_Binding(p, e, self.arena) for p, e in zip(programs, engines, strict=True)]

    def run(self, index: int, inputs: feeding.Feeds, outputs: Mapping[str, np.ndarray], copy: bool) -> dict[str, Any]:
        return self.bindings[index].run(inputs, outputs, copy)


class _Binding:
    """The values of one plan bound into an arena."""

    def __init__(self, program: Program, engine: Engine, arena: HostArena) -> None:
        self.program, self.engine, self.arena = program, engine, arena
        self.binding = engine.session.io_binding()
        self.kinds = {value.name: value.kind for value in program.inputs}
        self.required = {value.name for value in program.inputs if value.required}
        self.places = {place.name: place for place in program.places}
        self.held = [name for name in program.outputs if name not in self.places]
        self.elsewhere: set[str] = set()
        self.fed: set[str] = set()
        # Held outputs first: their place among the bound ones is where the results are read from.
        for name in self.held:
            self.binding.bind_output(name)
        for place in program.places:
            self._bind_output(place, arena.address + place.offset)
        places = [self.places[name] for name in program.outputs if name in self.places]
        self.views = {
            place.name: arena.view(place.offset, place.dtype.numpy(), place.shape)
            for place in places
            if place.dtype.bitwidth >= 8
        }

    def run(self, inputs: feeding.Feeds, outputs: Mapping[str, np.ndarray], copy: bool) -> dict[str, Any]:
        self._bind_inputs(inputs)
        for name in self.held:
            self.binding.bind_output(name)  # a fresh one: the last run's belongs to the caller
        for name in self.elsewhere - set(outputs):
            self._bind_output(self.places[name], self.arena.address + self.places[name].offset)
        for name, array in outputs.items():
            self._bind_output(self.places[name], array.ctypes.data)
        self.elsewhere = set(outputs)
        self.engine.run(self.binding)
        return self._results(outputs, copy)

    def _bind_output(self, place: Place, address: int) -> None:
        ort.bind_output(self.binding, place.name, place.dtype, place.shape, address)

    def _bind_inputs(self, inputs: feeding.Feeds) -> None:
        if self.fed != set(inputs):
            self.binding.clear_binding_inputs()
            for name, array in self.program.constants.items():
                self.binding.bind_ortvalue_input(name, feeding.to_ortvalue(array, None))
        self.fed = set(inputs)
        for name, feed in inputs.items():
            plain = isinstance(feed, np.ndarray) and feed.flags.c_contiguous and feed.dtype.kind in "biuf"
            if plain and name in self.required:  # this call knows no inputs with a default
                self.binding.bind_cpu_input(name, feed)
            else:
                self.binding.bind_ortvalue_input(name, feeding.to_ortvalue(feed, self.kinds[name]))

    def _results(self, outputs: Mapping[str, np.ndarray], copy: bool) -> dict[str, Any]:
        values = self.binding.get_outputs_as_ortvaluevector() if self.held else ()
        found: dict[str, Any] = {
            name: feeding.to_python(ort.wrap(values[index]), self.program.kinds.get(name))
            for index, name in enumerate(self.held)
        }
        for name in self.program.outputs:
            if name in outputs:
                found[name] = outputs[name]
            elif name in self.places and name not in self.views:
                raise SessionError(f"output '{name}' of type {self.places[name].dtype.name} can't be read as an array.")
            elif name not in found:
                found[name] = self.views[name].copy() if copy else self.views[name]
        return {name: found[name] for name in self.program.outputs}


def _fits(program: Program, inputs: feeding.Feeds) -> bool:
    return all(
        value.shape is None or tuple(inputs[value.name].shape) == value.shape
        for value in program.inputs
        if isinstance(inputs.get(value.name), np.ndarray)
    )


def _check_targets(program: Program, outputs: Mapping[str, np.ndarray]) -> None:
    places = {place.name: place for place in program.places}
    for name, array in outputs.items():
        if name not in program.outputs:
            raise SessionError(f"the model has no output '{name}'; it has {', '.join(program.outputs)}.")
        place = places.get(name)
        if place is None:
            raise SessionError(f"output '{name}' has no planned size, so it can't be written to a given array.")
        if array.shape != place.shape or array.dtype != place.dtype.numpy():
            raise SessionError(
                f"output '{name}' is {place.dtype.numpy()}{list(place.shape)}, the array given for it is "
                f"{array.dtype}{list(array.shape)}."
            )
        if not (array.flags.c_contiguous and array.flags.writeable):
            raise SessionError(f"the array given for output '{name}' has to be contiguous and writable.")


def verified(plan: Plan | str | Path) -> Plan:
    """The plan, checked; a file is checked as it is read."""
    if not isinstance(plan, Plan):
        return Plan.load(plan)
    plan.verify()
    return plan


def device_of(plan: Plan, device: str | Device | None) -> Device:
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


def _order_message(planned: Sequence[str], executed: Sequence[str]) -> str:
    step = next((i for i, (a, b) in enumerate(zip(planned, executed, strict=False)) if a != b), len(planned))
    wanted = planned[step] if step < len(planned) else "the end"
    ran = executed[step] if step < len(executed) else "the end"
    return (
        f"onnxruntime didn't run the planned order: at step {step} the plan has '{wanted}', it ran '{ran}' "
        f"({len(planned)} nodes planned, {len(executed)} run). Nothing was returned. Plan the model for this device "
        "(--device cpu), which takes over what the runtime inserts or inlines."
    )
