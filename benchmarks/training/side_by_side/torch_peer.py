"""PyTorch's contestants: eager, with checkpoints, compiled."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch._functorch as functorch
import torch._functorch.config
from torch import Tensor, nn

from benchmarks.training.side_by_side import networks
from benchmarks.training.side_by_side.job import MOMENTUM, RATE, Job


class TorchRunner:
    """A network in PyTorch."""

    def __init__(self, job: Job, arrays: dict[str, np.ndarray]) -> None:
        _configure(job)
        device = torch.device(job.device)
        module = networks.build(job.network, job.options)
        module.load_state_dict(torch.load(job.weights, weights_only=True))
        self.module = module.to(device).train()
        self.x, self.labels = (torch.from_numpy(arrays[name]).to(device) for name in ("x", "labels"))
        self.forward = _forward(job, self.module)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=RATE, momentum=MOMENTUM)

    def step(self) -> float:
        """Train on the batch and return the loss; done when this returns."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(self.forward(self.x), self.labels)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def resting_bytes(self) -> int:
        """Bytes of the tensors that are there between steps: weights, gradients, momentum."""
        tensors: list[Any] = [*self.module.parameters(), *self.module.buffers()]
        tensors += [p.grad for p in self.module.parameters() if p.grad is not None]
        tensors += [t for state in self.optimizer.state.values() for t in state.values() if t is not None]
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


def _configure(job: Job) -> None:
    torch.set_num_threads(job.threads)
    torch.backends.cuda.matmul.allow_tf32 = job.tf32
    torch.backends.cudnn.allow_tf32 = job.tf32
    torch.backends.cudnn.benchmark = job.tuned
    if job.cap:
        total = torch.cuda.get_device_properties(job.index).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job.cap / total), job.index)


def _forward(job: Job, module: nn.Module) -> Callable[[Tensor], Tensor]:
    if job.mode == "checkpoint":
        found: Callable[[Tensor], Tensor] = module.checkpointed
        return found
    if job.mode == "compile":
        functorch.config.activation_memory_budget = job.share
        return torch.compile(module)
    return module
