"""How onnxruntime is driven on the CPU, and what a backend for another device replaces."""

import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from memonger.devices import Cuda
from memonger.errors import RuntimeUnavailableError, SessionError
from memonger.runtime import process_memory
from memonger.runtime.arena import Arena

WORKSPACE_MARGIN = 1 << 16  # bytes, for what the runtime rounds up, and for what a session takes as it is made


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Bytes of a device that are free, and all it has, by the driver's word: other processes' use counts as used."""

    free: int
    total: int


class HostBackend:
    """What a session needs of a device beside onnxruntime's own interface: here of the CPU."""

    def check(self) -> None:
        """Check that the device is there, and all that onnxruntime needs for it.

        Raises:
            RuntimeUnavailableError: with what is missing and the command that fixes it.
        """

    def count(self) -> int:
        """How many devices of this kind the machine shows."""
        return 1

    def unloaded(self) -> RuntimeUnavailableError:
        """The error for a session that onnxruntime made without the device's provider."""
        return RuntimeUnavailableError("onnxruntime has no CPU provider here.")

    def machine_name(self) -> str:
        """What a device-form plan made here is bound to: of the CPU its architecture and feature flags, digested."""
        return _processor_digest()

    def providers(self, cuda: Cuda | None, pool: Any, captures: bool) -> list[Any]:
        """What to pass to onnxruntime as ``providers``: see `memonger.runtime.ort.make_session`."""
        return ["CPUExecutionProvider"]

    def configure(self, options: Any, cuda: Cuda | None, captures: bool) -> None:
        """Set what the provider needs in an ``onnxruntime.SessionOptions``."""

    def arena(self, size: int) -> Arena:
        """Memory of the device.

        Raises:
            SessionError: there isn't as much.
        """
        return Arena(size)

    def pool(self) -> Any:
        """What takes the place of the provider's own allocator: a `memonger.runtime.cuda.pool.Pool`, or None."""
        return None

    def copier(self, schedule: Any) -> Any:
        """What copies weights to the device while steps run, a `memonger.runtime.executable.Copier`; here None.

        Raises:
            SessionError: a file that weights lie in can't be read; no memory can be locked for the device.
        """
        return None

    def room(self) -> FreeMemory | None:
        """How much memory is free; None where the system hands out pages as they are touched."""
        return None

    def reserve(self, session: Any, size: int, *, exactly: bool = False) -> None:
        """Let a session's own allocator take one region that the workspace of every step fits into.

        Left alone it takes a region for the first step that needs workspace and keeps it; a later step that needs more
        takes another, and both stay. On the CPU it is twice the largest need, so that it is always split, never used up
        by one allocation: what of it is never written costs nothing. What loading left free goes back to the system
        first, or the region would lie in it, and stay resident, used or not.

        ``exactly``: this size is all that the allocator may take, and the region has it but for `WORKSPACE_MARGIN`.
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
        """Wait until all work on the device is done, whoever gave it: on the CPU it is when a run ends."""


@cache
def _processor_digest() -> str:
    """A digest of what kernels and blocked layouts are chosen by."""
    import hashlib  # with OpenSSL's library: only what is bound to a machine asks for it

    features = ""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = (line for line in info.read_text().splitlines() if line.startswith(("flags", "Features")))
        features = next(lines, "").partition(":")[2].strip()
    text = f"{platform.system()} {platform.machine()} {features or platform.processor()}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
