"""Training steps that PyTorch's compiler makes, in a budget: ``python -m benchmarks.training.torch_compiled``.

Kernels are compiled, which takes some minutes a network. Contestants: `torch.compile` with its own partition, with its
``activation_memory_budget``, and with `memonger.torch.partitioner`: without a budget, with the peak that each of these
two was measured to have as its budget, and at 70 % of the compiler's own. Peaks count every storage, parameters and
gradients included; steps take turns. Gradients are compared with those of `torch.compile` alone: it draws other random
numbers than an eager step, and its kernels round in their own way wherever others are fused.

Written to torch_compiled.txt where no network is left out, as `benchmarks.training.torch_budgets` does, with its flags.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch._functorch.config as functorch

import memonger.torch
from benchmarks.machine import Record, stamp
from benchmarks.training.step_networks import NETWORKS
from benchmarks.training.torch_budgets import Contest, Loss, Rows, heading, program, shown
from tests.support.live_storages import allocated

ACTIVATIONS, SHARE = 0.5, 0.7
OWN, LIMITED, OURS = "torch.compile", f"torch.compile, activation budget {ACTIVATIONS}", "memonger"


def measured(name: str) -> list[dict[str, Any]]:
    """The rows of a network."""
    from torch._inductor import compile_fx

    rows, contest = Rows(name), Contest(name)
    module = Loss(contest.network, contest.network)
    rows.add("as it is", contest, module)
    with allocated(kernels=True) as modes:

        def compiled(label: str, asked: int | None = None, partition: memonger.torch.Partitioner | None = None) -> int:
            torch.compiler.reset()
            backend = partial(compile_fx.compile_fx, config_patches=partition.options if partition else None)
            run = torch.compile(module, backend=backend, fullgraph=True)
            plan = (lambda: partition.plans[-1]) if partition else None
            if label == OWN:
                contest.expected = contest.gradients(run)
            return rows.add(label, contest, run, modes, asked, plan)

        own = compiled(OWN)
        with functorch.patch(activation_memory_budget=ACTIVATIONS):
            limited = compiled(LIMITED)
        asked = {"no budget": None, f"as {LIMITED}": limited, f"{SHARE:.0%} of {OWN}": int(SHARE * own)}
        for label, most in asked.items():
            if most != 0:
                compiled(f"{OURS}, {label}", most, memonger.torch.partitioner(most))
        rows.take_turns()
    return rows.rows


def lines(record: Record, names: Sequence[str]) -> Iterator[str]:
    """The table."""
    yield "Training steps that PyTorch's compiler makes; MiB; time: of a step ÷ the eager one, the fastest of turns"
    yield from stamp("training.torch_compiled", ("torch", "transformers", "numpy"))
    yield "error: largest difference of gradients from those of torch.compile alone, over the largest of these"
    yield "seconds: to plan, without compiling"
    yield from heading(record, names)
    for name in names:
        rows = record.rows.get(name, {}).get("rows", [])
        for row in rows:
            yield shown(name, row, rows[0]["seconds"])


def main() -> None:
    """Measure what is asked for, and print what is measured."""
    program(__file__, __doc__, tuple(NETWORKS), measured, lines)


if __name__ == "__main__":
    main()
