"""Products of matrices and of tensors."""

import math
from collections.abc import Sequence

import onnx_ir as ir

from memonger.autodiff.registry import Gradient, gradient
from memonger.errors import PlanError
from memonger.model.emitter import Emitter
from memonger.model.values import is_swapped, swapped_axes

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
    terms, result = _equation(node)
    sizes = {
        label: size
        for term, value in zip(terms, node.inputs, strict=True)
        for label, size in zip(term, op.dims(value), strict=True)
    }
    return tuple(
        _einsum_operand(op, node, dy, terms, result, sizes, i) if op.wants(i) else None for i in range(len(terms))
    )


def _einsum_operand(
    op: Emitter, node: ir.Node, dy: ir.Value, terms: list[str], result: str, sizes: dict[str, int], index: int
) -> ir.Value:
    """The gradient of one operand: the same sum, with dy in the operand's place."""
    term = terms[index]
    others = [(t, v) for i, (t, v) in enumerate(zip(terms, node.inputs, strict=True)) if i != index]
    labels = result + "".join(t for t, _ in others)
    kept = "".join(label for label in term if label in labels)
    equation = ",".join([result, *(t for t, _ in others)]) + f"->{kept}"
    dx = op.Einsum(dy, *(v for _, v in others), equation=equation)
    alone = [i for i, label in enumerate(term) if label not in labels]  # summed away in this operand itself
    if alone:
        dx = op.reshape(dx, [1 if i in alone else sizes[label] for i, label in enumerate(term)])
    return op.expand(dx, [sizes[label] for label in term])


def _equation(node: ir.Node) -> tuple[list[str], str]:
    """The labels of each operand and of the result."""
    equation = node.attributes["equation"].as_string().replace(" ", "")
    left, arrow, result = equation.partition("->")
    terms = left.split(",")
    if not arrow:
        result = "".join(sorted(label for label in set(left) - {","} if left.count(label) == 1))
    if "." in equation or any(len(set(term)) < len(term) for term in terms):
        raise PlanError(
            f"node '{node.name}' (Einsum): equation '{equation}' has no gradient rule: an ellipsis, or a label twice "
            "in one operand. Write the ellipsis' axes as labels, and take the diagonal by another operator."
        )
    return terms, result
