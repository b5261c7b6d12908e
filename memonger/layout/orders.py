"""The orders in which allocators consider buffers. Each is a permutation of rows, first considered first.

A duration is counted in steps at which some buffer starts or stops, so the scale of time doesn't matter. Ties are
broken by size, alignment and duration (large first), then start and the caller's order: never by id.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from memonger.layout.rows import Rows

Order = Callable[[Rows], NDArray[np.intp]]


def _sorted_by(rows: Rows, *keys: NDArray[np.generic]) -> NDArray[np.intp]:
    """Rows sorted by these keys, the most significant first, and then by the common tie-breaks."""
    return np.lexsort((rows.source, rows.start, rows.start - rows.stop, -rows.alignment, -rows.size, *reversed(keys)))


def by_size(rows: Rows) -> NDArray[np.intp]:
    """Largest first."""
    return _sorted_by(rows)


def by_area(rows: Rows) -> NDArray[np.intp]:
    """Largest product of bytes and duration first."""
    return _sorted_by(rows, rows.size.astype(np.float64) * (rows.start - rows.stop))


def by_duration(rows: Rows) -> NDArray[np.intp]:
    """Longest-lived first."""
    return _sorted_by(rows, rows.start - rows.stop)


def by_start(rows: Rows) -> NDArray[np.intp]:
    """Earliest first: the order in which a runtime without a plan would allocate."""
    return _sorted_by(rows, rows.start)


def by_conflict(rows: Rows) -> NDArray[np.intp]:
    """Buffers that overlap the most others first."""
    begun = np.searchsorted(np.sort(rows.start), rows.stop, side="left")
    ended = np.searchsorted(np.sort(rows.stop), rows.start, side="right")
    return _sorted_by(rows, ended - begun)


ORDERS: Mapping[str, Order] = MappingProxyType(
    {
        "size": by_size,
        "area": by_area,
        "duration": by_duration,
        "start": by_start,
        "conflict": by_conflict,
    }
)
