"""One plan bound to addresses that stay: its arena, tensors that persist between runs, and scalars that change."""

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from memonger.device import Device
from memonger.errors import SessionError
from memonger.plan import Plan
from memonger.runtime import feeds as feeding
from memonger.runtime import ort
from memonger.runtime.arena import HostArena
from memonger.runtime.program import Group, exposed, program_of
from memonger.runtime.session import Engine
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
    """

    def __init__(
        self,
        plan: Plan,
        device: Device,
        arena: HostArena,
        fixed: Mapping[str, Store],
        scalars: Mapping[str, np.ndarray],
        updates: Mapping[str, str],
        threads: int,
        check_order: bool,
    ) -> None:
        self.program, self.arena, self.fixed, self.updates = program_of(plan), arena, fixed, updates
        model = exposed(_without_defaults(plan.model, {*fixed, *scalars}), self.program.places, (), False)
        self.engine = Engine(Group(model, (0,), (self.program,)), device, threads, check_order)
        self.inputs = tuple(i for i in self.program.inputs if i.name not in fixed and i.name not in scalars)
        self._kinds = {value.name: value.kind for value in self.inputs}
        self.binding = self.engine.session.io_binding()
        self._placed = {place.name: place for place in self.program.places}
        self._late = {old: new for old, new in updates.items() if new in self._placed}
        self._bind_outputs()
        self._bind_fixed(scalars)

    def _bind_outputs(self) -> None:
        """Held outputs first: their place among the bound ones is where the results are read from."""
        replaced = {new: old for old, new in self.updates.items()}
        self._held = [n for n in self.program.outputs if n not in self._placed and n not in replaced]
        for name in self._held:
            self.binding.bind_output(name)
        for place in self.program.places:
            ort.bind_output(self.binding, place.name, place.dtype, place.shape, self.arena.address + place.offset)
        for new, old in replaced.items():
            if new not in self._placed:
                store = self.fixed[old]
                slot = store.slots[old]
                ort.bind_output(self.binding, new, slot.dtype, slot.shape, store.address(old))

    def _bind_fixed(self, scalars: Mapping[str, np.ndarray]) -> None:
        for name, store in self.fixed.items():
            slot = store.slots[name]
            kind = ort.enum_of(slot.dtype)
            self.binding.bind_input(name, "cpu", 0, kind, list(slot.shape), store.address(name))
        for name, array in scalars.items():
            kind = ort.enum_of(ir.DataType.from_numpy(array.dtype))
            self.binding.bind_input(name, "cpu", 0, kind, [], array.ctypes.data)
        self._scalars = scalars  # their memory is bound

    def run(self, inputs: feeding.Feeds) -> None:
        """Run once.

        Raises:
            SessionError: wrong inputs; the runtime failed, or didn't follow the planned order.
        """
        feeding.check_feeds(self.inputs, inputs, "the model")
        if self.engine.refused is not None:
            raise SessionError(self.engine.refused)
        for name, feed in inputs.items():
            self.binding.bind_ortvalue_input(name, feeding.to_ortvalue(feed, self._kinds[name]))
        for name in self._held:
            self.binding.bind_output(name)
        self.engine.run(self.binding)
        for old, new in self._late.items():
            self.fixed[old].fill(old, self.result(new))

    def result(self, name: str) -> np.ndarray:
        """An output of the last run, where it lies: valid until the next run."""
        place = self._placed.get(name)
        if place is not None:
            return self.arena.view(place.offset, place.dtype.numpy(), place.shape)
        for old, new in self.updates.items():
            if new == name:
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
