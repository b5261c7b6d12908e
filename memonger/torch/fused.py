"""What PyTorch's compiler stores: not the results of operators by element that are computed inside what reads them.

Its kernels compute such an operator in each reader. So its result takes nothing where only operators read it that are
fused likewise, or that reduce; what it is made of is then read in its place. With `OPTIONS` the compiler follows that:
whatever several kernels read it stores, whatever a single one reads it doesn't, and `InOrder` keeps the order that is
planned. (Read in torch/_inductor/graph.py, `run_node`, and ir.py, `should_realize_on_reuse`, of PyTorch 2.13.)
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomSchedulerPass
from torch._inductor.dependencies import WeakDep
from torch._inductor.virtualized import V
from torch.utils.flop_counter import flop_registry

from memonger.graph.graph import Graph, Pair
from memonger.graph.liveness import assign_storage, live_bytes
from memonger.graph.schedule import schedule_graph
from memonger.torch import operators

aten = torch.ops.aten

_MOST_SOURCES = 12
"""Storages that one reads: the compiler stores what reads more (see `OPTIONS`), as it does by default on a CPU."""

_MOST_OPERATORS = 30
"""Operators in one reader: the compiler stores what more compute."""

_ROOM = 17 / 16
"""Bytes that one of several readers may read, over those of its result: statistics beside a large operand."""

_DRAW = "prims.inductor_random"
"""Draws from a seed: what is drawn anew in each reader costs time there, so it is drawn once."""

_FILL = (_DRAW, "aten.full", "aten.arange", "aten.scalar_tensor", "prims.iota")
"""Operators by element that read nothing and have no tag."""

_INDEXED = ("aten.gather",)
"""Operators that read elements at an index, and compute what they read there."""

_PLACED = ("aten.slice_scatter", "aten.select_scatter", "aten.constant_pad_nd")
"""Operators without a tag that put what they read among other elements: each element of the result is one of these."""

_LAID_OUT = ("aten.convolution", "aten.convolution_backward")
"""Operators whose results may lie otherwise than they were traced: that something is written over them isn't sure."""

_HEAVY = ("exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh")
"""What the compiler stores on a CPU where several operators read it."""


@dataclass(frozen=True, slots=True)
class Fused:
    """What the compiler's kernels store of a joint graph, and where.

    Attributes:
        inner: Of each storage that isn't stored the storages that are read in its place, with their bytes.
        drawn: Nodes that draw from a seed, alone or with what is computed inside them.
        over: Of nodes by element the storages that they may be written over, where nothing reads these later: as large,
            and read element by element at the place that is written.
        sums: Sums that a library computes together with a product, and the products, which have no kernels of their
            own.
        copies: Bytes of operands that a convolution is given as copies in the layout of its result.
    """

    inner: Mapping[int, Mapping[int, int]]
    drawn: Collection[fx.Node]
    over: Mapping[fx.Node, Collection[int]]
    sums: Mapping[fx.Node, fx.Node]
    copies: Mapping[fx.Node, int]

    def is_library(self, node: fx.Node | None) -> bool:
        """Whether a node is a library's kernel, as products and convolutions are, or stands for no operator at all."""
        return node is None or node in self.sums or getattr(node.target, "overloadpacket", None) in flop_registry

    def adds_late(self, node: fx.Node, before: fx.Node | None) -> bool:
        """Whether a node adds to a product that isn't what ran before: as ``addmm`` it would be computed here."""
        return _adds(node) and node not in self.sums and any(one is not before for one in _products_of(node))


def fused(joint: fx.Graph, results: Collection[int], behind: Collection[fx.Node], once: Collection[fx.Node]) -> Fused:
    """What isn't stored, and what may be written over operands.

    A result that several operators read, or one of the other pass, is stored if it takes less than what it is made of:
    it may be worth keeping, as the mask of a dropout.

    Args:
        joint: As AOTAutograd traced it.
        results: Storages of what it returns.
        behind: Nodes of the backward pass.
        once: Nodes that can't run where their results are read.
    """
    found, inside, drawn = dict[int, dict[int, int]](), dict[int, frozenset[int]](), set[int]()
    over, over_of = dict[fx.Node, set[int]](), dict[int, set[int]]()
    given = {key for node in joint.find_nodes(op="placeholder") for key in _made(node)}
    laid_out = {key for node in joint.nodes if _name(node) in _LAID_OUT for key in _made(node)}
    sums = {node: product for node in joint.nodes if (product := _product_in(node)) is not None}
    found |= {key: _read(product) for product in sums.values() for key in _made(product)}
    for node in joint.nodes:
        made, read = _made(node), _read(node)
        if len(made) != 1 or not _is_by_element(node) or node in sums or not made.keys().isdisjoint((*results, *given)):
            continue
        (storage, size), *_ = made.items()
        own, elsewhere = set[int](), set[int]()
        for one in node.all_input_nodes:
            for key in _made(one):
                at_place = (
                    over_of.get(key, set[int]() if key in found else {key}) if _lies_as(one, node) else set[int]()
                )
                own |= at_place
                elsewhere |= found.get(key, {key: 0}).keys() - at_place
        over[node] = over_of[storage] = own - elsewhere - given - laid_out - {*results}
        readers = _readers(node)
        sources = {key: bytes_ for one, own in read.items() for key, bytes_ in found.get(one, {one: own}).items()}
        operators_in = frozenset({storage}).union(*(inside.get(key, ()) for key in read))
        is_single = len(readers) == 1 and (node in behind) == (readers[0] in behind)
        is_drawn = _name(node) == _DRAW or not drawn.isdisjoint(read)
        large = sum(bytes_ for key, bytes_ in sources.items() if key not in given)
        if (
            node not in once and storage not in found and readers
            and all(one not in sums and _computes(one, node) for one in readers)
            and len(operators_in) <= _MOST_OPERATORS and len(sources) <= _MOST_SOURCES
            and (is_single or (large <= size * _ROOM and not is_drawn and not _is_heavy(node)))
        ):  # fmt: skip
            found[storage], inside[storage] = sources, operators_in
            drawn |= {storage} if is_drawn else set()
        else:
            over_of[storage] = {storage}
    return Fused(
        found, {one for one in joint.nodes if _name(one) == _DRAW or not drawn.isdisjoint(_read(one))}, over, sums,
        {node: _copied(node, behind) for node in joint.nodes if _name(node) in _LAID_OUT},
    )  # fmt: skip


def _copied(node: fx.Node, behind: Collection[fx.Node]) -> int:
    """Bytes of a convolution's operands that lie otherwise than its result, and aren't written for it.

    (Read in torch/_inductor/kernel/conv.py, of PyTorch 2.13.)
    """
    if _name(node) == "aten.convolution":
        pairs = [(node.args[0], node.meta["val"]), (node.args[1], node.meta["val"])]
    else:
        (gradient, x, weight), (of_x, of_weight, _) = node.args[:3], node.meta["val"]
        pairs = [(x, of_weight), (gradient, of_weight), (gradient, of_x), (weight, of_x)]
    found = {
        one: one.meta["val"].numel() * one.meta["val"].element_size()
        for one, result in pairs
        if isinstance(one, fx.Node) and isinstance(result, torch.Tensor) and not _is_ordered(one.meta["val"], result)
        and not (_is_by_element(one) and (one in behind) == (node in behind))
    }  # fmt: skip
    return operators.expected(sum(found.values()))


def _is_ordered(tensor: torch.Tensor, like: torch.Tensor) -> bool:
    """Whether strides come in the same order, those of dimensions of size 1 apart."""
    dims = sorted(range(like.ndim), key=lambda dim: (operators.expected(like.stride(dim)), -dim))
    strides = [operators.expected(tensor.stride(dim)) for dim in dims if operators.expected(tensor.shape[dim]) != 1]
    return strides == sorted(strides)


def _lies_as(one: fx.Node, node: fx.Node) -> bool:
    """Whether each element of an operand lies where that of the result does, and both are all of their storages."""
    x, y = one.meta["val"], node.meta["val"]
    return bool(
        x.dtype == y.dtype
        and _elements(one) == _elements(node)
        and _elements(one) * x.element_size() == operators.expected(x.untyped_storage().nbytes())
        and ((x.shape == y.shape and x.stride() == y.stride()) or (x.is_contiguous() and y.is_contiguous()))
    )


def _made(node: fx.Node) -> dict[int, int]:
    return operators.storages(operators.tensors_in(node.meta.get("val")))


def _read(node: fx.Node) -> dict[int, int]:
    return {key: size for one in node.all_input_nodes for key, size in _made(one).items()}


def _readers(node: fx.Node) -> list[fx.Node]:
    """What computes with a node's result, or with a view of it."""
    own, found, stack = _made(node).keys(), dict[fx.Node, None](), list(node.users)
    while stack:
        user = stack.pop()
        if user.op == "call_function" and own == _made(user).keys():
            stack += user.users
        else:
            found[user] = None
    return list(found)


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "overloadpacket", ""))


def _is_by_element(node: fx.Node) -> bool:
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and not target._schema.is_mutable
        and (torch.Tag.pointwise in target.tags or _name(node) in (*_FILL, *_PLACED))
    )


def _computes(reader: fx.Node, node: fx.Node) -> bool:
    """Whether an operator computes what it reads inside its own kernel, not more often than there are elements of it.

    What is read along a new axis (deviations of channels, say) would be computed anew at every element along that.
    """
    if _is_by_element(reader):
        return not node.all_input_nodes or _elements(reader) <= _elements(node)
    is_reduction = isinstance(reader.target, torch._ops.OpOverload) and torch.Tag.reduction in reader.target.tags
    return is_reduction or _name(reader) in _INDEXED


def _elements(node: fx.Node) -> int:
    return operators.expected(node.meta["val"].numel())


def _is_heavy(node: fx.Node) -> bool:
    return bool(node.meta["val"].device.type == "cpu" and _name(node).partition(".")[2] in _HEAVY)


def _adds(node: fx.Node) -> bool:
    return node.target is aten.add.Tensor and len(node.all_input_nodes) == 2 and not node.kwargs


def _products_of(node: fx.Node) -> list[fx.Node]:
    """Products that a node alone reads."""
    return [one for one in node.all_input_nodes if one.target is aten.mm.default and len(one.users) == 1]


def _product_in(node: fx.Node) -> fx.Node | None:
    """The product that the compiler computes with a sum (``addmm``), where what that reads takes no more than it does.

    Of two products it would choose one, and on a GPU none.
    """
    if not _adds(node) or node.meta["val"].device.type != "cpu" or len(_products_of(node)) != 1:
        return None
    (product,), (x, y) = _products_of(node), (one.meta["val"] for one in node.all_input_nodes)
    is_less = sum(_read(product).values()) <= sum(_made(product).values())
    return product if is_less and x.shape == y.shape and x.dtype == y.dtype else None


def held_bytes(graph: Graph, schedule: Sequence[int], nodes: Sequence[fx.Node | None], kernels: Fused) -> int:
    """The most bytes that a schedule holds at any time, where all runs between two libraries' kernels are one kernel.

    On a CPU they are: what one of them reads or makes is there until the last has run. What no other of them reads may
    be written over.

    Args:
        graph: What is scheduled.
        schedule: Its nodes.
        nodes: What they are in the joint graph.
        kernels: What is stored of that.
    """
    ordered = schedule_graph(graph, schedule)
    ends, inplace = list[int](), list[list[Pair]]()
    for _, runs in groupby(range(len(schedule)), lambda run: run if kernels.is_library(nodes[schedule[run]]) else -1):
        kernel = list(runs)
        ends += [kernel[-1] + 1] * len(kernel)
        times = Counter(value for run in kernel for value in ordered.reads[run])
        inplace += [[pair for pair in ordered.inplace[run] if times[pair[0]] == 1] for run in kernel]
    buffers = assign_storage(ordered.with_aliases(inplace=inplace)).buffers
    return int(live_bytes([replace(one, stop=ends[one.stop - 1]) for one in buffers], len(schedule)).max())


class InOrder(CustomSchedulerPass):
    """What is planned behind a library's kernel isn't fused with what is planned before it.

    Else the compiler computes what runs again together with what reads the same, long before it is needed. Between two
    such kernels it orders and fuses as it likes.
    """

    def __call__(self, nodes: list[Any]) -> list[Any]:
        """The compiler's nodes, with dependencies beside those of their values."""
        turns = {node: turn for turn, node in enumerate(V.graph.graph.nodes)}

        def turn(one: Any) -> int:
            return max((turns.get(each, -1) for each in one.node.get_origins()), default=-1) if one.node else -1

        before, among = list[Any](), list[Any]()
        for one in sorted(nodes, key=turn):
            names = {
                name for other in (among or before if one.is_extern() else before) for name in other.get_buffer_names()
            }
            read = {dep.name for dep in one.read_writes.reads}  # twice, it wouldn't be written over
            for name in sorted(names - read):
                one.add_fake_dep(WeakDep(name, one.get_name(), is_fake=True))
            if one.is_extern():
                before, among = [one], []
            else:
                among.append(one)
        if nodes:
            scheduler = nodes[0].scheduler
            scheduler.nodes = scheduler.topological_sort_schedule(nodes)
            scheduler.compute_ancestors()
            return list(scheduler.nodes)
        return nodes

    def uuid(self) -> str:
        """What inductor's cache of compiled graphs tells it by: this file."""
        return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


OPTIONS = {
    "_pre_fusion_custom_pass": InOrder(), "realize_reads_threshold": 0, "realize_acc_reads_threshold": _MOST_SOURCES,
    "layout_optimization": False, "allow_buffer_reuse": False,
}  # fmt: skip
"""What the compiler is given. With its ``layout_optimization`` it copies the weights of convolutions into another
layout in the forward pass and keeps these copies for the backward pass, which no partition function is asked about.
With its ``allow_buffer_reuse`` it keeps what is read no more for a later value while its own estimate of the peak isn't
exceeded, which leaves out that results are written over operands."""
