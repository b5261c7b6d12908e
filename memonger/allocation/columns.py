"""Buffers as numpy columns, in the caller's order."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from memonger.allocation.buffers import Buffer, validate

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """One entry for each buffer. Steps are ranks among the steps at which a buffer starts or stops.

    Attributes:
        size: Bytes.
        slack: Bytes by which the size falls short of a multiple of ``unit``.
        start: Rank of the first step at which the bytes are in use.
        stop: Rank of the first step at which they are free again.
        alignment: Bytes.
        unit: The smallest alignment, in bytes: every offset is a multiple of it.
        steps: Number of steps at which a buffer starts or stops.
    """

    size: Ints
    slack: Ints
    start: Ints
    stop: Ints
    alignment: Ints
    unit: int
    steps: int

    @classmethod
    def of(cls, buffers: Sequence[Buffer]) -> Self:
        """The columns of at least one buffer.

        Raises:
            LayoutError: The problem is malformed (see ``validate``).
        """
        validate(buffers)
        table = np.array([(b.size, b.start, b.stop, b.alignment) for b in buffers], dtype=np.int64)
        size, alignment = table[:, 0], table[:, 3]
        steps = np.unique(table[:, 1:3])
        start, stop = np.searchsorted(steps, table[:, 1]), np.searchsorted(steps, table[:, 2])
        unit = int(alignment.min())
        return cls(size, -size % unit, start, stop, alignment, unit, len(steps))
