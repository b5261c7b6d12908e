"""Float64 kernels for onnx.reference by PyTorch, where its own are slow, or wrong: ConvTranspose with groups."""

from typing import Any

import numpy as np
import torch
from onnx.reference.op_run import OpRun

CONVOLUTIONS = {1: torch.nn.functional.conv1d, 2: torch.nn.functional.conv2d, 3: torch.nn.functional.conv3d}
TRANSPOSED = {
    1: torch.nn.functional.conv_transpose1d,
    2: torch.nn.functional.conv_transpose2d,
    3: torch.nn.functional.conv_transpose3d,
}

MAX_POOLS = {1: torch.nn.functional.max_pool1d, 2: torch.nn.functional.max_pool2d, 3: torch.nn.functional.max_pool3d}

MAX_POOLS = {1: torch.nn.functional.max_pool1d, 2: torch.nn.functional.max_pool2d, 3: torch.nn.functional.max_pool3d}


def tensor(x: np.ndarray) -> torch.Tensor:
    """A copy: constants of a model can't be written, which PyTorch warns of."""
    return torch.from_numpy(np.array(x))


def padding(x: torch.Tensor, pads: Any) -> torch.Tensor:
    """``x`` with ONNX's pads around its last axes; negative ones cut off."""
    rank = len(pads) // 2
    pairs = [(int(pads[a]), int(pads[a + rank])) for a in reversed(range(rank))]
    return torch.nn.functional.pad(x, [number for pair in pairs for number in pair])


def same_pads(total: list[int], lower: bool) -> list[int]:
    """ONNX's pads from what is missing on each axis."""
    begin = [t - t // 2 if lower else t // 2 for t in total]
    return [*begin, *(t - b for t, b in zip(total, begin, strict=True))]


class Conv(OpRun):
    """Conv."""

    op_domain = ""

    def _run(self, x, w, b=None, auto_pad=None, dilations=None, group=1, kernel_shape=None, pads=None, strides=None):  # type: ignore[no-untyped-def]
        rank = x.ndim - 2
        strides, dilations, pads = strides or [1] * rank, dilations or [1] * rank, pads or [0] * 2 * rank
        if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            extent = [(k - 1) * d + 1 for k, d in zip(w.shape[2:], dilations, strict=True)]
            total = [max(0, (-(-n // s) - 1) * s + e - n) for n, s, e in zip(x.shape[2:], strides, extent, strict=True)]
            pads = same_pads(total, auto_pad == "SAME_LOWER")
        bias = None if b is None else tensor(b)
        image, weight = padding(tensor(x), pads), tensor(w)
        y = CONVOLUTIONS[rank](image, weight, bias, tuple(strides), 0, tuple(dilations), group)
        return (y.numpy(),)


class ConvTranspose(OpRun):
    """ConvTranspose, padding found as onnxruntime finds it."""

    op_domain = ""

    def _run(  # type: ignore[no-untyped-def]
        self, x, w, b=None, auto_pad=None, dilations=None, group=1, kernel_shape=None, output_padding=None,
        output_shape=None, pads=None, strides=None,
    ):  # fmt: skip
        rank = x.ndim - 2
        strides, dilations = strides or [1] * rank, dilations or [1] * rank
        extra, pads = output_padding or [0] * rank, pads or [0] * 2 * rank
        full = [
            (n - 1) * s + (k - 1) * d + 1
            for n, s, k, d in zip(x.shape[2:], strides, w.shape[2:], dilations, strict=True)
        ]
        if output_shape is None and str(auto_pad).startswith("SAME"):
            output_shape = [n * s for n, s in zip(x.shape[2:], strides, strict=True)]
        if output_shape is not None:
            total = [max(0, f + e - o) for f, e, o in zip(full, extra, output_shape, strict=True)]
            pads = same_pads(total, auto_pad != "SAME_UPPER")
        else:
            output_shape = [f + e - a - b for f, e, a, b in zip(full, extra, pads[:rank], pads[rank:], strict=True)]
        image, weight = tensor(x), tensor(w)
        y = TRANSPOSED[rank](image, weight, None, tuple(strides), 0, 0, group, tuple(dilations))
        begin = pads[:rank]
        y = padding(y, [-p for p in begin] + [o + p - f for o, p, f in zip(output_shape, begin, full, strict=True)])
        bias = 0 if b is None else tensor(b).reshape(-1, *[1] * rank)
        return ((y + bias).numpy(),)


class Erf(OpRun):
    """Erf; onnx.reference's is in single precision."""

    op_domain = ""

    def _run(self, x):  # type: ignore[no-untyped-def]
        return (np.asarray(torch.erf(tensor(x)).numpy()),)


class Gelu(OpRun):
    """Gelu; onnx.reference's is in single precision."""

    op_domain = ""

    def _run(self, x, approximate="none"):  # type: ignore[no-untyped-def]
        return (torch.nn.functional.gelu(tensor(x), approximate=approximate).numpy(),)


class MaxPool(OpRun):
    """MaxPool with as much padding at the end as at the beginning; onnx.reference's indices are wrong but in 2-D."""

    op_domain = ""

    def _run(  # type: ignore[no-untyped-def]
        self, x, auto_pad=None, ceil_mode=0, dilations=None, kernel_shape=None, pads=None, storage_order=0, strides=None
    ):
        rank = x.ndim - 2
        pads = pads or [0] * 2 * rank
        assert auto_pad in (None, "NOTSET")
        assert pads[:rank] == pads[rank:]
        y, places = MAX_POOLS[rank](
            tensor(x), kernel_shape, strides or 1, pads[:rank], dilations or 1, bool(ceil_mode), True
        )
        planes = np.arange(x.shape[0] * x.shape[1]) * np.prod(x.shape[2:], dtype=np.int64)
        return y.numpy(), places.numpy() + planes.reshape(*x.shape[:2], *[1] * rank)


class GlobalMaxPool(OpRun):
    """GlobalMaxPool; onnx.reference's is wrong but in 2-D."""

    op_domain = ""

    def _run(self, x):  # type: ignore[no-untyped-def]
        return (x.max(tuple(range(2, x.ndim)), keepdims=True),)


class LRN(OpRun):
    """LRN; onnx.reference's sums only as many channels as there are images."""

    op_domain = ""

    def _run(self, x, alpha=None, beta=None, bias=None, size=None):  # type: ignore[no-untyped-def]
        before = (size - 1) // 2
        total = np.zeros_like(x)
        for c in range(x.shape[1]):
            total[:, c] = np.sum(x[:, max(0, c - before) : c - before + size] ** 2, axis=1)
        return (x / (bias + alpha / size * total) ** beta,)


KERNELS = [Conv, ConvTranspose, Erf, Gelu, MaxPool, GlobalMaxPool, LRN]
