"""An arena in a CUDA device's memory."""

from typing import Any

import numpy as np

from memonger.devices import Device
from memonger.runtime.arena import Arena, DeviceArray
from memonger.runtime.cuda import driver


class DeviceArena(Arena):
    """Device memory of one stretch, aligned to 256 bytes at least, zero at first. See `memonger.runtime.arena.Arena`.

    Raises:
        SessionError: the device hasn't that much free; it says how much it has.
    """

    def __init__(self, size: int, device: Device) -> None:
        self.size, self.own, self.device = size, size, device
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
        return DeviceArray(self.address + offset, dtype, count)

    def write(self, offset: int, content: np.ndarray) -> None:
        whole = np.ascontiguousarray(content)
        if whole.nbytes:
            driver.to_device(self.device.index, self.address + offset, whole.ctypes.data, whole.nbytes)

    def copy_in(self, offset: int, source: int, size: int) -> None:
        driver.within(self.device.index, self.address + offset, source, size)

    def copy_out(self, offset: int, target: int, size: int) -> None:
        driver.within(self.device.index, target, self.address + offset, size)

    def fill(self, byte: int) -> None:
        if self.size:
            driver.set_bytes(self.device.index, self.address, byte, self.size)

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
