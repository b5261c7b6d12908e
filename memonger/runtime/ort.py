"""The one place that imports onnxruntime, and what it is asked to do with a model."""

import hashlib
import importlib
import logging
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
import onnx_ir as ir

from memonger import shapes
from memonger.device import Device
from memonger.errors import RuntimeUnavailableError, SessionError
from memonger.load import external_tensors

logger = logging.getLogger(__name__)

OLDEST = (1, 23)  # the first release seen to honour everything a plan needs
SHARED_ABOVE = 1024  # bytes from which a weight is handed over as memory and not as part of the model's message
_NO_ENTRIES: Mapping[str, str] = MappingProxyType({})


@cache
def onnxruntime() -> ModuleType:
    """The onnxruntime module.

    Raises:
        RuntimeUnavailableError: it isn't installed, or is too old; the message has the command that installs it.
    """
    try:
        module = importlib.import_module("onnxruntime")
    except ImportError as error:
        raise RuntimeUnavailableError(
            f"onnxruntime isn't installed ({error}). Install it with `pip install 'memonger[cpu]'`, or on a machine "
            "with an NVIDIA GPU with `pip install 'memonger[gpu]'` (one of the two, never both). "
            "Planning alone works without: --device none."
        ) from error
    version = tuple(int(part) for part in module.__version__.split(".")[:2])
    if version < OLDEST:
        raise RuntimeUnavailableError(
            f"onnxruntime {module.__version__} is too old: {OLDEST[0]}.{OLDEST[1]} or newer is needed. "
            "Upgrade it with `pip install -U 'memonger[cpu]'`."
        )
    return module


def is_available() -> bool:
    """Whether onnxruntime can be imported."""
    try:
        onnxruntime()
    except RuntimeUnavailableError:
        return False
    return True


def runtime_name() -> str:
    """As ``onnxruntime 1.31.1``."""
    return f"onnxruntime {onnxruntime().__version__}"


@cache
def machine_digest() -> str:
    """A digest of the processor's architecture and feature flags: kernels and blocked layouts are chosen by them."""
    features = ""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = (line for line in info.read_text().splitlines() if line.startswith(("flags", "Features")))
        features = next(lines, "").partition(":")[2].strip()
    text = f"{platform.system()} {platform.machine()} {features or platform.processor()}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_device(device: Device) -> None:
    """The device's provider is there.

    Raises:
        RuntimeUnavailableError: with what is missing and the command that fixes it.
    """
    providers = onnxruntime().get_available_providers()
    if device.provider not in providers:
        raise RuntimeUnavailableError(
            f"device {device} needs onnxruntime's {device.provider}; this onnxruntime has {', '.join(providers)}. "
            "Install `pip uninstall onnxruntime && pip install 'memonger[gpu]'`, or plan for the CPU: --device cpu."
        )


@dataclass(frozen=True, slots=True)
class Options:
    """How a session is made.

    Attributes:
        level: onnxruntime's graph optimization level, as ``ORT_ENABLE_ALL``.
        in_order: Run nodes in file order.
        threads: Threads within a node; 0 leaves it to onnxruntime.
        profile: Profile from the first run on, into files that begin with this path.
        optimized: Write the optimized model here.
        entries: Session config entries.
        arena: Whether onnxruntime's own CPU arena is on.
        pattern: Whether onnxruntime's own memory pattern is on.
    """

    level: str = "ORT_DISABLE_ALL"
    in_order: bool = False
    threads: int = 0
    profile: Path | None = None
    optimized: Path | None = None
    entries: Mapping[str, str] = field(default_factory=lambda: _NO_ENTRIES)
    arena: bool = True
    pattern: bool = True


def make_session(model: ir.Model | Path, device: Device, options: Options) -> Any:
    """An ``onnxruntime.InferenceSession`` of a model in memory, or of a file as it stands.

    Raises:
        SessionError: onnxruntime refuses the model; its own words are in the message.
    """
    check_device(device)
    settings = session_options(options)
    if isinstance(model, Path):
        return _create(str(model), settings, device)
    folders = {str(Path(tensor.base_dir).resolve()) for tensor in external_tensors(model)}
    for folder in folders:  # one at most: a model's external data lies in its own folder
        settings.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    light, names, values = _without_weights(model)
    if names:
        settings.add_external_initializers(names, values)
    return _create(ir.to_proto(light).SerializeToString(), settings, device)


def _without_weights(model: ir.Model) -> tuple[ir.Model, list[str], list[Any]]:
    """The model with its large weights taken out, their names, and OrtValues over the same memory.

    Serializing weights would copy them twice, and no message can hold over 2 GiB.
    """
    copy = model.clone()
    names, values = [], []
    for value in copy.graph.initializers.values():
        tensor = value.const_value
        if tensor is None or isinstance(tensor, ir.ExternalTensor) or tensor.nbytes < SHARED_ABOVE:
            continue
        if tensor.dtype == ir.DataType.STRING or tensor.dtype.bitwidth < 8:
            continue
        names.append(str(value.name))
        make = onnxruntime().OrtValue.ortvalue_from_numpy_with_onnx_type
        values.append(make(np.require(tensor.numpy(), requirements="C"), int(tensor.dtype)))
        value.const_value = ir.ExternalTensor(
            "given", 0, tensor.nbytes, tensor.dtype, shape=shapes.tensor_shape(tensor), name=str(value.name)
        )
    return copy, names, values


def _create(model: str | bytes, settings: Any, device: Device) -> Any:
    module = onnxruntime()
    providers: list[Any] = [(device.provider, {"device_id": device.index})] if device.kind == "cuda" else []
    try:
        return module.InferenceSession(model, settings, providers=[*providers, "CPUExecutionProvider"])
    except Exception as error:  # pybind exceptions share no base class
        raise SessionError(f"onnxruntime refuses the model: {str(error).strip()}") from error


def session_options(options: Options) -> Any:
    """The same as an ``onnxruntime.SessionOptions``."""
    module = onnxruntime()
    settings = module.SessionOptions()
    settings.log_severity_level = 3  # errors: what memonger has to say it says itself
    settings.graph_optimization_level = getattr(module.GraphOptimizationLevel, options.level)
    settings.enable_cpu_mem_arena = options.arena
    settings.enable_mem_pattern = options.pattern
    if options.in_order:
        settings.execution_order = module.ExecutionOrder.PRIORITY_BASED
    if options.threads:
        settings.intra_op_num_threads = options.threads
    if options.profile is not None:
        settings.enable_profiling = True
        settings.profile_file_prefix = str(options.profile)
    if options.optimized is not None:
        settings.optimized_model_filepath = str(options.optimized)
    for key, value in options.entries.items():
        settings.add_session_config_entry(key, value)
    return settings


def enum_of(dtype: ir.DataType) -> int:
    """The ONNX element type number that onnxruntime binds tensors by."""
    return int(dtype)


def wrap(value: Any) -> Any:
    """The public OrtValue around one of a session's raw ones."""
    return value if isinstance(value, onnxruntime().OrtValue) else onnxruntime().OrtValue(value)


def names_of(items: Sequence[Any]) -> tuple[str, ...]:
    """Names of a session's inputs or outputs."""
    return tuple(item.name for item in items)
