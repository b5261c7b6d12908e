"""How much memory a piece of work takes, by the operating system's own account."""

import ctypes
import ctypes.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")


@dataclass(frozen=True, slots=True)
class Resident:
    """Resident bytes of this process: now, and the most since `reset_peak`."""

    now: int
    peak: int


def is_measurable() -> bool:
    """Whether this system says what is needed (Linux does)."""
    return STATUS.is_file() and CLEAR_REFS.is_file()


def resident() -> Resident:
    """Resident bytes of this process."""
    fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines() if ":" in line)
    return Resident(*(int(fields[key].split()[0]) * 1024 for key in ("VmRSS", "VmHWM")))


def reset_peak() -> None:
    """Begin a new peak: from here on it counts from what is resident now."""
    CLEAR_REFS.write_text("5")


def give_back_free_memory() -> None:
    """Return what the C library holds free to the system: else memory freed while loading hides a run's need."""
    libc = ctypes.CDLL(ctypes.util.find_library("c"))
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)


def peak_over(baseline: int, work: Callable[[], object]) -> int:
    """The most bytes resident above ``baseline`` while ``work`` runs."""
    give_back_free_memory()
    reset_peak()
    work()
    return max(0, resident().peak - baseline)
