"""What is measured, in which order, and how long it may take."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BATCHES = (1, 16, 64)
INFERENCE: Mapping[str, Mapping[str, Any]] = {
    "resnet50": {}, "gpt2": {"seq_len": 64}, "mobilenet_v2": {}, "vit_b16": {}, "densenet121": {},
    "unet": {"image": 256}, "lstm": {}, "googlenet": {},
}  # fmt: skip
"""Networks of models/ and what differs from their defaults."""
TINY: Mapping[str, Mapping[str, Any]] = {
    "resnet18": {"image": 32, "width": 0.125},
    "gpt": {"num_layers": 1, "width": 32, "seq_len": 16, "vocabulary": 50},
    "mobilenet_v2": {"image": 32, "width": 0.25},
}
"""Those of a rehearsal."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a stage's process is told.

    Attributes:
        device: ``cuda:N``.
        folder: Where models and plans go.
        rehearse: Whether networks are tiny and PyTorch runs on the CPU: nothing measured means anything then.
        torch: Whether PyTorch has to see the device.
        tf32: Whether products of float32 may be computed in TF32, on all sides.
        context: Bytes that a bare CUDA context takes by the driver's account.
        memory: Bytes that the largest batch has to fit.
    """

    device: str = "cuda:0"
    folder: str = ""
    rehearse: bool = False
    torch: bool = True
    tf32: bool = True
    context: int = 0
    memory: int = 12_000_000_000


@dataclass(frozen=True, slots=True)
class Stage:
    """One kind of row.

    Attributes:
        key: Its name, and its file's in this folder.
        title: What it is about.
        items: One row each, in order of worth.
        tiny: Items of a rehearsal.
        share: Seconds of ten minutes that it has before all stages have had theirs.
        each: Seconds that an item is expected to take.
        limit: Seconds after which an item is given up.
        needs: Bytes of free device memory that its largest item takes, about.
        torch: Whether it measures PyTorch, too.
    """

    key: str
    title: str
    items: tuple[str, ...]
    tiny: tuple[str, ...]
    share: float
    each: float
    limit: float
    needs: int = field(default=1 << 30)
    torch: bool = False

    def of(self, rehearse: bool) -> tuple[str, ...]:
        """Its items, for measuring or for a rehearsal."""
        return self.tiny if rehearse else self.items


FACTS = (
    "in-place", "bound", "special", "scratch", "repeat", "scatter", "times", "replay", "executions", "graph-allocation",
    "graph-ids", "graph-refusals", "graph-unbound", "order", "inference", "training", "any-order", "host", "allocator",
    "loading", "arena", "opsets", "operators",
)  # fmt: skip
STAGES = (
    Stage("sessions", "The tests of CUDA sessions and plans", ("runtime", "planning"), ("runtime",), 75, 35, 150),
    Stage("facts", "What docs/CUDA.md says of onnxruntime", FACTS, ("graph-unbound",), 65, 5, 90),
    Stage(
        "inference", "Inference beside stock onnxruntime",
        tuple(f"{name}:{batch}" for name in INFERENCE for batch in reversed(BATCHES)), ("gpt:2",),
        105, 7, 60, 16 << 30,
    ),
    Stage(
        "training", "Training steps beside PyTorch",
        ("resnet50", "gpt", "densenet121", "bert", "convnext_tiny", "unet"), ("densenet_bc100",),
        150, 120, 240, 24 << 30, torch=True,
    ),
    Stage(
        "steps", "PyTorch's own steps within budgets", ("resnet50", "bert", "densenet121"), ("mobilenet_v3",),
        40, 40, 100, 12 << 30, torch=True,
    ),
    Stage("slices", "A batch in slices", ("mobilenet_v2:16:4", "densenet121:16:4"), ("mobilenet_v2:4:2",), 20, 12, 60),
    Stage("windows", "Budgets below the weights", ("vit_b16:16", "gpt2:1"), ("resnet18:1",), 30, 15, 60),
    Stage("nccl", "One rank over NCCL", ("resnet18",), ("resnet18",), 25, 20, 60, torch=True),
    Stage("largest", "The largest batch", ("resnet50", "gpt"), ("densenet_bc100",), 70, 110, 240, 12 << 30, True),
)  # fmt: skip
"""In order of worth."""
BY_KEY = {stage.key: stage for stage in STAGES}
