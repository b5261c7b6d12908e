"""What costs next to nothing is recomputed: normalizations, activations, concatenations and views.

Pleiss et al. 2017, "Memory-Efficient Implementation of DenseNets": the outputs of Concat, BatchNormalization and ReLU
are computed again in the backward pass. Sums are kept: recomputing a residual sum needs the one before it, and so on to
the first.
"""

from collections.abc import Collection

from memonger.graph.graph import Graph
from memonger.model.operators import facts_of
from memonger.remat.on_demand import forward_pass, in_time, recompute_on_demand
from memonger.remat.reduction import deadlines, fixed_nodes


def cheap(graph: Graph, keep: Collection[int] = ()) -> tuple[int, ...]:
    """Recompute every node whose operator is cheap and that may run twice, those of ``keep`` left out."""
    fixed = fixed_nodes(graph, keep)
    forward = forward_pass(graph.reads, graph.writes, graph.forward)
    dropped = [n for n, op in enumerate(graph.ops) if facts_of(op).cheap and graph.forward[n] and not fixed[n]]
    dropped = in_time(graph.reads, graph.writes, forward, deadlines(graph), dropped)
    return recompute_on_demand(graph.reads, graph.writes, forward, dropped)
