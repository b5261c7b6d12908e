"""Plans for graphs without a model, given as a ``networkx.DiGraph``."""

import time
from collections.abc import Sequence
from typing import Any, TypeGuard

from memonger.errors import PlanError
from memonger.graph.graph import Graph
from memonger.ir.names import fresh
from memonger.plan import GraphPlan
from memonger.schedule import Request
from memonger.schedule.decide import decide
from memonger.schedule.solution import Solution


def is_networkx(source: object) -> TypeGuard[Any]:
    """Whether the source is a graph of networkx; networkx isn't imported for that."""
    return any(kind.__module__.partition(".")[0] == "networkx" for kind in type(source).__mro__)


def from_networkx(source: Any) -> tuple[Graph, tuple[object, ...]]:
    """The planner's graph of a ``networkx.DiGraph``, and the graph's own names of its nodes in the same order.

    Args:
        source: Its nodes, of any names, carry ``bytes`` (of what they write), ``cost``, and if there is a backward pass
            ``forward``, which is False for its nodes. Edges lead to readers. A value that nobody reads lives for its
            own step only.

    Raises:
        PlanError: the graph is undirected, empty or has a cycle; or a node has no ``bytes`` or ``cost``, or bad ones.
    """
    if not source.is_directed() or source.is_multigraph():
        raise PlanError(
            f"a {type(source).__name__} can't be planned: give a networkx.DiGraph, whose edges lead to readers."
        )
    from memonger.schedule.problem import Problem  # here: a model is none

    problem = Problem.from_networkx(source)
    used: set[str] = set()
    names = tuple(fresh(str(name), used) for name in problem.names)
    graph = Graph(
        nodes=names,
        ops=tuple("node" for _ in names),
        values=names,
        sizes=problem.sizes,
        planned=tuple(size > 0 for size in problem.sizes),
        reads=problem.reads,
        writes=problem.writes,
        outputs=(),
        forward=problem.forward,
        costs=problem.costs,
        workspace=problem.workspace,
    )
    return graph, problem.names


def plan_graph(names: tuple[object, ...], request: Request, strategy: str | None, order: str) -> GraphPlan:
    """Plan what `from_networkx` gave.

    Args:
        names: The nodes' own names.
        request: The graph, the budget and the other settings.
        strategy: None: ``budget`` where there is one, ``sweep`` where there is a backward pass, else ``none``.
        order: One of `memonger.schedule.orders.ORDERS`, or ``best``.

    Raises:
        PlanError: nothing was found that fits the budget.
    """
    begin = time.perf_counter()
    has_backward = not all(request.graph.forward)
    chosen = strategy or ("budget" if request.budget is not None else "sweep" if has_backward else "none")
    return _finish(names, request, chosen, decide(request, chosen, order), begin)


def pareto_of_graph(
    names: tuple[object, ...], request: Request, points: int, order: str, budgets: Sequence[int], strategy: str
) -> tuple[GraphPlan, ...]:
    """The frontier of what `from_networkx` gave; see `memonger.pareto`."""
    from memonger.schedule.recompute import frontier

    begin, solutions = time.perf_counter(), frontier(request, points, order, budgets, strategy)
    return tuple(_finish(names, request, strategy, one, begin) for one in solutions)


def _finish(names: tuple[object, ...], request: Request, strategy: str, solution: Solution, begin: float) -> GraphPlan:
    plan = GraphPlan(
        graph=solution.graph,
        offsets=solution.offsets,
        arena_bytes=solution.arena_bytes,
        alignment=request.alignment,
        schedule=tuple(names[node] for node in solution.schedule),
        budget=request.budget,
        strategy=strategy,
        outcome=solution.outcome,
        peak_before_bytes=request.peak_bytes,
        planning_seconds=time.perf_counter() - begin,
    )
    plan.verify()
    return plan
