"""Networks in PyTorch that train on several ranks."""

import torch
from torch import Tensor, nn

LENGTH, WORDS = 32, 2000  # of a sentence, and of the vocabulary


class Convolutions(nn.Module):
    """Convolutions of 3 × 3 on 32 × 32 images, without batch statistics, and ten classes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = (width, 2 * width, 4 * width, 8 * width)
        layers: list[nn.Module] = []
        before = 3
        for number in widths:
            layers += [nn.Conv2d(before, number, 3, padding=1), nn.ReLU()]
            layers += [nn.Conv2d(number, number, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            before = number
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(before * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of a batch of images."""
        return self.classifier(self.features(x).flatten(1))


class Products(nn.Module):
    """The same with each convolution as nine products, since onnxruntime has no kernel for one in float64."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        pairs = zip((3, *widths), widths, strict=False)
        self.kernels = nn.ParameterList(torch.randn(3, 3, a, b) * (2 / (9 * a)) ** 0.5 for a, b in pairs)
        self.biases = nn.ParameterList(torch.zeros(b) for b in widths)
        self.classifier = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of a batch of images."""
        x = x.permute(0, 2, 3, 1)
        for kernel, bias in zip(self.kernels, self.biases, strict=True):
            rows, height, width, _ = x.shape
            wide = nn.functional.pad(x, (0, 0, 1, 1, 1, 1))
            shifted = [(wide[:, i : i + height, j : j + width] @ kernel[i, j]) for i in range(3) for j in range(3)]
            x = (sum(shifted[1:], shifted[0]) + bias).relu()
            x = x.reshape(rows, height // 2, 2, width // 2, 2, -1).mean((2, 4))
        return self.classifier(x.mean((1, 2)))


class Block(nn.Module):
    """Causal attention and a perceptron, each behind a normalization."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """The next activations."""
        rows, length, width = x.shape
        parts = self.mixed(self.norm1(x)).reshape(rows, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1)) * (width // self.heads) ** -0.5 + mask
        x = x + self.joined((scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, length, width))
        return x + self.narrow(self.wide(self.norm2(x)).relu())


class Language(nn.Module):
    """A GPT: the next of `WORDS` words at each of `LENGTH` places."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), -1e4).triu(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the next word, a row for each place."""
        y = self.words(x) + self.places
        for block in self.blocks:
            y = block(y, self.mask)
        return self.head(self.norm(y)).flatten(0, 1)


class Dense(nn.Module):
    """A dense block over rows of 64 numbers: each layer reads all before it, normalized over the batch."""

    def __init__(self, depth: int = 6, growth: int = 16) -> None:
        super().__init__()
        widths = [64 + growth * number for number in range(depth)]
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for width in widths)
        self.layers = nn.ModuleList(nn.Linear(width, growth) for width in widths)
        self.classifier = nn.Linear(widths[-1] + growth, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of a batch of rows."""
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = torch.cat([x, layer(norm(x).relu())], 1)
        return self.classifier(x)


class Layer(nn.Module):
    """A bottleneck and a convolution of 3 × 3, whose channels join those it read."""

    def __init__(self, before: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(before), nn.BatchNorm2d(4 * growth)
        self.conv1 = nn.Conv2d(before, 4 * growth, 1, bias=False)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """All channels so far."""
        return torch.cat([x, self.conv2(self.norm2(self.conv1(self.norm1(x).relu())).relu())], 1)


class DenseNet(nn.Module):
    """DenseNet-BC for images of 32 × 32, as `models.densenet` has it (Huang et al. 2017)."""

    def __init__(self, depth: int, growth: int = 12) -> None:
        super().__init__()
        channels = 2 * growth
        layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
        for block in range(3):
            for _ in range((depth - 4) // 6):
                layers.append(Layer(channels, growth))
                channels += growth
            layers += [nn.BatchNorm2d(channels), nn.ReLU()]
            if block < 2:
                layers += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
                channels //= 2
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of a batch of images."""
        return self.classifier(self.features(x).mean((2, 3)))


NETWORKS = {
    "dense": Dense, "densenet": lambda: DenseNet(40), "cnn": lambda: Convolutions(64), "gpt": lambda: Language(256, 4),
    "small cnn": lambda: Products((16, 32, 64)), "small gpt": lambda: Language(32, 2),
}  # fmt: skip
