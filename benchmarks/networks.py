"""Networks that are measured: those of ``models/``, PyTorch modules exported with a dynamic batch, single images."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx

import models
from memonger.runtime.prepared import Input
from models import torch_exports
from models.torch_exports import TOKENS

Family = Literal["CNN", "transformer", "recurrent", "image", "whole image"]


@dataclass(frozen=True, slots=True)
class Network:
    """One network of the table.

    Attributes:
        family: The means of a family are compared with its aims.
        write: Writes its ONNX file, with a symbolic batch.
        options: Of the builder of a network of ``models/``, what differs from the default.
        batches: The only batches it is measured at; empty for all.
        is_long: Whether it reads 1,024 tokens: its mean has an aim of its own.
        is_kin: Whether another network that is measured has the same form: left out unless asked for by name.
    """

    family: Family
    write: Callable[..., None] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    batches: tuple[int, ...] = ()
    is_long: bool = False
    is_kin: bool = False


def write(name: str, path: Path, **options: object) -> None:
    """Write a network's ONNX file, with a symbolic batch; GPT-2's may have another ``num_layers``."""
    network = EVERY[name]
    if network.write is not None:
        network.write(path, **options)
        return
    onnx.save(models.build(name, batch=None, **{**network.options, **options}), path)


def random_inputs(inputs: Iterable[Input], seed: int = 0) -> dict[str, np.ndarray]:
    """Normal numbers, or tokens."""
    rng, feeds = np.random.default_rng(seed), {}
    for value in inputs:
        assert value.shape is not None
        assert value.dtype is not None
        floating = value.dtype.is_floating_point()
        array = rng.standard_normal(value.shape) if floating else rng.integers(0, TOKENS, value.shape)
        feeds[value.name] = array.astype(value.dtype.numpy())
    return feeds


def step(path: Path, **options: object) -> None:
    """GPT-2 in training form, with the loss as its output: 4 layers of 768, 1,024 tokens and 50,257 words."""
    onnx.save(models.build("gpt2", batch=None, training=True, **{"num_layers": 4, **options}), path)


_BERT = {"vocab_size": 8192, "num_hidden_layers": 4}
_LLAMA = {
    "vocab_size": 8192, "hidden_size": 768, "num_hidden_layers": 4, "num_attention_heads": 12,
    "num_key_value_heads": 4, "intermediate_size": 2048,
}  # fmt: skip

NETWORKS: dict[str, Network] = {
    "alexnet": Network("CNN"),
    "vgg11": Network("CNN", is_kin=True),
    "vgg16": Network("CNN"),
    "vgg19": Network("CNN", is_kin=True),
    "googlenet": Network("CNN"),
    "resnet18": Network("CNN"),
    "resnet34": Network("CNN", is_kin=True),
    "resnet50": Network("CNN"),
    "resnet101": Network("CNN", is_kin=True),
    "resnet152": Network("CNN", is_kin=True),
    "resnet200": Network("CNN", is_kin=True),
    "resnet110": Network("CNN"),
    "resnet1001": Network("CNN", is_kin=True),
    "densenet121": Network("CNN"),
    "densenet201": Network("CNN", is_kin=True),
    "densenet_bc100": Network("CNN"),
    "mobilenet_v2": Network("CNN"),
    "unet": Network("CNN", options={"image": 256}),
    "convnext_tiny": Network("CNN", torch_exports.hub("convnext_tiny", (3, 224, 224))),
    "efficientnet_b0": Network("CNN", torch_exports.hub("efficientnet_b0", (3, 224, 224))),
    "resnext50": Network("CNN", torch_exports.hub("resnext50", (3, 224, 224))),
    "pyramid": Network("CNN", lambda path: torch_exports.export("torch pyramid", path)),
    "lstm": Network("recurrent"),
    "vit": Network("transformer"),
    "vit_b16": Network("transformer"),
    "swin_tiny": Network("transformer", torch_exports.hub("swin_tiny", (3, 224, 224))),
    "gpt": Network("transformer"),
    "bert": Network("transformer", torch_exports.hub("bert", (128,), **_BERT)),
    "llama": Network("transformer", torch_exports.hub("llama", (256,), **_LLAMA)),
    "t5_encoder": Network("transformer", torch_exports.t5_encoder),
    "gpt2": Network("transformer", options={"num_layers": 4}, batches=(1, 4), is_long=True),
    "gpt2_step": Network("transformer", step, batches=(1, 4), is_long=True, is_kin=True),
    "gpt2_scores": Network("transformer", torch_exports.gpt_scores, batches=(1, 4), is_long=True),
}
"""Every network of ``models/`` (the U-Net for images of 256, GPT-2 with 4 of its 12 layers) and nine exports."""

_SQUARES = (
    ("unet", 512), ("unet", 1024), *itertools.product(("mobilenet_v2", "resnet50", "densenet121"), (224, 512, 1024)),
)  # fmt: skip
_PIXELS = {
    "super-resolution": (540, 960), "denoiser": (1080, 1920), "segmenter": (1024, 1024), "detector": (1280, 1280),
}  # fmt: skip


def _square(name: str, pixels: int, path: Path) -> None:
    onnx.save(models.build(name, batch=None, image=pixels), path)


IMAGES: dict[str, Network] = {
    "super-resolution": Network("image", partial(torch_exports.export, "super-resolution"), batches=(1,)),
    **{
        f"{n} {size[0]}": Network("image", partial(torch_exports.export, n, pixels=size), batches=(1,))
        for n, size in _PIXELS.items()
    },
    **{f"{n} {pixels}": Network("image", partial(_square, n, pixels), batches=(1,)) for n, pixels in _SQUARES},
    "image decoder": Network("whole image", partial(torch_exports.export, "image decoder"), batches=(1,)),
    "segformer 1024": Network("whole image", torch_exports.segformer, batches=(1,)),
    "image encoder 1024": Network("whole image", torch_exports.image_encoder, batches=(1,)),
}
"""Networks of single images, named with their height; those of "whole image" have nodes that read all of one: group
normalization and attention of an autoencoder's decoder, attention of a SegFormer and of a Segment Anything encoder."""

EVERY = NETWORKS | IMAGES

DEFAULT = tuple(name for name, network in NETWORKS.items() if not network.is_kin)
