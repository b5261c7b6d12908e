"""Networks of many kinds from torch and transformers, tiny and with seeded weights: what `benchmarks.kinds` trains."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
    """Semantic segmentation of transformers: scores ``[N, classes, H/4, W/4]`` as those of single pixels."""

    def __init__(self, family: str, **settings: Any) -> None:
        super().__init__()
        self.network = Transformers(family, "SemanticSegmentation", **settings).network

    def forward(self, x: Tensor) -> Tensor:
        """Scores ``[N * H/4 * W/4, classes]``."""
        return self.network(x).logits.permute(0, 2, 3, 1).flatten(0, 2)


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


def _unit(kind: type[nn.Module], norm: type[nn.Module], inputs: int, outputs: int, size: int, **settings: Any) -> nn.Module:
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
            unit(3, 24, 3, stride=2), nn.MaxPool2d(3, 2, 1), self.Unit(24), self.Unit(24), unit(24, 48, 1), self.Unit(48)
        )
        self.head = nn.Linear(48, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of images."""
        return self.head(self.stages(x).mean((2, 3)))


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
        layer = partial(nn.TransformerEncoderLayer, width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.windows, self.grid = layer(), layer()
        self.bias = nn.Parameter(torch.zeros(4, window**2, window**2))
        self.head = nn.Linear(width, CLASSES)

    def _attend(self, x: Tensor, layer: nn.Module, grid: bool) -> Tensor:
        n, c, h, w = x.shape
        p = self.window
        sizes = (n, c, p, h // p, p, w // p) if grid else (n, c, h // p, p, w // p, p)
        order = (0, 3, 5, 2, 4, 1) if grid else (0, 2, 4, 3, 5, 1)
        tokens = x.reshape(sizes).permute(order)
        shape = tokens.shape
        tokens = tokens.contiguous().view(-1, p * p, c)
        tokens = layer(tokens, self.bias.repeat(tokens.shape[0], 1, 1))
        back = [order.index(axis) for axis in range(6)]
        return tokens.reshape(shape).permute(back).reshape(n, c, h, w)

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

        self.begin = nn.Sequential(nn.Conv2d(3, 24, 3, 2, bias=False), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(3, 2))
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


Inputs = Callable[[torch.Generator], Tensor]


def images(size: int = 32, batch: int = 4) -> Inputs:
    """``[batch, 3, size, size]``."""
    return lambda generator: torch.randn(batch, 3, size, size, generator=generator, dtype=torch.float32)


def tokens(batch: int = 4) -> Inputs:
    """``[batch, 16]``, none of them 0 to 2 (padding and the like)."""
    return lambda generator: torch.randint(3, WORDS, (batch, LENGTH), generator=generator)


def noise(*shape: int) -> Inputs:
    """Of a shape that isn't an image's."""
    return lambda generator: torch.randn(*shape, generator=generator, dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class Network:
    """What makes a module, whose scores are ``[rows, classes]``, and its input."""

    make: Callable[[], nn.Module]
    inputs: Inputs


_TEXT: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 96, "max_position_embeddings": 40, "pad_token_id": 1,
}  # fmt: skip
_LLAMA: dict[str, Any] = {**_TEXT, "num_key_value_heads": 2, "use_cache": False, "head_dim": 12}
_VISION: dict[str, Any] = {
    "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
_SOUND: dict[str, Any] = {
    "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
    "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4, "num_feat_extract_layers": 2,
}  # fmt: skip


def _text(family: str, task: str, **settings: Any) -> Network:
    return Network(partial(Transformers, family, task, **{**_TEXT, **settings}), tokens())


def _llama(family: str, **settings: Any) -> Network:
    return Network(partial(Transformers, family, "CausalLM", **{**_LLAMA, **settings}), tokens())


def _image(family: str, size: int = 32, **settings: Any) -> Network:
    return Network(partial(Transformers, family, "ImageClassification", num_labels=CLASSES, **settings), images(size))


NETWORKS: Mapping[str, Network] = {
    "ConvNeXt": _image("ConvNext", hidden_sizes=[16, 24, 32, 48], depths=[1, 1, 1, 1], patch_size=2),
    "ConvNeXt v2": _image("ConvNextV2", hidden_sizes=[16, 24, 32, 48], depths=[1, 1, 1, 1], patch_size=2),
    "ResNet": _image("ResNet", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 2]),
    "RegNet": _image("RegNet", embedding_size=16, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1], groups_width=8),
    "EfficientNet": _image(
        "EfficientNet", image_size=32, width_coefficient=0.25, depth_coefficient=0.25, hidden_dim=320, num_channels=3,
    ),
    "MobileNet v2": _image("MobileNetV2", 64, depth_multiplier=0.25, image_size=64),
    "MobileNet v3": Network(MobileNetV3, images()),
    "ShuffleNet v2": Network(ShuffleNet, images()),
    "SqueezeNet": Network(SqueezeNet, images()),
    "Inception v3": Network(Inception, images()),
    "MaxViT": Network(MaxViT, images(16)),
    "Swin": _image("Swin", image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4),
    "Swin v2": _image(
        "Swinv2", image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4
    ),
    "BEiT": _image("Beit", **_VISION, use_relative_position_bias=True),
    "DeiT": _image("DeiT", **_VISION),
    "DINOv2": Network(partial(Encoder, "Dinov2Model", hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4,
                              image_size=32, patch_size=8), images()),
    "CLIP vision": Network(partial(Encoder, "CLIPVisionModel", **_VISION), images()),
    "PVT": _image(
        "Pvt", 64, image_size=64, hidden_sizes=[16, 32, 32, 48], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4],
        mlp_ratios=[2, 2, 2, 2],
    ),
    "PoolFormer": _image("PoolFormer", 64, hidden_sizes=[16, 24, 32, 48], depths=[1, 1, 1, 1]),
    "SegFormer": Network(partial(Pixels, "Segformer", hidden_sizes=[16, 24, 32, 48], depths=[1, 1, 1, 1],
                                 num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=32, num_labels=CLASSES), images(64, 2)),
    "BERT": _text("Bert", "MaskedLM"),
    "RoBERTa": _text("Roberta", "SequenceClassification", num_labels=CLASSES),
    "ALBERT": _text("Albert", "MaskedLM", embedding_size=24),
    "ELECTRA": _text("Electra", "TokenClassification", embedding_size=24, num_labels=CLASSES),
    "MPNet": _text("MPNet", "MaskedLM"),
    "DeBERTa": _text(
        "Deberta", "MaskedLM", relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=16
    ),
    "DeBERTa v2": _text(
        "DebertaV2", "MaskedLM", relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8,
        share_att_key=True, norm_rel_ebd="layer_norm", max_relative_positions=16,
    ),
    "GPT-2": Network(partial(Transformers, "GPT2", "TokenClassification", vocab_size=WORDS, n_embd=WIDTH, n_layer=2, n_head=4,
                             n_positions=40, num_labels=WORDS, use_cache=False), tokens()),
    "GPT-NeoX": _text("GPTNeoX", "CausalLM", use_cache=False),
    "OPT": _text("OPT", "CausalLM", ffn_dim=96, word_embed_proj_dim=WIDTH, use_cache=False),
    "Bloom": Network(partial(Transformers, "Bloom", "CausalLM", vocab_size=WORDS, hidden_size=WIDTH, n_layer=2, n_head=4,
                             use_cache=False), tokens()),
    "Falcon": _text("Falcon", "CausalLM", use_cache=False, alibi=False),
    "Llama": _llama("Llama"),
    "Mistral": _llama("Mistral", sliding_window=8),
    "Qwen3": _llama("Qwen3"),
    "Gemma2": _llama("Gemma2", sliding_window=8, query_pre_attn_scalar=12),
    "Phi": _llama("Phi"),
    "StableLM": _llama("StableLm", partial_rotary_factor=0.5),
    "Mamba": Network(partial(Transformers, "Mamba", "CausalLM", vocab_size=WORDS, hidden_size=32, state_size=4,
                             num_hidden_layers=2, time_step_rank=4, use_cache=False), tokens(2)),
    "T5": Network(partial(Translator, "T5", vocab_size=WORDS, d_model=WIDTH, d_kv=12, d_ff=96, num_layers=2, num_heads=4,
                          decoder_start_token_id=0), tokens()),
    "BART": Network(partial(Translator, "Bart", vocab_size=WORDS, d_model=WIDTH, encoder_layers=1, decoder_layers=1,
                            encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96,
                            max_position_embeddings=40), tokens()),
    "Whisper encoder": Network(partial(Encoder, "WhisperEncoder", d_model=WIDTH, encoder_layers=2,
                                       encoder_attention_heads=4, encoder_ffn_dim=96, num_mel_bins=20,
                                       max_source_positions=24), noise(2, 20, 48)),
    "wav2vec 2": Network(partial(Encoder, "Wav2Vec2Model", **_SOUND), noise(2, 400)),
    "HuBERT": Network(partial(Encoder, "HubertModel", **_SOUND, do_stable_layer_norm=True, feat_extract_norm="layer"), noise(2, 400)),
    "LSTM": Network(partial(Recurrent, nn.LSTM), tokens()),
    "GRU": Network(partial(Recurrent, nn.GRU), tokens()),
    "3-D convolutions": Network(Volumes, noise(2, 3, 8, 16, 16)),
}  # fmt: skip


def build(name: str) -> nn.Module:
    """A network without dropout, batch normalization by batches: the same at every call, no weight 0 or 1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = NETWORKS[name].make().eval()
        weights = {}
        for part in module.modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                part.train()
            if isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Embedding):
                weights[part.weight] = part.weight[0].numel()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter in weights:
                    parameter.normal_(std=(1.5 / weights[parameter]) ** 0.5)
                else:
                    parameter.add_(0.1 * torch.randn(parameter.shape))
    return module


def data(name: str, seed: int, scores: int, classes: int) -> tuple[Tensor, Tensor]:
    """The input and the labels of one batch, for that many rows of scores."""
    generator = torch.Generator().manual_seed(seed)
    return NETWORKS[name].inputs(generator), torch.randint(0, classes, (scores,), generator=generator)
