"""What is said where a CUDA device, or something it needs, isn't there. None of these tests needs one."""

import ctypes
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest

import memonger
from memonger.devices import parse_device
from memonger.runtime.cuda import missing
from tests.support.command_line import invoke
from tests.support.planning_models import chain


class Codes:
    """CUresult of a driver."""

    CUDA_SUCCESS = SimpleNamespace(name="CUDA_SUCCESS")
    CUDA_ERROR_NO_DEVICE = SimpleNamespace(name="CUDA_ERROR_NO_DEVICE")
    CUDA_ERROR_OUT_OF_MEMORY = SimpleNamespace(name="CUDA_ERROR_OUT_OF_MEMORY")


def bindings(devices: int = 1, version: int = 13000, start: Any = Codes.CUDA_SUCCESS) -> SimpleNamespace:
    return SimpleNamespace(
        CUresult=Codes,
        cuInit=lambda flags: (start,),
        cuDeviceGetCount=lambda: (Codes.CUDA_SUCCESS, devices),
        cuDriverGetVersion=lambda: (Codes.CUDA_SUCCESS, version),
    )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A machine with everything but a real device: tests take something away."""
    monkeypatch.setattr(missing, "onnxruntime", lambda: SimpleNamespace(
        __version__="1.31.1", __file__="nowhere/onnxruntime/__init__.py",
        get_available_providers=lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"],
    ))  # fmt: skip
    monkeypatch.setattr(missing, "built_for", lambda: "13.0")
    monkeypatch.setattr(ctypes, "CDLL", lambda name, **options: SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", bindings())
    caches = (missing.driver, missing._check_libraries)
    for cache in caches:
        cache.cache_clear()
    yield monkeypatch
    for cache in caches:
        cache.cache_clear()


def refusal(device: str = "cuda:0") -> str:
    with pytest.raises(memonger.RuntimeUnavailableError) as caught:
        missing.check(parse_device(device))
    return str(caught.value)


def test_nothing_is_refused_where_nothing_is_missing(machine: pytest.MonkeyPatch) -> None:
    missing.check(parse_device("cuda:0"))


def test_the_wheel_for_the_cpu_is_named_with_the_command_that_replaces_it(machine: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(__version__="1.31.1", get_available_providers=lambda: ["CPUExecutionProvider"])
    machine.setattr(missing, "onnxruntime", lambda: runtime)
    machine.setattr(missing, "_is_installed", lambda name: name == "onnxruntime")
    words = refusal()
    assert "is the one for the CPU" in words
    assert "pip uninstall -y onnxruntime onnxruntime-gpu && pip install 'memonger[gpu]'" in words
    assert "device='cpu'" in words
    machine.setattr(missing, "_is_installed", lambda name: True)
    assert "both installed" in refusal()


def test_a_missing_driver_is_named(machine: pytest.MonkeyPatch) -> None:
    def load(name: str, **options: Any) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    machine.setattr(ctypes, "CDLL", load)
    words = refusal()
    assert "no NVIDIA driver" in words
    assert "libcuda.so.1" in words
    assert "--gpus all" in words


def test_missing_bindings_are_named_with_the_command_that_installs_them(machine: pytest.MonkeyPatch) -> None:
    def load(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    machine.setattr(importlib, "import_module", load)
    words = refusal()
    assert "cuda-bindings" in words
    assert "pip install 'memonger[gpu]'" in words


def test_a_driver_that_does_not_start_is_told_with_its_own_code(machine: pytest.MonkeyPatch) -> None:
    machine.setitem(sys.modules, "cuda.bindings.driver", bindings(start=Codes.CUDA_ERROR_NO_DEVICE))
    words = refusal()
    assert "(CUDA_ERROR_NO_DEVICE)" in words
    assert "nvidia-smi" in words


@pytest.mark.parametrize(
    ("count", "words"), [(1, "there is cuda:0"), (2, "there are cuda:0, cuda:1"), (0, "no device")]
)
def test_a_device_that_is_not_there_is_told_with_those_that_are(
    machine: pytest.MonkeyPatch, count: int, words: str
) -> None:
    machine.setitem(sys.modules, "cuda.bindings.driver", bindings(devices=count))
    found = refusal("cuda:5")
    assert "cuda:5 isn't there" in found
    assert words in found


def test_a_driver_too_old_for_the_wheel_is_told_with_both_versions(machine: pytest.MonkeyPatch) -> None:
    machine.setitem(sys.modules, "cuda.bindings.driver", bindings(version=12040))
    words = refusal()
    assert "built for CUDA 13.0" in words
    assert "up to 12.4" in words


def test_a_missing_library_is_named(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    provider = tmp_path / "capi" / "libonnxruntime_providers_cuda.so"
    provider.parent.mkdir()
    provider.touch()

    def load(name: str, **options: Any) -> Any:
        if name == str(provider):
            raise OSError("libcudnn.so.9: cannot open shared object file: No such file or directory")
        return SimpleNamespace()

    runtime = missing.onnxruntime()
    runtime.__file__ = str(tmp_path / "__init__.py")
    machine.setattr(missing, "onnxruntime", lambda: runtime)
    machine.setattr(ctypes, "CDLL", load)
    words = refusal()
    assert "libcudnn.so.9 belongs to CUDA 13.0 or cuDNN 9" in words
    assert "pip install 'onnxruntime-gpu[cuda,cudnn]'" in words


def test_the_backend_has_the_devices_that_are_there(machine: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    from memonger.serving import onnx_backend

    assert [onnx_backend.supports_device(name) for name in ("CPU", "CUDA", "CUDA:1", "NPU")] == [
        True,
        True,
        False,
        False,
    ]


def test_a_plan_for_a_device_that_is_not_there_ends_with_one_line(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    if "CUDAExecutionProvider" in missing.onnxruntime().get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    path = tmp_path / "model.onnx"
    onnx.save(chain(3), path)
    result = invoke("plan", path, "--mode", "inference", "--device", "cuda:0")
    assert result.exit_code == 1
    assert "pip install 'memonger[gpu]'" in result.output
    assert "Traceback" not in result.output
