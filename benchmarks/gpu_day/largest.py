"""The largest batch that trains in 12 GB, the context included: PyTorch's by runs, memonger's by plans and one run."""

from typing import Any

from benchmarks.gpu_day.stages import Settings
from benchmarks.gpu_day.training import how, kept, size
from benchmarks.training.side_by_side import largest

WITHOUT = ("checkpoint", "more")


def measure(item: str, settings: Settings, seconds: float) -> dict[str, Any]:
    """The row of a network, as `benchmarks.training.side_by_side` has it."""
    without = (*WITHOUT, "eager", "budget") if settings.rehearse else WITHOUT
    return kept(largest.measure(item, size(item, settings), how(settings, seconds, without)))
