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


class Scored(nn.Linear):
    """Scores of many classes, whose gradient the compiler writes over them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(super().forward(x), torch.arange(len(x)))


class Repeated(nn.Linear):
    """One weight in many products, whose gradients the compiler adds up as it computes them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = super().forward(x).tanh()
        return x.sum()


class Normalized(nn.Linear):
    """Deviations of channels, which all samples read."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        x = nn.functional.hardswish((x - x.mean(0)) * (x.var(0) + 1e-5).rsqrt())
        return x.square().sum()


def measured(module: nn.Module, x: torch.Tensor, partition: memonger.torch.Partitioner) -> int:
    """Bytes at the peak of a compiled step, whose own kernels do nothing."""
    with allocated() as modes:
        run = compiled(module, partition)
        run(x).sum().backward()
        module.zero_grad()
        modes.append(LiveStorages([*module.parameters(), x]))
        run(x).sum().backward()
    return modes[0].peak


@pytest.mark.parametrize(
    ("module", "rows", "stored"),
    [(Scored(16, 1024, bias=False), 256, 1), (Repeated(256, 256, bias=False), 8, 3)],
    ids=["written over scores", "added up"],
)
def test_what_is_written_over_operands_takes_nothing(module: nn.Linear, rows: int, stored: int) -> None:
    partition = memonger.torch.partitioner(None)
    peak = measured(module, torch.randn(rows, module.in_features), partition)
    largest = max(rows * module.out_features, module.weight.numel()) * 4
    (plan,) = partition.plans
    assert 0.9 * plan.peak_bytes <= peak <= plan.peak_bytes + 64
    assert plan.peak_bytes - plan.given_bytes < (stored + 0.5) * largest


def test_what_many_elements_read_is_computed_once() -> None:
    from torch._inductor import compile_fx

    graphs: list[Any] = []

    def kept(graph: Any, inputs: Any, **settings: Any) -> Any:
        graphs.append(graph)
        return own.as_it_is(graph, inputs)

    torch.compiler.reset()
    module = Normalized(32, 32)
    backend = partial(
        compile_fx.compile_fx, inner_compile=kept, config_patches=memonger.torch.partitioner(None).options
    )
    step(torch.compile(module, backend=backend), module, (torch.randn(64, 32),))
    roots = [node for graph in graphs for node in graph.graph.nodes if node.target is torch.ops.aten.rsqrt.default]
    assert len(graphs) == 2
    assert len(roots) == 1


def test_what_the_compiler_allocates_is_what_is_planned() -> None:
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(2)]
    module, x, peak = nn.Sequential(*layers, nn.Linear(64, 1)), torch.randn(512, 64), 0
    for share in (1.0, 0.8):
        partition = memonger.torch.partitioner(int(share * peak) or None)
        found = measured(module, x, partition)
        (plan,) = partition.plans
        assert 0.9 * plan.peak_bytes <= found <= plan.peak_bytes + 64
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


class Patches(nn.Module):
    """Patches of images whose channels lie last: the convolution is given a copy of its weight that lies likewise."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(64, 512, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cut(x.permute(0, 3, 1, 2) * 2).square().sum()


class Dense(nn.Module):
    """A sum of nine gradients that something later reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64, bias=False)
        self.layers = nn.ModuleList(nn.Linear(128, 64, bias=False) for _ in range(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = y = self.first(x)
        for layer in self.layers:
            y = layer(torch.cat([x, y], 1).tanh())
        return y.square().sum()


class Halves(nn.Linear):
    """Gradients of slices, put among zeros."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        half = len(y) // 2
        return (super().forward(y[:half]).tanh() * super().forward(y[half:]).tanh()).sum()


@pytest.mark.parametrize(
    ("module", "shape"), [(Patches(), (2, 4, 4, 64)), (Dense(), (256, 64)), (Halves(256, 256), (512, 256))]
)
def test_nothing_is_allocated_beyond_the_plan(module: nn.Module, shape: tuple[int, ...]) -> None:
    partition = memonger.torch.partitioner(None)
    found = measured(module, torch.randn(shape), partition)
    (plan,) = partition.plans
    assert 0.9 * plan.peak_bytes <= found <= plan.peak_bytes + 64


class Pooled(nn.Module):
    """Many rows, of which a few go through large weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.last = nn.Linear(64, 64), nn.Linear(64, 8192), nn.Linear(8192, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = self.first(x).tanh().unflatten(0, (4, -1)).mean(1)
        return self.last(self.wide(pooled).tanh()).square().sum()


def test_gradients_of_large_weights_are_the_last_where_few_samples_went_through_them() -> None:
    module, x, peaks = Pooled(), torch.randn(16384, 64), list[int]()
    for partition in (memonger.torch.partitioner(None), memonger.torch.backend(None)):
        if isinstance(partition, memonger.torch.Partitioner):
            peaks.append(measured(module, x, partition))
        else:
            torch.compiler.reset()
            step(torch.compile(module, backend=partition, fullgraph=True), module, (x,))
        (plan,) = partition.plans
        rows, large = 16384 * 64 * 4, 2 * 8192 * 64 * 4
        assert plan.gradient_bytes > large
        assert plan.peak_bytes < plan.given_bytes + max(3 * rows, plan.gradient_bytes) + large // 4
        peaks.append(plan.peak_bytes)
    assert peaks[0] <= peaks[1] + 64
