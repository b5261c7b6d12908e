"""The strategy ``marks``: exactly the nodes marked ``force_mirroring`` "True" run again; and what others do of them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from memonger.errors import PlanError
from memonger.graph.graph import Graph
from memonger.graph.schedule import schedule_graph
from memonger.ir.operators import facts_of
from memonger.schedule.on_demand import forward_pass, in_time, recompute_on_demand
from memonger.schedule.reduction import deadlines, fixed_nodes
from memonger.schedule.strategy import Outcome, Request
from memonger.words import option


def recompute_marked(request: Request) -> Outcome:
    """Recompute the marked nodes right before the first backward step that needs them.

    Raises:
        PlanError: a marked node would have to run twice, but can't.
    """
    graph, wanted, dropped = _marked(request)
    runs = Counter(recompute_on_demand(graph, wanted))
    may = {*dropped, *request.parts}
    wrong = next((node for node in wanted if node not in may and runs[node] > 1), None)
    if wrong is not None:
        raise PlanError(
            f"node '{graph.nodes[wrong]}' ({graph.ops[wrong]}) is to be recomputed (force_mirroring 'True'), but can't "
            f"run again: {_obstacle(graph, wrong)}. Take the mark off, or keep it (force_mirroring 'False', "
            f"{option('keep')})."
        )
    return Outcome(recompute_on_demand(graph, dropped))


def with_marked_again(request: Request) -> tuple[Request, tuple[int, ...]]:
    """The request with each marked node that can run again a second time, and the node that each of its nodes is.

    What a strategy makes of it recomputes the marked nodes whatever it decides of the others. A copy of a node counts
    as one of the backward pass: it is there for that alone.
    """
    graph, _, dropped = _marked(request)
    schedule = recompute_on_demand(graph, dropped)
    first = {node: step for step, node in reversed(list(enumerate(schedule)))}
    again = schedule_graph(request.graph, schedule)
    is_first = (first[node] == step for step, node in enumerate(schedule))
    again = replace(again, forward=tuple(map(all, zip(again.forward, is_first, strict=True))))
    kept = {node: recomputed for node, recomputed in request.forced.items() if not recomputed}
    return replace(request, forced=kept, parts=request.parts & kept.keys()).renumbered(again, first), schedule


def _marked(request: Request) -> tuple[Graph, Sequence[int], Sequence[int]]:
    """The graph by its passes, the nodes that are marked to be recomputed, and those of them that can be."""
    graph = replace(request.graph, forward=forward_pass(request.graph))
    fixed = fixed_nodes(graph)
    wanted = [node for node, recomputed in sorted(request.forced.items()) if recomputed and graph.forward[node]]
    return graph, wanted, in_time(graph, deadlines(graph), [node for node in wanted if not fixed[node]])


def _obstacle(graph: Graph, node: int) -> str:
    """Why the node can't run twice."""
    if facts_of(graph.ops[node]).random:
        return "it draws random numbers, others each time"
    if any(value in graph.outputs for value in graph.writes[node]):
        return "it writes an output of the model"
    if any(not graph.planned[value] for value in graph.writes[node]):
        return "the runtime keeps its value, or it is an update"
    return "what it reads is updated before the backward pass needs it"
