"""Ranks on devices without any: what NCCL would carry goes through gloo, where the host can read a device's memory.

It can on the stand-in for CUDA, and on the CPU while `apart` makes it a device with memory of its own, which computes
real values.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from memonger.devices import PROVIDERS
from memonger.distributed.engines import Array, Handle, TorchEngine
from memonger.distributed.nccl import NcclEngine
from memonger.runtime import backend
from memonger.runtime.arena import Arena, DeviceArray


class NearEngine(NcclEngine):
    """Gloo in NCCL's place. The numbers of a collective are gone until it is waited for, as late as they may be.

    Attributes:
        bytes_sent: Of the device, by all collectives.
    """

    backend = "gloo"

    def __init__(self, *given: Any) -> None:
        self.bytes_sent = 0
        super().__init__(*given)

    def _check(self) -> None:
        pass

    def _adopt(self, carriers: dict[str, str]) -> None:
        pass

    @contextmanager
    def _stream(self) -> Iterator[Any]:
        yield self

    def synchronize(self) -> None:
        """Of the stream."""

    def _begun(self, array: Array, begin: Callable[[Any, Any], list[Any]]) -> Handle:
        if isinstance(array, np.ndarray):
            return super()._begun(array, begin)
        seen = SimpleNamespace(__array_interface__=array.__cuda_array_interface__)  # NumPy has the same interface
        there = np.asarray(seen)
        self._away = there.copy()
        away, self.bytes_sent = self._away, self.bytes_sent + array.nbytes
        there.view(np.uint8)[:] = 0xFF
        handle = super()._begun(array, begin)

        def wait() -> None:
            handle.wait()
            there[:] = away

        return Handle([wait])

    def _on_device(self, array: DeviceArray) -> Any:
        return TorchEngine._tensor(self, self._away)


class _Apart(Arena):
    """Memory that nobody reads but by asking."""

    def read(self, offset: int, dtype: Any, shape: tuple[int, ...], *, copy: bool = True) -> np.ndarray:
        return super().read(offset, dtype, shape, copy=True)

    def write(self, offset: int, content: np.ndarray) -> None:
        super().read(offset, content.dtype, content.shape, copy=False)[...] = content

    def elements(self, offset: int, dtype: Any, count: int) -> Any:
        return DeviceArray(self.address + offset, np.dtype(dtype), count)


class _ApartBackend(backend.HostBackend):
    def arena(self, size: int) -> _Apart:
        return _Apart(size)


@contextmanager
def apart() -> Iterator[None]:
    """The CPU as a device whose memory isn't the host's."""
    away = {"cpu": replace(PROVIDERS["cpu"], is_host=False)}
    with patch.dict(PROVIDERS, away), patch.object(backend, "HostBackend", _ApartBackend):
        yield
