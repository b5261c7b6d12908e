"""One plan bound to addresses that stay: its arena, tensors that persist between runs, and scalars that change."""

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from memonger.devices import Device
from memonger.errors import SessionError
from memonger.plan import Plan
from memonger.runtime import feeds as feeding
from memonger.runtime import ort
from memonger.runtime.arena import Arena, make_arena
from memonger.runtime.binding import bind_at, copy_feed, synchronize
from memonger.runtime.engine import Engine
from memonger.runtime.program import Group, exposed, program_of
from memonger.runtime.slots import Slots
from memonger.runtime.store import Store


class BoundPlan:
    """A plan ready to run on inputs that change, everything else at its address.

    Args:
        plan: Verified by the caller.
        device: Where to run.
        arena: At least as large as the plan's.
        fixed: Persistent inputs, by name, and the store each lies in.
        scalars: Scalar inputs by name: arrays of the caller, read at each run.
        updates: Persistent input → the output that is its new content.
        threads: Threads within a node.
        check_order: Compare the order of the first run with the plan.
        cuda_graph: ``auto``, ``on`` or ``off``: see `memonger.Session`.
    """

    def __init__(
        self,
        plan: Plan,
        device: Device,
        arena: Arena,
        fixed: Mapping[str, Store],
        scalars: Mapping[str, np.ndarray],
        updates: Mapping[str, str],
        threads: int,
        check_order: bool,
        cuda_graph: str = "auto",
    ) -> None:
        self.program, self.arena, self.fixed, self.updates = program_of(plan), arena, fixed, updates
        self.device, self.scalars = device, scalars
        model = exposed(_without_defaults(plan.model, {*fixed, *scalars}), self.program.places, (), False)
        settings = plan.stamp.cuda if plan.stamp is not None else None
        group = Group(model, (0,), (self.program,))
        self.engine = Engine(group, device, threads, check_order, settings, cuda_graph)
        self.inputs = tuple(i for i in self.program.inputs if i.name not in fixed and i.name not in scalars)
        self._kinds = {value.name: value.kind for value in self.inputs}
        self._placed = {place.name: place for place in self.program.places}
        self._late = {old: new for old, new in updates.items() if new in self._placed}
        replaced = {new: old for old, new in self.updates.items()}
        self._replaced = {new: old for new, old in replaced.items() if new not in self._placed}
        self._held = [n for n in self.program.outputs if n not in self._placed and n not in self._replaced]
        self._memory: Arena | None = None
        self._captured = 0  # the number of the graph that is there already
        self.bind()

    def bind(self) -> None:
        """Bind everything to where it lies now: again after memory was given back and taken anew."""
        self.binding, self._number = self.engine.session.io_binding(), self.engine.next_graph()
        self._bind_outputs()
        self._bind_fixed()
        self._bind_changing()

    def move(self, arena: Arena) -> None:
        """Run in another arena from now on."""
        self.arena = arena
        self.bind()

    def _bind_outputs(self) -> None:
        """Held outputs first: their place among the bound ones is where the results are read from."""
        for name in self._held:
            self.binding.bind_output(name)
        for place in self.program.places:
            address = self.arena.address + place.offset
            ort.bind_output(self.binding, place.name, place.dtype, place.shape, address, self.device)
        for new, old in self._replaced.items():
            store = self.fixed[old]
            slot = store.slots[old]
            ort.bind_output(self.binding, new, slot.dtype, slot.shape, store.address(old), self.device)

    def _bind_fixed(self) -> None:
        for name, store in self.fixed.items():
            slot = store.slots[name]
            if name in self.engine.hosted:
                raise SessionError(f"'{name}' is read on the host, and can't persist on {self.device}.")
            ort.bind_input(self.binding, name, slot.dtype, slot.shape, store.address(name), self.device)

    def _bind_changing(self) -> None:
        """Scalars where they lie on the host; on a CUDA device they and the inputs have memory they are copied to."""
        hosted = self.engine.hosted if self.device.kind == "cuda" else set(self.scalars)
        for name, array in self.scalars.items():
            if name in hosted:
                ort.bind_input(self.binding, name, ir.DataType.from_numpy(array.dtype), [], array.ctypes.data)
        if self.device.kind != "cuda":
            return
        self._moved = {name: array for name, array in self.scalars.items() if name not in hosted}
        scalars = Slots.of_arrays(self._moved)
        inputs = Slots.of_inputs(i for i in self.inputs if i.name not in self.engine.hosted)
        self._slots = {**scalars.offsets, **{n: scalars.nbytes + o for n, o in inputs.offsets.items()}}
        self._memory = memory = make_arena(scalars.nbytes + inputs.nbytes, self.device)
        self._staging = np.zeros(scalars.nbytes, np.uint8)
        for name, array in self._moved.items():
            dtype = ir.DataType.from_numpy(array.dtype)
            ort.bind_input(self.binding, name, dtype, [], memory.address + self._slots[name], self.device)
        self._elsewhere = {value.name for value in self.inputs if value.name in self._slots}
        for name in sorted(self._elsewhere):
            self._bind_slot(name, memory)

    def run(self, inputs: feeding.Feeds) -> None:
        """Run once.

        Raises:
            SessionError: wrong inputs; the runtime failed, or didn't follow the planned order.
        """
        inputs = feeding.taken(inputs, self.device)
        feeding.check_feeds(self.inputs, inputs, "the model")
        if self.engine.refused is not None:
            raise SessionError(self.engine.refused)
        self._feed(inputs)
        for name in self._held:
            self.binding.bind_output(name)
        if self.engine.captures and not self.engine.unchecked and self._number != self._captured:
            self._capture()
        self.engine.run(self.binding, self._number)
        for old, new in self._late.items():
            self.fixed[old].copy_in(old, self.arena.address + self._placed[new].offset)

    def _capture(self) -> None:
        """Have the run captured for replays.

        onnxruntime executes the model several times for that, updates and all: what persists is put back.
        """
        stores = list(dict.fromkeys(self.fixed.values())) if self.updates else []
        kept = [store.arena.read(0, np.dtype(np.uint8), (store.nbytes,)) for store in stores]
        self.engine.run(self.binding, self._number)
        for store, content in zip(stores, kept, strict=True):
            store.arena.write(0, content)
        self._captured = self._number

    def _feed(self, inputs: feeding.Feeds) -> None:
        memory = self._memory
        if memory is not None:
            for name, array in self._moved.items():
                offset = self._slots[name]
                self._staging[offset : offset + array.nbytes] = array.reshape(1).view(np.uint8)
            memory.write(0, self._staging)  # all scalars in one copy
        if any(map(feeding.is_on_cuda, inputs.values())):
            synchronize(self.device)  # whoever computes them may not be done
        for name, feed in inputs.items():
            if memory is None or name not in self._slots:
                self.binding.bind_ortvalue_input(name, feeding.to_ortvalue(feed, self._kinds[name]))
            elif feeding.is_on_cuda(feed) and not self.engine.captures:
                self.binding.bind_ortvalue_input(name, feed)
                self._elsewhere.add(name)
            else:  # a graph reads the address it was captured with
                self._bind_slot(name, memory)
                copy_feed(memory, self._slots[name], feed)

    def _bind_slot(self, name: str, memory: Arena) -> None:
        """Let an input be read from the memory that is kept for it, if it isn't."""
        if name in self._elsewhere:
            value = next(value for value in self.inputs if value.name == name)
            bind_at(self.binding, value, memory, self._slots[name])
            self._elsewhere.discard(name)

    def result(self, name: str) -> np.ndarray:
        """An output of the last run, where it lies if that is the host: valid until the next run."""
        place = self._placed.get(name)
        if place is not None:
            return self.arena.read(place.offset, place.dtype.numpy(), place.shape, copy=False)
        if name in self._replaced:
            old = self._replaced[name]
            return self.fixed[old].array(old)
        values = self.binding.get_outputs_as_ortvaluevector()
        found = ort.wrap(values[self._held.index(name)])
        return np.asarray(feeding.to_python(found, self.program.kinds.get(name)))


def _without_defaults(model: ir.Model, names: set[str]) -> ir.Model:
    """The model with inputs that have no defaults: those would be a second copy of what is bound."""
    copy = model.clone()
    for value in copy.graph.inputs:
        if value.name in names and value.name in copy.graph.initializers:
            del copy.graph.initializers[str(value.name)]
            value.const_value = None
    return copy
