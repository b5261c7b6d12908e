"""Evaluation orders in which every node runs once and little memory is live at a time.

Finding the best order is NP-hard (Sethi 1975). List schedulers run at each step the best node, by some key, of those
whose inputs are ready; `by_peak` searches from what they and onnxruntime make of a graph (`least_peak`).
"""

import heapq
from collections.abc import Callable

from memonger.graph.graph import Graph
from memonger.graph.schedule import Sources, default_order, post_order, readers_of
from memonger.schedule.least_peak import OrderingProblem, least_peak

Key = Callable[[int], tuple[float, ...]]


def file_order(graph: Graph) -> tuple[int, ...]:
    """The order the model is written in."""
    return tuple(range(len(graph.nodes)))


def by_growth(graph: Graph) -> tuple[int, ...]:
    """Run next the ready node that adds the fewest bytes (outputs less dying inputs); break ties by file order."""
    waiting = _ReadyNodes(graph)

    def key(node: int) -> tuple[float, ...]:
        return (float(waiting.growth(node)), float(node))

    return waiting.schedule(key)


def by_depth(graph: Graph) -> tuple[int, ...]:
    """Run next the ready node with the most recently written input, so that one branch ends before the next begins."""
    waiting = _ReadyNodes(graph)

    def key(node: int) -> tuple[float, ...]:
        freshest = max((waiting.written_at[v] for v in graph.reads[node]), default=-1)
        return (float(-freshest), float(waiting.growth(node)), float(node))

    return waiting.schedule(key)


class _ReadyNodes:
    """Which nodes are ready, and how many readers of each value have not run."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.readers = graph.readers
        self.after = readers_of(graph.before)
        self.left = [len(readers) for readers in self.readers]
        for value in graph.outputs:
            self.left[value] += 1
        self.missing = [len(before) for before in graph.before]
        self.written_at = [-1] * len(graph.values)

    def growth(self, node: int) -> int:
        sizes, planned = self.graph.sizes, self.graph.planned
        born = sum(sizes[v] for v in self.graph.writes[node] if planned[v])
        return born - sum(sizes[v] for v in self.graph.reads[node] if planned[v] and self.left[v] == 1)

    def schedule(self, key: Key) -> tuple[int, ...]:
        graph, order = self.graph, list[int]()
        done = [False] * len(graph.nodes)
        heap = [(key(node), node) for node, missing in enumerate(self.missing) if not missing]
        heapq.heapify(heap)
        while heap:
            _, node = heapq.heappop(heap)
            if done[node]:
                continue
            done[node] = True
            changed = self._run(node, len(order))
            order.append(node)
            for other in dict.fromkeys(changed):  # a node may read thousands of what was just written
                if not done[other] and not self.missing[other]:
                    heapq.heappush(heap, (key(other), other))
        return tuple(order)

    def _run(self, node: int, step: int) -> list[int]:
        """Mark the node as run. Returns the nodes whose keys may have become smaller."""
        changed: list[int] = []
        for value in self.graph.reads[node]:
            self.left[value] -= 1
            if self.left[value] == 1:
                changed.extend(self.readers[value])
        for value in self.graph.writes[node]:
            self.written_at[value] = step
        for other in self.after[node]:
            self.missing[other] -= 1
        return changed + self.after[node]


Order = Callable[[Graph], tuple[int, ...]]


def by_peak(graph: Graph) -> tuple[int, ...]:
    """The order with the smallest peak that is found; exact for most networks in inference."""
    starts = [order(graph) for order in (file_order, by_growth, by_depth)]
    if not any(graph.updates):  # else it would read what is written over
        starts.append(default_order(graph.sources, starts[0]))
    return least_peak(OrderingProblem.of(graph), starts)


ORDERS: dict[str, Order] = {"file": file_order, "growth": by_growth, "depth": by_depth, "peak": by_peak}

__all__ = [
    "ORDERS", "Order", "Sources", "by_depth", "by_growth", "by_peak", "default_order", "file_order", "post_order",
]  # fmt: skip
