"""Gradients of reductions."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

import memonger
from tests.support.gradient_checks import check, gradients, parse

Reduction = Callable[[torch.Tensor, tuple[int, ...], bool], torch.Tensor]


def _product(x: torch.Tensor, axes: tuple[int, ...], keepdims: bool) -> torch.Tensor:
    for axis in sorted((a % x.ndim for a in axes), reverse=True):
        x = x.prod(axis, keepdim=keepdims)
    return x


REDUCTIONS: dict[str, Reduction] = {
    "ReduceSum": lambda x, axes, keep: x.sum(axes, keep),
    "ReduceMean": lambda x, axes, keep: x.mean(axes, keep),
    "ReduceMax": lambda x, axes, keep: x.amax(axes, keep),
    "ReduceMin": lambda x, axes, keep: x.amin(axes, keep),
    "ReduceProd": _product,
    "ReduceL1": lambda x, axes, keep: x.abs().sum(axes, keep),
    "ReduceL2": lambda x, axes, keep: x.square().sum(axes, keep).sqrt(),
    "ReduceLogSum": lambda x, axes, keep: x.sum(axes, keep).log(),
    "ReduceLogSumExp": lambda x, axes, keep: x.logsumexp(axes, keep),
    "ReduceSumSquare": lambda x, axes, keep: x.square().sum(axes, keep),
}

AXES = {"one": (1,), "negative": (-1,), "several": (-1, 0), "every": (0, 1, 2)}


def _positive(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return generator.uniform(0.5, 2.0, shape)


def _signed(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return generator.uniform(0.5, 2.0, shape) * generator.choice([-1, 1], shape)


def _draw(op_type: str) -> Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]:
    return _positive if op_type == "ReduceLogSum" else _signed


def _output(dims: tuple[int, ...], axes: tuple[int, ...], keepdims: int) -> str:
    reduced = {a % len(dims) for a in axes}
    kept = [1 if a in reduced else n for a, n in enumerate(dims) if keepdims or a not in reduced]
    return f"FLOAT[{','.join(map(str, kept))}]" if kept else "FLOAT"


@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
@pytest.mark.parametrize("op_type", REDUCTIONS)
def test_axes_are_an_input(op_type: str, axes: tuple[int, ...], keepdims: int) -> None:
    numbers = ", ".join(map(str, axes))
    check(
        f"g (FLOAT[2,3,5] x) => ({_output((2, 3, 5), axes, keepdims)} y) <int64[{len(axes)}] axes = {{{numbers}}}>"
        f"{{ y = {op_type} <keepdims={keepdims}> (x, axes) }}",
        lambda x: REDUCTIONS[op_type](x, axes, bool(keepdims)),
        draw=_draw(op_type),
    )


@pytest.mark.parametrize("op_type", REDUCTIONS)
def test_without_axes_everything_is_reduced(op_type: str) -> None:
    check(
        f"g (FLOAT[3,4] x) => (FLOAT y) {{ y = {op_type} <keepdims=0> (x) }}",
        lambda x: REDUCTIONS[op_type](x, (0, 1), False),
        draw=_draw(op_type),
    )


@pytest.mark.parametrize("op_type", REDUCTIONS)
def test_without_axes_nothing_is_reduced_where_the_node_says_so(op_type: str) -> None:
    """What is done to each element still is: squares, logarithms."""
    check(
        f"g (FLOAT[3,4] x) => (FLOAT[3,4] y) <int64[0] axes = {{}}>"
        f"{{ y = {op_type} <noop_with_empty_axes=1> (x, axes) }}",
        lambda x: REDUCTIONS[op_type](x[..., None], (2,), False),
        draw=_draw(op_type),
    )


@pytest.mark.parametrize("op_type", REDUCTIONS)
def test_axes_are_an_attribute_in_older_operator_sets(op_type: str) -> None:
    check(
        f"g (FLOAT[2,3] x) => (FLOAT[2,1] y) {{ y = {op_type} <axes=[-1]> (x) }}",
        lambda x: REDUCTIONS[op_type](x, (1,), True),
        draw=_draw(op_type),
        opset=11,
    )


@pytest.mark.parametrize("op_type", ["ReduceMax", "ReduceMin"])
def test_equal_elements_share_the_gradient(op_type: str) -> None:
    x = np.array([[1, 1, 0], [2, 2, 2], [3, 4, 5]], np.float32) * (1 if op_type == "ReduceMax" else -1)
    text = f"g (float[3,3] x) => (float[3] y) <int64[1] axes = {{1}}> {{ y = {op_type} <keepdims=0> (x, axes) }}"
    wanted = np.array([[1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3], [0, 0, 1]])
    np.testing.assert_allclose(gradients(text, {"x": x})["x"], wanted, rtol=1e-6)


def test_a_product_with_zeros_has_the_gradient_of_the_others() -> None:
    x = np.array([[2, 3, 4], [0, 3, 4], [0, 0, 4], [0, 0, 0]], np.float32)
    text = "g (float[4,3] x) => (float[4] y) <int64[1] axes = {1}> { y = ReduceProd <keepdims=0> (x, axes) }"
    wanted = [[12, 8, 6], [12, 0, 0], [0, 0, 0], [0, 0, 0]]
    np.testing.assert_array_equal(gradients(text, {"x": x})["x"], wanted)


@pytest.mark.parametrize("op_type", ["ReduceL1", "ReduceL2"])
def test_a_norm_of_nothing_has_no_slope(op_type: str) -> None:
    x = np.array([[0, 0], [0, 3]], np.float32)
    text = f"g (float[2,2] x) => (float[2] y) <int64[1] axes = {{1}}> {{ y = {op_type} <keepdims=0> (x, axes) }}"
    np.testing.assert_array_equal(gradients(text, {"x": x})["x"], [[0, 0], [0, 1]])


def test_logsumexp_of_large_numbers_does_not_overflow() -> None:
    x = np.array([1000.0, 1000.0, -1000.0], np.float32)
    text = "g (float[3] x) => (float y) { y = ReduceLogSumExp <keepdims=0> (x) }"
    np.testing.assert_allclose(gradients(text, {"x": x})["x"], [0.5, 0.5, 0.0], rtol=1e-4)


def test_a_scalar_is_reduced_over_nothing() -> None:
    check("g (FLOAT x) => (FLOAT y) { s = ReduceSum(x) y = Mul(s, x) }", lambda x: x * x)


def test_axes_that_are_an_input_are_refused() -> None:
    text = "g (float[2,3] x, int64[1] axes = {1}) => (float[2,1] y) { named = ReduceSum(x, axes) y = Identity(named) }"
    with pytest.raises(memonger.PlanError, match=r"operator ReduceSum.*axes that aren't constant: 'axes'.*alone"):
        memonger.differentiate(parse(text, "float", 20), wrt=["x"])


@pytest.mark.parametrize("op_type", REDUCTIONS)
def test_half_precision_gives_what_single_precision_does(op_type: str) -> None:
    text = f"g (FLOAT[2,3] x) => (FLOAT[2] y) <int64[1] axes = {{1}}> {{ y = {op_type} <keepdims=0> (x, axes) }}"
    x = {"x": np.array([[0.5, 1.25, 2.0], [0.75, 0.5, 1.5]])}
    half, single = (gradients(text, x, float_type=kind)["x"] for kind in ("float16", "float"))
    assert half.dtype == np.float16
    np.testing.assert_allclose(half.astype(np.float32), single, rtol=4e-3)
