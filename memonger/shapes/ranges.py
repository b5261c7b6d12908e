"""Dimensions with a range of sizes: which of a model's inputs they are, and the sizes that some inputs have.

Some follow from others: a mask over a cache and what is new has ``past + seq`` columns. Exporters write that as the
name of the dimension.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

from memonger.ir.decoding import AtLeast
from memonger.units import MOST_BATCH

Shape = tuple[int, ...]

Sizes = Mapping[str, int]
"""Of each dimension with a range, by its name."""

MOST_RANGES = 8
"""Dimensions of one model that may have a range: at each it is measured and checked at two more sizes."""

Size = Annotated[int, AtLeast(1, MOST_BATCH)]

Terms = Mapping[str, int]
"""Of a sum how often each dimension is in it, by name; and a number, under the empty name."""


@dataclass(frozen=True, slots=True)
class DimRange:
    """Sizes that a dimension may have: from ``least`` to ``most``, by ``step``.

    Attributes:
        least: The smallest.
        most: The largest: so many steps above the smallest.
        step: What lies between one size and the next.
        places: The axes of inputs that it is, as ``x[0]``.
        equals: The sum of others that it is, as ``past + seq``; empty for one of its own.
    """

    least: Annotated[int, AtLeast(0, MOST_BATCH)]
    most: Size
    step: Size = 1
    places: tuple[str, ...] = ()
    equals: str = ""

    def __str__(self) -> str:
        """As ``1 to 16``, ``64 to 512 by 32``, or ``past + seq``."""
        if self.equals:
            return self.equals
        return f"{self.least} to {self.most}" + (f" by {self.step}" if self.step > 1 else "")

    def __contains__(self, size: int) -> bool:
        """Whether a dimension may have this size."""
        return self.least <= size <= self.most and (size - self.least) % self.step == 0

    def rounded_up(self, size: int) -> int | None:
        """The smallest size that it may have and that is no smaller; None above the largest."""
        found = self.least + -(-max(0, size - self.least) // self.step) * self.step
        return found if found <= self.most else None

    def between(self) -> int:
        """A size in the middle."""
        return self.least + (self.most - self.least) // self.step // 2 * self.step


def described(ranges: Mapping[str, DimRange]) -> str:
    """As ``batch 1 to 16, seq 1 to 512``; sums are left out."""
    return ", ".join(f"{name} {one}" for name, one in own(ranges).items())


def own(ranges: Mapping[str, DimRange]) -> dict[str, DimRange]:
    """Those that aren't sums of others."""
    return {name: one for name, one in ranges.items() if not one.equals}


_TERM = re.compile(r"(?:([0-9]{1,10})\*)?([A-Za-z_][\w.\[\]]*)(?:\*([0-9]{1,10}))?|([0-9]{1,10})")


@lru_cache(256)
def terms_of(text: str) -> Terms:
    """The terms of a sum such as ``past + 2*seq - 1``; none of what is no sum."""
    terms: dict[str, int] = {}
    for part in re.split(r"(?<=.)(?=[+-])", re.sub(r"\s*([-+*])\s*", r"\1", text.strip())):
        match = _TERM.fullmatch(part.lstrip("+-"))
        if match is None or len(part) - len(part.lstrip("+-")) > 1:
            return {}
        times = int(match[1] or 1) * int(match[3] or 1) * int(match[4] or 1)
        terms[match[2] or ""] = terms.get(match[2] or "", 0) + (-times if part[0] == "-" else times)
    return terms


def sum_of(terms: Terms, sizes: Sizes) -> int:
    """What a sum comes to at these sizes."""
    return sum(times * (sizes[name] if name else 1) for name, times in terms.items())


def in_terms_of(terms: Terms, sizes: Sizes, ranges: Mapping[str, DimRange]) -> DimRange:
    """The range of a sum, with the single sizes put in.

    Raises:
        ValueError: it can be below 0, or is always 0; a dimension with a range is subtracted.
    """
    number = sum_of({name: times for name, times in terms.items() if name not in ranges}, sizes)
    open_terms = {name: times for name, times in terms.items() if name in ranges}
    least, most = ({name: getattr(one, end) for name, one in ranges.items()} for end in ("least", "most"))
    ends = number + sum_of(open_terms, least), number + sum_of(open_terms, most)
    text = [f"{times}*{name}" if times != 1 else name for name, times in open_terms.items()]
    text += [str(number)] if number else []
    if min(open_terms.values(), default=1) < 1 or ends[0] < 0 or not 0 < ends[1] <= MOST_BATCH:
        raise ValueError(f"{' + '.join(text)} is {ends[0]} to {ends[1]}, or subtracts what has a range")
    return DimRange(ends[0], ends[1], equals=" + ".join(text).replace("+ -", "- "))


def completed(ranges: Mapping[str, DimRange], sizes: Sizes) -> dict[str, int]:
    """These sizes with those of the sums, in the order of the ranges."""
    return {name: sum_of(terms_of(one.equals), sizes) if one.equals else sizes[name] for name, one in ranges.items()}


def place_of(text: str) -> tuple[str, int]:
    """The input and the axis of a place, as ``x[0]``.

    Raises:
        ValueError: it is no place.
    """
    name, bracket, axis = text.rpartition("[")
    if not bracket or not axis.endswith("]") or not axis[:-1].isdecimal():
        raise ValueError(f"{text!r} is no place, as 'x[0]'")
    return name, int(axis[:-1])


def points(ranges: Mapping[str, DimRange]) -> tuple[dict[str, int], ...]:
    """Sizes to measure at: all at their largest, smallest, middle; and one at one end with all others at the other."""
    free = own(ranges)
    most, least = ({name: getattr(one, end) for name, one in free.items()} for end in ("most", "least"))
    corners = [most, least, {name: one.between() for name, one in free.items()}]
    for name in free:
        corners += [{**least, name: most[name]}, {**most, name: least[name]}]
    unique: list[dict[str, int]] = []
    for each in (completed(ranges, corner) for corner in corners):
        if each not in unique:
            unique.append(each)
    return tuple(unique)


def shapes_at(
    shapes: Mapping[str, tuple[int, ...]], ranges: Mapping[str, DimRange], sizes: Sizes
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


def places(state: Mapping[str, str], ranges: Mapping[str, DimRange]) -> dict[str, dict[int, str]]:
    """For each input of a state its axes that are dimensions with a range, and which."""
    found: dict[str, dict[int, str]] = {old: {} for old in state}
    for name, one in ranges.items():
        for where, axis in map(place_of, one.places):
            if where in found and one.equals:
                raise ValueError(f"dimension {axis} of '{where}', a state, is a sum ({one}): it needs a range.")
            if where in found:
                found[where][axis] = name
    return found


def next_sizes(
    inputs: Mapping[str, Shape | None],
    outputs: Mapping[str, Shape | None],
    state: Mapping[str, str],
    axes: Mapping[str, Mapping[int, str]],
) -> dict[str, int]:
    """The sizes that a state's dimensions with a range have after a run.

    Args:
        inputs: The shapes of its inputs in this run.
        outputs: The shapes of its outputs in this run.
        state: Input → output.
        axes: See `places`.

    Raises:
        ValueError: an output differs from its input in another dimension; two disagree. The message has no subject.
    """
    sizes: dict[str, tuple[int, str]] = {}
    for old, new in state.items():
        before, after, open_axes = inputs[old], outputs[new], axes[old]
        if before is None or after is None:
            raise ValueError(f"the size of '{old if before is None else new}', a state, isn't known.")
        fits = len(before) == len(after) and all(
            axis in open_axes or size == before[axis] for axis, size in enumerate(after)
        )
        if not fits:
            raise ValueError(
                f"output '{new}' is {list(after)} and can't be input '{old}' of the next run, which is {list(before)}: "
                "only dimensions with a range may change."
            )
        for axis, name in open_axes.items():
            size, other = sizes.setdefault(name, (after[axis], new))
            if size != after[axis]:
                raise ValueError(f"'{name}' is {size} in output '{other}' and {after[axis]} in '{new}', both states.")
    return {name: size for name, (size, _) in sizes.items()}
