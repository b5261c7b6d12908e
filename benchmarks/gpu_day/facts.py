"""One check of `tests.facts` after the other: rows of the table of what onnxruntime does with CUDA."""

from dataclasses import asdict
from typing import Any

from benchmarks.gpu_day.stages import Settings
from memonger.devices import parse_device
from tests.facts.checks import in_process


def measure(item: str, settings: Settings, seconds: float) -> dict[str, Any]:
    """A check's facts."""
    return {"facts": [asdict(fact) for fact in in_process(item, parse_device(settings.device))]}
