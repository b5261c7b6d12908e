"""What users write on a model's nodes about keeping and recomputing.

Marks are ``metadata_props`` of nodes: ``mirror_stage`` ("True", or a stage's name) makes the node's output a candidate
for keeping; ``force_mirroring`` ("True": recompute, "False": keep) decides. Both come from MXNet's memonger. They are
read before lowering and follow the values, as names of values nearly all survive it.

Where a node is written out as others, each of those gets its ``force_mirroring``, and the one that writes its output
its ``mirror_stage``. The others are its *parts*: those that can't run twice are kept.
"""

import dataclasses
import re
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import ClassVar

import onnx_ir as ir

from memonger.errors import PlanError
from memonger.ir.model import Model
from memonger.ir.names import fresh, matches
from memonger.words import did_you_mean

STAGE = "mirror_stage"

FORCE = "force_mirroring"

PART = "memonger.part"
"""On a part: the output of the node it is a part of."""

CHUNK = "memonger.chunk"
"""On a copy of a node that runs on a slice: ``<band>.<stage>.<begin>.<end>``; see `memonger.tiling.slices`."""

AGAIN = "memonger.again"
"""On a node that computes something again: the name of the node that it is a copy of."""

_NUMBER = re.compile(r"[0-9]{1,18}")

_CHUNK_NAME = re.compile(r"\.chunk\d+_\d+(?:#\d+)?(?=$|/(?:Slice|Concat)(?:#\d+)?$)")

WINDOW = "memonger.window"
"""On a Slice or Concat node that chunks made: its parts may lie inside its whole. Its value is ``1``."""

STRIP = "memonger.strip"
"""On a node that strips made: a copy's is ``<begin>.<end>``, the rows that it writes; of what cuts and joins ``1``."""

OVERLAP = "memonger.overlap"
"""On a node that in slices of rows is to give rows again that a later slice reads again: ``1``."""

IN_FILE = "memonger.in_file"
"""On a node whose large outputs wait in a file of the session's for the steps that read them later: ``1``. See
`memonger.graph.weight_window`."""

AHEAD = "memonger.ahead"
"""On a node that copies a weight to a device: a session may make the copy itself, from where the node stands until a
step reads it, while it runs the steps between: ``1``. See `memonger.graph.ahead`."""

COMPOSITE = "memonger.composite"
"""On a node that a gradient rule wrote in the form that is fastest on the CPU: the name of what it computes.

A lowering may have a rule by that name, which writes it otherwise. Every lowering takes these marks away
(`forget_composites`).
"""


TURNED_WEIGHT = "memonger.turned_weight"
"""On a convolution that is an image's gradient: the name of the weight that its own was made from, channels exchanged
and kernel flipped."""


@dataclasses.dataclass(frozen=True, slots=True)
class DepthwiseWeight:
    """On the last node of a composite of that name, the gradient of a depthwise weight: what it is computed from.

    Attributes:
        x: Name of the image.
        dy: Name of the gradient of what the convolution gave.
        begin: Padding before the image, by axis.
        strides: The convolution's.
        dilations: The convolution's.
    """

    NAME: ClassVar[str] = "DepthwiseWeight"
    KEY: ClassVar[str] = "memonger.depthwise_weight"

    x: str
    dy: str
    begin: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]


def spread(node: ir.Node, made: Iterable[ir.Node], writers: Collection[ir.Node]) -> None:
    """Give the metadata of a node to those that stand for it.

    Args:
        node: The node that is replaced.
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
    inside = (node for function in model.functions.values() for node in function.all_nodes())
    everything = [*model.graph.all_nodes(), *inside]
    taken = {str(value.name) for node in everything for value in (*node.inputs, *node.outputs) if value is not None}
    for node in everything:  # what a call leaves out is written all the same, and then needs a name
        for place, value in enumerate(node.outputs if node.op_identifier() in model.functions else ()):
            value.name = value.name or fresh(f"{node.op_type}/{place}", taken)
    calls: dict[str, dict[str, str]] = {}
    for node in model.graph:
        if node.op_identifier() in model.functions:
            calls[_output(node)] = dict(node.metadata_props)
            node.metadata_props.setdefault(PART, _output(node))
            node.metadata_props.pop(STAGE, None)
    _write_out(model)
    for node in model.graph:
        for marks in (calls[str(v.name)] for v in node.outputs if v.name in calls):
            node.metadata_props.pop(PART, None)
            node.metadata_props.update(marks)


_MANY = 2000
"""Nodes up to which functions are written out into the graph at once."""


def _write_out(model: ir.Model) -> None:
    """Write functions out: of many nodes first into one another, as onnx-ir tries a name for each of the same name."""
    from onnx_ir.passes.common import InlinePass  # with all passes that it has

    if nodes_when_inlined(model) <= _MANY:
        InlinePass()(model)
        return
    while model.functions:
        inner = {
            key
            for key, function in model.functions.items()
            if not any(node.op_identifier() in model.functions for node in function.all_nodes())
        }
        found = InlinePass(lambda function, inner=inner: function.identifier() in inner)(model)  # type: ignore[misc]
        if not found.modified:  # a cycle, or functions that nobody calls
            InlinePass()(model)
            return


def nodes_when_inlined(model: ir.Model) -> int:
    """How many nodes a model has with its functions written out; those that call themselves count as one."""
    inside: dict[ir.OperatorIdentifier, list[ir.OperatorIdentifier]] = {
        key: [node.op_identifier() for node in function.all_nodes()] for key, function in model.functions.items()
    }
    calls = {key: {one for one in found if one in inside} for key, found in inside.items()}
    sizes: dict[ir.OperatorIdentifier, int] = {}
    try:
        for key in TopologicalSorter(calls).static_order():
            sizes[key] = sum(sizes.get(one, 1) for one in inside[key])
    except CycleError:
        return 0  # `InlinePass` names it
    return sum(sizes.get(node.op_identifier(), 1) for node in model.graph.all_nodes())


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """The chunk that a copy of a node is of: its band and stage, and the slice ``[begin, end)`` that it runs on."""

    band: int
    stage: int
    begin: int
    end: int

    @property
    def mark(self) -> str:
        """What stands on the node."""
        return f"{self.band}.{self.stage}.{self.begin}.{self.end}"


def chunk_of(node: ir.Node) -> Chunk | None:
    """The chunk that a node is of; None where it has no mark, or one that chunks aren't written with."""
    mark = node.metadata_props.get(CHUNK)
    return None if mark is None else _chunk(mark)


@lru_cache(100_000)
def _chunk(mark: str) -> Chunk | None:
    parts = mark.split(".")
    return Chunk(*map(int, parts)) if len(parts) == 4 and all(map(_NUMBER.fullmatch, parts)) else None


def before_chunks(node: ir.Node) -> str:
    """The name that a node had before chunks were made; of one that cuts or joins that of the value it does so with."""
    name, props = str(node.name), node.metadata_props
    return without_slice(name) if CHUNK in props or WINDOW in props or STRIP in props else name


def own_node(node: ir.Node) -> str:
    """The name of the node that this one runs: that it computes again, or that it was before chunks were made."""
    again = node.metadata_props.get(AGAIN)
    return before_chunks(node) if again is None else without_slice(again)


def without_slice(name: str) -> str:
    """A name without the slice that chunks put behind it."""
    return _CHUNK_NAME.split(name)[0]


def forget_composites(model: Model) -> bool:
    """A pass: no names of composites on the nodes."""
    keys = (COMPOSITE, DepthwiseWeight.KEY, TURNED_WEIGHT)
    found = [node.metadata_props.pop(key, None) for node in model.graph for key in keys]
    return any(one is not None for one in found)


def forget_parts(model: ir.Model) -> None:
    """Take off the nodes what they are parts of, where no mark depends on it."""
    for node in model.graph:
        if FORCE not in node.metadata_props:
            node.metadata_props.pop(PART, None)


def origins(model: ir.Model) -> dict[str, str]:
    """The values of parts, each with the output of the node it is a part of."""
    parts = ((node, node.metadata_props.get(PART)) for node in model.graph)
    return {str(v.name): part for node, part in parts if part for v in node.outputs}


def mark_nodes(model: Model, mirror: Sequence[str], keep: Sequence[str]) -> bool:
    """A pass: ``force_mirroring`` is on the nodes that patterns name.

    Args:
        model: The model.
        mirror: Glob patterns of nodes to recompute: a node's name, operator or output.
        keep: Of nodes to keep; they overrule ``mirror``.

    Raises:
        PlanError: a pattern names no node.
    """
    for patterns, decision in ((mirror, "True"), (keep, "False")):
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            matching = [node for node in model.graph if matches(_names_of(node), pattern)]
            if not matching:
                types = ", ".join(sorted({node.op_type for node in model.graph})[:12])
                names = [name for node in model.graph for name in _names_of(node)]
                raise PlanError(
                    f"{model.name}: '{pattern}' names no node: give a node's name, its operator ({types} ...) or its "
                    f"output; * and ? stand for any letters.{did_you_mean(pattern, names)}"
                )
            for node in matching:
                node.metadata_props[FORCE] = decision
                node.metadata_props.pop(PART, None)
    return bool(mirror or keep)


def _names_of(node: ir.Node) -> tuple[str, ...]:
    return (node.name or "", node.op_type, *(str(v.name) for v in node.outputs if v.name))


def lost(before: ir.Model, after: ir.Model) -> tuple[str, ...]:
    """What became of marks whose value differentiation took away: at most one sentence.

    Args:
        before: The forward model.
        after: The training model.
    """
    there = {v.name for node in after.graph for v in node.outputs}
    gone = [node for node in before.graph if _is_marked(node) and not any(v.name in there for v in node.outputs)]
    return (f"{are_lost(gone)}: the training model computes no such value.",) if gone else ()


def marks_on(nodes: Sequence[ir.Node]) -> str:
    """The marks of nodes, of which the first is named, as the subject of a sentence."""
    first = f"node '{nodes[0].name}' ({nodes[0].op_type})"
    return f"the mark on {first}" if len(nodes) == 1 else f"the marks on {first} and {len(nodes) - 1} more"


def are_lost(nodes: Sequence[ir.Node]) -> str:
    """That the marks of nodes are lost, without the reason."""
    return f"{marks_on(nodes)} {'is' if len(nodes) == 1 else 'are'} lost"


def count_marked(model: ir.Model) -> int:
    """How many nodes carry marks."""
    return sum(_is_marked(node) for node in model.graph)


def _is_marked(node: ir.Node) -> bool:
    return node.metadata_props.get(STAGE, "") not in ("", "False") or FORCE in node.metadata_props
