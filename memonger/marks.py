"""marks: what users write on a model's nodes about keeping and recomputing, and the decision written back.

Marks are ``metadata_props`` of nodes: ``mirror_stage`` ("True", or a stage's name) makes the node's output a candidate
for keeping; ``force_mirroring`` ("True": recompute, "False": keep) decides. Both come from MXNet's memonger. They are
read before lowering and follow the values, as names of values nearly all survive it.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import onnx_ir as ir

from memonger.errors import PlanError
from memonger.load import Model

STAGE = "mirror_stage"
FORCE = "force_mirroring"


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of a lowered model, by node number in file order.

    Attributes:
        stages: Node → its stage; "True" is a stage of its own.
        forced: Node → whether it is recomputed.
        moved: What became of marks whose value the lowering took away, one sentence each.
    """

    stages: Mapping[int, str] = field(default_factory=dict)
    forced: Mapping[int, bool] = field(default_factory=dict)
    moved: tuple[str, ...] = ()


def select(model: Model, mirror: Sequence[str], keep: Sequence[str]) -> Model:
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
        for pattern in patterns:
            found = [node for node in copy.graph if _matches(node, pattern)]
            if not found:
                known = ", ".join(sorted({node.op_type for node in copy.graph})[:12])
                raise PlanError(
                    f"{model.name}: '{pattern}' names no node: give a node's name, its operator ({known} ...) or its "
                    "output; * and ? stand for any letters."
                )
            for node in found:
                node.metadata_props[FORCE] = decision
    return dataclasses.replace(model, ir=copy)


def _matches(node: ir.Node, pattern: str) -> bool:
    names = (node.name or "", node.op_type, *(str(v.name) for v in node.outputs if v.name))
    return any(fnmatchcase(name, pattern) for name in names)


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
    moved: list[str] = []
    for node in source.graph:
        stage, force = node.metadata_props.get(STAGE, ""), node.metadata_props.get(FORCE)
        if stage in ("", "False") and force is None:
            continue
        target = _surviving(node, number)
        here = any(str(v.name) in number for v in node.outputs)
        if not here:
            where = "is lost" if target is None else f"moved to '{target}'"
            moved.append(f"the mark on node '{node.name}' ({node.op_type}) {where}: lowering took its value away.")
        if target is None:
            continue
        if stage not in ("", "False"):
            stages[number[target]] = stage
        if force is not None:
            forced[number[target]] = _decision(node, force, name)
    return Marks(stages, forced, tuple(moved))


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


def annotate(model: ir.Model, recomputed: Collection[str]) -> ir.Model:
    """A copy of the model with the decision on every node.

    Args:
        model: The user's.
        recomputed: Names of the values that are computed again.
    """
    copy = model.clone()
    for node in copy.graph:
        node.metadata_props[FORCE] = str(any(v.name in recomputed for v in node.outputs))
    return copy
