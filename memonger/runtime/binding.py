"""A plan bound to addresses: inputs are fed, outputs read, what persists stays, runs are captured as CUDA graphs."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir

from memonger.devices import Device
from memonger.errors import SessionError
from memonger.plan import Plan
from memonger.runtime import feeds as feeding
from memonger.runtime import ort
from memonger.runtime.arena import Arena, ArenaTensor, one_after_another
from memonger.runtime.backend import backend
from memonger.runtime.engine import Engine
from memonger.runtime.plain import PlainRuns
from memonger.runtime.program import Program, SessionGroup, expose, program_of
from memonger.runtime.store import Store

INPUT_ALIGNMENT = 256  # bytes; what CUDA aligns allocations to

_NONE: Mapping[str, Any] = MappingProxyType({})


class Binding:
    """A plan ready to run: every planned value at its address, inputs and outputs the caller's.

    On the host inputs are read, and outputs written, where the caller has them. On another device arrays of the host
    are copied into memory that is kept for inputs. Tensors of that device are read where they lie; where runs are
    captured they are copied as well, since a graph replays addresses.

    Args:
        program: The plan's program.
        engine: What runs it.
        arena: Where planned values lie: at least as large as the plan's.
        fixed: What persists between runs, by name, and the store each lies in; the program may read less.
        scalars: Scalar inputs by name, likewise: arrays of the caller, read at each run.
        updates: Persistent input → the output that is its new content. One with an address in the arena has to be
            copied by the caller once the run is over.
        written: Outputs that are written into a store, and the name that they have there.
        received: Inputs that lie in the arena.
        inputs_at: Where inputs are copied to, on a device that isn't the host (see `input_memory`); None for memory of
            this binding's own.

    Attributes:
        inputs: What the caller feeds.

    Raises:
        SessionError: an input is to persist on the device, and kernels read it on the host.
    """

    def __init__(
        self,
        program: Program,
        engine: Engine,
        arena: Arena,
        *,
        fixed: Mapping[str, Store] = _NONE,
        scalars: Mapping[str, np.ndarray] = _NONE,
        updates: Mapping[str, str] = _NONE,
        written: Mapping[str, tuple[Store, str]] = _NONE,
        received: Sequence[ArenaTensor] = (),
        inputs_at: Arena | None = None,
    ) -> None:
        self.program, self.engine, self.arena, self.device = program, engine, arena, arena.device
        self.fixed, self.scalars, self.received = fixed, scalars, received
        hosted = next((name for name in fixed if name in engine.hosted), None)
        if hosted is not None:
            raise SessionError(f"'{hosted}' can't persist on {self.device}: kernels read it in the host's memory.")
        self.inputs = tuple(i for i in program.inputs if i.name not in fixed and i.name not in scalars)
        self._takes = engine.input_names
        self._read_on_host = [tensor for tensor in received if tensor.name in engine.hosted]
        self._kinds = {value.name: value.kind for value in self.inputs}
        self._required = {value.name for value in self.inputs if value.required}
        self._planned = {tensor.name: tensor for tensor in program.planned}
        self._replaced = {new: old for old, new in updates.items() if new in program.replacing}
        self._written = written
        self._returned = {name for name in program.outputs if name not in self._replaced and name not in written}
        apart = {*self._planned, *self._replaced, *written}
        self._unplanned = [name for name in program.outputs if name not in apart]
        bound = dict.fromkeys([*self._unplanned, *self._planned, *self._replaced, *written])
        self._position = {name: number for number, name in enumerate(bound)}
        self._own = {**program.constants, **{name: a for name, a in scalars.items() if name in self._takes}}
        self._own_store = self._store(_tensors_of(self._own))
        self._staging = np.zeros(self._own_store.nbytes, np.uint8)
        self._staged = [(self._part(tensor), self._own[name]) for name, tensor in self._own_store.tensors.items()]
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
        self._is_plain = False  # whether inputs are bound as plain runs need them
        self.__dict__.pop("_plain", None)
        for name in self._unplanned:
            self.binding.bind_output(name)
        ort.bind_outputs(self.binding, self.program.planned, self.arena.address, self.device)
        self._bind_persisting()
        self._copy_own()

    def _bind_persisting(self) -> None:
        """Bind outputs that persist to where they lie."""
        places = {new: (self.fixed[old], old) for new, old in self._replaced.items()}
        ort.bind_outputs(self.binding, _placed(places | dict(self._written)), 0, self.device)

    def _bind_fixed(self) -> None:
        """Bind inputs that persist to where they lie."""
        places = {name: (store, name) for name, store in self.fixed.items() if name in self._takes}
        ort.bind_inputs(self.binding, _placed(places), self.device)

    def let_go(self) -> None:
        """Hold nothing of the last run: neither its inputs nor outputs that onnxruntime allocated."""
        if self._is_plain:
            return  # it holds nothing
        self.binding.clear_binding_inputs()
        self._fed = None
        self.forget_results()

    def move(self, arena: Arena) -> None:
        """Run in another arena from now on."""
        self.arena = arena
        self.bind()

    def take(
        self,
        program: Program,
        *,
        fixed: Mapping[str, Store] = _NONE,
        updates: Mapping[str, str] = _NONE,
        written: Mapping[str, tuple[Store, str]] = _NONE,
    ) -> None:
        """Be bound to another program from now on: of the same model on the host, at other shapes and offsets.

        What persists is the same as before, at other shapes as well.
        """
        pairs = zip(self.program.planned, program.planned, strict=True)  # the same values in the same order
        moved = [new for old, new in pairs if (new is not old and new != old) or new.name in self._redirected]
        inputs = tuple(one for one in program.inputs if one.name not in fixed) if fixed else program.inputs
        stays_plain = self._is_plain and inputs == self.inputs and self._returned.isdisjoint(one.name for one in moved)
        self.program, self.inputs, self.fixed, self._written = program, inputs, fixed, written
        self._planned.update((tensor.name, tensor) for tensor in moved)
        ort.bind_outputs(self.binding, moved, self.arena.address, self.device)
        self._bind_persisting()
        if stays_plain:
            self._bind_fixed()
            return
        self._fed, self._is_plain, self._redirected = None, False, set()
        self.__dict__.pop("_plain", None)

    def checked(self, inputs: feeding.Feeds) -> feeding.Feeds:
        """Inputs as `run` takes them.

        Raises:
            SessionError: a wrong name, type or shape; the session doesn't run any more.
        """
        inputs = feeding.in_place(inputs, self.device)
        feeding.check_feeds(self.inputs, inputs, "the model")
        self.engine.check_usable()
        return inputs

    def run(self, inputs: feeding.Feeds, targets: Mapping[str, Any] = _NONE, handed: Mapping[str, Any] = _NONE) -> None:
        """Run once; `result` gives what came out.

        Args:
            inputs: What `checked` returned.
            targets: Tensors that outputs are written to, by the outputs' names.
            handed: OrtValues for inputs that aren't the caller's, by name; others than the model's are left out.

        Raises:
            SessionError: the runtime failed, or didn't follow the planned order; targets overlap.
        """
        self._is_plain = False
        lost = overwritten(self.arena, inputs, targets)
        if lost and self.device.is_host:
            inputs = {name: feeding.copy_of(f) if name in lost else f for name, f in inputs.items()}
        if self._fed != set(inputs):
            self._begin_feeding(set(inputs))
        self._feed(inputs, lost)
        self._take(handed)
        self.forget_results()  # the last run's belong to the caller
        if targets or self._redirected:
            self._redirect(targets)
        self.engine.run(self.binding, self._number)
        if len(targets) > len(self._redirected):
            self._copy_out(targets)

    def run_plain(self, inputs: feeding.Feeds, copy: bool) -> dict[str, Any] | None:
        """Run once, with inputs as the caller gave them, and return the outputs; see `run` and `results`.

        Returns: None, and nothing has run, where inputs or outputs aren't of the plain kind, or the order of this run
            is to be compared with the plan.
        """
        plain = self._plain
        if plain is None or self.engine.unchecked or self._redirected or not plain.takes(inputs):
            return None
        self.engine.check_usable()
        if not self._is_plain:
            self._begin_plain(plain)
        plain.copy_in(inputs)
        large = plain.large(inputs)
        for name, feed in large:
            self._bind_array(name, feed)
        self.engine.run(self.binding)
        return plain.results(copy)

    @cached_property
    def _plain(self) -> PlainRuns | None:
        """What is prepared for plain runs; None where the model takes or gives what isn't of that kind."""
        returned = [name for name in self.program.outputs if name in self._returned]
        return PlainRuns.of(self.inputs, returned, self._planned, self.arena)

    def _begin_plain(self, plain: PlainRuns) -> None:
        self._begin_feeding({value.name for value in self.inputs})
        for name, place in plain.copied.items():
            self._bind_array(name, place)
        self._is_plain = True

    def forget_results(self) -> None:
        """Let go what the last run left that onnxruntime allocated."""
        for name in self._unplanned:
            self.binding.bind_output(name)

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
                self._bind_input(name, self._own_store)
            else:
                self.binding.bind_ortvalue_input(name, feeding.to_ortvalue(array, None))
        self._bind_fixed()
        for tensor in self.received:
            self._bind_received(tensor)
        self._foreign = set(self._input_store.tensors)
        fed = frozenset(names)
        if fed not in self._graphs:
            self._graphs[fed] = self.engine.next_graph()
        self._number, self._fed = self._graphs[fed], names

    def _feed(self, inputs: feeding.Feeds, lost: Collection[str]) -> None:
        if self.scalars:
            self._copy_own()
        copied = self._input_store.tensors
        if copied and any(map(feeding.is_on_device, inputs.values())):
            backend(self.device).synchronize()  # whoever computes them may not be done
        for name, feed in inputs.items():
            if name not in copied:
                self._bind_on_host(name, feed)
            elif feeding.is_on_device(feed) and not self.engine.captures and name not in lost:
                self.binding.bind_ortvalue_input(name, feed)
                self._foreign.add(name)
            else:
                self._copy_in(name, feed)

    def _take(self, handed: Mapping[str, Any]) -> None:
        """Bind what an earlier segment left: onnxruntime's own values, and copies where kernels read on the host."""
        for name in sorted(handed.keys() & self._takes):
            self.binding.bind_ortvalue_input(name, ort.wrap(handed[name]))
        for tensor in self._read_on_host:
            self._bind_received(tensor)

    def _bind_received(self, tensor: ArenaTensor) -> None:
        where = self.arena.address + tensor.offset
        ort.bind_input(self.binding, tensor.name, tensor.dtype, tensor.shape, where, self.device)

    def held(self, names: Collection[str]) -> dict[str, Any]:
        """Outputs of the last run that onnxruntime allocated, as OrtValues."""
        if not names:
            return {}
        bound = self.binding.get_outputs_as_ortvaluevector()
        return {name: bound[self._position[name]] for name in sorted(names)}

    def _copy_own(self) -> None:
        """Copy constants and scalars to the device, all at once."""
        for part, array in self._staged:
            part[...] = array
        if self._staged:
            self._own_store.arena.write(0, self._staging)

    def _part(self, tensor: ArenaTensor) -> np.ndarray:
        """The bytes of a constant or scalar in what is copied to the device."""
        content = self._staging[tensor.offset : tensor.offset + tensor.nbytes]
        return content.view(self._own[tensor.name].dtype).reshape(tensor.shape)

    def _bind_on_host(self, name: str, feed: feeding.Feed) -> None:
        plain = isinstance(feed, np.ndarray) and feed.dtype.isbuiltin == 1 and feed.dtype.kind in "biuf"
        if plain and feed.flags.c_contiguous and name in self._required:  # this call knows no inputs with a default
            self._bind_array(name, feed)
        else:
            self.binding.bind_ortvalue_input(name, feeding.to_ortvalue(feed, self._kinds[name]))

    def _bind_array(self, name: str, array: np.ndarray) -> None:
        """Let runs read an array where it lies, by its address: the binding would keep it beyond the run."""
        kind = self._kinds[name]
        assert isinstance(kind, ir.TensorType)
        ort.bind_input(self.binding, name, kind.dtype, array.shape, feeding.address_of(array), self.device)

    def _copy_in(self, name: str, feed: feeding.Feed) -> None:
        store = self._input_store
        if feeding.is_on_device(feed):
            store.copy_in(name, feeding.address_of(feed))
        else:
            store.arena.write(store.tensors[name].offset, feeding.as_bytes(feed))
        if name in self._foreign:
            self._bind_input(name, store)
            self._foreign.discard(name)

    def _bind_input(self, name: str, store: Store) -> None:
        tensor = store.tensors[name]
        ort.bind_input(self.binding, name, tensor.dtype, tensor.shape, store.address(name), self.device)

    def _bind_output(self, tensor: ArenaTensor, address: int | None = None) -> None:
        """Let runs write a planned output to an address; its own in the arena if None."""
        where = self.arena.address + tensor.offset if address is None else address
        ort.bind_output(self.binding, tensor.name, tensor.dtype, tensor.shape, where, self.device)

    def _redirect(self, targets: Mapping[str, Any]) -> None:
        """Let runs write outputs to the caller's memory if they can, and to the arena again what isn't asked for."""
        direct = self._writable(targets)
        self._redirected |= set(direct)  # should anything here raise, the next run binds all of them anew
        for name in sorted(self._redirected - direct.keys()):
            self._bind_output(self._planned[name])
        for name, target in direct.items():
            self._bind_output(self._planned[name], feeding.address_of(target))
        self._redirected = set(direct)

    def _writable(self, targets: Mapping[str, Any]) -> Mapping[str, Any]:
        """Those that a run can write to, once all work that uses them is done."""
        if self.device.is_host:
            return targets
        if self.engine.captures or not any(map(feeding.is_on_device, targets.values())):
            return {}
        backend(self.device).synchronize()
        return {name: target for name, target in targets.items() if feeding.is_on_device(target)}

    def _copy_out(self, targets: Mapping[str, Any]) -> None:
        """Copy what the run couldn't write to the caller's memory."""
        for name in sorted(targets.keys() - self._redirected):
            tensor, target = self._planned[name], targets[name]
            if feeding.is_on_device(target):
                self.arena.copy_out(tensor.offset, feeding.address_of(target), tensor.nbytes)
            else:
                target[...] = self._read(tensor, copy=True)

    def results(self, targets: Mapping[str, Any], copy: bool) -> dict[str, Any]:
        """The outputs of the last run by name, as `memonger.Session.run` returns them: those that don't persist."""
        as_arrays = copy or self.device.is_host
        bound = () if as_arrays and not self._unplanned else self.binding.get_outputs_as_ortvaluevector()
        results = {}
        for name in self.program.outputs:
            if name not in self._returned:
                continue
            if name in targets:
                results[name] = targets[name]
            elif name not in self._planned:
                results[name] = self._unbound(bound, name)
            elif as_arrays:
                results[name] = self._read(self._planned[name], copy)
            else:
                results[name] = ort.wrap(bound[self._position[name]])
        return results

    def result(self, name: str) -> np.ndarray:
        """An output of the last run, where it lies if that is the host: valid until the next run."""
        if name in self._planned:
            return self._read(self._planned[name], copy=False)
        if name in self._replaced:
            old = self._replaced[name]
            return self.fixed[old].array(old)
        return np.asarray(self._unbound(self.binding.get_outputs_as_ortvaluevector(), name))

    def _unbound(self, bound: Sequence[Any], name: str) -> Any:
        """An output that onnxruntime allocated."""
        return feeding.to_python(ort.wrap(bound[self._position[name]]), self.program.kinds.get(name))

    def _read(self, tensor: ArenaTensor, copy: bool) -> np.ndarray:
        return read_output(self.arena, tensor, copy)


def read_output(arena: Arena, tensor: ArenaTensor, copy: bool) -> np.ndarray:
    """An output that lies in an arena, as an array.

    Raises:
        SessionError: its elements are of less than a byte.
    """
    if tensor.dtype.bitwidth < 8:
        raise SessionError(f"output '{tensor.name}' of type {tensor.dtype.name} can't be read as an array.")
    return arena.read(tensor.offset, tensor.dtype.numpy(), tensor.shape, copy=copy)


def overwritten(arena: Arena, inputs: feeding.Feeds, targets: Mapping[str, Any]) -> set[str]:
    """Inputs that a run would write over before it has read them: they lie in the arena, or where an output goes.

    Raises:
        SessionError: a target lies in the arena, or over another one.
    """
    if not targets and all(isinstance(feed, np.ndarray) and feed.base is None for feed in inputs.values()):
        return set()  # memory of their own
    stretch = (arena.address, arena.address + arena.size)
    written: list[tuple[feeding.Span, str]] = [(stretch, "the session's own arena, as results of copy=False do")]
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


def bind_plan(
    plan: Plan,
    arena: Arena,
    threads: int,
    *,
    fixed: Mapping[str, Store],
    cuda_graph: str,
) -> Binding:
    """A plan bound in an onnxruntime session of its own.

    Args:
        plan: Verified by the caller.
        arena: Where to run; its device is where.
        threads: Threads within a node.
        fixed: See `Binding`; of these the model's own defaults are left out.
        cuda_graph: ``auto``, ``on`` or ``off``: see `memonger.Session`.
    """
    program = program_of(plan)
    model = without_defaults(plan.model, set(fixed))
    expose(model, program.planned)
    settings = plan.stamp.cuda if plan.stamp is not None else None
    limit = None if program.limit is None or not arena.device.is_host else ort.Limit(program.limit)
    engine = Engine(
        SessionGroup(model, (0,), (program,)), arena.device, threads, True, settings, cuda_graph, limit=limit
    )
    return Binding(program, engine, arena, fixed=fixed)


def input_memory(programs: Sequence[Program], device: Device) -> Arena | None:
    """Memory for the inputs of any of the programs; None where they are read where the caller has them."""
    if device.is_host:
        return None
    sizes = (one_after_another(_input_tensors(program.inputs), INPUT_ALIGNMENT)[1] for program in programs)
    return backend(device).arena(max(sizes))


def _placed(places: Mapping[str, tuple[Store, str]]) -> Iterable[tuple[str, ir.DataType, Sequence[int], int]]:
    """Name, type, shape and address of values, each by the store it lies in and its name there."""
    for name, (store, key) in places.items():
        tensor = store.tensors[key]
        yield name, tensor.dtype, tensor.shape, store.address(key)


def _tensors_of(arrays: Mapping[str, np.ndarray]) -> Iterable[ArenaTensor]:
    return (ArenaTensor(name, ir.DataType.from_numpy(a.dtype), a.shape) for name, a in arrays.items())


def _input_tensors(inputs: Iterable[feeding.Input]) -> Iterable[ArenaTensor]:
    """The inputs that are tensors of a known size; text and sequences aren't copied."""
    return (
        ArenaTensor(value.name, value.dtype, value.shape)
        for value in inputs
        if value.shape is not None and value.dtype is not None and value.dtype != ir.DataType.STRING
    )


def without_defaults(model: ir.Model, names: set[str]) -> ir.Model:
    """The model with inputs that have no defaults: those would be a second copy of what is bound."""
    copy = model.clone()
    for value in copy.graph.inputs:
        if value.name in names and value.name in copy.graph.initializers:
            del copy.graph.initializers[str(value.name)]
            value.const_value = None
    return copy
