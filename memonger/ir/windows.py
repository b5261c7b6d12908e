"""Sliding windows: the geometry that convolutions and pools share."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from memonger.ir.emitter import Emitter


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows that slide over an image; one number for each axis of the image.

    Window ``o`` reads the elements ``o * stride - begin + i * dilation`` for ``i`` below ``kernel``; those outside the
    image are padding. Where a pool's windows are less than its stride, ``begin`` may be negative: the first one lies
    within the image.
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

    def padding(self, *, is_pool: bool, rounded: bool = False, counted: bool = False) -> dict[str, int | list[int]]:
        """The attributes that say the padding, so that whoever counts the windows finds as many.

        Args:
            is_pool: Whether padding has to be less than a window.
            rounded: Whether the number of windows may be rounded up (``ceil_mode``), where that gives as many.
            counted: Whether averages count padding that is said, of which there can't be more then.

        Raises:
            ValueError: none gives so many windows.
        """
        ends = [max(0, min(end, excess)) for end, excess in zip(self.end, self.excess, strict=True)]
        sizes = list(zip(self.image, self.begin, ends, self.extent, self.strides, self.count, strict=True))
        is_more = any(excess > end for excess, end in zip(self.excess, self.end, strict=True))
        is_up = rounded and is_more and all(-(-(n + b + e - reach) // s) + 1 == c for n, b, e, reach, s, c in sizes)
        if is_up and min(self.begin) >= 0:
            return {"pads": [*self.begin, *ends], "ceil_mode": 1}
        is_fewer = any(excess <= -stride for excess, stride in zip(self.excess, self.strides, strict=True))
        pads = [*self.begin, *(max(0, excess) for excess in self.excess)]
        is_wide = is_pool and any(pad >= size for pad, size in zip(pads, self.kernel * 2, strict=True))
        if min(self.begin) < 0 or is_fewer or is_wide or (counted and is_more):
            raise ValueError(f"no padding gives {list(self.count)} windows of {list(self.image)} elements")
        return {"pads": pads}

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

    Where the node leaves the padding to be found (``auto_pad``, ``output_shape``), it follows from the sizes: of a
    pool's windows as if they weren't dilated, as onnxruntime has it.
    """
    rank = len(image)
    strides = Emitter.attribute(node, "strides", []) or [1] * rank
    dilations = Emitter.attribute(node, "dilations", []) or [1] * rank
    pads = Emitter.attribute(node, "pads", []) or [0] * (2 * rank)
    auto = Emitter.attribute(node, "auto_pad", "NOTSET")
    begin, end = list(pads[:rank]), list(pads[rank:])
    if auto.startswith("SAME") or (up and "output_shape" in node.attributes):
        extra = Emitter.attribute(node, "output_padding", []) or [0] * rank
        is_pool = node.op_type.endswith("Pool")
        for a in range(rank):
            windows, apart = (-(-image[a] // strides[a]), 1) if is_pool else (count[a], dilations[a])
            total = (windows - 1) * strides[a] + (kernel[a] - 1) * apart + 1 - image[a]
            total = max(0, total + (extra[a] if up else 0)) if not is_pool else total
            larger_first = auto == "SAME_LOWER" or (up and auto != "SAME_UPPER")  # as onnxruntime does
            begin[a] = int((total + larger_first) / 2)
            end[a] = total - begin[a]
    elif auto == "VALID":
        begin, end = [0] * rank, [0] * rank
    return Windows(
        tuple(image), tuple(count), tuple(kernel), tuple(strides), tuple(dilations), tuple(begin), tuple(end)
    )
