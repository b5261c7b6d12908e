"""Steps of a training in PyTorch, in float32 or wholly in float64, and how far other tensors are from its."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

SCALE = 1e-3  # of the largest norm: a gradient this small beside it (a bias before a normalization) is noise


class _Widened(TorchFunctionMode):
    """Computes in float64 what a module casts to float32, as transformers does in normalizations and softmax."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = Tensor.double if function == Tensor.float else function
        named = {key: _widened(value) for key, value in (kwargs or {}).items()}
        return function(*map(_widened, args), **named)


def _widened(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


@contextmanager
def _computing(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        if dtype is torch.float64:
            with _Widened():
                yield
        else:
            yield
    finally:
        torch.set_default_dtype(before)


def steps(
    module: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], optimizer: torch.optim.Optimizer | None = None
) -> Iterator[tuple[float, Tensor]]:
    """Loss and scores ``[N, C, ...]`` of each batch, in the type of the module's parameters.

    The loss is the mean softmax cross-entropy. When a step is given, its gradients are in the module; the optimizer
    comes after.
    """
    dtype = next(module.parameters()).dtype
    for x, labels in batches:
        module.zero_grad()
        with _computing(dtype):
            scores = module(x.to(dtype) if x.is_floating_point() else x)
            loss = functional.cross_entropy(scores, labels)
            loss.backward()
        yield loss.item(), scores
        if optimizer is not None:
            optimizer.step()


def relative_errors(found: Mapping[str, np.ndarray], truth: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Norm of the difference over the norm of the truth, or over `SCALE` of the largest of those, by name."""
    norms = {name: float(np.linalg.norm(array)) for name, array in truth.items()}
    least = SCALE * max(norms.values())
    return {
        name: float(np.linalg.norm(found[name].astype(np.float64) - array)) / max(norms[name], least)
        for name, array in truth.items()
    }
