"""Gradients of Fourier transforms of lengths that are no power of two: products with the transform's matrix."""

import numpy as np
import pytest
import torch

from tests.support.gradient_checks import check, gradients

FORWARD = "axis = Constant <value_int=1> () y = DFT <{}> (x, , axis)"


def _complex(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(x.contiguous()) if x.shape[-1] == 2 else x[..., 0].to(torch.complex128)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("settings", ["inverse=0", "inverse=1"])
def test_transforms(parts: int, settings: str) -> None:
    transform = torch.fft.ifft if settings.endswith("1") else torch.fft.fft
    made = check(
        f"g (FLOAT[2,12,3,{parts}] x) => (FLOAT[2,12,3,2] y) {{ {FORWARD.format(settings)} }}",
        lambda x: torch.view_as_real(transform(_complex(x), dim=1)),
    )
    assert "DFT" not in {node.op_type for node in made.graph.node}


def test_half_of_a_spectrum() -> None:
    check(
        f"g (FLOAT[2,12,3,1] x) => (FLOAT[2,7,3,2] y) {{ {FORWARD.format('onesided=1')} }}",
        lambda x: torch.view_as_real(torch.fft.rfft(x[..., 0], dim=1)),
    )


@pytest.mark.parametrize("length", [9, 14])
def test_another_length(length: int) -> None:
    check(
        f"""g (FLOAT[2,12,3,2] x) => (FLOAT[2,{length},3,2] y) {{
            axis = Constant <value_int=1> () length = Constant <value_int={length}> () y = DFT(x, length, axis) }}""",
        lambda x: torch.view_as_real(torch.fft.fft(_complex(x), length, dim=1)),
    )


def test_the_gradient_is_as_exact_as_a_product() -> None:
    x, y = np.random.default_rng(0).standard_normal((2, 4, 48, 2)).astype(np.float32)
    text = """g (FLOAT[4,48,2] x, FLOAT[4,48,2] y) => (FLOAT[4,48,2] z) {
        axis = Constant <value_int=1> () s = DFT(x, , axis) z = Mul(s, y) }"""
    (gradient,) = gradients(text, {"x": x, "y": y}, wrt=["x"]).values()
    numbers = y[..., 0].astype(np.float64) + 1j * y[..., 1]
    true = np.fft.ifft(numbers, axis=1) * 48  # what a transform's adjoint is
    error = np.linalg.norm(gradient - np.stack([true.real, true.imag], -1)) / np.linalg.norm(true)
    assert error < 8 * 2.0**-24
