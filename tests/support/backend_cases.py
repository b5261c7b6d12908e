"""onnx's node tests made in a tenth of the time: their expected outputs of pooling, and the text of their pages."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import onnx.backend.test.case.base as case_base
from onnx.reference.ops import op_pool_common

Pool = Callable[..., np.ndarray]


@contextlib.contextmanager
def made_quickly(pool: Pool | None = None) -> Iterator[None]:
    """While node tests are imported: `pool` in place of onnx's loops over every element, and no pages of their code."""
    with (
        mock.patch.object(op_pool_common, "pool", pool or pooled),
        mock.patch.object(case_base, "process_snippet", lambda operator, name, export: (name, "")),
    ):
        yield


def pooled(
    padded: np.ndarray, x_shape: Sequence[int], kernel: Sequence[int], strides: Sequence[int] | None,
    out_shape: Sequence[int], pooling_type: str, pads_required: Any = None, pads: Any = None,
    dilations: Sequence[int] | None = None, count_include_pad: int = 0, p: int = 1,
) -> np.ndarray:  # fmt: skip
    """What `onnx.reference.ops.op_pool_common.pool` computes, all windows at a time, position by position.

    What is padding, or beyond it, is NaN and left out, unless it is to be counted. Stock onnxruntime is tested against
    the same numbers, so a mistake here lowers the count of tests that it passes.
    """
    spatial = len(x_shape) - 2
    strides, dilations = strides or [1] * spatial, dilations if dilations is not None else [1] * spatial
    reach = [(out - 1) * stride + 1 for out, stride in zip(out_shape, strides, strict=True)]
    padding = np.reshape(pads if pads is not None else [0] * 2 * spatial, (2, spatial)).sum(0)
    inside = padded[(..., *map(slice, np.add(x_shape[2:], padding)))]
    short = [
        max(0, length + (size - 1) * dilation - have)
        for length, size, dilation, have in zip(reach, kernel, dilations, inside.shape[2:], strict=True)
    ]
    wide = inside.astype(np.result_type(padded, np.float32))
    wide = np.pad(wide, [(0, 0), (0, 0), *((0, count) for count in short)], constant_values=np.nan)
    parts = []
    for place in itertools.product(*map(range, kernel)):
        starts = [index * dilation for index, dilation in zip(place, dilations, strict=True)]
        along = zip(starts, reach, strides, strict=True)
        parts.append(wide[(..., *(slice(start, start + length, stride) for start, length, stride in along))])
    windows = np.stack(parts)
    match pooling_type:
        case "AVG":
            result = np.nanmean(windows, 0)
        case "MAX":
            result = np.nanmax(windows, 0)
        case "LPPOOL":
            result = np.nansum(np.abs(windows) ** p, 0) ** (1.0 / p)
    return result.astype(padded.dtype)
