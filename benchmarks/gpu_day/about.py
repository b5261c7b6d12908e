"""What there is: device, driver, versions, what a bare context takes; or what is missing, a sentence each."""

import importlib.metadata
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_day.stages import Settings
from benchmarks.machine import accelerator, machine
from benchmarks.training.side_by_side.devices import used_bytes
from memonger.devices import parse_device
from memonger.runtime.worker import Worker, WorkerError
from memonger.units import format_size
from tests.support.cuda import ON_STAND_IN

PACKAGES = ("onnxruntime-gpu", "onnx", "onnx-ir", "numpy", "torch", "cuda-bindings")
NEEDED = ("click", "rich", "networkx", "safetensors", "ml-dtypes", "pytest", "hypothesis", "pytest-xdist", "onnxscript")


def measure(item: str, settings: Settings, seconds: float) -> dict[str, Any]:
    """The row, or ``missing``: sentences that say why nothing can be measured here. ``item``: bytes to be free."""
    index = parse_device(settings.device).index
    lacking = [f"the package {name} isn't installed: pip install {name}" for name in NEEDED if not _version(name)]
    with tempfile.TemporaryDirectory() as folder:
        errors = Path(folder) / "probe.err"
        arguments = [settings.device, *([] if settings.torch and not settings.rehearse else ["--no-torch"])]
        with Worker("benchmarks.training.side_by_side.probe", arguments, errors) as process:
            try:
                said = process.read(seconds / 2)
                if said["missing"]:
                    return {"missing": [*said["missing"], *lacking]}
                before = used_bytes(index)
                process.ask("", seconds / 2)
            except WorkerError as error:
                return {"missing": [f"{settings.device} can't be used: {error}"]}
            context = used_bytes(index) - before
    lacking += [*_without_room(settings.device, int(item)), *_without_kernels(settings.device)]
    if lacking:
        return {"missing": lacking}
    return {
        "device": accelerator(index),
        "is_real": not ON_STAND_IN,
        "versions": said["versions"],
        "machine": machine(PACKAGES),
        "context": context,
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _without_room(device: str, needed: int) -> list[str]:
    from memonger.runtime.cuda import driver

    room = driver.room(parse_device(device))
    if room.free >= needed:
        return []
    return [
        f"{device} has {format_size(room.free)} free of {format_size(room.total)}, and the largest rows asked for take "
        f"{format_size(needed)}: end what else uses it (`nvidia-smi` lists that), or name stages that take less "
        "(--stages sessions,facts,nccl)"
    ]


def _without_kernels(device: str) -> list[str]:
    """A wheel may have been built, or cut down, for other GPUs: many kernels then write nothing, and nobody says so."""
    import onnxruntime
    from onnx import TensorProto, helper

    from memonger.runtime.cuda import driver

    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Softmax", ["x"], ["y"])], "probe", value[:1], value[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        provider = ("CUDAExecutionProvider", {"device_id": str(parse_device(device).index)})
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=[provider])
        (found,) = session.run(None, {"x": np.zeros((1, 2), np.float32)})
        if not (np.all(found == 0.5) or ON_STAND_IN):
            raise RuntimeError("no kernel image writes what a Softmax of zeros is")
    except Exception as error:  # onnxruntime's own, of many kinds
        words = " ".join(str(error).split())[:300]
        why = (
            "its kernels were built, or kept in a bundle (--arch), for other GPUs" if "kernel image" in words else words
        )
        return [f"the onnxruntime-gpu installed here runs no kernel on {driver.name(parse_device(device))}: {why}"]
    return []
