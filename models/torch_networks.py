"""Full-size networks in PyTorch, some from Hugging Face's transformers, each with a forward pass in checkpoints."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Stage = Callable[[Tensor], Tensor]


def segments(stages: Sequence[Stage]) -> list[Sequence[Stage]]:
    """The stages in about sqrt(n) runs of about sqrt(n) each (Chen et al. 2016), lengths apart by one at most."""
    count = max(1, round(math.sqrt(len(stages))))
    bounds = [index * len(stages) // count for index in range(count + 1)]
    return [stages[begin:end] for begin, end in pairwise(bounds)]


def _run(stages: Sequence[Stage], x: Tensor) -> Tensor:
    for stage in stages:
        x = stage(x)
    return x


class Chain(nn.Module):
    """A network that is a sequence of stages, each of one tensor."""

    def stages(self) -> list[Stage]:
        """What `forward` runs, in order."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return _run(self.stages(), x)

    def checkpointed(self, x: Tensor) -> Tensor:
        """`forward` in sqrt(n) segments of which only the ends are kept, the last one whole."""
        *dropped, last = segments(self.stages())
        for segment in dropped:
            x = checkpoint(partial(_run, segment), x, use_reentrant=False)
        return _run(last, x)


def _conv_bn(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


def _dropout(ratio: float | None) -> nn.Module:
    """Dropout where there is a ratio, even 0: a network without one has no such node."""
    return nn.Identity() if ratio is None else nn.Dropout(ratio)


class Residual(nn.Module):
    """He et al. 2016: two 3×3 convolutions, or 1×1, 3×3 (Xie et al. 2017: in groups) and 1×1, beside a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool, groups: int, group_width: int) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        inner = width * group_width // 64 * groups
        sizes = [(inputs, inner, 1, 1), (inner, inner, 3, stride, groups), (inner, outputs, 1, 1)]
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


class ResNet(Chain):
    """ResNet-18 and -50 as torchvision has them, 11,689,512 and 25,557,032 parameters; ResNet-200: 64,673,832.

    ResNeXt-50 has 32 ``groups``, each of ``group_width`` 4 where a stage is 64 wide: 25,028,904.
    """

    def __init__(
        self, units: Sequence[int], bottleneck: bool, width: int = 64, classes: int = 1000,
        dropout: float | None = None, groups: int = 1, group_width: int = 64,
    ) -> None:  # fmt: skip
        super().__init__()
        self.stem, inputs, blocks = _conv_bn(3, width, 7, 2), width, []
        for stage, count in enumerate(units):
            for unit in range(count):
                stride = 2 if stage and not unit else 1
                blocks.append(Residual(inputs, width << stage, stride, bottleneck, groups, group_width))
                inputs = (width << stage) * (4 if bottleneck else 1)
        self.blocks, self.fc = nn.Sequential(*blocks), nn.Linear(inputs, classes)
        self.dropout = _dropout(dropout)

    def stages(self) -> list[Stage]:
        return [self._begin, *self.blocks, self._end]

    def _begin(self, x: Tensor) -> Tensor:
        return functional.max_pool2d(functional.relu(self.stem(x), inplace=True), 3, 2, 1)

    def _end(self, x: Tensor) -> Tensor:
        return self.fc(self.dropout(functional.adaptive_avg_pool2d(x, 1).flatten(1)))


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


MOBILENET_V2 = (
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
)  # fmt: skip


class MobileNetV2(Chain):
    """3,504,872 parameters.

    Args:
        units: Of each stage: how often a unit's inside is as wide as its input, outputs, units, stride.
        stem: Channels of the first convolution.
        head: Channels of the last one.
        classes: Outputs.
        dropout: Ratio before the classifier; None for none.
    """

    def __init__(
        self, units: Sequence[tuple[int, int, int, int]] = MOBILENET_V2, stem: int = 32, head: int = 1280,
        classes: int = 1000, dropout: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        width, layers = stem, [_conv_bn(3, stem, 3, 2), nn.ReLU6(inplace=True)]
        for expand, outputs, count, stride in units:
            for unit in range(count):
                layers.append(InvertedResidual(width, outputs, 1 if unit else stride, expand))
                width = outputs
        self.features = nn.Sequential(*layers, _conv_bn(width, head, 1), nn.ReLU6(inplace=True))
        self.classifier, self.dropout = nn.Linear(head, classes), _dropout(dropout)

    def stages(self) -> list[Stage]:
        return [*self.features, self._end]

    def _end(self, x: Tensor) -> Tensor:
        return self.classifier(self.dropout(functional.adaptive_avg_pool2d(x, 1).flatten(1)))


def _narrow(channels: int, width: float) -> int:
    """Channels of a MobileNet-v2 of another width, as in Sandler et al. 2018's own code: the nearest multiple of 8,
    or the next if that is less than nine tenths."""
    near = max(8, round(width * channels / 8) * 8)
    return near if near >= 0.9 * width * channels else near + 8


def narrow_mobilenet(width: float, times: int = 1) -> nn.Module:
    """MobileNet-v2 of another width, each of its stages with as many times as many units."""
    units = [(expand, _narrow(outputs, width), count * times, by) for expand, outputs, count, by in MOBILENET_V2]
    return MobileNetV2(units, stem=_narrow(32, width))


class DenseLayer(nn.Module):
    """Huang et al. 2017: BN, ReLU, 1×1, BN, ReLU, 3×3."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(functional.relu(self.norm1(x), inplace=True))
        return torch.cat([x, self.conv2(functional.relu(self.norm2(y), inplace=True))], 1)


class DenseNet(Chain):
    """DenseNet-121: 7,978,856 parameters; with ``cifar`` DenseNet-BC-100 of growth 12 for 10 classes: 769,162."""

    def __init__(
        self, blocks: Sequence[int] = (6, 12, 24, 16), growth: int = 32, cifar: bool = False, classes: int = 1000
    ) -> None:
        super().__init__()
        width = 2 * growth
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False)]
        if not cifar:
            layers = [_conv_bn(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
        for index, count in enumerate(blocks):
            if index:
                transition = [nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.Conv2d(width, width // 2, 1, bias=False)]
                layers += [*transition, nn.AvgPool2d(2)]
                width //= 2
            for _ in range(count):
                layers.append(DenseLayer(width, growth))
                width += growth
        self.features = nn.Sequential(*layers, nn.BatchNorm2d(width), nn.ReLU(inplace=True))
        self.classifier = nn.Linear(width, classes)

    def stages(self) -> list[Stage]:
        return [*self.features, self._end]

    def _end(self, x: Tensor) -> Tensor:
        return self.classifier(functional.adaptive_avg_pool2d(x, 1).flatten(1))


def _plain(stage: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    return stage(*inputs)


class UNet(nn.Module):
    """Ronneberger et al. 2015, padded: 31,030,658 parameters with one input channel and two classes; no dropout."""

    def __init__(self, width: int = 64, depth: int = 4, classes: int = 2) -> None:
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.down = nn.ModuleList(self._double(a, b) for a, b in zip((1, *widths), widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths[:-1]))
        self.join = nn.ModuleList(self._double(2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, classes, 1)

    @staticmethod
    def _double(inputs: int, outputs: int) -> nn.Sequential:
        layers = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True)]
        return nn.Sequential(*layers, nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU(inplace=True))

    def _through(self, x: Tensor, run: Callable[..., Tensor]) -> Tensor:
        kept = []
        for level, block in enumerate(self.down):
            x = run(block, functional.max_pool2d(x, 2) if level else x)
            kept.append(x)
        for level in range(len(self.up)):
            x = run(partial(self._join, level), kept[-2 - level], x)
        return self.head(x)

    def _join(self, level: int, skip: Tensor, x: Tensor) -> Tensor:
        return self.join[level](torch.cat([skip, self.up[level](x)], 1))

    def forward(self, x: Tensor) -> Tensor:
        return self._through(x, _plain)

    def checkpointed(self, x: Tensor) -> Tensor:
        """`forward` with every level's convolutions a segment: the skips leave no longer chain to cut."""
        return self._through(x, partial(checkpoint, use_reentrant=False))


class LSTM(nn.Module):
    """A language model of LSTM layers (Hochreiter and Schmidhuber 1997); scores ``[N * T, words]``."""

    def __init__(self, width: int = 256, depth: int = 2, words: int = 1000) -> None:
        super().__init__()
        self.tokens, self.decoder = nn.Embedding(words, width), nn.Linear(width, words)
        self.layers = nn.LSTM(width, width, depth, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder(self.layers(self.tokens(tokens))[0]).flatten(0, 1)

    def checkpointed(self, tokens: Tensor) -> Tensor:
        """`forward` in sqrt(T) segments of time: states are kept between them."""
        x = self.tokens(tokens)
        state = x.new_zeros((2, self.layers.num_layers, len(x), self.layers.hidden_size)).unbind()
        found = []
        for part in x.split(max(1, round(math.sqrt(x.shape[1]))), 1):
            y, state = checkpoint(self.layers, part, state, use_reentrant=False)
            found.append(y)
        return self.decoder(torch.cat(found, 1)).flatten(0, 1)


class GPTBlock(nn.Module):
    """Radford et al. 2019: attention and a perceptron, each behind a LayerNorm."""

    def __init__(self, width: int, heads: int, dropout: float | None) -> None:
        super().__init__()
        self.heads, self.dropout = heads, _dropout(dropout)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        x = x + self.dropout(self.proj(self._attended(q, k, v).transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh")))

    def _attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not isinstance(self.dropout, nn.Dropout):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        future = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(future, -math.inf)
        return self.dropout(scores.softmax(-1)) @ v


class GPT(Chain):
    """A small GPT: 6 blocks of width 384, 8,192 words; scores ``[N * T, words]``, the embedding tied to the output.

    GPT-2 small is 12 blocks of 768, 12 heads, 50,257 words and 1,024 positions: 124,439,808 parameters. It has a
    ``dropout`` of 0.1, of embeddings, attention and what blocks add; None: there is none.
    """

    def __init__(
        self, width: int = 384, depth: int = 6, heads: int = 6, words: int = 8192, length: int = 256,
        dropout: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dropout = _dropout(dropout)
        self.tokens, self.positions = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(GPTBlock(width, heads, dropout) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def stages(self) -> list[Stage]:
        return [self._begin, *self.blocks, self._end]

    def _begin(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device)))

    def _end(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x)).flatten(0, 1)


class Transformers(nn.Module):
    """A network of the package transformers, with weights of its own initialization: one tensor → scores.

    Args:
        family: As its classes are named, such as ``Bert``.
        task: Likewise, such as ``MaskedLM``.
        settings: Of its configuration.
    """

    def __init__(self, family: str, task: str, **settings: Any) -> None:
        import transformers

        super().__init__()
        self.network = getattr(transformers, f"{family}For{task}")(getattr(transformers, f"{family}Config")(**settings))

    def forward(self, x: Tensor) -> Tensor:
        """Scores ``[N, classes]``, or ``[N * T, words]``."""
        return self.network(x).logits.flatten(0, -2)

    def checkpointed(self, x: Tensor) -> Tensor:
        """`forward` with every block a segment, as the package has it.

        Raises:
            ValueError: it doesn't, for this network.
        """
        self.network.activation_checkpointing_enable()
        return self(x)


# Without dropout, whose bits differ between frameworks: their losses couldn't be compared.
_CONVNEXT = partial(Transformers, "ConvNext", "ImageClassification", num_labels=1000)
_SWIN = partial(Transformers, "Swin", "ImageClassification", num_labels=1000, drop_path_rate=0.0)
_EFFICIENTNET_B0 = partial(
    Transformers, "EfficientNet", "ImageClassification", num_labels=1000, width_coefficient=1.0, depth_coefficient=1.0,
    hidden_dim=1280, image_size=224, dropout_rate=0.0, drop_connect_rate=0.0,
)  # fmt: skip
_BERT = partial(Transformers, "Bert", "MaskedLM", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
_LLAMA = partial(Transformers, "Llama", "CausalLM", use_cache=False)

BUILDERS: Mapping[str, Callable[..., nn.Module]] = {
    "resnet50": partial(ResNet, units=(3, 4, 6, 3), bottleneck=True),
    "resnet200": partial(ResNet, units=(3, 24, 36, 3), bottleneck=True),
    "densenet121": DenseNet,
    "densenet_bc100": partial(DenseNet, blocks=(16, 16, 16), growth=12, cifar=True, classes=10),
    "mobilenet_v2": MobileNetV2,
    "unet": UNet,
    "gpt": GPT,
    "lstm": LSTM,
    "convnext_tiny": _CONVNEXT,
    "swin_tiny": _SWIN,
    "resnext50": partial(ResNet, units=(3, 4, 6, 3), bottleneck=True, groups=32, group_width=4),
    "efficientnet_b0": _EFFICIENTNET_B0,
    "bert": _BERT,
    "llama": _LLAMA,
}


def initialized(name: str, x: Tensor, **options: Any) -> nn.Module:
    """A network whose output depends on its input: He initialization of convolutions, running statistics of ``x``.

    Batch normalizations scale by 1 (transformers draws EfficientNet's scales around 0: activations fade to 1e-10).
    """
    torch.manual_seed(0)
    module = BUILDERS[name](**options).train()
    momenta = {part: part.momentum for part in module.modules() if isinstance(part, nn.BatchNorm2d)}
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight)
    for part in momenta:
        part.momentum = 1.0
        nn.init.ones_(part.weight)
    with torch.no_grad():
        module(x)
    for part, momentum in momenta.items():
        part.momentum = momentum
    return module
