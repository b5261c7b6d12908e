"""A loss of the model's own that is a quotient whose divisor inputs decide, as a mean over the labels that count."""

import logging
import math
from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from memonger.autodiff.losses.common import FLOAT, Built
from memonger.graph.graph import needed_by
from memonger.ir.emitter import Emitter
from memonger.ir.values import read_values, static_shape

logger = logging.getLogger(__name__)

_VIEWS = frozenset({"Cast", "Identity", "Neg", "Reshape", "Squeeze", "Unsqueeze"})  # at most with another sign


def taken_apart(op: Emitter, loss: ir.Value, active: Collection[ir.Value], name: str) -> Built:
    """Begin the backward pass at the dividend, where the divisor is a sum or mean that no trained parameter changes.

    Args:
        op: Where nodes go.
        loss: One number.
        active: Values that change with what is trained.
        name: What messages call the model.
    """
    value, sign = _behind_views(loss)
    node = value.producer()
    if node is None or not _is_quotient(node, active):
        if any(_is_quotient(each, active) for each in needed_by([loss])):
            logger.warning(
                "%s: the loss '%s' is more than one mean over what inputs say, as labels that count do. Micro-batches "
                "count the same, whatever they say: the step isn't that of one batch with all of them.",
                name, loss.name,
            )  # fmt: skip
        return built(op, loss)
    total, weight = node.inputs
    assert total is not None
    assert weight is not None
    summed, sign_of_weight = _behind_views(weight)  # a divisor of the other sign would turn norms round
    sign *= sign_of_weight
    ones = op.constant(np.full(op.dims(total), sign, (total.dtype or FLOAT).numpy()))
    with op.at("loss"):
        parts = [op.Identity(v) if s > 0 else op.Neg(v) for v, s in ((total, sign), (weight, sign_of_weight))]
        return Built(loss, {total: ones}, parts[0], parts[1], _terms(summed))


def _is_quotient(node: ir.Node, active: Collection[ir.Value]) -> bool:
    """Whether a node divides one number by a sum or mean of what a session feeds."""
    if node.op_type != "Div" or node.domain != "":
        return False
    total, weight = node.inputs
    if total is None or weight is None or any(static_shape(each) not in ((), (1,)) for each in node.inputs if each):
        return False
    if total not in active or not _terms(_behind_views(weight)[0]):
        return False
    behind = {weight, *(value for each in needed_by([weight]) for value in read_values(each))}
    return behind.isdisjoint(active) and any(value.is_graph_input() and value.const_value is None for value in behind)


def _terms(value: ir.Value) -> int:
    """How many numbers a value is the sum of; 1 of a mean, and where nobody can tell; 0 of what is neither."""
    node = value.producer()
    if node is None or node.domain != "" or node.op_type not in ("ReduceMean", "ReduceSum"):
        return 0
    source = node.inputs[0]
    shape = None if source is None or node.op_type == "ReduceMean" else static_shape(source)
    return 1 if shape is None else max(1, math.prod(shape))


def built(op: Emitter, loss: ir.Value) -> Built:
    """A loss that the backward pass begins at."""
    return Built(loss, {loss: op.constant(np.ones(op.dims(loss), (loss.dtype or FLOAT).numpy()))})


def _behind_views(value: ir.Value) -> tuple[ir.Value, int]:
    """What a value is but for shape, type and sign, and that sign."""
    sign = 1
    while (node := value.producer()) is not None and node.op_type in _VIEWS and node.domain == "":
        sign = -sign if node.op_type == "Neg" else sign
        source = node.inputs[0]
        assert source is not None
        value = source
    return value, sign
