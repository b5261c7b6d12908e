"""Smaller inputs than were planned for are filled up to the plan's sizes, and outputs cut to what was given.

Of a plan for one batch its batch, of one for ranges of sizes what lies between the steps of a range, or below it.

What fills up is the last row again: a row that was given anyway, so that no NaN, infinity or index out of range comes
in that the caller's own rows don't bring, and no largest or smallest number of a batch changes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from memonger.errors import SessionError
from memonger.runtime import feeds as feeding
from memonger.runtime.prepared import Input, Program, Ranged
from memonger.shapes.ranges import Shape, described
from memonger.words import option

Run = Callable[[feeding.Feeds], Mapping[str, np.ndarray]]
Fill = Callable[[np.ndarray, int], np.ndarray]
"""What an array is filled up with along an axis: a slice of it."""


class NoBatchError(SessionError):
    """Smaller batches can't be filled up: an output doesn't begin with the batch."""


class Smaller(NamedTuple):
    """How inputs that are smaller than a program's are filled up.

    Attributes:
        program: Which program takes them then.
        inputs: The shapes that inputs get, by name, of those that are filled up.
        outputs: The shapes of the outputs of what was given, by name.
    """

    program: int
    inputs: Mapping[str, Shape]
    outputs: Mapping[str, Shape]

    @property
    def elements(self) -> int:
        """Of the inputs, filled up."""
        return sum(map(math.prod, self.inputs.values()))


class Padding:
    """Fills up the inputs of programs, and cuts their outputs.

    The batch of a program is the first dimension of all its outputs, and of the inputs that are filled up. Inputs of
    another one, and those that have one shape in all programs, are taken as they are. Of a program for ranges of sizes
    every dimension with a range is filled up, to the next size of its range. That rows don't meet in the model
    is tried before the first such run of a program: other rows in the filling have to give the same outputs, bit for
    bit.

    Args:
        programs: Of one model, each for another batch, or for ranges of sizes.
        batches: The batch each was planned for; None: the first dimension of its first input.
        ranged: Of programs for ranges of sizes, by their number, those of all sizes.
        is_tried: False leaves the trial out: where random numbers are drawn no two runs agree.

    Raises:
        NoBatchError: an output doesn't begin with the batch; it is named.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        batches: Sequence[int | None],
        ranged: Mapping[int, Ranged] | None = None,
        *,
        is_tried: bool = True,
    ) -> None:
        self._programs, self._ranged = tuple(programs), ranged or {}
        fixed = [index for index in range(len(programs)) if index not in self._ranged]
        self._batches = {index: _batch(programs[index], batches[index]) for index in fixed}
        self._rising = sorted(fixed, key=lambda index: self._batches[index])
        shapes = [{value.name: value.shape for value in programs[index].inputs} for index in fixed]
        self._same = {
            name for name in (shapes or [{}])[0] if len(shapes) > 1 and len({one[name] for one in shapes}) == 1
        }
        self._is_tried, self._tried = is_tried, set[object]()

    def find(self, inputs: feeding.Feeds) -> Smaller | None:
        """What takes the inputs filled up, least of all; None where no plan does, or one takes them as they are.

        Raises:
            SessionError: the inputs have different numbers of rows; what fills them up would be in an output.
        """
        if any(one.takes(inputs) for one in self._ranged.values()):
            return None
        found: list[Smaller] = []
        for index in self._rising:
            rows = self._rows(index, inputs)
            if rows is not None and 0 < rows <= self._batches[index]:
                if rows == self._batches[index]:
                    return None
                program = self._programs[index]
                shapes = {value.name: value.shape for value in program.inputs if value.shape is not None}
                outputs = {tensor.name: (rows, *tensor.shape[1:]) for tensor in program.planned}
                wanted = {name: shapes[name] for name in self._filled_names(index)}
                found.append(Smaller(index, wanted, {name: outputs[name] for name in program.outputs}))
                break
        for index, one in self._ranged.items():
            try:
                filled = one.filled_up(inputs)
            except SessionError:
                if len(self._programs) == 1:
                    raise
                continue
            found += [] if filled is None else [Smaller(index, *filled)]
        return min(found, key=lambda one: one.elements, default=None)

    def run(self, smaller: Smaller, inputs: feeding.Feeds, run: Run) -> dict[str, np.ndarray]:
        """Run a program filled up.

        Args:
            smaller: What `find` found.
            inputs: The inputs it was found for.
            run: Runs the program; what it returns may lie in an arena.

        Returns: the outputs of what was given, by name, where ``run`` has them.

        Raises:
            SessionError: rows meet in the model; or what ``run`` raises.
        """
        if self._is_tried:
            self._try(smaller, inputs, run)
        return cut(run(filled_up(smaller, inputs)), smaller.outputs)

    def _try(self, smaller: Smaller, inputs: feeding.Feeds, run: Run) -> None:
        axes = frozenset(
            (name, axis)
            for name, shape in smaller.inputs.items()
            for axis, (size, given) in enumerate(zip(shape, feeding.shape_of(inputs.get(name)) or shape, strict=True))
            if size != given
        )
        if (smaller.program, axes) in self._tried:
            return
        fillings = [filled_up(smaller, inputs, fill) for fill in (_last_again, _another)]
        ours, other = (
            {name: array.copy() for name, array in cut(run(filled), smaller.outputs).items()} for filled in fillings
        )
        meeting = [name for name, array in ours.items() if array.tobytes() != other[name].tobytes()]
        if meeting:
            if smaller.program in self._ranged:
                raise SessionError(
                    f"output '{meeting[0]}' depends on what inputs are filled up with, and the plan is for "
                    f"{described(self._ranged[smaller.program].ranges)}. Plan the model for ranges without steps there."
                )
            rows = smaller.outputs[meeting[0]][0]
            raise SessionError(
                f"output '{meeting[0]}' of a row depends on the other rows of the batch: filled "
                f"up, a batch of {rows} would give others. Plan the model for it as well ({option('batch', rows)})."
            )
        if any(not np.array_equal(fillings[0][name], fillings[1][name]) for name in smaller.inputs):
            self._tried.add((smaller.program, axes))

    def _filled_names(self, index: int) -> list[str]:
        batch = self._batches[index]
        inputs = self._programs[index].inputs
        return [v.name for v in inputs if v.shape and v.shape[0] == batch and v.name not in self._same]

    def _rows(self, index: int, inputs: feeding.Feeds) -> int | None:
        """The rows of the inputs; None where one is missing, or differs in another dimension from the planned one.

        Raises:
            SessionError: the inputs have different numbers of rows.
        """
        filled, rows = set(self._filled_names(index)), dict[str, int]()
        for value in self._programs[index].inputs:
            shape = feeding.shape_of(inputs.get(value.name))
            if value.name in filled and shape and value.shape and shape[1:] == value.shape[1:]:
                rows[value.name] = shape[0]
            elif value.required and shape != value.shape:
                return None
        if len(set(rows.values())) > 1:
            listed = ", ".join(f"'{name}' has {count}" for name, count in rows.items())
            raise SessionError(f"the inputs have different numbers of rows, and can't be filled up: {listed}.")
        return next(iter(rows.values()), None)


def filled_up(smaller: Smaller, inputs: feeding.Feeds, fill: Fill | None = None) -> dict[str, feeding.Feed]:
    """The inputs filled up, on the host."""
    content = dict(inputs)
    for name, shape in smaller.inputs.items():
        if name not in inputs:
            continue
        array = inputs[name] if isinstance(inputs[name], np.ndarray) else feeding.copy_of(inputs[name])
        for axis, size in enumerate(shape):
            if array.shape[axis] < size:
                more = np.repeat((fill or _last_again)(array, axis), size - array.shape[axis], axis)
                array = np.concatenate([array, more], axis)
        content[name] = array
    return content


def _batch(program: Program, planned: int | None) -> int:
    first = next((value.shape[0] for value in program.inputs if value.required and value.shape), None)
    batch = planned if planned is not None else first
    shapes = {tensor.name: tensor.shape for tensor in program.planned}
    for name in program.outputs:
        shape = shapes.get(name)
        if batch is None or not shape or shape[0] != batch:
            is_what = "has no size that is known before a run" if shape is None else f"is {list(shape)}"
            raise NoBatchError(
                f"smaller batches can't be filled up: output '{name}' {is_what}, and so doesn't begin with the batch "
                f"of {batch if batch is not None else 'the inputs, which have none'}: its rows would meet."
            )
    assert batch is not None
    return batch


def is_smaller(inputs: Sequence[Input], feeds: feeding.Feeds) -> bool:
    """Whether what is wrong with feeds may be that they have fewer rows than planned."""
    shapes = [(value.shape, feeding.shape_of(feeds.get(value.name))) for value in inputs if value.required]
    differing = [(planned, given) for planned, given in shapes if planned != given]
    return bool(differing) and all(
        planned and given and planned[1:] == given[1:] and 0 < given[0] < planned[0] for planned, given in differing
    )


def cut(outputs: Mapping[str, np.ndarray], shapes: Mapping[str, Shape] | None) -> dict[str, np.ndarray]:
    """The beginnings of outputs, of these shapes; all of them if None."""
    if shapes is None:
        return dict(outputs)
    return {name: np.ascontiguousarray(array[tuple(map(slice, shapes[name]))]) for name, array in outputs.items()}


def _last_again(array: np.ndarray, axis: int) -> np.ndarray:
    """What an array is filled up with along an axis: the last of it."""
    return array.take([-1], axis)


def _another(array: np.ndarray, axis: int) -> np.ndarray:
    """Something else to fill up with, where there is: zeros (empty texts), or the first of it."""
    last = _last_again(array, axis)
    nothing = np.full_like(last, "" if array.dtype == object else 0)
    return array.take([0], axis) if np.array_equal(last, nothing) else nothing
