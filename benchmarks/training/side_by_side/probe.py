"""What a GPU's contestants need: ``python -m benchmarks.training.side_by_side.probe cuda:N [--no-torch]``.

Says one line: what is missing, or the versions of what is there. Then makes a bare CUDA context, says so, and keeps it
until its input ends: the parent reads from the driver what it takes.
"""

import ctypes
import importlib.util
import sys

from benchmarks.training.side_by_side.job import load_cuda_libraries
from memonger.runtime.worker import reason, say


def missing(device: str, torch: bool = True) -> list[str]:
    """What isn't there, and what would fix it."""
    from memonger.devices import parse_device
    from memonger.errors import MemongerError
    from memonger.runtime import ort

    found = []
    try:
        ort.check_device(parse_device(device))
    except MemongerError as error:
        found.append(str(error))
    try:
        from benchmarks.training.side_by_side.devices import nvml

        nvml()
    except ImportError:
        found.append("memory is read from the driver by nvidia-ml-py, which isn't installed: pip install nvidia-ml-py")
    except Exception as error:  # NVML's own, whose class is only there with it
        found.append(f"nvidia-ml-py can't ask the driver: {reason(error)}")
    if importlib.util.find_spec("matplotlib") is None:
        found.append("the plots need matplotlib, which isn't installed: pip install 'memonger[bench]'")
    return [*found, *(_missing_torch(device) if torch else ())]


def _missing_torch(device: str) -> list[str]:
    try:
        import onnxscript  # noqa: F401
        import torch
    except ImportError as error:
        return [f"PyTorch and onnxscript are needed, and {error.name} isn't installed: pip install 'memonger[torch]'"]
    index = int(device.partition(":")[2] or 0)
    if torch.version.cuda is None:
        return [f"the PyTorch installed here ({torch.__version__}) is the one for the CPU"]
    return [] if torch.cuda.device_count() > index else [f"PyTorch sees no {device}"]


def versions() -> str:
    """The CUDA that onnxruntime was built for, and the cuDNN it finds."""
    from memonger.runtime.cuda import missing

    return f"onnxruntime for CUDA {missing.built_for()}, cuDNN {missing.cudnn_version()}"


def make_context(index: int) -> None:
    """A CUDA context and nothing in it.

    Raises:
        OSError: there is no driver.
        RuntimeError: the driver refuses.
    """
    driver, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
    for status in (
        driver.cuInit(0),
        driver.cuDeviceGet(ctypes.byref(device), index),
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
    ):
        if status:
            raise RuntimeError(f"the CUDA driver says error {status}")


def main() -> None:
    """Check, then hold a context."""
    device, *options = sys.argv[1:]
    try:
        load_cuda_libraries()
        lacking = missing(device, torch="--no-torch" not in options)
        say({"missing": lacking, "versions": "" if lacking else versions()})
        if not lacking:
            sys.stdin.readline()
            make_context(int(device.partition(":")[2] or 0))
            say({"context": True})
            sys.stdin.read()
    except Exception as error:  # said to the parent, which ends with it
        say({"failed": reason(error)})


if __name__ == "__main__":
    main()
