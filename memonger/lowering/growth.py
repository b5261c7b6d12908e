"""One model at all sizes of a dimension: what is known of it at a few sizes, carried on to others.

What a value takes, and each length of its shape, is a polynomial in the size: of degree 1 in a batch, 2 in the length
of a sequence. Three sizes give it exactly. So do three pairs of an image's height and width, where both grow by steps
of the same lengths; these are multiples of `STEP`, so that convolutions with strides round all of them alike. Workspace
and what inputs decide the size of, which were measured, are taken to grow as they did last, and times in proportion.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import onnx_ir as ir

from memonger.ir.operators import operator_name
from memonger.lowering.lowered import Lowered
from memonger.shapes.inference import run_time_sized

if TYPE_CHECKING:
    from memonger.lowering.calibrate import CalibratingRun

POINTS = 3
"""Sizes that give a polynomial of degree 2."""

STEP = 64
"""Of lengths of images, and others that may be rounded: what strides of 2 divide is a multiple of 32, or 64."""

FEW = (1, 2, 4)
"""Sizes of a batch that tell of larger ones."""


def smaller(sizes: Mapping[str, int], most: float, is_batch: bool = False) -> list[dict[str, int]]:
    """Three sizes, ascending, that tell of larger ones; none where these are small themselves.

    Args:
        sizes: The larger ones, by name. Of several those grow that are large, all in step.
        most: The three are as large as they can be if the last has at most such a part of the elements.
        is_batch: Whether this is a batch.
    """
    growing = {name: size for name, size in sizes.items() if size >= (POINTS + 1) * STEP and not is_batch}
    if not growing:
        is_known = len(sizes) == 1 and min(sizes.values()) > FEW[-1]
        return [{name: few} for name in sizes for few in FEW] if is_known else []
    found = list[list[dict[str, int]]]()
    for count in range(POINTS, min(growing.values()) // STEP):
        steps = {name: STEP * ((size - STEP) // (STEP * count)) for name, size in growing.items()}
        found.append([{n: size - (count - k) * steps[n] for n, size in growing.items()} for k in range(POINTS)])
    elements = [math.prod(three[-1].values()) for three in found]
    few = next((own for own in elements if own <= most * math.prod(growing.values())), min(elements))
    return found[elements.index(few)]


@dataclass(frozen=True)
class Growth:
    """What grows with a size, as it was at three sizes.

    Attributes:
        sizes: Three, ascending.
        size: Another one, for which it is told.
    """

    sizes: tuple[int, ...]
    size: int

    @cached_property
    def _weights(self) -> tuple[Sequence[int], int]:
        """Lagrange's: by what each of the three values counts, and what the sum is divided by."""
        above, below = [], []
        for own in self.sizes:
            others = [other for other in self.sizes if other != own]
            above.append(math.prod(self.size - other for other in others))
            below.append(math.prod(own - other for other in others))
        common = math.lcm(*below)
        return [a * (common // b) for a, b in zip(above, below, strict=True)], common

    def polynomial(self, values: Sequence[int]) -> int:
        """What is so large at the three sizes is at this size; at least 0."""
        weights, common = self._weights
        return max(0, sum(weight * value for weight, value in zip(weights, values, strict=True)) // common)

    def length(self, lengths: Sequence[int]) -> int | None:
        """A length that is so much at the three sizes; None where it isn't told: it would be no integer."""
        weights, common = self._weights
        total = sum(weight * value for weight, value in zip(weights, lengths, strict=True))
        return total // common if total >= 0 and total % common == 0 else None

    def measured(self, values: Sequence[int]) -> int:
        """Bytes that runs took at the three: less at the largest than before isn't taken to go on.

        They grow as they did last, or as a polynomial where they grew faster than the size twice, to its square at
        most, as scores of attention do.
        """
        (before, last), (one, other) = self.sizes[-2:], values[-2:]
        grown = max(0, math.ceil(other + max(0, other - one) * (self.size - last) / (last - before)))
        pairs = list(zip(self.sizes, values, strict=True))
        is_faster = all(
            value and small * more >= large * value and small**2 * more <= large**2 * value
            for (small, value), (large, more) in pairwise(pairs)
        )
        return max(grown, self.polynomial(values)) if is_faster else grown

    @property
    def ratio(self) -> float:
        """The size over the largest of the three."""
        return self.size / self.sizes[-1]


_Nodes = tuple[tuple[str, str], ...]
"""Name and operator of each node of a lowered model, in its order."""


@dataclass(frozen=True)
class GrownRuns:
    """What a run of a lowered model would show at a size at which it doesn't run, by runs at three smaller sizes.

    Attributes:
        names: What grows: ``batch``, or names of dimensions.
        sizes: Their sizes at the three, and at last those that are told of.
        nodes: Of the lowered models that ran, which are the same at all three.
        runs: What ran.
        why_not_run: Where they don't tell: why the model doesn't run then; empty where it does.
    """

    names: tuple[str, ...]
    sizes: tuple[tuple[int, ...], ...]
    nodes: _Nodes
    runs: tuple["CalibratingRun", ...]
    why_not_run: str = ""

    @staticmethod
    def of(
        ran: Mapping[tuple[int, ...], "tuple[_Nodes, CalibratingRun]"], names: Sequence[str], size: Sequence[int]
    ) -> "GrownRuns | None":
        """By the three largest of these sizes: of those that differ from the one to tell of by multiples of `STEP`,
        where there are three, else of all. None if they are fewer, or other nodes ran there.

        Args:
            ran: What `ran_nodes` gives, by size: of each name one.
            names: What the sizes are of. Where there are several, all of them grow by steps of the same lengths.
            size: The size to tell of.
        """
        alike = [own for own in sorted(ran) if all((a - b) % STEP == 0 for a, b in zip(own, size, strict=True))]
        sizes = tuple((alike if len(alike) >= POINTS else sorted(ran))[-POINTS:])
        nodes = {ran[each][0] for each in sizes}
        if len(sizes) < POINTS or len(nodes) > 1:
            return None
        return GrownRuns(tuple(names), (*sizes, tuple(size)), nodes.pop(), tuple(ran[each][1] for each in sizes))

    @cached_property
    def _lengths(self) -> Growth:
        """What lengths grow with: the first of the sizes, as all others are in step with it."""
        *three, size = (own[0] for own in self.sizes)
        return Growth(tuple(three), size)

    @cached_property
    def bytes(self) -> Growth:
        """What bytes and times grow with: the product of the sizes."""
        *three, size = map(math.prod, self.sizes)
        return Growth(tuple(three), size)

    @property
    def note(self) -> str:
        """What there is to say of a plan that was made of this."""
        size = " and ".join(f"{name} {own}" for name, own in zip(self.names, self.sizes[-1], strict=True))
        few, more, last, _ = (" x ".join(map(str, own)) for own in self.sizes)
        return f"{size} didn't run: its times and workspace follow from runs at {few}, {more} and {last}."

    def of_model(self, model: ir.Model) -> "CalibratingRun | None":
        """What a run of the lowered model would show; None where it has other nodes, or nothing tells its shapes."""
        if _nodes(model) != self.nodes:
            return None
        tensors = dict[str, tuple[str, tuple[int, ...]]]()
        for name, (kind, dims) in self.runs[-1].tensors.items():
            seen = [run.tensors.get(name, ("", ())) for run in self.runs]
            if any(each != kind or len(shape) != len(dims) for each, shape in seen):
                return None
            lengths = map(self._lengths.length, zip(*(shape for _, shape in seen), strict=True))
            shape = tuple(length for length in lengths if length is not None)
            if len(shape) < len(dims):
                return None
            tensors[name] = kind, shape
        seconds = self.runs[-1].seconds
        return dataclasses.replace(
            self.runs[-1],
            orders=frozenset({tuple(name for name, _ in self.nodes)}),
            tensors=tensors,
            seconds=None if seconds is None else {name: self.bytes.ratio * own for name, own in seconds.items()},
            workspace=self._bytes([run.workspace for run in self.runs]),
            grown=self._bytes([run.grown for run in self.runs]),
            results=None,
        )

    def _bytes(self, taken: Sequence[Mapping[str, int]]) -> dict[str, int]:
        """Bytes by node, where above zero."""
        names: Iterable[str] = dict.fromkeys(name for each in taken for name in each)
        grown = {name: self.bytes.measured([each.get(name, 0) for each in taken]) for name in names}
        return {name: size for name, size in grown.items() if size}


def ran_nodes(lowered: Lowered) -> "tuple[_Nodes, CalibratingRun] | None":
    """A lowered model's nodes with what its run showed; None where it didn't run, or inputs decide sizes."""
    if lowered.run is None or run_time_sized(lowered.model):
        return None
    return _nodes(lowered.model), lowered.run


def _nodes(model: ir.Model) -> _Nodes:
    return tuple((str(node.name), operator_name(node)) for node in model.graph)
