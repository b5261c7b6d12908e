"""What onnxruntime is asked to do with a model."""

import hashlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx_ir as ir

from memonger.devices import CPU, Cuda, Device
from memonger.errors import SessionError
from memonger.model.load import external_tensors
from memonger.runtime import process_memory, weights
from memonger.runtime.onnxruntime import onnxruntime

SCRATCH_MARGIN = 1 << 16  # bytes, for what the runtime rounds up

_NO_ENTRIES: Mapping[str, str] = MappingProxyType({})
_NO_DIMS: Mapping[str, int] = MappingProxyType({})


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
    """The device is there, and all that onnxruntime needs for it.

    Raises:
        RuntimeUnavailableError: with what is missing and the command that fixes it.
    """
    if device.kind == "cuda":
        from memonger.runtime.cuda import missing

        missing.check(device)


def machine_name(device: Device) -> str:
    """What a device-form plan is bound to: a digest of the processor, or a CUDA device's name and cuDNN's version."""
    if device.kind != "cuda":
        return machine_digest()
    from memonger.runtime.cuda import driver, missing

    return f"{driver.name(device)}, CUDA {missing.built_for()}, cuDNN {missing.cudnn_version()}"


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
        dims: Sizes of symbolic dimensions, by name, set before the optimizer runs.
        lend_weights: Read weights from the model's own memory, which then lives as long as the session. Right for a
            session that is soon gone: one that stays would keep them beside the copies its kernels have prepacked.
        cuda: How the CUDA provider is set up; None leaves it to onnxruntime.
    """

    level: str = "ORT_DISABLE_ALL"
    in_order: bool = False
    threads: int = 0
    profile: Path | None = None
    optimized: Path | None = None
    entries: Mapping[str, str] = field(default_factory=lambda: _NO_ENTRIES)
    arena: bool = True
    pattern: bool = True
    dims: Mapping[str, int] = field(default_factory=lambda: _NO_DIMS)
    lend_weights: bool = False
    cuda: Cuda | None = field(default_factory=Cuda)


def make_session(
    model: ir.Model | Path, device: Device, options: Options, *, pool: Any = None, captures: bool = False
) -> Any:
    """An ``onnxruntime.InferenceSession`` of a model in memory, or of a file as it stands.

    Args:
        model: What to run.
        device: Where.
        options: How.
        pool: A `memonger.runtime.cuda.pool.Pool` that takes the place of the CUDA provider's own arena.
        captures: Whether runs are captured as CUDA graphs.

    Raises:
        SessionError: onnxruntime refuses the model; its own words are in the message.
        RuntimeUnavailableError: the device isn't there.
    """
    check_device(device)
    settings = session_options(options)
    if device.kind == "cuda" and options.cuda is not None:
        settings.use_deterministic_compute = options.cuda.deterministic
    if captures:  # weights as large as they are, not in regions of the arena that runs take their scratch from
        settings.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    providers = _providers(device, options.cuda, pool, captures)
    if isinstance(model, Path):
        return _create(str(model), settings, device, providers)
    folders = {str(Path(tensor.base_dir).resolve()) for tensor in external_tensors(model)}
    for folder in folders:  # one at most: a model's external data lies in its own folder
        settings.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    message = None if options.lend_weights else weights.owned_message(model)
    lent: list[Any] = []
    if message is None:
        message, lent = weights.lent_message(model, settings)
    try:
        session = _create(message, settings, device, providers)
    except SessionError as error:
        if pool is not None and pool.refused is not None:
            raise SessionError(f"onnxruntime can't load the model: {pool.refused}") from error
        raise
    session.memonger_lent = lent  # onnxruntime points into this memory without holding it
    session._model_bytes = None  # it would keep the message, weights and all, for a fallback that can't happen here
    return session


def _providers(device: Device, cuda: Cuda | None, pool: Any, captures: bool) -> list[Any]:
    if device.kind != "cuda":
        return ["CPUExecutionProvider"]
    own = {"arena_extend_strategy": "kSameAsRequested", **cuda.options()} if cuda is not None else {}
    if device.index:
        own["device_id"] = str(device.index)
    if captures:
        own["enable_cuda_graph"] = "1"
    return [(device.provider, {**own, **(pool.options() if pool is not None else {})}), "CPUExecutionProvider"]


def _create(model: str | bytes, settings: Any, device: Device, providers: list[Any]) -> Any:
    try:
        session = onnxruntime().InferenceSession(model, settings, providers=providers)
    except Exception as error:  # pybind exceptions share no base class
        raise SessionError(f"onnxruntime refuses the model: {str(error).strip()}") from error
    if device.provider not in session.get_providers():
        from memonger.runtime.cuda import missing

        raise missing.unloaded(device)
    return session


def session_options(options: Options) -> Any:
    """The same as an ``onnxruntime.SessionOptions``."""
    module = onnxruntime()
    settings = module.SessionOptions()
    settings.log_severity_level = 4  # its errors come back as exceptions, and those are ours to word
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
    for name, size in options.dims.items():
        settings.add_free_dimension_override_by_name(name, size)
    for key, value in options.entries.items():
        settings.add_session_config_entry(key, value)
    return settings


def reserve_scratch(session: Any, size: int, device: Device = CPU) -> None:
    """Let the session's own arena take one region that all scratch of a run fits into, whichever step needs it.

    Left alone the arena takes a region for the first step that needs scratch and keeps it; a later step that needs more
    takes another, and both stay. A region of twice the largest need is always split, never used up by one allocation,
    and so serves all; what of it is never written costs nothing. What loading left free goes back to the system first,
    or the region would lie in it, and stay resident, used or not.

    On a CUDA device all that is taken costs: there the region is the largest need. A step that asks for most of it, and
    then for more, takes another one of what doesn't fit.
    """
    if size and device.kind == "cuda":
        session.create_ortvalue_from_shape_and_type([size], np.uint8, "cuda", device.index)
    elif size and hasattr(session, "create_ortvalue_from_shape_and_type"):
        process_memory.give_back()
        session.create_ortvalue_from_shape_and_type([2 * size + SCRATCH_MARGIN], np.uint8, "cpu")


def enum_of(dtype: ir.DataType) -> int:
    """The ONNX element type number that onnxruntime binds tensors by."""
    return int(dtype)


def bind_output(
    binding: Any, name: str, dtype: ir.DataType, shape: Sequence[int], address: int, device: Device = CPU
) -> None:
    """Let a run write an output to an address of ours."""
    binding.bind_output(name, device.kind, device.index, enum_of(dtype), list(shape), address)


def bind_input(
    binding: Any, name: str, dtype: ir.DataType, shape: Sequence[int], address: int, device: Device = CPU
) -> None:
    """Let a run read an input from an address of ours."""
    binding.bind_input(name, device.kind, device.index, enum_of(dtype), list(shape), address)


def run_options(entries: Mapping[str, str]) -> Any:
    """``onnxruntime.RunOptions`` with config entries."""
    options = onnxruntime().RunOptions()
    for key, value in entries.items():
        options.add_run_config_entry(key, value)
    return options


def is_on(where: Any, device: Device) -> bool:
    """Whether a session's memory info (of an input or output) means the device's own memory."""
    return str(where.name).lower() == device.kind or (device.kind == "cpu" and "cpu" in str(where.name).lower())


def wrap(value: Any) -> Any:
    """The public OrtValue around one of a session's raw ones."""
    return value if isinstance(value, onnxruntime().OrtValue) else onnxruntime().OrtValue(value)


def names_of(items: Sequence[Any]) -> tuple[str, ...]:
    """Names of a session's inputs or outputs."""
    return tuple(item.name for item in items)
