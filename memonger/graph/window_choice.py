"""Which of the windows that a graph offers are taken: those that make the steps with most bytes alive smaller.

A window saves the second copy of a part, and makes the whole live from its first part to the last read of any. Which of
both counts depends on what else is alive, so it is tried: from none taken, the windows around the worst step are added
as long as that helps. Windows of one dense block hang together, and are tried together before each node for itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memonger.graph.graph import ALIGNMENT, Graph
from memonger.graph.liveness import Sharing, Storage, assign_storage, last_reads, live_bytes, roots

TRIES = 100
"""Storages that are assigned and compared."""

_STEPS = 500_000
"""Steps of all these together: of large graphs fewer are compared."""


def storages(graph: Graph, sharing: Sharing, alignment: int = ALIGNMENT) -> tuple[Storage, ...]:
    """The storage without the windows that a graph offers; and with some of them, where that needs fewer bytes.

    Args:
        graph: Its nodes run in file order.
        sharing: What may share.
        alignment: Put on every buffer, in bytes.
    """
    plain = assign_storage(graph, sharing, alignment)
    candidates = _together(graph) if sharing.views and sharing.windows else []
    if not candidates:
        return (plain,)
    best, live = plain, live_bytes(plain.buffers, len(graph.nodes))
    taken, refused = frozenset[int](), set[int]()
    for _ in range(min(TRIES, 1 + _STEPS // max(1, len(graph.nodes)))):
        number = _next(candidates, taken, refused, live)
        if number is None:
            break
        tried = taken | candidates[number].nodes
        storage = assign_storage(graph, sharing, alignment, windows=tried)
        other = live_bytes(storage.buffers, len(graph.nodes))
        # Whether the step with most bytes alive has fewer, or where they are equal the next one, and so on
        difference = np.sort(other)[::-1] - np.sort(live)[::-1]
        found = np.flatnonzero(difference)
        if found.size and difference[found[0]] < 0:
            best, live, taken, refused = storage, other, tried, set()
        else:
            refused.add(number)
    return (plain, best) if taken else (plain,)


@dataclass(frozen=True, slots=True)
class _Together:
    """Nodes whose windows are tried together, and the first and the last step that need one of their values."""

    nodes: frozenset[int]
    start: int
    stop: int


def _next(candidates: Sequence[_Together], taken: frozenset[int], refused: set[int], live: np.ndarray) -> int | None:
    """The next candidate to try: of those that reach the step with most bytes alive."""
    worst = int(live.argmax())
    for number, candidate in enumerate(candidates):
        if number not in refused and candidate.start <= worst <= candidate.stop and candidate.nodes - taken:
            return number
    return None


def _together(graph: Graph) -> list[_Together]:
    """All nodes that offer windows of values that hang together, by size; then each node for itself."""
    steps = [step for step, windows in enumerate(graph.subviews) if windows and graph.optional[step]]
    if not steps:
        return []
    root, together = roots(graph), dict[int, list[int]]()
    for step in steps:
        together.setdefault(root[graph.subviews[step][0][0]], []).append(step)
    last = last_reads(graph)
    whole = [_of_nodes(graph, nodes, last) for nodes in together.values()]
    single = [_of_nodes(graph, [step], last) for nodes in together.values() if len(nodes) > 1 for step in nodes]
    return [*sorted(whole, key=lambda candidate: -len(candidate.nodes)), *single]


def _of_nodes(graph: Graph, nodes: Sequence[int], last: Sequence[int]) -> _Together:
    values = {value for node in nodes for part, whole, _ in graph.subviews[node] for value in (part, whole)}
    return _Together(frozenset(nodes), min(graph.producer[v] for v in values), max(last[v] for v in values))
