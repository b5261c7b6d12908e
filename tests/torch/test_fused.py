"""PyTorch's compiler in a budget: what it allocates is what is planned. Nothing of C++ is compiled for that."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import memonger.torch
from memonger.torch import budget as own
from tests.support.live_storages import LiveStorages
from tests.support.small_modules import step

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of inductor's own imports


@contextmanager
def allocated() -> Iterator[list[LiveStorages]]:
    """What the compiler makes meanwhile allocates under the last of these modes, and its own kernels do nothing."""
    from torch._inductor import async_compile, compile_fx

    modes: list[LiveStorages] = []
    inner, empty = compile_fx.compile_fx_inner, torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]

    def counting(graph: Any, inputs: Any, **settings: Any) -> Any:
        run = inner(graph, inputs, **settings)

        def boxed(arguments: list[Any]) -> Any:
            if not modes:
                return run(arguments)
            modes[-1].add(arguments)
            with modes[-1]:
                return run(arguments)

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    def counted(*settings: Any) -> torch.Tensor:
        made = empty(*settings)
        if modes:
            modes[-1].add([made])
        return made

    with (
        mock.patch.object(async_compile.AsyncCompile, "cpp_pybinding", return_value=lambda *_: None),
        mock.patch.object(torch._C._dynamo.guards, "_empty_strided_cpu", counted),  # type: ignore[attr-defined]
        mock.patch.object(compile_fx, "compile_fx", partial(compile_fx.compile_fx, inner_compile=counting)),
        torch._inductor.config.patch(fx_graph_cache=False),
    ):
        yield modes


def compiled(module: nn.Module, partition: memonger.torch.Partitioner) -> Any:
    from torch._inductor import compile_fx

    torch.compiler.reset()
    backend = partial(compile_fx.compile_fx, config_patches=partition.options)
    return torch.compile(module, backend=backend, fullgraph=True)


def test_what_the_compiler_allocates_is_what_is_planned() -> None:
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
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
