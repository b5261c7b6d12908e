"""Shapes of products of matrices, and of what onnxruntime fuses around them."""

from collections.abc import Sequence
from typing import Any

from memonger.shapes.rules.pointwise import broadcast
from memonger.shapes.shaping import Compute, NoRuleError, Shape, Site, shape_rule, shape_rules

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


@shape_rule(_MS + "FusedMatMul", _MS + "FusedMatMulActivation", _MS + "TransposeMatMul")
def _fused_matmul(site: Site) -> Compute:
    flags = [(site.integer(f"trans{side}", 0), site.integer(f"transBatch{side}", 0)) for side in "AB"]

    def turned(shape: Shape, flag: tuple[int, int]) -> Shape:
        if len(shape) > 1 and flag[1]:  # the first axis comes right before the last
            shape = (*shape[1:-1], shape[0], shape[-1])
        return (*shape[:-2], shape[-1], shape[-2]) if flag[0] and len(shape) > 1 else shape

    return lambda shapes, _: (product(turned(shapes[0], flags[0]), turned(shapes[1], flags[1])),)


@shape_rule(
    _MS + "MatMulNBits", _MS + "MatMulBnb4", _MS + "MatMulNBitsMlp", _MS + "MatMulNBitsQLoRA", _MS + "MatMulPacked"
)  # fmt: skip
def _matmul_of_bits(site: Site) -> Compute:
    columns = site.integer("N", 0)
    if not columns:
        raise NoRuleError("no attribute N")
    return lambda shapes, _: ((*shapes[0][:-1], columns), shapes[0])[: site.outputs]


@shape_rule(_MS + "MatMulNBitsQkv")
def _matmul_of_bits_for_attention(site: Site) -> Compute:
    columns = site.integer("Nq", 0), *[site.integer("Nkv", 0)] * 2
    return lambda shapes, _: (*[(*shapes[0][:-1], each) for each in columns], shapes[0])[: site.outputs]


@shape_rule("Gemm", _MS + "FusedGemm", _MS + "GemmFloat8")
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
    """Dots stand for axes that are broadcast; without an arrow the letters that occur once come out, sorted."""
    terms, arrow, result = site.text("equation", "").replace(" ", "").replace("...", ".").partition("->")
    if not arrow:
        once = sorted(letter for letter in set(terms) - set(",.") if terms.count(letter) == 1)
        result = ("." if "." in terms else "") + "".join(once)

    def compute(shapes: Sequence[Any], _: Sequence[Any]) -> Sequence[Shape]:
        sizes, dotted = dict[str, int](), list[Shape]()
        for letters, shape in zip(terms.split(","), shapes, strict=True):
            before, dots, behind = letters.partition(".")
            if dots:
                end = len(shape) - len(behind)
                dotted.append(shape[len(before) : end])
                shape = (*shape[: len(before)], *shape[end:])
            for letter, dim in zip(before + behind, shape, strict=True):
                if sizes.setdefault(letter, dim) in (1, dim):
                    sizes[letter] = dim
        sizes_of_dots = broadcast(*dotted) if dotted else ()
        before, _dots, behind = result.partition(".")
        return ((*[sizes[each] for each in before], *sizes_of_dots, *[sizes[each] for each in behind]),)

    return compute


shape_rules({
    "MatMul MatMulInteger com.microsoft::DynamicQuantizeMatMul com.microsoft::GemmFastGelu "
    "com.microsoft::MatMulIntegerToFloat com.microsoft::MatMulInteger16 "
    "com.microsoft::SparseToDenseMatMul": lambda shapes, _: (product(shapes[0], shapes[1]),),
    "com.microsoft::CDist": lambda shapes, _: ((shapes[0][0], shapes[1][0]),),
    "com.microsoft::MatMulBlockQuantizedFp4Weight com.microsoft::MatMulBlockQuantizedFp8Weight": lambda shapes, _: (
        (*shapes[0][:-1], shapes[1][0]),
    ),
    "com.microsoft::MatMulFpQ4": lambda shapes, contents: (product(shapes[0], tuple(contents[2].tolist())),),
    "QLinearMatMul": lambda shapes, _: (product(shapes[0], shapes[3]),),
})  # fmt: skip
