"""memonger plans the memory of a neural network before it runs."""

from typing import TYPE_CHECKING, Any

from memonger.autodiff.differentiate import differentiate
from memonger.autodiff.losses import BinaryCrossEntropy, MeanSquaredError, SoftmaxCrossEntropy
from memonger.autodiff.optimizers import SGD, Adam, AdamW
from memonger.autodiff.training_mode import to_training_mode
from memonger.devices import Cuda
from memonger.errors import (
    BudgetError,
    LayoutError,
    LoadError,
    MemongerError,
    PlanError,
    PlanFileError,
    RuntimeUnavailableError,
    SessionError,
    VerificationError,
)
from memonger.graph.liveness import Sharing
from memonger.layout import Buffer, Layout
from memonger.layout import allocate as pack
from memonger.model.from_torch import from_torch
from memonger.model.load import load
from memonger.model.model import Model
from memonger.plan import GraphPlan, Plan
from memonger.planning.search_plan import get_cost, make_mirror_plan, pareto, search_plan
from memonger.units import GiB, KiB, MiB

if TYPE_CHECKING:
    from memonger.runtime.session import Session
    from memonger.training_session import TrainingSession

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "Session":  # needs onnxruntime's module only when used
        from memonger.runtime.session import Session

        return Session
    if name == "TrainingSession":
        from memonger.training_session import TrainingSession

        return TrainingSession
    raise AttributeError(f"module 'memonger' has no attribute {name!r}")


__all__ = [
    "SGD", "Adam", "AdamW", "BinaryCrossEntropy", "BudgetError", "Buffer", "Cuda", "GiB", "GraphPlan", "KiB", "Layout",
    "LayoutError", "LoadError", "MeanSquaredError", "MemongerError", "MiB", "Model", "Plan", "PlanError",
    "PlanFileError", "RuntimeUnavailableError", "Session", "SessionError", "Sharing", "SoftmaxCrossEntropy",
    "TrainingSession", "VerificationError", "differentiate", "from_torch", "get_cost", "load", "make_mirror_plan",
    "pack", "pareto", "search_plan", "to_training_mode",
]  # fmt: skip
