"""A model loaded into onnxruntime: the sessions of its plans, without the memory that they run in."""

import itertools
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from memonger.devices import Device
from memonger.errors import SessionError
from memonger.runtime import feeds as feeding
from memonger.runtime.arena import Arena, check_host_memory
from memonger.runtime.backend import backend
from memonger.runtime.binding import INPUT_ALIGNMENT, NOTHING, Persistent, input_memory
from memonger.runtime.engine import Engine
from memonger.runtime.executable import Executable, LoadedPlan
from memonger.runtime.kept_state import KeptState
from memonger.runtime.ort import Limit, making_sessions, shares_host_memory, shrink_host_memory
from memonger.runtime.padding import Padding, Smaller, is_smaller
from memonger.runtime.prepared import HostCopy, PlanBytes, Prepared, Program, SessionGroup
from memonger.runtime.store import Store
from memonger.runtime.weight_reader import WeightReader
from memonger.shapes.ranges import Shape, described
from memonger.units import format_size
from memonger.words import option


@dataclass(frozen=True, slots=True)
class Call:
    """A run that was asked for, checked.

    Attributes:
        plan: Index of the plan that takes it.
        smaller: How its batch is filled up; None where it isn't.
        inputs: What the plan reads, by name; what replaces a state among them.
        outputs: Tensors of the caller that outputs are written to.
        given: The same as the caller gave them.
    """

    plan: int
    smaller: Smaller | None
    inputs: feeding.Feeds
    outputs: Mapping[str, Any]
    given: Mapping[str, Any]


class LoadedModel:
    """Plans of one model in onnxruntime sessions, which they share where only shapes differ.

    Args:
        prepared: The plans.
        groups: What their sessions are made of, each asked for when the one before is made.
        threads: Threads within a node; 0: as many as the plans were made for.
        check_order: Compare the order of each session's first run with the plan.
        cuda_graph: ``auto``, ``on`` or ``off``: see `memonger.Session`.
        pad: Fill up smaller batches.
        at_once: How many runs there may be at once: workspace is taken for as many.
        limit: Bytes that onnxruntime may take by itself for one run; None: what the plans say.

    Attributes:
        programs: What of each plan is kept, without inputs that are state.
        kept: The state; None where there is none.
        arena_bytes: What an arena needs, for any of the plans.
        workspace_bytes: Most workspace that a node takes beside it.
        is_closed: Set before it is closed: no run begins any more, and those under way may end.

    Raises:
        SessionError: onnxruntime refuses the model; ``pad`` can't be.
        RuntimeUnavailableError: the device isn't there.
    """

    def __init__(
        self,
        prepared: Prepared,
        groups: Iterable[SessionGroup],
        *,
        threads: int = 0,
        check_order: bool = True,
        cuda_graph: str = "off",
        pad: bool = False,
        at_once: int = 1,
        limit: int | None = None,
    ) -> None:
        device = self.device = prepared.device
        self._at_once, self._first_run, self.is_closed = at_once, threading.Lock(), False
        limit = prepared.limit if limit is None else limit
        held = None if limit is None or not device.is_host else Limit(at_once * limit)
        self._is_limited = held is not None
        engines: list[list[Engine]] = [[] for _ in prepared.plans]
        readers = [None if plan.reads is None else WeightReader(plan.reads) for plan in prepared.plans]
        with making_sessions(), ExitStack() as loading:
            was_packed, is_first = False, device.is_host and held is None and not shares_host_memory()
            for reader in readers:
                if reader is not None:
                    loading.enter_context(reader.loading())
            for group in groups:
                was_packed |= bool(group.model.copies)
                before = engines[group.members[0]]  # partitions on a device share workspace
                engine = Engine(
                    group, device, threads or prepared.threads, check_order, prepared.cuda,
                    "off" if group.is_partition and device.is_host else cuda_graph,
                    before[-1].pool if group.is_partition and before else None, held,
                )  # fmt: skip
                for member in group.members:
                    engines[member].append(engine)
                del group  # before the next is made: it has the model
            if was_packed and is_first:  # kernels pack a weight before they take the file's copy: that is free by now
                shrink_host_memory()
                max(itertools.chain(*engines), key=lambda one: one.workspace_bytes).reserve()
            for own, plan in zip(engines, prepared.plans, strict=True):
                if len(plan.steps) > 1:
                    own[-1].reserve()
        self._fed = [NOTHING for _ in prepared.plans]  # weights that partitions have in common
        self._loaded = tuple(
            LoadedPlan(plan, tuple(own), reader, None if plan.ahead is None else backend(device).copier(plan.ahead))
            for plan, own, reader in zip(prepared.plans, engines, readers, strict=True)
        )
        for index, loaded in enumerate(self._loaded):
            if loaded.copier is not None and loaded.plan.ahead is not None and (fed := loaded.plan.ahead.fed):
                store = Store((tensor for tensor, _ in fed), device, INPUT_ALIGNMENT)
                laid = [(store.tensors[tensor.name], source) for tensor, source in fed]
                copies = [HostCopy(tensor.name, tensor.offset, tensor.nbytes, s, 0, 0) for tensor, s in laid]
                loaded.copier.place(copies, store.arena.address)
                self._fed[index] = Persistent(dict.fromkeys(store.tensors, store))
        first, given = prepared.plans[0], prepared.state
        self.programs = tuple(
            replace(one.program, inputs=tuple(value for value in one.program.inputs if value.name not in given))
            for one in prepared.plans
        )
        self.kept: KeptState | None = None
        if given and first.ranged is None:
            self.kept = KeptState(first.program, given, device)
        elif given and first.ranged is not None:
            self.kept = KeptState(first.ranged.largest(), given, device, first.ranged.ranges)
        self.arena_bytes = max(program.arena_bytes for program in self.programs)
        self.workspace_bytes = max(program.workspace_bytes for program in self.programs)
        self._padding: Padding | None = None
        ranged = {index: one.ranged for index, one in enumerate(prepared.plans) if one.ranged is not None}
        if pad:
            batches = [plan.batch for plan in prepared.plans]
            self._padding = Padding(self.programs, batches, ranged, is_tried=not prepared.draws)
        for one in ranged.values():
            one.offers_filling = not pad and not given
        if at_once > 1:
            self.reserve()

    @property
    def engines(self) -> tuple[Engine, ...]:
        """What runs the plans, each once."""
        return tuple(dict.fromkeys(engine for one in self._loaded for engine in one.engines))

    @property
    def readers(self) -> tuple[WeightReader, ...]:
        """What reads weights that stay in files, of each plan that has such."""
        return tuple(one.reader for one in self._loaded if one.reader is not None)

    def reserve(self) -> None:
        """Take memory of the host for workspace: again after it was given back."""
        if self.device.is_host:
            max(self.engines, key=lambda engine: engine.workspace_bytes).reserve(self._at_once)

    def bind(self, arena: Arena) -> list[Executable]:
        """Each plan bound into one arena: what one run at a time needs."""
        memory = input_memory(self.programs, self.device)
        pairs = zip(self._loaded, self._fed, strict=True)
        return [Executable(one, arena, fed, kept=self.kept, inputs_at=memory) for one, fed in pairs]

    def checked(self, inputs: feeding.Feeds, outputs: Mapping[str, Any] | None) -> Call:
        """A run, checked before anything of it happens.

        Raises:
            SessionError: as `memonger.Session.run`, but for what the runtime says.
        """
        self.check_open()
        state: dict[str, Any] = {}
        if self.kept is not None:
            state = {name: inputs[name] for name in self.kept.state if name in inputs}
            inputs = {name: feed for name, feed in inputs.items() if name not in state}
        inputs, given = feeding.in_place(inputs, self.device), outputs or {}
        targets = feeding.in_place(given, self.device)
        smaller = self._padding.find(inputs) if self._padding is not None else None
        index = smaller.program if smaller is not None else self._pick(inputs)
        if targets:
            program, ranged = self.programs[index], self._loaded[index].plan.ranged
            if smaller is None and ranged is not None:
                sizes = self.kept.sizes_with(state) if self.kept is not None else {}
                program = ranged.at(ranged.key(inputs, sizes))
            _check_targets(program, targets, smaller.outputs if smaller is not None else None)
        for engine in self._loaded[index].engines:
            engine.check_usable()
        return Call(index, smaller, {**inputs, **state}, targets, given)

    def alone(self, call: Call) -> AbstractContextManager[object]:
        """What no other run may enter meanwhile, where the order of this one is compared with the plan."""
        unchecked = any(engine.unchecked for engine in self._loaded[call.plan].engines)
        return self._first_run if unchecked else nullcontext()

    def run(self, call: Call, bound: Sequence[Executable], copy: bool) -> dict[str, Any]:
        """Run what was checked; see `memonger.Session.run`.

        Args:
            call: What `checked` returned.
            bound: What `bind` returned, which nobody else runs in meanwhile.
            copy: Whether outputs are copied out of the arena.
        """
        if call.smaller is None or self._padding is None:
            return {**self._run(call.plan, bound, call.inputs, call.outputs, copy), **call.given}
        if not copy and not self.device.is_host:
            raise SessionError("a batch that is filled up has its outputs cut on the host: leave out copy=False.")

        def run(filled: feeding.Feeds) -> dict[str, Any]:
            feeding.check_feeds(self.programs[call.plan].inputs, filled, "the model")
            return self._run(call.plan, bound, filled, {}, copy)

        results = self._padding.run(call.smaller, call.inputs, run)
        for name, target in call.outputs.items():
            target[...] = results[name]
        return {**results, **call.given}

    def _run(
        self, index: int, bound: Sequence[Executable], inputs: feeding.Feeds, outputs: Mapping[str, Any], copy: bool
    ) -> dict[str, Any]:
        bound[index].run(inputs, outputs)
        results = bound[index].results(outputs, copy)
        if self._is_limited:  # what the caller keeps mustn't lie in memory that the next run needs
            own = {tensor.name for tensor in self.programs[index].planned} | outputs.keys()
            results = {name: value if name in own else _copied(value) for name, value in results.items()}
            bound[index].forget_results()
        return results

    def _pick(self, inputs: feeding.Feeds) -> int:
        """The plan for inputs of these shapes."""
        if len(self.programs) == 1:
            try:
                feeding.check_feeds(self.programs[0].inputs, inputs, "the model")
            except SessionError as error:
                if self._padding is None and is_smaller(self.programs[0].inputs, inputs):
                    raise SessionError(f"{error} Or have smaller batches filled up ({option('pad', True)}).") from error
                raise
            return 0
        plans = [one.plan for one in self._loaded]
        for index, one in enumerate(plans):
            program = self.programs[index]
            shapes = ((value.shape, feeding.shape_of(inputs.get(value.name))) for value in program.inputs)
            fits = all(None in pair or pair[0] == pair[1] for pair in shapes)
            if fits if one.ranged is None else one.ranged.takes(inputs):
                feeding.check_feeds(program.inputs, inputs, "the model")
                return index
        given = {name: list(feeding.shape_of(feed) or ()) for name, feed in inputs.items()}
        planned = [
            str({v.name: list(v.shape or ()) for v in one.program.inputs})
            if one.ranged is None
            else f"{{{described(one.ranged.ranges)}}}"
            for one in plans
        ]
        raise SessionError(
            f"no plan was made for the input shapes {given}; there are plans for [{', '.join(planned)}]."
        )

    def check_open(self) -> None:
        """Check that it isn't closed.

        Raises:
            SessionError: it is.
        """
        if self.is_closed:
            raise SessionError("the session is closed: make a new one.")

    def close(self) -> None:
        """End the sessions, which nobody runs any more: weights and all else that they hold go."""
        self.is_closed = True
        for engine in self.engines:
            engine.close()
        for reader in self.readers:
            reader.close()
        for one in self._loaded:
            if one.copier is not None:
                one.copier.close()
        self._fed = []


def check_room(room: PlanBytes, device: Device) -> None:
    """Check that a device has room for what plans need, before anything is allocated.

    Raises:
        SessionError: it says what is needed and for what, and what is free.
    """
    there = backend(device).room()
    if there is None:
        check_host_memory(room.arena, room.workspace)
        return
    parts = {
        "the arena": room.arena, "workspace": room.workspace, "parameters": room.parameters, "inputs": room.inputs,
    }  # fmt: skip
    if sum(parts.values()) > there.free:
        listed = ", ".join(f"{format_size(size)} for {name}" for name, size in parts.items() if size)
        raise SessionError(
            f"{device} has too little free memory: {format_size(sum(parts.values()))} are needed ({listed}), "
            f"{format_size(there.free)} of {format_size(there.total)} are free. Nothing was allocated. Plan for "
            f"less ({option('budget')}, a smaller {option('batch')}), or end what else uses the device "
            "(nvidia-smi lists it)."
        )


def _copied(value: Any) -> Any:
    """An output that onnxruntime allocated, in memory of its own."""
    if isinstance(value, list):
        return [_copied(each) for each in value]
    return value.copy() if isinstance(value, np.ndarray) else value


def _check_targets(program: Program, outputs: Mapping[str, Any], shapes: Mapping[str, Shape] | None) -> None:
    """Check what outputs are to be written to; ``shapes``: those of what was given, where inputs are filled up."""
    planned = {tensor.name: tensor for tensor in program.planned}
    for name, target in outputs.items():
        if name not in program.outputs:
            raise SessionError(f"the model has no output '{name}'; it has {', '.join(program.outputs)}.")
        tensor = planned.get(name)
        if tensor is None:
            raise SessionError(f"output '{name}' has no planned size, so it can't be written to a given array.")
        dtype, shape = feeding.described(target)
        wanted = tensor.shape if shapes is None else shapes[name]
        if shapes is not None and not isinstance(target, np.ndarray):
            raise SessionError(f"output '{name}' of a batch that is filled up is written to arrays of the host alone.")
        if (dtype, shape) != (tensor.dtype, wanted):
            given = dtype.numpy() if dtype is not None else getattr(target, "dtype", type(target).__name__)
            raise SessionError(
                f"output '{name}' is {tensor.dtype.numpy()}{list(wanted)}, what was given for it is "
                f"{given}{list(shape or ())}."
            )
        if isinstance(target, np.ndarray) and not (target.flags.c_contiguous and target.flags.writeable):
            raise SessionError(f"the array given for output '{name}' has to be contiguous and writable.")
