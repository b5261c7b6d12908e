"""A training step of PyTorch in two thirds of its memory: the same loss and gradients, bit for bit.

python examples/pytorch.py
"""

import torch
from torch import nn

import memonger.torch

torch.manual_seed(0)
layers = [layer for _ in range(8) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())]
model = nn.Sequential(nn.Conv2d(3, 16, 3), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
images, labels = torch.randn(8, 3, 64, 64), torch.randint(0, 10, (8,))
optimizer = torch.optim.AdamW(model.parameters())


def loss_of(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(images), labels)


def gradients_with(backend: memonger.torch.Backend) -> list[torch.Tensor]:
    model.zero_grad()
    torch.compile(loss_of, backend=backend)(images, labels).backward()
    return [one.grad.clone() for one in model.parameters()]


whole = memonger.torch.backend(None, optimizer)
expected = gradients_with(whole)
budget = whole.plans[0].peak_bytes * 2 // 3
small = memonger.torch.backend(budget, optimizer)
found = gradients_with(small)
print(f"whole: {whole.plans[0]}")
print(f"in a budget: {small.plans[0]}")
print("gradients are", "the same" if all(map(torch.equal, found, expected)) else "others")
