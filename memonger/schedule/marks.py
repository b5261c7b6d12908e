"""The marks of a model on the nodes of what it was lowered to, and a schedule as marks on the user's model."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from memonger.errors import PlanError
from memonger.graph.graph import Graph
from memonger.ir.marks import FORCE, PART, STAGE, _is_marked, are_lost, marks_on
from memonger.schedule.on_demand import forward_pass


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of a lowered model, by node number in file order.

    Attributes:
        stages: Node → the name of its stage; a node marked "True" is a stage of its own.
        forced: Node → whether it is recomputed.
        parts: Those of ``forced`` that are parts of a marked node that was expanded.
        moved: What became of marks whose value the lowering removed: at most two sentences.
    """

    stages: Mapping[int, str] = field(default_factory=dict)
    forced: Mapping[int, bool] = field(default_factory=dict)
    parts: frozenset[int] = frozenset()
    moved: tuple[str, ...] = ()


def place(source: ir.Model, lowered: ir.Model, name: str) -> Marks:
    """The marks of a model, on the nodes of what it was lowered to.

    A mark whose value was removed moves to the first remaining value downstream.

    Args:
        source: The model before lowering.
        lowered: The model after lowering.
        name: What messages call the model.

    Raises:
        PlanError: a ``force_mirroring`` is neither True nor False.
    """
    number = {str(v.name): index for index, node in enumerate(lowered.graph) for v in node.outputs if v.name}
    stages: dict[int, str] = {}
    forced: dict[int, bool] = {}
    parts: set[int] = set()
    gone: list[ir.Node] = []
    moved: dict[ir.Node, str] = {}
    for node in source.graph:
        if not _is_marked(node):
            continue
        stage, force = node.metadata_props.get(STAGE, ""), node.metadata_props.get(FORCE)
        if force not in (None, "True", "False"):
            raise PlanError(
                f"{name}: node '{node.name}' ({node.op_type}) has {FORCE}={force!r}: it has to be 'True' (recompute) "
                "or 'False' (keep)."
            )
        decided = None if force is None else force == "True"
        here = any(str(v.name) in number for v in node.outputs)
        if PART in node.metadata_props:
            if not here:
                continue
            parts.update(number[str(v.name)] for v in node.outputs if str(v.name) in number)
        target = _surviving(node, number)
        if target is None:
            gone.append(node)
            continue
        if not here:
            moved[node] = target
        if stage not in ("", "False"):
            stages[number[target]] = stage
        if decided is not None:
            forced[number[target]] = decided
    notes, why = list[str](), "the model that will run computes no such value"
    if gone:
        notes.append(f"{are_lost(gone)}: {why}.")
    if moved:
        first = next(iter(moved.values()))
        others = f"'{first}'" if len(moved) == 1 else f"the next values that are computed, '{first}' first"
        notes.append(f"{marks_on(list(moved))} moved to {others}: {why}.")
    return Marks(stages, forced, frozenset(parts), tuple(notes))


def _surviving(node: ir.Node, number: Mapping[str, int]) -> str | None:
    """The first remaining value among the node's outputs and then, breadth first, those downstream."""
    pending, seen = [node], {node}
    for current in pending:
        for value in current.outputs:
            if str(value.name) in number:
                return str(value.name)
        for reader in (user for value in current.outputs for user, _ in value.uses()):
            if reader not in seen:
                seen.add(reader)
                pending.append(reader)
    return None


def annotate(model: ir.Model, graph: Graph, recomputed: Iterable[int], origins: Mapping[str, str]) -> ir.Model:
    """A copy of the model in which ``force_mirroring`` of every node says whether it runs again.

    A node that was expanded into parts counts as run again if the part that writes its output runs again, or if other
    parts do and no backward step reads its output.

    Args:
        model: The user's model.
        graph: The graph of the model it was lowered to.
        recomputed: Nodes of the graph that run again, or copies of them.
        origins: Value of a part → value of the node it is a part of; see `memonger.ir.marks.origins`.
    """
    forward = forward_pass(graph)
    read = {graph.values[v] for node, reads in enumerate(graph.reads) if not forward[node] for v in reads}
    names = [graph.values[graph.firsts[v]] for node in recomputed for v in graph.writes[node]]
    again = {origins.get(name, name) for name in names if origins.get(name) not in read}
    copy = model.clone()
    for node in copy.graph:
        node.metadata_props[FORCE] = str(any(v.name in again for v in node.outputs))
        node.metadata_props.pop(PART, None)
    return copy
