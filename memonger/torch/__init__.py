"""For PyTorch: models out of its modules, and its own training steps in a budget. The core imports none of it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memonger.torch.budget import Backend, Partitioner, StepFit, StepPlan, backend, fit, partitioner
    from memonger.torch.eager import checkpoint, plan_of
    from memonger.torch.exported import from_torch
    from memonger.torch.page import report

__all__ = [
    "Backend", "Partitioner", "StepFit", "StepPlan", "backend", "checkpoint", "fit", "from_torch", "partitioner",
    "plan_of", "report",
]  # fmt: skip

_ELSEWHERE = {"checkpoint": "eager", "from_torch": "exported", "plan_of": "eager", "report": "page"}


def __getattr__(name: str) -> Any:
    """Names are looked up when they are used: PyTorch takes a second to import."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"memonger.torch.{_ELSEWHERE.get(name, 'budget')}"), name)
