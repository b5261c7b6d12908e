"""What a CUDA device needs that isn't there, and the command that fixes it."""

import ctypes
import importlib
import importlib.metadata
from functools import cache
from pathlib import Path
from types import ModuleType

from memonger.devices import Device
from memonger.errors import RuntimeUnavailableError
from memonger.runtime.onnxruntime import onnxruntime
from memonger.words import option

PROVIDER = "CUDAExecutionProvider"
REPLACE = "pip uninstall -y onnxruntime onnxruntime-gpu && pip install 'memonger[gpu]'"


def _on_the_cpu() -> str:
    return f"Or use the CPU: {option('device', 'cpu')}."


def check(device: Device) -> None:
    """Everything a CUDA device needs is there: wheel, driver, device, libraries.

    Raises:
        RuntimeUnavailableError: the first that is missing, and the command that fixes it.
    """
    _check_wheel(device)
    module = driver()
    count = int(module.cuDeviceGetCount()[1] or 0)
    if device.index >= count:
        there = f"there {'is' if count == 1 else 'are'} {', '.join(f'cuda:{n}' for n in range(count))}"
        raise RuntimeUnavailableError(
            f"device {device} isn't there: {there if count else 'the driver shows no device'}. `nvidia-smi -L` lists "
            f"what the machine has, and CUDA_VISIBLE_DEVICES hides what it doesn't name. {_on_the_cpu()}"
        )
    _check_version(module)
    _check_libraries(device)


def _check_wheel(device: Device) -> None:
    runtime = onnxruntime()
    if PROVIDER in runtime.get_available_providers():
        return
    installed = [name for name in ("onnxruntime", "onnxruntime-gpu") if _is_installed(name)]
    if len(installed) > 1:
        why = "onnxruntime and onnxruntime-gpu are both installed, and the one without CUDA was written over the other"
    else:
        why = f"the onnxruntime installed here ({runtime.__version__}) is the one for the CPU"
    raise RuntimeUnavailableError(
        f"device {device} needs onnxruntime's {PROVIDER}: {why}. Run `{REPLACE}`. {_on_the_cpu()}"
    )


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@cache
def driver() -> ModuleType:
    """The driver's functions, ready to be called.

    Raises:
        RuntimeUnavailableError: no driver, no device that it could serve, or no cuda-bindings.
    """
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeUnavailableError(
            f"there is no NVIDIA driver here ({error}). On a machine with an NVIDIA GPU install it (Ubuntu: `sudo "
            "ubuntu-drivers install`) and see that `nvidia-smi` lists the GPU; a container needs the NVIDIA Container "
            f"Toolkit and `docker run --gpus all`. {_on_the_cpu()}"
        ) from error
    try:
        module = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise RuntimeUnavailableError(
            f"CUDA devices need the package cuda-bindings ({error}): `pip install 'memonger[gpu]'`. {_on_the_cpu()}"
        ) from error
    (code,) = module.cuInit(0)
    if code != module.CUresult.CUDA_SUCCESS:
        raise RuntimeUnavailableError(
            f"the NVIDIA driver doesn't start ({code.name}): see what `nvidia-smi` says. CUDA_ERROR_NO_DEVICE means "
            "that the machine, the container or CUDA_VISIBLE_DEVICES shows it no GPU; after an update of the driver, "
            f"restart the machine. {_on_the_cpu()}"
        )
    return module


def _check_version(module: ModuleType) -> None:
    """The driver is new enough for the CUDA that onnxruntime was built with."""
    wanted = built_for()
    version = int(module.cuDriverGetVersion()[1])
    if wanted and version // 1000 < int(wanted.split(".")[0]):
        raise RuntimeUnavailableError(
            f"this onnxruntime is built for CUDA {wanted}, and the NVIDIA driver here serves CUDA up to "
            f"{version // 1000}.{version % 1000 // 10}. Install a newer driver, or a wheel for that CUDA: "
            f"https://onnxruntime.ai/docs/install has them. {_on_the_cpu()}"
        )


def built_for() -> str:
    """The CUDA version that onnxruntime was built with, as ``13.0``; empty if it doesn't say."""
    information = importlib.import_module("onnxruntime.capi.build_and_package_info")
    return str(getattr(information, "cuda_version", ""))


@cache
def cudnn_version() -> str:
    """The version of the cuDNN that is loaded, or would be: as ``9.13.0``; ``none`` without one."""
    try:
        number = int(ctypes.CDLL("libcudnn.so.9").cudnnGetVersion())
    except (OSError, AttributeError):
        return "none"
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"


@cache
def _check_libraries(device: Device) -> None:
    """onnxruntime's CUDA provider finds the CUDA libraries it needs. Wheels of NVIDIA's are looked in, too."""
    runtime = onnxruntime()
    if hasattr(runtime, "preload_dlls"):
        runtime.preload_dlls()
    folder = Path(str(runtime.__file__)).parent / "capi"
    shared, provider = (folder / f"libonnxruntime_providers_{part}.so" for part in ("shared", "cuda"))
    if not provider.is_file():
        return  # another system or build: creating a session tells
    try:
        ctypes.CDLL(str(shared), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(provider))
    except OSError as error:
        library = str(error).split(":")[0]
        raise RuntimeUnavailableError(
            f"onnxruntime's CUDA provider doesn't load for device {device}: {error}. {library} belongs to "
            f"CUDA {built_for() or '(see the wheel)'} or cuDNN 9: `pip install 'onnxruntime-gpu[cuda,cudnn]'` installs "
            f"both; or `import torch` first, where PyTorch is built for the same CUDA. {_on_the_cpu()}"
        ) from error


def unloaded(device: Device) -> RuntimeUnavailableError:
    """The error for a session that onnxruntime made without the device's provider, which it does silently."""
    return RuntimeUnavailableError(
        f"onnxruntime didn't take device {device}: its {PROVIDER} failed to start, and it would run on the CPU. "
        '`python -c "import onnxruntime as o; o.set_default_logger_severity(0); o.preload_dlls()"` says which library '
        f"is missing; `pip install 'onnxruntime-gpu[cuda,cudnn]'` installs CUDA's and cuDNN's. {_on_the_cpu()}"
    )
