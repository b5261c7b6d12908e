"""Gradients of values that several nodes read."""

from collections import Counter

import numpy as np
import onnx
import pytest

from tests.support.gradient_checks import check, gradients


def backward_operators(model: onnx.ModelProto, forward: int) -> Counter[str]:
    return Counter(node.op_type for node in list(model.graph.node)[forward:])


def test_products_of_few_rows_are_one_product_of_all() -> None:
    made = check(
        """g (FLOAT[2,5] h, FLOAT[6,5] w, FLOAT[4,5] k) => (FLOAT[2,6] y) {
            a = Gemm <transB=1> (h, w) b = Gemm <transB=1> (k, w) c = ReduceSum <keepdims=0> (b) y = Mul(a, c) }""",
        lambda h, w, k: h @ w.T * (k @ w.T).sum(),
        wrt=["w"],
    )
    count = backward_operators(made, 4)
    assert (count["Gemm"], count["Add"]) == (1, 0)


def test_a_recurrence_adds_no_products() -> None:
    made = check(
        """g (FLOAT[2,5] h, FLOAT[5,5] w) => (FLOAT[2,5] y) {
            a = Gemm <transB=1> (h, w) b = Tanh(a) c = Gemm <transB=1> (b, w) d = Tanh(c)
            y = Gemm <transB=1> (d, w) }""",
        lambda h, w: (((h @ w.T).tanh() @ w.T).tanh()) @ w.T,
    )
    count = backward_operators(made, 5)
    assert (count["Gemm"], count["Concat"], count["Add"]) == (4, 2, 0)


def test_slices_side_by_side_are_joined() -> None:
    made = check(
        """g (FLOAT[2,9] x) => (FLOAT[2,3] y) {
            one = Constant <value_ints=[1]> ()
            a0 = Constant <value_ints=[2]> () a1 = Constant <value_ints=[5]> () a2 = Constant <value_ints=[8]> ()
            a = Slice(x, a0, a1, one) b = Slice(x, a1, a2, one) c = Mul(a, b) y = Mul(c, a) }""",
        lambda x: x[:, 2:5] ** 2 * x[:, 5:8],
    )
    count = backward_operators(made, 0)
    assert (count["Concat"], count["Pad"]) == (1, 1)


def test_slices_that_overlap_are_added() -> None:
    made = check(
        """g (FLOAT[2,9] x) => (FLOAT[2,4] y) {
            one = Constant <value_ints=[1]> ()
            a0 = Constant <value_ints=[2]> () a1 = Constant <value_ints=[6]> ()
            b0 = Constant <value_ints=[5]> () b1 = Constant <value_ints=[9]> ()
            a = Slice(x, a0, a1, one) b = Slice(x, b0, b1, one) y = Mul(a, b) }""",
        lambda x: x[:, 2:6] * x[:, 5:9],
    )
    assert backward_operators(made, 0)["Pad"] == 2


@pytest.mark.parametrize(
    ("x", "b"),
    [((4096, 8), (8,)), ((16, 263, 8), (8,)), ((8, 4, 64, 64), (4, 1, 1)), ((4, 8192), (4, 1)), ((8192,), (1,))],
)
def test_long_sums_are_nearly_exact(x: tuple[int, ...], b: tuple[int, ...]) -> None:
    """One number after another would be off by 20 times 2^-24 and more."""
    shape, size = (",".join(map(str, dims)) for dims in (x, b))
    numbers = np.random.default_rng(0).uniform(0.5, 1.5, x).astype(np.float32)
    text = f"g (FLOAT[{shape}] x, FLOAT[{size}] b) => (FLOAT[{shape}] y) {{ y = Mul(x, b) }}"
    (gradient,) = gradients(text, {"x": numbers, "b": np.ones(b, np.float32)}, wrt=["b"]).values()
    lead = len(x) - len(b)
    axes = tuple(axis for axis in range(len(x)) if axis < lead or b[axis - lead] == 1)
    true = numbers.astype(np.float64).sum(axes).reshape(b)
    assert np.abs(gradient / true - 1).max() < 12 * 2.0**-24


def test_sums_have_the_same_nodes_at_every_batch() -> None:
    def operators(batch: int) -> Counter[str]:
        text = f"g (FLOAT[{batch},100,8] x, FLOAT[8] b) => (FLOAT[{batch},100,8] y) {{ y = Mul(x, b) }}"
        return backward_operators(check(text, lambda x, b: x * b, wrt=["b"]), 1)

    assert operators(3) == operators(7) == operators(128)
