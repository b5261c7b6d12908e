"""A schedule → a graph, and a model, with one node a step: recomputed nodes as copies. And orders by a key.

A node that stands in the schedule again computes copies of its outputs, named ``<value>.recompute<k>``; who reads those
values afterwards reads the latest copy. Outputs of the model are the first copies. What a node is a copy
of is data (`Graph.again`, and the mark `AGAIN` of the model's node): names say nothing.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import onnx_ir as ir

from memonger.errors import PlanError
from memonger.graph.graph import Alias, Graph, needed_by
from memonger.ir.marks import AGAIN
from memonger.ir.model import Model
from memonger.ir.names import fresh
from memonger.ir.values import read_values

Sources = Sequence[Sequence[int]]
"""For each node the nodes it reads from."""

OF_NODE = ("ops", "forward", "costs", "workspace")
"""Fields of a graph that are the same for a node and its copies."""


def schedule_graph(graph: Graph, schedule: Sequence[int]) -> Graph:
    """The graph with a node for each step. Values keep their numbers; copies get new ones behind them.

    In its own order it is the graph itself.

    Raises:
        PlanError: a node that updates a persistent input, or writes behind one, stands twice.
    """
    if tuple(schedule) == tuple(range(len(graph.nodes))):
        return graph
    of_node = {key: tuple(getattr(graph, key)[node] for node in schedule) for key in OF_NODE}
    if len(set(schedule)) == len(schedule):  # nothing is computed again
        moved = ("nodes", "reads", "writes", "aliases", "again")
        return replace(
            graph, **of_node, **{key: tuple(getattr(graph, key)[node] for node in schedule) for key in moved}
        )
    names, sizes, planned = list(graph.values), list(graph.sizes), list(graph.planned)
    nodes, again = list[str](), list[str]()
    reads: list[tuple[int, ...]] = []
    writes: list[tuple[int, ...]] = []
    aliases: list[tuple[Alias, ...]] = []
    latest = list(range(len(names)))
    runs = [0] * len(graph.nodes)
    taken = {*graph.values, *graph.nodes}
    for node in schedule:
        reads.append(tuple(latest[value] for value in graph.reads[node]))
        if runs[node] and (graph.updates[node] or graph.appends[node]):
            raise PlanError(f"node '{graph.nodes[node]}' updates a persistent input: it must not run twice.")
        for value in graph.writes[node] if runs[node] else ():
            latest[value] = len(names)
            names.append(fresh(f"{graph.values[value]}.recompute{runs[node]}", taken))
            sizes.append(sizes[value])
            planned.append(planned[value])
        name = graph.nodes[node]
        nodes.append(fresh(f"{name}.recompute{runs[node]}", taken) if runs[node] else name)
        again.append(graph.again[node] or (name if runs[node] else ""))
        runs[node] += 1
        writes.append(tuple(latest[value] for value in graph.writes[node]))
        aliases.append(renumbered(graph.aliases[node], latest))
    changes: dict[str, Any] = of_node
    changes |= {"again": tuple(again), "values": tuple(names), "sizes": tuple(sizes), "planned": tuple(planned)}
    changes |= {"nodes": tuple(nodes), "reads": tuple(reads), "writes": tuple(writes), "aliases": tuple(aliases)}
    return replace(graph, **changes)


def renumbered(aliases: Sequence[Alias], numbers: Sequence[int]) -> tuple[Alias, ...]:
    """The aliases of a node, of values that have other numbers."""
    return tuple(Alias(kind, numbers[source], numbers[target], byte) for kind, source, target, byte in aliases)


def topological_order(sources: Sequence[Sequence[int]], keys: Sequence[int]) -> tuple[int, ...]:
    """List scheduling: of the nodes whose sources all stand already, next the one with the least key, ties by number.

    Args:
        sources: For each node the nodes that have to stand before it, without repeats. What lies on a cycle, or behind
            one, is left out of the order.
        keys: One for each node.
    """
    readers = readers_of(sources)
    missing = [len(found) for found in sources]
    ready = [(keys[node], node) for node, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, node = heapq.heappop(ready)
        order.append(node)
        for reader in readers[node]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, (keys[reader], reader))
    return tuple(order)


def sources_of(nodes: Sequence[ir.Node]) -> list[set[int]]:
    """For each node the numbers of those that it reads from, its subgraphs' reads included."""
    number = {value: index for index, node in enumerate(nodes) for value in node.outputs}
    return [{number[v] for v in read_values(node) if v in number} for node in nodes]


def depth_first(
    nodes: Sequence[ir.Node], values: Sequence[ir.Value], place: Mapping[ir.Value, Any] | None = None
) -> list[ir.Node]:
    """The nodes that these values depend on, each right behind the last of those that it reads from.

    What a node reads comes as it lists it, or by its place.
    """
    number = {value: index for index, node in enumerate(nodes) for value in node.outputs}
    sources = []
    for node in nodes:
        read = [value for value in read_values(node) if value in number]
        sources.append([number[value] for value in (read if place is None else sorted(read, key=place.__getitem__))])
    ends = [number[value] for value in values if value in number]
    return [nodes[index] for index in post_order(ends[::-1], [before[::-1] for before in sources])]


def default_order(sources: Sources, written: Sequence[int]) -> tuple[int, ...]:
    """The order onnxruntime runs nodes in without being told.

    Args:
        sources: For each node the nodes it reads from.
        written: The nodes in file order.
    """
    place = {node: index for index, node in enumerate(written)}
    read = {source for inputs in sources for source in inputs}
    roots = [node for node in written if node not in read]
    return post_order(roots, [sorted(inputs, key=place.__getitem__) for inputs in sources])


def post_order(roots: Sequence[int], sources: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Depth first towards the sources, of roots and of sources the last first; a node comes after what it reads."""
    pending = [(node, False) for node in roots]
    seen = [False] * len(sources)
    order: list[int] = []
    while pending:
        node, done = pending.pop()
        if done:
            order.append(node)
        elif not seen[node]:
            seen[node] = True
            pending.append((node, True))
            pending.extend((source, False) for source in sources[node] if not seen[source])
    return tuple(order)


def readers_of(sources: Sequence[Sequence[int]]) -> list[list[int]]:
    """For each node the nodes of which it is a source."""
    readers: list[list[int]] = [[] for _ in sources]
    for node, found in enumerate(sources):
        for source in found:
            readers[source].append(node)
    return readers


def first_values(model: ir.Model) -> dict[ir.Value, ir.Value]:
    """Of each value that a node of the model computes again the one that it is a copy of."""
    of_name = {node.name: node for node in model.graph}
    found: dict[ir.Value, ir.Value] = {}
    for node in model.graph:
        first = of_name.get(node.metadata_props.get(AGAIN, ""))
        if first is not None and first is not node and first.op_identifier() == node.op_identifier():
            found.update((a, b) for a, b in zip(node.outputs, first.outputs, strict=False) if a.name and b.name)
    return found


def drop_copies(model: ir.Model) -> None:
    """Take out of a model what computes something again: who reads a copy reads what it is a copy of."""
    firsts = first_values(model)
    for copy, first in firsts.items():
        copy.replace_all_uses_with(first)
    model.graph.remove(dict.fromkeys(node for copy in firsts if (node := copy.producer()) is not None), safe=True)


def overhead(again: Sequence[str], costs: Sequence[float]) -> float:
    """Cost of the recomputations among some nodes, those with a name in ``again``, over that of the others."""
    copies = sum(cost for name, cost in zip(again, costs, strict=True) if name)
    once = sum(costs) - copies
    return copies / once if once else 0.0


def schedule_model(model: ir.Model, schedule: Sequence[int], scheduled: Graph) -> None:
    """Make the model run the schedule: a node for each step, in that order.

    Args:
        model: Changed. Its nodes are numbered in file order.
        schedule: The steps; every node is among them.
        scheduled: What `schedule_graph` makes of the model's graph and the schedule: it names the copies.
    """
    if tuple(schedule) == tuple(range(model.graph.num_nodes())):
        return
    nodes = list(model.graph)
    inputs = [tuple(node.inputs) for node in nodes]  # a first run may already read copies, which a later one doesn't
    model.graph.remove(nodes)
    seen: set[int] = set()
    latest: dict[ir.Value, ir.Value] = {}
    for step, number in enumerate(schedule):
        node = nodes[number]
        if number in seen:
            # Another node that computes the same, from the latest copies of these inputs
            originals = [None if v is None else latest.get(v, v) for v in inputs[number]]
            names = iter(scheduled.writes[step])
            outputs = [
                ir.Value(name=scheduled.values[next(names)] if v.name else "", type=v.type, shape=v.shape)
                for v in node.outputs
            ]
            made = ir.Node(
                node.domain,
                node.op_type,
                originals,
                node.attributes.values(),
                outputs=outputs,
                name=scheduled.nodes[step],
                version=node.version,
                metadata_props={**node.metadata_props, AGAIN: scheduled.again[step]},
            )
            latest.update((a, b) for a, b in zip(node.outputs, made.outputs, strict=True) if a.name)
            node = made
        else:
            for index, value in enumerate(node.inputs):
                if value is not None and value in latest:
                    node.replace_input_with(index, latest[value])
        seen.add(number)
        model.graph.append(node)


def put_updates_last(model: Model) -> bool:
    """A pass: what the verdicts of a training step don't need is behind them, though new running statistics come early.

    All else keeps its order, and so does a model without verdicts.
    """
    roles = model.training
    verdicts = [] if roles is None else [v for v in model.graph.outputs if v.name in roles.verdicts]
    makers = {v.producer() for v in verdicts} - {None}
    if roles is None or not makers:
        return False
    nodes = list(model.graph)
    wanted = needed_by(v for v in model.graph.outputs if v.name in (*roles.verdicts, *roles.outputs))
    last = max(number for number, node in enumerate(nodes) if node in makers)
    early = [node for node in nodes[:last] if node not in wanted]
    model.graph.remove(early)
    model.graph.insert_after(nodes[last], early)
    return bool(early)


def put_in_order(model: ir.Model, state: Mapping[str, str] = MappingProxyType({})) -> None:
    """Put each node behind those it reads from; all else keeps its order.

    Args:
        model: The model; its nodes are put into another order.
        state: Input → the output that is its content in the next run: what computes that is put behind all that reads
            the content now, where that can be.
    """
    nodes = list(model.graph)
    number, sources = {node: index for index, node in enumerate(nodes)}, sources_of(nodes)
    inputs, outputs = ({str(v.name): v for v in values} for values in (model.graph.inputs, model.graph.outputs))
    for old, new in state.items():
        maker = outputs[new].producer()
        if maker is None:
            continue
        readers = {number[node] for node, _ in inputs[old].uses() if node in number} - {number[maker]}
        after = [sources[each] | readers if each == number[maker] else sources[each] for each in range(len(nodes))]
        order = topological_order([sorted(each) for each in after], range(len(nodes)))
        if len(order) == len(nodes):  # else what reads it depends on what is to come
            sources = after
    order = topological_order([sorted(each) for each in sources], range(len(nodes)))
    model.graph.remove(nodes)
    model.graph.extend(nodes[each] for each in order)
