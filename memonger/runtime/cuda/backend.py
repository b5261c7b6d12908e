"""How onnxruntime is driven on a CUDA device."""

from typing import Any

import numpy as np

from memonger.devices import Cuda, Device
from memonger.errors import RuntimeUnavailableError
from memonger.runtime.cuda import driver, missing
from memonger.runtime.cuda.arena import DeviceArena
from memonger.runtime.cuda.copier import WeightCopier
from memonger.runtime.cuda.pool import Pool
from memonger.runtime.host import FreeMemory, HostBackend
from memonger.runtime.prepared import CopySchedule


class CudaBackend(HostBackend):
    """See `memonger.runtime.host.HostBackend`."""

    def __init__(self, device: Device) -> None:
        self.device = device

    def check(self) -> None:
        missing.check(self.device)

    def count(self) -> int:
        return driver.device_count()

    def unloaded(self) -> RuntimeUnavailableError:
        return missing.unloaded(self.device)

    def machine_name(self) -> str:
        """The device's name and compute capability, the CUDA that onnxruntime was built for, and cuDNN's version."""
        return f"{driver.name(self.device)}, CUDA {missing.built_for()}, cuDNN {missing.cudnn_version()}"

    def providers(self, cuda: Cuda | None, pool: Pool | None, captures: bool) -> list[Any]:
        """The CUDA provider with its options, then the CPU provider."""
        options = {"arena_extend_strategy": "kSameAsRequested", **cuda.options()} if cuda is not None else {}
        if self.device.index:
            options["device_id"] = str(self.device.index)
        if captures:
            options["enable_cuda_graph"] = "1"
        if pool is not None:
            options.update(pool.options())
        return [(self.device.provider, options), "CPUExecutionProvider"]

    def configure(self, options: Any, cuda: Cuda | None, captures: bool) -> None:
        """Choose kernels as `Cuda` says; where runs are captured, weights take as many bytes as they have.

        Otherwise they would lie in regions of the allocator that runs take their workspace from.
        """
        if cuda is not None:
            options.use_deterministic_compute = cuda.deterministic
        if captures:
            options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")

    def arena(self, size: int) -> DeviceArena:
        return DeviceArena(size, self.device)

    def pool(self) -> Pool:
        return Pool(self.device)

    def copier(self, schedule: CopySchedule) -> WeightCopier:
        return WeightCopier(schedule, self.device)

    def room(self) -> FreeMemory:
        return driver.room(self.device)

    def reserve(self, session: Any, size: int, *, exactly: bool = False) -> None:
        """Take a region of the largest need: all that is taken costs here.

        A step that asks for most of it, and then for more, takes another region of what doesn't fit.
        """
        if size:
            session.create_ortvalue_from_shape_and_type([size], np.uint8, self.device.kind, self.device.index)

    def synchronize(self) -> None:
        driver.synchronize(self.device.index)
