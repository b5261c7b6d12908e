"""Two ranks over gloo: a budget inside ``DistributedDataParallel`` in this process, and one without beside it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, nn

import memonger.torch
from tests.support.small_modules import Scores, step

WAYS = ("backend", "checkpoint")
LIMIT = 570_000
"""Bytes, of a step that takes 593,000 by the backend and 614,000 eagerly without a budget."""


@contextmanager
def joined(rank: int, store: Path) -> Iterator[None]:
    """One of two ranks, of which each reads and writes this file."""
    path, most = f"file://{store}", timedelta(seconds=100)
    distributed.init_process_group("gloo", init_method=path, timeout=most, rank=rank, world_size=2)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def beside(store: Path) -> None:
    """
    The second rank, in a process of its own: as many steps, without a budget. It needs no compiler. It leaves the
    interpreter at once: a thread of gloo's that wants it while it ends aborts the process (seen once in hundreds).
    """
    with joined(1, store):
        for _ in WAYS:
            module, inputs = given_to(1)
            step(nn.parallel.DistributedDataParallel(module), module, inputs)
    os._exit(0)


def gradients_in_a_budget(store: Path) -> list[list[torch.Tensor]]:
    """Of the first rank, by backend and by checkpoint."""
    found = []
    with joined(0, store):
        for way in WAYS:
            module, inputs = given_to(0)
            run: nn.Module = module
            if way == "backend":
                made = memonger.torch.backend(LIMIT)
                run = torch.compile(module, backend=made, fullgraph=True)
            else:
                memonger.torch.checkpoint(module, inputs, LIMIT)
            found.append(step(nn.parallel.DistributedDataParallel(run), module, inputs)[1])
            plan = made.plans[0] if way == "backend" else memonger.torch.plan_of(module)
            assert plan.recomputed
            assert plan.peak_bytes <= LIMIT
    return found


def given_to(rank: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The same module on each rank, and inputs of its own."""
    torch.manual_seed(0)
    return Scores(depth=4), (torch.randn(256, 64).roll(rank),)


def test_the_gradients_of_a_rank_in_a_budget_are_averaged_with_anothers(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from tests.torch import test_step_ranks as own; "
    code += "own.beside(Path(sys.argv[1]))"
    torch.compiler.reset()
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "store")], env=os.environ) as other:
        found = gradients_in_a_budget(tmp_path / "store")
    assert other.returncode == 0
    alone = [step(module, module, inputs)[1] for module, inputs in map(given_to, range(2))]
    expected = [one / 2 + another / 2 for one, another in zip(*alone, strict=True)]
    for gradients in found:
        assert all(map(torch.equal, gradients, expected))
