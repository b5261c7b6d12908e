"""The arena: one stretch of memory that every planned value lies in."""

import ctypes
import mmap
from pathlib import Path
from typing import Any

import numpy as np

from memonger.errors import SessionError


class HostArena:
    """Anonymous memory of the process, page-aligned, zero until written, taken from the system page by page.

    Attributes:
        size: Bytes.
        address: Where it begins; stays valid as long as the object lives.
    """

    def __init__(self, size: int) -> None:
        try:
            self._map = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise SessionError(f"an arena of {size} bytes can't be allocated: {error}.") from error
        self.size = size
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def view(self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
        """An array over the arena's own bytes, without a copy."""
        count = int(np.prod(shape, dtype=np.int64))
        return np.frombuffer(self._map, dtype, count=count, offset=offset).reshape(shape)

    def fill(self, byte: int) -> None:
        """Set every byte; ``0xFF`` makes every float a NaN."""
        np.frombuffer(self._map, np.uint8)[:] = byte

    def save(self, path: Path) -> None:
        """Write every byte to a file.

        Raises:
            SessionError: the file can't be written.
        """
        try:
            path.write_bytes(memoryview(self._map)[: self.size])
        except OSError as error:
            raise SessionError(f"{path} can't be written: {error.strerror or error}.") from error

    def restore(self, path: Path) -> None:
        """Read back what `save` wrote.

        Raises:
            SessionError: the file isn't there any more, or is shorter.
        """
        try:
            with path.open("rb") as source:
                read = source.readinto(memoryview(self._map)[: self.size])
        except OSError as error:
            raise SessionError(f"{path} can't be read: {error.strerror or error}.") from error
        if read != self.size:
            raise SessionError(f"{path} has {read} bytes left of {self.size}.")

    def discard(self) -> None:
        """Give the pages back to the system; the content is zero again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)
