"""Executables: a plan's partitions in onnxruntime sessions, bound to one arena."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from memonger.devices import Device
from memonger.errors import SessionError
from memonger.runtime import feeds as feeding
from memonger.runtime import ort
from memonger.runtime.arena import Arena, ArenaTensor
from memonger.runtime.backend import backend
from memonger.runtime.binding import NOTHING, Binding, Persistent, copy_out, read_output
from memonger.runtime.engine import Engine
from memonger.runtime.kept_state import KeptState
from memonger.runtime.prepared import HostCopy, PartCopy, Partition, PreparedPlan, Program
from memonger.runtime.weight_reader import WeightReader

_NONE: Mapping[str, Any] = MappingProxyType({})

Key = tuple[tuple[tuple[int, ...] | None, ...], int]
"""Shapes of the inputs in the model's order, behind the sizes of the state; and the turn of the state's buffers."""


@dataclass(frozen=True, slots=True)
class LoadedPlan:
    """A plan, and the onnxruntime sessions that run its partitions.

    Attributes:
        plan: How it runs.
        engines: The sessions.
        reader: What reads weights that stay in the plan's file; None where all are in memory.
        copier: What copies weights to the device while partitions run; None where nothing does.
    """

    plan: PreparedPlan
    engines: tuple[Engine, ...]
    reader: WeightReader | None = None
    copier: "Copier | None" = None


class Exchange(Protocol):
    """What ranks do between the partitions of a step, or copies of weights between those of a plan."""

    def before(self, partition: int) -> None:
        """Called before each partition, and once behind the last one."""

    def give_up(self) -> None:
        """Called where the step ends before its updates: whatever has begun is to be waited for."""


class Copier(Protocol):
    """What copies weights to the device while partitions run; see `memonger.runtime.prepared.CopySchedule`."""

    def place(self, copies: Sequence[HostCopy], address: int) -> None:
        """Copy weights at once, to offsets from an address."""

    def running(self, arena: int) -> AbstractContextManager[Exchange]:
        """For one run, whose arena has this address: what is called between its partitions."""

    def close(self) -> None:
        """End its thread."""


class Executable:
    """A plan's partitions bound to one arena, ready to run: one run at a time.

    They are bound once for each shape of the inputs that comes, as far as there may be many, and for each turn of the
    buffers of a state. With ranges of sizes the bindings that ran least recently make room for others.

    Args:
        loaded: What runs.
        arena: Where planned values lie: at least as large as the plan's.
        persistent: What persists between runs.
        kept: A state, which persists as well; None where there is none.
        inputs_at: See `memonger.runtime.binding.Binding`.

    Attributes:
        program: The plan's.
        engines: The sessions, in order.
        inputs: What the caller feeds.

    Raises:
        SessionError: an input is to persist on the device, and kernels read it on the host.
    """

    def __init__(
        self,
        loaded: LoadedPlan,
        arena: Arena,
        persistent: Persistent = NOTHING,
        *,
        kept: KeptState | None = None,
        inputs_at: Arena | None = None,
    ) -> None:
        plan, self.engines, self.arena = loaded.plan, loaded.engines, arena
        self.program, self._ranged, self._gate, self._kept = plan.program, plan.ranged, plan.gate, kept
        self._reader, self._copier = loaded.reader, loaded.copier
        self._persistent, self._inputs_at = persistent, inputs_at
        own = {*persistent.fixed, *persistent.scalars, *(() if kept is None else kept.state)}
        self.inputs = tuple(value for value in self.program.inputs if value.name not in own)
        self._names = tuple(value.name for value in self.inputs)
        self._partitions = [step for step in plan.steps if isinstance(step, Partition)]
        self._steps = [self._copying(step) if isinstance(step, PartCopy) else step for step in plan.steps]
        self._planned = {tensor.name: tensor for tensor in self.program.planned}
        self._replaced = {new: old for old, new in persistent.updates.items() if new in self.program.replacing}
        persists = {*self._replaced, *persistent.written, *(() if kept is None else kept.state.values())}
        self._returned = [name for name in self.program.outputs if name not in persists]
        given = {value.name for value in self.program.inputs}
        self._live_ins = [{n: own for n, own in one.live_ins.items() if own not in given} for one in self._partitions]
        self._live_outs = [
            {n: own for n, own in one.live_outs.items() if own not in persists} for one in self._partitions
        ]
        self._late = {old: self._planned[new] for old, new in persistent.updates.items() if new in self._planned}
        self._held = dict[str, Any]()  # by the model's names what onnxruntime holds of the last run
        self._done, self._runs = 0, False  # of the last run: how many partitions are over, and whether one isn't
        self._bindings = OrderedDict[Key, tuple[Binding, ...]]()
        self._last: tuple[Key, tuple[Binding, ...]] = ((), 0), ()
        turns = 1 if kept is None else kept.turns
        self._most = turns
        if self._ranged is not None:
            self._most *= 1 if kept is not None and kept.grows else self._ranged.kept
        for turn in range(turns) if self._ranged is None else ():
            self._last = ((), turn), self._bind(((), turn), self.program)
        is_one = kept is None and self._ranged is None and len(plan.steps) == 1 and self._reader is None
        self._only = self._last[1][0] if is_one else None  # the only binding: the fast path asks for no other

    def _bind(self, key: Key, program: Program) -> tuple[Binding, ...]:
        """The partitions bound, in place of what ran least recently once there is enough."""
        persistent = self._persistent if self._kept is None else self._kept.persistent(program, key[1])
        steps = self._partitions
        if self._ranged is not None:
            steps = [replace(steps[0], program=program, session=self._ranged.session_of(program))]
        bindings: tuple[Binding, ...] = ()
        if len(self._bindings) == self._most:
            _, bindings = self._bindings.popitem(last=False)
        if bindings and bindings[0].engine is self.engines[steps[0].session]:
            bindings[0].take(program, persistent)
        else:
            bindings = tuple(
                Binding(step, self.engines[step.session], self.arena, persistent, self._inputs_at) for step in steps
            )
        self._bindings[key] = bindings
        return bindings

    def _at(self, inputs: feeding.Feeds, turn: int) -> tuple[Binding, ...]:
        """The bindings for inputs of these shapes, made where there are none yet. What others hold is let go.

        Raises:
            SessionError: the shapes are outside the ranges.
        """
        if self._ranged is None:
            return self._bindings[(), turn]
        sizes = _NONE if self._kept is None else self._kept.sizes
        own = tuple(sizes.values()) if sizes else ()
        key = (own, *[feeding.shape_of(inputs.get(name)) for name in self._names]), turn
        bindings = self._bindings.get(key)
        if bindings is None:
            bindings = self._bind(key, self._ranged.at(self._ranged.key(inputs, sizes)))
        else:
            self._bindings.move_to_end(key)
        last, those = self._last
        if those is not bindings:
            for binding in those if last[0] != key[0] else ():
                binding.let_go()
            self._last = key, bindings
        return bindings

    def _copying(self, step: PartCopy) -> Callable[[feeding.Feeds], None]:
        """What copies a part into its whole, or out of it."""

        def array(tensor: ArenaTensor) -> np.ndarray:
            return self.arena.read(tensor.offset, tensor.dtype.numpy(), tensor.shape, copy=False)

        part, name, index = array(step.part), step.whole, step.index
        if isinstance(name, str):
            shape = next(value.shape for value in self.program.inputs if value.name == name) or ()

            def cut_out(inputs: feeding.Feeds) -> None:
                feed = inputs[name]
                is_array = isinstance(feed, np.ndarray)
                np.copyto(part, (feed if is_array else feeding.as_bytes(feed).view(part.dtype).reshape(shape))[index])

            return cut_out
        window = array(name)[index]
        target, source = (part, window) if step.is_cut else (window, part)
        return lambda inputs: np.copyto(target, source)

    def checked(self, inputs: feeding.Feeds) -> feeding.Feeds:
        """Inputs as `run` takes them.

        Raises:
            SessionError: a wrong name, type or shape; the plan doesn't run any more.
        """
        inputs = feeding.in_place(inputs, self.arena.device)
        feeding.check_feeds(self.inputs, inputs, "the model")
        for engine in self.engines:
            engine.check_usable()
        return inputs

    def run(
        self,
        inputs: feeding.Feeds,
        targets: Mapping[str, Any] = _NONE,
        goes_on: Callable[[], bool] | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        """Run once; `results` gives what came out.

        Args:
            inputs: Checked by the caller. Those that are state replace what is kept.
            targets: Tensors that outputs are written to, by the outputs' names.
            goes_on: Asked before anything is updated: where it says no, no more is run.
            exchange: What ranks do between partitions; None where there is one rank alone. Of a plan with copies ahead
                it is None.

        Raises:
            SessionError: the shape is outside the ranges; targets overlap; the runtime failed, or didn't follow the
                planned order: see `changes_anything`.
        """
        self._done, self._runs = 0, False
        reading = nullcontext() if self._reader is None else self._reader.running()
        copying = nullcontext(exchange) if self._copier is None else self._copier.running(self.arena.address)
        with reading, copying as between:
            kept, run = self._kept, partial(self._run, targets=targets, goes_on=goes_on, exchange=between)
            if kept is None:
                run(self._at(inputs, 0), inputs)
                return
            given = {name: feed for name, feed in inputs.items() if name in kept.state}
            rest = {name: feed for name, feed in inputs.items() if name not in given} if given else inputs

            def at_turn(turn: int) -> bool:
                bindings = self._at(rest, turn)
                kept.begin(bindings[0].program)
                run(bindings, rest)
                return True

            kept.step(at_turn, given)

    def _run(
        self,
        bindings: tuple[Binding, ...],
        inputs: feeding.Feeds,
        targets: Mapping[str, Any],
        goes_on: Callable[[], bool] | None,
        exchange: Exchange | None,
    ) -> None:
        self._held.clear()
        self._done, self._runs, self._last = 0, False, (self._last[0], bindings)
        lost = overwritten(self.arena, inputs, targets)
        if lost and (self.arena.device.is_host or len(bindings) > 1):  # a later one may read what is written by then
            backend(self.arena.device).synchronize()  # whoever computes them may not be done
            inputs = {name: feeding.copy_of(feed) if name in lost else feed for name, feed in inputs.items()}
        direct = targets if len(bindings) == 1 else _NONE
        for step in self._steps:
            if not isinstance(step, Partition):
                step(inputs)
                continue
            if exchange is not None:
                exchange.before(self._done)
            binding, feeds, live_outs = bindings[self._done], inputs, self._live_outs[self._done]
            if len(bindings) > 1:
                names = step.live_ins
                feeds = {one.name: inputs[names[one.name]] for one in binding.inputs if names[one.name] in inputs}
            live_ins = _NONE
            if self._live_ins[self._done]:
                live_ins = {name: self._held[own] for name, own in self._live_ins[self._done].items()}
            self._runs = True
            binding.run(feeds, lost, direct, live_ins)
            self._runs = False
            if live_outs:
                self._held |= {live_outs[name]: value for name, value in binding.outputs(live_outs).items()}
            self._done += 1
            if self._done == self._gate and goes_on is not None and not goes_on():
                if exchange is not None:
                    exchange.give_up()
                return
        if exchange is not None:
            exchange.before(self._done)
        for old, tensor in self._late.items():
            self._persistent.fixed[old].copy_in(old, self.arena.address + tensor.offset)
        for name in targets if direct is not targets else ():
            copy_out(self.arena, self._planned[name], targets[name])

    def run_fast(self, inputs: feeding.Feeds, copy: bool) -> dict[str, Any] | None:
        """The fast path: run once with inputs as the caller gave them, and return the outputs.

        Returns: None, and nothing has run, where a run isn't of the kind that `memonger.runtime.binding.Binding` has
            prepared; `checked` and `run` take all others, and say what is wrong.
        """
        if self._only is not None:
            return self._only.run_fast(inputs, copy)
        if self._reader is not None:
            return None
        kept = self._kept
        if kept is None:
            return self._run_fast(inputs, copy, 0)
        if not kept.state.keys().isdisjoint(inputs):
            return None
        return kept.step(lambda turn: self._run_fast(inputs, copy, turn))

    def _run_fast(self, inputs: feeding.Feeds, copy: bool, turn: int) -> dict[str, Any] | None:
        if type(inputs) is not dict or len(self._partitions) > 1:
            return None
        try:
            (binding,) = self._at(inputs, turn)
        except SessionError:
            return None
        if self._kept is not None:
            self._kept.begin(binding.program)
        return binding.run_fast(inputs, copy)

    def close(self) -> None:
        """End its sessions, and what reads weights for them. It can't run any more."""
        for engine in self.engines:
            engine.close()
        for reader in self.weight_readers:
            reader.close()
        if self._copier is not None:
            self._copier.close()

    @property
    def weight_readers(self) -> tuple[WeightReader, ...]:
        """What holds weights that stay in the plan's file to their window; there is none where all are in memory."""
        return () if self._reader is None else (self._reader,)

    @property
    def changes_anything(self) -> bool:
        """Whether the last run, which failed, may have written over what persists."""
        if not self._runs:  # between two partitions
            return self._done > self._gate
        return self._done >= self._gate and self._last[1][self._done].changes_anything

    def forget_results(self) -> None:
        """Let go what the last run left that onnxruntime allocated."""
        self._held.clear()
        for key, bindings in self._bindings.items():
            for binding in bindings if key[0] == self._last[0][0] else ():
                binding.forget_results()

    def results(self, targets: Mapping[str, Any], copy: bool) -> dict[str, Any]:
        """The outputs of the last run by name, as `memonger.Session.run` returns them: those that don't persist."""
        as_arrays = copy or self.arena.device.is_host
        found = dict[str, Any]()
        for name in self._returned:
            found[name] = targets[name] if name in targets else self._output(name, copy, as_arrays)
        return found

    def _output(self, name: str, copy: bool, as_array: bool) -> Any:
        bindings = self._last[1]
        tensor = (bindings[0].planned if len(bindings) == 1 else self._planned).get(name)
        if tensor is None:
            value = feeding.to_python(ort.wrap(self._held[name]), self.program.kinds.get(name))
            return value.copy() if name in self.program.uncomputed and isinstance(value, np.ndarray) else value
        if as_array:
            return read_output(self.arena, tensor, copy)
        return ort.wrap(bindings[self.partition_of(name)].outputs([name])[name])

    def result(self, name: str) -> np.ndarray:
        """An output of the last run, where it lies if that is the host: valid until the next run.

        Raises:
            SessionError: it belongs to a partition that wasn't run.
        """
        if self.partition_of(name) >= self._done:
            raise SessionError(f"there is no '{name}' of this step: it ended when its loss was seen.")
        if name in self._replaced:
            old = self._replaced[name]
            return self._persistent.fixed[old].array(old)
        return np.asarray(self._output(name, copy=False, as_array=True))

    def partition_of(self, name: str) -> int:
        """The number of the partition that gives an output; 0 where none does."""
        return next((n for n, one in enumerate(self._partitions) if name in one.program.outputs), 0)

    def bind(self) -> None:
        """Bind everything to where it lies now: again after memory was given back and taken anew."""
        for bindings in self._bindings.values():
            for binding in bindings:
                binding.bind()

    def move(self, arena: Arena) -> None:
        """Run in another arena from now on."""
        self.arena = arena
        for bindings in self._bindings.values():
            for binding in bindings:
                binding.move(arena)


def limit_of_program(program: Program, device: Device) -> ort.Limit | None:
    """What holds onnxruntime to a program's limit; None where it has none."""
    return None if program.limit is None or not device.is_host else ort.Limit(program.limit)


def overwritten(arena: Arena, inputs: feeding.Feeds, targets: Mapping[str, Any]) -> set[str]:
    """Inputs that a run would write over before it has read them: they lie in the arena, or where an output goes.

    Raises:
        SessionError: a target lies in the arena, or over another one.
    """
    if not targets and all(isinstance(feed, np.ndarray) and feed.base is None for feed in inputs.values()):
        return set()  # memory of their own
    arena_span = (arena.address, arena.address + arena.size)
    written: list[tuple[feeding.Span, str]] = [(arena_span, "the session's own arena, as results of copy=False do")]
    for name, target in targets.items():
        span = feeding.span_of(target, arena.device)
        other = next((what for place, what in written if _overlap(span, place)), None)
        if other is not None:
            raise SessionError(f"the tensor given for output '{name}' lies in {other}: give memory of its own.")
        written.append((span, f"that for output '{name}'"))
    return {
        name
        for name, feed in inputs.items()
        if any(_overlap(feeding.span_of(feed, arena.device), place) for place, _ in written)
    }


def _overlap(one: feeding.Span, other: feeding.Span) -> bool:
    return one is not None and other is not None and max(one[0], other[0]) < min(one[1], other[1])
