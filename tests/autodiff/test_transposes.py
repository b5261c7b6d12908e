"""Products of transposed matrices: the transposing goes into the product, forward and backward."""

from collections import Counter

import onnx
import pytest

from tests.support.gradient_checks import check


def _operators(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


@pytest.mark.parametrize(("x", "y"), [("3,4", "3,5"), ("2,3,4", "2,3,5"), ("4", "5"), ("2,1,3,4", "2,1,3,5")])
def test_a_linear_layer_as_pytorch_writes_it_transposes_nothing(x: str, y: str) -> None:
    made = check(
        f"g (FLOAT[{x}] x, FLOAT[5,4] w) => (FLOAT[{y}] y) {{ t = Transpose <perm=[1,0]> (w) y = MatMul(x, t) }}",
        lambda x, w: x @ w.T,
    )
    found = _operators(made)
    assert found["Gemm"] == 3
    assert not found["Transpose"]
    assert not found["MatMul"]


def test_a_product_with_its_left_matrix_transposed() -> None:
    made = check(
        "g (FLOAT[4,3] a, FLOAT[5,4] b) => (FLOAT[3,5] y) { s = Transpose(a) t = Transpose(b) y = MatMul(s, t) }",
        lambda a, b: a.T @ b.T,
    )
    assert not _operators(made)["Transpose"]


@pytest.mark.parametrize("trans", [0, 1])
def test_gemm_of_transposed_matrices(trans: int) -> None:
    a, b = ("3,4", "4,5") if trans else ("4,3", "5,4")
    made = check(
        f"g (FLOAT[{a}] a, FLOAT[{b}] b, FLOAT[5] c) => (FLOAT[3,5] y) {{ s = Transpose(a) t = Transpose(b) "
        f"y = Gemm <alpha=0.5, beta=2.0, transA={trans}, transB={trans}> (s, t, c) }}",
        lambda a, b, c: 0.5 * (a @ b if trans else a.T @ b.T) + 2.0 * c,
    )
    assert not _operators(made)["Transpose"]


def test_a_transposed_matrix_that_others_read_is_read_as_it_stands_too() -> None:
    made = check(
        "g (FLOAT[3,4] x, FLOAT[5,4] w) => (FLOAT[3,5] y, FLOAT[4,5] z) "
        "{ t = Transpose(w) y = MatMul(x, t) z = Mul(t, t) }",
        lambda x, w: (x @ w.T, w.T * w.T),
    )
    assert _operators(made)["Transpose"] == 2


@pytest.mark.parametrize("left", ["4", "3,4"])
def test_a_stack_on_the_right_stays_a_product_of_stacks(left: str) -> None:
    y = "2,5" if left == "4" else "2,3,5"
    check(
        f"g (FLOAT[{left}] a, FLOAT[2,5,4] b) => (FLOAT[{y}] y) "
        "{ t = Transpose <perm=[0,2,1]> (b) y = MatMul(a, t) }",
        lambda a, b: a @ b.mT,
    )


@pytest.mark.parametrize("scale", ["", "s"])
def test_attention_as_pytorch_writes_it_transposes_keys_once(scale: str) -> None:
    shapes = "int64[3] one = {6, 3, 4}, int64[4] back = {2, 3, 4, 3}"
    made = check(
        f"g (FLOAT[2,3,3,4] q, FLOAT[2,3,3,4] k, FLOAT s) => (FLOAT[2,3,3,3] y) <{shapes}> "
        "{ a = Reshape(k, one) b = Transpose <perm=[0,2,1]> (a) c = Reshape(b, back) "
        + ("d = Mul(c, s) y = MatMul(q, d) }" if scale else "y = MatMul(q, c) }"),
        lambda q, k, s: q @ (k * s if scale else k).mT,
        wrt=["q", "k", *scale],
    )
    # Of the key forward, of the product's gradient backward.
    assert _operators(made)["Transpose"] == 2


def test_a_transpose_that_undoes_another_is_neither() -> None:
    made = check(
        "g (FLOAT[2,3,4] a, FLOAT[2,5,4] b) => (FLOAT[2,3,5] y) { t = Transpose <perm=[0,2,1]> (b) y = MatMul(a, t) }",
        lambda a, b: a @ b.mT,
        wrt=["a"],
    )
    assert _operators(made)["Transpose"] == 1
