"""One model at all sizes of a dimension, from a few sizes at which it was lowered.

What a value takes is a polynomial in the size: of degree 1 in a batch, 2 in the length of a sequence. Three sizes give
it exactly. Workspace, which was measured, is taken to grow as it did last, and times in proportion.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memonger.graph.graph import Graph
from memonger.schedule import Request

POINTS = 3
"""Sizes that give a polynomial of degree 2."""

Structure = tuple[object, ...]


def structure(graph: Graph) -> Structure:
    """All of a graph but sizes and costs: its nodes, and what they write and read of one another.

    Inputs and constants are left out: a constant's name and number follow its content, which may be 1 / batch.
    """
    written = [value for writes in graph.writes for value in writes]
    number = {value: place for place, value in enumerate(written)}

    def pairs(of_nodes: Sequence[Sequence[tuple[int, int]]]) -> Structure:
        named = graph.values
        return tuple(tuple((number.get(a, named[a]), number[b]) for a, b in each) for each in of_nodes)

    return (
        graph.nodes,
        graph.ops,
        graph.forward,
        tuple(graph.planned[value] for value in written),
        tuple(tuple(number[value] for value in reads if value in number) for reads in graph.reads),
        tuple(map(len, graph.writes)),
        tuple(number[value] for value in graph.outputs if value in number),
        *map(pairs, (graph.views, graph.inplace, graph.updates)),
        tuple(tuple((number[a], number[b]) for a, b in each if a in number) for each in graph.runtime_aliases),
    )


@dataclass(frozen=True, slots=True)
class Family:
    """Requests of one structure at every size.

    Attributes:
        sizes: Three, ascending, at which the model was lowered.
        requests: Of these sizes.
        structure: Of their graphs.
    """

    sizes: tuple[int, ...]
    requests: tuple[Request, ...]
    structure: Structure

    @staticmethod
    def of(requests: Mapping[int, Request]) -> "Family | None":
        """The family of the three largest of these sizes; None if they are fewer, or their structures differ."""
        sizes = tuple(sorted(requests)[-POINTS:])
        structures = [structure(requests[size].graph) for size in sizes]
        if len(sizes) < POINTS or any(each != structures[0] for each in structures[1:]):
            return None
        return Family(sizes, tuple(requests[size] for size in sizes), structures[0])

    def has(self, graph: Graph) -> bool:
        """Whether a graph is of this structure, so that schedules of the family are schedules of it."""
        return structure(graph) == self.structure

    def request(self, size: int) -> Request:
        """The request at a size."""
        if size in self.sizes:
            return self.requests[self.sizes.index(size)]
        last, graphs = self.requests[-1], [each.graph for each in self.requests]
        ratio = size / self.sizes[-1]
        written = [[value for writes in graph.writes for value in writes] for graph in graphs]
        sizes = self._polynomial(
            [[graph.sizes[value] for value in own] for graph, own in zip(graphs, written, strict=True)], size
        )
        all_sizes = list(last.graph.sizes)
        for value, size_there in zip(written[-1], sizes, strict=True):
            all_sizes[value] = max(size_there, int(last.graph.planned[value]))  # what is planned has a byte at least
        graph = dataclasses.replace(
            last.graph,
            sizes=tuple(all_sizes),
            workspace=self._line([graph.workspace for graph in graphs[-2:]], size),
            costs=tuple(cost * ratio for cost in last.graph.costs),
        )
        nothing = [()] * len(graph.nodes)  # as byte offsets subviews hold at one size: without them more is counted
        graph = graph.with_aliases(subview=nothing, optional=nothing)
        (base,) = self._polynomial([(each.base,) for each in self.requests], size)
        run_time = last.run_time
        if run_time is not None:
            (run_time,) = self._polynomial([(each.run_time or 0,) for each in self.requests], size)
        return dataclasses.replace(last, graph=graph, base=base, run_time=run_time, estimates=None)

    def _polynomial(self, columns: Sequence[Sequence[int]], size: int) -> tuple[int, ...]:
        """What each row of three values is at a size, by Lagrange's formula, in integers."""
        above, below = [], []
        for own in self.sizes:
            others = [other for other in self.sizes if other != own]
            above.append(math.prod(size - other for other in others))
            below.append(math.prod(own - other for other in others))
        common = math.lcm(*below)
        first, second, third = (a * (common // b) for a, b in zip(above, below, strict=True))
        rows = zip(*columns, strict=True)
        return tuple(max(0, (first * a + second * b + third * c) // common) for a, b, c in rows)

    def _line(self, columns: Sequence[Sequence[int]], size: int) -> tuple[int, ...]:
        """What each row of two values, of the two largest sizes, is at a size if it grows evenly; never less than 0."""
        before, last = self.sizes[-2:]
        rows = zip(*columns, strict=True)
        return tuple(max(0, math.ceil(b + (b - a) * (size - last) / (last - before))) for a, b in rows)
