"""Training steps of PyTorch within budgets (`memonger.torch`): planned peak and measured one, gradients, times.

Gradients are compared with the eager step's, and with those of the same kind without a budget, whose bits they have to
have: PyTorch compiles batch normalizations to other kernels than cuDNN's, and a deep network of random weights
magnifies what they round otherwise (of a ResNet-50 products rounded to TF32 change 70 % of the largest).
"""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import memonger.torch
from benchmarks.gpu_day.stages import Settings
from benchmarks.training.step_networks import NETWORKS, Row, WithLoss, apart, inputs_of
from memonger.runtime.worker import reason

SEED, TURNS = 3, 7
SIZES = {"resnet50": (64, 3, 224, 224), "densenet121": (32, 3, 224, 224), "bert": (32, 256)}
KINDS: tuple[tuple[str, float], ...] = (
    ("eager", 1), ("backend", 1), ("backend", 0.7), ("backend", 0.4), ("checkpoint", 0.7), ("checkpoint", 0.5),
    ("inductor", 1), ("inductor", 0.6),
)  # fmt: skip
"""What runs the step, and its budget as a part of the eager step's peak; 1: none."""
OF = {"checkpoint": "eager"}
"""Whose gradients a kind has to have, where they aren't its own without a budget."""


class Steps:
    """Steps of one network on one device, from the same weights and random numbers."""

    def __init__(self, network: Row, device: str) -> None:
        self.network, self.device = network, device
        torch.manual_seed(SEED)
        self.weights = network.build().state_dict()
        self.inputs = tuple(tensor.to(device) for tensor in inputs_of(network))
        self.gradients: dict[str, list[torch.Tensor]] = {}
        self.whole = 0

    def measure(self, kind: str, share: float) -> dict[str, Any]:
        """Bytes of the budget, planned, and measured at the peak; times; how far gradients are apart."""
        torch._dynamo.reset()
        module = self._module()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        budget = None if share == 1 else int(self.whole * share)
        row: dict[str, Any] = {"step": kind, "share": share, "budget": budget}
        begin = time.monotonic()
        run, plan = self._runner(kind, module, budget, optimizer)
        self._step(run, module)
        row["first_seconds"] = round(time.monotonic() - begin, 1)
        module.network.load_state_dict(self.weights)
        module.zero_grad()
        row["measured"] = self._peak(run, module)
        gradients = [one.grad.clone() for one in module.parameters() if one.grad is not None]
        self.whole = self.whole or row["measured"]
        row["apart"] = apart(gradients, self.gradients.setdefault("eager", gradients))
        row["apart_from_own"] = apart(gradients, self.gradients.setdefault(OF.get(kind, kind), gradients))
        del gradients
        row["milliseconds"] = statistics.median(self._step(run, module) for _ in range(TURNS)) * 1e3
        return row | ({"planned": plan().peak_bytes} if plan else {})

    def _module(self) -> WithLoss:
        torch.manual_seed(SEED)
        network = self.network.build().train()
        network.load_state_dict(self.weights)
        return WithLoss(network.to(self.device))

    def _runner(
        self, kind: str, module: WithLoss, budget: int | None, optimizer: Any
    ) -> tuple[Any, Callable[[], Any] | None]:
        if kind == "backend":
            backend = memonger.torch.backend(budget, optimizer)
            return torch.compile(module, backend=backend), lambda: backend.plans[-1]
        if kind == "checkpoint":
            assert budget is not None
            memonger.torch.checkpoint(module, self.inputs, budget, optimizer)
            return module, lambda: memonger.torch.plan_of(module)
        if kind == "inductor" and budget is not None:
            partitioner = memonger.torch.partitioner(budget, optimizer)
            return torch.compile(module, options=partitioner.options), lambda: partitioner.plans[-1]
        return torch.compile(module) if kind == "inductor" else module, None

    def _step(self, run: Any, module: WithLoss) -> float:
        module.zero_grad()
        torch.manual_seed(SEED)
        self._wait()
        begin = time.perf_counter()
        run(*self.inputs).backward()
        self._wait()
        return time.perf_counter() - begin

    def _peak(self, run: Any, module: WithLoss) -> int:
        """Of parameters, buffers, inputs, and what the step allocates on top; 0 where nobody counts (a CPU)."""
        if self.device == "cpu":
            self._step(run, module)
            return 0
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self._step(run, module)
        held = sum(one.nbytes for one in (*module.parameters(), *module.buffers(), *self.inputs))
        return torch.cuda.max_memory_allocated() - before + held

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


def measure(item: str, settings: Settings, seconds: float) -> dict[str, Any]:
    """The rows of a network; those of whom no time is left are missing."""
    until = time.monotonic() + seconds - 5
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.allow_tf32 = settings.tf32
    torch.backends.cuda.matmul.allow_tf32 = settings.tf32
    network = NETWORKS[item] if settings.rehearse else replace(NETWORKS[item], shape=SIZES[item])
    steps, found = Steps(network, "cpu" if settings.rehearse else settings.device), []
    for kind, share in KINDS[:2] if settings.rehearse else KINDS:
        if time.monotonic() > until - (30 if kind == "inductor" else 0):
            break
        try:
            found.append(steps.measure(kind, share))
        except Exception as error:  # its row says why
            found.append({"step": kind, "share": share, "failed": reason(error)})
    return {"steps": found}
