"""Devices a plan can be made for, how onnxruntime's provider is set up on them, and what binds a plan to one."""

import re
from dataclasses import dataclass

from memonger.errors import PlanError
from memonger.words import check_choice, did_you_mean, listed

SEARCHES = ("heuristic", "exhaustive", "default")

GRAPHS = ("auto", "on", "off")


@dataclass(frozen=True, slots=True)
class Cuda:
    """Settings of the CUDA provider.

    Attributes:
        convolution_search: How cuDNN's algorithm for a convolution is chosen. ``heuristic``: by cuDNN's own rules, the
            same each time. ``exhaustive``: by timing them in the first run (onnxruntime's own default), which takes
            workspace for each one tried, and may choose another next time: then workspace and last bits differ.
            ``default``: one algorithm for all.
        max_workspace: Whether a convolution may take as much workspace as it likes; else 32 MiB at most.
        tf32: Whether products of float32 may be computed in TF32 (10 bits of mantissa), as onnxruntime does.
        deterministic: Whether kernels that sum in no fixed order (some reductions) are left out where there are others.
            Off is onnxruntime's own default; then what is recomputed may differ in the last bits.
    """

    convolution_search: str = "heuristic"
    max_workspace: bool = True
    tf32: bool = True
    deterministic: bool = True

    def __post_init__(self) -> None:
        check_choice("convolution_search", self.convolution_search, SEARCHES, PlanError)
        for name in ("max_workspace", "tf32", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                raise PlanError(f"{name} must be True or False, not {getattr(self, name)!r}.")

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


@dataclass(frozen=True, slots=True)
class Provider:
    """What has to be known of a kind of device before onnxruntime is loaded.

    Attributes:
        name: onnxruntime's name of the execution provider.
        is_host: Whether it computes in the process's own memory, while the caller waits: arrays are read where they
            lie, and the profiler's times are those of kernels, not of launches.
        is_portable: Whether no runtime is meant: such plans run on any machine, and are made as for the host.
        is_numbered: Whether a machine may have several.
        has_graphs: Whether runs can be captured as CUDA graphs.
        has_settings: Whether `Cuda` says how it is set up.
        dlpack: The number of its memory in DLPack's ``DLDeviceType``.
    """

    name: str = "CPUExecutionProvider"
    is_host: bool = True
    is_portable: bool = False
    is_numbered: bool = False
    has_graphs: bool = False
    has_settings: bool = False
    dlpack: int = 1


PROVIDERS = {
    "none": Provider(is_portable=True),
    "cpu": Provider(),
    "cuda": Provider(
        "CUDAExecutionProvider", is_host=False, is_numbered=True, has_graphs=True, has_settings=True, dlpack=2
    ),
}
"""By the kind of device. How onnxruntime is driven on each is in `memonger.runtime.backend`."""


@dataclass(frozen=True, slots=True)
class Device:
    """``kind`` is one of `PROVIDERS`; ``index`` counts devices of a kind."""

    kind: str
    index: int = 0

    @property
    def facts(self) -> Provider:
        """What is known of its kind."""
        return PROVIDERS[self.kind]

    @property
    def provider(self) -> str:
        """onnxruntime's name for what runs there."""
        return self.facts.name

    @property
    def is_host(self) -> bool:
        """Whether its memory is the process's own: see `Provider`."""
        return self.facts.is_host

    def owns(self, memory: str) -> bool:
        """Whether a name of onnxruntime's for a kind of memory (``Cpu``, ``CudaPinned``) means the device's own."""
        name = memory.lower()
        return name == self.kind or (self.is_host and "cpu" in name)

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}" if self.facts.is_numbered else self.kind


CPU = Device("cpu")

_DEVICE = re.compile(rf"({'|'.join(PROVIDERS)})(?::([0-9]{{1,4}}))?")


def parse_device(text: "str | Device") -> Device:
    """A device from ``none``, ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        PlanError: anything else.
    """
    if isinstance(text, Device):
        return text
    match = _DEVICE.fullmatch(text) if isinstance(text, str) else None
    if match is None or (match.group(2) and not PROVIDERS[match.group(1)].is_numbered):
        forms = listed([*PROVIDERS, *(f"{kind}:N" for kind, facts in PROVIDERS.items() if facts.is_numbered)], "or")
        near = " Did you mean 'cuda'?" if str(text).lower().startswith("gpu") else did_you_mean(str(text), PROVIDERS)
        raise PlanError(f"{text!r} is not a device: write {forms}.{near}")
    return Device(match.group(1), int(match.group(2) or 0))
