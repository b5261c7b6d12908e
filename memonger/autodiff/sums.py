"""Gradients of values that several nodes read: the sum of what each reader gives, in as few passes as possible."""

from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import pairwise

import onnx_ir as ir

from memonger.ir.emitter import Emitter


class Sums:
    """The gradients found so far, by value.

    Most are added up as they come. Two kinds wait until the gradient is asked for:

    - Products aᵀ·b of few rows, such as every step of a recurrent layer adds to the gradient of its weight, are summed
      by one product of all their rows, which writes the sum once.
    - Parts among zeros, the gradients of slices, are joined where they lie side by side.
    """

    def __init__(self, op: Emitter, seeds: Mapping[ir.Value, ir.Value]) -> None:
        self._op = op
        self._sums = dict(seeds)
        self._products: dict[ir.Value, list[ir.Node]] = {}
        self._parts: dict[ir.Value, list[ir.Node]] = {}

    def __contains__(self, value: ir.Value) -> bool:
        return value in self._sums or value in self._products or value in self._parts

    def add(self, value: ir.Value, gradient: ir.Value) -> None:
        """Add what a reader gives, which may have the shape that broadcasting gave."""
        op = self._op
        gradient = op.cast(op.sum_to(gradient, op.dims(value)), value.dtype)
        node = gradient.producer()
        if node is not None and _has_few_rows(op, node):
            self._products.setdefault(value, []).append(node)
        elif node is not None and _part(op, node) is not None:
            self._parts.setdefault(value, []).append(node)
        else:
            self._sums[value] = op.Add(self._sums[value], gradient) if value in self._sums else gradient

    def take(self, value: ir.Value, *, keep: bool = False) -> ir.Value:
        """The whole gradient; it is forgotten here unless kept."""
        terms = [self._sums[value]] if value in self._sums else []
        if value in self._products:  # last come first: the readers were visited backwards
            terms.append(self._product(self._products.pop(value)[::-1]))
        if value in self._parts:
            terms.append(self._joined(self._parts.pop(value)))
        self._sums[value] = reduce(self._op.Add, terms)
        return self._sums[value] if keep else self._sums.pop(value)

    def _product(self, nodes: Sequence[ir.Node]) -> ir.Value:
        if len(nodes) == 1:
            return nodes[0].outputs[0]
        a, b = (self._op.concat([node.inputs[k] for node in nodes], 0) for k in (0, 1))
        return self._op.Gemm(a, b, transA=1)

    def _joined(self, nodes: Sequence[ir.Node]) -> ir.Value:
        op, parts = self._op, [part for node in nodes if (part := _part(self._op, node)) is not None]
        parts.sort(key=lambda part: part[1])
        axis, first, *_ = parts[0]
        follow = all(a[0] == b[0] and a[2] == b[1] for a, b in pairwise(parts))
        if len(nodes) == 1 or not follow:
            return reduce(op.Add, (node.outputs[0] for node in nodes))
        whole, dims = op.concat([x for *_, x in parts], axis), op.dims(nodes[0].outputs[0])
        if op.dims(whole) == dims:
            return whole
        before, after = [0] * len(dims), [0] * len(dims)
        before[axis], after[axis] = first, dims[axis] - parts[-1][2]
        return op.Pad(whole, op.ints(*before, *after))


def _has_few_rows(op: Emitter, node: ir.Node) -> bool:
    """Whether a node is a product aᵀ·b of matrices with fewer rows than columns: most of its time goes into writing."""
    if node.op_type != "Gemm" or len(node.inputs) > 2 or op.attribute(node, "alpha", 1.0) != 1.0:
        return False
    if not op.attribute(node, "transA", 0) or op.attribute(node, "transB", 0):
        return False
    (rows, m), (_, n) = (op.dims(v) for v in node.inputs)
    return rows < min(m, n)


def _part(op: Emitter, node: ir.Node) -> tuple[int, int, int, ir.Value] | None:
    """Of zeros around a value along one axis: the axis, where the value starts and stops, and the value."""
    if node.op_type != "Pad" or len(node.inputs) != 2 or op.attribute(node, "mode", "constant") != "constant":
        return None
    pads, x = op.content(node.inputs[1]), op.given(node, 0)
    dims = op.dims(x)
    if pads is None or pads.min() < 0:
        return None
    axes = [a for a in range(len(dims)) if pads[a] or pads[a + len(dims)]]
    if len(axes) != 1:
        return None
    start = int(pads[axes[0]])
    return axes[0], start, start + dims[axes[0]], x
