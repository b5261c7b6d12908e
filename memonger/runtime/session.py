"""Runs planned models on onnxruntime with every planned value at its address in one arena."""

import reprlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from memonger.devices import CPU, GRAPHS, Device, parse_device
from memonger.errors import PlanFileError, SessionError, VerificationError
from memonger.graph.verify import verify
from memonger.model.operators import facts
from memonger.plan import Plan, graph_of
from memonger.runtime import feeds as feeding
from memonger.runtime import ort
from memonger.runtime.arena import Arena, check_host_memory
from memonger.runtime.backend import backend
from memonger.runtime.binding import Binding, input_memory
from memonger.runtime.chunked import ChunkedBinding, Copied, Stretch, cut_up, is_chunked
from memonger.runtime.engine import Engine
from memonger.runtime.padding import Padding, Smaller, is_smaller
from memonger.runtime.program import Group, Program, check_family, group_plans
from memonger.units import format_size, shown
from memonger.words import option

Threads = Literal["lock", "arena"]


class Session:
    """A planned model, ready to run; or one model planned for several input shapes, of which each run picks its own.

    Several plans share one arena, as large as the largest needs. Plans that differ in shapes only share one
    onnxruntime session as well, and so one copy of the weights. Plans with chunks don't: each has sessions of its own.

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
        cuda_graph: Whether runs on a CUDA device are captured once and replayed, which spares the launches: ``auto``
            where that can be (`cuda_graph` says whether it is), ``on`` or an error, ``off``.
        check_weights: False doesn't compare the weights of a planned file with the digests in it, which takes about a
            second for each gigabyte. A `Plan` was compared when it was read.
        pad: Take smaller batches as well, such as the last one of a data set: inputs are filled up with their last row
            to the next larger batch that there is a plan for, and outputs cut to the rows given. For models that
            compute each row alone. One with an output that doesn't begin with the batch is refused, and one whose
            rows meet (batch statistics, a mean over the batch) at its first smaller batch, which runs three times to
            find out: with zeros in place of the last row outputs have to be the same, bit for bit. What that doesn't
            show are rows that meet only for other inputs than those of this run, and rows of a model that draws random
            numbers, where no two runs agree.

    Raises:
        PlanFileError: a plan is bound to another machine, runtime or provider.
        VerificationError: a plan is wrong.
        RuntimeUnavailableError: no onnxruntime, or no such device.
        SessionError: onnxruntime refuses the model; the plans are of different models; ``pad`` can't be.
    """

    def __init__(
        self,
        plan: Plan | str | Path | Sequence[Plan | str | Path],
        *,
        device: str | Device | None = None,
        threads: Threads = "lock",
        intra_op_threads: int = 0,
        check_order: bool = True,
        cuda_graph: str = "auto",
        check_weights: bool = True,
        pad: bool = False,
    ) -> None:
        _check_threads(threads)
        check_graphs(cuda_graph)
        plans = _plans(plan, check_weights)
        self.device = device_of(plans[0], device)
        self._name, self._batches = plans[0].name, _batches(plans)
        for one in plans:
            check_stamp(one, self.device)
        if threads == "arena" and not self.device.is_host:
            raise SessionError("threads='arena' is for the CPU: on a CUDA device make a session for each thread.")
        threads_within = intra_op_threads or plans[0].threads
        check_room(plans, self.device)
        settings = plans[0].stamp.cuda if plans[0].stamp is not None else None

        def make_engine(group: Group, is_segment: bool) -> Engine:
            graphs = "off" if is_segment else cuda_graph
            return Engine(group, self.device, threads_within, check_order, settings, graphs, is_segment)

        self._runners = _runners(plans, self.device, make_engine)
        self._programs = tuple(runner.program for runner in self._runners)
        self._padding = _padding(plans, self._programs) if pad else None
        self._lock = threading.Lock()
        self._of_thread = threading.local()
        self._shared = self._bind() if threads == "lock" else None

    def __repr__(self) -> str:
        """As ``<Session densenet121 on cpu: batch 1, arena 6.89 MiB>``."""
        arena = max(program.arena_bytes for program in self._programs)
        return shown(f"<Session {self._name} on {self.device}: {self._batches}arena {format_size(arena)}>")

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the model's inputs."""
        return tuple(value.name for value in self._programs[0].inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the model's outputs, each once."""
        return self._programs[0].outputs

    @property
    def arena(self) -> Arena:
        """The arena this thread runs in."""
        return self._bindings()[0].arena

    @property
    def cuda_graph(self) -> bool:
        """Whether runs are captured as a CUDA graph and replayed."""
        return all(engine.captures for engine in self.engines)

    @property
    def why_no_cuda_graph(self) -> str:
        """What stands against it; empty where nothing does."""
        return next((engine.why_not for engine in self.engines if engine.why_not), "")

    @property
    def engines(self) -> tuple[Engine, ...]:
        """What runs the plans, each once."""
        return tuple(dict.fromkeys(engine for runner in self._runners for engine in runner.engines))

    def run(
        self, inputs: feeding.Feeds, outputs: Mapping[str, Any] | None = None, *, copy: bool = True
    ) -> dict[str, Any]:
        """Run the model once.

        Args:
            inputs: For each input a numpy array, an OrtValue, or whatever has ``__dlpack__`` (a tensor of PyTorch or
                CuPy): read where it lies if that is the session's device and it is contiguous.
            outputs: Arrays or tensors of yours that outputs are written to, by name. An input may be one of them. Where
                a run fails midway they may have been written to.
            copy: False returns what lies in the arena itself, valid until the next run begins: arrays, and on a CUDA
                device OrtValues, which ``torch.from_dlpack`` takes without a copy.

        Returns: the outputs by name, in the model's order.

        Raises:
            SessionError: a wrong name or type; a shape no plan was made for; the runtime failed; or it didn't follow
                the planned order.
        """
        inputs = feeding.in_place(inputs, self.device)
        given, outputs = outputs or {}, feeding.in_place(outputs or {}, self.device)
        smaller = self._padding.find(inputs) if self._padding is not None else None
        index = smaller.program if smaller is not None else self._pick(inputs)
        _check_targets(self._programs[index], outputs, smaller.rows if smaller is not None else None)
        engines = self._runners[index].engines
        for engine in engines:
            engine.check_usable()
        if self._shared is not None or any(engine.unchecked for engine in engines):
            with self._lock:
                return {**self._run_any(index, smaller, inputs, outputs, copy), **given}
        return {**self._run_any(index, smaller, inputs, outputs, copy), **given}

    def _run_any(
        self, index: int, smaller: Smaller | None, inputs: feeding.Feeds, outputs: Mapping[str, Any], copy: bool
    ) -> dict[str, Any]:
        if smaller is None or self._padding is None:
            return self._run(index, inputs, outputs, copy)
        if not copy and not self.device.is_host:
            raise SessionError("a batch that is filled up has its outputs cut on the host: leave out copy=False.")

        def run(filled: feeding.Feeds) -> dict[str, Any]:
            feeding.check_feeds(self._programs[index].inputs, filled, "the model")
            return self._run(index, filled, {}, copy)

        results = self._padding.run(smaller, inputs, run)
        for name, target in outputs.items():
            target[...] = results[name]
        return results

    def _run(self, index: int, inputs: feeding.Feeds, outputs: Mapping[str, Any], copy: bool) -> dict[str, Any]:
        binding = self._bindings()[index]
        binding.run(inputs, outputs)
        return binding.results(outputs, copy)

    def _pick(self, inputs: feeding.Feeds) -> int:
        if len(self._programs) == 1:
            try:
                feeding.check_feeds(self._programs[0].inputs, inputs, "the model")
            except SessionError as error:
                if self._padding is None and is_smaller(self._programs[0].inputs, inputs):
                    raise SessionError(f"{error} Or have smaller batches filled up ({option('pad', True)}).") from error
                raise
            return 0
        for index, program in enumerate(self._programs):
            if _fits(program, inputs):
                feeding.check_feeds(program.inputs, inputs, "the model")
                return index
        given = {name: list(feeding.shape_of(feed) or ()) for name, feed in inputs.items()}
        planned = [{v.name: list(v.shape or ()) for v in program.inputs} for program in self._programs]
        raise SessionError(f"no plan was made for the input shapes {given}; there are plans for {planned}.")

    def _bindings(self) -> Sequence[Binding | ChunkedBinding]:
        """The bindings of every plan into the arena this thread runs in."""
        if self._shared is not None:
            return self._shared
        bindings: Sequence[Binding | ChunkedBinding] | None = getattr(self._of_thread, "bindings", None)
        if bindings is None:
            bindings = self._of_thread.bindings = self._bind()
        return bindings

    def _bind(self) -> Sequence[Binding | ChunkedBinding]:
        """Every plan bound into one new arena: what one run at a time needs."""
        arena = backend(self.device).arena(max(program.arena_bytes for program in self._programs))
        memory = input_memory(self._programs, self.device)
        return [runner.bind(arena, memory) for runner in self._runners]


def _check_threads(threads: object) -> None:
    if threads not in ("lock", "arena"):
        raise SessionError(
            f"threads={threads!r} must be 'lock' or 'arena', which say how threads share a session; "
            "intra_op_threads is the number of threads within a node."
        )


def _plans(plan: Plan | str | Path | Sequence[Plan | str | Path], check_weights: bool) -> list[Plan]:
    """The plans of a session, each verified, all of one model."""
    given = [plan] if isinstance(plan, Plan | str | Path) else plan
    if not isinstance(given, Sequence) or not all(isinstance(one, Plan | str | Path) for one in given):
        kinds = "a plan, the path of a planned file, or a list of them"
        raise SessionError(f"a session is made of {kinds}, not of {reprlib.repr(plan)}.")
    plans = [verified(one, check_weights) for one in given]
    check_family(plans)
    return plans


def _batches(plans: Sequence[Plan]) -> str:
    """The batches planned for, in words."""
    batches = [str(one.batch) for one in plans if one.batch is not None]
    return f"batch{'es' if len(batches) > 1 else ''} {', '.join(batches)}, " if batches else ""


@dataclass(frozen=True, slots=True)
class _Runner:
    """What runs one plan: its program, its onnxruntime sessions, and a function that binds it into an arena."""

    program: Program
    engines: tuple[Engine, ...]
    bind: Callable[[Arena, Arena | None], Binding | ChunkedBinding]


def _runners(
    plans: Sequence[Plan], device: Device, make_engine: Callable[[Group, bool], Engine]
) -> tuple[_Runner, ...]:
    """What runs each plan. Those with chunks have sessions of their own; the others share them where they can."""
    found: dict[int, _Runner] = {}
    plain = [index for index, plan in enumerate(plans) if not (device.is_host and is_chunked(plan))]
    for index in sorted(set(range(len(plans))) - set(plain)):
        chunks = cut_up(plans[index])
        engines = tuple(make_engine(group, True) for group in chunks.groups)
        engines[-1].reserve()
        found[index] = _Runner(
            chunks.program, engines, partial(_bound_in_chunks, chunks.program, chunks.steps, engines)
        )
    for group in group_plans([plans[index] for index in plain]):
        engine = make_engine(group, False)
        for member, program in zip(group.members, group.programs, strict=True):
            found[plain[member]] = _Runner(program, (engine,), partial(_bound, program, engine))
    return tuple(found[index] for index in range(len(plans)))


def _bound_in_chunks(
    program: Program, steps: Sequence[Stretch | Copied], engines: Sequence[Engine], arena: Arena, _: Arena | None
) -> ChunkedBinding:
    return ChunkedBinding(program, steps, engines, arena)


def _bound(program: Program, engine: Engine, arena: Arena, inputs_at: Arena | None) -> Binding:
    return Binding(program, engine, arena, inputs_at=inputs_at)


def _padding(plans: Sequence[Plan], programs: Sequence[Program]) -> Padding:
    """What fills up batches for these plans."""
    draws = any(facts(node).random for plan in plans for node in plan.model.graph)
    return Padding(programs, [plan.batch for plan in plans], is_tried=not draws)


def _fits(program: Program, inputs: feeding.Feeds) -> bool:
    return all(
        value.shape is None or feeding.shape_of(inputs[value.name]) == value.shape
        for value in program.inputs
        if feeding.shape_of(inputs.get(value.name)) is not None
    )


def _check_targets(program: Program, outputs: Mapping[str, Any], rows: int | None) -> None:
    """Check what outputs are to be written to; ``rows``: how many of each are given, where a batch is filled up."""
    planned = {tensor.name: tensor for tensor in program.planned}
    for name, target in outputs.items():
        if name not in program.outputs:
            raise SessionError(f"the model has no output '{name}'; it has {', '.join(program.outputs)}.")
        tensor = planned.get(name)
        if tensor is None:
            raise SessionError(f"output '{name}' has no planned size, so it can't be written to a given array.")
        dtype, shape = feeding.described(target)
        wanted = tensor.shape if rows is None else (rows, *tensor.shape[1:])
        if rows is not None and not isinstance(target, np.ndarray):
            raise SessionError(f"output '{name}' of a batch that is filled up is written to arrays of the host alone.")
        if (dtype, shape) != (tensor.dtype, wanted):
            given = dtype.numpy() if dtype is not None else type(target).__name__
            raise SessionError(
                f"output '{name}' is {tensor.dtype.numpy()}{list(wanted)}, what was given for it is "
                f"{given}{list(shape or ())}."
            )
        if isinstance(target, np.ndarray) and not (target.flags.c_contiguous and target.flags.writeable):
            raise SessionError(f"the array given for output '{name}' has to be contiguous and writable.")


def check_graphs(choice: str) -> None:
    """Check that a way to use CUDA graphs is one of `memonger.devices.GRAPHS`.

    Raises:
        SessionError: it isn't.
    """
    if choice not in GRAPHS:
        raise SessionError(f"cuda_graph={choice!r} must be one of {', '.join(map(repr, GRAPHS))}.")


def check_room(plans: Sequence[Plan], device: Device) -> None:
    """Check that a device has room for what the plans need, before anything is allocated.

    Raises:
        SessionError: it says what is needed and for what, and what is free.
    """
    room = backend(device).room()
    arena, workspace = max(plan.arena_bytes for plan in plans), max(plan.workspace_bytes or 0 for plan in plans)
    if room is None:
        check_host_memory(arena, workspace)
        return
    parts = {
        "the arena": arena,
        "workspace": workspace,
        "parameters": max(plan.parameter_bytes for plan in plans),
        "inputs": max(plan.input_bytes for plan in plans),
    }
    if sum(parts.values()) > room.free:
        listed = ", ".join(f"{format_size(size)} for {name}" for name, size in parts.items() if size)
        raise SessionError(
            f"{device} has too little free memory: {format_size(sum(parts.values()))} are needed ({listed}), "
            f"{format_size(room.free)} of {format_size(room.total)} are free. Nothing was allocated. Plan for "
            f"less ({option('budget')}, a smaller {option('batch')}), or end what else uses the device "
            "(nvidia-smi lists it)."
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
    if stamp is None:
        _check_portable(plan, device)
        return
    here = {"provider": device.provider, "runtime": ort.runtime_name(), "machine": backend(device).machine_name()}
    for key, current in here.items():
        planned = getattr(stamp, key)
        if planned != current:
            raise PlanFileError(
                f"the plan is bound to another {key}: it was made for {planned}, this is {current}. Plan the model "
                f"again here ({option('device', str(device))}), or make a portable plan ({option('device', 'none')})."
            )


def _check_portable(plan: Plan, device: Device) -> None:
    """A portable plan shares addresses as CPU kernels allow it; those of a CUDA device allow less."""
    if device.provider == CPU.provider:
        return
    graph = graph_of(plan.model, plan.training, None, plan.workspace, plan.host, device)
    try:
        verify(graph, plan.offsets, plan.arena_bytes, plan.alignment)
    except VerificationError as error:
        raise PlanFileError(
            f"the portable plan can't run on {device}: {error} Plan the model for that device "
            f"({option('device', str(device))})."
        ) from error
