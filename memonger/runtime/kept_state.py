"""State between runs: inputs that a session keeps, each of which an output becomes for the next run.

With ranges of sizes a state has the shape of its output afterwards: a cache grows by what each run appends.
"""

import math
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from memonger.devices import Device
from memonger.errors import SessionError
from memonger.ir.element_types import ElementType
from memonger.runtime.arena import ArenaTensor
from memonger.runtime.binding import Persistent
from memonger.runtime.prepared import Program
from memonger.runtime.store import Store
from memonger.shapes.ranges import DimRange, Shape, next_sizes, own, places
from memonger.words import quoted

_NONE: Mapping[str, Any] = {}

Found = TypeVar("Found")


class KeptState:
    """Where a model's state lies: one buffer for what kernels write in place, two that swap for the rest.

    Each has room for the largest size; a run reads and writes as much from its beginning as there is.

    Args:
        program: Of the plan; with ranges of sizes at the largest of them.
        state: Input → the output that is its content in the next run.
        device: Where.
        ranges: Of a plan for ranges of sizes, those.

    Attributes:
        state: The same.
        sizes: Of its dimensions with a range, by name, as far as what is kept decides them.
        grows: Whether a run leaves it longer than it was.
        turns: 2 where buffers swap, else 1: even and odd runs are bound to other addresses.
        nbytes: Bytes of all buffers.

    Raises:
        SessionError: an input's size isn't known.
    """

    def __init__(
        self, program: Program, state: Mapping[str, str], device: Device, ranges: Mapping[str, DimRange] = _NONE
    ) -> None:
        self.state, self._ranges, self._axes = dict(state), ranges, places(state, ranges)
        self._tensors = dict[str, ArenaTensor]()
        for value in program.inputs:
            if value.name in state:
                if value.shape is None or value.dtype is None or value.dtype == ElementType.STRING:
                    raise SessionError(f"input '{value.name}' can't be kept: it is no tensor of a known size.")
                self._tensors[value.name] = ArenaTensor(value.name, value.dtype, value.shape)
        self.in_place = {old: new for old, new in state.items() if new in program.replacing}
        self._once = {old for old, new in state.items() if new in program.replacing | program.growing}
        self._own = Store([self._tensors[name] for name in self._tensors if name in self._once], device)
        swapped = [tensor for name, tensor in self._tensors.items() if name not in self._once]
        self._buffers = Store(swapped, device), Store(swapped, device)
        self.turns = 2 if swapped else 1
        self.nbytes = self._own.nbytes + 2 * self._buffers[0].nbytes
        self._turn, self._is_torn, self._lock = 0, False, threading.RLock()
        given = {value.name for value in program.inputs} - state.keys()
        names = {name for of_input in self._axes.values() for name in of_input.values()}
        free = {name for name in names if any(place.rpartition("[")[0] in given for place in ranges[name].places)}
        after = self._after(program, {value.name: value.shape for value in program.inputs}) if names else {}
        grown = {name for name in names if after[name] != ranges[name].most}
        self.grows = bool(grown)
        # An empty state has the smallest sizes of those that grow, and of those that no other input has.
        self._least = {name: ranges[name].least for name in sorted(grown | (names - free))}
        self.sizes: Mapping[str, int] = self._least
        self._next: Mapping[str, int] = self._least

    def persistent(self, program: Program, turn: int) -> Persistent:
        """For a binding of a program at one turn of the buffers what persists, and where."""
        before = {value.name: value.shape for value in program.inputs}
        after = {old: program.output_shapes.get(new) for old, new in self.state.items()}
        own, other, last = self._own, self._buffers[turn], self._buffers[1 - turn]
        fixed = {name: store for store in (_part(own, before), _part(other, before)) for name in store.tensors}
        targets = {name: store for store in (_part(own, after), _part(last, after)) for name in store.tensors}
        written = {new: (targets[old], old) for old, new in self.state.items() if old not in self.in_place}
        return Persistent(fixed, updates=self.in_place, written=written)

    def step(self, run: Callable[[int], Found | None], given: Mapping[str, Any] = _NONE) -> Found | None:
        """Run once: the state is the next one afterwards, or the same as before where the run failed.

        Args:
            run: Runs at a turn of the buffers, and says so before by `begin`; None where nothing has run.
            given: What the run reads in place of what is kept, by the inputs' names; what it replaces is held until
                the run has succeeded.

        Raises:
            SessionError: the state would be larger than its range, and nothing has run; the run failed, and what is
                written in place may be lost; it was lost before.
        """
        with self._lock:
            if given:
                arrays = {name: np.asarray(array) for name, array in given.items()}
                self._sizes_of(arrays)
                before = {name: np.array(self._content(name, self.sizes).array(name)) for name in arrays}
                sizes, was_torn = self.sizes, self._is_torn
                self.take(arrays)
                try:
                    return self.step(run)
                except BaseException:
                    is_whole = self.in_place.keys() <= before.keys()
                    self.sizes, self._is_torn = sizes, was_torn or (self._is_torn and not is_whole)
                    for name, array in before.items():
                        self._content(name, sizes).fill(name, array)
                    raise
            self._check_whole()
            found = run(self._turn)
            if found is not None:
                self._turn, self.sizes = (self._turn + 1) % self.turns, self._next
            self._is_torn = False
            return found

    def begin(self, program: Program) -> None:
        """Say that a run of a program is next.

        Raises:
            SessionError: the state would be larger than its range.
        """
        if self._ranges:
            inputs = {value.name: value.shape for value in program.inputs}
            sizes = self._after(program, inputs)
            for name, size in sizes.items():
                if size not in self._ranges[name]:
                    raise SessionError(
                        f"after this run '{name}' of the state would be {size}, and the plan is for "
                        f"{self._ranges[name]}: nothing has run. Give less at once, begin anew (reset_state()), or "
                        "plan for a larger range."
                    )
            for old in self._once:
                before, after = inputs[old] or (), program.output_shapes[self.state[old]] or ()
                if before != after and (old in self.in_place or not _is_longer(before, after)):
                    raise SessionError(
                        f"'{old}' is written where it lies, and can't become {list(after)} from {list(before)}."
                    )
            self._next = sizes
        self._is_torn = bool(self.in_place)

    def sizes_with(self, given: Mapping[str, Any]) -> Mapping[str, int]:
        """The sizes of the state once some inputs are taken over.

        Raises:
            SessionError: as `take`.
        """
        with self._lock:
            return self._sizes_of({name: np.asarray(array) for name, array in given.items()}) if given else self.sizes

    def _after(self, program: Program, inputs: Mapping[str, Shape | None]) -> dict[str, int]:
        """The sizes after a run of a program with inputs of these shapes."""
        try:
            return next_sizes(inputs, program.output_shapes, self.state, self._axes)
        except ValueError as error:
            raise SessionError(str(error)) from error

    def _check_whole(self) -> None:
        if self._is_torn:
            raise SessionError(
                "a run failed while it wrote over the state, which is lost: reset_state(), or load_state_dict() with "
                "one that was saved."
            )

    def _content(self, name: str, sizes: Mapping[str, int]) -> Store:
        """What is kept of an input at these sizes; those that nothing decides are the smallest."""
        tensor, axes = self._tensors[name], self._axes[name]
        shape = tuple(
            sizes.get(axes[axis], self._ranges[axes[axis]].least) if axis in axes else dim
            for axis, dim in enumerate(tensor.shape)
        )
        return _part(self._own if name in self._once else self._buffers[self._turn], {name: shape})

    def arrays(self) -> dict[str, np.ndarray]:
        """Copies of what is kept, by the inputs' names."""
        with self._lock:
            self._check_whole()
            return {name: np.array(self._content(name, self.sizes).array(name)) for name in self.state}

    def take(self, arrays: Mapping[str, Any]) -> None:
        """Take over the content of some inputs, or of none if one is wrong.

        Raises:
            SessionError: it names the one that isn't of this state, or of another type or shape.
        """
        given = {name: np.asarray(array) for name, array in arrays.items()}
        with self._lock:
            sizes = self._sizes_of(given)
            for name, array in given.items():
                self._content(name, sizes).fill(name, array)
            self.sizes = sizes
            self._is_torn = self._is_torn and set(given) != set(self.state)

    def _sizes_of(self, given: Mapping[str, np.ndarray]) -> dict[str, int]:
        """The sizes of a state of which this is given."""
        sizes: dict[str, int] = {}
        for name, array in given.items():
            tensor = self._tensors.get(name)
            if tensor is None:
                raise SessionError(f"'{name}' is no state of this session; it keeps {quoted(self.state)}.")
            axes = self._axes[name]
            fits = array.ndim == len(tensor.shape) and all(
                dim in self._ranges[axes[axis]] if axis in axes else dim == tensor.shape[axis]
                for axis, dim in enumerate(array.shape)
            )
            if array.dtype != tensor.dtype.numpy() or not fits:
                texts = {axis: f"{dim} {self._ranges[dim]}" for axis, dim in axes.items()}
                dims = [texts.get(axis, str(dim)) for axis, dim in enumerate(tensor.shape)]
                raise SessionError(
                    f"state '{name}' is {tensor.dtype.numpy()}[{', '.join(dims)}], what was given is "
                    f"{array.dtype}{list(array.shape)}."
                )
            for axis, dim in axes.items():
                if sizes.setdefault(dim, array.shape[axis]) != array.shape[axis]:
                    raise SessionError(f"'{dim}' is {sizes[dim]} in one state and {array.shape[axis]} in '{name}'.")
        for name in self.state.keys() - given.keys():
            wrong = next(
                (d for d in self._axes[name].values() if sizes.get(d, self.sizes.get(d)) != self.sizes.get(d)), None
            )
            if wrong is not None:
                raise SessionError(f"'{wrong}' would be another in '{name}', which isn't given: give all of the state.")
        return {**self.sizes, **sizes}

    def reset(self) -> None:
        """Zeros in all of it, and none of what grows."""
        with self._lock:
            self._is_torn, self.sizes = False, self._least
            most = {name: one.most for name, one in own(self._ranges).items()} | self._least
            for name, tensor in self._tensors.items():
                content = self._content(name, most)
                if math.prod(content.tensors[name].shape):
                    content.fill(name, np.zeros((), tensor.dtype.numpy()))


def _is_longer(before: Shape, after: Shape) -> bool:
    """Whether a tensor of one shape is the beginning of one of another, which has more along its outermost axis."""
    axis = next(axis for axis, (one, other) in enumerate(zip(before, after, strict=True)) if one != other)
    is_outermost = all(dim == 1 for dim in after[:axis])
    return is_outermost and before[axis] < after[axis] and before[axis + 1 :] == after[axis + 1 :]


def _part(store: Store, shapes: Mapping[str, Shape | None]) -> Store:
    """The beginning of each buffer of a store, as a tensor of a shape; whole where none is known."""
    return store.parts(
        ArenaTensor(name, tensor.dtype, shapes.get(name) or tensor.shape, tensor.offset)
        for name, tensor in store.tensors.items()
    )
