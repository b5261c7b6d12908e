"""Dimensions with a range of sizes: which of a model's inputs they are, and the sizes that some inputs have."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from memonger.model.decoding import AtLeast
from memonger.units import MOST_BATCH

Sizes = Mapping[str, int]
"""Of each dimension with a range, by its name."""

MOST_RANGES = 8
"""Dimensions of one model that may have a range: at each it is measured and checked at two more sizes."""

Size = Annotated[int, AtLeast(1, MOST_BATCH)]


@dataclass(frozen=True, slots=True)
class Range:
    """Sizes that a dimension may have: from ``least`` to ``most``, by ``step``.

    Attributes:
        least: The smallest.
        most: The largest: so many steps above the smallest.
        step: What lies between one size and the next.
        places: The axes of inputs that it is, as ``x[0]``.
    """

    least: Size
    most: Size
    step: Size = 1
    places: tuple[str, ...] = ()

    def __str__(self) -> str:
        """As ``1 to 16``, or ``64 to 512 by 32``."""
        return f"{self.least} to {self.most}" + (f" by {self.step}" if self.step > 1 else "")

    def __contains__(self, size: int) -> bool:
        """Whether a dimension may have this size."""
        return self.least <= size <= self.most and (size - self.least) % self.step == 0

    def between(self) -> int:
        """A size in the middle."""
        return self.least + (self.most - self.least) // self.step // 2 * self.step


def described(ranges: Mapping[str, Range]) -> str:
    """As ``batch 1 to 16, seq 1 to 512``."""
    return ", ".join(f"{name} {one}" for name, one in ranges.items())


def place_of(text: str) -> tuple[str, int]:
    """The input and the axis of a place, as ``x[0]``.

    Raises:
        ValueError: it is no place.
    """
    name, bracket, axis = text.rpartition("[")
    if not bracket or not axis.endswith("]") or not axis[:-1].isdecimal():
        raise ValueError(f"{text!r} is no place, as 'x[0]'")
    return name, int(axis[:-1])


def points(ranges: Mapping[str, Range]) -> tuple[dict[str, int], ...]:
    """Sizes to measure at: all at their largest, smallest, middle; and one at one end with all others at the other."""
    most, least = ({name: getattr(one, end) for name, one in ranges.items()} for end in ("most", "least"))
    corners = [most, least, {name: one.between() for name, one in ranges.items()}]
    for name in ranges:
        corners += [{**least, name: most[name]}, {**most, name: least[name]}]
    unique: list[dict[str, int]] = []
    for each in corners:
        if each not in unique:
            unique.append(each)
    return tuple(unique)


def shapes_at(
    shapes: Mapping[str, tuple[int, ...]], ranges: Mapping[str, Range], sizes: Sizes
) -> dict[str, tuple[int, ...]]:
    """The inputs' shapes, by name, with these sizes in place of those that are ranges."""
    dims_of = {name: list(shape) for name, shape in shapes.items()}
    for name, one in ranges.items():
        for text in one.places:
            where, axis = place_of(text)
            dims_of[where][axis] = sizes[name]
    return {name: tuple(shape) for name, shape in dims_of.items()}


def in_words(sizes: Sizes) -> str:
    """As ``batch 3, seq 17``."""
    return ", ".join(f"{name} {size}" for name, size in sizes.items())
