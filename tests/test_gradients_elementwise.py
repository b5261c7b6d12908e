"""Gradients of functions of each element."""

from tests.gradient_checks import check


def test_mul_sums_over_what_broadcasting_repeated() -> None:
    check("g (FLOAT[2,3,4] a, FLOAT[3,1] b) => (FLOAT[2,3,4] y) { y = Mul(a, b) }", lambda a, b: a * b)


def test_a_value_read_twice_gets_the_sum() -> None:
    check("g (FLOAT[2,3] a) => (FLOAT[2,3] y) { y = Mul(a, a) }", lambda a: a * a)
