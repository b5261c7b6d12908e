"""marks: what users write on a model's nodes about keeping and recomputing, and the decision written back.

Marks are ``metadata_props`` of nodes: ``mirror_stage`` ("True", or a stage's name) makes the node's output a candidate
for keeping; ``force_mirroring`` ("True": recompute, "False": keep) decides. Both come from MXNet's memonger. They are
read before lowering and follow the values, as names of values nearly all survive it.

Where a node is written out as others, each of those gets its ``force_mirroring``, and the one that writes its output
its ``mirror_stage``. The others are its *parts*: those that can't run twice are kept.
"""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import onnx_ir as ir
from onnx_ir.passes import common as passes

from memonger import rewrite
from memonger.errors import PlanError
from memonger.graph import Graph
from memonger.recompute.on_demand import forward_pass

if TYPE_CHECKING:
    from memonger.load import Model

STAGE = "mirror_stage"
FORCE = "force_mirroring"
PART = "memonger.part"
"""On a part: the output of the node it is a part of."""


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


def spread(node: ir.Node, made: Iterable[ir.Node], writers: Collection[ir.Node]) -> None:
    """Give the metadata of a node to those that stand for it.

    Args:
        node: It.
        made: All that stand for it.
        writers: Those of them that write its output.
    """
    for each in made:
        if each in writers:
            each.metadata_props.update(node.metadata_props)
            continue
        each.metadata_props[PART] = node.metadata_props.get(PART, _output(node))
        if FORCE in node.metadata_props:
            each.metadata_props[FORCE] = node.metadata_props[FORCE]


def _output(node: ir.Node) -> str:
    return next((str(v.name) for v in node.outputs if v.name), "")


def inline(model: ir.Model) -> None:
    """Write out the functions that the model's graph calls, as `spread` does the marks of the calls."""
    calls: dict[str, dict[str, str]] = {}
    for node in model.graph:
        if node.op_identifier() in model.functions:
            calls[_output(node)] = dict(node.metadata_props)
            node.metadata_props.setdefault(PART, _output(node))
            node.metadata_props.pop(STAGE, None)
    passes.InlinePass()(model)
    for node in model.graph:
        for marks in (calls[str(v.name)] for v in node.outputs if v.name in calls):
            node.metadata_props.pop(PART, None)
            node.metadata_props.update(marks)


def origins(model: ir.Model) -> dict[str, str]:
    """The values of parts, each with the output of the node it is a part of."""
    parts = ((node, node.metadata_props.get(PART)) for node in model.graph)
    return {str(v.name): part for node, part in parts if part for v in node.outputs}


def select(model: "Model", mirror: Sequence[str], keep: Sequence[str]) -> "Model":
    """The model with ``force_mirroring`` on the nodes that patterns name.

    Args:
        model: Not changed.
        mirror: Glob patterns of nodes to recompute: a node's name, operator or output.
        keep: Of nodes to keep; they overrule ``mirror``.

    Raises:
        PlanError: a pattern names no node.
    """
    if not mirror and not keep:
        return model
    copy = model.ir.clone()
    for patterns, decision in ((mirror, "True"), (keep, "False")):
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            found = [node for node in copy.graph if _matches(node, pattern)]
            if not found:
                known = ", ".join(sorted({node.op_type for node in copy.graph})[:12])
                raise PlanError(
                    f"{model.name}: '{pattern}' names no node: give a node's name, its operator ({known} ...) or its "
                    "output; * and ? stand for any letters."
                )
            for node in found:
                node.metadata_props[FORCE] = decision
                node.metadata_props.pop(PART, None)
    return dataclasses.replace(model, ir=copy)


def _matches(node: ir.Node, pattern: str) -> bool:
    names = (node.name or "", node.op_type, *(str(v.name) for v in node.outputs if v.name))
    return pattern in names or any(fnmatchcase(name, pattern) for name in names)


def lost(before: ir.Model, after: ir.Model) -> tuple[str, ...]:
    """What became of marks whose value differentiation took away, one sentence each.

    Args:
        before: The forward model.
        after: The training model.
    """
    there = {v.name for node in after.graph for v in node.outputs}
    return tuple(
        f"the mark on node '{node.name}' ({node.op_type}) is lost: nothing in the training model computes its value."
        for node in before.graph
        if _is_marked(node) and not any(v.name in there for v in node.outputs)
    )


def _is_marked(node: ir.Node) -> bool:
    return node.metadata_props.get(STAGE, "") not in ("", "False") or FORCE in node.metadata_props


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
    names = [rewrite.original(graph.values[v]) for node in recomputed for v in graph.writes[node]]
    again = {origins.get(name, name) for name in names if origins.get(name) not in read}
    copy = model.clone()
    for node in copy.graph:
        node.metadata_props[FORCE] = str(any(v.name in again for v in node.outputs))
        node.metadata_props.pop(PART, None)
    return copy
