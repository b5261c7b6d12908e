"""Which rows of images slices compute again rather than keep.

What a slice wants of rows that were computed for the one before is kept as lines. To keep some rows all are copied:
joined with those of before, and in a loop laid out in rows for that and in blocks of channels again. That may take
longer than to compute the few once more. It is worked out for each image, from the last on: rows that are computed
again want more rows of what they are made of.
"""

import math
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from memonger.ir.extract import is_fed
from memonger.ir.marks import OVERLAP
from memonger.ir.operators import operator_name
from memonger.ir.values import nbytes
from memonger.tiling.axes import LARGER, WITHIN
from memonger.tiling.cutting import Refusal, Slicing

OVERLAPS = (6, 24)
"""In so many slices models run for which it is worked out what these compute again."""


def overlapping(
    model: ir.Model, rules: Sequence[Slicing | Refusal | None], seconds: Mapping[str, float], moving: float
) -> list[ir.Model]:
    """A model, and forms of it in which nodes are marked whose rows slices compute again, for few slices and for more.

    Args:
        model: With static shapes.
        rules: Its `row_rules`, which are those of all forms.
        seconds: What the products of nodes take, by name; of others nothing.
        moving: Seconds for each byte of which a part is cut or joined.
    """
    forms = {frozenset[str](): model}
    for slices in OVERLAPS:
        copy = model.clone()
        forms.setdefault(with_overlap(copy, rules, seconds, moving, slices), copy)
    return list(forms.values())


def with_overlap(
    model: ir.Model, rules: Sequence[Slicing | Refusal | None], seconds: Mapping[str, float], moving: float, slices: int
) -> frozenset[str]:
    """Mark the nodes whose rows each slice computes again rather than keep what it wants of them.

    Args:
        model: Changed. See `overlapping`, as for what products take and moving.
        rules: See `overlapping`.
        slices: In about how many slices its images run: the finer, the more often rows are computed again.

    Returns: their names.
    """
    nodes = list(model.graph)
    cut = {node: rule for node, rule in zip(nodes, rules, strict=True) if isinstance(rule, Slicing)}
    wanted = dict[ir.Value, set[int]]()  # by each reader so many rows of those that the slice before has
    marked = set[ir.Node]()
    for node in (node for node in reversed(nodes) if node in cut):
        value, rows = node.outputs[0], wanted.get(node.outputs[0], {0})
        # where its readers want other rows, parts are cut in any case
        if len(rows) == 1 and node not in marked and all(user in cut for user in value.consumers()):
            chain = _chain(node, cut)
            products = math.fsum(seconds.get(str(each.name), 0.0) for each in chain)
            reads = [one for each in chain for one in _wanted(each, cut[each], 0, slices).items()]
            wanted_anyway = {v for v, more in reads if more or max(wanted.get(v, {0})) or v.is_graph_input()}
            newly = {v for v, _ in reads if v.producer() not in chain} - wanted_anyway
            larger = [user.outputs[0] for user in value.consumers() if user.op_type in LARGER]  # in rows then, too
            kept = sum(nbytes(v) or 0 for v in (value, *larger)) - sum(nbytes(v) or 0 for v in newly)
            again = products * slices * max(rows) / cut[node].height
            marked |= chain if max(rows) and again < moving * kept else set()
        for v, more in _wanted(node, cut[node], max(rows) if node in marked else 0, slices).items():
            wanted.setdefault(v, set()).add(more)
    for node in marked:
        node.metadata_props[OVERLAP] = "1"
    return frozenset(str(node.name) for node in marked)


def _chain(node: ir.Node, rules: Mapping[ir.Node, Slicing]) -> set[ir.Node]:
    """A node, and where that runs within what makes its inputs, as an activation, the nodes that do."""
    own, more = {node}, {node}
    while more:
        own |= more
        values = (v for each in own if operator_name(each) in WITHIN for v in each.inputs if v is not None)
        alone = (v.producer() for v in values if own.issuperset(v.consumers()) and not v.is_graph_output())
        more = {made for made in alone if made is not None and made in rules} - own
    return own


def _wanted(node: ir.Node, how: Slicing, more: int, slices: int) -> dict[ir.Value, int]:
    """How many rows of each image a slice from the middle reads that the one before it has read.

    Args:
        node: What reads them.
        how: Its rule.
        more: Rows of its result that both give.
        slices: How many there are.
    """
    middle, rows, shared = how.height // 2, max(1, how.height // slices), dict[ir.Value, int]()
    before, after = how.copy(max(0, middle - rows), middle), how.copy(max(0, middle - more), middle + rows)
    for index, (begin, _) in after.inputs.items():
        value = node.inputs[index]
        if value is not None and is_fed(value) and index in before.inputs:
            shared[value] = max(shared.get(value, 0), before.inputs[index][1] - begin)
    return shared
