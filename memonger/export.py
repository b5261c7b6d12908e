"""``memonger.export.export`` and what goes with it, which `memonger.serving` has."""

from memonger.serving import TARGETS, Exported, export
from memonger.serving.package import Estimate

__all__ = ["TARGETS", "Estimate", "Exported", "export"]
