"""rewrite: a schedule → a model whose nodes stand in the order they run, one node per step."""

from collections.abc import Sequence
from typing import TypeVar

import onnx_ir as ir

from memonger.graph import Graph

T = TypeVar("T")


def reorder_graph(graph: Graph, schedule: Sequence[int]) -> Graph:
    """The same graph with its nodes in the schedule's order. Values keep their numbers."""

    def pick(items: tuple[T, ...]) -> tuple[T, ...]:
        return tuple(items[node] for node in schedule)

    return Graph(
        nodes=pick(graph.nodes),
        ops=pick(graph.ops),
        values=graph.values,
        sizes=graph.sizes,
        planned=graph.planned,
        reads=pick(graph.reads),
        writes=pick(graph.writes),
        outputs=graph.outputs,
        views=pick(graph.views),
        inplace=pick(graph.inplace),
        ties=pick(graph.ties),
        updates=pick(graph.updates),
        costs=pick(graph.costs),
        workspace=pick(graph.workspace),
    )


def reorder_model(model: ir.Model, schedule: Sequence[int]) -> ir.Model:
    """A copy of the model with its nodes in the schedule's order."""
    copy = model.clone()
    nodes = list(copy.graph)
    copy.graph.remove(nodes)
    copy.graph.extend(nodes[node] for node in schedule)
    return copy
