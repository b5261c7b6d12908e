"""Recomputation on demand: a dropped forward value is computed again right before the backward pass first reads it."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol


class DataFlow(Protocol):
    """What `Graph` and `Problem` have in common. Nodes and values are numbered from 0, nodes in topological order."""

    @property
    def reads(self) -> Sequence[Sequence[int]]:
        """Values that each node reads."""

    @property
    def writes(self) -> Sequence[Sequence[int]]:
        """Values that each node writes."""

    @property
    def forward(self) -> Sequence[bool]:
        """Whether each node belongs to the forward pass."""


def recompute_on_demand(flow: DataFlow, dropped: Collection[int]) -> tuple[int, ...]:
    """The schedule in which every node of ``dropped`` runs again before the first backward step that needs it.

    A dropped node whose inputs are dropped as well runs after these. Every copy is kept until its last reader. Dropped
    nodes that no backward step needs do not run again. Linear in the number of reads and writes.

    Args:
        flow: A problem, or a graph whose ``forward`` is what `forward_pass` returns.
        dropped: Forward nodes that may run twice, and before their deadlines; see `in_time`.
    """
    source = {value: node for node in dropped for value in flow.writes[node]}
    missing = set(dropped)
    schedule: list[int] = []
    for node, reads in enumerate(flow.reads):
        if missing and not flow.forward[node]:
            again = needed_again(flow, reads, source, missing)
            schedule.extend(again)
            missing.difference_update(again)
        schedule.append(node)
    return tuple(schedule)


def needed_again(
    flow: DataFlow, values: Sequence[int], source: Mapping[int, int], missing: Collection[int]
) -> list[int]:
    """The nodes of ``missing`` that must run before these values can be read, ascending.

    Args:
        flow: A problem or a graph.
        values: What is to be read.
        source: The node that writes each value, at least for the values of ``missing``.
        missing: Nodes whose values are not in memory.
    """
    needed: set[int] = set()
    pending = list(values)
    while pending:
        node = source.get(pending.pop(), -1)
        if node in missing and node not in needed:
            needed.add(node)
            pending.extend(flow.reads[node])
    return sorted(needed)


def forward_pass(flow: DataFlow) -> tuple[bool, ...]:
    """Whether each node is marked forward or comes before the backward pass, which begins with its longest chain.

    Nodes that update running statistics are not marked forward although they stand among the forward nodes. They read a
    layer's values right after it ran, which is no reason to recompute these values.

    Args:
        flow: A graph, whose ``forward`` marks the nodes that compute an output of the model or the loss.
    """
    source = {value: node for node, writes in enumerate(flow.writes) if not flow.forward[node] for value in writes}
    length = [0] * len(flow.reads)
    start = list(range(len(flow.reads)))
    longest = -1
    for node, reads in enumerate(flow.reads):
        if flow.forward[node]:
            continue
        for before in (source[value] for value in reads if value in source):
            if length[before] + 1 > length[node]:
                length[node], start[node] = length[before] + 1, start[before]
        if longest < 0 or length[node] > length[longest]:
            longest = node
    begin = start[longest] if longest >= 0 else len(flow.reads)
    return tuple(node < begin or marked for node, marked in enumerate(flow.forward))


def in_time(
    flow: DataFlow, deadlines: Sequence[int], dropped: Collection[int], *, every_reader: bool = False
) -> list[int]:
    """Those of ``dropped`` that can run again before their deadlines, ascending. The others must be kept.

    Args:
        flow: A problem, or a graph whose ``forward`` is what `forward_pass` returns.
        deadlines: For each node the node before which all its runs must be, or the number of nodes.
        dropped: Forward nodes that may run twice.
        every_reader: A node may have to run again before every backward step that needs it, not only the first.
    """
    never = -1 if every_reader else len(flow.reads)
    pick = max if every_reader else min
    source = {value: node for node in dropped for value in flow.writes[node]}
    recomputed = set(dropped)
    before = dict.fromkeys(dropped, never)  # the step before which each node runs again
    for node in reversed(range(len(flow.reads))):
        when = before[node] if node in recomputed else never if flow.forward[node] else node
        if when == never:
            continue
        if node in recomputed and when > deadlines[node]:
            recomputed.discard(node)
            continue
        for value in flow.reads[node]:
            if value in source:
                before[source[value]] = pick(before[source[value]], when)
    return sorted(recomputed)
