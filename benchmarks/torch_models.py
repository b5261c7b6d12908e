"""Full-size networks in PyTorch for side-by-side training, their inputs, and batches that a CPU trains in seconds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


def _conv_bn(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


class Residual(nn.Module):
    """He et al. 2016: two 3×3 convolutions, or 1×1, 3×3 and 1×1, beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        sizes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        if not bottleneck:
            sizes = [(inputs, width, 3, stride), (width, width, 3, 1)]
        self.layers = nn.ModuleList(_conv_bn(*size) for size in sizes)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else _conv_bn(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers[:-1]:
            y = functional.relu(layer(y), inplace=True)
        return functional.relu(self.layers[-1](y) + self.shortcut(x), inplace=True)


class ResNet(nn.Module):
    """ResNet-18 and -50 as torchvision has them: 11,689,512 and 25,557,032 parameters."""

    def __init__(self, units: Sequence[int], bottleneck: bool) -> None:
        super().__init__()
        self.stem, width, blocks = _conv_bn(3, 64, 7, 2), 64, []
        for stage, count in enumerate(units):
            for unit in range(count):
                blocks.append(Residual(width, 64 << stage, 2 if stage and not unit else 1, bottleneck))
                width = (64 << stage) * (4 if bottleneck else 1)
        self.blocks, self.fc = nn.Sequential(*blocks), nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.stem(x), inplace=True), 3, 2, 1)
        return self.fc(functional.adaptive_avg_pool2d(self.blocks(x), 1).flatten(1))


class InvertedResidual(nn.Module):
    """Sandler et al. 2018: expand, depthwise, project."""

    def __init__(self, inputs: int, outputs: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = inputs * expand
        layers = [_conv_bn(inputs, hidden, 1), nn.ReLU6(inplace=True)] if expand > 1 else []
        layers += [_conv_bn(hidden, hidden, 3, stride, hidden), nn.ReLU6(inplace=True), _conv_bn(hidden, outputs, 1)]
        self.layers, self.residual = nn.Sequential(*layers), stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.residual else self.layers(x)


class MobileNetV2(nn.Module):
    """3,504,872 parameters."""

    stages = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))

    def __init__(self) -> None:
        super().__init__()
        width, layers = 32, [_conv_bn(3, 32, 3, 2), nn.ReLU6(inplace=True)]
        for expand, outputs, units, stride in self.stages:
            for unit in range(units):
                layers.append(InvertedResidual(width, outputs, 1 if unit else stride, expand))
                width = outputs
        self.features = nn.Sequential(*layers, _conv_bn(width, 1280, 1), nn.ReLU6(inplace=True))
        self.classifier = nn.Linear(1280, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(functional.adaptive_avg_pool2d(self.features(x), 1).flatten(1))


class DenseLayer(nn.Module):
    """Huang et al. 2017: BN, ReLU, 1×1, BN, ReLU, 3×3."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(functional.relu(self.norm1(x), inplace=True))
        return torch.cat([x, self.conv2(functional.relu(self.norm2(y), inplace=True))], 1)


class DenseNet121(nn.Module):
    """7,978,856 parameters."""

    def __init__(self, blocks: Sequence[int] = (6, 12, 24, 16), growth: int = 32) -> None:
        super().__init__()
        width = 2 * growth
        layers: list[nn.Module] = [_conv_bn(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        for index, count in enumerate(blocks):
            if index:
                transition = [nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.Conv2d(width, width // 2, 1, bias=False)]
                layers += [*transition, nn.AvgPool2d(2)]
                width //= 2
            for _ in range(count):
                layers.append(DenseLayer(width, growth))
                width += growth
        self.features = nn.Sequential(*layers, nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.classifier = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(functional.adaptive_avg_pool2d(self.features(x), 1).flatten(1))


class GPTBlock(nn.Module):
    """Radford et al. 2019: attention and a perceptron, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """A small GPT: 6 blocks of width 384, 8,192 words; scores ``[N * T, words]``, the embedding tied to the output."""

    def __init__(self, width: int = 384, depth: int = 6, heads: int = 6, words: int = 8192, length: int = 256) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(GPTBlock(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x))).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class Case:
    """A network, and the batch it is trained with here."""

    make: Callable[[], nn.Module]
    batch: int
    image: int = 224

    def data(self) -> tuple[Tensor, Tensor]:
        """Seeded inputs and labels."""
        generator = torch.Generator().manual_seed(0)
        if self.make is GPT:
            shape = (self.batch, 256)
            words = torch.randint(8192, shape, generator=generator)
            return words, torch.randint(8192, (self.batch * 256,), generator=generator)
        images = torch.randn((self.batch, 3, self.image, self.image), generator=generator)
        return images, torch.randint(1000, (self.batch,), generator=generator)


CASES = {
    "resnet18": Case(lambda: ResNet((2, 2, 2, 2), False), 16),
    "resnet50": Case(lambda: ResNet((3, 4, 6, 3), True), 8),
    "mobilenet_v2": Case(MobileNetV2, 16),
    "densenet121": Case(DenseNet121, 8),
    "gpt": Case(GPT, 8),
}
