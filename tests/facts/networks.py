"""The networks of models/ that checks load: one of each family, and training steps of several."""

from collections.abc import Callable, Iterator
from pathlib import Path

import onnx_ir as ir

import memonger
import models

Save = Callable[[Path], str]
"""Writes the model into a folder and returns its path."""

INFERENCE: dict[str, dict[str, object]] = {
    "alexnet": {},
    "vgg11": {"image": 64},
    "googlenet": {},
    "resnet50": {},
    "resnet110": {},
    "densenet121": {},
    "densenet_bc100": {},
    "mobilenet_v2": {},
    "lstm": {},
    "unet": {"image": 64},
    "gpt": {},
    "vit": {},
}
TRAINING: dict[str, dict[str, object]] = {
    "googlenet": {"image": 64},
    "resnet50": {"image": 64},
    "densenet_bc100": {},
    "mobilenet_v2": {"image": 64},
    "unet": {"image": 32},
    "lstm": {},
    "gpt": {},
    "vit": {},
}
FROZEN = " with given statistics"
"""After a name: the step of the inference form, in which BatchNormalization doesn't train."""
ADAM = ("gpt", "lstm", "vit")


def inference(names: Iterator[str] | None = None) -> Iterator[tuple[str, Save]]:
    """(name, writer) of each family's inference form at batch 1."""
    for name in names or INFERENCE:
        yield name, lambda folder, name=name: _save(models.build_ir(name, **_known(name, INFERENCE[name])), folder)


def training(names: Iterator[str] | None = None) -> Iterator[tuple[str, Save]]:
    """(name, writer) of training steps with an optimizer, as memonger writes them, at batch 2."""
    frozen = (f"{name}{FROZEN}" for name in ("resnet50", "densenet_bc100", "mobilenet_v2"))
    for name in names or (*TRAINING, *frozen):
        yield name, lambda folder, name=name: _save(training_step(name), folder)


def training_step(name: str, batch: int = 2) -> ir.Model:
    """A network's whole training step: forward, loss, backward, update."""
    network, trains = name.removesuffix(FROZEN), not name.endswith(FROZEN)
    model = models.build_ir(network, batch=batch, training=trains, **_known(network, TRAINING[network]))
    optimizer = memonger.AdamW(lr=1e-3) if network in ADAM else memonger.SGD(lr=0.1, momentum=0.9)
    step = memonger.differentiate(model, loss="loss" if trains else "softmax_cross_entropy", optimizer=optimizer)
    return memonger.search_plan(step, device="none", strategy="none").model


def _known(name: str, settings: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in settings.items() if key in models.options(name)}


def _save(model: ir.Model, folder: Path) -> str:
    path = folder / "model.onnx"
    ir.save(model, path)
    return str(path)
