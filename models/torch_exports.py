"""Networks nobody here wrote as ONNX: PyTorch modules, exported with a dynamic batch."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import memonger
from models.torch_networks import GPT, initialized

TOKENS = 1000  # tokens lie below it: no vocabulary here is smaller


class ConvNeXt(nn.Module):
    """A small ConvNeXt (Liu et al. 2022): depthwise 7×7 convolutions, layer normalization, inverted bottlenecks."""

    def __init__(self, widths: tuple[int, ...] = (48, 96, 192, 384), depths: tuple[int, ...] = (2, 2, 4, 2)) -> None:
        super().__init__()
        stages: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, stride=4)]
        for index, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            stages += [_ConvNeXtBlock(width) for _ in range(depth)]
            if index + 1 < len(widths):
                stages.append(nn.Conv2d(width, widths[index + 1], 2, stride=2))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(widths[-1], 1000)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """``[batch, 3, 224, 224]`` → logits ``[batch, 1000]``."""
        return self.head(self.stages(image).mean((2, 3)))


class _ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + self.down(nn.functional.gelu(self.up(y))).permute(0, 3, 1, 2)


class Encoder(nn.Module):
    """A BERT-like encoder: PyTorch's own TransformerEncoder, 6 layers of 384, over 128 tokens."""

    def __init__(self, vocabulary: int = 8000, width: int = 384, layers: int = 6, length: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``[batch, 128]`` int64 → ``[batch, 128, 384]``."""
        return self.encoder(self.tokens(tokens) + self.positions)


class Detector(nn.Module):
    """A feature pyramid (Lin et al. 2017) over a plain backbone: values that live long, and several outputs."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 256)) -> None:
        super().__init__()
        inputs = (3, *widths[:-1])
        self.down = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(a, b, 3, stride=2, padding=1), nn.BatchNorm2d(b), nn.SiLU(),
                nn.Conv2d(b, b, 3, padding=1), nn.BatchNorm2d(b), nn.SiLU(),
            )
            for a, b in zip(inputs, widths, strict=True)
        )  # fmt: skip
        self.side = nn.ModuleList(nn.Conv2d(width, 64, 1) for width in widths)
        self.heads = nn.ModuleList(nn.Conv2d(64, 24, 3, padding=1) for _ in widths)

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """``[batch, 3, 256, 256]`` → a map ``[batch, 24, h, h]`` for each of four levels."""
        levels = []
        for stage in self.down:
            image = stage(image)
            levels.append(image)
        top = self.side[-1](levels[-1])
        maps = [self.heads[-1](top)]
        for index in range(len(levels) - 2, -1, -1):
            top = nn.functional.interpolate(top, scale_factor=2.0, mode="nearest") + self.side[index](levels[index])
            maps.append(self.heads[index](top))
        return tuple(maps)


class SuperResolution(nn.Module):
    """Residual blocks of 64 channels at 270 × 480 without normalization, then twice as large twice (EDSR, 2017)."""

    def __init__(self, width: int = 64, blocks: int = 16) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, width, 3, padding=1)
        pairs = ((nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)) for _ in range(blocks))
        self.blocks = nn.ModuleList(nn.Sequential(a, nn.ReLU(), b) for a, b in pairs)
        twice = ((nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2)) for _ in range(2))
        self.tail = nn.Sequential(*(layer for each in twice for layer in each), nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """``[batch, 3, 270, 480]`` → ``[batch, 3, 1080, 1920]``."""
        x = first = self.head(image)
        for block in self.blocks:
            x = x + block(x)
        return self.tail(x + first)


class Denoiser(nn.Module):
    """Convolutions of 64 channels at one size, and the noise taken from the image (DnCNN, Zhang et al. 2017)."""

    def __init__(self, width: int = 64, depth: int = 17) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU()]
        for _ in range(depth - 2):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """``[batch, 3, 216, 384]`` → the same."""
        return image - self.layers(image)


class Segmenter(nn.Module):
    """A strided backbone, dilated convolutions side by side with a global pool, and masks as large as the image.

    After DeepLabv3 (Chen et al. 2017), at an eighth of the image.
    """

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128), classes: int = 21) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        for a, b in zip((3, *widths), widths, strict=False):
            stages += [nn.Conv2d(a, b, 3, stride=2, padding=1), nn.BatchNorm2d(b), nn.ReLU()]
            stages += [nn.Conv2d(b, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()]
        self.backbone, last = nn.Sequential(*stages), widths[-1]
        self.wide = nn.ModuleList(nn.Conv2d(last, 64, 3, padding=rate, dilation=rate) for rate in (1, 2, 4))
        self.pooled, self.joined = nn.Conv2d(last, 64, 1), nn.Conv2d(4 * 64, 64, 1)
        self.head = nn.Conv2d(64, classes, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """``[batch, 3, 512, 512]`` → classes ``[batch, 512, 512]``."""
        x = self.backbone(image)
        pooled = self.pooled(x.mean((2, 3), keepdim=True)).relu().expand(-1, -1, *x.shape[2:])
        x = torch.cat([*(each(x).relu() for each in self.wide), pooled], 1)
        scores = self.head(self.joined(x).relu())
        return nn.functional.interpolate(scores, scale_factor=8.0, mode="bilinear").argmax(1)


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(32, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1))
        self.second = nn.Sequential(nn.GroupNorm(32, outputs), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1))
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shortcut(x) + self.second(self.first(x))


class ImageDecoder(nn.Module):
    """The decoder of a latent diffusion model (Rombach et al. 2022) at a quarter of its width."""

    def __init__(self, widths: tuple[int, ...] = (128, 128, 64, 32)) -> None:
        super().__init__()
        top = widths[0]
        self.head, self.before, self.after = nn.Conv2d(4, top, 3, padding=1), _Residual(top, top), _Residual(top, top)
        self.norm, self.attention = nn.GroupNorm(32, top), nn.MultiheadAttention(top, 1, batch_first=True)
        stages: list[nn.Module] = []
        for inputs, outputs in zip((top, *widths), widths, strict=False):
            stages += [_Residual(inputs, outputs), _Residual(outputs, outputs), _Residual(outputs, outputs)]
            stages += [nn.Upsample(scale_factor=2.0), nn.Conv2d(outputs, outputs, 3, padding=1)]
        last = widths[-1]
        self.stages = nn.Sequential(*stages[:-2], nn.GroupNorm(32, last), nn.SiLU(), nn.Conv2d(last, 3, 3, padding=1))

    def forward(self, latent: torch.Tensor) -> torch.Tensor:
        """``[batch, 4, 64, 64]`` → ``[batch, 3, 512, 512]``."""
        x = self.before(self.head(latent))
        pixels = self.norm(x).flatten(2).transpose(1, 2)
        x = x + self.attention(pixels, pixels, pixels, need_weights=False)[0].transpose(1, 2).reshape(x.shape)
        return self.stages(self.after(x))


EXPORTS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "torch convnext": (ConvNeXt, lambda batch: torch.randn(batch, 3, 224, 224)),
    "torch encoder": (Encoder, lambda batch: torch.randint(0, 8000, (batch, 128))),
    "torch pyramid": (Detector, lambda batch: torch.randn(batch, 3, 256, 256)),
    "super-resolution": (SuperResolution, lambda batch: torch.randn(batch, 3, 270, 480)),
    "image decoder": (ImageDecoder, lambda batch: torch.randn(batch, 4, 64, 64)),
}

IMAGES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], torch.Tensor]]] = {
    "denoiser": (Denoiser, lambda batch: torch.randn(batch, 3, 216, 384)),
    "segmenter": (Segmenter, lambda batch: torch.randn(batch, 3, 512, 512)),
    "detector": (Detector, lambda batch: torch.randn(batch, 3, 640, 640)),
}
"""More networks of which one image takes much, here of a small one."""


def export(name: str, path: Path, pixels: tuple[int, int] | None = None) -> None:
    """Write a network as ONNX with seeded weights; its first dimension is ``batch``.

    Args:
        name: Which.
        path: Where.
        pixels: Height and width of its images, where these are to be others.
    """
    make, example = {**EXPORTS, **IMAGES}[name]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own deprecations
        module, x = make().eval(), example(2)  # in this order, as weights follow from the seed
        x = x if pixels is None else torch.randn(*x.shape[:2], *pixels)
        shapes = ({0: torch.export.Dim("batch")},)
        torch.onnx.export(module, (x,), str(path), dynamo=True, dynamic_shapes=shapes, verbose=False)


def export_module(module: nn.Module, example: tuple[torch.Tensor, ...], path: Path, **names: Any) -> None:
    """Write a module with a dynamic batch, by `memonger.from_torch`, which is told these ``names``."""
    # The strides of other kernels of attention aren't those of the exporter's decomposition: it refuses Swin's views.
    with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
        warnings.simplefilter("ignore")  # the exporter's own deprecations
        ir.save(memonger.from_torch(module, example, dynamic_batch=True, **names).ir, path)


def hub(builder: str, shape: tuple[int, ...], **options: Any) -> Callable[[Path], None]:
    """Writes a network of `models.torch_networks` for samples of a shape: images, or texts where it has one size."""

    def write(path: Path) -> None:
        torch.manual_seed(0)
        x = torch.randint(0, TOKENS, (2, *shape)) if len(shape) == 1 else torch.randn(2, *shape)
        export_module(initialized(builder, x, **options).eval(), (x,), path)

    return write


class _Output(nn.Module):
    """A network of transformers' that gives one of its outputs alone."""

    def __init__(self, network: nn.Module, name: str) -> None:
        super().__init__()
        self.network, self.name = network, name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)[self.name]


def t5_encoder(path: Path) -> None:
    """T5's encoder (Raffel et al. 2020) as transformers has it: 4 layers of 512 over 128 tokens."""
    import transformers

    torch.manual_seed(0)
    network = transformers.T5EncoderModel(transformers.T5Config(num_layers=4, vocab_size=8192))
    export_module(_Output(network, "last_hidden_state").eval(), (torch.randint(0, TOKENS, (2, 128)),), path)


def segformer(path: Path) -> None:
    """SegFormer-B0 (Xie et al. 2021) as transformers has it, for 19 classes and images of 1,024 × 1,024."""
    import transformers

    torch.manual_seed(0)
    network = transformers.SegformerForSemanticSegmentation(transformers.SegformerConfig(num_labels=19))
    export_module(_Output(network, "logits").eval(), (torch.randn(2, 3, 1024, 1024),), path)


def image_encoder(path: Path) -> None:
    """The image encoder of Segment Anything (Kirillov et al. 2023) as transformers has it, for images of 1,024 × 1,024.

    Half as wide as its smallest, and of 4 layers: two in windows, two over the whole image.
    """
    import transformers

    torch.manual_seed(0)
    config = transformers.SamVisionConfig(
        hidden_size=384, mlp_dim=1536, num_hidden_layers=4, num_attention_heads=6, global_attn_indexes=[1, 3]
    )
    network = transformers.SamVisionModel(config)
    export_module(_Output(network, "last_hidden_state").eval(), (torch.randn(2, 3, 1024, 1024),), path)


class _Scores(nn.Module):
    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.network = GPT(768, num_layers, 12, 50257, 1024)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.network(tokens).unflatten(0, (-1, 1024))
        return torch.log_softmax(logits, -1).gather(-1, labels[..., None])[..., 0]


def gpt_scores(path: Path, num_layers: int = 4) -> None:
    """GPT-2 that scores labels: layers of 768, 1,024 tokens and 50,257 words; one number for each token."""
    torch.manual_seed(0)
    tokens, labels = (torch.randint(0, TOKENS, (2, 1024)) for _ in range(2))
    export_module(_Scores(num_layers).eval(), (tokens, labels), path)
