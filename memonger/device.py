"""Devices a plan can be made for, as ``--device`` names them."""

import re
from dataclasses import dataclass

from memonger.errors import PlanError

_DEVICE = re.compile(r"^(none|cpu|cuda)(?::(\d+))?$")


@dataclass(frozen=True, slots=True)
class Device:
    """``kind`` is none (no runtime, portable plans), cpu or cuda; ``index`` counts devices of a kind."""

    kind: str
    index: int = 0

    @property
    def provider(self) -> str:
        """onnxruntime's name for what runs there."""
        return {"cuda": "CUDAExecutionProvider"}.get(self.kind, "CPUExecutionProvider")

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}" if self.kind == "cuda" else self.kind


CPU = Device("cpu")


def parse_device(text: "str | Device") -> Device:
    """A device from ``none``, ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        PlanError: anything else.
    """
    if isinstance(text, Device):
        return text
    match = _DEVICE.match(text)
    if match is None or (match.group(2) and match.group(1) != "cuda"):
        raise PlanError(f"{text!r} is not a device: write none, cpu, cuda or cuda:N.")
    return Device(match.group(1), int(match.group(2) or 0))
