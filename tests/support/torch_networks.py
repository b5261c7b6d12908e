"""The reference networks: seeded modules and data, their exports, and how PyTorch trains them.

Every network's scores are ``[N, C, ...]`` and its labels ``[N, ...]``: the loss is the mean softmax cross-entropy.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.onnx._internal.exporter._registration import ONNXRegistry

import memonger
from memonger.torch.exported import from_torch
from tests.support import torch_modules as modules
from tests.support.torch_steps import steps as steps_of

DROPOUT = 0.25
"""The ratio of the networks that are exported."""

# PyTorch's translations to ONNX: each export reads their sources anew, which is most of a small network's time.
ONNXRegistry.from_torchlib = staticmethod(functools.cache(ONNXRegistry.from_torchlib))
torch.set_num_threads(1)  # networks this small only wait for a second thread, and sums keep their order


def images(size: int) -> Callable[[torch.Generator, int], tuple[Tensor, Tensor]]:
    """Return what makes images ``[N, 3, size, size]`` with their classes, of 10."""
    return lambda generator, batch: (
        torch.randn(batch, 3, size, size, generator=generator),
        torch.randint(0, 10, (batch,), generator=generator),
    )


def masks(generator: torch.Generator, batch: int) -> tuple[Tensor, Tensor]:
    """Images, and a class of 4 for each of their pixels."""
    return (
        torch.randn(batch, 3, 32, 32, generator=generator),
        torch.randint(0, 4, (batch, 32, 32), generator=generator),
    )


def sentences(generator: torch.Generator, batch: int) -> tuple[Tensor, Tensor]:
    """Tokens ``[N, 5]`` of 20, and the ones that follow, ``[N * 5]``."""
    words = torch.randint(0, 20, (batch, 6), generator=generator)
    return words[:, :-1].contiguous(), words[:, 1:].flatten()


@dataclass(frozen=True, slots=True)
class Network:
    """A module by its dropout ratio, and its data by generator and batch."""

    make: Callable[[float], nn.Module]
    data: Callable[[torch.Generator, int], tuple[Tensor, Tensor]]
    batch: int = 4


NETWORKS: dict[str, Network] = {
    "resnet18": Network(modules.resnet18, images(32)),
    "densenet": Network(modules.DenseNet, images(32)),
    "mobilenet_v2": Network(modules.mobilenet_v2, images(32)),
    "googlenet": Network(modules.GoogLeNet, images(64)),
    "unet": Network(modules.UNet, masks, batch=2),
    "lstm_cells": Network(modules.LSTMCells, sentences),
    "lstm": Network(lambda dropout: modules.Recurrent(dropout, nn.LSTM), sentences),
    "gru": Network(lambda dropout: modules.Recurrent(dropout, nn.GRU), sentences),
    "vit": Network(modules.ViT, images(32)),
    "gpt": Network(modules.GPT, sentences),
    "gpt_fused": Network(lambda dropout: modules.GPT(dropout, fused=True), sentences),
}

# For torch.optim; memonger's optimizers take the same settings.
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], Mapping[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "momentum": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9}),
    "nesterov": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "nesterov": True}),
    "weight_decay": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": (torch.optim.Adam, {"lr": 0.002, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.002, "weight_decay": 0.05}),
}


@dataclass(frozen=True, slots=True)
class Step:
    """One forward and backward pass in ``train()``.

    Attributes:
        loss: Mean softmax cross-entropy.
        scores: The network's output.
        gradients: By parameter, in the order of ``named_parameters()``.
        statistics: Running means and variances after the step, by name; the variance is PyTorch's, with n/(n-1).
    """

    loss: float
    scores: np.ndarray
    gradients: dict[str, np.ndarray]
    statistics: dict[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Training:
    """Some steps of training: the loss of each, then parameters and running statistics after the last, by name."""

    losses: tuple[float, ...]
    parameters: dict[str, np.ndarray]
    statistics: dict[str, np.ndarray]


def build(name: str, dropout: float = 0.0) -> nn.Module:
    """Return a network, the same at every call and with any dropout, in ``train()``.

    No weight or running statistic is left at 0 or 1.
    """
    network = NETWORKS[name]
    if dropout:
        module = network.make(dropout)
        module.load_state_dict(build(name).state_dict())
        return module
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = network.make(0.0)
        for part in module.modules():
            if isinstance(part, nn.BatchNorm2d | nn.LayerNorm):
                nn.init.uniform_(part.weight, 0.5, 1.5)
                nn.init.normal_(part.bias, std=0.1)
            if isinstance(part, nn.Conv2d):
                nn.init.kaiming_normal_(
                    part.weight
                )  # PyTorch's own shrinks the signal: any input then gives one output
        with torch.no_grad():
            module(data(name, seed=99)[0])  # running statistics
    return module


def data(name: str, seed: int = 0, batch: int | None = None) -> tuple[Tensor, Tensor]:
    """Input and labels of one batch; each seed gives another."""
    network = NETWORKS[name]
    return network.data(torch.Generator().manual_seed(seed), batch or network.batch)


@functools.cache
def exported(name: str) -> memonger.Model:
    """Return the network, its dropout at `DROPOUT`, as a forward model: input ``x``, output ``scores``.

    At the batch of `data`. An export takes a second or more, so all tests share it.
    """
    return from_torch(build(name, DROPOUT), data(name)[0], input_names=["x"], output_names=["scores"])


def reference_step(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Step:
    """Return what autograd makes of one batch, without dropout.

    Args:
        name: Of `NETWORKS`.
        seed: Of the batch.
        dtype: Of the parameters and all computation; float64 for what float32 rounds away.
    """
    module = build(name).to(dtype)
    ((loss, scores),) = steps_of(module, [data(name, seed)])
    gradients = {key: _array(value.grad) for key, value in module.named_parameters()}
    return Step(loss, _array(scores), gradients, _statistics(module))


def reference_training(name: str, optimizer: str, steps: int = 5, dtype: torch.dtype = torch.float32) -> Training:
    """Train a network without dropout; step k takes the batch of seed k.

    Args:
        name: Of `NETWORKS`.
        optimizer: Of `OPTIMIZERS`.
        steps: How many.
        dtype: Of the parameters and all computation.
    """
    module = build(name).to(dtype)
    kind, settings = OPTIMIZERS[optimizer]
    batches = (data(name, seed=step) for step in range(steps))
    losses = [loss for loss, _ in steps_of(module, batches, kind(module.parameters(), **settings))]
    parameters = {key: _array(value) for key, value in module.named_parameters()}
    return Training(tuple(losses), parameters, _statistics(module))


def _statistics(module: nn.Module) -> dict[str, np.ndarray]:
    return {
        key: _array(value) for key, value in module.named_buffers() if key.endswith(("running_mean", "running_var"))
    }


def _array(tensor: Tensor | None) -> np.ndarray:
    assert tensor is not None
    return tensor.detach().numpy().copy()
