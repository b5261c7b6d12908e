"""What costs next to nothing is recomputed: normalizations, activations, concatenations and views.

Pleiss et al. 2017, "Memory-Efficient Implementation of DenseNets": the outputs of Concat, BatchNormalization and ReLU
are computed again in the backward pass. Sums are kept: recomputing a residual sum needs the one before it, and so on to
the first.
"""

from collections.abc import Collection

from memonger.graph.graph import Graph
from memonger.remat.on_demand import forward_pass, in_time, recompute_on_demand
from memonger.remat.reduction import deadlines, fixed_nodes

CHEAP = frozenset({
    "BatchNormalization", "Cast", "Celu", "Clip", "Concat", "Elu", "Erf", "Exp", "Expand", "Flatten", "Gelu",
    "HardSigmoid", "HardSwish", "Identity", "InstanceNormalization", "LRN", "LayerNormalization", "LeakyRelu", "Mish",
    "Mul", "PRelu", "Relu", "Reshape", "Selu", "Sigmoid", "Slice", "Softplus", "Softsign", "Split", "Squeeze", "Tanh",
    "Transpose", "Unsqueeze",
})  # fmt: skip


def cheap(graph: Graph, keep: Collection[int] = ()) -> tuple[int, ...]:
    """Recompute every node whose operator is in `CHEAP` and that may run twice, those of ``keep`` left out."""
    fixed = fixed_nodes(graph, keep)
    forward = forward_pass(graph.reads, graph.writes, graph.forward)
    dropped = [n for n, op in enumerate(graph.ops) if op in CHEAP and graph.forward[n] and not fixed[n]]
    dropped = in_time(graph.reads, graph.writes, forward, deadlines(graph), dropped)
    return recompute_on_demand(graph.reads, graph.writes, forward, dropped)
