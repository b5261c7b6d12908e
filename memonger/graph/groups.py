"""Groups: values that lie side by side in the arena, as one range of bytes that can be sent or added as a whole.

A group is a buffer that no node writes: its members lie inside it at fixed places, in the order in which they are
given, and it is there from the first member's first byte to the last one's last read.
"""

from collections.abc import Collection, Sequence
from itertools import chain

from memonger.errors import PlanError
from memonger.graph.graph import Graph


def places(graph: Graph, members: Sequence[int], alignment: int) -> dict[int, int]:
    """The first byte of each member in its group, in their order.

    Between two there are only as many bytes as the alignment takes.
    """
    found, end = dict[int, int](), 0
    for value in members:
        found[value] = -(-end // alignment) * alignment
        end = found[value] + graph.sizes[value]
    return found


def in_buckets(graph: Graph, values: Collection[int], first: int, rest: int) -> tuple[tuple[int, ...], ...]:
    """Values in groups, in the order in which nodes write them: each is full once it has so many bytes.

    Args:
        graph: Its nodes run in file order.
        values: By number.
        first: Bytes of the first group: a small one is full early.
        rest: Bytes of each later one.
    """
    found, size = [list[int]()], 0
    for value in sorted(values, key=lambda value: (graph.producer[value], value)):
        if size >= (first if len(found) == 1 else rest):
            found.append([])
            size = 0
        found[-1].append(value)
        size += graph.sizes[value]
    return tuple(map(tuple, found)) if values else ()


def check_groups(graph: Graph, groups: Sequence[Collection[int]]) -> None:
    """Every group has members, all of them in the arena, and none is in two groups.

    Raises:
        PlanError: it names the value.
    """
    seen: set[int] = set()
    for members in groups:
        if not members:
            raise PlanError("a group has no values: give each at least one.")
        for value in members:
            if not 0 <= value < len(graph.values):
                raise PlanError(f"a group has value {value}, and the graph has {len(graph.values)} values.")
            if not graph.planned[value]:
                raise PlanError(f"value '{graph.values[value]}' is in a group, but isn't kept in the arena.")
    for value in chain.from_iterable(groups):
        if value in seen:
            raise PlanError(f"value '{graph.values[value]}' is twice in groups: it has one place.")
        seen.add(value)
