"""The orders in which allocators consider buffers. Each is a permutation of rows, first considered first.

A duration is counted in steps at which some buffer starts or stops, so the scale of time doesn't matter. Ties are
broken by size, alignment and duration (large first), then start and the caller's order: never by id.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from memonger.allocation.rows import SortedBuffers

Order = Callable[[SortedBuffers], NDArray[np.intp]]


def _sorted_by(rows: SortedBuffers, *keys: NDArray[np.generic]) -> NDArray[np.intp]:
    """Rows sorted by these keys, the most significant first, and then by the common tie-breaks."""
    return np.lexsort((rows.source, rows.start, rows.start - rows.stop, -rows.alignment, -rows.size, *reversed(keys)))


def _overlaps(rows: SortedBuffers) -> NDArray[np.intp]:
    """How many buffers begin before each ends, less those that have ended before it begins."""
    begun = np.searchsorted(np.sort(rows.start), rows.stop, side="left")
    return begun - np.searchsorted(np.sort(rows.stop), rows.start, side="right")


ORDERS: Mapping[str, Order] = MappingProxyType(
    {
        "size": _sorted_by,
        "area": lambda rows: _sorted_by(rows, rows.size.astype(np.float64) * (rows.start - rows.stop)),
        "duration": lambda rows: _sorted_by(rows, rows.start - rows.stop),
        "start": lambda rows: _sorted_by(rows, rows.start),
        "conflict": lambda rows: _sorted_by(rows, -_overlaps(rows)),
    }
)
"""Largest first; largest product of bytes and duration; longest-lived; earliest, as a runtime without a plan would
allocate; those that overlap the most others."""
