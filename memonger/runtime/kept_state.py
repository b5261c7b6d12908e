"""State between runs: inputs that a session keeps, each of which an output becomes for the next run."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir

from memonger.devices import Device
from memonger.errors import SessionError
from memonger.runtime import feeds as feeding
from memonger.runtime.arena import Arena, ArenaTensor
from memonger.runtime.binding import Binding
from memonger.runtime.engine import Engine
from memonger.runtime.program import Program
from memonger.runtime.store import Store

_NONE: Mapping[str, Any] = {}

Found = TypeVar("Found")


class KeptState:
    """Where a model's state lies: one buffer for what kernels write in place, two that swap for the rest.

    Args:
        program: Of the plan.
        state: Input → the output that is its content in the next run.
        device: Where.

    Attributes:
        state: The same.
        nbytes: Bytes of all buffers.

    Raises:
        SessionError: an input's size isn't known.
    """

    def __init__(self, program: Program, state: Mapping[str, str], device: Device) -> None:
        self.state = dict(state)
        self._tensors = {value.name: _tensor(value) for value in program.inputs if value.name in state}
        self.in_place = {old: new for old, new in state.items() if new in program.replacing}
        self._own = Store([self._tensors[name] for name in self.in_place], device)
        swapped = [tensor for name, tensor in self._tensors.items() if name not in self.in_place]
        self._buffers = Store(swapped, device), Store(swapped, device)
        self.nbytes = self._own.nbytes + 2 * self._buffers[0].nbytes
        self._turn, self._is_torn, self._lock = 0, False, threading.RLock()

    def bind(self, program: Program, engine: Engine, arena: Arena, inputs_at: Arena | None) -> "StatefulBinding":
        """The program bound in an arena, with its state where it lies."""
        bindings = []
        for turn in (0, 1) if self._buffers[0].tensors else (0,):
            now, after = self._buffers[turn], self._buffers[1 - turn]
            fixed = {name: self._own if name in self.in_place else now for name in self.state}
            written = {new: (after, old) for old, new in self.state.items() if old not in self.in_place}
            bindings.append(
                Binding(
                    program, engine, arena, fixed=fixed, updates=self.in_place, written=written, inputs_at=inputs_at
                )
            )
        return StatefulBinding(self, bindings)

    def step(self, bindings: Sequence[Binding], run: Callable[[Binding], Found]) -> Found | None:
        """Run once: the state is the next one afterwards, or the same as before where the run failed.

        Args:
            bindings: For each turn of the buffers.
            run: Runs a binding; None where nothing has run.

        Raises:
            SessionError: the run failed, and what is written in place may be lost; it was lost before.
        """
        with self._lock:
            self._check_whole()
            binding = bindings[self._turn % len(bindings)]
            self._is_torn = bool(self.in_place)
            found = run(binding)
            if found is not None:
                self._turn = 1 - self._turn
            self._is_torn = False
            return found

    def _check_whole(self) -> None:
        if self._is_torn:
            raise SessionError(
                "a run failed while it wrote over the state, which is lost: reset_state(), or load_state_dict() with "
                "one that was saved."
            )

    def _store(self, name: str) -> Store:
        return self._own if name in self.in_place else self._buffers[self._turn]

    def arrays(self) -> dict[str, np.ndarray]:
        """Copies of what is kept, by the inputs' names."""
        with self._lock:
            self._check_whole()
            return {name: np.array(self._store(name).array(name)) for name in self.state}

    def take(self, arrays: Mapping[str, Any]) -> None:
        """Take over the content of some inputs, or of none if one is wrong.

        Raises:
            SessionError: it names the one that isn't of this state, or of another type or shape.
        """
        given = {name: np.asarray(array) for name, array in arrays.items()}
        for name, array in given.items():
            tensor = self._tensors.get(name)
            if tensor is None:
                raise SessionError(
                    f"'{name}' is no state of this session; it keeps {', '.join(map(repr, self.state))}."
                )
            if (array.dtype, array.shape) != (tensor.dtype.numpy(), tensor.shape):
                raise SessionError(
                    f"state '{name}' is {tensor.dtype.numpy()}{list(tensor.shape)}, what was given is "
                    f"{array.dtype}{list(array.shape)}."
                )
        with self._lock:
            for name, array in given.items():
                self._store(name).fill(name, array)
            self._is_torn = self._is_torn and set(given) != set(self.state)

    def reset(self) -> None:
        """Zeros in all of it."""
        self.take({name: np.zeros(t.shape, t.dtype.numpy()) for name, t in self._tensors.items()})


class StatefulBinding:
    """A plan with a state bound to addresses: what `Binding` is to others."""

    def __init__(self, kept: KeptState, bindings: Sequence[Binding]) -> None:
        self._kept, self._bindings, self._last = kept, bindings, bindings[0]

    @property
    def arena(self) -> Arena:
        """Where it runs."""
        return self._last.arena

    def run(self, inputs: feeding.Feeds, targets: Mapping[str, Any] = _NONE) -> None:
        """Run once; `results` gives what came out."""

        def run(binding: Binding) -> Binding:
            binding.run(inputs, targets)
            return binding

        self._last = self._kept.step(self._bindings, run) or self._last

    def run_plain(self, inputs: feeding.Feeds, copy: bool) -> dict[str, Any] | None:
        """See `memonger.runtime.binding.Binding.run_plain`."""
        return self._kept.step(self._bindings, lambda binding: binding.run_plain(inputs, copy))

    def results(self, targets: Mapping[str, Any], copy: bool) -> dict[str, Any]:
        """The outputs of the last run by name, but for the state."""
        return self._last.results(targets, copy)

    def forget_results(self) -> None:
        """Let go what the last run left that onnxruntime allocated."""
        for binding in self._bindings:
            binding.forget_results()


def _tensor(value: feeding.Input) -> ArenaTensor:
    if value.shape is None or value.dtype is None or value.dtype == ir.DataType.STRING:
        raise SessionError(f"input '{value.name}' can't be kept: it is no tensor of a known size.")
    return ArenaTensor(value.name, value.dtype, value.shape)
