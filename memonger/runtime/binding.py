"""The values of one plan bound into an arena, for runs whose inputs and outputs the caller holds."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from memonger.devices import Device
from memonger.errors import SessionError
from memonger.runtime import feeds as feeding
from memonger.runtime import ort
from memonger.runtime.arena import Arena, make_arena
from memonger.runtime.engine import Engine
from memonger.runtime.program import Place, Program
from memonger.runtime.slots import Slots


class Binding:
    """A plan bound into an arena of the host.

    Args:
        program: The plan's program.
        engine: What runs it.
        arena: Where its values lie.
    """

    def __init__(self, program: Program, engine: Engine, arena: Arena) -> None:
        self.program, self.engine, self.arena = program, engine, arena
        self.binding = engine.session.io_binding()
        self.kinds = {value.name: value.kind for value in program.inputs}
        self.required = {value.name for value in program.inputs if value.required}
        self.places = {place.name: place for place in program.places}
        self.held = [name for name in program.outputs if name not in self.places]
        self.elsewhere: set[str] = set()
        self.fed: set[str] | None = None
        # Held outputs first: their place among the bound ones is where the results are read from.
        for name in self.held:
            self.binding.bind_output(name)
        for place in program.places:
            self._bind_output(place, arena.address + place.offset)

    def run(self, inputs: feeding.Feeds, outputs: Mapping[str, Any], copy: bool) -> dict[str, Any]:
        """See `memonger.Session.run`; everything is checked."""
        if self.fed != set(inputs):
            self.binding.clear_binding_inputs()
            self._bind_constants()
            self.fed = set(inputs)
        self._bind_inputs(inputs)
        for name in self.held:
            self.binding.bind_output(name)  # a fresh one: the last run's belongs to the caller
        self._bind_targets(outputs)
        self._execute()
        return self._results(outputs, copy)

    def _execute(self) -> None:
        self.engine.run(self.binding)

    def _bind_output(self, place: Place, address: int) -> None:
        ort.bind_output(self.binding, place.name, place.dtype, place.shape, address, self.arena.device)

    def _bind_constants(self) -> None:
        for name, array in self.program.constants.items():
            self.binding.bind_ortvalue_input(name, feeding.to_ortvalue(array, None))

    def _bind_inputs(self, inputs: feeding.Feeds) -> None:
        for name, feed in inputs.items():
            self._bind_on_host(name, feed)

    def _bind_on_host(self, name: str, feed: feeding.Feed) -> None:
        plain = isinstance(feed, np.ndarray) and feed.dtype.isbuiltin == 1 and feed.dtype.kind in "biuf"
        if plain and feed.flags.c_contiguous and name in self.required:  # this call knows no inputs with a default
            self.binding.bind_cpu_input(name, feed)
        else:
            self.binding.bind_ortvalue_input(name, feeding.to_ortvalue(feed, self.kinds[name]))

    def _bind_targets(self, outputs: Mapping[str, Any]) -> None:
        """Let outputs be written to the caller's arrays, and back to the arena where the last run's weren't."""
        for name in sorted(self.elsewhere - set(outputs)):
            self._bind_output(self.places[name], self.arena.address + self.places[name].offset)
        for name, target in outputs.items():
            self._bind_output(self.places[name], feeding.address_of(target))
        self.elsewhere = set(outputs)

    def _results(self, outputs: Mapping[str, Any], copy: bool) -> dict[str, Any]:
        values = self.binding.get_outputs_as_ortvaluevector() if self.held else ()
        found: dict[str, Any] = {
            name: feeding.to_python(ort.wrap(values[index]), self.program.kinds.get(name))
            for index, name in enumerate(self.held)
        }
        for name in self.program.outputs:
            if name in outputs:
                found[name] = outputs[name]
            elif name not in found:
                found[name] = self._read(self.places[name], copy)
        return {name: found[name] for name in self.program.outputs}

    def _read(self, place: Place, copy: bool) -> Any:
        if place.dtype.bitwidth < 8:
            raise SessionError(f"output '{place.name}' of type {place.dtype.name} can't be read as an array.")
        return self.arena.read(place.offset, place.dtype.numpy(), place.shape, copy=copy)


class DeviceBinding(Binding):
    """A plan bound into an arena of a CUDA device.

    Arrays of the host are copied into memory that is kept for inputs; tensors on the device are read where they lie,
    or where runs are captured, since a graph replays addresses, copied there as well.

    Args:
        program: The plan's program.
        engine: What runs it.
        arena: Where its values lie.
        inputs: Where its inputs are copied to, at least as large as ``slots`` says.
        slots: Where each input lies in that.
    """

    def __init__(self, program: Program, engine: Engine, arena: Arena, inputs: Arena, slots: Slots) -> None:
        self.inputs, self.slots, self.number = inputs, slots, 0
        self.graphs: dict[frozenset[str], int] = {}
        self.constants = Slots.of_arrays(program.constants)
        self.constant_memory = make_arena(self.constants.nbytes, arena.device)
        for name, array in program.constants.items():
            self.constant_memory.write(self.constants.offsets[name], array)
        self.foreign: set[str] = set()
        super().__init__(program, engine, arena)

    def _execute(self) -> None:
        self.engine.run(self.binding, self.number)

    def _bind_constants(self) -> None:
        """Bind what the caller doesn't feed."""
        self.foreign = set(self.slots.offsets)
        for name, array in self.program.constants.items():
            if name in self.engine.hosted:
                self.binding.bind_ortvalue_input(name, feeding.to_ortvalue(array, None))
            else:
                address = self.constant_memory.address + self.constants.offsets[name]
                self.binding.bind_input(name, "cuda", self.arena.device.index, array.dtype, list(array.shape), address)

    def _bind_inputs(self, inputs: feeding.Feeds) -> None:
        self.number = self.graphs.get(frozenset(inputs)) or self.engine.next_graph()
        self.graphs[frozenset(inputs)] = self.number  # another where other inputs are fed
        values = {value.name: value for value in self.program.inputs}
        wait = False
        for name, feed in inputs.items():
            if name in self.engine.hosted or name not in self.slots.offsets:
                self._bind_on_host(name, feed)
            elif feeding.is_on_cuda(feed) and not self.engine.captures:
                self.binding.bind_ortvalue_input(name, feed)
                self.foreign.add(name)
                wait = True
            else:
                self._copy_in(values[name], feed)
        if wait:
            synchronize(self.arena.device)  # whoever computes them may not be done

    def _copy_in(self, value: feeding.Input, feed: feeding.Feed) -> None:
        offset = self.slots.offsets[value.name]
        if feeding.is_on_cuda(feed):
            synchronize(self.arena.device)
        copy_feed(self.inputs, offset, feed)
        if value.name in self.foreign:
            bind_at(self.binding, value, self.inputs, offset)
            self.foreign.discard(value.name)

    def _bind_targets(self, outputs: Mapping[str, Any]) -> None:
        direct = {
            name: target for name, target in outputs.items() if feeding.is_on_cuda(target) and not self.engine.captures
        }
        if direct:
            synchronize(self.arena.device)
        super()._bind_targets(direct)

    def _results(self, outputs: Mapping[str, Any], copy: bool) -> dict[str, Any]:
        for name, target in outputs.items():
            place = self.places[name]
            if not feeding.is_on_cuda(target):
                target[...] = self._read(place, copy=True)
            elif name not in self.elsewhere:
                copy_out(self.arena, place.offset, feeding.address_of(target), target.tensor_size_in_bytes())
        if copy:
            return super()._results(outputs, copy)
        values = self.binding.get_outputs_as_ortvaluevector()
        order = [*self.held, *(place.name for place in self.program.places)]
        inside = {n: ort.wrap(values[order.index(n)]) for n in self.program.outputs if n in self.places}
        return {**super()._results({**inside, **outputs}, copy), **outputs}


def copy_feed(memory: Arena, offset: int, feed: feeding.Feed) -> None:
    """Copy a tensor, of the host or of the memory's own device, to an offset."""
    if feeding.is_on_cuda(feed):
        memory.copy_in(offset, feeding.address_of(feed), feed.tensor_size_in_bytes())
    else:
        memory.write(offset, feeding.as_bytes(feed))


def bind_at(binding: Any, value: feeding.Input, memory: Arena, offset: int) -> None:
    """Let a run read an input of a known size from an offset."""
    assert value.dtype is not None
    assert value.shape is not None
    ort.bind_input(binding, value.name, value.dtype, value.shape, memory.address + offset, memory.device)


def copy_out(arena: Arena, offset: int, target: int, size: int) -> None:
    """Copy bytes of a device's arena to another address of that device."""
    from memonger.runtime.cuda import driver

    driver.within(arena.device.index, target, arena.address + offset, size)


def synchronize(device: Device) -> None:
    """Wait for all work on a CUDA device."""
    from memonger.runtime.cuda import driver

    driver.synchronize(device.index)


def bind(program: Program, engine: Engine, arena: Arena, inputs: Arena | None) -> Binding:
    """The binding for the arena's device; ``inputs`` is where inputs are copied to, on a device that isn't the host."""
    if inputs is None:
        return Binding(program, engine, arena)
    return DeviceBinding(program, engine, arena, inputs, Slots.of_inputs(program.inputs))


def input_memory(programs: Sequence[Program], device: Device) -> Arena | None:
    """Memory for the inputs of any of the programs; None where they are read where the caller has them."""
    if device.kind != "cuda":
        return None
    return make_arena(max(Slots.of_inputs(program.inputs).nbytes for program in programs), device)
