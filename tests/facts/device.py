"""A CUDA device by its driver: memory at addresses of our choice, without another library."""

import contextlib
import ctypes
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime

from benchmarks.training.side_by_side.job import load_cuda_libraries
from memonger.devices import Device, parse_device
from memonger.errors import RuntimeUnavailableError
from memonger.runtime.cuda import missing
from tests.facts.examples import element_type

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
CUDA_DEVICE = parse_device("cuda:0")
STAND_IN = "Fake CUDA device"  # what tests/support/fake_cuda calls its devices
ALIGNMENT = 256
POISON = 0xA5
NUMPY = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(double)": np.dtype(np.float64),
    "tensor(float16)": np.dtype(np.float16),
    "tensor(bfloat16)": np.dtype(ml_dtypes.bfloat16),
    "tensor(bool)": np.dtype(np.bool_),
    **{f"tensor({kind}{bits})": np.dtype(f"{kind}{bits}") for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
}


def prepare() -> None:
    """Once in a process: CUDA's libraries from NVIDIA's wheels or PyTorch's where those are installed, and silence."""
    onnxruntime.set_default_logger_severity(4)
    with contextlib.redirect_stdout(sys.stderr):  # it prints what it can't find
        try:
            missing.check(CUDA_DEVICE)
        except RuntimeUnavailableError:  # PyTorch may bring them along
            load_cuda_libraries()


class DriverError(Exception):
    """A call of the driver failed."""


class Driver:
    """One device's primary context. All sizes are bytes, all addresses the device's."""

    def __init__(self, index: int) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", 0)
        context, handle = ctypes.c_void_p(), ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(handle), index)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        self._call("cuCtxSetCurrent", context)
        self.name = self._name(handle)

    def _name(self, handle: ctypes.c_int) -> str:
        text = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", text, 256, handle)
        return text.value.decode()

    def _call(self, name: str, *arguments: Any) -> None:
        error = getattr(self._library, name)(*arguments)
        if error:
            raise DriverError(f"{name} gives {error}")

    @property
    def is_real(self) -> bool:
        return self.name != STAND_IN

    def allocate(self, size: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(1, size)))
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def write(self, address: int, array: np.ndarray) -> None:
        array = np.ascontiguousarray(array)
        if array.nbytes:
            source = ctypes.c_void_p(array.ctypes.data)
            self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), source, ctypes.c_size_t(array.nbytes))

    def read(self, address: int, like: np.ndarray) -> np.ndarray:
        """An array of the shape and type of `like` from the device, all work there done."""
        self.wait()
        found = np.empty_like(like, order="C")
        if found.nbytes:
            target = ctypes.c_void_p(found.ctypes.data)
            self._call("cuMemcpyDtoH_v2", target, ctypes.c_uint64(address), ctypes.c_size_t(found.nbytes))
        return found

    def fill(self, address: int, size: int, byte: int = POISON) -> None:
        self._call("cuMemsetD8_v2", ctypes.c_uint64(address), ctypes.c_ubyte(byte), ctypes.c_size_t(size))

    def wait(self) -> None:
        self._call("cuCtxSynchronize")

    def used(self) -> int:
        """Bytes taken on the device, by anyone."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return total.value - free.value


@cache
def driver(device: Device) -> Driver:
    return Driver(device.index)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value lies on the device, and what it is."""

    address: int
    like: np.ndarray
    """Of the value's shape and type; its content means nothing."""


def place(device: Device, like: np.ndarray, content: np.ndarray | None = None) -> Place:
    """New device memory: poisoned, or with some content."""
    unit = driver(device)
    made = Place(unit.allocate(like.nbytes), like)
    unit.fill(made.address, max(1, like.nbytes))
    if content is not None:
        unit.write(made.address, content)
    return made


def bind(session: Any, device: Device, inputs: Mapping[str, Place], outputs: Mapping[str, Place]) -> Any:
    """An IO binding with every value at its address."""
    binding = session.io_binding()
    for name, at in inputs.items():
        binding.bind_input(name, "cuda", device.index, element_type(at.like), list(at.like.shape), at.address)
    for name, at in outputs.items():
        binding.bind_output(name, "cuda", device.index, element_type(at.like), list(at.like.shape), at.address)
    return binding


@dataclass(frozen=True, slots=True)
class Wish:
    """How a session is to be made: at which level, in file order or not, with what entries and provider options."""

    level: str = "ORT_DISABLE_ALL"
    in_order: bool = True
    pattern: bool = False
    entries: Mapping[str, str] | None = None
    options: Mapping[str, str] | None = None
    optimized: str = ""
    profile: str = ""


def open_session(model: onnx.ModelProto | str, device: Device, wish: Wish | None = None) -> Any:
    """A session of a model, or of a file, on the device with the CPU provider behind it."""
    wish = wish or Wish()
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    settings.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, wish.level)
    settings.enable_mem_pattern = wish.pattern
    if wish.in_order:
        settings.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    settings.optimized_model_filepath = wish.optimized
    if wish.profile:
        settings.enable_profiling, settings.profile_file_prefix = True, wish.profile
    for key, value in (wish.entries or {}).items():
        settings.add_session_config_entry(key, value)
    source = model if isinstance(model, str) else model.SerializeToString()
    options = {"device_id": str(device.index), "cudnn_conv_algo_search": "HEURISTIC", **(wish.options or {})}
    return onnxruntime.InferenceSession(source, settings, providers=[(CUDA, options), CPU])


def on_cpu(model: onnx.ModelProto) -> Any:
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=[CPU])


def feeds(session: Any, seed: int = 0) -> dict[str, np.ndarray]:
    """Random numbers for floats, zeros (a valid index always) for the rest; symbolic dimensions are 1."""
    random = np.random.default_rng(seed)
    found = {}
    for value in session.get_inputs():
        shape, dtype = [d if isinstance(d, int) else 1 for d in value.shape], NUMPY[value.type]
        floating = dtype.kind == "f" or dtype == NUMPY["tensor(bfloat16)"]
        found[value.name] = (random.standard_normal(shape) if floating else np.zeros(shape)).astype(dtype)
    return found


def sizes(arrays: Iterable[np.ndarray]) -> int:
    return sum(array.nbytes for array in arrays)


def size_of(shape: Sequence[int], dtype: np.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def short(error: BaseException, most: int = 240) -> str:
    """An error's words on one line."""
    text = " ".join(str(error).split())
    text = text.rpartition(" was false. ")[2]  # of an assertion that failed: its own words
    return text if len(text) <= most else text[: most - 3] + "..."
