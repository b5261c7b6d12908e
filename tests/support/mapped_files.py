"""What of files is in this process's memory, by the system."""

from pathlib import Path


def resident(planned: Path) -> int:
    """Bytes of a plan's weights that are in this process's memory, by ``/proc/self/smaps``."""
    (data,) = planned.parent.glob(f"{planned.name}.*.data")
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            counts = line.endswith(data.name)
        elif counts and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total
