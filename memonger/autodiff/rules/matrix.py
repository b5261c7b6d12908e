"""Products of matrices and of tensors, and reductions over axes."""

import math
import string
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from memonger.autodiff.registry import Gradient, gradient
from memonger.autodiff.rules import masks
from memonger.autodiff.rules.movement import constants
from memonger.errors import PlanError
from memonger.ir.emitter import Emitter
from memonger.ir.values import is_swapped, swapped_axes

SMALLER = 2  # how much less has to be transposed for the other side to pay


@gradient("MatMul")
def _matmul(op: Emitter, node: ir.Node, dy: ir.Value) -> tuple[Gradient, ...]:
    a, b = node.inputs
    if a is None or b is None:
        raise PlanError(f"node '{node.name}' (MatMul) lacks an input.")
    m, k, n = _sizes(op.dims(a), op.dims(b))
    batch_a, batch_b = op.dims(a)[:-2], op.dims(b)[:-2]
    # Vectors are matrices of one row or column.
    left = a if len(op.dims(a)) > 1 else op.reshape(a, (m, k))
    right = b if len(op.dims(b)) > 1 else op.reshape(b, (k, n))
    if not batch_b:  # one matrix on the right: all rows on the left are one matrix
        rows = op.size(a) // k
        dy, left = op.reshape(dy, (rows, n)), op.reshape(left, (rows, k))
        da = op.reshape(op.Gemm(dy, right, transB=1), op.dims(a)) if op.wants(0) else None
        db = op.reshape(op.Gemm(left, dy, transA=1), op.dims(b)) if op.wants(1) else None
        return da, db
    dy = op.reshape(dy, (*op.dims(node.outputs[0])[: max(len(batch_a), len(batch_b))], m, n))
    da = _by_transposed(op, dy, right, swapped=is_swapped(a)) if op.wants(0) else None
    db = _transposed_by(op, left, dy, swapped=is_swapped(b)) if op.wants(1) else None
    return None if da is None else op.reshape(op.sum_to(da, (*batch_a, m, k)), op.dims(a)), db


def _by_transposed(op: Emitter, a: ir.Value, b: ir.Value, *, swapped: bool) -> ir.Value:
    """a·bᵀ, which is transposed again if ``swapped``. What is less is transposed: b, or a and a·bᵀ."""
    product = math.prod(op.dims(a)[:-1]) * op.dims(b)[-2]
    if _other_side_pays(_moved(op, b), op.size(a), product, swapped=swapped):
        return _swapped(op, op.MatMul(b, _swapped(op, a)))
    return op.MatMul(a, _swapped(op, b))


def _transposed_by(op: Emitter, a: ir.Value, b: ir.Value, *, swapped: bool) -> ir.Value:
    """aᵀ·b, likewise."""
    product = math.prod(op.dims(b)[:-2]) * op.dims(a)[-1] * op.dims(b)[-1]
    if _other_side_pays(_moved(op, a), op.size(b), product, swapped=swapped):
        return _swapped(op, op.MatMul(_swapped(op, b), a))
    return op.MatMul(_swapped(op, a), b)


def _other_side_pays(one: int, other: int, product: int, *, swapped: bool) -> bool:
    """Whether to transpose the other operand and the product, elements each, where the product is transposed again."""
    return one + product >= other if swapped else one >= SMALLER * (other + product)


def _moved(op: Emitter, value: ir.Value) -> int:
    """Elements that have to be moved to transpose it: none where it is transposed already."""
    return 0 if is_swapped(value) else op.size(value)


def _sizes(a: Sequence[int], b: Sequence[int]) -> tuple[int, int, int]:
    """Rows, inner size and columns of a product."""
    return (a[-2] if len(a) > 1 else 1), a[-1], (b[-1] if len(b) > 1 else 1)


def _swapped(op: Emitter, x: ir.Value) -> ir.Value:
    """Every matrix of the stack, transposed. Of one row or column it is a view."""
    *batch, m, n = op.dims(x)
    if m == 1 or n == 1:
        return op.reshape(x, (*batch, n, m))
    return op.transpose(x, swapped_axes(len(batch) + 2))


@gradient("Gemm")
def _gemm(op: Emitter, node: ir.Node, dy: ir.Value) -> tuple[Gradient, ...]:
    a, b = node.inputs[:2]
    alpha, beta = op.attribute(node, "alpha", 1.0), op.attribute(node, "beta", 1.0)
    trans_a, trans_b = op.attribute(node, "transA", 0), op.attribute(node, "transB", 0)
    da = db = None
    if op.wants(0) and trans_a:
        da = op.Gemm(b, dy, alpha=alpha, transA=trans_b, transB=1)
    elif op.wants(0):
        da = op.Gemm(dy, b, alpha=alpha, transB=1 - trans_b)
    if op.wants(1) and trans_b:
        db = op.Gemm(dy, a, alpha=alpha, transA=1, transB=trans_a)
    elif op.wants(1):
        db = op.Gemm(a, dy, alpha=alpha, transA=1 - trans_a)
    return da, db, dy if beta == 1.0 or not op.wants(2) else op.Mul(dy, beta)


@gradient("Einsum")
def _einsum(op: Emitter, node: ir.Node, dy: ir.Value) -> tuple[Gradient, ...]:
    terms, result = _equation(op, node)
    sizes: dict[str, int] = {}
    for term, value in zip(terms, node.inputs, strict=True):
        for label, size in zip(term, op.dims(value), strict=True):
            sizes[label] = max(size, sizes.get(label, 1))
    return tuple(
        _einsum_operand(op, node, dy, terms, result, sizes, i) if op.wants(i) else None for i in range(len(terms))
    )


def _einsum_operand(
    op: Emitter, node: ir.Node, dy: ir.Value, terms: list[str], result: str, sizes: dict[str, int], index: int
) -> ir.Value:
    """The gradient of one operand: the same sum, with dy in its place. The driver sums over axes of size 1."""
    term = terms[index]
    others = [(t, v) for i, (t, v) in enumerate(zip(terms, node.inputs, strict=True)) if i != index]
    labels = result + "".join(t for t, _ in others)
    kept = "".join(label for label in dict.fromkeys(term) if label in labels)
    equation = ",".join([result, *(t for t, _ in others)]) + f"->{kept}"
    dx = op.Einsum(dy, *(v for _, v in others), equation=equation)
    sizes_here = dict(zip(kept, op.dims(dx), strict=True))  # what is summed away in this operand itself has 1
    for i, label in enumerate(term):
        if label in term[:i]:  # a diagonal: nothing flows beside it
            dims = [sizes[label] if a in (i, term.index(label)) else 1 for a in range(len(term))]
            mask = op.constant(np.eye(sizes[label]).reshape(dims).tolist(), dy.dtype)
            shape = [sizes_here.get(each, 1) if a == term.index(each) else 1 for a, each in enumerate(term)]
            dx = op.Mul(dx if len(op.dims(dx)) == len(term) else op.reshape(dx, shape), mask)
    if len(op.dims(dx)) != len(term):
        dx = op.reshape(dx, [sizes_here.get(label, 1) for label in term])
    return op.expand(dx, [max(n, sizes[label]) for n, label in zip(op.dims(dx), term, strict=True)])


def _equation(op: Emitter, node: ir.Node) -> tuple[list[str], str]:
    """The labels of each operand and of the result; an ellipsis' axes get labels of their own."""
    equation = node.attributes["equation"].as_string().replace(" ", "")
    left, arrow, result = equation.partition("->")
    terms = left.split(",")
    spare = [label for label in string.ascii_letters if label not in equation]
    ranks = [len(op.dims(v)) - len(t) + 3 if "..." in t else 0 for t, v in zip(terms, node.inputs, strict=True)]
    dots = "".join(spare[: max(ranks)])
    if not arrow:
        alone = sorted(label for label in set(left) - {",", "."} if left.count(label) == 1)
        result = "..." * bool(dots) + "".join(alone)
    terms = [t.replace("...", dots[len(dots) - rank :]) for t, rank in zip(terms, ranks, strict=True)]
    return terms, result.replace("...", dots)


@gradient("Det")
def _det(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    """The cofactors, as determinants of minors: they are there where there is no inverse, too."""
    x = op.given(node, 0)
    *batch, n, _ = op.dims(x)
    column = op.reshape(dy, (*batch, 1, 1))
    if n == 1:
        return column
    others = np.array([[j for j in range(n) if j != i] for i in range(n)])  # [n, n - 1]
    minors = (others[:, None, :, None] * n + others[None, :, None, :]).reshape(-1)
    flat = op.Gather(op.reshape(x, (*batch, n * n)), op.ints(*minors.tolist()), axis=len(batch))
    cofactors = op.reshape(op.Det(op.reshape(flat, (*batch, n * n, n - 1, n - 1))), (*batch, n, n))
    signs = op.constant(((-1.0) ** np.add.outer(np.arange(n), np.arange(n))).tolist(), x.dtype)
    return op.Mul(op.Mul(cofactors, signs), column)


def _axes(op: Emitter, node: ir.Node) -> tuple[int, ...]:
    """The axes that are reduced, in order. None are where ``noop_with_empty_axes`` stands: what is done to each element
    still is."""
    rank = len(op.dims(node.inputs[0]))
    axes = constants(op, node, 1, "axes")
    if not axes:
        return () if op.attribute(node, "noop_with_empty_axes", 0) else tuple(range(rank))
    return tuple(sorted(axis % rank for axis in axes))


def _with_reduced_axes(op: Emitter, node: ir.Node, *values: ir.Value) -> tuple[ir.Value, ...]:
    """Values of the output's shape, with the reduced axes as axes of size 1."""
    axes = _axes(op, node)
    dims = [1 if axis in axes else size for axis, size in enumerate(op.dims(node.inputs[0]))]
    return tuple(op.reshape(value, dims) for value in values)


def _spread(op: Emitter, node: ir.Node, dy: ir.Value) -> ir.Value:
    return op.expand(_with_reduced_axes(op, node, dy)[0], op.dims(node.inputs[0]))


@gradient("ReduceSum")
def _sum(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    return _spread(op, node, dy)


@gradient("ReduceMean")
def _mean(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    count = op.size(node.inputs[0]) / max(op.size(dy), 1)
    return _spread(op, node, dy if count == 1 else op.Mul(dy, 1.0 / count))


@gradient("ReduceMax", "ReduceMin")
def _extremum(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    """Equal elements share the gradient evenly, as with torch.amax."""
    dy, y = _with_reduced_axes(op, node, dy, node.outputs[0])
    mask = masks.equal(op, op.given(node, 0), y)
    return op.Mul(mask, op.Div(dy, op.sum(mask, _axes(op, node), keepdims=True)))


@gradient("ReduceProd")
def _prod(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    """The product of the others, zeros among them or not: of one zero among the factors the gradient is the product of
    the rest, and there is none elsewhere; of two, there is none at all."""
    axes = _axes(op, node)
    x = op.given(node, 0)
    zero = masks.equal(op, x, op.constant(0.0, x.dtype))
    factors = op.Add(x, zero)
    rest = op.Mul(
        _with_reduced_axes(op, node, dy)[0], op.ReduceProd(factors, op.ints(*axes), keepdims=1) if axes else factors
    )
    return op.Mul(op.Div(rest, factors), masks.equal(op, op.sum(zero, axes, keepdims=True), zero))


@gradient("ReduceL1")
def _l1(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    return op.Mul(masks.sign(op, op.given(node, 0)), _with_reduced_axes(op, node, dy)[0])


@gradient("ReduceL2")
def _l2(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    """x / y, and 0 where y is."""
    dy, y = _with_reduced_axes(op, node, dy, node.outputs[0])
    safe = op.Add(y, masks.equal(op, y, op.constant(0.0, y.dtype)))
    return op.Mul(node.inputs[0], op.Div(dy, safe))


@gradient("ReduceLogSum")
def _log_sum(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    return _spread(op, node, op.Mul(dy, op.Exp(op.Neg(node.outputs[0]))))


@gradient("ReduceLogSumExp")
def _log_sum_exp(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    dy, y = _with_reduced_axes(op, node, dy, node.outputs[0])
    return op.Mul(op.Exp(op.Sub(node.inputs[0], y)), dy)


@gradient("ReduceSumSquare")
def _sum_square(op: Emitter, node: ir.Node, dy: ir.Value) -> Gradient:
    return op.Mul(node.inputs[0], _with_reduced_axes(op, node, op.Mul(dy, 2.0))[0])
