"""How onnxruntime is driven on a device: one object for each, one class for each kind.

A new kind of device is a class like `HostBackend` in a file of its own, a row in `memonger.devices.PROVIDERS`, and a
line in `backend`.
"""

import hashlib
import platform
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from memonger.devices import Cuda, Device
from memonger.errors import RuntimeUnavailableError, SessionError
from memonger.runtime import process_memory
from memonger.runtime.arena import Arena, HostArena

WORKSPACE_MARGIN = 1 << 16  # bytes, for what the runtime rounds up, and for what a session takes as it is made


class FreeMemory(Protocol):
    """Bytes of a device's memory: those that are ``free``, and the ``total``."""

    @property
    def free(self) -> int:
        """Bytes that are free, other processes' use counted as used."""
        ...

    @property
    def total(self) -> int:
        """All bytes the device has."""
        ...


class Backend(Protocol):
    """What a session needs of a device beside onnxruntime's own interface."""

    def check(self) -> None:
        """Check that the device is there, and all that onnxruntime needs for it.

        Raises:
            RuntimeUnavailableError: with what is missing and the command that fixes it.
        """
        ...

    def count(self) -> int:
        """How many devices of this kind the machine shows."""
        ...

    def unloaded(self) -> RuntimeUnavailableError:
        """The error for a session that onnxruntime made without the device's provider."""
        ...

    def machine_name(self) -> str:
        """The machine that a device-form plan made here is bound to."""
        ...

    def providers(self, cuda: Cuda | None, pool: Any, captures: bool) -> list[Any]:
        """What to pass to onnxruntime as ``providers``: see `memonger.runtime.ort.make_session`."""
        ...

    def configure(self, options: Any, cuda: Cuda | None, captures: bool) -> None:
        """Set what the provider needs in an ``onnxruntime.SessionOptions``."""
        ...

    def arena(self, size: int) -> Arena:
        """Memory of the device.

        Raises:
            SessionError: there isn't as much.
        """
        ...

    def pool(self) -> Any:
        """What takes the place of the provider's own allocator: a `memonger.runtime.cuda.pool.Pool`, or None."""
        ...

    def room(self) -> FreeMemory | None:
        """How much memory is free; None where the system hands out pages as they are touched."""
        ...

    def reserve(self, session: Any, size: int, *, exactly: bool = False) -> None:
        """Let a session's own allocator take one region that the workspace of every step fits into.

        ``exactly``: this size is all that the allocator may take, and the region has it but for `WORKSPACE_MARGIN`.

        Left alone the allocator takes a region for the first step that needs workspace and keeps it; a later step that
        needs more takes another, and both stay.
        """
        ...

    def synchronize(self) -> None:
        """Wait until all work on the device is done, whoever gave it."""
        ...


def backend(device: Device) -> Backend:
    """How onnxruntime is driven on a device. What CUDA needs is imported for a CUDA device only."""
    if device.provider == "CUDAExecutionProvider":
        from memonger.runtime.cuda.backend import CudaBackend

        return CudaBackend(device)
    return HostBackend()


class HostBackend:
    """See `Backend`: the CPU."""

    def check(self) -> None:
        """Nothing is to be checked: the CPU provider is part of every onnxruntime."""

    def count(self) -> int:
        """One."""
        return 1

    def unloaded(self) -> RuntimeUnavailableError:
        """Not to be expected: the CPU provider is part of every onnxruntime."""
        return RuntimeUnavailableError("onnxruntime has no CPU provider here.")

    def machine_name(self) -> str:
        """A digest of the processor's architecture and feature flags."""
        return _processor_digest()

    def providers(self, cuda: Cuda | None, pool: Any, captures: bool) -> list[Any]:
        """The CPU provider alone."""
        return ["CPUExecutionProvider"]

    def configure(self, options: Any, cuda: Cuda | None, captures: bool) -> None:
        """Nothing is to be set."""

    def arena(self, size: int) -> Arena:
        """Memory of the process."""
        return HostArena(size)

    def pool(self) -> None:
        """None: the provider's own allocator will do."""

    def room(self) -> None:
        """None: the system hands out pages as they are touched."""

    def reserve(self, session: Any, size: int, *, exactly: bool = False) -> None:
        """Take a region of twice the largest need: it is always split, never used up by one allocation.

        What of it is never written costs nothing. What loading left free goes back to the system first, or the region
        would lie in it, and stay resident, used or not.
        """
        if size > (WORKSPACE_MARGIN if exactly else 0) and hasattr(session, "create_ortvalue_from_shape_and_type"):
            process_memory.give_back()
            try:
                region = size - WORKSPACE_MARGIN if exactly else 2 * size + WORKSPACE_MARGIN
                session.create_ortvalue_from_shape_and_type([region], np.uint8, "cpu")
            except Exception as error:  # pybind exceptions share no base class
                if exactly:  # it is there already
                    return
                raise SessionError(f"workspace of {size} bytes can't be allocated: {str(error).strip()}") from error

    def synchronize(self) -> None:
        """Nothing is to be waited for: a run ends when its work is done."""


@cache
def _processor_digest() -> str:
    """A digest of what kernels and blocked layouts are chosen by."""
    features = ""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = (line for line in info.read_text().splitlines() if line.startswith(("flags", "Features")))
        features = next(lines, "").partition(":")[2].strip()
    text = f"{platform.system()} {platform.machine()} {features or platform.processor()}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
