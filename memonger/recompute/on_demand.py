"""Dropped forward values come back right before the backward pass first needs them."""

from collections.abc import Collection

from memonger.graph import Graph


def recompute_on_demand(graph: Graph, dropped: Collection[int]) -> tuple[int, ...]:
    """The schedule in which every node of ``dropped`` runs again before the first backward step that needs it.

    What a dropped node reads, and was dropped as well, runs again before it. A copy is kept until its last reader.

    Args:
        graph: Its nodes in file order, forward ones marked.
        dropped: Forward nodes.
    """
    gone = set(dropped)
    producer = {value: node for node, writes in enumerate(graph.writes) for value in writes}
    schedule: list[int] = []
    back: set[int] = set()
    for node, reads in enumerate(graph.reads):
        if not graph.forward[node]:
            needed = _needed(graph, reads, producer, gone - back)
            schedule.extend(needed)
            back.update(needed)
        schedule.append(node)
    return tuple(schedule)


def _needed(graph: Graph, reads: tuple[int, ...], producer: dict[int, int], gone: set[int]) -> list[int]:
    """The dropped nodes that have to run again for ``reads``, in file order."""
    found: set[int] = set()
    pending = list(reads)
    while pending:
        node = producer.get(pending.pop())
        if node is not None and node in gone and node not in found:
            found.add(node)
            pending.extend(graph.reads[node])
    return sorted(found)
