"""What a device is, and how much of its memory is in use by its driver's account."""

import threading
from dataclasses import dataclass
from typing import Any, Self

EVERY = 0.005  # seconds between two looks


class Watch:
    """The most of a GPU's memory that is in use, by the driver, over what was when this was made; for ``with``.

    Looks at it every 5 ms in a thread of its own, and whenever asked.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.before = used_bytes(index)
        self.most = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def peak(self) -> int:
        """Bytes until now."""
        self.most = max(self.most, used_bytes(self.index) - self.before)
        return self.most

    def _look(self) -> None:
        while not self._stop.wait(EVERY):
            self.peak()


def used_bytes(index: int) -> int:
    """Bytes of a GPU's memory that are in use, whoever uses them."""
    library = nvml()
    return int(library.nvmlDeviceGetMemoryInfo(library.nvmlDeviceGetHandleByIndex(index)).used)


def nvml() -> Any:
    """NVIDIA's management library, ready to be asked.

    Raises:
        ImportError: nvidia-ml-py isn't installed.
        pynvml.NVMLError: there is no driver.
    """
    import pynvml

    pynvml.nvmlInit()  # counted; ends with the process
    return pynvml


@dataclass(frozen=True, slots=True)
class Device:
    """Where contestants run, and what a table of them says of it.

    Attributes:
        name: ``cpu`` or ``cuda:N``.
        head: Lines that say what it is.
        context: Bytes that a bare CUDA context takes by the driver's account; 0 on the CPU.
        torch: Where PyTorch runs, if elsewhere: in a rehearsal without a GPU.
    """

    name: str
    head: tuple[str, ...]
    context: int = 0
    torch: str = ""

    @property
    def cuda(self) -> bool:
        """Whether it is a GPU."""
        return self.name != "cpu"

    @property
    def index(self) -> int:
        """The GPU's number."""
        return int(self.name.partition(":")[2] or 0)
