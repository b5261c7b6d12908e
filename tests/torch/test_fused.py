"""PyTorch's compiler in a budget: what it allocates is what is planned. Nothing of C++ is compiled for that."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import memonger.torch
from memonger.torch import budget as own
from tests.support.live_storages import LiveStorages, allocated
from tests.support.small_modules import step

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of inductor's own imports


def compiled(module: nn.Module, partition: memonger.torch.Partitioner) -> Any:
    from torch._inductor import compile_fx

    torch.compiler.reset()
    backend = partial(compile_fx.compile_fx, config_patches=partition.options)
    return torch.compile(module, backend=backend, fullgraph=True)


def test_what_the_compiler_allocates_is_what_is_planned() -> None:
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(2)]
    module, x, peak = nn.Sequential(*layers, nn.Linear(64, 1)), torch.randn(512, 64), 0
    for share in (1.0, 0.8):
        partition = memonger.torch.partitioner(int(share * peak) or None)
        with allocated() as modes:
            run = compiled(module, partition)
            run(x).sum().backward()
            module.zero_grad()
            modes.append(LiveStorages([*module.parameters(), x]))
            run(x).sum().backward()
        (plan,) = partition.plans
        assert 0.9 * plan.peak_bytes <= modes[0].peak <= plan.peak_bytes + 64
        assert (plan.recomputed > 0) == (share < 1)
        peak = plan.peak_bytes


def test_what_is_fused_takes_nothing() -> None:
    class Chain(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return ((y * 2 + 1).relu() * y).sum()

    module, x = Chain(32, 32), torch.randn(64, 32)
    found = memonger.torch.partitioner(None)

    def kept(graph: Any, inputs: Any, **settings: Any) -> Any:
        return own.as_it_is(graph, inputs)

    from torch._inductor import compile_fx

    torch.compiler.reset()
    backend = partial(compile_fx.compile_fx, inner_compile=kept, config_patches=found.options)
    step(torch.compile(module, backend=backend), module, (x,))
    alone = memonger.torch.backend(None)
    torch.compiler.reset()
    step(torch.compile(module, backend=alone), module, (x,))
    assert found.plans[0].nodes < alone.plans[0].nodes
    values = 64 * 32 * 4
    assert found.plans[0].peak_bytes <= alone.plans[0].peak_bytes - values
