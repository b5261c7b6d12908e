"""Networks whose inputs change their shape from run to run, exported with symbolic dimensions, and the shapes."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from models.torch_networks import UNet, narrow_mobilenet
from models.torch_readers import WORDS, Hub, Reader, Vocoder

Dim = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Network:
    """A module, its inputs as the names of their dimensions (or numbers), and the sizes these may have.

    Attributes:
        words: What it is.
        make: Builds the module.
        inputs: Of each input, by name, its dimensions.
        sizes: Of each dimension the smallest size, the largest and the step.
        is_text: Whether inputs are numbers of words: they are ones and below `WORDS`.
        is_traced: Whether PyTorch's older exporter writes it: the newer one writes an LSTM for one length.
    """

    words: str
    make: Callable[[], nn.Module]
    inputs: Mapping[str, tuple[str | int, ...]]
    sizes: Mapping[str, Dim]
    is_text: bool = False
    is_traced: bool = False

    def feeds(self, sizes: Mapping[str, int], seed: int) -> dict[str, np.ndarray]:
        """Inputs of these sizes; another number gives others."""
        rng, feeds = np.random.default_rng(seed), {}
        for name, dims in self.inputs.items():
            shape = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in dims)
            if self.is_text:
                feeds[name] = np.ones(shape, np.int64) if name == "mask" else rng.integers(0, WORDS, shape)
            else:
                feeds[name] = np.resize(np.roll(_noise(), seed), shape)
        return feeds

    def shapes(self, count: int, seed: int = 0) -> list[dict[str, int]]:
        """Sizes at random, the largest first: what a run needs at most is there from the beginning on.

        They are even on a logarithmic scale, as short requests are more frequent than long ones.
        """
        rng, found = np.random.default_rng(seed), [{name: most for name, (_, most, _) in self.sizes.items()}]
        for _ in range(count - 1):
            drawn = {name: float(np.exp(rng.uniform(np.log(a), np.log(b)))) for name, (a, b, _) in self.sizes.items()}
            found.append({name: a + s * round((drawn[name] - a) / s) for name, (a, _, s) in self.sizes.items()})
        return found

    def export(self, path: Path) -> None:
        """Write the module as a model with symbolic dimensions."""
        torch.manual_seed(0)
        module = self.make().eval()
        example = {n: a + s * min(2, (b - a) // s) for n, (a, b, s) in self.sizes.items()}
        arrays = self.feeds(example, 0)
        if self.is_traced:
            open_axes = {
                name: {a: d for a, d in enumerate(each) if isinstance(d, str)} for name, each in self.inputs.items()
            }
            _trace(module, tuple(map(torch.from_numpy, arrays.values())), path, open_axes)
            return
        dims = {name: _dimension(name, most, step) for name, (_, most, step) in self.sizes.items()}
        dynamic = tuple(
            {axis: dims[dim] for axis, dim in enumerate(each) if isinstance(dim, str)} for each in self.inputs.values()
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                module, tuple(torch.from_numpy(array) for array in arrays.values()), dynamic_shapes=dynamic,
                input_names=list(self.inputs), output_names=["y"], dynamo=True, opset_version=20, verbose=False,
            )  # fmt: skip
        assert program is not None
        program.save(path)
        _name_dimensions(path, self.inputs)


@cache
def _noise() -> np.ndarray:
    """Normal numbers: enough for inputs to differ, and made once, as large inputs take longer than small networks."""
    return np.random.default_rng(0).standard_normal(1 << 16, np.float32)


def _trace(
    module: nn.Module, inputs: tuple[Tensor, ...], path: Path, open_axes: Mapping[str, Mapping[int, str]]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, inputs, str(path), input_names=list(open_axes), output_names=["y"], dynamic_axes=dict(open_axes),
            opset_version=17, dynamo=False,
        )  # fmt: skip


def _dimension(name: str, most: int, step: int) -> Any:
    return torch.export.Dim(name, max=most) if step == 1 else step * torch.export.Dim(f"{name}_0", max=most // step)


def _name_dimensions(path: Path, inputs: Mapping[str, tuple[str | int, ...]]) -> None:
    """Give the inputs' open dimensions their plain names: an exporter writes ``32*side_32``."""
    import onnx

    model = onnx.load(path)
    for value in model.graph.input:
        for dim, name in zip(value.type.tensor_type.shape.dim, inputs[value.name], strict=True):
            if isinstance(name, str):
                dim.dim_param = name
    del model.graph.value_info[:]
    onnx.save(model, path)


_IMAGE: Mapping[str, Dim] = {"batch": (1, 16, 1), "side": (64, 512, 32)}
_TEXT: Mapping[str, Dim] = {"batch": (1, 16, 1), "seq": (1, 512, 1)}

NETWORKS: Mapping[str, Network] = {
    "mobilenet_v2": Network(
        "MobileNet-v2 of width 0.35", partial(narrow_mobilenet, 0.35), {"x": ("batch", 3, "side", "side")}, _IMAGE
    ),
    "unet": Network(
        "U-Net, a sixteenth as wide as the paper's", partial(UNet, width=4), {"x": ("batch", 1, "side", "side")}, _IMAGE
    ),
    "bert": Network(
        "BERT-tiny, 2 layers of 128", partial(Hub, "bert"), {"ids": ("batch", "seq"), "mask": ("batch", "seq")}, _TEXT,
        is_text=True,
    ),
    "gpt2": Network("GPT-2 of 2 layers of 128", partial(Hub, "gpt2"), {"ids": ("batch", "seq")}, _TEXT, is_text=True),
    "ocr": Network(
        "a text reader: 4 convolutions, 2 bidirectional LSTM layers of 128", Reader,
        {"x": ("batch", 1, 32, "width")}, {"batch": (1, 16, 1), "width": (64, 512, 32)}, is_traced=True,
    ),
    "vocoder": Network(
        "HiFi-GAN, small: 1-D convolutions from spectra to sound", partial(Vocoder, width=64),
        {"x": ("batch", 80, "frames")}, {"batch": (1, 16, 1), "frames": (1, 512, 1)},
    ),
}  # fmt: skip
"""By name."""

LARGER: Mapping[str, Network] = {
    "bert_small": Network(
        "BERT-small, 4 layers of 512", partial(Hub, "bert", 4, 512),
        {"ids": ("batch", "seq"), "mask": ("batch", "seq")}, _TEXT, is_text=True,
    ),
    "gpt2_small": Network(
        "GPT-2 of 4 layers of 512", partial(Hub, "gpt2", 4, 512), {"ids": ("batch", "seq")}, _TEXT, is_text=True
    ),
}  # fmt: skip
"""Of which latency alone is measured, by name."""

_DEEP_IMAGE: Mapping[str, Dim] = {"batch": (1, 4, 1), "side": (64, 256, 32)}
_DEEP_TEXT: Mapping[str, Dim] = {"batch": (1, 4, 1), "seq": (1, 128, 1)}

DEEP: Mapping[str, Network] = {
    "mobilenet_v2": Network(
        "MobileNet-v2 of width 0.35, each stage 15 times as deep", partial(narrow_mobilenet, 0.35, 15),
        {"x": ("batch", 3, "side", "side")}, _DEEP_IMAGE,
    ),
    "bert": Network(
        "BERT of 24 layers of 128", partial(Hub, "bert", 24), {"ids": ("batch", "seq"), "mask": ("batch", "seq")},
        _DEEP_TEXT, is_text=True,
    ),
}  # fmt: skip
"""Networks of about a thousand nodes, by name."""
