"""One convolution of a network, and numbers to measure it with."""

from dataclasses import dataclass

import numpy as np


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

    @property
    def shapes(self) -> dict[str, tuple[int, int, int, int]]:
        """Of the image x, the weight w and the output gradient dy."""
        return {
            "x": (self.n, self.c, self.side, self.side),
            "w": (self.k, self.c // self.groups, self.kernel, self.kernel),
            "dy": (self.n, self.k, self.out, self.out),
        }

    def __str__(self) -> str:
        channels = f"depthwise {self.c}" if self.groups > 1 else f"{self.c}>{self.k}"
        return f"{channels} {self.kernel}x{self.kernel}/{self.stride} @{self.side}"


def values(layer: Layer) -> dict[str, np.ndarray]:
    """Seeded float32 numbers for a layer's image x, weight w and output gradient dy."""
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in layer.shapes.items()}
