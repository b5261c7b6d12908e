"""The convolutions of the networks that memonger is measured on."""

from dataclasses import dataclass

import numpy as np

# channels in, channels out, image side, kernel side (3), stride (1)
RESNET18 = (
    "3 64 224 7 2, 64 64 56, 64 128 56 3 2, 64 128 56 1 2, 128 128 28, 128 256 28 3 2, 256 256 14, 256 512 14 3 2, "
    "512 512 7"
)
RESNET50 = (
    "64 64 56 1, 64 256 56 1, 256 64 56 1, 256 128 56 1, 128 128 56 3 2, 128 512 28 1, 256 512 56 1 2, 512 128 28 1, "
    "256 1024 14 1, 1024 256 14 1, 512 1024 28 1 2, 512 512 14 3 2, 512 2048 7 1, 1024 2048 14 1 2, 2048 512 7 1"
)
DENSENET121 = (
    "64 128 56 1, 192 128 56 1, 128 32 56, 256 128 28 1, 480 128 28 1, 128 32 28, 512 256 28 1, 640 128 14 1, "
    "128 32 14, 768 128 7 1, 128 32 7"
)
MOBILENET_V2 = (
    "3 32 224 3 2, 32 16 112 1, 16 96 112 1, 96 24 56 1, 24 144 56 1, 144 24 56 1, 32 192 28 1, 192 32 28 1, "
    "64 384 14 1, 384 64 14 1, 96 576 14 1, 160 960 7 1, 960 160 7 1, 320 1280 7 1"
)
DEPTHWISE = (
    "32 112 1, 96 112 2, 144 56 1, 144 56 2, 192 28 1, 192 28 2, 384 14 1, 576 14 2, 960 7 1"  # channels side stride
)


@dataclass(frozen=True, slots=True)
class Layer:
    """A square convolution: batch, channels in and out, image side, kernel side, stride, groups."""

    n: int
    c: int
    k: int
    side: int
    kernel: int = 3
    stride: int = 1
    groups: int = 1

    @property
    def pad(self) -> int:
        """Padding that keeps the image's side at stride 1."""
        return self.kernel // 2

    @property
    def out(self) -> int:
        """The output's side."""
        return (self.side + 2 * self.pad - self.kernel) // self.stride + 1

    @property
    def end(self) -> int:
        """Padding after the image that the taps really read; negative where they don't reach the image's end."""
        return (self.out - 1) * self.stride + self.kernel - self.side - self.pad

    def __str__(self) -> str:
        channels = f"depthwise {self.c}" if self.groups > 1 else f"{self.c}>{self.k}"
        return f"{channels} {self.kernel}x{self.kernel}/{self.stride} @{self.side}"


def dense(batch: int) -> list[Layer]:
    """Every distinct layer with one group."""
    texts = ", ".join((RESNET18, RESNET50, DENSENET121, MOBILENET_V2)).split(", ")
    return list(dict.fromkeys(Layer(batch, *map(int, text.split())) for text in texts))


def depthwise(batch: int) -> list[Layer]:
    """MobileNet-v2's depthwise layers."""
    found = []
    for text in DEPTHWISE.split(", "):
        c, side, stride = map(int, text.split())
        found.append(Layer(batch, c, c, side, 3, stride, c))
    return found


def values(layer: Layer) -> dict[str, np.ndarray]:
    """Seeded float32 numbers for a layer's image x, weight w and output gradient dy."""
    rng = np.random.default_rng(0)
    shapes = {
        "x": (layer.n, layer.c, layer.side, layer.side),
        "w": (layer.k, layer.c // layer.groups, layer.kernel, layer.kernel),
        "dy": (layer.n, layer.k, layer.out, layer.out),
    }
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
