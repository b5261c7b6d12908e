"""The rows: networks, and the sizes they are measured at on a GPU and on a CPU; PyTorch is imported to build one."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Size:
    """A network as it is measured on one kind of device.

    Attributes:
        batch: Samples of a training step, and of a run in inference; further rows have multiples of it.
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


def _images(batch: int, pixels: int, options: Mapping[str, Any] | None = None, cuda: int = 64) -> Network:
    """Of 1,000 classes: ``batch`` images of ``pixels`` on a CPU, ``cuda`` of 224 on a GPU."""
    sizes = {"cuda": Size(cuda, (3, 224, 224)), "cpu": Size(batch, (3, pixels, pixels), options or {})}
    return Network("images", 1000, sizes)


_GPT2_SMALL = {"width": 768, "depth": 12, "heads": 12, "words": 50257, "length": 1024}
_SMALL_BERT = {
    "vocab_size": 8192, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024,
}  # fmt: skip
_SMALL_LLAMA = {
    "vocab_size": 8192, "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 2,
    "intermediate_size": 1024,
}  # fmt: skip
_LLAMA_160M = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}

# On a CPU a step has to end within seconds: batches, images and networks of texts are smaller. The GPT has 6 blocks of
# width 384 instead of GPT-2 small's 12 of 768, BERT 4 layers of 256 instead of BERT-base's 12 of 768, the Llama 6 of
# 384, and the LSTM a quarter of the width and an eighth of the length. Swin's windows have to divide its images.
NETWORKS: Mapping[str, Network] = {
    "resnet50": _images(4, 192),
    "resnet200": _images(2, 128, cuda=32),
    "densenet121": _images(4, 160),
    "densenet_bc100": Network("images", 10, {"cuda": Size(64, (3, 32, 32)), "cpu": Size(16, (3, 32, 32))}),
    "mobilenet_v2": _images(8, 160),
    "unet": Network("masks", 2, {"cuda": Size(8, (1, 512, 512)), "cpu": Size(1, (1, 160, 160))}),
    "gpt": Network("texts", 1000, {"cuda": Size(8, (1024,), _GPT2_SMALL), "cpu": Size(2, (256,))}),
    "lstm": Network("texts", 1000, {"cuda": Size(32, (256,), {"width": 1024, "words": 10000}), "cpu": Size(16, (32,))}),
    "convnext_tiny": _images(4, 64),
    "swin_tiny": _images(4, 128, {"image_size": 128, "window_size": 4}),
    "resnext50": _images(4, 96),
    "efficientnet_b0": _images(4, 128),
    "bert": Network("texts", 1000, {"cuda": Size(16, (512,)), "cpu": Size(4, (128,), _SMALL_BERT)}),
    "llama": Network("texts", 1000, {"cuda": Size(8, (1024,), _LLAMA_160M), "cpu": Size(4, (128,), _SMALL_LLAMA)}),
}


def size_of(name: str, device: str, batch: int = 0) -> Size:
    """The size of a network on a device (``cpu``, ``cuda:0``), at its own batch where none is given."""
    size = NETWORKS[name].sizes[device.partition(":")[0]]
    return replace(size, batch=batch or size.batch)


def data(network: Network, size: Size, batch: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Seeded inputs ``x`` and ``labels`` of a batch."""
    rng, shape = np.random.default_rng(seed), (batch, *size.shape)
    if network.data == "texts":
        return {
            "x": rng.integers(0, network.classes, shape),
            "labels": rng.integers(0, network.classes, np.prod(shape)),
        }
    labelled = (batch, *size.shape[1:]) if network.data == "masks" else (batch,)
    return {"x": rng.standard_normal(shape, dtype=np.float32), "labels": rng.integers(0, network.classes, labelled)}


def build(name: str, options: Mapping[str, Any]) -> "torch.nn.Module":
    """The network in PyTorch, with whatever weights."""
    from models.torch_networks import BUILDERS

    return BUILDERS[name](**options)
