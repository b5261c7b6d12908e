"""Disks: how fast one gives what is read, what this process has had fetched, and which of its threads wait for one."""

import functools
import mmap
import os
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

from memonger.units import MiB

MEASURED, BLOCK = 32 * MiB, 4 * MiB
"""Bytes that are read to measure a disk, and how many at once."""


def speed(path: str) -> float | None:
    """Bytes a second that reading a file gives past the system's cache; None where that can't be."""
    if not hasattr(os, "O_DIRECT"):
        return None
    read, begin = 0, time.perf_counter()
    with mmap.mmap(-1, BLOCK) as buffer:  # whose address is that of a page, as reading past the cache takes
        try:
            file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError:
            return None
        try:
            while read < MEASURED and (got := os.preadv(file, [buffer], read)):
                read += got // mmap.PAGESIZE * mmap.PAGESIZE
                if got % mmap.PAGESIZE:
                    break
        except OSError:
            return None
        finally:
            os.close(file)
    return read / (time.perf_counter() - begin) if read else None


@functools.cache
def seconds_a_byte(folder: str) -> float | None:
    """Seconds for each byte of a mapped file that is written, let go, and read again from the disk; measured once.

    None where that can't be: there is no such folder or room, or its files lie in memory (tmpfs).
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, MEASURED)
            with mmap.mmap(file.fileno(), MEASURED) as content:
                begin = time.perf_counter()
                for at in range(0, MEASURED, BLOCK):
                    content[at : at + BLOCK] = bytes(BLOCK)
                os.fdatasync(file.fileno())
                content.madvise(mmap.MADV_DONTNEED)
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                before = fetched()
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
                for at in range(0, MEASURED, BLOCK):
                    content[at : at + BLOCK]
                took = time.perf_counter() - begin
    except (AttributeError, OSError, ValueError):
        return None
    return took / MEASURED if fetched() > before else None


def fetched() -> int:
    """Bytes that this process had fetched from disks; 0 where the system doesn't count them."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), 0)


def other_threads() -> list[int]:
    """Of each other thread of this process a descriptor of what the system says of it."""
    found = []
    for name in os.listdir("/proc/self/task"):
        if int(name) != threading.get_native_id():
            with suppress(OSError):  # it has ended meanwhile
                found.append(os.open(f"/proc/self/task/{name}/stat", os.O_RDONLY))
    return found


def waits(task: int) -> bool:
    """Whether a thread waits for a disk."""
    try:
        return os.pread(task, 256, 0).rpartition(b") ")[2].startswith(b"D")
    except OSError:  # it has ended
        return False
