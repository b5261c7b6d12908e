"""Devices a plan can be made for, how onnxruntime's provider is set up on them, and what binds a plan to one."""

import re
from dataclasses import dataclass

from memonger.errors import PlanError

SEARCHES = ("heuristic", "exhaustive", "default")

GRAPHS = ("auto", "on", "off")


@dataclass(frozen=True, slots=True)
class Cuda:
    """Settings of the CUDA provider.

    Attributes:
        convolution_search: How cuDNN's algorithm for a convolution is chosen. ``heuristic``: by cuDNN's own rules, the
            same each time. ``exhaustive``: by timing them in the first run (onnxruntime's own default), which takes
            scratch for each one tried, and may choose another in the next session: then scratch and last bits differ.
            ``default``: one algorithm for all.
        max_workspace: Whether a convolution may take as much scratch as it likes; else 32 MiB at most.
        tf32: Whether products of float32 may be computed in TF32 (10 bits of mantissa), as onnxruntime does.
        deterministic: Whether kernels that sum in no fixed order (some reductions) are left out where there are others.
            Off is onnxruntime's own default; then what is recomputed may differ in the last bits.
    """

    convolution_search: str = "heuristic"
    max_workspace: bool = True
    tf32: bool = True
    deterministic: bool = True

    def __post_init__(self) -> None:
        if self.convolution_search not in SEARCHES:
            raise PlanError(
                f"convolution_search={self.convolution_search!r} can't be: there are {', '.join(SEARCHES)}."
            )

    def options(self) -> dict[str, str]:
        """The provider options of onnxruntime that say the same; ``deterministic`` is a session's."""
        return {
            "cudnn_conv_algo_search": self.convolution_search.upper(),
            "cudnn_conv_use_max_workspace": str(int(self.max_workspace)),
            "use_tf32": str(int(self.tf32)),
        }


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a device-form plan is bound to. A session refuses any other.

    Attributes:
        runtime: Name and version, as ``onnxruntime 1.31.1``.
        provider: onnxruntime's execution provider.
        machine: Digest of the processor's architecture and features; of a CUDA device its name, and cuDNN's version.
        level: The optimization level the model was lowered at.
        cuda: How the CUDA provider was set up; None for another provider.
    """

    runtime: str
    provider: str
    machine: str
    level: str
    cuda: Cuda | None = None


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
