"""Gradients of activation functions."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests.support.gradient_checks import check, gradients

Function = Callable[[torch.Tensor], torch.Tensor]

ON_THE_RUNTIME: dict[str, Function] = {
    "Relu(x)": torch.relu,
    "Sigmoid(x)": torch.sigmoid,
    "Tanh(x)": torch.tanh,
}

BY_THE_REFERENCE: dict[str, Function] = {
    "LeakyRelu(x)": lambda x: functional.leaky_relu(x, 0.01),
    "LeakyRelu <alpha=0.0> (x)": lambda x: functional.leaky_relu(x, 0.0),
    "LeakyRelu <alpha=1.0> (x)": lambda x: functional.leaky_relu(x, 1.0),
    "LeakyRelu <alpha=1.5> (x)": lambda x: functional.leaky_relu(x, 1.5),
    "LeakyRelu <alpha=-0.5> (x)": lambda x: functional.leaky_relu(x, -0.5),
    "ThresholdedRelu(x)": lambda x: functional.threshold(x, 1.0, 0.0),
    "ThresholdedRelu <alpha=0.3> (x)": lambda x: functional.threshold(x, 0.3, 0.0),
    "ThresholdedRelu <alpha=-0.3> (x)": lambda x: functional.threshold(x, -0.3, 0.0),
    "Elu(x)": functional.elu,
    "Elu <alpha=0.5> (x)": lambda x: functional.elu(x, 0.5),
    "Elu <alpha=-0.5> (x)": lambda x: functional.elu(x, -0.5),
    "Selu(x)": functional.selu,
    "Selu <alpha=0.7, gamma=1.4> (x)": lambda x: 1.4 * functional.elu(x, 0.7),
    "HardSigmoid <alpha=0.16666667, beta=0.5> (x)": functional.hardsigmoid,
    "HardSigmoid(x)": lambda x: torch.clamp(0.2 * x + 0.5, 0, 1),
    "HardSigmoid <alpha=-0.7, beta=0.4> (x)": lambda x: torch.clamp(-0.7 * x + 0.4, 0, 1),
    "HardSwish(x)": functional.hardswish,
    "Softplus(x)": functional.softplus,
    "Softsign(x)": functional.softsign,
    "Mish(x)": functional.mish,
    "Gelu(x)": functional.gelu,
    'Gelu <approximate="tanh"> (x)': lambda x: functional.gelu(x, approximate="tanh"),
}


def _wide(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return 3 * generator.standard_normal(shape)


@pytest.mark.parametrize("op", ON_THE_RUNTIME)
def test_activations(op: str) -> None:
    check(f"g (FLOAT[4,25] x) => (FLOAT[4,25] y) {{ y = {op} }}", ON_THE_RUNTIME[op], draw=_wide)


@pytest.mark.parametrize("op", BY_THE_REFERENCE)
def test_activations_without_a_float64_kernel(op: str) -> None:
    text = f"g (FLOAT[4,25] x) => (FLOAT[4,25] y) {{ y = {op} }}"
    check(text, BY_THE_REFERENCE[op], draw=_wide, reference=True)


@pytest.mark.parametrize("alpha", ["", "<alpha=1.702>"])
def test_swish_of_newer_operator_sets(alpha: str) -> None:
    def swish(x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x * (1.702 if alpha else 1.0))

    text = f"g (FLOAT[4,5] x) => (FLOAT[4,5] y) {{ y = Swish {alpha} (x) }}"
    check(text, swish, reference=True, draw=_wide, opset=24)


@pytest.mark.parametrize("slope", ["5", "4,1", ""])
@pytest.mark.parametrize("wrt", [["x"], ["x", "s"]])
def test_prelu_with_slopes_of_any_shape(slope: str, wrt: list[str]) -> None:
    shape = f"FLOAT[{slope}]" if slope else "FLOAT"
    check(
        f"g (FLOAT[2,4,5] x, {shape} s) => (FLOAT[2,4,5] y) {{ y = PRelu(x, s) }}",
        lambda x, s: torch.where(x > 0, x, x * s),
        wrt=wrt,
        reference=True,
    )


@pytest.mark.parametrize("alpha", [1.0, 0.4, -0.8])
def test_celu_which_has_no_float64_form(alpha: float) -> None:
    x = np.linspace(-5, 5, 40, dtype=np.float32)
    found = gradients(f"g (float[40] x) => (float[40] y) {{ y = Celu <alpha={alpha}> (x) }}", {"x": x})["x"]
    tensor = torch.from_numpy(x).requires_grad_()
    functional.celu(tensor, alpha).sum().backward()
    assert tensor.grad is not None
    np.testing.assert_allclose(found, tensor.grad.numpy(), rtol=1e-5, atol=1e-7)


AT_ZERO: dict[str, Function] = {
    "Relu(x)": torch.relu,
    "LeakyRelu <alpha=0.1> (x)": lambda x: functional.leaky_relu(x, 0.1),
    "Elu <alpha=0.5> (x)": lambda x: functional.elu(x, 0.5),
    "Selu(x)": functional.selu,
    "Softsign(x)": functional.softsign,
}


@pytest.mark.parametrize("op", AT_ZERO)
def test_at_and_beside_zero_it_is_as_in_pytorch(op: str) -> None:
    x = np.array([-1e-30, 0.0, 1e-30, 1e-37, 1e38], np.float32)
    found = gradients(f"g (float[5] x) => (float[5] y) {{ y = {op} }}", {"x": x})["x"]
    tensor = torch.from_numpy(x).requires_grad_()
    AT_ZERO[op](tensor).sum().backward()
    assert tensor.grad is not None
    np.testing.assert_allclose(found, tensor.grad.numpy(), rtol=1e-6)


@pytest.mark.parametrize("op", ["Mish(x)", "Gelu(x)", 'Gelu <approximate="tanh"> (x)', "HardSwish(x)", "Softplus(x)"])
def test_far_out_it_is_the_identity_or_nothing(op: str) -> None:
    x = np.array([-1e10, -200.0, 200.0, 1e10], np.float32)
    found = gradients(f"g (float[4] x) => (float[4] y) {{ y = {op} }}", {"x": x})["x"]
    np.testing.assert_allclose(found, [0, 0, 1, 1], atol=1e-6)


KEPT = {
    "Relu(x)": "y", "LeakyRelu <alpha=0.1> (x)": "y", "Sigmoid(x)": "y", "Tanh(x)": "y", "Elu(x)": "y",
    "HardSigmoid(x)": "y", "Softsign(x)": "y", "ThresholdedRelu(x)": "y", "Clip(x, zero, one)": "y", "Sqrt(x)": "y",
    "Exp(x)": "y", "Reciprocal(x)": "y", "Mish(x)": "x", "HardSwish(x)": "x", "Gelu(x)": "x", "Softplus(x)": "x",
}  # fmt: skip


@pytest.mark.parametrize("op", KEPT)
def test_one_value_is_kept_for_the_backward_pass(op: str) -> None:
    training = check(
        f"g (FLOAT[6] x) => (FLOAT[6] y) <FLOAT zero = {{0.0}}, FLOAT one = {{1.0}}> {{ y = {op} }}",
        None,
        reference=True,
        draw=lambda generator, shape: generator.uniform(0.1, 0.9, shape),
    )
    read = {name for node in training.graph.node if node.name.startswith("grad/") for name in node.input}
    assert read & {"x", "y"} == {KEPT[op]}


def test_relu_takes_two_passes() -> None:
    training = check("g (FLOAT[6] x) => (FLOAT[6] y) { y = Relu(x) }", torch.relu)
    assert [node.op_type for node in training.graph.node] == ["Relu", "HardSigmoid", "Mul"]


@pytest.mark.parametrize(
    "op", ["Relu(x)", "LeakyRelu(x)", "Sigmoid(x)", "HardSigmoid(x)", "Gelu(x)", "Mish(x)", "Elu(x)"]
)
def test_half_precision_gives_what_single_precision_does(op: str) -> None:
    text = f"g (FLOAT[4] x) => (FLOAT[4] y) {{ y = {op} }}"
    x = {"x": np.array([-0.75, -0.25, 0.5, 2.0])}
    half, single = (gradients(text, x, float_type=kind)["x"] for kind in ("float16", "float"))
    assert half.dtype == np.float16
    np.testing.assert_allclose(half.astype(np.float32), single, rtol=4e-3, atol=1e-3)
