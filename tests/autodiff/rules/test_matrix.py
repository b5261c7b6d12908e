"""Gradients of products of matrices and tensors."""

import math

import pytest
import torch

from tests.support.gradient_checks import check
from tests.support.gradient_half import check_half


@pytest.mark.parametrize(
    ("a", "b", "y"),
    [
        ("3,4", "4,5", "3,5"),
        ("4", "4", ""),
        ("4", "4,5", "5"),
        ("3,4", "4", "3"),
        ("2,3,4", "4", "2,3"),
        ("4", "2,4,5", "2,5"),
        ("2,3,4", "4,5", "2,3,5"),
        ("2,3,4", "2,4,5", "2,3,5"),
        ("3,4", "2,4,5", "2,3,5"),
        ("2,1,3,4", "6,4,5", "2,6,3,5"),
        ("1,3,4", "6,4,5", "6,3,5"),
        ("6,3,4", "1,4,5", "6,3,5"),
        ("6,1,4", "6,4,1", "6,1,1"),
    ],
)
def test_matmul_of_vectors_matrices_and_stacks(a: str, b: str, y: str) -> None:
    check(f"g (FLOAT[{a}] a, FLOAT[{b}] b) => (FLOAT[{y}] y) {{ y = MatMul(a, b) }}", torch.matmul)


@pytest.mark.parametrize("wanted", ["a", "b"])
@pytest.mark.parametrize("b", ["4,5", "2,4,5"])
def test_matmul_writes_one_product_where_one_gradient_is_wanted(b: str, wanted: str) -> None:
    made = check(
        f"g (FLOAT[2,3,4] a, FLOAT[{b}] b) => (FLOAT[2,3,5] y) {{ y = MatMul(a, b) }}", torch.matmul, wrt=[wanted]
    )
    assert sum(node.op_type in ("MatMul", "Gemm") for node in made.graph.node) == 2


def test_a_stack_times_one_matrix_is_one_product_without_a_copy() -> None:
    made = check("g (FLOAT[2,3,4] a, FLOAT[4,5] b) => (FLOAT[2,3,5] y) { y = MatMul(a, b) }", torch.matmul)
    assert not {node.op_type for node in made.graph.node} & {"Transpose", "ReduceSum"}


@pytest.mark.parametrize(
    ("m", "k", "n", "moved"), [(2, 9, 8, 52), (8, 9, 2, 52), (9, 1, 8, 0), (9, 2, 9, 36), (2, 6, 8, 60)]
)
@pytest.mark.parametrize("batch", ["2", "3,2"])
def test_what_is_transposed_is_small(batch: str, m: int, k: int, n: int, moved: int) -> None:
    made = check(
        f"g (FLOAT[{batch},{m},{k}] a, FLOAT[{batch},{k},{n}] b) => (FLOAT[{batch},{m},{n}] y) {{ y = MatMul(a, b) }}",
        torch.matmul,
    )
    sizes = {
        v.name: [d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in [*made.graph.value_info, *made.graph.input, *made.graph.output]
    }
    found = sum(math.prod(sizes[node.output[0]]) for node in made.graph.node if node.op_type == "Transpose")
    assert found == moved * (2 if batch == "2" else 6)


@pytest.mark.parametrize("trans_a", [0, 1])
@pytest.mark.parametrize("trans_b", [0, 1])
@pytest.mark.parametrize("c", ["5", "3,1", "3,5", "1"])
def test_gemm(trans_a: int, trans_b: int, c: str) -> None:
    a, b = ("4,3" if trans_a else "3,4"), ("5,4" if trans_b else "4,5")

    def function(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return 0.5 * (a.T if trans_a else a) @ (b.T if trans_b else b) + 2.0 * c

    check(
        f"g (FLOAT[{a}] a, FLOAT[{b}] b, FLOAT[{c}] c) => (FLOAT[3,5] y) "
        f"{{ y = Gemm <alpha=0.5, beta=2.0, transA={trans_a}, transB={trans_b}> (a, b, c) }}",
        function,
    )


def test_gemm_without_a_third_input() -> None:
    check("g (FLOAT[3,4] a, FLOAT[4,5] b) => (FLOAT[3,5] y) { y = Gemm <beta=3.0> (a, b) }", torch.matmul)


@pytest.mark.parametrize(
    ("equation", "shapes", "y"),
    [
        ("ij,jk->ik", ("2,3", "3,4"), "2,4"),
        ("bij,bjk->bik", ("2,3,4", "2,4,5"), "2,3,5"),
        ("bhid,bhjd->bhij", ("2,2,3,4", "2,2,5,4"), "2,2,3,5"),
        ("ij->ji", ("2,3",), "3,2"),
        ("ij->i", ("2,3",), "2"),
        ("ijk->", ("2,3,4",), ""),
        ("i,j->ij", ("2", "3"), "2,3"),
        ("ij,k->i", ("2,3", "4"), "2"),
        ("ij,jk,kl->il", ("2,3", "3,4", "4,5"), "2,5"),
        ("bi,ij,bj->b", ("2,3", "3,4", "2,4"), "2"),
        ("ij, jk", ("2,3", "3,4"), "2,4"),
        ("ba,ac", ("2,3", "3,4"), "2,4"),
    ],
)
def test_einsum(equation: str, shapes: tuple[str, ...], y: str) -> None:
    names = "abc"[: len(shapes)]
    inputs = ", ".join(f"FLOAT[{shape}] {name}" for shape, name in zip(shapes, names, strict=True))
    check(
        f'g ({inputs}) => (FLOAT[{y}] y) {{ y = Einsum <equation="{equation}"> ({", ".join(names)}) }}',
        lambda *operands: torch.einsum(equation, *operands),
    )


@pytest.mark.parametrize(
    ("equation", "a", "y"),
    [("ii->i", "3,3", "3"), ("...i->...", "2,3", "2"), ("...ii->...i", "2,3,3", "2,3"), ("ii", "3,3", ""),
     ("iji->j", "3,2,3", "2"), ("...", "2,3", "2,3")],
)  # fmt: skip
def test_einsum_with_diagonals_and_ellipses(equation: str, a: str, y: str) -> None:
    of_y = f"FLOAT[{y}]" if y else "FLOAT"
    check(
        f'g (FLOAT[{a}] a) => ({of_y} y) {{ y = Einsum <equation="{equation}"> (a) }}',
        lambda a: torch.einsum(equation if "->" in equation or equation != "..." else "...->...", a),
        reference=True,
    )


def test_einsum_with_an_ellipsis_that_broadcasts() -> None:
    check(
        "g (FLOAT[2,1,3,4] a, FLOAT[1,5,4,2] b) => (FLOAT[2,5,3,2] y)"
        '{ y = Einsum <equation="...ij,...jk->...ik"> (a, b) }',
        lambda a, b: a @ b,
        reference=True,
    )


def test_matmul_in_float16() -> None:
    check_half("g (FLOAT[2,3,4] a, FLOAT[4,5] b) => (FLOAT[2,3,5] y) { y = MatMul(a, b) }", wrt=["a", "b"])


@pytest.mark.parametrize("opset", [23, 24])
@pytest.mark.parametrize("causal", [0, 1])
def test_attention_by_its_function_body(opset: int, causal: int) -> None:
    check(
        "g (FLOAT[1, 2, 4, 8] q, FLOAT[1, 2, 4, 8] k, FLOAT[1, 2, 4, 8] v) => (FLOAT[1, 2, 4, 8] y) {"
        f" y = Attention <is_causal = {causal}> (q, k, v) }}",
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=bool(causal)),
        opset=opset,
        differences=False,
    )
