"""What of files is in this process's memory, by the system."""

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

import memonger


def resident(planned: Path) -> int:
    """Bytes of a plan's weights that are in this process's memory, by ``/proc/self/smaps``."""
    (data,) = planned.parent.glob(f"{planned.name}.*.data")
    return _resident(data.name)


def resident_state(session: memonger.TrainingSession) -> int:
    """Bytes of what a session updates in files that are in this process's memory."""
    names = {os.readlink(file.path) for reader in session.weight_readers for file in reader._files if file.is_own}
    return sum(map(_resident, names))


def _resident(end: str) -> int:
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            counts = line.endswith(end)
        elif counts and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def cached(path: str, begin: int, length: int) -> int:
    """Bytes of a file's pages among these that are in the system's cache, by ``mincore``."""
    page = mmap.PAGESIZE
    first = begin // page * page
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), begin + length - first, mmap.MAP_PRIVATE, offset=first) as it,
    ):
        address = np.frombuffer(it, np.uint8).ctypes.data
        found = (ctypes.c_ubyte * -(-len(it) // page))()
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(it)), found) == 0
        return page * sum(one & 1 for one in found)
