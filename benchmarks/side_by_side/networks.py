"""The rows: networks, and the sizes they are measured at on a GPU and on a CPU; PyTorch is imported to build one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Size:
    """A network as it is measured on one kind of device.

    Attributes:
        batch: Samples of a training step, and of a run in inference.
        shape: Of one sample: channels, height and width; or words of a text.
        options: What differs from the builder's defaults.
    """

    batch: int
    shape: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Network:
    """A row.

    Attributes:
        data: ``images`` with a class each, ``masks`` (images with a class for each pixel), or ``texts`` (words with the
            class of each).
        classes: Labels, and the words of texts, lie below it.
        sizes: By kind of device.
    """

    data: str
    classes: int
    sizes: Mapping[str, Size]


# On a CPU a step has to end within seconds: batches and images are smaller, GPT has 6 blocks of width 384 instead
# of GPT-2 small's 12 of 768, and the LSTM a quarter of the width and an eighth of the length.
NETWORKS: Mapping[str, Network] = {
    "resnet18": Network("images", 1000, {"cuda": Size(64, (3, 224, 224)), "cpu": Size(8, (3, 192, 192))}),
    "resnet50": Network("images", 1000, {"cuda": Size(64, (3, 224, 224)), "cpu": Size(4, (3, 192, 192))}),
    "resnet200": Network("images", 1000, {"cuda": Size(32, (3, 224, 224)), "cpu": Size(2, (3, 128, 128))}),
    "densenet121": Network("images", 1000, {"cuda": Size(64, (3, 224, 224)), "cpu": Size(4, (3, 160, 160))}),
    "densenet_bc100": Network("images", 10, {"cuda": Size(64, (3, 32, 32)), "cpu": Size(16, (3, 32, 32))}),
    "mobilenet_v2": Network("images", 1000, {"cuda": Size(64, (3, 224, 224)), "cpu": Size(8, (3, 160, 160))}),
    "unet": Network("masks", 2, {"cuda": Size(8, (1, 512, 512)), "cpu": Size(1, (1, 160, 160))}),
    "gpt": Network(
        "texts",
        1000,
        {
            "cuda": Size(8, (1024,), {"width": 768, "depth": 12, "heads": 12, "words": 50257, "length": 1024}),
            "cpu": Size(2, (256,)),
        },
    ),
    "lstm": Network("texts", 1000, {"cuda": Size(32, (256,), {"width": 1024, "words": 10000}), "cpu": Size(16, (32,))}),
}


PEERS = tuple(name for name in NETWORKS if name != "resnet18")
"""Networks that `benchmarks.peers` and `benchmarks.gpu` measure where none are named."""


def size_of(name: str, device: str) -> Size:
    """The size of a network on a device (``cpu``, ``cuda:0``)."""
    return NETWORKS[name].sizes[device.partition(":")[0]]


def data(network: Network, size: Size, batch: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Seeded inputs ``x`` and ``labels`` of a batch."""
    rng, shape = np.random.default_rng(seed), (batch, *size.shape)
    if network.data == "texts":
        return {
            "x": rng.integers(0, network.classes, shape),
            "labels": rng.integers(0, network.classes, np.prod(shape)),
        }
    labelled = (batch, *size.shape[1:]) if network.data == "masks" else (batch,)
    return {
        "x": rng.standard_normal(shape, dtype=np.float32),
        "labels": rng.integers(0, network.classes, labelled),
    }


def build(name: str, options: Mapping[str, Any]) -> "torch.nn.Module":
    """The network in PyTorch, with whatever weights."""
    from benchmarks.torch_models import BUILDERS

    return BUILDERS[name](**options)
