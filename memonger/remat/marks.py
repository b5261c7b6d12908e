"""Marks on a lowered model's nodes, and the decision written back to the user's own model."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import onnx_ir as ir

from memonger.errors import PlanError
from memonger.graph import schedule
from memonger.graph.graph import Graph
from memonger.remat.on_demand import forward_pass

if TYPE_CHECKING:
    pass

from memonger.model.marks import FORCE, PART, STAGE, _is_marked


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of a lowered model, by node number in file order.

    Attributes:
        stages: Node → its stage; "True" is a stage of its own.
        forced: Node → whether it is recomputed.
        parts: Those of ``forced`` that are parts of the node which was marked.
        moved: What became of marks whose value the lowering took away, one sentence each.
    """

    stages: Mapping[int, str] = field(default_factory=dict)
    forced: Mapping[int, bool] = field(default_factory=dict)
    parts: frozenset[int] = frozenset()
    moved: tuple[str, ...] = ()


def place(source: ir.Model, lowered: ir.Model, name: str) -> Marks:
    """The marks of a model, on the nodes of what it was lowered to.

    A mark whose value is no longer there moves to the first one downstream that is.

    Args:
        source: The model before lowering.
        lowered: After.
        name: For messages.

    Raises:
        PlanError: a ``force_mirroring`` is neither True nor False.
    """
    number = {str(v.name): index for index, node in enumerate(lowered.graph) for v in node.outputs if v.name}
    stages: dict[int, str] = {}
    forced: dict[int, bool] = {}
    parts: set[int] = set()
    moved: list[str] = []
    for node in source.graph:
        if not _is_marked(node):
            continue
        stage, force = node.metadata_props.get(STAGE, ""), node.metadata_props.get(FORCE)
        decided = None if force is None else _decision(node, force, name)
        here = any(str(v.name) in number for v in node.outputs)
        if PART in node.metadata_props:
            if not here:
                continue
            parts.update(number[str(v.name)] for v in node.outputs if str(v.name) in number)
        target = _surviving(node, number)
        if not here:
            where = "is lost" if target is None else f"moved to '{target}'"
            moved.append(f"the mark on node '{node.name}' ({node.op_type}) {where}: lowering took its value away.")
        if target is None:
            continue
        if stage not in ("", "False"):
            stages[number[target]] = stage
        if decided is not None:
            forced[number[target]] = decided
    return Marks(stages, forced, frozenset(parts), tuple(moved))


def _decision(node: ir.Node, text: str, name: str) -> bool:
    if text not in ("True", "False"):
        raise PlanError(
            f"{name}: node '{node.name}' ({node.op_type}) has {FORCE}={text!r}: it has to be 'True' (recompute) or "
            "'False' (keep)."
        )
    return text == "True"


def _surviving(node: ir.Node, number: Mapping[str, int]) -> str | None:
    """The first value that is still there: the node's own outputs, then downstream, breadth first."""
    pending, seen = [node], {node}
    for current in pending:
        for value in current.outputs:
            if str(value.name) in number:
                return str(value.name)
        for reader in _readers(current):
            if reader not in seen:
                seen.add(reader)
                pending.append(reader)
    return None


def _readers(node: ir.Node) -> Iterator[ir.Node]:
    for value in node.outputs:
        yield from (user for user, _ in value.uses())


def annotate(model: ir.Model, graph: Graph, recomputed: Iterable[int], origins: Mapping[str, str]) -> ir.Model:
    """A copy of the model with the decision on every node.

    A node with parts is recomputed if its output is, or if parts are and no backward step reads its output.

    Args:
        model: The user's.
        graph: Of what it was lowered to.
        recomputed: Nodes of that which run again, or copies of them.
        origins: See `origins`.
    """
    forward = forward_pass(graph.reads, graph.writes, graph.forward)
    read = {graph.values[v] for node, reads in enumerate(graph.reads) if not forward[node] for v in reads}
    names = [schedule.original(graph.values[v]) for node in recomputed for v in graph.writes[node]]
    again = {origins.get(name, name) for name in names if origins.get(name) not in read}
    copy = model.clone()
    for node in copy.graph:
        node.metadata_props[FORCE] = str(any(v.name in again for v in node.outputs))
        node.metadata_props.pop(PART, None)
    return copy
