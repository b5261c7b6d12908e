"""Arenas: stretches of memory, and tensors at offsets in them."""

import ctypes
import math
import mmap
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from memonger.devices import CPU
from memonger.errors import SessionError, system_checked
from memonger.ir.element_types import ElementType
from memonger.units import in_full

PART = 1 << 22  # bytes on their way to a file or from one at a time


class ArenaTensor(NamedTuple):
    """A tensor at an offset of an arena, in bytes."""

    name: str
    dtype: ElementType
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its content; elements of less than a byte are packed."""
        return -(-self.dtype.bitwidth * math.prod(self.shape) // 8)


def one_after_another(tensors: Iterable[ArenaTensor], alignment: int) -> tuple[dict[str, ArenaTensor], int]:
    """Tensors at offsets of their own, in the order given; and the bytes of all.

    Args:
        tensors: Their own offsets don't count.
        alignment: In bytes: each offset is a multiple of it.
    """
    laid, end = {}, 0
    for tensor in tensors:
        laid[tensor.name] = tensor._replace(offset=end)
        end += -(-tensor.nbytes // alignment) * alignment
    return laid, end


@dataclass(frozen=True, slots=True)
class DeviceArray:
    """Numbers one after the other in a CUDA device's memory, which PyTorch and others read and write where they lie.

    By the CUDA array interface, version 3: https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html.

    Attributes:
        address: Of the first, in bytes.
        dtype: Their type.
        count: How many there are.
    """

    address: int
    dtype: np.dtype[Any]
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes of all."""
        return self.count * self.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Where they lie; nobody is asked to wait for a stream."""
        return {
            "shape": (self.count,), "typestr": self.dtype.str, "data": (self.address, False), "strides": None,
            "version": 3,
        }  # fmt: skip


class Arena:
    """A stretch of memory on a device; by itself of the process, page-aligned, taken from the system page by page.

    Attributes:
        size: Bytes, zero until written.
        device: Where it lies.
        address: Where it begins there: for the object's life, on a CUDA device until `discard`.
        own: How many bytes of it, the first ones, `discard` loses and `save` keeps: all but those in a file.

    Raises:
        SessionError: there isn't as much.
    """

    def __init__(self, size: int) -> None:
        try:
            self._map = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise SessionError(f"an arena of {size} bytes can't be allocated: {error}.") from error
        self.size, self.own, self.device = size, size, CPU
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def read(self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], *, copy: bool = True) -> np.ndarray:
        """An array of what lies at an offset; with ``copy=False`` over the arena's own bytes, if the host has them."""
        view = np.frombuffer(self._map, dtype, count=math.prod(shape), offset=offset).reshape(shape)
        return view.copy() if copy else view

    def elements(self, offset: int, dtype: np.dtype[Any], count: int) -> np.ndarray | DeviceArray:
        """Numbers at an offset where they lie, for others to read and to write."""
        return self.read(offset, dtype, (count,), copy=False)

    def write(self, offset: int, content: np.ndarray) -> None:
        """Copy an array to an offset."""
        self.read(offset, content.dtype, content.shape, copy=False)[...] = content

    def copy_in(self, offset: int, source: int, size: int) -> None:
        """Copy bytes from another address of the same device."""
        ctypes.memmove(self.address + offset, source, size)

    def copy_out(self, offset: int, target: int, size: int) -> None:
        """Copy bytes to another address of the same device."""
        ctypes.memmove(target, self.address + offset, size)

    def fill(self, byte: int) -> None:
        """Set every byte; ``0xFF`` makes every float a NaN."""
        np.frombuffer(self._map, np.uint8)[:] = byte

    def touch(self) -> None:
        """Have the system give every page now, so that the first run needn't wait for that; the content stays."""
        pages = np.frombuffer(self._map, np.uint8)[:: mmap.PAGESIZE]
        pages |= np.uint8(0)

    def save(self, path: Path) -> None:
        """Write every byte to a file.

        Raises:
            SessionError: the file can't be written.
        """
        with system_checked(SessionError, f"{path} can't be written"), path.open("wb") as target:
            for begin in range(0, self.own, PART):
                count = min(PART, self.own - begin)
                target.write(self.read(begin, np.dtype(np.uint8), (count,), copy=False).data)

    def restore(self, path: Path) -> None:
        """Read back what `save` wrote, into memory taken anew where it was given back.

        Raises:
            SessionError: the file isn't there any more, or is shorter; the device hasn't the memory any more.
        """
        self.take_again()
        with system_checked(SessionError, f"{path} can't be read"), path.open("rb") as source:
            for begin in range(0, self.own, PART):
                part = source.read(min(PART, self.own - begin))
                if len(part) != min(PART, self.own - begin):
                    raise SessionError(f"{path} has {begin + len(part)} bytes left of {self.own}.")
                self.write(begin, np.frombuffer(part, np.uint8))

    def discard(self) -> None:
        """Give the memory back to the system; the content is lost."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def take_again(self) -> None:
        """Have memory again after `discard`; its content is zero. Of the process the system gives it when touched."""


def check_host_memory(arena: int, workspace: int) -> None:
    """Check that this machine has as much memory at all, whoever uses it now, before any of it is asked for.

    Raises:
        SessionError: it hasn't.
    """
    total = host_memory()
    for what, size in (("an arena", arena), ("workspace", workspace)):
        if total and size > total:
            raise SessionError(
                f"{what} of {size} bytes can't be allocated: this machine has {in_full(total)} of memory."
            )


def host_memory() -> int:
    """Bytes of memory and of swap space; 0 where the system doesn't say."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0
    info = Path("/proc/meminfo")
    swap = re.search(r"^SwapTotal: *([0-9]+) kB$", info.read_text() if info.is_file() else "", re.MULTILINE)
    return memory + (int(swap[1]) * 1024 if swap else 0)
