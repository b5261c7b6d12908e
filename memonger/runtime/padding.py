"""Smaller batches than were planned for: inputs are filled up to the plan's batch, outputs cut to the rows given.

What fills up is the last row again: a row that was given anyway, so that no NaN, infinity or index out of range comes
in that the caller's own rows don't bring, and no largest or smallest number of a batch changes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from memonger.errors import SessionError
from memonger.runtime import feeds as feeding
from memonger.runtime.program import Program
from memonger.words import option

Run = Callable[[feeding.Feeds], Mapping[str, np.ndarray]]
Fill = Callable[[np.ndarray, int], np.ndarray]


class NoBatchError(SessionError):
    """Smaller batches can't be filled up: an output doesn't begin with the batch."""


class Smaller(NamedTuple):
    """Which program takes a batch that is smaller than its own, and how many rows it has."""

    program: int
    rows: int


class Padding:
    """Fills up the inputs of programs, and cuts their outputs.

    The batch of a program is the first dimension of all its outputs, and of the inputs that are filled up. Inputs of
    another one, and those that have one shape in all programs, are taken as they are. That rows don't meet in the model
    is tried before the first such run of a program: other rows in the filling have to give the same outputs, bit for
    bit.

    Args:
        programs: Of one model, each for another batch.
        batches: The batch each was planned for; None: the first dimension of its first input.
        is_tried: False leaves the trial out: where random numbers are drawn no two runs agree.

    Raises:
        NoBatchError: an output doesn't begin with the batch; it is named.
    """

    def __init__(self, programs: Sequence[Program], batches: Sequence[int | None], *, is_tried: bool = True) -> None:
        self._programs = tuple(programs)
        self._batches = tuple(_batch(*pair) for pair in zip(programs, batches, strict=True))
        self._rising = sorted(range(len(programs)), key=lambda index: self._batches[index])
        shapes = [{value.name: value.shape for value in program.inputs} for program in programs]
        self._fixed = {
            name for name, shape in shapes[0].items() if len(shapes) > 1 and all(one[name] == shape for one in shapes)
        }
        self._tried = set[int]() if is_tried else set(range(len(programs)))

    def find(self, inputs: feeding.Feeds) -> Smaller | None:
        """What takes the inputs filled up; None where no plan does, or one takes them as they are.

        Raises:
            SessionError: the inputs have different numbers of rows.
        """
        for index in self._rising:
            rows = self._rows(index, inputs)
            if rows is not None and 0 < rows <= self._batches[index]:
                return Smaller(index, rows) if rows < self._batches[index] else None
        return None

    def run(self, smaller: Smaller, inputs: feeding.Feeds, run: Run) -> dict[str, np.ndarray]:
        """Run a program filled up.

        Args:
            smaller: What `find` found.
            inputs: The inputs it was found for.
            run: Runs the program; what it returns may lie in an arena.

        Returns: the outputs of the rows given, by name, where ``run`` has them.

        Raises:
            SessionError: rows meet in the model; or what ``run`` raises.
        """
        index, rows = smaller
        if index not in self._tried:
            self._try(smaller, inputs, run)
        return cut(run(self.filled(index, inputs)), rows)

    def filled(self, index: int, inputs: feeding.Feeds, fill: Fill | None = None) -> dict[str, feeding.Feed]:
        """The inputs of a program filled up, on the host."""
        batch, content = self._batches[index], dict(inputs)
        for name in self._filled_names(index):
            if name in inputs:
                feed = inputs[name] if isinstance(inputs[name], np.ndarray) else feeding.copy_of(inputs[name])
                content[name] = (fill or last_row_again)(feed, batch)
        return content

    def _try(self, smaller: Smaller, inputs: feeding.Feeds, run: Run) -> None:
        index, rows = smaller
        fillings = [self.filled(index, inputs, fill) for fill in (last_row_again, _another)]
        ours, other = ({name: array.copy() for name, array in cut(run(filled), rows).items()} for filled in fillings)
        meeting = [name for name, array in ours.items() if array.tobytes() != other[name].tobytes()]
        if meeting:
            raise SessionError(
                f"output '{meeting[0]}' of a row depends on the other rows of the batch: filled "
                f"up, a batch of {rows} would give others. Plan the model for it as well ({option('batch', rows)})."
            )
        if any(not np.array_equal(fillings[0][name], fillings[1][name]) for name in self._filled_names(index)):
            self._tried.add(index)

    def _filled_names(self, index: int) -> list[str]:
        batch = self._batches[index]
        inputs = self._programs[index].inputs
        return [v.name for v in inputs if v.shape and v.shape[0] == batch and v.name not in self._fixed]

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


def is_smaller(inputs: Sequence[feeding.Input], feeds: feeding.Feeds) -> bool:
    """Whether what is wrong with feeds may be that they have fewer rows than planned."""
    shapes = [(value.shape, feeding.shape_of(feeds.get(value.name))) for value in inputs if value.required]
    differing = [(planned, given) for planned, given in shapes if planned != given]
    return bool(differing) and all(
        planned and given and planned[1:] == given[1:] and 0 < given[0] < planned[0] for planned, given in differing
    )


def cut(outputs: Mapping[str, np.ndarray], rows: int | None) -> dict[str, np.ndarray]:
    """The first rows of outputs; all of them if None."""
    return dict(outputs) if rows is None else {name: array[:rows] for name, array in outputs.items()}


def last_row_again(rows: np.ndarray, batch: int) -> np.ndarray:
    """Rows filled up to a batch with the last of them."""
    return np.concatenate([rows, np.repeat(rows[-1:], batch - len(rows), axis=0)]) if len(rows) < batch else rows


def _another(rows: np.ndarray, batch: int) -> np.ndarray:
    """Rows filled up with other rows, where there are any: zeros (empty texts), or the first row again."""
    nothing = np.full_like(rows[-1:], "" if rows.dtype == object else 0)
    row = rows[:1] if np.array_equal(rows[-1:], nothing) else nothing
    return np.concatenate([rows, np.repeat(row, batch - len(rows), axis=0)])
