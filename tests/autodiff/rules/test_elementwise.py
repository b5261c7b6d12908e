"""Gradients of functions of each element."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.support.gradient_checks import check, gradients


def _positive(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return generator.uniform(0.5, 2.0, shape)


def _within_one(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return generator.uniform(-0.9, 0.9, shape)


def _above_one(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return generator.uniform(1.2, 3.0, shape)


BINARY = {"Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Div": torch.div, "Pow": torch.pow}

SHAPES = {
    "equal": ("2,3", "2,3"),
    "one inside": ("2,3,4", "3,1"),
    "both ways": ("2,1,4", "3,1"),
    "scalar": ("2,3", ""),
    "scalar first": ("", "2,3"),
    "leading one": ("1,3", "2,2,3"),
}


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("op_type", BINARY)
def test_binary_operators_sum_over_what_broadcasting_repeated(op_type: str, shapes: tuple[str, str]) -> None:
    a, b = (f"FLOAT[{dims}]" if dims else "FLOAT" for dims in shapes)
    out = "2,3" if shapes[0] == shapes[1] or "" in shapes else ("2,2,3" if shapes[0] == "1,3" else "2,3,4")
    check(f"g ({a} a, {b} b) => (FLOAT[{out}] y) {{ y = {op_type}(a, b) }}", BINARY[op_type], draw=_positive)


@pytest.mark.parametrize("op_type", ["Add", "Sub", "Mul", "Div"])
def test_a_value_read_twice_gets_the_sum(op_type: str) -> None:
    check(f"g (FLOAT[2,3] a) => (FLOAT[2,3] y) {{ y = {op_type}(a, a) }}", lambda a: BINARY[op_type](a, a))


UNARY: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], object, bool]] = {
    "Neg": (torch.neg, None, False),
    "Abs": (torch.abs, None, False),
    "Sqrt": (torch.sqrt, _positive, False),
    "Reciprocal": (torch.reciprocal, _positive, False),
    "Exp": (torch.exp, None, False),
    "Log": (torch.log, _positive, False),
    "Erf": (torch.erf, None, True),
    "Sin": (torch.sin, None, False),
    "Cos": (torch.cos, None, False),
    "Tan": (torch.tan, _within_one, True),
    "Asin": (torch.asin, _within_one, True),
    "Acos": (torch.acos, _within_one, True),
    "Atan": (torch.atan, None, True),
    "Sinh": (torch.sinh, None, True),
    "Cosh": (torch.cosh, None, True),
    "Asinh": (torch.asinh, None, True),
    "Acosh": (torch.acosh, _above_one, True),
    "Atanh": (torch.atanh, _within_one, True),
    "Identity": (lambda x: x.clone(), None, False),
}


@pytest.mark.parametrize("op_type", UNARY)
def test_functions_of_one_input(op_type: str) -> None:
    function, draw, reference = UNARY[op_type]
    check(
        f"g (FLOAT[3,5] x) => (FLOAT[3,5] y) {{ y = {op_type}(x) }}",
        function,
        draw=draw,  # type: ignore[arg-type]
        reference=reference,
    )


def test_abs_has_no_slope_at_zero_and_the_right_one_beside_it() -> None:
    x = np.array([-3e38, -1e-30, -0.0, 0.0, 1e-30, np.inf])
    found = gradients("g (float[6] x) => (float[6] y) { y = Abs(x) }", {"x": x})["x"]
    np.testing.assert_array_equal(found, [-1, -1, 0, 0, 1, 1])


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0, 3.0, 4.0, 0.5, -1.0, -0.5, -2.0, 1.7])
def test_pow_of_a_constant(exponent: float) -> None:
    check(
        f"g (FLOAT[3,4] x) => (FLOAT[3,4] y) <FLOAT e = {{{exponent}}}> {{ y = Pow(x, e) }}",
        lambda x: torch.pow(x, exponent),
        draw=_positive,
    )


@pytest.mark.parametrize("exponent", [1, 2, 3, 4])
def test_pow_of_a_whole_number_takes_negative_bases(exponent: int) -> None:
    check(
        f"g (FLOAT[3,4] x) => (FLOAT[3,4] y) <int64 e = {{{exponent}}}> {{ y = Pow(x, e) }}",
        lambda x: torch.pow(x, exponent),
    )


def test_pow_of_several_whole_numbers() -> None:
    e = np.array([0, 1, 2, 5])
    check("g (FLOAT[3,4] x, int64[4] e) => (FLOAT[3,4] y) { y = Pow(x, e) }", torch.pow, given={"e": e})


def test_pow_of_a_constant_base() -> None:
    check(
        "g (FLOAT[3] e) => (FLOAT[3] y) <FLOAT two = {2.0}> { y = Pow(two, e) }",
        lambda e: torch.pow(torch.tensor(2.0), e),
    )


def test_pow_at_zero_is_as_in_pytorch() -> None:
    base = np.array([0.0, 0.0, 0.0, 2.0, -2.0], np.float32)
    exponent = np.array([0.0, 1.0, 3.0, 0.0, 2.0], np.float32)
    found = gradients(
        "g (float[5] x, float[5] e) => (float[5] y) { y = Pow(x, e) }", {"x": base, "e": exponent}
    )  # fmt: skip
    x, e = (torch.from_numpy(v).requires_grad_() for v in (base, exponent))
    wanted = torch.autograd.grad(torch.pow(x, e).sum(), [x, e])
    np.testing.assert_allclose(found["x"], wanted[0].numpy(), rtol=1e-6)
    np.testing.assert_allclose(found["e"], wanted[1].numpy(), rtol=1e-6)


@pytest.mark.parametrize("inputs", ["a, b", "a, b, c", "a"])
@pytest.mark.parametrize("op_type", ["Sum", "Mean", "Max", "Min"])
def test_operators_of_any_number_of_inputs(op_type: str, inputs: str) -> None:
    def function(*values: torch.Tensor) -> torch.Tensor:
        used = [v.expand(2, 3) for v in values[: inputs.count(",") + 1]]
        stacked = torch.stack(used)
        return {"Sum": stacked.sum, "Mean": stacked.mean, "Max": stacked.amax, "Min": stacked.amin}[op_type](dim=0)

    check(
        f"g (FLOAT[2,3] a, FLOAT[3] b, FLOAT[2,1] c) => (FLOAT[2,3] y) {{ y = {op_type}({inputs}) }}",
        function,
        wrt=inputs.split(", "),
        reference=op_type == "Mean",
    )


@pytest.mark.parametrize("op_type", ["Max", "Min"])
def test_two_equal_inputs_share_the_gradient(op_type: str) -> None:
    a, b = np.array([1.0, 2.0, 3.0, -np.inf]), np.array([2.0, 2.0, 2.0, -np.inf])
    found = gradients(f"g (float[4] a, float[4] b) => (float[4] y) {{ y = {op_type}(a, b) }}", {"a": a, "b": b})
    greater = [0.0, 0.5, 1.0, 0.5]
    lesser = [1.0, 0.5, 0.0, 0.5]
    np.testing.assert_array_equal(found["a"], greater if op_type == "Max" else lesser)
    np.testing.assert_array_equal(found["b"], lesser if op_type == "Max" else greater)


@pytest.mark.parametrize(("op_type", "wanted"), [("Max", [0, 0.5, 1, 0]), ("Min", [1, 0.5, 0, 1])])
def test_a_constant_that_is_equal_takes_half(op_type: str, wanted: list[float]) -> None:
    found = gradients(
        f"g (float[4] a) => (float[4] y) <float b = {{2.0}}> {{ y = {op_type}(a, b) }}",
        {"a": np.array([1.0, 2.0, 3.0, -np.inf])},
    )
    np.testing.assert_array_equal(found["a"], wanted)


@pytest.mark.parametrize("op_type", ["Max", "Min"])
def test_several_equal_inputs_share_evenly(op_type: str) -> None:
    equal = {name: np.array([1.0]) for name in "abc"}
    found = gradients(
        f"g (float[1] a, float[1] b, float[1] c) => (float[1] y) {{ y = {op_type}(a, b, c) }}", equal
    )  # fmt: skip
    for name in "abc":
        np.testing.assert_allclose(found[name], [1 / 3], rtol=1e-6)


@pytest.mark.parametrize("wrt", [["a"], ["b"], ["a", "b"]])
def test_mod_with_the_signs_of_c(wrt: list[str]) -> None:
    a = np.array([[5.3, -5.3, 7.9], [0.4, -0.4, 12.1]])
    b = np.array([2.0, 3.0, -1.5])
    text = "g (FLOAT[2,3] a, FLOAT[3] b) => (FLOAT[2,3] y) { y = Mod <fmod=1> (a, b) }"
    check(text, torch.fmod, given={"a": a, "b": b}, wrt=wrt)


@pytest.mark.parametrize("wrt", [["a"], ["b"], ["a", "b"]])
def test_where_gives_each_branch_its_part(wrt: list[str]) -> None:
    check(
        "g (bool[2,1,4] c, FLOAT[3,4] a, FLOAT[2,3,1] b) => (FLOAT[2,3,4] y) { y = Where(c, a, b) }",
        torch.where,
        given={"c": np.random.default_rng(1).random((2, 1, 4)) < 0.5},
        wrt=wrt,
    )


@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("axis", [1, -3])
def test_cumsum(axis: int, reverse: int, exclusive: int) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        turned = x.flip(axis) if reverse else x
        summed = turned.cumsum(axis) - (turned if exclusive else 0)
        return summed.flip(axis) if reverse else summed

    check(
        f"g (FLOAT[2,5,3] x) => (FLOAT[2,5,3] y) <int64 axis = {{{axis}}}>"
        f"{{ y = CumSum <exclusive={exclusive}, reverse={reverse}> (x, axis) }}",
        function,
    )


CLIPS = {
    "both": ("x, low, high", -0.5, 0.7),
    "low": ("x, low", -0.5, None),
    "high": ("x, , high", None, 0.7),
    "none": ("x", None, None),
}


@pytest.mark.parametrize("inputs", CLIPS.values(), ids=CLIPS)
def test_clip_with_constant_bounds(inputs: tuple[str, float | None, float | None]) -> None:
    check(
        f"g (FLOAT[4,9] x) => (FLOAT[4,9] y) <FLOAT low = {{-0.5}}, FLOAT high = {{0.7}}> {{ y = Clip({inputs[0]}) }}",
        lambda x: torch.clamp(x, *inputs[1:]) if inputs[1:] != (None, None) else x.clone(),
    )


def test_clip_is_closed_at_its_bounds_as_relu6_is() -> None:
    x = np.array([-1.0, -1e-9, 0.0, 1e-30, 1e-7, 3.0, 5.9999995, 6.0, 7.0], np.float32)
    found = gradients(
        "g (float[9] x) => (float[9] y) <float zero = {0.0}, float six = {6.0}> { y = Clip(x, zero, six) }", {"x": x}
    )
    tensor = torch.from_numpy(x).requires_grad_()
    torch.nn.functional.relu6(tensor).sum().backward()
    np.testing.assert_array_equal(found["x"], tensor.grad.numpy())  # type: ignore[union-attr]


def test_clip_by_bounds_that_are_as_good_as_none() -> None:
    found = gradients(
        "g (float[3] x) => (float[3] y) <float low = {0.0}, float high = {3.4028234e38}> { y = Clip(x, low, high) }",
        {"x": np.array([-1.0, 0.0, 1e30])},
    )
    np.testing.assert_array_equal(found["x"], [0, 0, 1])


@pytest.mark.parametrize("inputs", ["x, low, high", "x, low", "x, , high"])
def test_clip_by_bounds_that_are_inputs(inputs: str) -> None:
    def function(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        return torch.clamp(x, low if "low" in inputs else None, high if "high" in inputs else None)

    names = [name for name in ("x", "low", "high") if name in inputs]
    check(
        f"g (FLOAT[4,5] x, FLOAT low, FLOAT high) => (FLOAT[4,5] y) {{ y = Clip({inputs}) }}",
        function,
        given={"low": np.array(-0.4), "high": np.array(0.6)},
        wrt=names,
    )


@pytest.mark.parametrize(("upper", "k"), [(1, None), (0, None), (1, 1), (0, -1)])
def test_trilu(upper: int, k: int | None) -> None:
    function = torch.triu if upper else torch.tril
    check(
        f"g (FLOAT[2,4,5] x) => (FLOAT[2,4,5] y) <int64 k = {{{k or 0}}}>"
        f"{{ y = Trilu <upper={upper}> ({'x' if k is None else 'x, k'}) }}",
        lambda x: function(x, k or 0),
    )


@pytest.mark.parametrize("op", ["Cast <to=11> (x)", "CastLike(x, like)"])
def test_a_cast_casts_the_gradient_back(op: str) -> None:
    found = gradients(
        "g (float[3] x) => (float[3] y) <double like = {0.0}>"
        f"{{ wide = {op} square = Mul(wide, wide) y = Cast <to=1> (square) }}",
        {"x": np.array([1.0, -2.0, 3.0])},
    )
    assert found["x"].dtype == np.float32
    np.testing.assert_array_equal(found["x"], [2.0, -4.0, 6.0])


@pytest.mark.parametrize("op", ["Floor(x)", "Ceil(x)", "Round(x)", "Sign(x)", "Cast <to=1> (whole)"])
def test_nothing_flows_through_jumps(op: str) -> None:
    """Only the other branch counts: y = x + jumps(x)."""
    found = gradients(
        f"g (float[3] x) => (float[3] y) {{ whole = Cast <to=7> (x) jumps = {op} y = Add(x, jumps) }}",
        {"x": np.array([0.3, -1.7, 2.2])},
    )
    np.testing.assert_array_equal(found["x"], [1, 1, 1])


HALF = {
    "Mul": "Mul(x, x)", "Div": "Div(one, x)", "Pow": "Pow(x, two)", "Sqrt": "Sqrt(x)", "Abs": "Abs(x)",
    "Max": "Max(x, one)", "Clip": "Clip(x, one, two)", "Erf": "Erf(x)", "Where": "Where(c, x, one)", "Relu": "Relu(x)",
}  # fmt: skip


@pytest.mark.parametrize("op", HALF.values(), ids=HALF)
def test_half_precision_gives_what_single_precision_does(op: str) -> None:
    text = (
        "g (FLOAT[4] x) => (FLOAT[4] y) <float one_ = {1.0}, float two_ = {2.0}>"
        f"{{ one = CastLike(one_, x) two = CastLike(two_, x) c = Greater(x, one) y = {op} }}"
    )
    x = {"x": np.array([0.25, 0.75, 1.5, 3.0])}
    half, single = (gradients(text, x, float_type=kind)["x"] for kind in ("float16", "float"))
    assert half.dtype == np.float16
    assert np.abs(single).max() > 0
    np.testing.assert_allclose(half.astype(np.float32), single, rtol=4e-3)
