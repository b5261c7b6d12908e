"""One graph for a range of sizes: every value as large as it gets, sharing only what shares at every size."""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

import onnx_ir as ir

from memonger.graph.costs import flops, rates
from memonger.graph.graph import Alias, Graph, Pair, Part
from memonger.ir.marks import CHUNK
from memonger.ir.values import static_shape
from memonger.shapes import open_dims
from memonger.shapes.ranges import DimRange, completed, own, points, shapes_at
from memonger.shapes.sizes import Sizes

Shared = TypeVar("Shared", Pair, Part)

TINY = 64
"""Elements of values that sizes are computed from up to which they stay with the runtime: an address costs too much."""


def over_ranges(model: ir.Model, ranges: Mapping[str, DimRange], make: Callable[[Collection[str]], Graph]) -> Graph:
    """The graph of a model with ranges of sizes; see `merged`.

    Args:
        model: Lowered, with the shapes of the largest sizes, which it has again afterwards.
        ranges: With their places.
        make: Makes the graph of the model as it is when it is called, given names of values that aren't planned.

    Returns: the graph, in which values of a size that no rule tells aren't planned, nor small ones that sizes are
        computed from.

    Raises:
        SizesError: at some sizes the shapes contradict each other.
    """
    sizes, shapes = Sizes(model), open_dims.largest(model, ranges)
    every = [sizes.at(shapes_at(shapes, ranges, at)) for at in points(ranges)]
    left_out = {
        name
        for name, *found in zip(sizes.names, *every, strict=True)
        if None in found
        or (name in sizes.computed and all(math.prod(shape) <= TINY for shape in found if shape is not None))
    }
    turned = [node for node in model.graph if node.op_type == "Transpose"]
    seen: dict[str, set[object]] = {str(node.name): set() for node in turned}
    graphs = []
    for at in reversed(points(ranges)):  # the largest sizes come last, and stay
        open_dims.put(model, sizes, shapes_at(shapes, ranges, at))
        for node in turned:
            seen[str(node.name)].add(node.inputs[0] and static_shape(node.inputs[0]))
        graphs.append(make(left_out))
    return merged(graphs[::-1], [name for name, found in seen.items() if len(found) > 1])


def merged(graphs: Sequence[Graph], doubtful: Collection[str]) -> Graph:
    """The graph of a model whose layout holds at several sizes, from its graphs at each of them.

    Args:
        graphs: Of one model, so that nodes and values have the same numbers. The first gives the costs.
        doubtful: Names of nodes whose views hold at these sizes, but perhaps not at others: they are left out.

    Returns: each value with its largest size; the pairs that share bytes wherever both values have any; the parts that
    chunks mark where they lie at one byte of their whole wherever they have any; of what persists what is written in
    place at each of these sizes.
    """
    first = graphs[0]
    sizes = tuple(map(max, zip(*(graph.sizes for graph in graphs), strict=True)))
    planned = tuple(map(any, zip(*(graph.planned for graph in graphs), strict=True)))

    def in_chunks(graph: Graph, node: int) -> list[Part]:
        has_choice = any(each.optional[node] for each in graphs)
        return [] if has_choice else [part for part in graph.subviews[node] if first.planned[part[1]]]

    def is_empty(graph: Graph, pair: Pair) -> bool:
        return not (graph.planned[pair[0]] or graph.planned[pair[1]])

    certain = [name not in doubtful for name in first.nodes]
    runtime = tuple(
        tuple((a, b) for a, b in dict.fromkeys(p for each in of_node for p in each) if not planned[b])
        for of_node in zip(*(graph.runtime_aliases for graph in graphs), strict=True)
    )
    workspace = tuple(map(max, zip(*(graph.workspace for graph in graphs), strict=True)))
    largest = dataclasses.replace(first, sizes=sizes, planned=planned, workspace=workspace, aliases=())
    return largest.with_aliases(
        view=_in_all(graphs, lambda graph, node: graph.views[node] if certain[node] else (), is_empty),
        inplace=_in_all(graphs, lambda graph, node: graph.inplace[node] if certain[node] else (), is_empty),
        runtime=runtime,
        update=_in_all(graphs, lambda graph, node: graph.updates[node], lambda *_: False),
        append=_in_all(graphs, lambda graph, node: graph.appends[node], lambda *_: False),
        subview=_in_all(graphs, in_chunks, lambda graph, part: not graph.planned[part[0]]),
    )


def _in_all(
    graphs: Sequence[Graph], shared: Callable[[Graph, int], Sequence[Shared]], is_empty: Callable[[Graph, Shared], bool]
) -> tuple[tuple[Shared, ...], ...]:
    """What each node lets share bytes in every graph, but for those in which there are no bytes to share."""
    result = []
    for node in range(len(graphs[0].nodes)):
        found = [(graph, shared(graph, node)) for graph in graphs]
        every = dict.fromkeys(one for _, own in found for one in own)
        result.append(tuple(one for one in every if all(one in own or is_empty(graph, one) for graph, own in found)))
    return tuple(result)


def at_sizes(graph: Graph, sizes: Mapping[int, int]) -> Graph:
    """The graph at other sizes of some values, by number: pairs whose sizes then differ share no bytes.

    Nor does a part that then would end behind its whole.
    """
    given = list(graph.sizes)
    for value, size in sizes.items():
        given[value] = size

    def holds(alias: Alias) -> bool:
        if alias.kind == "subview":
            return alias.byte + given[alias.source] <= given[alias.target]
        return alias.kind not in ("view", "inplace") or given[alias.source] == given[alias.target]

    aliases = tuple(tuple(filter(holds, each)) if each else each for each in graph.aliases)
    return dataclasses.replace(graph, sizes=tuple(given), aliases=aliases)


EMPTY_SECONDS = 1e-6
"""What a node of an empty slice takes."""

SHARE = 0.02
"""Nodes of empty slices may take such a part of the time of a run at the smallest size."""


def idle_nodes(model: ir.Model, ranges: Mapping[str, DimRange]) -> frozenset[str]:
    """Nodes of chunks that do nothing at small sizes, where they would take a part of the time that counts.

    Those sizes are up to an eighth of the largest of a dimension: runs have a session of their own then, without these
    nodes.

    Args:
        model: In chunks, with the shapes of the largest sizes.
        ranges: With their places.

    Returns: their names; none where a run takes so long that they don't count.
    """
    if not ranges or not any(CHUNK in node.metadata_props for node in model.graph):
        return frozenset()
    sizes, shapes, free = Sizes(model), open_dims.largest(model, ranges), own(ranges)
    most, found = {name: one.most for name, one in free.items()}, frozenset[str]()
    least = math.prod(one.least / one.most for one in free.values())
    for name, one in free.items():
        few = one.least + max(0, one.most // 8 - one.least) // one.step * one.step
        at = sizes.at(shapes_at(shapes, ranges, completed(ranges, {**most, name: few})))
        empty = {value for value, shape in zip(sizes.names, at, strict=True) if shape is not None and 0 in shape}
        idle = {node for node in model.graph if all(str(v.name) in empty for v in node.outputs if v.name)}
        readers = {reader for node in idle for value in node.outputs for reader in value.consumers()} - idle
        if all(reader.op_type == "Concat" and not reader.domain for reader in readers) and len(idle) > len(found):
            found = frozenset(str(node.name) for node in idle)
    seconds = sum(map(flops, model.graph)) * least / (rates().flops / 2)  # of one core
    return found if len(found) * EMPTY_SECONDS > SHARE * seconds else frozenset()
