"""Operators that read and write at indices: Gather, Scatter and their kin, Compress and TopK.

Several indices may name one element, whose gradient is then a sum. There onnxruntime's ScatterND with
``reduction="add"`` loses some of it: its threads write over each other (measured on 1.31.1: five runs, five wrong
results). So sums go through ScatterElements, which is right and the same in each run, or where there are few rows
through a product with the one-hot of the indices, which is up to 40 times as fast. The CPU form writes ``AddedRows``
as ScatterNDs that no threads share (`memonger.lowering.cpu`).
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from memonger.autodiff.registry import Gradient, expansion, gradient
from memonger.autodiff.rules import masks
from memonger.autodiff.rules.movement import place, zeros
from memonger.ir.emitter import Emitter
from memonger.ir.modules import padding_row
from memonger.ir.values import NARROW, input_at

FEW_ROWS = 256  # a product with the one-hot is faster up to about this many


@gradient("Gather")
def _gather(op: Emitter, node: ir.Node, dy: ir.Value) -> tuple[Gradient, ...]:
    x, indices = op.given(node, 0), op.given(node, 1)
    dims = op.dims(x)
    axis = op.attribute(node, "axis", 0) % len(dims)
    before, after = math.prod(dims[:axis]), math.prod(dims[axis + 1 :])
    rows = op.reshape(dy, (before, op.size(indices), after))
    padding = padding_row(node)
    if padding is not None:
        is_padding = op.reshape(op.Equal(indices, op.constant(padding, indices.dtype)), (1, op.size(indices), 1))
        rows = op.Where(is_padding, op.constant(0.0, rows.dtype), rows)
    return op.reshape(add_rows(op, rows, indices, dims[axis]), dims), None


def add_rows(op: Emitter, rows: ir.Value, indices: ir.Value, size: int) -> ir.Value:
    """``rows`` ``[A, n, B]`` added up to ``[A, size, B]`` where the n indices say; negative ones count from the end."""
    a, n, b = op.dims(rows)
    content = op.content(indices)
    if n and content is not None:
        at = content.reshape(-1) % size
        if np.array_equal(at, np.arange(at[0], at[0] + n)):
            return place(op, rows, 1, int(at[0]), size)
    if n and size <= FEW_ROWS:
        return _one_hot_product(op, rows, indices, size)
    small = op.cast(op.reshape(indices, (1, n, 1)), ir.DataType.INT32 if size < 2**31 else None)
    added = _scatter_add(op, (a, size, b), op.expand(small, (a, n, b)), rows, 1)
    return op.composite("AddedRows", added) if b > 1 else added


def _scatter_add(op: Emitter, dims: Sequence[int], indices: ir.Value, updates: ir.Value, axis: int) -> ir.Value:
    """Zeros of shape ``dims`` with updates added. Half precision is added up in single: there is no kernel for it."""
    if updates.dtype in NARROW:
        updates = op.cast(updates, ir.DataType.FLOAT)
    return op.ScatterElements(zeros(op, dims, updates.dtype), indices, updates, axis=axis, reduction="add")


def _one_hot_product(op: Emitter, rows: ir.Value, indices: ir.Value, size: int) -> ir.Value:
    a, n, b = op.dims(rows)
    dtype = indices.dtype or ir.DataType.INT64
    content = op.content(indices)
    numbers = indices if content is not None and (content >= 0).all() else op.Mod(indices, size)
    if b == 1:
        counts = op.constant(np.arange(size, dtype=dtype.numpy()).reshape(1, size))
        hot = op.cast(op.Equal(op.reshape(numbers, (n, 1)), counts), rows.dtype)
        return op.reshape(op.MatMul(op.reshape(rows, (a, n)), hot), (a, size, 1))
    counts = op.constant(np.arange(size, dtype=dtype.numpy()).reshape(size, 1))
    hot = op.cast(op.Equal(op.reshape(numbers, (1, n)), counts), rows.dtype)
    return op.reshape(op.MatMul(hot, op.reshape(rows, (n, b) if a == 1 else (a, n, b))), (a, size, b))


@gradient("GatherElements")
def _gather_elements(op: Emitter, node: ir.Node, dy: ir.Value) -> tuple[Gradient, ...]:
    x = node.inputs[0]
    return _scatter_add(op, op.dims(x), op.given(node, 1), dy, op.attribute(node, "axis", 0)), None


@gradient("GatherND")
def _gather_nd(op: Emitter, node: ir.Node, dy: ir.Value) -> tuple[Gradient, ...]:
    """The indices of a tuple made one number: then it is a Gather of rows."""
    x, indices = op.given(node, 0), op.given(node, 1)
    dims, batch = op.dims(x), op.attribute(node, "batch_dims", 0)
    *outer, depth = op.dims(indices)
    indexed, row = dims[: batch + depth], math.prod(dims[batch + depth :])
    flat = _flat(op, indices, indexed[batch:])
    if batch:
        groups = math.prod(dims[:batch])
        first = np.arange(groups, dtype=np.int64).reshape(*dims[:batch], *[1] * (len(outer) - batch))
        flat = op.Add(flat, op.constant(first * math.prod(indexed[batch:])))
    rows = op.reshape(dy, (1, math.prod(outer), row))
    return op.reshape(add_rows(op, rows, flat, math.prod(indexed)), dims), None


def _flat(op: Emitter, indices: ir.Value, sizes: Sequence[int]) -> ir.Value:
    """Tuples of indices ``[..., k]`` into axes of those sizes, each tuple as one number."""
    strides = np.array([math.prod(sizes[k + 1 :]) for k in range(len(sizes))], np.int64)
    steps = op.Mul(op.Mod(indices, op.constant(np.array(sizes, np.int64))), op.constant(strides))
    return op.sum(steps, [len(op.dims(indices)) - 1])


@gradient("ScatterElements")
def _scatter_elements(op: Emitter, node: ir.Node, dy: ir.Value) -> tuple[Gradient, ...]:
    axis, indices = op.attribute(node, "axis", 0), op.given(node, 1)

    def scatter(x: ir.Value, updates: ir.Value, reduction: str) -> ir.Value:
        return op.ScatterElements(x, indices, updates, axis=axis, reduction=reduction)

    def gather(x: ir.Value) -> ir.Value:
        return op.GatherElements(x, indices, axis=axis)

    return _scattered(op, node, dy, scatter, gather)


@gradient("ScatterND")
def _scatter_nd(op: Emitter, node: ir.Node, dy: ir.Value) -> tuple[Gradient, ...]:
    indices, dims = op.given(node, 1), op.dims(node.inputs[0])
    depth = op.dims(indices)[-1]
    count, row = math.prod(op.dims(indices)[:-1]), math.prod(dims[depth:])

    def scatter(x: ir.Value, updates: ir.Value, reduction: str) -> ir.Value:
        if reduction == "none":
            return op.ScatterND(x, indices, updates)
        places = op.expand(op.reshape(_flat(op, indices, dims[:depth]), (count, 1)), (count, row))
        rows, given = op.reshape(x, (math.prod(dims[:depth]), row)), op.reshape(updates, (count, row))
        return op.reshape(op.ScatterElements(rows, places, given, axis=0, reduction=reduction), dims)

    return _scattered(op, node, dy, scatter, lambda x: op.GatherND(x, indices))


def _scattered(
    op: Emitter,
    node: ir.Node,
    dy: ir.Value,
    scatter: Callable[[ir.Value, ir.Value, str], ir.Value],
    gather: Callable[[ir.Value], ir.Value],
) -> tuple[Gradient, ...]:
    """The gradients of data and updates, by what scatters to the node's indices and what gathers from them.

    Of a maximum, those that are as large share the gradient evenly. In a product each gets that of the others, zeros
    among them or not: see ReduceProd.
    """
    x, updates, reduction = op.given(node, 0), op.given(node, 2), op.attribute(node, "reduction", "none")
    if reduction == "none":
        return scatter(dy, zeros(op, op.dims(updates), dy.dtype), "none"), None, gather(dy)
    if reduction == "add":
        return dy, None, gather(dy)
    if reduction == "mul":
        of_x, of_updates = (masks.equal(op, v, op.constant(0.0, v.dtype)) for v in (x, updates))
        factors = op.Add(x, of_x), op.Add(updates, of_updates)
        product, count = scatter(*factors, "mul"), scatter(of_x, of_updates, "add")
        rest = op.Mul(dy, product)
        dx = op.Mul(op.Div(rest, factors[0]), masks.equal(op, count, of_x))
        return dx, None, op.Mul(op.Div(gather(rest), factors[1]), masks.equal(op, gather(count), of_updates))
    y = node.outputs[0]
    of_x, of_updates = masks.equal(op, x, y), masks.equal(op, updates, gather(y))
    share = op.Div(dy, scatter(of_x, of_updates, "add"))
    return op.Mul(share, of_x), None, op.Mul(gather(share), of_updates)


@expansion("Compress")
def _compress(op: Emitter, node: ir.Node) -> tuple[ir.Value, ...] | None:
    """A Gather, where the condition is constant."""
    x, condition = op.given(node, 0), op.content(op.given(node, 1))
    if condition is None:
        return None
    axis = op.attribute(node, "axis", None)
    indices = op.ints(*np.flatnonzero(condition).tolist())
    return (op.Gather(op.reshape(x, (op.size(x),)) if axis is None else x, indices, axis=axis or 0),)


@expansion("TensorScatter")
def _tensor_scatter(op: Emitter, node: ir.Node) -> tuple[ir.Value, ...]:
    """Each sample's update written from an index of its own on; past the end, in circular mode, from the start."""
    cache, update = op.given(node, 0), op.given(node, 1)
    dims, rank = op.dims(update), len(op.dims(update))
    axis = op.attribute(node, "axis", -2) % rank
    steps = op.constant(np.arange(dims[axis]).reshape([-1 if a == axis else 1 for a in range(rank)]))
    starts = input_at(node, 2)
    at = steps if starts is None else op.Add(op.reshape(starts, (dims[0], *[1] * (rank - 1))), steps)
    if op.attribute(node, "mode", "linear") == "circular":
        at = op.Mod(at, op.constant(op.dims(cache)[axis], ir.DataType.INT64))
    return (op.ScatterElements(cache, op.expand(at, dims), update, axis=axis),)


@gradient("TopK")
def _top_k(op: Emitter, node: ir.Node, dy: ir.Value, _: ir.Value | None = None) -> Gradient:
    indices = op.add_output(node, 1, "indices")
    axis = op.attribute(node, "axis", -1)
    return op.ScatterElements(zeros(op, op.dims(node.inputs[0]), dy.dtype), indices, dy, axis=axis)
