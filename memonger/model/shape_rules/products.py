"""Shapes of products of matrices, and of what onnxruntime fuses around them."""

from collections.abc import Sequence
from typing import Any

from memonger.model.shape_rules.pointwise import broadcast
from memonger.model.shaping import Compute, NoRuleError, Shape, Site, shape_rule, shape_rules

_MS = "com.microsoft::"


def product(a: Shape, b: Shape) -> Shape:
    """The shape of numpy's ``matmul``.

    Raises:
        ValueError: the shapes don't go together.
    """
    left, right = a if len(a) > 1 else (1, *a), b if len(b) > 1 else (*b, 1)
    if left[-1] != right[-2]:
        raise ValueError(f"{list(a)} isn't multiplied with {list(b)}")
    rows = (left[-2],) if len(a) > 1 else ()
    columns = (right[-1],) if len(b) > 1 else ()
    return (*broadcast(left[:-2], right[:-2]), *rows, *columns)


@shape_rule(_MS + "FusedMatMul", _MS + "FusedMatMulActivation")
def _fused_matmul(site: Site) -> Compute:
    flags = [(site.integer(f"trans{side}", 0), site.integer(f"transBatch{side}", 0)) for side in "AB"]

    def turned(shape: Shape, flag: tuple[int, int]) -> Shape:
        if len(shape) > 1 and flag[1]:  # the first axis comes right before the last
            shape = (*shape[1:-1], shape[0], shape[-1])
        return (*shape[:-2], shape[-1], shape[-2]) if flag[0] and len(shape) > 1 else shape

    return lambda shapes, _: (product(turned(shapes[0], flags[0]), turned(shapes[1], flags[1])),)


@shape_rule(_MS + "MatMulNBits", _MS + "MatMulBnb4", _MS + "MatMulFpQ4")
def _matmul_of_bits(site: Site) -> Compute:
    columns = site.integer("N", 0)
    if not columns:
        raise NoRuleError("no attribute N")
    return lambda shapes, _: ((*shapes[0][:-1], columns),)


@shape_rule("Gemm", _MS + "FusedGemm")
def _gemm(site: Site) -> Compute:
    return _gemm_of(site, 1)


@shape_rule(_MS + "QGemm")
def _quantized_gemm(site: Site) -> Compute:
    return _gemm_of(site, 3)


def _gemm_of(site: Site, second: int) -> Compute:
    row, inner = (1, 0) if site.integer("transA", 0) else (0, 1)
    column, other = (0, 1) if site.integer("transB", 0) else (1, 0)

    def compute(shapes: Sequence[Any], _: Sequence[Any]) -> Sequence[Shape]:
        a, b = shapes[0], shapes[second]
        if len(a) != 2 or len(b) != 2 or a[inner] != b[other]:
            raise ValueError(f"{list(a)} isn't multiplied with {list(b)}")
        return ((a[row], b[column]),)

    return compute


@shape_rule("Einsum")
def _einsum(site: Site) -> Compute:
    equation = site.text("equation", "").replace(" ", "")
    terms, _, result = equation.partition("->")
    if "." in equation or "->" not in equation:
        raise NoRuleError(f"the equation {equation!r}")

    def compute(shapes: Sequence[Any], _: Sequence[Any]) -> Sequence[Shape]:
        sizes: dict[str, int] = {}
        for letters, shape in zip(terms.split(","), shapes, strict=True):
            for letter, dim in zip(letters, shape, strict=True):
                if sizes.setdefault(letter, dim) in (1, dim):
                    sizes[letter] = dim
        return (tuple(sizes[letter] for letter in result),)

    return compute


@shape_rule(_MS + "Attention", _MS + "QAttention")
def _attention(site: Site) -> Compute:
    """Attention with its own projection: input (batch, length, width), weight (width, three times the heads' width)."""
    widths, heads, is_quantized = site.integers("qkv_hidden_sizes"), site.integer("num_heads", 1), "Q" in site.op_type
    past = 8 if is_quantized else 4
    if site.has(past) or (site.outputs > 1 and widths is not None):
        raise NoRuleError("a past, or keys of another width than values")

    def compute(shapes: Sequence[Any], _: Sequence[Any]) -> Sequence[Shape]:
        batch, length, _width = shapes[0]
        width = widths[2] if widths is not None else shapes[1][1] // 3
        return ((batch, length, width), (2, batch, heads, length, width // heads))[: site.outputs]

    return compute


@shape_rule(_MS + "MultiHeadAttention")
def _multi_head_attention(site: Site) -> Compute:
    if site.outputs > 1 or not site.has(2):
        raise NoRuleError("keys and values that it returns, or packed ones")

    def compute(shapes: Sequence[Any], _: Sequence[Any]) -> Sequence[Shape]:
        query, value = shapes[0], shapes[2]
        return ((*query[:2], value[2] if len(value) == 3 else value[1] * value[3]),)

    return compute


shape_rules({
    "MatMul MatMulInteger com.microsoft::DynamicQuantizeMatMul com.microsoft::MatMulIntegerToFloat "
    "com.microsoft::MatMulInteger16": lambda shapes, _: (product(shapes[0], shapes[1]),),
    "QLinearMatMul": lambda shapes, _: (product(shapes[0], shapes[3]),),
})  # fmt: skip
