"""The CUDA driver: the devices there are, their memory, and copies to and from it.

Through NVIDIA's own `cuda-bindings` and the device's primary context, which onnxruntime and PyTorch use as well: an
address of one is an address for all.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from memonger.devices import Device
from memonger.errors import SessionError
from memonger.runtime.cuda import missing
from memonger.runtime.host import FreeMemory
from memonger.units import format_size


def device_count() -> int:
    """How many devices the driver shows (``CUDA_VISIBLE_DEVICES`` counts).

    Raises:
        RuntimeUnavailableError: no driver.
    """
    return int(_done(missing.driver().cuDeviceGetCount(), "counting devices"))


def name(device: Device) -> str:
    """The device's name and compute capability, as ``NVIDIA H200 (9.0)``."""
    driver = missing.driver()
    handle = _handle(device.index)
    text = bytes(_done(driver.cuDeviceGetName(128, handle), "asking a device's name")).split(b"\0")[0].decode()
    attributes = driver.CUdevice_attribute
    major, minor = (
        int(_done(driver.cuDeviceGetAttribute(attribute, handle), "asking a device's capability"))
        for attribute in (
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )
    return f"{text} ({major}.{minor})"


def room(device: Device) -> FreeMemory:
    """How much of the device's memory is free now."""
    with on(device.index) as driver:
        free, total = _done(driver.cuMemGetInfo(), "asking for free memory")
        return FreeMemory(int(free), int(total))


@contextmanager
def on(index: int) -> Iterator[Any]:
    """The driver with a device as the calling thread's own; which one it had before is the same afterwards."""
    driver = missing.driver()
    _done(driver.cuCtxPushCurrent(_context(index)), f"taking device cuda:{index}")
    try:
        yield driver
    finally:
        driver.cuCtxPopCurrent()


def synchronize(index: int) -> None:
    """Wait until all work on a device is done, whoever gave it."""
    with on(index) as driver:
        _done(driver.cuCtxSynchronize(), f"waiting for device cuda:{index}")


def allocate(index: int, size: int) -> int:
    """Take memory of a device; returns its address.

    Raises:
        SessionError: there isn't as much; it says how much there is.
    """
    with on(index) as driver:
        error, address = driver.cuMemAlloc(max(size, 1))
        if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            left = room(Device("cuda", index))
            raise SessionError(
                f"{format_size(size)} can't be allocated on cuda:{index}: {format_size(left.free)} of "
                f"{format_size(left.total)} are free."
            )
        return int(_done((error, address), f"allocating {size} bytes on cuda:{index}"))


def free(index: int, address: int) -> None:
    """Give back what `allocate` took; waits for the work that uses it."""
    with on(index) as driver:
        _done(driver.cuMemFree(address), f"freeing memory of cuda:{index}")


def to_device(index: int, target: int, source: int, size: int) -> None:
    """Copy bytes from host memory, and wait until they are there."""
    with on(index) as driver:
        _waited(driver.cuMemcpyHtoD(target, source, size), f"copying {size} bytes to cuda:{index}")


def to_host(index: int, target: int, source: int, size: int) -> None:
    """Copy bytes to host memory."""
    with on(index) as driver:
        _done(driver.cuMemcpyDtoH(target, source, size), f"copying {size} bytes from cuda:{index}")


def within(index: int, target: int, source: int, size: int) -> None:
    """Copy bytes from one address of a device to another, and wait until they are there."""
    with on(index) as driver:
        _waited(driver.cuMemcpyDtoD(target, source, size), f"copying {size} bytes on cuda:{index}")


def set_bytes(index: int, target: int, byte: int, size: int) -> None:
    """Set every byte of a stretch, and wait until it is done."""
    with on(index) as driver:
        _waited(driver.cuMemsetD8(target, byte, size), f"setting {size} bytes on cuda:{index}")


def allocate_locked(index: int, size: int) -> int:
    """Take memory of the host that a device may read while the processor goes on; returns its address.

    Raises:
        SessionError: there isn't as much, or no more may be locked.
    """
    with on(index) as driver:
        return int(_done(driver.cuMemHostAlloc(max(size, 1), 0), f"locking {format_size(size)} of the host's memory"))


def free_locked(index: int, address: int) -> None:
    """Give back what `allocate_locked` took."""
    with on(index) as driver:
        _done(driver.cuMemFreeHost(address), "giving back locked memory of the host")


def make_stream(index: int) -> Any:
    """A stream that waits for no other, CUDA's legacy stream among them, nor they for it."""
    with on(index) as driver:
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value
        return _done(driver.cuStreamCreate(flags), f"making a stream of cuda:{index}")


def end_stream(index: int, stream: Any) -> None:
    """Give a stream back once its work is done."""
    with on(index) as driver:
        _done(driver.cuStreamDestroy(stream), f"ending a stream of cuda:{index}")


def to_device_later(index: int, target: int, source: int, size: int, stream: Any) -> None:
    """Have a stream copy bytes from locked memory of the host, which stay as they are until `wait_for_stream`."""
    with on(index) as driver:
        _done(driver.cuMemcpyHtoDAsync(target, source, size, stream), f"copying {size} bytes to cuda:{index}")


def wait_for_stream(index: int, stream: Any) -> None:
    """Wait until a stream's work is done."""
    with on(index) as driver:
        _done(driver.cuStreamSynchronize(stream), f"waiting for copies to cuda:{index}")


def wait_for_kernels(index: int) -> None:
    """Wait until CUDA's legacy stream is done, on which onnxruntime works where it takes workspace from a pool."""
    with on(index) as driver:
        _done(driver.cuStreamSynchronize(0), f"waiting for kernels on cuda:{index}")


@cache
def _handle(index: int) -> Any:
    return _done(missing.driver().cuDeviceGet(index), f"taking device cuda:{index}")


@cache
def _context(index: int) -> Any:
    """The device's primary context. It is kept to the process's end: onnxruntime never gives it up either."""
    return _done(missing.driver().cuDevicePrimaryCtxRetain(_handle(index)), f"taking device cuda:{index}")


def _done(result: tuple[Any, ...], what: str) -> Any:
    """What a call of the driver gives beside its error code."""
    driver, error = missing.driver(), result[0]
    if error != driver.CUresult.CUDA_SUCCESS:
        words = driver.cuGetErrorString(error)[1]
        raise SessionError(f"{what} failed: {words.decode() if words else error}.")
    return result[1] if len(result) == 2 else result[1:]


def _waited(result: tuple[Any, ...], what: str) -> None:
    """A call's work is done: even a copy may return with its last part on the way, and no other stream waits for it."""
    _done(result, what)
    _done(missing.driver().cuStreamSynchronize(0), what)
