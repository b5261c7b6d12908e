"""Where each of several tensors lies in one stretch of memory."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from memonger.runtime.feeds import Input

GRAIN = 256  # bytes; what a tensor begins at a multiple of, on any device


@dataclass(frozen=True, slots=True)
class Slots:
    """``offsets`` in bytes by name, and the bytes of all."""

    offsets: Mapping[str, int]
    nbytes: int

    @staticmethod
    def of_sizes(sizes: Iterable[tuple[str, int]]) -> "Slots":
        """Slots for tensors of these bytes, one after the other."""
        offsets, end = {}, 0
        for name, size in sizes:
            offsets[name] = end
            end += -(-size // GRAIN) * GRAIN
        return Slots(offsets, end)

    @staticmethod
    def of_arrays(arrays: Mapping[str, np.ndarray]) -> "Slots":
        """Slots for arrays."""
        return Slots.of_sizes((name, array.nbytes) for name, array in arrays.items())

    @staticmethod
    def of_inputs(inputs: Iterable[Input]) -> "Slots":
        """Slots for the inputs that are tensors of a known size; text and sequences have none."""
        return Slots.of_sizes(
            (value.name, -(-int(np.prod(value.shape, dtype=np.int64)) * value.dtype.bitwidth // 8))
            for value in inputs
            if value.shape is not None and value.dtype is not None and value.dtype != ir.DataType.STRING
        )
