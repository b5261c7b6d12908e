"""How much memory a piece of work takes, by the operating system's own account.

Counted is the process's own (anonymous) memory. Pages of program files are not: the first run touches code that no plan
decides on. Memory that loading freed hides what a run needs, because the run reuses it: it is given back to the system
before the baseline is read.
"""

import ctypes
import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")

_PROCESS = ctypes.CDLL(None) if sys.platform == "linux" else None  # with the C library in it


@dataclass(frozen=True, slots=True)
class Resident:
    """Resident bytes of this process: its own now, and its own at most since `reset_peak`."""

    now: int
    peak: int


def is_measurable() -> bool:
    """Whether this system says what is needed (Linux does)."""
    return STATUS.is_file() and CLEAR_REFS.is_file() and "RssAnon" in STATUS.read_text()


def resident() -> Resident:
    """Anonymous resident bytes. The peak is the system's peak of all pages less the file pages resident now."""
    fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines() if ":" in line)
    anonymous, file, shared, peak = (int(fields[k].split()[0]) for k in ("RssAnon", "RssFile", "RssShmem", "VmHWM"))
    return Resident((anonymous + shared) * 1024, (peak - file) * 1024)


def reset_peak() -> None:
    """Begin a new peak: from here on it counts from what is resident now."""
    CLEAR_REFS.write_text("5")


def libc() -> Any:
    """The C library of this process, on Linux; None elsewhere."""
    return _PROCESS


def give_back() -> None:
    """Return what the C library holds free to the system, where it can be asked to (glibc)."""
    if _PROCESS is not None and hasattr(_PROCESS, "malloc_trim"):
        _PROCESS.malloc_trim(0)


def settle() -> int:
    """Give free memory back to the system; returns what stays resident. A baseline to measure from."""
    gc.collect()
    give_back()
    return resident().now


def peak_over(baseline: int, work: Callable[[], object]) -> int:
    """The most bytes resident above ``baseline`` while ``work`` runs and until its result is dropped."""
    settle()
    reset_peak()
    result = work()
    peak = resident().peak
    del result
    return max(0, peak - baseline)


def available_memory() -> int | None:
    """Bytes of memory that this machine could give a process now; None where the system doesn't tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None


def room() -> int | None:
    """Bytes that this process could take beside its own pages and those of files: by what the machine has available,
    and by the limit of its control group. None where the system doesn't tell."""
    rooms, available = list[int](), available_memory()
    if available is not None:
        rooms.append(available)
    limit = group_limit()
    if limit is not None:
        rooms.append(max(0, limit - resident().now))
    return min(rooms, default=None)


def group_limit() -> int | None:
    """The smallest limit of memory of the control groups that this process is in; None: none has any."""
    try:
        entries = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return None
    found = list[int]()
    for _, controllers, path in entries:
        if controllers and "memory" not in controllers.split(","):
            continue
        root = Path("/sys/fs/cgroup/memory" if controllers else "/sys/fs/cgroup")
        own = root / path.strip("/")
        for folder in (one for one in (own, *own.parents) if one == root or root in one.parents):
            try:
                text = (folder / ("memory.limit_in_bytes" if controllers else "memory.max")).read_text().strip()
            except OSError:
                continue
            if text.isdigit() and int(text) < 1 << 60:  # above that there is none
                found.append(int(text))
    return min(found, default=None)
