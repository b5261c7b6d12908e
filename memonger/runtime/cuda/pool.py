"""What onnxruntime's CUDA provider allocates for one session, handed out by us instead of its own arena.

Left alone the provider's arena grows by powers of two and never shrinks, and nothing says what it is for. Its options
``gpu_external_alloc`` and ``gpu_external_free`` take two functions instead. With every planned value bound to an
address two kinds of requests are left: weights while the session is made, and workspace of kernels (cuDNN's workspace).
"""

import ctypes
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import numpy as np

from memonger.devices import Device
from memonger.errors import MemongerError
from memonger.runtime.cuda import driver
from memonger.runtime.onnxruntime import onnxruntime
from memonger.units import format_size
from memonger.words import option

GRAIN = 256  # bytes; what CUDA aligns allocations to

_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_EMPTY = ctypes.CFUNCTYPE(None)


class PoolRegion:
    """First fit in a stretch of bytes; the same requests in the same order always get the same offsets.

    Args:
        capacity: Bytes; None for as many as are asked for.

    Attributes:
        high: The end of the furthest stretch ever used.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self.capacity, self.high = capacity, 0
        self._used: list[tuple[int, int]] = []  # (begin, end), by begin

    def take(self, size: int) -> int | None:
        """Offset of a free stretch, a multiple of `GRAIN`; None if there is none."""
        size = -(-max(size, 1) // GRAIN) * GRAIN
        begin = index = 0
        for used, end in self._used:
            if used - begin >= size:
                break
            begin, index = end, index + 1
        if self.capacity is not None and begin + size > self.capacity:
            return None
        self._used.insert(index, (begin, begin + size))
        self.high = max(self.high, begin + size)
        return begin

    def give(self, offset: int) -> bool:
        """Free the stretch that begins there; False if none does."""
        index = bisect_left(self._used, (offset, 0))
        if index == len(self._used) or self._used[index][0] != offset:
            return False
        del self._used[index]
        return True


@dataclass(frozen=True, slots=True)
class Event:
    """An allocation (``size`` bytes), or the freeing of one (None), at ``nanoseconds`` of the system's clock."""

    nanoseconds: int
    address: int
    size: int | None


@cache
def _allocator_of_tensors(index: int) -> None:
    """Have onnxruntime make the allocator of `OrtValue`s on a device now.

    It is one for the process, made with the first such tensor, and takes the functions of the session made last:
    tensors of the caller's would lie in a pool's region, and outlive it.
    """
    onnxruntime().OrtValue.ortvalue_from_shape_and_type([1], np.float32, "cuda", index)


class Pool:
    """The device memory of an onnxruntime session beside our arena: weights, and one region for workspace.

    Sessions that run one after the other may share it.

    Args:
        device: Where.

    Attributes:
        weight_bytes: What the session took while it was made.
        scratch_bytes: Size of the region.
        overflow_bytes: The most that didn't fit the region at any time.
        refused: Why the last request was refused; None if none was.
        events: Every request, while `recording`; None otherwise.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.weight_bytes = self.scratch_bytes = self.overflow_bytes = 0
        self.refused: str | None = None
        self.events: list[Event] | None = None
        self._base = self._beside = 0
        self._region, self._capped, self._loaded = PoolRegion(0), False, False
        self._users = self._uncapped = 1
        self._own: dict[int, int] = {}  # address → bytes of what lies outside the region
        self._calls = _ALLOCATE(self._allocate), _FREE(self._free), _EMPTY(lambda: None)

    def options(self) -> dict[str, str]:
        """The provider options that make a session use the pool, which has to outlive it."""
        _allocator_of_tensors(self.device.index)
        names = ("gpu_external_alloc", "gpu_external_free", "gpu_external_empty_cache")
        addresses = (ctypes.cast(call, ctypes.c_void_p).value for call in self._calls)
        return {name: str(address) for name, address in zip(names, addresses, strict=True)}

    def join(self) -> "Pool":
        """The same pool for one session more, which is still to be made, and never runs beside the others."""
        self._users, self._uncapped, self._loaded = self._users + 1, self._uncapped + 1, False
        return self

    def loaded(self) -> None:
        """Say that the session is made: what it holds by now are its weights."""
        self.weight_bytes, self._loaded = sum(self._own.values()), True

    def reserve(self, size: int) -> None:
        """Take the region that workspace is handed out from.

        Raises:
            SessionError: the device hasn't that much.
        """
        self.scratch_bytes = -(-size // GRAIN) * GRAIN
        self._region = PoolRegion(self.scratch_bytes)
        if size:
            self._base = driver.allocate(self.device.index, self.scratch_bytes)

    def cap(self) -> None:
        """Refuse from now on what doesn't fit the region: a wrong prediction is an error, not an overrun.

        Of several sessions each says so once, and the last one's word counts.
        """
        self._uncapped -= 1
        self._capped = self._uncapped <= 0

    @contextmanager
    def recording(self) -> Iterator[list[Event]]:
        """Note every request in a list."""
        events: list[Event] = []
        self.events = events
        try:
            yield events
        finally:
            self.events = None

    def close(self) -> None:
        """Give everything back once no session is left. Nothing of the session may be used any more."""
        self._users -= 1
        if self._users > 0:
            return
        for address in (*self._own, *([self._base] if self._base else [])):
            driver.free(self.device.index, address)
        self._own.clear()
        self._base, self._region, self._capped = 0, PoolRegion(0), True

    def _allocate(self, size: int) -> int | None:
        """Called by onnxruntime, from C: no exception may leave it."""
        try:
            offset = self._region.take(size)
            address = self._base + offset if offset is not None else self._outside(size)
        except MemongerError as error:
            self.refused = str(error)
            return None
        if self.events is not None and address is not None:
            self.events.append(Event(time.time_ns(), address, size))
        return address

    def _outside(self, size: int) -> int | None:
        if self._capped:
            self.refused = (
                f"a kernel asked for {format_size(size)} of workspace on {self.device}, and the plan measured "
                f"{format_size(self.scratch_bytes)}: plan the model again on this device "
                f"({option('device', str(self.device))})"
            )
            return None
        address = driver.allocate(self.device.index, size)
        self._own[address] = size
        if self._loaded:
            self.overflow_bytes = max(self.overflow_bytes, sum(self._own.values()) - self.weight_bytes)
        return address

    def _free(self, address: int | None) -> None:
        """Called by onnxruntime, from C."""
        if address is None:
            return
        if self.events is not None:
            self.events.append(Event(time.time_ns(), address, None))
        if not self._region.give(address - self._base) and self._own.pop(address, None) is not None:
            driver.free(self.device.index, address)


def workspace_by_node(events: Sequence[Event], intervals: Mapping[str, tuple[int, int]]) -> dict[str, int]:
    """Bytes of workspace each node's kernel took at most, as a `PoolRegion` hands them out; 0 is left out.

    Workspace is what is allocated and freed while the node runs; what stays longer is an output.

    Args:
        events: Requests of one run or several.
        intervals: Node name → nanoseconds of the system's clock between which it ran, of each run: disjoint.
    """
    spans = sorted((begin, end, name) for name, (begin, end) in intervals.items())
    begins = [begin for begin, _, _ in spans]
    freed: dict[int, list[int]] = {}
    for number, event in enumerate(events):
        if event.size is None:
            freed.setdefault(event.address, []).append(number)
    regions: dict[str, PoolRegion] = {}
    offsets: dict[int, tuple[str, int]] = {}
    for number, event in enumerate(events):
        if event.size is None:
            name, offset = offsets.pop(event.address, ("", 0))
            if name:
                regions[name].give(offset)
            continue
        index = bisect_left(begins, event.nanoseconds + 1) - 1
        gone = next((n for n in freed.get(event.address, ()) if n > number), None)
        if index < 0 or gone is None or events[gone].nanoseconds > spans[index][1]:
            continue
        name = spans[index][2]
        offset = regions.setdefault(name, PoolRegion()).take(event.size) or 0
        offsets[event.address] = name, offset
    return {name: region.high for name, region in regions.items() if region.high}
