"""What PyTorch's compiler doesn't store: results of operators that work element by element, where they are read so.

Its kernels compute such an operator inside what reads it, as often as it is read. So a result takes nothing where only
operators read it that are fused likewise, or that reduce; what it is made of is then read in its place.
"""

from collections.abc import Collection, Mapping

from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomSchedulerPass
from torch._inductor.dependencies import WeakDep
from torch._inductor.virtualized import V

from memonger.torch import operators

_MOST_SOURCES = 4
"""The compiler stores what several operators read that reads more than so many itself (``realize_reads_threshold``)."""

_MOST_OPERATORS = 30
"""And what so many operators compute (``realize_opcount_threshold``)."""

_ROOM = 17 / 16
"""A result of one large source may read some small ones beside it, as of a normalization its statistics."""

_CONSTANT = ("aten.full", "aten.arange", "prims.iota", "prims.inductor_random", "aten.scalar_tensor")
"""Operators without a tag that read nothing large, and are computed element by element."""


def instead(
    joint: fx.Graph, results: Collection[int], behind: Collection[fx.Node], once: Collection[fx.Node]
) -> tuple[dict[int, dict[int, int]], set[fx.Node]]:
    """Of each storage that isn't stored what is read in its place, with its bytes.

    Left in are results that take less than what they are made of and are read in the other pass, or several times: as
    the mask of a dropout, one of them may be worth keeping.

    Args:
        joint: As AOTAutograd traced it.
        results: Storages of what it returns.
        behind: Nodes of the backward pass.
        once: Nodes that can't run where their results are read.
    """
    found, depth = dict[int, dict[int, int]](), dict[int, int]()
    drawn = set[int]()
    given = {key for node in joint.find_nodes(op="placeholder") for key in _storages(node)}
    for node in joint.nodes:
        own = _storages(node)
        if node in once or len(own) != 1 or not _is_by_element(node) or not own.keys().isdisjoint({*results, *given}):
            continue
        (storage, size), *_ = own.items()
        readers = _readers(node)
        if storage in found or not readers or not all(_is_by_element(one) or _reduces(one) for one in readers):
            continue
        read = _read(node)
        sources = dict[int, int]()
        for key, bytes_ in read.items():
            sources |= found.get(key, {key: bytes_})
        counted = sum(bytes_ for key, bytes_ in sources.items() if key not in given)
        is_drawn = _is_random(node) or any(key in drawn for key in read)
        is_single = len(readers) == 1 and (node in behind) == (readers[0] in behind)
        depth[storage] = 1 + sum(depth.get(key, 0) for key in read)
        if depth[storage] > _MOST_OPERATORS or len(sources) > _MOST_SOURCES * (1 + is_single):
            depth[storage] = 0
        elif is_single or (counted <= size * _ROOM and not is_drawn and not _is_heavy(node)):
            found[storage] = sources
            drawn |= {storage} if is_drawn else set()
        else:
            depth[storage] = 0
    return found, {one for one in joint.nodes if _is_random(one) or not drawn.isdisjoint(_read(one))}


def _is_random(node: fx.Node) -> bool:
    return str(getattr(node.target, "overloadpacket", "")) == "prims.inductor_random"


_HEAVY = ("exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh")


def _is_heavy(node: fx.Node) -> bool:
    return node.meta["val"].device.type == "cpu" and node.target.overloadpacket.__name__ in _HEAVY


def _read(node: fx.Node) -> dict[int, int]:
    return {key: size for one in node.all_input_nodes for key, size in _storages(one).items()}


def _storages(node: fx.Node) -> Mapping[int, int]:
    return operators.storages(operators.tensors_in(node.meta.get("val")))


def _readers(node: fx.Node) -> list[fx.Node]:
    """What computes with a node's result, or with a view of it."""
    own, found = _storages(node).keys(), dict[fx.Node, None]()
    stack = list(node.users)
    while stack:
        user = stack.pop()
        if user.op == "call_function" and own == _storages(user).keys():
            stack += user.users
        else:
            found[user] = None
    return list(found)


def _is_by_element(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable and (
        torch.Tag.pointwise in target.tags or str(target.overloadpacket) in _CONSTANT
    )


def _reduces(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.reduction in node.target.tags


def adds_late(node: fx.Node, before: fx.Node | None) -> bool:
    """Whether a node adds to a product that was computed some time before: as `addmm` it would be computed here."""
    return node.target is torch.ops.aten.add.Tensor and any(
        one.target is torch.ops.aten.mm.default and len(one.users) == 1 and one is not before
        for one in node.all_input_nodes
    )


def unmatched(node: fx.Node) -> fx.Node:
    """A sum as a difference from what is negated, which has the same bits, and which no pattern has."""
    aten, (x, y) = torch.ops.aten, node.args
    with node.graph.inserting_after(node):
        negated = node.graph.call_function(aten.neg.default, (y,))
    negated.meta = dict(y.meta)
    with node.graph.inserting_after(negated):
        made = node.graph.call_function(aten.sub.Tensor, (x, negated))
    made.meta = dict(node.meta)
    node.graph.erase_node(node)
    return made


class InOrder(CustomSchedulerPass):
    """Between kernels of libraries the compiler fuses and orders as it likes, but what is planned behind one stays so.

    Else it computes what runs again together with what reads the same, which may be long before it is needed.
    """

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """The compiler's nodes, with dependencies besides those of their values."""
        turns = {node: turn for turn, node in enumerate(V.graph.graph.nodes)}
        turn = {one: max((turns.get(each, -1) for each in one.node.get_origins()), default=-1) if one.node is not None else -1 for one in nodes}
        segment, last = list[Any](), None
        for one in sorted(nodes, key=turn.__getitem__):
            for before in (segment if one.is_extern() else [last] if last is not None else []):
                for name in before.get_buffer_names():
                    one.add_fake_dep(WeakDep(name, one.get_name(), is_fake=True))
            if one.is_extern():
                segment, last = [one], one
            else:
                segment.append(one)
        if not nodes:
            return nodes
        scheduler = nodes[0].scheduler
        scheduler.nodes = scheduler.topological_sort_schedule(nodes)
        scheduler.compute_ancestors()
        return scheduler.nodes

    def uuid(self) -> str:
        """What inductor's cache of compiled graphs tells it by."""
        return "memonger"
