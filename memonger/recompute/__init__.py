"""recompute: a graph → a schedule in which nodes run again instead of their values being kept. One strategy a file."""

from collections.abc import Callable

from memonger.graph import Graph
from memonger.recompute.budget import Progress, Result, pareto, search, smallest_budget
from memonger.recompute.cheap import cheap
from memonger.recompute.problem import Problem


def none(graph: Graph) -> tuple[int, ...]:
    """Nothing is recomputed."""
    return tuple(range(len(graph.nodes)))


Strategy = Callable[[Graph], tuple[int, ...]]

STRATEGIES: dict[str, Strategy] = {"none": none, "cheap": cheap}

__all__ = [
    "STRATEGIES", "Problem", "Progress", "Result", "Strategy", "cheap", "none", "pareto", "search", "smallest_budget",
]  # fmt: skip
