"""Sliding windows: the geometry that convolutions and pools share."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from memonger.ir.emitter import Emitter


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows that slide over an image; one number for each axis of the image.

    Window ``o`` reads the elements ``o * stride - begin + i * dilation`` for ``i`` below ``kernel``; those outside the
    image are padding.
    """

    image: tuple[int, ...]
    count: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.image)

    @property
    def extent(self) -> tuple[int, ...]:
        """Elements from the first that a window reads to the last."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True))

    @property
    def excess(self) -> tuple[int, ...]:
        """How far the last window reaches beyond the image; negative where it doesn't come to the end."""
        return tuple(
            (c - 1) * s + e - b - n
            for c, s, e, b, n in zip(self.count, self.strides, self.extent, self.begin, self.image, strict=True)
        )

    @property
    def is_pointwise(self) -> bool:
        """Whether a window is one element, without padding."""
        return all(k == 1 for k in self.kernel) and not any(self.begin) and not any(self.end)

    @property
    def is_dense(self) -> bool:
        """Whether windows lie at each element."""
        return all(s == 1 for s in self.strides)

    def within_image(self) -> "Windows":
        """The windows without those of their elements that lie outside the image in every one of them."""
        first, last = [], []
        for n, c, k, s, d, b in zip(
            self.image, self.count, self.kernel, self.strides, self.dilations, self.begin, strict=True
        ):
            first.append(min(k - 1, max(0, -((c * s - s - b) // d))))
            last.append(max(first[-1] + 1, min(k, -((-n - b) // d))))
        begin = (b - i * d for b, i, d in zip(self.begin, first, self.dilations, strict=True))
        return replace(self, kernel=tuple(j - i for i, j in zip(first, last, strict=True)), begin=tuple(begin))


def windows_of(
    node: ir.Node, image: Sequence[int], count: Sequence[int], kernel: Sequence[int], *, up: bool = False
) -> Windows:
    """The windows of a Conv or of a pool; with ``up``, of a ConvTranspose, whose image is its output.

    Where the node leaves the padding to be found (``auto_pad``, ``output_shape``), it follows from the sizes.
    """
    rank = len(image)
    strides = Emitter.attribute(node, "strides", []) or [1] * rank
    dilations = Emitter.attribute(node, "dilations", []) or [1] * rank
    pads = Emitter.attribute(node, "pads", []) or [0] * (2 * rank)
    auto = Emitter.attribute(node, "auto_pad", "NOTSET")
    begin, end = list(pads[:rank]), list(pads[rank:])
    if auto.startswith("SAME") or (up and "output_shape" in node.attributes):
        extra = Emitter.attribute(node, "output_padding", []) or [0] * rank
        for a in range(rank):
            total = (count[a] - 1) * strides[a] + (kernel[a] - 1) * dilations[a] + 1 - image[a]
            total = max(0, total + (extra[a] if up else 0))
            larger_first = auto == "SAME_LOWER" or (up and auto != "SAME_UPPER")  # as onnxruntime does
            begin[a] = total - total // 2 if larger_first else total // 2
            end[a] = total - begin[a]
    elif auto == "VALID":
        begin, end = [0] * rank, [0] * rank
    return Windows(
        tuple(image), tuple(count), tuple(kernel), tuple(strides), tuple(dilations), tuple(begin), tuple(end)
    )
