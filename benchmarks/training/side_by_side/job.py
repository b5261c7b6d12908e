"""What a measuring process is told."""

import ctypes
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RATE, MOMENTUM = 0.01, 0.9
WARM, STEPS = 2, 2  # steps before memory is measured, and while it is
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 60)}


@dataclass(frozen=True, slots=True)
class Job:
    """One contestant on one network.

    Attributes:
        library: See `contestants.Contestant`.
        mode: Likewise.
        network: Name of the network.
        options: What differs from the network's defaults.
        device: ``cpu`` or ``cuda:N``.
        inputs: An .npz of inputs and labels.
        weights: The network's weights, PyTorch's file.
        model: A planned file for memonger.
        results: Where to write losses, an .npz.
        weight_bytes: Of weights and running statistics.
        state_bytes: Of momentum.
        threads: Threads within a node.
        cap: Bytes PyTorch may allocate on a GPU; 0: all there are.
        tf32: Whether products of float32 may be computed in TF32.
        tuned: Whether PyTorch tries cuDNN's algorithms (``cudnn.benchmark``).
        share: See `contestants.Contestant`.
    """

    library: str
    mode: str
    network: str
    device: str
    inputs: str
    weights: str
    model: str
    results: str
    weight_bytes: int
    state_bytes: int
    threads: int
    cap: int = 0
    tf32: bool = False
    tuned: bool = False
    share: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cuda(self) -> bool:
        """Whether it runs on a GPU."""
        return self.device != "cpu"

    @property
    def index(self) -> int:
        """The GPU's number."""
        return int(self.device.partition(":")[2] or 0)

    def save(self, path: Path) -> None:
        """Write it for the process."""
        path.write_text(json.dumps(asdict(self)))


def load_cuda_libraries() -> None:
    """Let onnxruntime find CUDA's libraries: PyTorch, where it is installed, loads those it brings along.

    To be called before onnxruntime is imported. Makes no CUDA context. Where there is no driver nothing can use them.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
        import torch  # noqa: F401
    except (OSError, ImportError):
        return
