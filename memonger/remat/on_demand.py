"""Dropped forward values come back right before the backward pass first needs them."""

from collections.abc import Collection, Mapping, Sequence


def recompute_on_demand(
    reads: Sequence[Sequence[int]],
    writes: Sequence[Sequence[int]],
    forward: Sequence[bool],
    dropped: Collection[int],
) -> tuple[int, ...]:
    """The schedule in which every node of ``dropped`` runs again before the first backward step that needs it.

    What a dropped node reads, and was dropped as well, runs again before it. A copy is kept until its last reader.
    Nodes that no backward step needs don't run again. Linear in the reads and writes.

    Args:
        reads: Values each node reads, of a `Problem` or a `Graph`.
        writes: Values each node writes.
        forward: Whether each node belongs to the forward pass; see `forward_pass`.
        dropped: Forward nodes that may run twice, before their deadline; see `in_time`.
    """
    source = {value: node for node in dropped for value in writes[node]}
    gone = set(dropped)
    schedule: list[int] = []
    for node, wanted in enumerate(reads):
        if gone and not forward[node]:
            needed = needed_again(wanted, reads, source, gone)
            schedule.extend(needed)
            gone.difference_update(needed)
        schedule.append(node)
    return tuple(schedule)


def needed_again(
    wanted: Sequence[int], reads: Sequence[Sequence[int]], source: Mapping[int, int], gone: Collection[int]
) -> list[int]:
    """The nodes of ``gone`` that have to run for ``wanted`` to be there, in file order.

    Args:
        wanted: Values.
        reads: Values each node reads.
        source: The node that writes a value, for the values of ``gone`` at least.
        gone: Nodes whose values aren't there.
    """
    found: set[int] = set()
    pending = list(wanted)
    while pending:
        node = source.get(pending.pop(), -1)
        if node in gone and node not in found:
            found.add(node)
            pending.extend(reads[node])
    return sorted(found)


def forward_pass(
    reads: Sequence[Sequence[int]], writes: Sequence[Sequence[int]], forward: Sequence[bool]
) -> tuple[bool, ...]:
    """``forward``, and the nodes that stand before the backward pass begins: at its longest chain's first node.

    Among the forward nodes stand those that update running statistics. They read a layer's values right after it ran,
    which is no reason to recompute these.

    Args:
        reads: Values each node reads, of a `Graph`.
        writes: Values each node writes.
        forward: Whether each node computes the model's own outputs or the loss.
    """
    source = {value: node for node, written in enumerate(writes) if not forward[node] for value in written}
    length = [0] * len(reads)
    start = list(range(len(reads)))
    longest = -1
    for node, wanted in enumerate(reads):
        if forward[node]:
            continue
        for before in (source[value] for value in wanted if value in source):
            if length[before] + 1 > length[node]:
                length[node], start[node] = length[before] + 1, start[before]
        if longest < 0 or length[node] > length[longest]:
            longest = node
    begin = start[longest] if longest >= 0 else len(reads)
    return tuple(node < begin or of_pass for node, of_pass in enumerate(forward))


def in_time(
    reads: Sequence[Sequence[int]],
    writes: Sequence[Sequence[int]],
    forward: Sequence[bool],
    deadline: Sequence[int],
    dropped: Collection[int],
    *,
    often: bool = False,
) -> list[int]:
    """Those of ``dropped`` that run again before their deadline, ascending; the others have to be kept.

    Args:
        reads: Values each node reads, of a `Problem` or a `Graph`.
        writes: Values each node writes.
        forward: Whether each node belongs to the forward pass; see `forward_pass`.
        deadline: For each node the one before which all its runs have to be.
        dropped: Forward nodes that may run twice.
        often: They run again before any of the backward steps that need them, not before the first alone.
    """
    never = -1 if often else len(reads)
    pick = max if often else min
    source = {value: node for node in dropped for value in writes[node]}
    gone = set(dropped)
    need = dict.fromkeys(dropped, never)  # the step before which the node runs again
    for node in reversed(range(len(reads))):
        when = need[node] if node in gone else never if forward[node] else node
        if when == never:
            continue
        if node in gone and when > deadline[node]:
            gone.discard(node)
            continue
        for value in reads[node]:
            if value in source:
                need[source[value]] = pick(need[source[value]], when)
    return sorted(gone)
