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
    versions = ", ".join(f"{name} {_version(name)}" for name in packages)
    return f"{model or platform.processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed as a package)"


def accelerator(index: int) -> str:
    """A GPU's name, memory, driver, and the CUDA version the driver supports.

    Raises:
        ImportError: nvidia-ml-py isn't installed.
    """
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    size, version = pynvml.nvmlDeviceGetMemoryInfo(handle).total, pynvml.nvmlSystemGetCudaDriverVersion()
    name, driver = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlSystemGetDriverVersion()
    supported = f"{version // 1000}.{version % 1000 // 10}"
    return f"{name}, {size / (1 << 30):.1f} GiB, driver {driver} (up to CUDA {supported})"
