"""What of files is in this process's memory, by the system."""

import os
from pathlib import Path

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
