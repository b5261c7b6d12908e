"""memonger plans the memory of a neural network before it runs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from memonger import late_imports
from memonger.devices import Cuda
from memonger.errors import (
    BudgetError,
    BusyError,
    FeedError,
    LayoutError,
    LoadError,
    MemongerError,
    PlanError,
    PlanFileError,
    RuntimeUnavailableError,
    SessionError,
    ShapeError,
    VerificationError,
)
from memonger.units import GiB, KiB, MiB

if TYPE_CHECKING:
    from memonger import export as export
    from memonger.allocation import Buffer, Layout
    from memonger.allocation import allocate as pack
    from memonger.autodiff.differentiate import differentiate
    from memonger.autodiff.losses.classes import BinaryCrossEntropy, SoftmaxCrossEntropy
    from memonger.autodiff.losses.ctc import CTCLoss
    from memonger.autodiff.losses.differences import HuberLoss, MeanAbsoluteError, MeanSquaredError, TripletMarginLoss
    from memonger.autodiff.mixed_precision import to_mixed_precision
    from memonger.autodiff.optimizers import SGD, Adam, AdamW, Lion
    from memonger.autodiff.separate import separate_parameters
    from memonger.autodiff.training_mode import to_training_mode
    from memonger.distributed.session import DistributedTrainingSession
    from memonger.feeding import Feeder, FeederConfig
    from memonger.graph.collectives import Buckets
    from memonger.graph.liveness import Sharing
    from memonger.ir.model import Model
    from memonger.loops.search import shrink
    from memonger.model.load import load
    from memonger.model.lora import add_lora, merge_lora
    from memonger.options import Options
    from memonger.plan import GraphPlan, Plan
    from memonger.planner.fit import Fit, fit
    from memonger.planner.plan_all import plan_all
    from memonger.planner.search_plan import get_cost, make_mirror_plan, pareto, search_plan
    from memonger.planner.unplan import unplan
    from memonger.report.drawing import draw
    from memonger.report.memory_count import count_memory
    from memonger.runtime.learning_rates import Schedule
    from memonger.runtime.session import Session
    from memonger.serving import onnx_backend as backend  # noqa: F401  `memonger.backend`
    from memonger.serving.fleet import Fleet, FleetModel
    from memonger.serving.fleet_memory import FleetMemory
    from memonger.serving.pipeline import Pipeline
    from memonger.torch.exported import from_torch
    from memonger.training_session import TrainingSession

__version__ = "0.1.0"

late_imports.install()

__all__ = [
    "SGD", "Adam", "AdamW", "BinaryCrossEntropy", "Buckets", "BudgetError", "Buffer", "BusyError", "CTCLoss", "Cuda",
    "DistributedTrainingSession", "FeedError", "Feeder", "FeederConfig", "Fit", "Fleet", "FleetMemory", "FleetModel",
    "GiB", "GraphPlan", "HuberLoss", "KiB", "Layout", "LayoutError", "Lion", "LoadError", "MeanAbsoluteError",
    "MeanSquaredError", "MemongerError", "MiB", "Model", "Options", "Pipeline", "Plan", "PlanError", "PlanFileError",
    "RuntimeUnavailableError", "Schedule", "Session", "SessionError", "ShapeError", "Sharing", "SoftmaxCrossEntropy",
    "TrainingSession", "TripletMarginLoss", "VerificationError", "add_lora", "count_memory", "differentiate", "draw",
    "fit", "from_torch", "get_cost", "load", "make_mirror_plan", "merge_lora", "pack", "pareto", "plan_all",
    "search_plan", "separate_parameters", "shrink", "to_mixed_precision", "to_training_mode", "unplan",
]  # fmt: skip

_LAZY = {
    "memonger.autodiff.differentiate": ("differentiate",),
    "memonger.autodiff.losses.classes": ("BinaryCrossEntropy", "SoftmaxCrossEntropy"),
    "memonger.autodiff.losses.ctc": ("CTCLoss",),
    "memonger.autodiff.losses.differences": (
        "HuberLoss",
        "MeanAbsoluteError",
        "MeanSquaredError",
        "TripletMarginLoss",
    ),
    "memonger.autodiff.mixed_precision": ("to_mixed_precision",),
    "memonger.autodiff.separate": ("separate_parameters",),
    "memonger.autodiff.optimizers": ("SGD", "Adam", "AdamW", "Lion"),
    "memonger.autodiff.training_mode": ("to_training_mode",),
    "memonger.distributed.session": ("DistributedTrainingSession",),
    "memonger.feeding": ("Feeder", "FeederConfig"),
    "memonger.graph.collectives": ("Buckets",),
    "memonger.graph.liveness": ("Sharing",),
    "memonger.allocation": ("Buffer", "Layout", "allocate"),
    "memonger.torch.exported": ("from_torch",),
    "memonger.model.load": ("load",),
    "memonger.model.lora": ("add_lora", "merge_lora"),
    "memonger.ir.model": ("Model",),
    "memonger.loops.search": ("shrink",),
    "memonger.plan": ("GraphPlan", "Plan"),
    "memonger.planner.fit": ("Fit", "fit"),
    "memonger.options": ("Options",),
    "memonger.planner.plan_all": ("plan_all",),
    "memonger.planner.search_plan": ("get_cost", "make_mirror_plan", "pareto", "search_plan"),
    "memonger.planner.unplan": ("unplan",),
    "memonger.report.drawing": ("draw",),
    "memonger.report.memory_count": ("count_memory",),
    "memonger.serving.fleet": ("Fleet", "FleetModel"),
    "memonger.serving.fleet_memory": ("FleetMemory",),
    "memonger.serving.pipeline": ("Pipeline",),
    "memonger.runtime.learning_rates": ("Schedule",),
    "memonger.runtime.session": ("Session",),
    "memonger.training_session": ("TrainingSession",),
}
"""Imported at first use: these modules need onnx-ir, which imports onnx and takes a quarter of a second."""

_MODULES = {"backend": "memonger.serving.onnx_backend", "export": "memonger.export"}
"""Modules that are there as ``memonger.<name>`` without an import of their own."""


def __getattr__(name: str) -> Any:
    inner = "allocate" if name == "pack" else name
    home = next((module for module, names in _LAZY.items() if inner in names), None)
    if name in _MODULES:
        return import_module(_MODULES[name])
    if home is None or name not in __all__:
        from memonger.words import did_you_mean

        near = "" if name.startswith("_") else did_you_mean(name, __all__)  # inspection asks for hundreds of those
        raise AttributeError(f"module 'memonger' has no attribute {name!r}.{near}")
    globals()[name] = getattr(import_module(home), inner)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
