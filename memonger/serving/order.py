"""order: what stock onnxruntime does where nothing can tell it an order, and the file that makes the best of it.

No setter for the execution order was found in its C interface, and no session config entry (1.31.1): servers written in
C++, Triton among them, run nodes in ``DEFAULT`` order. That is the post-order of a depth-first search from the nodes
without readers towards the inputs, what stands last in the file first (``GraphViewer`` and ``Graph::ReverseDFSFrom``
in its source). So the file's order decides after all, though not as written: of two branches the later one in the file
runs first. `best_file_order` writes the file so that the search comes out at little memory.

Schedules to aim at are those of `memonger.schedule.orders`, and the best post-order of a tree (J. W. H. Liu, On the
storage requirement in the out-of-core multifrontal method, 1986): of several subtrees the one whose peak exceeds its
result the most goes first. Left out: an optimum for graphs that are no trees, which is NP-hard (Sethi 1975).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memonger.graph import schedule as rewrite
from memonger.graph.graph import Graph
from memonger.graph.liveness import Sharing, assign_storage, live_bytes
from memonger.schedule.orders import ORDERS, Sources, default_order, post_order

AS_STOCK = Sharing(inplace=False)  # stock onnxruntime overwrites inputs for few operators: counted as for none

Arrange = Callable[[Sources, Sequence[int]], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class FileOrder:
    """An order to write nodes in, and what ``DEFAULT`` order makes of it.

    Attributes:
        written: Node numbers, in file order.
        executed: Node numbers, in the order they run.
        peak_bytes: Live bytes and workspace at the worst step, nothing written in place.
    """

    written: tuple[int, ...]
    executed: tuple[int, ...]
    peak_bytes: int


def best_file_order(graph: Graph) -> FileOrder:
    """The order to write nodes in so that ``DEFAULT`` order needs little memory; ties go to the graph's own order."""
    sources = graph.sources
    aims = dict.fromkeys([tuple(range(len(graph.nodes))), *(order(graph) for order in ORDERS.values()), _liu(graph)])
    tried = dict.fromkeys(arrange(sources, aim) for aim in aims for arrange in ARRANGEMENTS)
    reached: dict[tuple[int, ...], tuple[int, ...]] = {}  # many files come out at one order
    for written in tried:
        reached.setdefault(default_order(sources, written), written)
    found = (FileOrder(written, executed, stock_bytes(graph, executed)) for executed, written in reached.items())
    return min(found, key=lambda one: one.peak_bytes)


def written_as_is(graph: Graph) -> FileOrder:
    """What ``DEFAULT`` order makes of the graph's own order."""
    written = tuple(range(len(graph.nodes)))
    executed = default_order(graph.sources, written)
    return FileOrder(written, executed, stock_bytes(graph, executed))


def stock_bytes(graph: Graph, executed: Sequence[int]) -> int:
    """Most live bytes and workspace at one step of an order, as stock onnxruntime holds them: nothing in place."""
    scheduled = rewrite.schedule_graph(graph, executed)
    live = live_bytes(assign_storage(scheduled, AS_STOCK).buffers, len(scheduled.nodes)).tolist()
    return max((size + workspace for size, workspace in zip(live, scheduled.workspace, strict=True)), default=0)


def _as_planned(sources: Sources, schedule: Sequence[int]) -> tuple[int, ...]:
    return tuple(schedule)


def _late_first(sources: Sources, schedule: Sequence[int]) -> tuple[int, ...]:
    """A topological order that begins with what should run late: of the ready nodes the last of the schedule."""
    return rewrite.topological_order(sources, [-rank for rank in _ranks(schedule)])


def _early_last(sources: Sources, schedule: Sequence[int]) -> tuple[int, ...]:
    """A topological order, made from its end, that ends with what should run early."""
    return rewrite.topological_order(rewrite.readers_of(sources), _ranks(schedule))[::-1]


ARRANGEMENTS: tuple[Arrange, ...] = (_as_planned, _early_last, _late_first)


def _ranks(schedule: Sequence[int]) -> list[int]:
    ranks = [0] * len(schedule)
    for rank, node in enumerate(schedule):
        ranks[node] = rank
    return ranks


def _liu(graph: Graph) -> tuple[int, ...]:
    """The best post-order, were the graph a tree. A value with several readers counts for each."""
    sources = graph.sources
    result = [sum(graph.sizes[v] for v in writes if graph.planned[v]) for writes in graph.writes]
    peaks = [0] * len(sources)
    last_first: list[list[int]] = []
    for node, inputs in enumerate(sources):
        ordered = sorted(inputs, key=lambda s: (result[s] - peaks[s], s))
        live = peak = 0
        for source in ordered:
            peak = max(peak, live + peaks[source])
            live += result[source]
        peaks[node] = max(peak, live + result[node] + graph.workspace[node])
        last_first.append(ordered[::-1])
    read = {source for inputs in sources for source in inputs}
    return post_order([node for node in reversed(range(len(sources))) if node not in read], last_first)
