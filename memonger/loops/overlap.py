"""Which rows of images the slices of a loop compute again rather than keep.

What a slice wants of rows that were computed for the one before, the loop carries as lines. To keep some rows all are
copied: laid out in rows, joined with those of before, and laid out in blocks of channels again, which may take longer
than to compute the few once more. That is worked out for each image, from the last on: rows that are computed again
want more rows of what they are made of.
"""

from collections.abc import Mapping

import onnx_ir as ir

from memonger.ir.extract import is_fed
from memonger.ir.marks import OVERLAP
from memonger.ir.operators import operator_name
from memonger.ir.values import nbytes
from memonger.loops.rows import LARGER, WITHIN
from memonger.tiling.axes import row_rules
from memonger.tiling.cutting import Slicing

MOVING_SECONDS = 2e-10
"""What a body takes for each byte of which it cuts or joins a part: on one core, as it is all copied three times."""


def with_overlap(model: ir.Model, seconds: Mapping[str, float], slices: int) -> frozenset[str]:
    """Mark the nodes whose rows each slice computes again rather than keep what it wants of them.

    Args:
        model: With static shapes. Changed.
        seconds: What the products of nodes take, by name; of others nothing.
        slices: In about how many slices its images run: the finer, the more often rows are computed again.

    Returns: their names.
    """
    nodes = list(model.graph)
    rules = {node: rule for node, rule in zip(nodes, row_rules(model), strict=True) if isinstance(rule, Slicing)}
    wanted = dict[ir.Value, set[int]]()  # by each reader so many rows of those that the slice before has
    marked = set[ir.Node]()
    for node in (node for node in reversed(nodes) if node in rules):
        value, rows = node.outputs[0], wanted.get(node.outputs[0], {0})
        # where its readers want other rows, parts are cut in any case
        if len(rows) == 1 and node not in marked and all(user in rules for user in value.consumers()):
            chain = _chain(node, rules)
            products = sum(seconds.get(str(each.name), 0.0) for each in chain)
            reads = {v: more for each in chain for v, more in _wanted(each, rules[each], 0, slices).items()}
            newly = [v for v, more in reads.items() if not (more or max(wanted.get(v, {0})) or v.is_graph_input())]
            larger = [user.outputs[0] for user in value.consumers() if user.op_type in LARGER]  # in rows then, too
            kept = sum(nbytes(v) or 0 for v in (value, *larger))
            kept -= sum(nbytes(v) or 0 for v in newly if v.producer() not in chain)
            again = products * slices * max(rows) / rules[node].height
            marked |= chain if max(rows) and again < MOVING_SECONDS * kept else set()
        for v, more in _wanted(node, rules[node], max(rows) if node in marked else 0, slices).items():
            wanted.setdefault(v, set()).add(more)
    for node in marked:
        node.metadata_props[OVERLAP] = "1"
    return frozenset(str(node.name) for node in marked)


def _chain(node: ir.Node, rules: Mapping[ir.Node, Slicing]) -> set[ir.Node]:
    """A node, and where that runs within what makes its inputs, as an activation, the nodes that do."""
    own, waiting = {node}, [node]
    while waiting:
        last = waiting.pop()
        for value in last.inputs if operator_name(last) in WITHIN else ():
            made = None if value is None or value.is_graph_output() else value.producer()
            if made is None or made not in rules or made in own or value is None:
                continue
            if own.issuperset(value.consumers()):
                own.add(made)
                waiting += [made, *(user for user in own if user.op_type in WITHIN)]  # these may read it alone now
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
