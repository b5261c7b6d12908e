"""An arena in a CUDA device's memory."""

from pathlib import Path
from typing import Any

import numpy as np

from memonger.devices import Device
from memonger.errors import SessionError, system_checked
from memonger.runtime.arena import DeviceArray
from memonger.runtime.cuda import driver

CHUNK = 1 << 26  # bytes on their way to a file or from one at a time


class DeviceArena:
    """Device memory of one stretch, aligned to 256 bytes at least, zero at first. See `memonger.runtime.arena.Arena`.

    Raises:
        SessionError: the device hasn't that much free; it says how much it has.
    """

    def __init__(self, size: int, device: Device) -> None:
        self.size, self.device = size, device
        self.address = 0
        self._take()

    def _take(self) -> None:
        self.address = driver.allocate(self.device.index, self.size)
        self.fill(0)

    def read(self, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], *, copy: bool = True) -> np.ndarray:
        """A copy on the host, whatever ``copy`` says."""
        content = np.empty(shape, dtype)
        driver.to_host(self.device.index, content.ctypes.data, self.address + offset, content.nbytes)
        return content

    def elements(self, offset: int, dtype: np.dtype[Any], count: int) -> DeviceArray:
        """Numbers of the device, where they lie until `discard`."""
        return DeviceArray(self.address + offset, dtype, count)

    def write(self, offset: int, content: np.ndarray) -> None:
        """Copy an array to an offset."""
        whole = np.ascontiguousarray(content)
        if whole.nbytes:
            driver.to_device(self.device.index, self.address + offset, whole.ctypes.data, whole.nbytes)

    def copy_in(self, offset: int, source: int, size: int) -> None:
        """Copy bytes from another address of the same device."""
        driver.within(self.device.index, self.address + offset, source, size)

    def copy_out(self, offset: int, target: int, size: int) -> None:
        """Copy bytes to another address of the same device."""
        driver.within(self.device.index, target, self.address + offset, size)

    def fill(self, byte: int) -> None:
        """Set every byte."""
        if self.size:
            driver.set_bytes(self.device.index, self.address, byte, self.size)

    def save(self, path: Path) -> None:
        """Write every byte to a file.

        Raises:
            SessionError: the file can't be written.
        """
        with system_checked(SessionError, f"{path} can't be written"), path.open("wb") as target:
            for begin in range(0, self.size, CHUNK):
                count = min(CHUNK, self.size - begin)
                target.write(self.read(begin, np.dtype(np.uint8), (count,)).data)

    def restore(self, path: Path) -> None:
        """Read back what `save` wrote, into memory taken anew where it was given back.

        Raises:
            SessionError: the file isn't there any more, or is shorter; the device hasn't the memory any more.
        """
        self.take_again()
        with system_checked(SessionError, f"{path} can't be read"), path.open("rb") as source:
            for begin in range(0, self.size, CHUNK):
                count = min(CHUNK, self.size - begin)
                part = source.read(count)
                if len(part) != count:
                    raise SessionError(f"{path} has {begin + len(part)} bytes left of {self.size}.")
                self.write(begin, np.frombuffer(part, np.uint8))

    def discard(self) -> None:
        """Give the memory back to the device. Its address is another when it is taken again."""
        if self.address:
            driver.free(self.device.index, self.address)
            self.address = 0

    def take_again(self) -> None:
        """Take memory anew where it was given back; zero."""
        if not self.address:
            self._take()

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            self.discard()
