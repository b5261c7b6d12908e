"""A model's shapes at many sizes, with its rules run once: what they compute is noted, and repeated with other numbers.

The rules of `memonger.shapes.sizes` are given `Dim`s in place of numbers. These note each operation, and each
comparison with its answer. At all sizes at which every comparison has the same answer the same operations give the
shapes. At others the rules run again, and what they do there is noted as well: a dimension of 1 may be broadcast, for
example.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from memonger.shapes.ranges import DimRange, shapes_at
from memonger.shapes.shaping import Shape
from memonger.shapes.sizes import Sizes, SizesError

MOST_TRACES = 16
"""Of one model: at sizes that none of them holds for the rules themselves run."""

Operation = Callable[[Any, Any], Any]
Entry = tuple[Operation, int, int]  # of two numbers, by their places


class ShapesAt(NamedTuple):
    """The shapes of a model's values at one size.

    Attributes:
        distinct: Each shape once; None where what the inputs hold decides it, or it is no tensor.
        of_value: For each value the place of its shape among them.
    """

    distinct: Sequence[Shape | None]
    of_value: Sequence[int]

    def of_each(self) -> list[Shape | None]:
        """The shape of each value."""
        return [self.distinct[place] for place in self.of_value]

    @staticmethod
    def of(shapes: Sequence[Shape | None]) -> "ShapesAt":
        """The same from the shape of each value."""
        places: dict[Shape | None, int] = {}
        of_value = tuple(places.setdefault(shape, len(places)) for shape in shapes)
        return ShapesAt(list(places), of_value)


class Tape:
    """What is noted while rules run. Numbers have places: sizes and results from 0 on, constants from -1 down."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.values, self.constants = list(sizes), dict[int, int]()
        self.dims: dict[Entry, Dim] = {}
        self.tests: dict[Entry, bool] = {}

    def place(self, number: "Dim | int") -> int:
        """The place of a number."""
        return number.place if isinstance(number, Dim) else self.constants.setdefault(number, -1 - len(self.constants))

    def result(self, how: Operation, one: "Dim | int", other: "Dim | int") -> "Dim":
        """A number computed from two; the same object for the same two."""
        entry = how, self.place(one), self.place(other)
        if entry not in self.dims:
            self.values.append(how(_plain(one), _plain(other)))
            self.dims[entry] = Dim(self, len(self.values) - 1)
        return self.dims[entry]

    def test(self, how: Operation, one: "Dim", other: "Dim | int") -> bool:
        """The answer of a comparison."""
        answer = bool(how(_plain(one), _plain(other)))
        self.tests[how, one.place, self.place(other)] = answer
        return answer


def _operation(
    how: Operation, neutral: int | None = None, *, reflected: bool = False
) -> Callable[["Dim", object], Any]:
    def compute(self: "Dim", other: object) -> Any:
        number = _number(other)
        if number is None:
            return NotImplemented
        if type(number) is int and number == neutral:
            return self
        return self.tape.result(how, number, self) if reflected else self.tape.result(how, self, number)

    return compute


_reflected = partial(_operation, reflected=True)


def _comparison(how: Operation) -> Callable[["Dim", object], Any]:
    def compare(self: "Dim", other: object) -> Any:
        number = _number(other)
        return NotImplemented if number is None else self.tape.test(how, self, number)

    return compare


class Dim:
    """A dimension that varies, as rules get it; what needs it as a plain number raises TypeError."""

    __slots__ = ("place", "tape")
    __hash__ = None  # type: ignore[assignment]  # whether two are equal is a comparison, and has to be noted

    def __init__(self, tape: Tape, place: int) -> None:
        self.tape, self.place = tape, place

    __add__, __radd__ = _operation(operator.add, 0), _reflected(operator.add, 0)
    __sub__, __rsub__ = _operation(operator.sub, 0), _reflected(operator.sub)
    __mul__, __rmul__ = _operation(operator.mul, 1), _reflected(operator.mul, 1)
    __floordiv__, __rfloordiv__ = _operation(operator.floordiv, 1), _reflected(operator.floordiv)
    __mod__, __rmod__ = _operation(operator.mod), _reflected(operator.mod)
    __eq__, __ne__ = _comparison(operator.eq), _comparison(operator.ne)
    __lt__, __le__ = _comparison(operator.lt), _comparison(operator.le)
    __gt__, __ge__ = _comparison(operator.gt), _comparison(operator.ge)

    def __neg__(self) -> "Dim":
        return self.tape.result(operator.sub, 0, self)

    def __abs__(self) -> "Dim":
        return -self if self.tape.test(operator.lt, self, 0) else self

    def __bool__(self) -> bool:
        return self.tape.test(operator.ne, self, 0)


def _number(given: object) -> "Dim | int | None":
    """A number as the tape takes it; None for anything else."""
    if isinstance(given, Dim | int):
        return given
    return int(given) if isinstance(given, np.integer) else None


def _plain(number: Dim | int) -> int:
    return number.tape.values[number.place] if isinstance(number, Dim) else number


@dataclass(frozen=True, slots=True)
class _SizeTrace:
    """What rules computed at some sizes. Numbers have places: constants, then sizes, then results."""

    constants: tuple[int, ...]
    entries: tuple[Entry, ...]
    tests: tuple[tuple[Operation, int, int, bool], ...]
    distinct: tuple[tuple[int, ...] | None, ...]  # shapes, by the places of their dimensions
    of_value: Sequence[int]

    @staticmethod
    def of(tape: Tape, shapes: Sequence[tuple[Dim | int, ...] | None]) -> "_SizeTrace":
        """What a tape has, and the shapes that came out."""
        by_place = [None if shape is None else tuple(map(tape.place, shape)) for shape in shapes]
        constants = len(tape.constants)
        distinct, of_value = ShapesAt.of(by_place)

        def moved(place: int) -> int:
            return constants + place if place >= 0 else -1 - place

        return _SizeTrace(
            constants=tuple(tape.constants),
            entries=tuple((how, moved(a), moved(b)) for how, a, b in tape.dims),
            tests=tuple((how, moved(a), moved(b), answer) for (how, a, b), answer in tape.tests.items()),
            distinct=tuple(None if each is None else tuple(map(moved, each)) for each in distinct),
            of_value=of_value,
        )

    def at(self, sizes: Sequence[int]) -> ShapesAt | None:
        """The shapes at these sizes; None where a comparison has another answer there."""
        values = [*self.constants, *sizes]
        try:
            for how, a, b in self.entries:
                values.append(how(values[a], values[b]))
        except ZeroDivisionError:  # a comparison behind it would have had another answer
            return None
        for how, a, b, answer in self.tests:
            if how(values[a], values[b]) is not answer:
                return None
        shapes = [None if each is None else tuple([values[place] for place in each]) for each in self.distinct]
        return ShapesAt(shapes, self.of_value)


class TracedSizes:
    """The shapes of some of a model's values at sizes of its ranges.

    Args:
        sizes: The model's rules.
        names: Of the values.
        shapes: Of its inputs, at any sizes of the ranges.
        ranges: With their places.
    """

    def __init__(
        self, sizes: Sizes, names: Sequence[str], shapes: Mapping[str, Shape], ranges: Mapping[str, DimRange]
    ) -> None:
        self._sizes, self._shapes, self._ranges = sizes, shapes, ranges
        place = {name: number for number, name in enumerate(sizes.names)}
        self._values = [place[name] for name in names]
        self._traces: list[_SizeTrace] = []  # the one that was used last comes first
        self._left = MOST_TRACES

    def at(self, sizes: Sequence[int]) -> ShapesAt:
        """The shapes at sizes in the order of the ranges.

        Raises:
            SizesError: the shapes don't go together.
        """
        for number, trace in enumerate(self._traces):
            shapes = trace.at(sizes)
            if shapes is not None:
                if number:
                    self._traces.insert(0, self._traces.pop(number))
                return shapes
        shapes = ShapesAt.of(self._by_rules(sizes))
        if self._left:
            self._left -= 1
            tape = Tape(sizes)
            try:
                made = _SizeTrace.of(tape, self._by_rules([Dim(tape, place) for place in range(len(sizes))]))
            except SizesError:
                return shapes  # a rule needs plain numbers
            again = made.at(sizes)
            if again is not None and again.of_each() == shapes.of_each():
                self._traces.insert(0, made)
        return shapes

    def _by_rules(self, sizes: Sequence[Any]) -> list[Shape | None]:
        at = dict(zip(self._ranges, sizes, strict=True))
        shapes = self._sizes.at(shapes_at(self._shapes, self._ranges, at))
        return [shapes[place] for place in self._values]
