"""Networks in PyTorch that read inputs of any length: transformers, a reader of text in images, a vocoder."""

import torch
from torch import Tensor, nn

WORDS = 1000


class Hub(nn.Module):
    """A transformer of Hugging Face's transformers, from token numbers to its last hidden state."""

    def __init__(self, name: str, layers: int = 2, width: int = 128) -> None:
        import transformers

        super().__init__()
        heads = width // 64
        if name == "bert":
            sizes = {"vocab_size": WORDS, "num_hidden_layers": layers, "hidden_size": width}
            config = transformers.BertConfig(**sizes, num_attention_heads=heads, intermediate_size=4 * width)
            self.network = transformers.BertModel(config, add_pooling_layer=False)
        else:
            small = {"n_layer": layers, "n_embd": width, "n_head": heads}
            self.network = transformers.GPT2Model(transformers.GPT2Config(vocab_size=WORDS, use_cache=False, **small))

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.network(input_ids=ids, attention_mask=mask).last_hidden_state


class Reader(nn.Module):
    """A text reader as in Shi et al. 2017 (CRNN): convolutions over a line of text, two bidirectional LSTM layers."""

    def __init__(self, classes: int = 97, width: int = 32) -> None:
        super().__init__()
        sizes = [(1, width, 2, 2), (width, 2 * width, 2, 2), (2 * width, 4 * width, 2, 1), (4 * width, 8 * width, 2, 1)]
        self.layers = nn.Sequential(*(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d((high, wide)))
            for a, b, high, wide in sizes
        ), nn.AvgPool2d((2, 1)))  # fmt: skip
        self.recurrent = nn.LSTM(8 * width, 128, 2, bidirectional=True)
        self.head = nn.Linear(256, classes)

    def forward(self, x: Tensor) -> Tensor:
        columns = self.layers(x).squeeze(2).permute(2, 0, 1)
        return self.head(self.recurrent(columns)[0])


class Vocoder(nn.Module):
    """From spectra to sound as in Kong et al. 2020 (HiFi-GAN), small: transposed and dilated convolutions."""

    def __init__(self, width: int = 128, rates: tuple[int, ...] = (8, 8, 2, 2)) -> None:
        super().__init__()
        self.first, self.raise_, self.blocks = nn.Conv1d(80, width, 7, padding=3), nn.ModuleList(), nn.ModuleList()
        for rate in rates:
            self.raise_.append(nn.ConvTranspose1d(width, width // 2, 2 * rate, rate, rate // 2))
            width //= 2
            self.blocks.append(nn.ModuleList(nn.Conv1d(width, width, 3, dilation=d, padding=d) for d in (1, 3, 5)))
        self.last = nn.Conv1d(width, 1, 7, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for up, block in zip(self.raise_, self.blocks, strict=True):
            x = up(nn.functional.leaky_relu(x, 0.1))
            for layer in block:
                x = x + layer(nn.functional.leaky_relu(x, 0.1))
        return torch.tanh(self.last(nn.functional.leaky_relu(x)))
