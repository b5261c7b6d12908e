"""The strategy ``cheap``: what costs next to nothing runs again (normalizations, activations, concatenations, views).

Pleiss et al. 2017, "Memory-Efficient Implementation of DenseNets": the outputs of Concat, BatchNormalization and ReLU
are computed again in the backward pass. Sums are kept, because recomputing a residual sum needs the sum before it, and
so on back to the first one.
"""

from collections.abc import Collection
from dataclasses import replace

from memonger.graph.graph import Graph
from memonger.ir.operators import facts_of
from memonger.schedule.on_demand import forward_pass, in_time, recompute_on_demand
from memonger.schedule.reduction import Reduction, deadlines, fixed_nodes
from memonger.schedule.strategy import Outcome, Request


def cheap(graph: Graph, keep: Collection[int] = ()) -> tuple[int, ...]:
    """Recompute every forward node whose operator is cheap, that may run twice and is not in ``keep``."""
    fixed = fixed_nodes(graph, keep)
    dropped = [n for n, op in enumerate(graph.ops) if facts_of(op).cheap and graph.forward[n] and not fixed[n]]
    flow = replace(graph, forward=forward_pass(graph))
    return recompute_on_demand(flow, in_time(flow, deadlines(graph), dropped))


def cheap_groups(reduced: Reduction) -> tuple[int, ...]:
    """As `cheap`, for the schedule of a reduced problem, whose groups of several nodes never run twice."""
    problem, ops = reduced.problem, reduced.graph.ops
    may = [early and again for early, again in zip(problem.forward, problem.recomputable, strict=True)]
    dropped = [group for group, nodes in enumerate(reduced.members) if may[group] and facts_of(ops[nodes[0]]).cheap]
    return recompute_on_demand(problem, in_time(problem, problem.deadline, dropped))


def recompute_cheap(request: Request) -> Outcome:
    """The strategy."""
    return Outcome(cheap(request.graph, request.kept))
