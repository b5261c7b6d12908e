"""A partition bound to addresses: inputs are fed, outputs lie where planned, what persists stays, runs are captured."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from memonger.devices import Device
from memonger.errors import SessionError
from memonger.ir.element_types import ElementType
from memonger.runtime import feeds as feeding
from memonger.runtime import ort
from memonger.runtime.arena import Arena, ArenaTensor, one_after_another
from memonger.runtime.backend import backend
from memonger.runtime.engine import Engine
from memonger.runtime.prepared import Input, Partition, Program
from memonger.runtime.store import Store

INPUT_ALIGNMENT = 256  # bytes; what CUDA aligns allocations to

SMALL = 1 << 12
"""Bytes up to which the fast path copies an input to where it is bound for good: binding it anew takes longer."""

_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Persistent:
    """What persists between runs, and where.

    Attributes:
        fixed: By an input's name the store that it lies in; a program may read less.
        scalars: By a scalar input's name an array of the caller, read at each run.
        updates: Input → the output that is its new content. One with an address in the arena is copied after the run.
        written: Outputs that are written into a store, and the name that they have there.
    """

    fixed: Mapping[str, Store] = field(default_factory=dict)
    scalars: Mapping[str, np.ndarray] = field(default_factory=dict)
    updates: Mapping[str, str] = field(default_factory=dict)
    written: Mapping[str, tuple[Store, str]] = field(default_factory=dict)


NOTHING = Persistent()


class _FastPath(NamedTuple):
    """What is prepared for the fast path.

    Attributes:
        inputs: Of each name, shape, type of arrays, and whether it is read where the caller has it.
        large: Names of these.
        copied: The others' names, and the array that each is copied to.
        outputs: Of each its name, and an array over where it lies.
    """

    inputs: Sequence[tuple[str, tuple[int, ...], np.dtype[Any], bool]]
    large: Sequence[str]
    copied: Sequence[tuple[str, np.ndarray]]
    outputs: Sequence[tuple[str, np.ndarray]]


class Binding:
    """A partition ready to run: every planned value at its address, inputs and outputs the caller's.

    On the host inputs are read, and outputs written, where the caller has them. On another device arrays of the host
    are copied into memory that is kept for inputs. Tensors of that device are read where they lie; where runs are
    captured they are copied as well, since a graph replays addresses.

    Args:
        partition: What runs.
        engine: What runs it.
        arena: Where planned values lie: at least as large as the plan's.
        persistent: What persists between runs.
        inputs_at: Where inputs are copied to, on a device that isn't the host (see `input_memory`); None for memory of
            this binding's own.

    Attributes:
        inputs: What is fed, by the session's names.
        planned: The planned values that it writes, by name.

    Raises:
        SessionError: an input is to persist on the device, and kernels read it on the host.
    """

    def __init__(
        self,
        partition: Partition,
        engine: Engine,
        arena: Arena,
        persistent: Persistent = NOTHING,
        inputs_at: Arena | None = None,
    ) -> None:
        program = partition.program
        self.program, self.engine, self.arena, self.device = program, engine, arena, arena.device
        self._borrowed, self._persistent = partition.borrowed, persistent
        fixed, scalars = persistent.fixed, persistent.scalars
        hosted = next((name for name in fixed if name in engine.hosted), None)
        if hosted is not None:
            raise SessionError(f"'{hosted}' can't persist on {self.device}: kernels read it in the host's memory.")
        self.inputs = tuple(i for i in program.inputs if i.name not in fixed and i.name not in scalars)
        self._takes = engine.input_names
        self._kinds = {value.name: value.kind for value in self.inputs}
        self._required = {value.name for value in self.inputs if value.required}
        self.planned = {tensor.name: tensor for tensor in program.planned}
        self._replaced = {new: old for old, new in persistent.updates.items() if new in program.replacing}
        self._returned = [n for n in program.outputs if n not in self._replaced and n not in persistent.written]
        self._unplanned = [name for name in self._returned if name not in self.planned]
        bound = dict.fromkeys([*self._unplanned, *self.planned, *self._replaced, *persistent.written])
        self._position = {name: number for number, name in enumerate(bound)}
        self._own = {**program.constants, **{name: a for name, a in scalars.items() if name in self._takes}}
        self._own_store = self._store(
            ArenaTensor(name, ElementType.from_numpy(a.dtype), a.shape) for name, a in self._own.items()
        )
        self._staging = np.zeros(self._own_store.nbytes, np.uint8)
        self._input_store = self._store(_input_tensors(self.inputs), inputs_at)
        self.bind()

    def _store(self, tensors: Iterable[ArenaTensor], arena: Arena | None = None) -> Store:
        """Memory on the device for what the caller has on the host; for nothing, where the device is the host."""
        if self.device.is_host:
            return Store((), self.device, arena=self.arena)
        wanted = (tensor for tensor in tensors if tensor.name not in self.engine.hosted)
        return Store(wanted, self.device, INPUT_ALIGNMENT, arena)

    def bind(self) -> None:
        """Bind everything to where it lies now: again after memory was given back and taken anew."""
        self.binding = self.engine.session.io_binding()
        self._graphs: dict[frozenset[str], int] = {}
        self._number = 0  # of the CUDA graph for the inputs that are fed
        self._fed: set[str] | None = None
        self._foreign: set[str] = set()  # inputs that aren't read from the memory kept for them
        self._redirected: set[str] = set()  # outputs that are written to the caller's memory
        self._is_fast = False  # whether inputs are bound as the fast path needs them
        self.__dict__.pop("_fast", None)
        self.forget_results()
        ort.bind_outputs(self.binding, self.program.planned, self.arena.address, self.device)
        self._bind_persistent_outputs()
        self._copy_own()

    def _bind_persistent_outputs(self) -> None:
        places = {new: (self._persistent.fixed[old], old) for new, old in self._replaced.items()}
        ort.bind_outputs(self.binding, _placed(places | dict(self._persistent.written)), 0, self.device)

    def _bind_fixed(self) -> None:
        """Bind inputs that persist to where they lie."""
        places = {name: (store, name) for name, store in self._persistent.fixed.items() if name in self._takes}
        ort.bind_inputs(self.binding, _placed(places), 0, self.device)

    def let_go(self) -> None:
        """Hold nothing of the last run: neither its inputs nor outputs that onnxruntime allocated."""
        if self._is_fast:
            return  # it holds nothing
        self.binding.clear_binding_inputs()
        self._fed = None
        self.forget_results()

    def forget_results(self) -> None:
        """Let go what the last run left that onnxruntime allocated."""
        for name in self._unplanned:
            self.binding.bind_output(name)

    def move(self, arena: Arena) -> None:
        """Run in another arena from now on."""
        self.arena = arena
        self.bind()

    def take(self, program: Program, persistent: Persistent) -> None:
        """Be bound to another program from now on: of the same model on the host, at other shapes and offsets.

        What persists is the same as before, at other shapes as well.
        """
        pairs = zip(self.program.planned, program.planned, strict=True)  # the same values in the same order
        moved = [new for old, new in pairs if (new is not old and new != old) or new.name in self._redirected]
        fixed = persistent.fixed
        inputs = tuple(one for one in program.inputs if one.name not in fixed) if fixed else program.inputs
        is_returned = not set(self._returned).isdisjoint(one.name for one in moved)
        stays_fast = self._is_fast and inputs == self.inputs and not is_returned
        self.program, self.inputs, self._persistent = program, inputs, persistent
        self.planned.update((tensor.name, tensor) for tensor in moved)
        ort.bind_outputs(self.binding, moved, self.arena.address, self.device)
        self._bind_persistent_outputs()
        if stays_fast:
            self._bind_fixed()
            return
        self._fed, self._is_fast, self._redirected = None, False, set()
        self.__dict__.pop("_fast", None)

    def run(
        self,
        inputs: feeding.Feeds,
        lost: Collection[str] = (),
        targets: Mapping[str, Any] = _NONE,
        live_ins: Mapping[str, Any] = _NONE,
    ) -> None:
        """Run once.

        Args:
            inputs: Checked by the caller; by the session's names, as all else here.
            lost: Inputs on a device that the run would write over before it has read them: they are copied first.
            targets: Tensors that outputs are written to.
            live_ins: OrtValues for inputs that aren't the caller's.

        Raises:
            SessionError: the runtime failed, or didn't follow the planned order.
        """
        self._is_fast = False
        if self._fed != set(inputs):
            self._begin_feeding(set(inputs))
        self._feed(inputs, lost)
        for name in sorted(live_ins):
            self.binding.bind_ortvalue_input(name, ort.wrap(live_ins[name]))
        if self._borrowed and self.engine.hosted:  # binding them copies them to the host
            hosted = [tensor for tensor in self._borrowed if tensor.name in self.engine.hosted]
            ort.bind_inputs(self.binding, hosted, self.arena.address, self.device)
        self.forget_results()  # the last run's belong to the caller
        if targets or self._redirected:
            self._redirect(targets)
        self.engine.run(self.binding, self._number)
        if len(targets) > len(self._redirected):  # the rest couldn't be written to the caller's memory
            for name in sorted(targets.keys() - self._redirected):
                copy_out(self.arena, self.planned[name], targets[name])

    def run_fast(self, inputs: feeding.Feeds, copy: bool) -> dict[str, Any] | None:
        """The fast path: on the host, of an array of the planned type and shape for each input, with no targets.

        Nearly all runs are. What can be prepared for them is prepared once, so that small models aren't slowed down.

        Returns: the outputs. None, and nothing has run, where inputs or outputs aren't of that kind, or the order of
            this run is to be compared with the plan.
        """
        fast, engine = self._fast, self.engine
        if fast is None or engine.unchecked or self._redirected:
            return None
        wanted, large, copied, outputs = fast
        if type(inputs) is not dict or len(inputs) != len(wanted):
            return None
        for name, shape, dtype, is_large in wanted:
            feed = inputs.get(name)
            if type(feed) is not np.ndarray or feed.shape != shape or feed.dtype != dtype:
                return None
            if is_large and not feed.flags.c_contiguous:
                return None
        engine.check_usable()
        if not self._is_fast:
            self._begin_feeding(set(inputs))
            for name, place in copied:
                self._bind_array(name, place)
            self._is_fast = True
        for name, place in copied:
            place[...] = inputs[name]
        held = []  # until the run is over
        for name in large:
            feed = inputs[name]
            if feed.base is not None:  # it may lie in the arena, as results do
                begin = feeding.address_of(feed) - self.arena.address
                feed = feed.copy() if begin < self.arena.size and begin + feed.nbytes > 0 else feed
            held.append(feed)
            self._bind_array(name, feed)
        engine.run(self.binding)
        return {name: view.copy() if copy else view.view() for name, view in outputs}

    @cached_property
    def _fast(self) -> _FastPath | None:
        """What is prepared for the fast path; None where the model takes or gives what isn't of that kind."""
        tensors = [self.planned.get(name) for name in self._returned]
        if not self.device.is_host or not all(tensor is not None and tensor.dtype.bitwidth >= 8 for tensor in tensors):
            return None
        inputs, copied = [], []
        for value in self.inputs:
            dtype, shape = value.numpy, value.shape
            if dtype is None or shape is None or not value.required:
                return None
            if dtype.kind not in "biuf" or dtype.isbuiltin != 1:
                return None
            is_large = math.prod(shape) * dtype.itemsize > SMALL
            inputs.append((value.name, shape, dtype, is_large))
            copied += [] if is_large else [(value.name, np.empty(shape, dtype))]
        read = [(one.name, read_output(self.arena, one, copy=False)) for one in tensors if one is not None]
        return _FastPath(inputs, [name for name, *_, is_large in inputs if is_large], copied, read)

    @property
    def changes_anything(self) -> bool:
        """Whether the last run, which failed, may have written over what persists: from its first update on."""
        return self.engine.failed_at is None or self.engine.failed_at >= self.program.first_update

    def _begin_feeding(self, names: set[str]) -> None:
        """Bind inputs anew: what isn't fed now has its default again. Each set of inputs has its own CUDA graph."""
        self._fed = None  # until all is bound: something here may raise
        self.binding.clear_binding_inputs()
        for name, array in self._own.items():
            if name in self._own_store:
                self._bind_stored(name, self._own_store)
            else:
                self.binding.bind_ortvalue_input(name, feeding.to_ortvalue(array, None))
        self._bind_fixed()
        ort.bind_inputs(self.binding, self._borrowed, self.arena.address, self.device)
        self._foreign = set(self._input_store.tensors)
        fed = frozenset(names)
        if fed not in self._graphs:
            self._graphs[fed] = self.engine.next_graph()
        self._number, self._fed = self._graphs[fed], names

    def _bind_array(self, name: str, array: np.ndarray) -> None:
        """Let runs read an array of the host where it lies, by its address: a binding would keep it beyond the run."""
        kind = self._kinds[name]
        assert isinstance(kind, ElementType)
        ort.bind_inputs(self.binding, [(name, kind, array.shape, feeding.address_of(array))])

    def _bind_stored(self, name: str, store: Store) -> None:
        ort.bind_inputs(self.binding, [store.tensors[name]], store.arena.address, self.device)

    def _feed(self, inputs: feeding.Feeds, lost: Collection[str]) -> None:
        if self._persistent.scalars:
            self._copy_own()
        store = self._input_store
        if store.tensors and any(map(feeding.is_on_device, inputs.values())):
            backend(self.device).synchronize()  # whoever computes them may not be done
        for name, feed in inputs.items():
            if name not in store:
                is_number = isinstance(feed, np.ndarray) and feed.dtype.isbuiltin == 1 and feed.dtype.kind in "biuf"
                is_number = is_number and isinstance(self._kinds[name], ElementType)  # of an optional it isn't
                if is_number and feed.flags.c_contiguous and name in self._required:
                    self._bind_array(name, feed)  # which knows no inputs with a default
                else:
                    self.binding.bind_ortvalue_input(name, feeding.to_ortvalue(feed, self._kinds[name]))
                continue
            is_there = feeding.is_on_device(feed)
            if is_there and not self.engine.captures and name not in lost:
                self.binding.bind_ortvalue_input(name, feed)
                self._foreign.add(name)
                continue
            if is_there:
                store.copy_in(name, feeding.address_of(feed))
            else:
                store.arena.write(store.tensors[name].offset, feeding.as_bytes(feed))
            if name in self._foreign:
                self._bind_stored(name, store)
                self._foreign.discard(name)

    def _copy_own(self) -> None:
        """Copy constants and scalars to the device, all at once."""
        for name, tensor in self._own_store.tensors.items():
            content = self._staging[tensor.offset : tensor.offset + tensor.nbytes]
            content.view(self._own[name].dtype).reshape(tensor.shape)[...] = self._own[name]
        if self._own_store.tensors:
            self._own_store.arena.write(0, self._staging)

    def _redirect(self, targets: Mapping[str, Any]) -> None:
        """Let runs write outputs to the caller's memory if they can, and to the arena again what isn't asked for."""
        direct = targets
        if not self.device.is_host:  # once all work that uses them is done
            is_possible = not self.engine.captures and any(map(feeding.is_on_device, targets.values()))
            direct = {name: one for name, one in targets.items() if is_possible and feeding.is_on_device(one)}
            if direct:
                backend(self.device).synchronize()
        self._redirected |= set(direct)  # should anything here raise, the next run binds all of them anew
        if self._redirected != direct.keys():
            back = [self.planned[name] for name in sorted(self._redirected - direct.keys())]
            ort.bind_outputs(self.binding, back, self.arena.address, self.device)
        tensors = ((self.planned[name], feeding.address_of(target)) for name, target in direct.items())
        ort.bind_outputs(self.binding, ((t.name, t.dtype, t.shape, where) for t, where in tensors), 0, self.device)
        self._redirected = set(direct)

    def outputs(self, names: Iterable[str]) -> dict[str, Any]:
        """Outputs of the last run as OrtValues, those that onnxruntime allocated among them."""
        bound = self.binding.get_outputs_as_ortvaluevector()
        return {name: bound[self._position[name]] for name in names}


def read_output(arena: Arena, tensor: ArenaTensor, copy: bool) -> np.ndarray:
    """An output that lies in an arena, as an array.

    Raises:
        SessionError: its elements are of less than a byte.
    """
    if tensor.dtype.bitwidth < 8:
        raise SessionError(f"output '{tensor.name}' of type {tensor.dtype.name} can't be read as an array.")
    return arena.read(tensor.offset, tensor.dtype.numpy(), tensor.shape, copy=copy)


def copy_out(arena: Arena, tensor: ArenaTensor, target: Any) -> None:
    """Copy an output that lies in an arena to the caller's memory."""
    if arena.device.is_host or feeding.is_on_device(target):
        arena.copy_out(tensor.offset, feeding.address_of(target), tensor.nbytes)
    else:
        target[...] = read_output(arena, tensor, copy=True)


def input_memory(programs: Sequence[Program], device: Device) -> Arena | None:
    """Memory for the inputs of any of the programs; None where they are read where the caller has them."""
    if device.is_host:
        return None
    sizes = (one_after_another(_input_tensors(program.inputs), INPUT_ALIGNMENT)[1] for program in programs)
    return backend(device).arena(max(sizes))


def _placed(places: Mapping[str, tuple[Store, str]]) -> Iterable[tuple[str, ElementType, Sequence[int], int]]:
    """Name, type, shape and address of values, each by the store it lies in and its name there."""
    for name, (store, key) in places.items():
        tensor = store.tensors[key]
        yield name, tensor.dtype, tensor.shape, store.address(key)


def _input_tensors(inputs: Iterable[Input]) -> Iterable[ArenaTensor]:
    """The inputs that are tensors of a known size; text and sequences aren't copied."""
    return (
        ArenaTensor(value.name, value.dtype, value.shape)
        for value in inputs
        if value.shape is not None and value.dtype is not None and value.dtype != ElementType.STRING
    )
