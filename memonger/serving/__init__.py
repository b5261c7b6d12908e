"""Planned models as what serving stacks load, one stack a file; and fleets of them, which share arenas.

What exports knows graphs and models, and what serves planned files doesn't: so names of `memonger.serving.exporting`
are looked up when they are used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memonger.serving.exporting import TARGETS, Exported, ServingTarget, Write, export
    from memonger.serving.package import Estimate, Package

__all__ = ["TARGETS", "Estimate", "Exported", "Package", "ServingTarget", "Write", "export"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'memonger.serving' has no attribute {name!r}")
    globals()[name] = getattr(import_module("memonger.serving.exporting"), name)
    return globals()[name]
