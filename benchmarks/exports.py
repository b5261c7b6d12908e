"""Where `benchmarks.process` finds exported networks."""

from models.torch_exports import EXPORTS, export

__all__ = ["EXPORTS", "export"]
