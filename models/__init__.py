"""Builders of reference networks: ONNX models with seeded weights and `mirror_stage` marks.

    model = models.build("resnet50", batch=32, image=224, training=False, seed=0)

The inference form outputs `logits`. The training form takes `labels` too and outputs `loss`, then the running
statistics of its normalizations; gradients are not in it. Its marks are `metadata_props["mirror_stage"]` on nodes.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import onnx
import onnx_ir as ir

from models.alexnet import alexnet
from models.bert import bert
from models.builder import IR_VERSION, OPSET, Builder, static_dim
from models.densenet import densenet
from models.googlenet import googlenet
from models.gpt import gpt
from models.lstm import lstm
from models.mobilenet import mobilenet_v2
from models.resnet import resnet
from models.resnet_cifar import preact_resnet_cifar, resnet_cifar
from models.unet import unet
from models.vgg import vgg
from models.vit import vit

__all__ = ["IR_VERSION", "NAMES", "OPSET", "build", "build_ir", "options", "parameter_count"]


@dataclass(frozen=True, slots=True)
class _Network:
    """A family's writer and what sets this member apart from the family's defaults."""

    write: Callable[..., None]
    settings: Mapping[str, object] = field(default_factory=dict)


_NETWORKS: Mapping[str, _Network] = {
    "alexnet": _Network(alexnet),
    "vgg11": _Network(vgg, {"stages": (1, 1, 2, 2, 2)}),
    "vgg16": _Network(vgg, {"stages": (2, 2, 3, 3, 3)}),
    "vgg19": _Network(vgg, {"stages": (2, 2, 4, 4, 4)}),
    "googlenet": _Network(googlenet),
    "resnet18": _Network(resnet, {"units": (2, 2, 2, 2), "bottleneck": False}),
    "resnet34": _Network(resnet, {"units": (3, 4, 6, 3), "bottleneck": False}),
    "resnet50": _Network(resnet, {"units": (3, 4, 6, 3), "bottleneck": True}),
    "resnet101": _Network(resnet, {"units": (3, 4, 23, 3), "bottleneck": True}),
    "resnet152": _Network(resnet, {"units": (3, 8, 36, 3), "bottleneck": True}),
    "resnet200": _Network(resnet, {"units": (3, 24, 36, 3), "bottleneck": True}),
    "resnet110": _Network(resnet_cifar, {"depth": 110}),
    "resnet1001": _Network(preact_resnet_cifar, {"depth": 1001}),
    "densenet121": _Network(densenet, {"blocks": (6, 12, 24, 16), "growth": 32}),
    "densenet201": _Network(densenet, {"blocks": (6, 12, 48, 32), "growth": 32}),
    "densenet_bc100": _Network(
        densenet, {"blocks": (16, 16, 16), "growth": 12, "cifar": True, "image": 32, "classes": 10}
    ),
    "mobilenet_v2": _Network(mobilenet_v2),
    "lstm": _Network(lstm),
    "unet": _Network(unet),
    "gpt": _Network(gpt),
    "gpt2": _Network(gpt, {"num_layers": 12, "heads": 12, "width": 768, "seq_len": 1024, "vocabulary": 50257}),
    "bert_large": _Network(bert),
    "vit": _Network(vit),
    "vit_b16": _Network(vit, {"image": 224, "patch": 16, "num_layers": 12, "heads": 12, "width": 768, "classes": 1000}),
}

NAMES: tuple[str, ...] = tuple(_NETWORKS)
"""The networks `build` knows."""


def options(name: str) -> dict[str, object]:
    """Return the options of a network and their defaults.

    Raises:
        ValueError: if there is no such network.
    """
    if name not in _NETWORKS:
        raise ValueError(f"no network {name!r}; there are {', '.join(NAMES)}")
    network = _NETWORKS[name]
    signature = inspect.signature(network.write).parameters.values()
    defaults = {p.name: p.default for p in signature if p.kind is inspect.Parameter.KEYWORD_ONLY}
    return {**defaults, **network.settings}


def build(
    name: str, *, batch: int | None = 1, training: bool = False, seed: int = 0, **settings: object
) -> onnx.ModelProto:
    """Return a network as one ONNX message, weights drawn.

    Args:
        name: one of `NAMES`.
        batch: the batch's size, or None for the symbolic dimension "batch".
        training: whether to write the training form.
        seed: what weights and dropout masks derive from.
        settings: of `options(name)`, what shall differ from the default.

    Raises:
        ValueError: for an unknown name or option, or options that don't go together.
    """
    return ir.to_proto(build_ir(name, batch=batch, training=training, seed=seed, **settings))


def build_ir(
    name: str, *, batch: int | None = 1, training: bool = False, seed: int = 0, **settings: object
) -> ir.Model:
    """Return what `build` does, weights drawn anew whenever they are read: a large network costs no memory."""
    known = options(name)
    unknown = sorted(settings.keys() - known)
    if unknown:
        raise ValueError(f"{name} has no option {', '.join(unknown)}; it has {', '.join(known)}")
    if batch is not None and batch < 1:
        raise ValueError(f"a batch of {batch}; give a positive number, or None for a symbolic dimension")
    if seed < 0:
        raise ValueError(f"a seed of {seed}; give 0 or more")
    net = Builder(name, batch=batch, training=training, seed=seed)
    _NETWORKS[name].write(net, **{**known, **settings})
    return net.model()


def parameter_count(model: onnx.ModelProto | ir.Model) -> int:
    """Return the number of trainable parameters: float initializers without running statistics. Reads no weights."""
    graph = (ir.from_proto(model) if isinstance(model, onnx.ModelProto) else model).graph
    return sum(math.prod(_dims(value)) for value in graph.initializers.values() if _is_parameter(value))


def _is_parameter(value: ir.Value) -> bool:
    statistic = any(node.op_type == "BatchNormalization" and index in (3, 4) for node, index in value.uses())
    return value.dtype is not None and value.dtype.is_floating_point() and not statistic


def _dims(value: ir.Value) -> list[int]:
    return [static_dim(value, axis) for axis in range(len(value.shape or ()))]
