"""Modules of many kinds for `benchmarks.kinds`, tiny: what neither `torch_models` nor transformers has, and heads."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.torch_models import Transformers

CLASSES, WORDS, LENGTH, WIDTH = 10, 97, 16, 48


class Encoder(nn.Module):
    """A network of transformers without a task, and a linear layer over the mean of its states ``[N, T, width]``."""

    def __init__(self, name: str, width: int = WIDTH, **settings: Any) -> None:
        import transformers

        super().__init__()
        family = name.removesuffix("Encoder").removesuffix("Model")
        config = getattr(transformers, f"{family}Config")(**settings)
        self.network = _class_of(family, name)(config)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Scores ``[N, classes]``."""
        states = self.network(x).last_hidden_state
        return self.head(states.mean(1) if states.dim() == 3 else states.mean((2, 3)))


def _class_of(family: str, name: str) -> Any:
    import importlib

    import transformers

    if hasattr(transformers, name):
        return getattr(transformers, name)
    return getattr(importlib.import_module(f"transformers.models.{family.lower()}.modeling_{family.lower()}"), name)


class Translator(nn.Module):
    """An encoder with a decoder of transformers, which gets the same tokens: scores ``[N * T, words]``."""

    def __init__(self, family: str, **settings: Any) -> None:
        super().__init__()
        self.network = Transformers(family, "ConditionalGeneration", **settings).network

    def forward(self, x: Tensor) -> Tensor:
        """Scores of each token."""
        return self.network(input_ids=x, decoder_input_ids=x, use_cache=False).logits.flatten(0, 1)


class Pixels(nn.Module):
    """Semantic segmentation of transformers."""

    def __init__(self, family: str, **settings: Any) -> None:
        super().__init__()
        self.network = Transformers(family, "SemanticSegmentation", **settings).network

    def forward(self, x: Tensor) -> Tensor:
        """Scores ``[N, classes, H/4, W/4]``."""
        return self.network(x).logits


class Recurrent(nn.Module):
    """Two recurrent layers, both directions, over tokens: scores ``[N * T, words]``."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.layers = kind(WIDTH, WIDTH, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of each token."""
        return self.head(self.layers(self.tokens(x))[0]).flatten(0, 1)


def _unit(
    kind: type[nn.Module], norm: type[nn.Module], inputs: int, outputs: int, size: int, **settings: Any
) -> nn.Module:
    return nn.Sequential(kind(inputs, outputs, size, padding=size // 2, **settings), norm(outputs), nn.ReLU())


class Volumes(nn.Module):
    """3-D convolutions in residual units, as of R3D (Tran et al. 2018)."""

    def __init__(self) -> None:
        super().__init__()
        unit = partial(_unit, nn.Conv3d, nn.BatchNorm3d)
        self.begin, self.first = unit(3, 12, 3, stride=(1, 2, 2)), unit(12, 12, 3)
        self.pool, self.second = nn.MaxPool3d(2), unit(12, 24, 3)
        self.side = nn.Conv3d(12, 24, 1)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """``[N, 3, T, H, W]`` → scores."""
        x = self.begin(x)
        x = self.pool(x + self.first(x))
        return self.head((self.side(x) + self.second(x)).mean((2, 3, 4)))


class SqueezeNet(nn.Module):
    """Fire modules (Iandola et al. 2016)."""

    class Fire(nn.Module):
        """A 1×1 convolution to few channels, then 1×1 beside 3×3."""

        def __init__(self, inputs: int, few: int, outputs: int) -> None:
            super().__init__()
            self.few = nn.Conv2d(inputs, few, 1)
            self.narrow, self.wide = nn.Conv2d(few, outputs, 1), nn.Conv2d(few, outputs, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.few(x).relu()
            return torch.cat([self.narrow(x).relu(), self.wide(x).relu()], 1)

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(
            nn.Conv2d(3, 24, 3, stride=2), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True), self.Fire(24, 8, 16),
            self.Fire(32, 8, 16), nn.MaxPool2d(3, 2, ceil_mode=True), self.Fire(32, 12, 24), nn.Conv2d(48, CLASSES, 1),
            nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Scores of images."""
        return self.stages(x)


class ShuffleNet(nn.Module):
    """Units of ShuffleNet v2 (Ma et al. 2018): half of the channels pass by, then both halves are shuffled."""

    class Unit(nn.Module):
        """One that keeps the size."""

        def __init__(self, width: int) -> None:
            super().__init__()
            half = width // 2
            self.branch = nn.Sequential(
                nn.Conv2d(half, half, 1, bias=False), nn.BatchNorm2d(half), nn.ReLU(),
                nn.Conv2d(half, half, 3, padding=1, groups=half, bias=False), nn.BatchNorm2d(half),
                nn.Conv2d(half, half, 1, bias=False), nn.BatchNorm2d(half), nn.ReLU(),
            )  # fmt: skip

        def forward(self, x: Tensor) -> Tensor:
            passing, worked = x.chunk(2, 1)
            return functional.channel_shuffle(torch.cat([passing, self.branch(worked)], 1), 2)

    def __init__(self) -> None:
        super().__init__()
        unit = partial(_unit, nn.Conv2d, nn.BatchNorm2d)
        self.stages = nn.Sequential(
            unit(3, 24, 3, stride=2),
            nn.MaxPool2d(3, 2, 1),
            self.Unit(24),
            self.Unit(24),
            unit(24, 48, 1),
            self.Unit(48),
        )
        self.head = nn.Linear(48, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of images."""
        return self.head(self.stages(x).mean((2, 3)))


class _Attention(nn.Module):
    """Normalized self-attention of 4 heads with a bias for each pair of tokens, and a perceptron, both residual."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.norm, self.together, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros(4, length, length))
        self.inner = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """``[N, T, width]``."""
        n, length, width = x.shape
        q, k, v = self.together(self.norm(x)).reshape(n, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        shares = (q @ k.transpose(-1, -2) / (width // 4) ** 0.5 + self.bias).softmax(-1)
        x = x + self.out((shares @ v).transpose(1, 2).reshape(n, length, width))
        return x + self.inner(x)


class MaxViT(nn.Module):
    """A block of MaxViT (Tu et al. 2022): MBConv with squeeze and excitation, attention in windows, then in a grid."""

    def __init__(self, width: int = 32, window: int = 4) -> None:
        super().__init__()
        self.window = window
        self.begin = nn.Sequential(nn.Conv2d(3, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.GELU())
        self.up, self.depth = nn.Conv2d(width, 4 * width, 1), nn.Conv2d(4 * width, 4 * width, 3, 1, 1, groups=4 * width)
        self.norms = nn.ModuleList(nn.BatchNorm2d(each) for each in (width, 4 * width, 4 * width))
        self.squeeze, self.excite = nn.Conv2d(4 * width, 8, 1), nn.Conv2d(8, 4 * width, 1)
        self.down = nn.Conv2d(4 * width, width, 1)
        self.windows, self.grid = _Attention(width, window**2), _Attention(width, window**2)
        self.head = nn.Linear(width, CLASSES)

    def _attend(self, x: Tensor, layer: nn.Module, grid: bool) -> Tensor:
        n, c, h, w = x.shape
        p = self.window
        sizes = (n, c, p, h // p, p, w // p) if grid else (n, c, h // p, p, w // p, p)
        order = (0, 3, 5, 2, 4, 1) if grid else (0, 2, 4, 3, 5, 1)
        cut = x.reshape(sizes).permute(order)
        tokens = layer(cut.reshape(-1, p * p, c))
        return tokens.reshape(cut.shape).permute([order.index(axis) for axis in range(6)]).reshape(n, c, h, w)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of images."""
        x = self.begin(x)
        y = functional.gelu(self.norms[1](self.up(self.norms[0](x))))
        y = functional.gelu(self.norms[2](self.depth(y)))
        y = y * self.excite(functional.silu(self.squeeze(y.mean((2, 3), keepdim=True)))).sigmoid()
        x = self._attend(x + self.down(y), self.windows, grid=False)
        return self.head(self._attend(x, self.grid, grid=True).mean((2, 3)))


class Inception(nn.Module):
    """Modules of Inception v3 (Szegedy et al. 2016): branches of 1×1, 5×5, 1×7 with 7×1, and an average pooling."""

    def __init__(self) -> None:
        super().__init__()

        def unit(inputs: int, outputs: int, size: tuple[int, int]) -> nn.Module:
            padding = (size[0] // 2, size[1] // 2)
            conv = nn.Conv2d(inputs, outputs, size, padding=padding, bias=False)
            return nn.Sequential(conv, nn.BatchNorm2d(outputs, eps=1e-3), nn.ReLU())

        self.begin = nn.Sequential(
            nn.Conv2d(3, 24, 3, 2, bias=False), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(3, 2)
        )
        self.one, self.five = unit(24, 8, (1, 1)), nn.Sequential(unit(24, 6, (1, 1)), unit(6, 8, (5, 5)))
        self.seven = nn.Sequential(unit(24, 6, (1, 1)), unit(6, 6, (1, 7)), unit(6, 8, (7, 1)))
        self.pooled = nn.Sequential(nn.AvgPool2d(3, 1, 1), unit(24, 8, (1, 1)))
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of images."""
        x = self.begin(x)
        x = torch.cat([self.one(x), self.five(x), self.seven(x), self.pooled(x)], 1)
        return self.head(x.mean((2, 3)))


class MobileNetV3(nn.Module):
    """Inverted bottlenecks with squeeze and excitation, Hardswish and Hardsigmoid (Howard et al. 2019)."""

    class Bottleneck(nn.Module):
        """One that keeps size and width."""

        def __init__(self, width: int, wide: int) -> None:
            super().__init__()
            self.up = nn.Sequential(nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.Hardswish())
            depth = nn.Conv2d(wide, wide, 5, padding=2, groups=wide, bias=False)
            self.depth = nn.Sequential(depth, nn.BatchNorm2d(wide), nn.Hardswish())
            few = nn.Sequential(nn.Conv2d(wide, 8, 1), nn.ReLU(), nn.Conv2d(8, wide, 1), nn.Hardsigmoid())
            self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), few)
            self.down = nn.Sequential(nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width))

        def forward(self, x: Tensor) -> Tensor:
            y = self.depth(self.up(x))
            return x + self.down(y * self.gate(y))

    def __init__(self) -> None:
        super().__init__()
        begin = nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False)
        self.begin = nn.Sequential(begin, nn.BatchNorm2d(16), nn.Hardswish())
        self.blocks = nn.Sequential(self.Bottleneck(16, 48), self.Bottleneck(16, 64))
        self.head = nn.Sequential(nn.Linear(16, 32), nn.Hardswish(), nn.Linear(32, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        """Scores of images."""
        return self.head(self.blocks(self.begin(x)).mean((2, 3)))
