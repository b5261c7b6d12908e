"""A graph → the smaller problem that is searched, and schedules of the problem → schedules of the graph.

Nodes about which nothing is to be decided are folded away, so that a graph of 70,000 nodes becomes a problem of 20,000:

- A view is its source under another name: it costs nothing, and runs again right before every reader that needs it.
- Nodes in a row that write next to nothing become one node, which runs once.

Nodes that write a persistent input or hold random state also run once.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from memonger.graph.graph import Graph
from memonger.graph.liveness import Sharing
from memonger.ir.operators import facts_of
from memonger.schedule.on_demand import forward_pass
from memonger.schedule.problem import Problem

SMALL = 1 / 64
"""Nodes are folded if they write less than this fraction of the largest value of the forward pass,"""

TOGETHER = 1 / 16
"""and all of them in the forward pass less than this fraction of what it writes: many small values are a large one."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """A problem made of a graph.

    Attributes:
        problem: What to search.
        graph: What it was made of.
        members: Nodes of the graph behind each node of the problem, in file order.
        view_of: For each value the value it is a view of by a folded node, or -1.
        viewing: For each value the folded node that makes it a view, or -1.
    """

    problem: Problem
    graph: Graph
    members: tuple[tuple[int, ...], ...]
    view_of: tuple[int, ...]
    viewing: tuple[int, ...]

    @property
    def groups(self) -> tuple[int, ...]:
        """For each node of the graph the node of the problem it belongs to, or -1 for views of inputs.

        A view belongs to the node that writes its source.
        """
        group = [-1] * len(self.graph.nodes)
        for number, nodes in enumerate(self.members):
            for node in nodes:
                group[node] = number
        group_of = {value: group[node] for node, writes in enumerate(self.graph.writes) for value in writes}
        for value, node in enumerate(self.viewing):
            if node >= 0:
                group[node] = group_of[value] = group_of.get(self.view_of[value], -1)
        return tuple(group)

    def expand(self, schedule: Sequence[int]) -> tuple[int, ...]:
        """A schedule of the problem as a schedule of the graph. Views run before their first reader after each run of
        their source.
        """
        graph, view_of, viewing = self.graph, self.view_of, self.viewing
        steps: list[int] = []
        version = [0] * len(graph.values)
        shown = [-1] * len(graph.values)  # the version of its root a view shows

        def show(value: int) -> None:
            chain = []
            while view_of[value] >= 0:
                chain.append(value)
                value = view_of[value]
            for view in reversed(chain):
                if shown[view] != version[value]:
                    shown[view] = version[value]
                    steps.append(viewing[view])

        for group in schedule:
            for node in self.members[group]:
                for value in graph.reads[node]:
                    show(value)
                steps.append(node)
                for value in graph.writes[node]:
                    version[value] += 1
        for value, node in enumerate(viewing):
            if node >= 0 and shown[value] < 0:
                show(value)
        return tuple(steps)


def reduce(
    graph: Graph,
    *,
    base: int = 0,
    sharing: Sharing | None = None,
    keep: Collection[int] = (),
    alignment: int = 1,
) -> Reduction:
    """The problem of a graph.

    Args:
        graph: Its nodes in file order.
        base: Bytes in use at every step: parameters, inputs.
        sharing: Which values may share an address.
        keep: Nodes that may not run again.
        alignment: Of every address: sizes are rounded up to it.
    """
    sharing = sharing or Sharing()
    graph = replace(graph, sizes=tuple(-(-size // alignment) * alignment for size in graph.sizes))
    view_of, viewing = _views(graph) if sharing.views else ([-1] * len(graph.values), [-1] * len(graph.values))
    root = list(range(len(view_of)))
    for value, source in enumerate(view_of):
        if source >= 0:
            root[value] = root[source]
    fixed = fixed_nodes(graph, keep)
    early = forward_pass(graph)
    members = _group(graph, viewing, root, early)
    of_node = [-1] * len(graph.nodes)
    for group, nodes in enumerate(members):
        for node in nodes:
            of_node[node] = group
    renumbered = _values(graph, members, of_node, root, _read_by_views(graph, view_of, viewing, root))
    number = renumbered.number
    problem = Problem(
        costs=tuple(sum(graph.costs[node] for node in nodes) for nodes in members),
        reads=renumbered.reads,
        writes=renumbered.writes,
        sizes=renumbered.sizes,
        recomputable=tuple(len(nodes) == 1 and not fixed[nodes[0]] for nodes in members),
        pinned=tuple(dict.fromkeys(number[root[v]] for v in graph.outputs if root[v] in number)),
        workspace=renumbered.workspace,
        base=base,
        deadline=_deadlines(graph, members, of_node),
        inplace=_inplace(graph, members, root, renumbered) if sharing.inplace else (),
        forward=tuple(all(early[node] for node in nodes) for nodes in members),
        names=tuple(graph.nodes[nodes[0]] for nodes in members),
    )
    return Reduction(problem, graph, members, tuple(view_of), tuple(viewing))


def _views(graph: Graph) -> tuple[list[int], list[int]]:
    """For each value what it is a view of and by which node, or -1: views that are their node's only output.

    What such a node reads beside that (the shape of a ``Reshape``) is no view itself.
    """
    view_of, viewing = [-1] * len(graph.values), [-1] * len(graph.values)
    for node, pairs in enumerate(graph.views):
        if len(pairs) == 1 and len(graph.writes[node]) == 1 and not graph.updates[node]:
            source, target = pairs[0]
            if all(viewing[value] < 0 for value in graph.reads[node] if value != source):
                view_of[target], viewing[target] = source, node
    return view_of, viewing


def _read_by_views(
    graph: Graph, view_of: Sequence[int], viewing: Sequence[int], root: Sequence[int]
) -> list[tuple[int, ...]]:
    """For each value what the folded nodes read that make it a view, beside its root: whoever reads it reads that."""
    found: list[tuple[int, ...]] = [()] * len(graph.values)
    folded = set(viewing)
    for node in (node for node in range(len(graph.nodes)) if node in folded):
        (value,) = graph.writes[node]
        others = [other for other in graph.reads[node] if root[other] != root[value]]
        found[value] = (*found[view_of[value]], *others)
    return found


def fixed_nodes(graph: Graph, keep: Collection[int] = ()) -> list[bool]:
    """Whether each node must run exactly once.

    Such nodes write an output, a persistent input or a value outside the arena, hold random state, or are in ``keep``.
    """
    once = set(keep)
    tied = {value for ties in graph.runtime_aliases for pair in ties for value in pair} | set(graph.outputs)
    return [
        node in once or facts_of(op).random or any(v in tied or not graph.planned[v] for v in writes)
        for node, (op, writes) in enumerate(zip(graph.ops, graph.writes, strict=True))
    ]


def deadlines(graph: Graph) -> tuple[int, ...]:
    """For each node the first other node that writes over what it reads, or the number of nodes."""
    every = range(len(graph.nodes))
    return _deadlines(graph, [(node,) for node in every], every)


def _group(
    graph: Graph, viewing: Sequence[int], root: Sequence[int], early: Sequence[bool]
) -> tuple[tuple[int, ...], ...]:
    """Nodes in groups: small ones in a row together, as long as a group touches no more bytes than the largest node.

    Nodes that make new running statistics are in groups of their own: they read a mean of every layer, which would be
    computed again with what a backward step in their group reads, and would cross every cut of the forward pass.
    """
    is_statistic = [is_early and not leads for is_early, leads in zip(early, graph.forward, strict=True)]
    folded = {node for node in viewing if node >= 0}
    size = [size if planned else 0 for size, planned in zip(graph.sizes, graph.planned, strict=True)]
    most = max(sum(size[v] for v in (*r, *w)) for r, w in zip(graph.reads, graph.writes, strict=True))
    limit = SMALL * max(
        (size[v] for n, writes in enumerate(graph.writes) if graph.forward[n] for v in writes), default=0
    )
    together, written = 0, [sum(size[v] for v in writes) for n, writes in enumerate(graph.writes)]
    of_forward = sorted(written[n] for n in range(len(written)) if graph.forward[n] and n not in folded)
    for one in of_forward:
        together += one
        if one > limit:
            break
        if together > TOGETHER * sum(of_forward):
            limit = one - 1
            break
    groups: list[list[int]] = []
    open_group: dict[int, int] = {}  # value → bytes, of what the last group touches; empty: no node may join it
    for node, writes in enumerate(graph.writes):
        if node in folded:
            continue
        touched = {root[v]: size[root[v]] for v in (*graph.reads[node], *writes)}
        if written[node] > limit:
            groups.append([node])
            open_group = {}
        elif (
            open_group
            and is_statistic[node] == is_statistic[groups[-1][-1]]
            and sum((open_group | touched).values()) <= most
        ):
            groups[-1].append(node)
            open_group |= touched
        else:
            groups.append([node])
            open_group = touched
    return tuple(map(tuple, groups))


def _values(
    graph: Graph, members: Sequence[Sequence[int]], of_node: Sequence[int], root: Sequence[int],
    by_views: Sequence[Sequence[int]],
) -> "_Renumbered":  # fmt: skip
    """The values that groups read and write, numbered anew; what only its own group reads counts as workspace."""
    producer = {value: of_node[node] for node, writes in enumerate(graph.writes) for value in writes}
    outputs = {root[value] for value in graph.outputs}
    group_reads: list[list[int]] = []
    wanted: set[int] = set(outputs)
    for group, nodes in enumerate(members):
        values = dict.fromkeys(r for node in nodes for v in graph.reads[node] for r in (root[v], *by_views[v]))
        group_reads.append([v for v in values if producer.get(v, -1) not in (-1, group)])
        wanted.update(group_reads[-1])
    number: dict[int, int] = {}
    writes, workspace = [], []
    for nodes in members:
        own = [v for node in nodes for v in graph.writes[node]]
        kept = [v for v in own if v in wanted] if len(nodes) > 1 else own
        for value in kept:
            number[value] = len(number)
        writes.append(tuple(number[value] for value in kept))
        workspace.append(_workspace(graph, nodes, wanted, root) if len(nodes) > 1 else graph.workspace[nodes[0]])
    sizes = [0] * len(number)
    for value, index in number.items():
        sizes[index] = graph.sizes[value] if graph.planned[value] else 0
    reads = tuple(tuple(number[v] for v in values) for values in group_reads)
    return _Renumbered(reads, tuple(writes), tuple(sizes), tuple(workspace), number)


@dataclass(frozen=True, slots=True)
class _Renumbered:
    reads: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    workspace: tuple[int, ...]
    number: dict[int, int]


def _workspace(graph: Graph, nodes: Sequence[int], wanted: Collection[int], root: Sequence[int]) -> int:
    """Bytes at the worst step of a group: the node's workspace and the live values that only the group reads."""
    last: dict[int, int] = {}
    for node in nodes:
        for value in graph.reads[node]:
            last[root[value]] = node
    live = most = 0
    mine: set[int] = set()
    for node in nodes:
        own = [v for v in graph.writes[node] if graph.planned[v] and v not in wanted]
        mine.update(own)
        live += sum(graph.sizes[v] for v in own)
        most = max(most, live + graph.workspace[node])
        dying = {root[v] for v in graph.reads[node] if last[root[v]] == node} | {v for v in own if v not in last}
        live -= sum(graph.sizes[v] for v in dying & mine)
    return most


def _inplace(
    graph: Graph, members: Sequence[Sequence[int]], root: Sequence[int], renumbered: _Renumbered
) -> tuple[tuple[int, ...], ...]:
    """For each group of one node the values that its output may overwrite.

    These are roots that it reads through no other value, and of which the runtime has no alias.
    """
    tied = {root[source] for ties in graph.runtime_aliases for source, _ in ties}
    result = []
    for group, nodes in enumerate(members):
        pairs = graph.inplace[nodes[0]] if len(nodes) == 1 else ()
        read = [root[value] for value in graph.reads[nodes[0]]] if pairs else []
        inside = set(renumbered.reads[group])
        roots = dict.fromkeys(root[source] for source, _ in pairs)
        allowed = [r for r in roots if read.count(r) == 1 and r not in tied and renumbered.number.get(r, -1) in inside]
        result.append(tuple(renumbered.number[r] for r in allowed))
    return tuple(result)


def _deadlines(graph: Graph, members: Sequence[Sequence[int]], of_node: Sequence[int]) -> tuple[int, ...]:
    """For each group the first other group that writes over what it reads, or the number of groups."""
    update = {old: of_node[node] for node, overwritten in enumerate(graph.overwritten) for old in overwritten}
    none = len(members)
    return tuple(
        min((update[v] for node in nodes for v in graph.reads[node] if update.get(v, group) != group), default=none)
        for group, nodes in enumerate(members)
    )
