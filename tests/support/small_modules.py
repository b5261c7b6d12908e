"""Small modules of PyTorch whose training steps are planned, and a step of them."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional


class Images(nn.Module):
    """Convolutions with batch normalization, whose buffers change in the forward pass, and dropout."""

    def __init__(self, depth: int = 5) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for index in range(depth):
            layers += [nn.Conv2d(8 if index else 3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
        self.features, self.drop, self.head = nn.Sequential(*layers), nn.Dropout(0.3), nn.Linear(8 * 64, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.drop(functional.avg_pool2d(self.features(x), 4).flatten(1))
        return functional.cross_entropy(self.head(x), y)


class Words(nn.Module):
    """Attention and perceptrons: views of views, an embedding tied to the output, dropout of scores."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.words(x)
        for block in self.blocks:
            h = block(h)
        return functional.cross_entropy((h @ self.words.weight.T).flatten(0, 1), x.flatten())


class Scores(nn.Module):
    """The loss is computed outside."""

    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(depth)))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.layers(x)
        return h, h[:, :3].exp()


def case(name: str, *depth: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A module, as deep as is asked for, and inputs."""
    torch.manual_seed(0)
    if name == "images":
        return Images(*depth).train(), (torch.randn(4, 3, 32, 32), torch.randint(0, 5, (4,)))
    if name == "words":
        return Words(*depth).train(), (torch.randint(0, 50, (3, 24)),)
    return Scores(*depth), (torch.randn(256, 64),)


def step(run: Any, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The loss and the gradients, from the same random numbers each time."""
    module.zero_grad()
    torch.manual_seed(1)
    result = run(*inputs)
    loss = result if isinstance(result, torch.Tensor) else sum(one.square().mean() for one in result)
    loss.backward()
    return loss.detach(), [one.grad.clone() for one in module.parameters()]
