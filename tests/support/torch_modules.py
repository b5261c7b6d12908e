"""Small networks in torch.nn alone, with the structure of the real ones. Each takes its dropout ratio first."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from models import torch_networks


def resnet18(dropout: float) -> nn.Module:
    """He et al. 2015: two stages, an eighth of the width; as in 18 layers, the first stage has no shortcut."""
    return torch_networks.ResNet((1, 2), bottleneck=False, width=8, classes=10, dropout=dropout)


def mobilenet_v2(dropout: float) -> nn.Module:
    """Sandler et al. 2018: each kind of stage, two units in one of them and one in the others."""
    units = ((1, 4, 1, 1), (6, 6, 2, 2), (6, 24, 1, 1))
    return torch_networks.MobileNetV2(units, stem=8, head=80, classes=10, dropout=dropout)


class DenseLayer(nn.Module):
    def __init__(self, inputs: int, growth: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)
        self.dropout = nn.Dropout2d(dropout)

    def forward(self, features: list[Tensor]) -> Tensor:
        x = self.conv1(functional.relu(self.norm1(torch.cat(features, 1))))
        return self.dropout(self.conv2(functional.relu(self.norm2(x))))


class DenseNet(nn.Module):
    """Huang et al. 2016: two dense blocks of two layers."""

    def __init__(self, dropout: float, growth: int = 6, classes: int = 10) -> None:
        super().__init__()
        width = 2 * growth
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        self.blocks, self.transitions = nn.ModuleList(), nn.ModuleList()
        for index in range(2):
            if index:
                self.transitions.append(
                    nn.Sequential(
                        nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2)
                    )
                )
                width //= 2
            self.blocks.append(nn.ModuleList(DenseLayer(width + i * growth, growth, dropout) for i in range(2)))
            width += 2 * growth
        self.norm, self.classifier = nn.BatchNorm2d(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            if index:
                x = self.transitions[index - 1](x)
            features = [x]
            for layer in block:
                features.append(layer(features))
            x = torch.cat(features, 1)
        return self.classifier(functional.relu(self.norm(x)).mean((2, 3)))


class Inception(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(inputs, width, 1)
        self.three = nn.Sequential(nn.Conv2d(inputs, width, 1), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, padding=1))
        self.five = nn.Sequential(nn.Conv2d(inputs, 4, 1), nn.ReLU(), nn.Conv2d(4, width // 2, 5, padding=2))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1, ceil_mode=True), nn.Conv2d(inputs, width // 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        branches = (self.one, self.three, self.five, self.pool)
        return torch.cat([functional.relu(branch(x)) for branch in branches], 1)


class GoogLeNet(nn.Module):
    """Szegedy et al. 2014: two inception modules, LRN in the stem, no auxiliary classifiers."""

    def __init__(self, dropout: float, width: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, ceil_mode=True), nn.LocalResponseNorm(5),
            nn.Conv2d(width, width, 1), nn.ReLU(), nn.Conv2d(width, 3 * width, 3, padding=1), nn.ReLU(),
            nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2, ceil_mode=True),
        )  # fmt: skip
        self.modules3 = Inception(3 * width, width)
        self.modules4 = Inception(4 * width, width)
        self.pool, self.dropout = nn.MaxPool2d(3, 2, ceil_mode=True), nn.Dropout(dropout)
        self.fc = nn.Linear(4 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.modules3(self.stem(x)))
        x = self.modules4(x)
        return self.fc(self.dropout(functional.adaptive_avg_pool2d(x, 1).flatten(1)))


class UNet(nn.Module):
    """Ronneberger et al. 2015: two levels, with batch normalization; scores ``[N, 4, 32, 32]``."""

    def __init__(self, dropout: float, width: int = 6, classes: int = 4) -> None:
        super().__init__()
        widths = (width, 2 * width)
        self.down = nn.ModuleList(self._double(a, b) for a, b in zip((3, *widths), widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in widths[:1])
        self.join = nn.ModuleList(self._double(2 * w, w) for w in widths[:1])
        self.dropout, self.head = nn.Dropout2d(dropout), nn.Conv2d(width, classes, 1)

    @staticmethod
    def _double(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for level, block in enumerate(self.down):
            x = block(functional.max_pool2d(x, 2) if level else x)
            kept.append(x)
        x = self.dropout(x)
        return self.head(self.join[0](torch.cat([kept[0], self.up[0](x)], 1)))


class Recurrent(nn.Module):
    """A language model on PyTorch's own LSTM or GRU, two layers; scores ``[N * T, vocabulary]``."""

    def __init__(self, dropout: float, kind: type[nn.LSTM] | type[nn.GRU], width: int = 16, words: int = 20) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = kind(width, width, 2, batch_first=True, dropout=dropout)
        self.decoder = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder(self.layers(self.embedding(tokens))[0]).flatten(0, 1)


class LSTMCells(nn.Module):
    """The same by hand: two layers of cells, unrolled over the tokens."""

    def __init__(self, dropout: float, width: int = 16, words: int = 20) -> None:
        super().__init__()
        self.width = width
        self.embedding = nn.Embedding(words, width)
        self.i2h = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(2))
        self.h2h = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(2))
        self.dropout, self.decoder = nn.Dropout(dropout), nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        xs = self.embedding(tokens).unbind(1)
        states = [(torch.zeros_like(xs[0]), torch.zeros_like(xs[0])) for _ in range(2)]
        outputs = []
        for x in xs:
            for layer, (h, c) in enumerate(states):
                i, f, g, o = (self.i2h[layer](x) + self.h2h[layer](h)).chunk(4, 1)
                c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                h = torch.sigmoid(o) * torch.tanh(c)
                states[layer], x = (h, c), self.dropout(h)
            outputs.append(x)
        return self.decoder(torch.stack(outputs, 1)).flatten(0, 1)


class ViTBlock(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, dropout=dropout, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Dosovitskiy et al. 2020: two blocks over 16 patches and a class token."""

    def __init__(self, dropout: float, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, 8)
        self.class_token = nn.Parameter(torch.randn(1, 1, width) * 0.1)
        self.positions = nn.Parameter(torch.randn(1, 17, width) * 0.1)
        self.dropout, self.blocks = nn.Dropout(dropout), nn.ModuleList(ViTBlock(width, dropout) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        x = self.dropout(torch.cat([self.class_token.expand(len(x), -1, -1), tokens], 1) + self.positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class GPTBlock(nn.Module):
    def __init__(self, width: int, length: int, dropout: float, fused: bool) -> None:
        super().__init__()
        self.ratio, self.fused = dropout, fused
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("future", torch.ones(length, length, dtype=torch.bool).triu(1), persistent=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.fused:
            ratio = self.ratio if self.training else 0.0
            return functional.scaled_dot_product_attention(q, k, v, dropout_p=ratio, is_causal=True)
        scores = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).masked_fill(self.future, float("-inf"))
        return self.dropout(scores.softmax(-1)) @ v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.ln_1(x)).chunk(3, -1))
        x = x + self.dropout(self.proj(self.attend(q, k, v).transpose(1, 2).flatten(2)))
        return x + self.dropout(self.out(functional.gelu(self.fc(self.ln_2(x)), approximate="tanh")))


class GPT(nn.Module):
    """Radford et al. 2019: two blocks, embedding and output tied; scores ``[N * T, vocabulary]``."""

    def __init__(self, dropout: float, fused: bool = False, width: int = 16, words: int = 20, length: int = 5) -> None:
        super().__init__()
        self.wte, self.wpe, self.drop = nn.Embedding(words, width), nn.Embedding(length, width), nn.Dropout(dropout)
        self.blocks = nn.ModuleList(GPTBlock(width, length, dropout, fused) for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        nn.init.normal_(self.wte.weight, std=0.2)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1])))
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.ln_f(x)).flatten(0, 1)
