"""For PyTorch: models out of its modules, and its own training steps in a budget. The core imports none of it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memonger.torch.budget import Backend, Partitioner, StepFit, StepPlan, backend, fit, partitioner
    from memonger.torch.from_torch import from_torch

__all__ = ["Backend", "Partitioner", "StepFit", "StepPlan", "backend", "fit", "from_torch", "partitioner"]


def __getattr__(name: str) -> Any:
    """Names are looked up when they are used: PyTorch takes a second to import."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"memonger.torch.{'from_torch' if name == 'from_torch' else 'budget'}"), name)
