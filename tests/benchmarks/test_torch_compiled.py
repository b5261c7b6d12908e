"""Steps of PyTorch's compiler are compared with the same graph in float64 and the same random numbers."""

import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.training.torch_compiled import InDouble, drawn

WORD = 0x6627E8D5
"""The first of Philox-4x32-10 where counter and key are 0: Random123, kat_vectors."""


def test_draws_are_philox_words() -> None:
    """31 bits of one as a number below 1; the place is the counter, the seed the key."""
    zero = torch.tensor(0)
    assert float(drawn((3, 2), zero, "rand")[0, 0]) == pytest.approx((WORD & 0x7FFFFFFF) * 2**-31, rel=1e-7)
    assert torch.equal(drawn((3, 2), zero, "rand").flatten(), drawn((6,), zero, "rand"))
    many = drawn((1 << 14,), torch.tensor(-5), "rand")
    assert 0 <= float(many.min()) < float(many.max()) < 1
    assert float(many.mean()) == pytest.approx(0.5, abs=4 / math.sqrt(12 << 14))
    with pytest.raises(NotImplementedError, match="randn"):
        drawn((3,), zero, "randn")


def test_a_pass_in_double_casts_nothing_to_less() -> None:
    """What the graph makes of float32 or casts to it is float64."""
    x = torch.linspace(0, 1, 7)

    def run(x: torch.Tensor) -> torch.Tensor:
        thirds = torch.full((7,), 1 / 3, dtype=torch.float32)
        return (x.exp().to(torch.float32) * thirds).sum()

    expected = (x.double().exp() / 3).sum()
    assert abs(float(InDouble(make_fx(run)(x)).run(x.double()) - expected)) < 1e-15 * float(expected)
