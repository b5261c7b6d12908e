"""Networks of many kinds from torch and transformers, tiny and with seeded weights: what `benchmarks.kinds` trains."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks import kind_modules as modules
from benchmarks.kind_modules import CLASSES, WIDTH, WORDS
from benchmarks.torch_models import DenseNet, ResNet, Transformers, UNet

LENGTH = 16  # of sentences

Inputs = Callable[[torch.Generator], Tensor]


@dataclass(frozen=True, slots=True)
class Network:
    """What makes a module, whose scores are ``[N, C, ...]``, and what makes a batch of inputs."""

    make: Callable[[], nn.Module]
    inputs: Inputs


def numbers(*shape: int) -> Inputs:
    """Normal numbers of that shape."""
    return lambda generator: torch.randn(*shape, generator=generator)


def images(size: int = 32) -> Inputs:
    """``[4, 3, size, size]``."""
    return numbers(4, 3, size, size)


def sentences(batch: int = 4) -> Inputs:
    """Tokens ``[batch, 16]``, none of them 0 to 2: padding, say, which a network might leave out."""
    return lambda generator: torch.randint(3, WORDS, (batch, LENGTH), generator=generator)


def _vision(family: str, inputs: Inputs | None = None, task: str = "ImageClassification", **settings: Any) -> Network:
    return Network(partial(Transformers, family, task, num_labels=CLASSES, **settings), inputs or images())


def _text(family: str, task: str = "CausalLM", batch: int = 4, **settings: Any) -> Network:
    return Network(partial(Transformers, family, task, vocab_size=WORDS, **settings), sentences(batch))


def _encoder(name: str, inputs: Inputs, **settings: Any) -> Network:
    return Network(partial(modules.Encoder, name, **settings), inputs)


def _translator(family: str, **settings: Any) -> Network:
    return Network(partial(modules.Translator, family, vocab_size=WORDS, d_model=WIDTH, **settings), sentences())


_LAYERS: Mapping[str, Any] = {
    "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
}  # fmt: skip
_BERT: Mapping[str, Any] = {**_LAYERS, "max_position_embeddings": 40, "pad_token_id": 1}
_GPT: Mapping[str, Any] = {**_BERT, "use_cache": False}
_LLAMA: Mapping[str, Any] = {**_GPT, "num_key_value_heads": 2, "head_dim": 12}
_GPT2: Mapping[str, Any] = {"n_embd": WIDTH, "n_layer": 2, "n_head": 4, "n_positions": 40, "use_cache": False}
_VIT: Mapping[str, Any] = {**_LAYERS, "image_size": 32, "patch_size": 8}
_FOUR: Mapping[str, Any] = {"hidden_sizes": (16, 24, 32, 48), "depths": (1, 1, 1, 1)}
_PYRAMID: Mapping[str, Any] = {**_FOUR, "hidden_sizes": (16, 32, 32, 48), "num_attention_heads": (1, 2, 2, 4)}
_SWIN: Mapping[str, Any] = {
    "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4,
}  # fmt: skip
_SOUND: Mapping[str, Any] = {
    **_LAYERS, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4, "num_feat_extract_layers": 2,
}  # fmt: skip
_DEBERTA: Mapping[str, Any] = {**_BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
_DEBERTA_V2: Mapping[str, Any] = {
    **_DEBERTA,
    "position_buckets": 8,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
}
_FNET: Mapping[str, Any] = {"num_hidden_layers": 2, "intermediate_size": 96, "pad_token_id": 1}
_MAMBA: Mapping[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "use_cache": False}

CONVOLUTIONS: Mapping[str, Network] = {
    "ConvNeXt": _vision("ConvNext", **_FOUR, patch_size=2),
    "ConvNeXt v2": _vision("ConvNextV2", **_FOUR, patch_size=2),
    "ResNet": _vision("ResNet", embedding_size=16, hidden_sizes=(16, 32), depths=(1, 2)),
    "ResNeXt": Network(partial(ResNet, (1, 1), True, width=16, classes=CLASSES, groups=4, group_width=16), images()),
    "RegNet": _vision("RegNet", **_FOUR, embedding_size=16, groups_width=8),
    "DenseNet": Network(partial(DenseNet, (2, 2), growth=8, classes=CLASSES), images()),
    "EfficientNet": _vision(
        "EfficientNet", image_size=32, width_coefficient=0.25, depth_coefficient=0.25, hidden_dim=320
    ),
    "MobileNet v2": _vision("MobileNetV2", images(64), depth_multiplier=0.25, image_size=64),
    "MobileNet v3": Network(modules.MobileNetV3, images()),
    "ShuffleNet v2": Network(modules.ShuffleNet, images()),
    "SqueezeNet": Network(modules.SqueezeNet, images()),
    "Inception v3": Network(modules.Inception, images()),
    "FocalNet": _vision(
        "FocalNet", image_size=32, patch_size=4, embed_dim=16, depths=(1, 1), focal_levels=(2, 2), focal_windows=(3, 3)
    ),
    "PoolFormer": _vision("PoolFormer", images(64), **_FOUR),
    "U-Net": Network(partial(UNet, 8, 2, 3), numbers(2, 1, 32, 32)),
    "3-D convolutions": Network(modules.Volumes, numbers(2, 3, 8, 16, 16)),
}
VISION: Mapping[str, Network] = {
    "ViT": _vision("ViT", **_VIT),
    "DeiT": _vision("DeiT", **_VIT),
    "BEiT": _vision("Beit", **_VIT, use_relative_position_bias=True),
    "DINOv2": _encoder(
        "Dinov2Model", images(), hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, image_size=32,
        patch_size=8,
    ),
    "CLIP vision": _encoder("CLIPVisionModel", images(), **_VIT),
    "Swin": _vision("Swin", **_SWIN),
    "Swin v2": _vision("Swinv2", **_SWIN),
    "MaxViT": Network(modules.MaxViT, images(16)),
    "MobileViT": _vision(
        "MobileViT", images(64), image_size=64, hidden_sizes=(24, 32, 40), neck_hidden_sizes=(8, 8, 16, 16, 24, 24, 48)
    ),
    "CvT": _vision("Cvt", embed_dim=(16, 32, 48), num_heads=(1, 2, 3), depth=(1, 2, 3)),
    "PVT": _vision("Pvt", images(64), **_PYRAMID, image_size=64, mlp_ratios=(2, 2, 2, 2)),
    "SegFormer": Network(
        partial(modules.Pixels, "Segformer", **_PYRAMID, decoder_hidden_size=32, num_labels=CLASSES),
        numbers(2, 3, 64, 64),
    ),
    "VideoMAE": _vision("VideoMAE", numbers(2, 4, 3, 32, 32), "VideoClassification", **_VIT, num_frames=4),
}  # fmt: skip
TEXT: Mapping[str, Network] = {
    "BERT": _text("Bert", "MaskedLM", **_BERT),
    "RoBERTa": _text("Roberta", "SequenceClassification", num_labels=CLASSES, **_BERT),
    "DistilBERT": _text("DistilBert", "MaskedLM", dim=WIDTH, n_layers=2, n_heads=4, hidden_dim=96),
    "ALBERT": _text("Albert", "MaskedLM", **_BERT, embedding_size=24),
    "ELECTRA": _text("Electra", "TokenClassification", **_BERT, embedding_size=24, num_labels=CLASSES),
    "MPNet": _text("MPNet", "MaskedLM", **_BERT),
    "ModernBERT": _text("ModernBert", "MaskedLM", **_BERT, local_attention=8),
    "SqueezeBERT": _text("SqueezeBert", "MaskedLM", **_BERT, embedding_size=WIDTH),
    "DeBERTa": _text("Deberta", "MaskedLM", **_DEBERTA, max_relative_positions=16),
    "DeBERTa v2": _text("DebertaV2", "MaskedLM", **_DEBERTA_V2),
    "XLNet": _text(
        "XLNet", "TokenClassification", d_model=WIDTH, n_layer=2, n_head=4, d_inner=96, use_mems_eval=False,
        num_labels=CLASSES,
    ),
    "FNet": _text("FNet", "MaskedLM", **_FNET, hidden_size=WIDTH),
    "FNet, 64 wide": _text("FNet", "MaskedLM", **_FNET, hidden_size=64),  # onnxruntime's DFT is more exact there
    "Nyströmformer": _text(
        "Nystromformer", "MaskedLM", **_BERT, segment_means_seq_len=LENGTH, num_landmarks=4, conv_kernel_size=5
    ),
    "GPT-2": _text("GPT2", "TokenClassification", **_GPT2, num_labels=WORDS),
    "GPT-J": _text("GPTJ", **_GPT2, rotary_dim=8),
    "GPT-NeoX": _text("GPTNeoX", **_GPT),
    "OPT": _text("OPT", **_GPT, ffn_dim=96, word_embed_proj_dim=WIDTH),
    "Bloom": _text("Bloom", hidden_size=WIDTH, n_layer=2, n_head=4, use_cache=False),
    "Falcon": _text("Falcon", **_GPT),
    "Llama": _text("Llama", **_LLAMA),
    "Mistral": _text("Mistral", **_LLAMA, sliding_window=8),
    "Mixtral": _text("Mixtral", **_LLAMA, num_local_experts=4, experts_implementation="batched_mm"),
    "Qwen3": _text("Qwen3", **_LLAMA),
    "Gemma2": _text("Gemma2", **_LLAMA, sliding_window=8, query_pre_attn_scalar=12),
    "Phi": _text("Phi", **_LLAMA),
    "StableLM": _text("StableLm", **_LLAMA, partial_rotary_factor=0.5),
    "Mamba": _text("Mamba", batch=2, **_MAMBA, state_size=4, time_step_rank=4),
    "Mamba 2": _text("Mamba2", batch=2, **_MAMBA, state_size=8, num_heads=4, head_dim=16, n_groups=1, chunk_size=8),
    "RWKV": _text(
        "Rwkv", batch=2, hidden_size=WIDTH, num_hidden_layers=2, context_length=40, rescale_every=0, use_cache=False
    ),
    "T5": _translator("T5", d_kv=12, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0),
    "BART": _translator(
        "Bart", encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=96, decoder_ffn_dim=96, max_position_embeddings=40,
    ),
    "LSTM": Network(partial(modules.Recurrent, nn.LSTM), sentences()),
    "GRU": Network(partial(modules.Recurrent, nn.GRU), sentences()),
}  # fmt: skip
SOUND: Mapping[str, Network] = {
    "Whisper encoder": _encoder(
        "WhisperEncoder", numbers(2, 20, 48), d_model=WIDTH, encoder_layers=2, encoder_attention_heads=4,
        encoder_ffn_dim=96, num_mel_bins=20, max_source_positions=24,
    ),
    "wav2vec 2": _encoder("Wav2Vec2Model", numbers(2, 400), **_SOUND),
    "HuBERT": _encoder(
        "HubertModel", numbers(2, 400), **_SOUND, do_stable_layer_norm=True, feat_extract_norm="layer"
    ),
    "WavLM": _encoder("WavLMModel", numbers(2, 400), **_SOUND, num_buckets=16),
    "AST": _vision(
        "AST", numbers(2, 48, 16), "AudioClassification", **_LAYERS, patch_size=8, frequency_stride=8, time_stride=8,
        max_length=48, num_mel_bins=16,
    ),
}  # fmt: skip
NETWORKS: Mapping[str, Network] = {**CONVOLUTIONS, **VISION, **TEXT, **SOUND}

_WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)


def build(name: str) -> nn.Module:
    """A network without dropout, batch normalization by batches: the same at every call, no parameter at 0 or 1."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        module = NETWORKS[name].make().eval()
        drawn = [part.weight for part in module.modules() if isinstance(part, _WEIGHTED)]
        for parameter in module.parameters():
            if any(parameter is weight for weight in drawn):
                parameter.normal_(std=(1.5 / parameter[0].numel()) ** 0.5)
            else:
                parameter.add_(0.1 * torch.randn(parameter.shape))
        for part in module.modules():
            if isinstance(part, _BatchNorm):
                part.train()
    return module


def batches(name: str, scores: Sequence[int], count: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs and labels of some batches, for scores of that shape."""
    made = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        x = NETWORKS[name].inputs(generator)
        made.append((x, torch.randint(0, scores[1], (scores[0], *scores[2:]), generator=generator)))
    return made
