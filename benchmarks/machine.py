"""The line that says what a table was measured on."""

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path


def machine(packages: Sequence[str]) -> str:
    """Processor, cores, Python and the versions of some packages."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    return f"{model or platform.processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}"
