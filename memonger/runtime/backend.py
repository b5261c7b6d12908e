"""How onnxruntime is driven on a device: one object for each, one class for each kind.

A new kind of device is a class on `HostBackend` in a file of its own, a row in `memonger.devices.PROVIDERS`, and a line
here.
"""

from memonger.devices import Device
from memonger.runtime.host import HostBackend


def backend(device: Device) -> HostBackend:
    """How onnxruntime is driven on a device. What CUDA needs is imported for a CUDA device only."""
    if device.provider == "CUDAExecutionProvider":
        from memonger.runtime.cuda.backend import CudaBackend

        return CudaBackend(device)
    return HostBackend()
