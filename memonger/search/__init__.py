"""search: a graph → a schedule, the sequence in which node ids run. One strategy a file, all of one signature."""

from collections.abc import Callable

from memonger.graph import Graph
from memonger.search.order import by_depth, by_growth, file_order

Order = Callable[[Graph], tuple[int, ...]]

ORDERS: dict[str, Order] = {"file": file_order, "growth": by_growth, "depth": by_depth}

__all__ = ["ORDERS", "Order", "by_depth", "by_growth", "file_order"]
