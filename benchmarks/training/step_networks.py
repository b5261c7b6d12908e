"""The twelve networks of `training.torch_budgets`: what models/ has, and four that it doesn't have in that form."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from models.torch_networks import BUILDERS, Transformers


class DenseLayer(nn.Module):
    """As Pleiss et al. 2017 wrote it; ``efficient``: what is in front of the first convolution's result runs again."""

    def __init__(self, width: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(4 * growth)
        self.conv1 = nn.Conv2d(width, 4 * growth, 1, bias=False)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)
        self.efficient = False

    def _bottleneck(self, *features: Tensor) -> Tensor:
        return self.conv1(self.norm1(torch.cat(features, 1)).relu())

    def forward(self, *features: Tensor) -> Tensor:
        if self.efficient and torch.is_grad_enabled():
            x = checkpoint(self._bottleneck, *features, use_reentrant=False)
        else:
            x = self._bottleneck(*features)
        return self.conv2(self.norm2(x).relu())


class DenseNet(nn.Module):
    """DenseNet-121, whose layers are given all features before them and join these themselves."""

    def __init__(self, blocks: Sequence[int] = (6, 12, 24, 16), growth: int = 32) -> None:
        super().__init__()
        width = 2 * growth
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        self.blocks, self.transitions = nn.ModuleList(), nn.ModuleList()
        for index, count in enumerate(blocks):
            self.blocks.append(nn.ModuleList(DenseLayer(width + growth * layer, growth) for layer in range(count)))
            width += growth * count
            after: list[nn.Module] = [nn.BatchNorm2d(width), nn.ReLU()]
            if index < len(blocks) - 1:
                after += [nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2)]
                width //= 2
            self.transitions.append(nn.Sequential(*after))
        self.classifier = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block, transition in zip(self.blocks, self.transitions, strict=True):
            features = [x]
            for layer in block:  # type: ignore[attr-defined]
                features.append(layer(*features))
            x = transition(torch.cat(features, 1))
        return self.classifier(functional.adaptive_avg_pool2d(x, 1).flatten(1))

    def checkpointed(self, x: Tensor) -> Tensor:
        """``efficient=True``."""
        for part in self.modules():
            if isinstance(part, DenseLayer):
                part.efficient = True
        return self(x)


def _act(hard: bool) -> nn.Module:
    return nn.Hardswish() if hard else nn.ReLU()


class Squeezed(nn.Module):
    """Channels weighed by what all pixels have together."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weigh = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, width // 4, 1), nn.ReLU(), nn.Conv2d(width // 4, width, 1),
            nn.Hardsigmoid(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weigh(x)


class Inverted(nn.Module):
    """A unit of MobileNet-v3."""

    def __init__(
        self, inputs: int, kernel: int, inside: int, outputs: int, squeezes: bool, hard: bool, by: int
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(inputs, inside, 1, bias=False), nn.BatchNorm2d(inside), _act(hard)]
        layers += [nn.Conv2d(inside, inside, kernel, by, kernel // 2, groups=inside, bias=False)]
        layers += [nn.BatchNorm2d(inside), _act(hard), *([Squeezed(inside)] if squeezes else [])]
        self.layers = nn.Sequential(*layers, nn.Conv2d(inside, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        self.adds = by == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.adds else self.layers(x)


_V3 = (
    (3, 16, 16, 0, 0, 1), (3, 64, 24, 0, 0, 2), (3, 72, 24, 0, 0, 1), (5, 72, 40, 1, 0, 2), (5, 120, 40, 1, 0, 1),
    (5, 120, 40, 1, 0, 1), (3, 240, 80, 0, 1, 2), (3, 200, 80, 0, 1, 1), (3, 184, 80, 0, 1, 1), (3, 184, 80, 0, 1, 1),
    (3, 480, 112, 1, 1, 1), (3, 672, 112, 1, 1, 1), (5, 672, 160, 1, 1, 2), (5, 960, 160, 1, 1, 1),
    (5, 960, 160, 1, 1, 1),
)  # fmt: skip


class MobileNetV3(nn.Module):
    """MobileNet-v3 large (Howard et al. 2019), with its dropout of 0.2."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.Hardswish()]
        width = 16
        for kernel, inside, outputs, squeezes, hard, by in _V3:
            layers.append(Inverted(width, kernel, inside, outputs, bool(squeezes), bool(hard), by))
            width = outputs
        layers += [nn.Conv2d(width, 960, 1, bias=False), nn.BatchNorm2d(960), nn.Hardswish()]
        self.features = nn.Sequential(*layers)
        self.head = nn.Sequential(nn.Linear(960, 1280), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(1280, 1000))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(functional.adaptive_avg_pool2d(self.features(x), 1).flatten(1))

    def checkpointed(self, x: Tensor) -> Tensor:
        """`checkpoint_sequential` over the square root of the features' stages."""
        x = checkpoint_sequential(self.features, 5, x, use_reentrant=False)
        return self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))


class TimedResidual(nn.Module):
    """A block of a diffusion UNet: two convolutions, with the time step's embedding between them."""

    def __init__(self, inputs: int, outputs: int, embedded: int) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.GroupNorm(8, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1))
        self.time = nn.Linear(embedded, outputs)
        self.after = nn.Sequential(
            nn.GroupNorm(8, outputs), nn.SiLU(), nn.Dropout(0.1), nn.Conv2d(outputs, outputs, 3, padding=1)
        )
        self.beside = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.beside(x) + self.after(self.before(x) + self.time(time)[:, :, None, None])


class Attended(nn.Module):
    """Attention over all pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.GroupNorm(8, width),
            nn.Conv2d(width, 3 * width, 1),
            nn.Conv2d(width, width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).flatten(2).transpose(1, 2).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).flatten(2).transpose(1, 2).unflatten(2, x.shape[2:]))


class DiffusionUNet(nn.Module):
    """A small UNet of Ho et al. 2020: noise of an image at a step in time; dropout of 0.1; classes a pixel."""

    def __init__(self, width: int = 48, times: Sequence[int] = (1, 2, 2), classes: int = 3) -> None:
        super().__init__()
        embedded, widths = 4 * width, [width * each for each in times]
        self.time = nn.Sequential(nn.Linear(1, embedded), nn.SiLU(), nn.Linear(embedded, embedded))
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        skips, now = [width], width
        for level, each in enumerate(widths):
            for _ in range(2):
                self.down.append(TimedResidual(now, each, embedded))
                now = each
                skips.append(now)
            if level < len(widths) - 1:
                self.down.append(nn.Conv2d(now, now, 3, 2, 1))
                skips.append(now)
        self.middle = nn.ModuleList(
            [TimedResidual(now, now, embedded), Attended(now), TimedResidual(now, now, embedded)]
        )
        for level, each in reversed(list(enumerate(widths))):
            for _ in range(3):
                self.up.append(TimedResidual(now + skips.pop(), each, embedded))
                now = each
            if level:
                self.up.append(nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(now, now, 3, padding=1)))
        self.last = nn.Sequential(nn.GroupNorm(8, now), nn.SiLU(), nn.Conv2d(now, classes, 3, padding=1))

    def forward(self, x: Tensor, run: Callable[..., Tensor] | None = None) -> Tensor:
        run = run or (lambda part, *given: part(*given))
        time = self.time(torch.linspace(0, 1, len(x), device=x.device)[:, None])
        x = self.first(x)
        skips = [x]
        for part in self.down:
            x = run(part, x, time) if isinstance(part, TimedResidual) else part(x)
            skips.append(x)
        for part in self.middle:
            x = run(part, x, time) if isinstance(part, TimedResidual) else run(part, x)
        for part in self.up:
            x = run(part, torch.cat([x, skips.pop()], 1), time) if isinstance(part, TimedResidual) else part(x)
        return self.last(x)

    def checkpointed(self, x: Tensor) -> Tensor:
        """`forward` with every block a segment."""
        return self(x, partial(checkpoint, use_reentrant=False))


@dataclass(frozen=True, slots=True)
class Row:
    """A network, and the size that it is measured at.

    Attributes:
        build: Makes it.
        shape: Of its input: batch, and channels, height and width; or batch and words.
        classes: Labels lie below it; one for each image, pixel or word.
        by_pixel: Whether each pixel has a label.
        mkldnn: Whether that library runs it: of an LSTM it keeps a workspace of a size that it alone knows.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int = 1000
    by_pixel: bool = False
    mkldnn: bool = True


_TEXT = {"vocab_size": 8192, "num_hidden_layers": 4, "num_attention_heads": 4}
_VIT = partial(
    Transformers, "ViT", "ImageClassification", num_labels=1000, hidden_size=192, num_hidden_layers=12,
    num_attention_heads=3, intermediate_size=768, image_size=96, patch_size=8, hidden_dropout_prob=0.1,
    attention_probs_dropout_prob=0.1,
)  # fmt: skip

NETWORKS: Mapping[str, Row] = {
    "resnet50": Row(BUILDERS["resnet50"], (8, 3, 128, 128)),
    "densenet121": Row(DenseNet, (4, 3, 128, 128)),
    "mobilenet_v3": Row(MobileNetV3, (8, 3, 160, 160)),
    "convnext_tiny": Row(BUILDERS["convnext_tiny"], (8, 3, 96, 96)),
    "swin_tiny": Row(partial(BUILDERS["swin_tiny"], image_size=128, window_size=4), (4, 3, 128, 128)),
    "unet": Row(partial(BUILDERS["unet"], width=32), (2, 1, 160, 160), 2, True),
    "vit": Row(_VIT, (16, 3, 96, 96)),
    "bert": Row(
        partial(BUILDERS["bert"], hidden_size=256, intermediate_size=1024, hidden_dropout_prob=0.1,
                attention_probs_dropout_prob=0.1, **_TEXT), (8, 128),
    ),
    "gpt2": Row(partial(BUILDERS["gpt"], dropout=0.1), (4, 256)),
    "llama": Row(
        partial(BUILDERS["llama"], hidden_size=256, intermediate_size=704, num_key_value_heads=2, **_TEXT), (8, 128)
    ),
    "lstm": Row(BUILDERS["lstm"], (32, 48), mkldnn=False),
    "diffusion_unet": Row(DiffusionUNet, (8, 1, 48, 48), 3, True),
}  # fmt: skip


def inputs_of(row: Row) -> tuple[Tensor, Tensor]:
    """Seeded inputs and labels."""
    torch.manual_seed(7)
    if len(row.shape) == 2:
        return torch.randint(0, row.classes, row.shape), torch.randint(0, row.classes, (row.shape[0] * row.shape[1],))
    labelled = (row.shape[0], *row.shape[2:]) if row.by_pixel else row.shape[:1]
    return torch.randn(row.shape), torch.randint(0, row.classes, labelled)


class WithLoss(nn.Module):
    """A network and its loss, as one module."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.network(x), labels)


def apart(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest difference of gradients, over the largest of ``theirs``."""
    largest = max(float(one.abs().max()) for one in theirs)
    return max(float((one - other).abs().max()) for one, other in zip(mine, theirs, strict=True)) / largest
