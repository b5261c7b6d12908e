"""Training steps that PyTorch's compiler makes, in a budget: ``python -m benchmarks.training.torch_compiled``.

Kernels are compiled, which takes some minutes a network. Contestants: `torch.compile` with its own partition, with its
``activation_memory_budget``, and with `memonger.torch.partitioner`: without a budget, with the peak that each of these
two was measured to have as its budget, and at 70 % of the compiler's own. Peaks count every storage, parameters and
gradients included; steps take turns. Gradients are compared with `exact` ones, as kernels round in their own way
wherever others are fused; those of an eager step aren't, as it draws other random numbers.

Written to torch_compiled.txt where no network is left out, as `benchmarks.training.torch_budgets` does, with its flags.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch._functorch.config as functorch
from torch import fx
from torch.utils._pytree import tree_map_only

import memonger.torch
from benchmarks.machine import Record, stamp
from benchmarks.training.step_networks import NETWORKS
from benchmarks.training.torch_budgets import PACKAGES, Contest, Loss, Rows, heading, program, shown
from tests.support.live_storages import allocated

ACTIVATIONS, SHARE = 0.5, 0.7
OWN, LIMITED, OURS = "torch.compile", f"torch.compile, activation budget {ACTIVATIONS}", "memonger"


class InDouble(fx.Interpreter):
    """A pass that runs operator by operator in float64, with the random numbers that PyTorch's compiler draws."""

    def run_node(self, n: fx.Node) -> Any:
        return tree_map_only(torch.Tensor, _wide, super().run_node(n))

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is torch.ops.prims.inductor_seeds.default:
            limits = torch.iinfo(torch.int64)
            return torch.randint(limits.min, limits.max, args[:1])
        if target is torch.ops.prims.inductor_random.default:
            return drawn(*args)
        return super().call_function(target, *tree_map_only(torch.dtype, _wide_type, (args, kwargs)))


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(_wide_type(tensor.dtype))


def _wide_type(of: torch.dtype) -> torch.dtype:
    return torch.float64 if of is torch.float32 else of


def drawn(size: Sequence[int], seed: torch.Tensor, mode: str) -> torch.Tensor:
    """What PyTorch's compiler draws on a CPU: Philox-4x32-10 (Salmon et al. 2011), with the place as its counter.

    Raises:
        NotImplementedError: they aren't to be uniform.
    """
    if mode != "rand":
        raise NotImplementedError(f"random numbers of mode {mode}")
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    keys = int(seed) & 0xFFFFFFFF, 0
    a = np.arange(math.prod(size), dtype=np.uint64)
    b = c = d = np.zeros_like(a)
    for _ in range(10):
        x, y = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (y >> half) ^ b ^ np.uint64(keys[0]), y & low, (x >> half) ^ d ^ np.uint64(keys[1]), x & low
        keys = (keys[0] + 0x9E3779B9) & 0xFFFFFFFF, (keys[1] + 0xBB67AE85) & 0xFFFFFFFF
    uniform = (a & np.uint64(0x7FFFFFFF)).astype(np.float32) * np.float32(4.6566127342e-10)
    return torch.from_numpy(uniform).reshape(tuple(size))


def exact(module: torch.nn.Module) -> Callable[..., torch.Tensor]:
    """The step of the graphs that PyTorch's compiler is given, in float64; its gradients are rounded at the end."""
    from torch._inductor import compile_fx

    def in_double(graph: fx.GraphModule, _: Sequence[Any], **__: Any) -> Callable[[list[Any]], Any]:
        def boxed(arguments: list[Any]) -> Any:
            return InDouble(graph).run(*tree_map_only(torch.Tensor, _wide, arguments))

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    return torch.compile(module, backend=partial(compile_fx.compile_fx, inner_compile=in_double), fullgraph=True)


def measured(name: str) -> list[dict[str, Any]]:
    """The rows of a network."""
    from torch._inductor import compile_fx

    rows, contest = Rows(name), Contest(name)
    module = Loss(contest.network, contest.network)
    rows.add("as it is", contest, module)
    rows.rows[0]["error"] = None
    with functorch.patch(enable_autograd_cache=False):  # what is found there is in float32
        contest.expected = contest.gradients(exact(module))
    with allocated(kernels=True) as modes:

        def compiled(
            label: str,
            asked: int | None = None,
            partition: memonger.torch.Partitioner | None = None,
            share: float = 1.0,
        ) -> int:
            backend = partial(compile_fx.compile_fx, config_patches=partition.options if partition else None)
            limited = functorch.patch(activation_memory_budget=share)(backend)
            run = torch.compile(module, backend=limited, fullgraph=True)
            plan = (lambda: partition.plans[-1]) if partition else None
            return rows.add(label, contest, run, modes, asked, plan)

        own = compiled(OWN)
        other = compiled(LIMITED, share=ACTIVATIONS)
        asked = {"no budget": None, f"as {LIMITED}": other, f"{SHARE:.0%} of {OWN}": int(SHARE * own)}
        for label, most in asked.items():
            if most != 0:
                compiled(f"{OURS}, {label}", most, memonger.torch.partitioner(most))
        rows.take_turns()
    return rows.rows


def lines(record: Record, names: Sequence[str]) -> Iterator[str]:
    """The table."""
    yield "Training steps that PyTorch's compiler makes; MiB; time: of a step ÷ the eager one, the fastest of turns"
    yield from stamp("training.torch_compiled", PACKAGES)
    yield "error: largest difference of gradients from those of the same graph in float64, over the largest of these"
    yield "seconds: to plan, without compiling"
    yield from heading(record, names)
    for name in names:
        rows = record.rows.get(name, {}).get("rows", [])
        for row in rows:
            yield shown(name, row, rows[0].get("seconds"))


def main() -> None:
    """Measure what is asked for, and print what is measured."""
    program(__file__, __doc__, tuple(NETWORKS), measured, lines)


if __name__ == "__main__":
    main()
