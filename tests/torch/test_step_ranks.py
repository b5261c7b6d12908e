"""Two ranks over gloo: budgets inside ``DistributedDataParallel``, this process and one beside it."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, nn

import memonger.torch
from tests.support.small_modules import Scores, step

LIMIT = 570_000
"""Bytes, of a step that takes 593,000 by the backend and 614,000 eagerly without a budget."""


def gradients_of(rank: int, store: Path) -> dict[str, list[torch.Tensor]]:
    """Of one of two ranks, by backend and by checkpoint."""
    path, most = f"file://{store}", timedelta(seconds=100)
    distributed.init_process_group("gloo", init_method=path, timeout=most, rank=rank, world_size=2)
    found = {}
    try:
        for way in ("backend", "checkpoint"):
            module, inputs = given_to(rank)
            run: nn.Module = module
            if way == "backend":
                made = memonger.torch.backend(LIMIT)
                run = torch.compile(module, backend=made, fullgraph=True)
            else:
                memonger.torch.checkpoint(module, inputs, LIMIT)
            found[way] = step(nn.parallel.DistributedDataParallel(run), module, inputs)[1]
            plan = made.plans[0] if way == "backend" else memonger.torch.plan_of(module)
            assert plan.recomputed
            assert plan.peak_bytes <= LIMIT
    finally:
        distributed.destroy_process_group()
    return found


def given_to(rank: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The same module on each rank, and inputs of its own."""
    torch.manual_seed(0)
    return Scores(depth=4), (torch.randn(256, 64).roll(rank),)


def test_two_ranks_average_the_gradients_that_each_has_in_a_budget(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from tests.torch import conftest, test_step_ranks; "
    code += "conftest.shorten(setattr); test_step_ranks.gradients_of(1, Path(sys.argv[1]))"
    torch.compiler.reset()
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "store")], env=os.environ) as beside:
        found = gradients_of(0, tmp_path / "store")
    assert beside.returncode == 0
    alone = [step(module, module, inputs)[1] for module, inputs in map(given_to, range(2))]
    expected = [one / 2 + other / 2 for one, other in zip(*alone, strict=True)]
    for gradients in found.values():
        assert all(map(torch.equal, gradients, expected))
