"""A model's graph → the recomputation problem that is searched, and the problem's schedules back to the graph's.

What decides nothing is folded away, so that a graph of 70,000 nodes becomes a problem of 10,000:

- A view is its source under another name: it costs nothing, and runs again right before whoever needs it.
- Nodes in a row that write next to nothing are one node, which runs once. So do nodes that write a persistent input
  or hold random state.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from memonger.graph.graph import Graph
from memonger.graph.liveness import Sharing
from memonger.model.operators import facts_of
from memonger.remat.on_demand import forward_pass
from memonger.remat.problem import Problem

SMALL = 1 / 64
"""Nodes are folded that write less than this part of the largest value of the forward pass."""


@dataclass(frozen=True, slots=True)
class Reduction:
    """A problem made of a graph.

    Attributes:
        problem: What to search.
        graph: What it was made of.
        forward: Whether each node of the problem belongs to the forward pass; see `forward_pass`.
        members: Nodes of the graph behind each node of the problem, in file order.
        view_of: For each value the value it is a view of by a folded node, or -1.
        viewing: For each value the folded node that makes it a view, or -1.
    """

    problem: Problem
    graph: Graph
    forward: tuple[bool, ...]
    members: tuple[tuple[int, ...], ...]
    view_of: tuple[int, ...]
    viewing: tuple[int, ...]

    @property
    def groups(self) -> tuple[int, ...]:
        """For each node of the graph the node of the problem it is in; -1 for views of inputs. A view is where its
        source is written."""
        found = [-1] * len(self.graph.nodes)
        for group, nodes in enumerate(self.members):
            for node in nodes:
                found[node] = group
        group_of = {value: found[node] for node, writes in enumerate(self.graph.writes) for value in writes}
        for value, node in enumerate(self.viewing):
            if node >= 0:
                found[node] = group_of[value] = group_of.get(self.view_of[value], -1)
        return tuple(found)

    def expand(self, schedule: Sequence[int]) -> tuple[int, ...]:
        """The schedule of the graph's nodes. Views run before their first reader after each run of their source."""
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
        base: Bytes that are there at every step: parameters, inputs.
        sharing: What may share an address.
        keep: Nodes that may not run again.
        alignment: Of every address: sizes are rounded up to it.
    """
    sharing = sharing or Sharing()
    graph = replace(graph, sizes=tuple(-(-size // alignment) * alignment for size in graph.sizes))
    view_of, viewing = _views(graph) if sharing.views else ([-1] * len(graph.values), [-1] * len(graph.values))
    root = _roots(view_of)
    fixed = fixed_nodes(graph, keep)
    members = _group(graph, viewing, root)
    of_node = [-1] * len(graph.nodes)
    for group, nodes in enumerate(members):
        for node in nodes:
            of_node[node] = group
    found = _values(graph, members, of_node, root)
    problem = Problem(
        costs=tuple(sum(graph.costs[node] for node in nodes) for nodes in members),
        reads=found.reads,
        writes=found.writes,
        sizes=found.sizes,
        recomputable=tuple(len(nodes) == 1 and not fixed[nodes[0]] for nodes in members),
        pinned=tuple(dict.fromkeys(found.number[root[v]] for v in graph.outputs if root[v] in found.number)),
        workspace=found.scratch,
        base=base,
        deadline=_deadlines(graph, members, of_node),
        inplace=_inplace(graph, members, root, found) if sharing.inplace else (),
        names=tuple(graph.nodes[nodes[0]] for nodes in members),
    )
    early = forward_pass(graph.reads, graph.writes, graph.forward)
    forward = tuple(all(early[node] for node in nodes) for nodes in members)
    return Reduction(problem, graph, forward, members, tuple(view_of), tuple(viewing))


def _views(graph: Graph) -> tuple[list[int], list[int]]:
    """For each value what it is a view of and by which node, or -1: views that are their node's only output."""
    view_of, viewing = [-1] * len(graph.values), [-1] * len(graph.values)
    for node, pairs in enumerate(graph.views):
        if len(pairs) == 1 and len(graph.writes[node]) == 1 and not graph.updates[node]:
            source, target = pairs[0]
            view_of[target], viewing[target] = source, node
    return view_of, viewing


def _roots(view_of: Sequence[int]) -> list[int]:
    root = list(range(len(view_of)))
    for value, source in enumerate(view_of):
        if source >= 0:
            root[value] = root[source]
    return root


def fixed_nodes(graph: Graph, keep: Collection[int] = ()) -> list[bool]:
    """Whether each node has to run exactly once.

    Such nodes write an output, a persistent input or what isn't planned, hold random state, or stand in ``keep``.
    """
    once = set(keep)
    held = {value for ties in graph.ties for pair in ties for value in pair} | set(graph.outputs)
    return [
        node in once or facts_of(op).random or any(v in held or not graph.planned[v] for v in writes)
        for node, (op, writes) in enumerate(zip(graph.ops, graph.writes, strict=True))
    ]


def deadlines(graph: Graph) -> tuple[int, ...]:
    """For each node the first other one that writes over what it reads, or the number of nodes."""
    every = range(len(graph.nodes))
    return _deadlines(graph, [(node,) for node in every], every)


def _group(graph: Graph, viewing: Sequence[int], root: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Small nodes in a row together, as long as the group holds no more at once than the most demanding node does."""
    folded = {node for node in viewing if node >= 0}
    size = [size if planned else 0 for size, planned in zip(graph.sizes, graph.planned, strict=True)]
    most = max(sum(size[v] for v in (*r, *w)) for r, w in zip(graph.reads, graph.writes, strict=True))
    limit = SMALL * max(
        (size[v] for n, writes in enumerate(graph.writes) if graph.forward[n] for v in writes), default=0
    )
    groups: list[list[int]] = []
    held: dict[int, int] = {}  # what the last group touches; empty: it takes nobody in
    for node, writes in enumerate(graph.writes):
        if node in folded:
            continue
        touched = {root[v]: size[root[v]] for v in (*graph.reads[node], *writes)}
        if sum(size[v] for v in writes) > limit:
            groups.append([node])
            held = {}
        elif held and sum((held | touched).values()) <= most:
            groups[-1].append(node)
            held |= touched
        else:
            groups.append([node])
            held = touched
    return tuple(map(tuple, groups))


def _values(
    graph: Graph, members: Sequence[Sequence[int]], of_node: Sequence[int], root: Sequence[int]
) -> "_Renumbered":
    """What each group reads from others and writes for others or for itself alone."""
    producer = {value: of_node[node] for node, writes in enumerate(graph.writes) for value in writes}
    outputs = {root[value] for value in graph.outputs}
    group_reads: list[list[int]] = []
    wanted: set[int] = set(outputs)
    for group, nodes in enumerate(members):
        found = dict.fromkeys(root[v] for node in nodes for v in graph.reads[node])
        group_reads.append([v for v in found if producer.get(v, -1) not in (-1, group)])
        wanted.update(group_reads[-1])
    number: dict[int, int] = {}
    writes, scratch = [], []
    for nodes in members:
        own = [v for node in nodes for v in graph.writes[node]]
        kept = [v for v in own if v in wanted] if len(nodes) > 1 else own
        for value in kept:
            number[value] = len(number)
        writes.append(tuple(number[value] for value in kept))
        scratch.append(_scratch(graph, nodes, wanted, root) if len(nodes) > 1 else graph.workspace[nodes[0]])
    sizes = [0] * len(number)
    for value, index in number.items():
        sizes[index] = graph.sizes[value] if graph.planned[value] else 0
    reads = tuple(tuple(number[v] for v in found) for found in group_reads)
    return _Renumbered(reads, tuple(writes), tuple(sizes), tuple(scratch), number)


@dataclass(frozen=True, slots=True)
class _Renumbered:
    reads: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    scratch: tuple[int, ...]
    number: dict[int, int]


def _scratch(graph: Graph, nodes: Sequence[int], wanted: Collection[int], root: Sequence[int]) -> int:
    """Bytes at the worst of a group's nodes, its own scratch and the values that only the group reads."""
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
    graph: Graph, members: Sequence[Sequence[int]], root: Sequence[int], found: _Renumbered
) -> tuple[tuple[int, ...], ...]:
    """For each group of one node what its output may overwrite: roots it reads through no other value, and of which
    the runtime holds no alias."""
    tied = {root[source] for ties in graph.ties for source, _ in ties}
    result = []
    for group, nodes in enumerate(members):
        pairs = graph.inplace[nodes[0]] if len(nodes) == 1 else ()
        read = [root[value] for value in graph.reads[nodes[0]]] if pairs else []
        inside = set(found.reads[group])
        roots = dict.fromkeys(root[source] for source, _ in pairs)
        allowed = [r for r in roots if read.count(r) == 1 and r not in tied and found.number.get(r, -1) in inside]
        result.append(tuple(found.number[r] for r in allowed))
    return tuple(result)


def _deadlines(graph: Graph, members: Sequence[Sequence[int]], of_node: Sequence[int]) -> tuple[int, ...]:
    """For each group the first one that writes over what it reads."""
    update = {old: of_node[node] for node, pairs in enumerate(graph.updates) for old, _ in pairs}
    none = len(members)
    return tuple(
        min((update[v] for node in nodes for v in graph.reads[node] if update.get(v, group) != group), default=none)
        for group, nodes in enumerate(members)
    )
