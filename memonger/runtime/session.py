"""Runs planned models on onnxruntime with every planned value at its address in one arena."""

import reprlib
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from memonger.devices import CPU, GRAPHS, Device, parse_device
from memonger.errors import PlanError, PlanFileError, SessionError, VerificationError
from memonger.graph.verify import verify
from memonger.ir.maps import as_maps, maps_of
from memonger.model.kept_state import check_state, every_name
from memonger.plan import Plan, graph_of
from memonger.runtime import feeds as feeding
from memonger.runtime import ort, process_memory
from memonger.runtime.arena import Arena, check_host_memory
from memonger.runtime.backend import backend
from memonger.runtime.engine import Engine
from memonger.runtime.execution_context import ExecutionContext, IdleRelease
from memonger.runtime.loaded_model import LoadedModel
from memonger.runtime.program import check_family
from memonger.shapes.ranges import described
from memonger.units import format_size, shown
from memonger.words import option

Threads = Literal["lock", "arena"]


class Session:
    """A planned model, ready to run; or one model planned for several input shapes, of which each run picks its own.

    Several plans share one arena, as large as the largest needs. Plans that differ in shapes only share one
    onnxruntime session as well, and so one copy of the weights. Plans with chunks, and for ranges of sizes, don't: each
    has sessions of its own. What a plan for its sizes alone takes, one for ranges doesn't run; of several such plans
    whose ranges meet the first given runs.

    The first run is profiled: if onnxruntime didn't execute the planned order, its results are not returned and the
    session refuses to run.

    Args:
        plan: A plan, the path of a planned file, or several. Each is verified before any address is used.
        device: Where to run; the plan's own device if None (the CPU for portable plans).
        threads: What threads that call `run` at once share. ``lock``: one arena, one run at a time. ``arena``: an
            arena a thread, freed when its thread ends.
        intra_op_threads: Threads within a node; 0 is the plan's own setting.
        check_order: False leaves out the check of the first run, which costs a profile of it (about 2 KB a node stay
            with the process): for a plan whose order was checked on this machine and runtime before. A model with a
            loop is checked before it runs, by what onnxruntime would run, and isn't profiled.
        cuda_graph: Whether runs on a CUDA device are captured once and replayed, which spares the launches: ``auto``
            where that can be (`cuda_graph` says whether it is), ``on`` or an error, ``off``.
        check_weights: False doesn't compare the weights of a planned file with the digests in it, which takes about a
            second for each gigabyte. A `Plan` was compared when it was read.
        pad: Take smaller batches as well, such as the last one of a data set: inputs are filled up with their last row
            to the next larger batch that there is a plan for, and outputs cut to the rows given. With ranges of sizes
            so is what lies between their steps, or below them, along every axis. For models that compute each row
            alone. One with an output that doesn't begin with the batch is refused, and one whose
            rows meet (batch statistics, a mean over the batch) at its first smaller batch, which runs three times to
            find out: with zeros in place of the last row outputs have to be the same, bit for bit. What that doesn't
            show are rows that meet only for other inputs than those of this run, and rows of a model that draws random
            numbers, where no two runs agree.
        idle_release: Seconds after the last run at which `release` is called; None: never.
        state: Inputs that the session keeps, and which output each becomes for the next run: ``{"h": "h_next"}``. They
            are zero at first, needn't be given (one that is given replaces what was kept), and their outputs aren't
            returned: see `state_dict`. None: what the plan was made for (``search_plan(state=...)``), whose kernels
            write it in place where they may; else two buffers swap. With ranges of sizes it has the shape that its
            output had: a cache begins with the smallest length, and grows by what each run appends.

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
        idle_release: float | None = None,
        state: Mapping[str, str] | None = None,
    ) -> None:
        if threads not in ("lock", "arena"):
            raise SessionError(
                f"threads={threads!r} must be 'lock' or 'arena', which say how threads share a session; "
                "intra_op_threads is the number of threads within a node."
            )
        check_graphs(cuda_graph)
        plans = plans_of(plan, check_weights)
        self.device = device_of(plans[0], device)
        self._name = plans[0].name
        batches = [str(one.batch) for one in plans if one.batch is not None and not one.ranges]
        said = [f"batch{'es' if len(batches) > 1 else ''} {', '.join(batches)}"] if batches else []
        self._batches = [*said, *(described(one.ranges) for one in plans if one.ranges)]
        self._maps = maps_of(plans[0].model, self._name)
        for one in plans:
            check_stamp(one, self.device)
        if threads == "arena" and not self.device.is_host:
            raise SessionError("threads='arena' is for the CPU: on a CUDA device make a session for each thread.")
        check_room(plans, self.device)
        self._model = LoadedModel(
            plans, self.device, threads=intra_op_threads or plans[0].threads, check_order=check_order,
            cuda_graph=cuda_graph, pad=pad, state=_state(plans, state, threads, pad),
        )  # fmt: skip
        del plans, one
        process_memory.settle()  # what reading the plan took, and onnxruntime to make its sessions
        self._of_thread, self._contexts = threading.local(), weakref.WeakSet[ExecutionContext]()
        self._making = threading.Lock()  # held while a context is made, which `close` has to know of
        self._shared = self._new_context() if threads == "lock" else None
        self._idle = IdleRelease(self, idle_release)

    def __repr__(self) -> str:
        """As ``<Session densenet121 on cpu: batch 1, arena 6.89 MiB>``."""
        figures = ", ".join([*self._batches, f"arena {format_size(self._model.arena_bytes)}"])
        return shown(f"<Session {self._name} on {self.device}: {figures}>")

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the model's inputs."""
        return tuple(value.name for value in self._model.programs[0].inputs)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the model's outputs, each once."""
        return self._model.programs[0].outputs

    @property
    def state(self) -> Mapping[str, str]:
        """Inputs that the session keeps, and the output that each becomes for the next run."""
        return {} if self._model.kept is None else dict(self._model.kept.state)

    @property
    def arena(self) -> Arena:
        """The arena this thread runs in."""
        return self._context().arena

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
        return self._model.engines

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

        Returns: the outputs by name, in the model's order. What stock onnxruntime gives as a list of dictionaries
            (``ZipMap``) is that here, and in ``outputs`` and with ``copy=False`` the table that it is made of.

        Raises:
            SessionError: a wrong name or type; a shape no plan was made for; the runtime failed; or it didn't follow
                the planned order.
        """
        with self._idle:
            results = self._context().run(self._model, inputs, outputs, copy)
        if self._maps and copy:
            made = {name: keys for name, keys in self._maps.items() if name not in (outputs or {})}
            results |= {name: as_maps(results[name], keys) for name, keys in made.items()}
        return results

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of what is kept between runs, by the inputs' names; empty without a state.

        Raises:
            SessionError: it was lost in a run that failed.
        """
        return {} if self._model.kept is None else self._model.kept.arrays()

    def load_state_dict(self, tensors: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, or some of it; all of it is taken or nothing.

        Raises:
            SessionError: it names what is no state, or of another type or shape.
        """
        if self._model.kept is None:
            raise SessionError(f"this session keeps no state: make one with {option('state', {'h': 'h_next'})}.")
        self._model.kept.take(tensors)

    def reset_state(self) -> None:
        """Begin anew: all that is kept is zero, and what grows has its smallest length."""
        if self._model.kept is not None:
            self._model.kept.reset()

    def release(self) -> None:
        """Give the arena and the workspace back to the system; the next run takes them again.

        Waits for a run that is under way. What ``copy=False`` returned isn't valid any more. Weights stay; see `close`.
        On a CUDA device the workspace stays as well.
        """
        for context in self._all_contexts():
            context.release()
        if self.device.is_host:
            ort.shrink_host_memory()

    def close(self) -> None:
        """Give everything back, weights as well, once the runs that are under way are over. No other begins."""
        with self._making:
            self._model.is_closed = True
        self._idle.end()
        self.release()  # waits for runs
        for context in self._all_contexts():
            context.forget(self._model)
        self._model.close()
        process_memory.settle()

    def __enter__(self) -> Self:
        """The session itself; the end of the ``with`` block closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _context(self) -> ExecutionContext:
        """Where this thread runs."""
        if self._shared is not None:
            return self._shared
        context: ExecutionContext | None = getattr(self._of_thread, "context", None)
        if context is None:
            context = self._of_thread.context = self._new_context()
        return context

    def _new_context(self) -> ExecutionContext:
        with self._making:
            self._model.check_open()
            context = ExecutionContext(self.device, self._model.arena_bytes)
            context.bind(self._model)
            self._contexts.add(context)
            return context

    def _all_contexts(self) -> list[ExecutionContext]:
        with self._making:
            return list(self._contexts)


def plans_of(plan: Plan | str | Path | Sequence[Plan | str | Path], check_weights: bool) -> list[Plan]:
    """The plans of a session, each verified, all of one model."""
    given = [plan] if isinstance(plan, Plan | str | Path) else plan
    if not isinstance(given, Sequence) or not all(isinstance(one, Plan | str | Path) for one in given):
        kinds = "a plan, the path of a planned file, or a list of them"
        raise SessionError(f"a session is made of {kinds}, not of {reprlib.repr(plan)}.")
    plans = [verified(one, check_weights) for one in given]
    check_family(plans)
    return plans


def _state(plans: Sequence[Plan], state: Mapping[str, str] | None, threads: Threads, pad: bool) -> Mapping[str, str]:
    """The state that is kept; a plan made for one has no other."""
    planned = plans[0].state
    state = None if state is None else every_name(plans[0].model, state)
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
    if len(plans) > 1 or threads == "arena" or pad or plans[0].chunks:
        reason = "one plan without chunks, threads='lock' and no pad"
        raise SessionError(f"a session that keeps a state takes {reason}: each stream needs a session of its own.")
    return state


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
