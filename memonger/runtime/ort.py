"""What onnxruntime is asked to do with a model."""

import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from memonger.devices import CPU, Cuda, Device
from memonger.errors import SessionError
from memonger.files import ScratchFolder
from memonger.ir.element_types import ElementType
from memonger.ir.fields import delimited, varint
from memonger.runtime.backend import backend
from memonger.runtime.onnxruntime import onnxruntime
from memonger.runtime.prepared import Message
from memonger.runtime.weight_reader import dropping
from memonger.units import MOST_THREADS


class Limit:
    """An allocator of host memory that sessions have for themselves, with the most bytes that it may take.

    Sessions that are made with the same object one after the other share it.

    Args:
        nbytes: Bytes; None for no maximum.

    Attributes:
        shrinker: What has it give back memory that no session has in use; None before that is asked for.
    """

    def __init__(self, nbytes: int | None) -> None:
        self.nbytes = nbytes
        self.shrinker: _Shrinker | None = None


def runtime_name() -> str:
    """As ``onnxruntime 1.31.1``."""
    return f"onnxruntime {onnxruntime().__version__}"


def check_device(device: Device) -> None:
    """Check that the device is there, and all that onnxruntime needs for it.

    Raises:
        RuntimeUnavailableError: with what is missing and the command that fixes it.
    """
    backend(device).check()


@dataclass(frozen=True, slots=True)
class SessionSettings:
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
        cuda: How the CUDA provider is set up; None leaves it to onnxruntime.
        is_partition: The session is one of several that run one after the other: no thread of one spins while the next
            one runs.
        shares_workspace: Workspace on the host comes from the allocator that all such sessions of the process share.
        limit: It comes from one of the session's own instead, with a maximum; None: it doesn't.
    """

    level: str = "ORT_DISABLE_ALL"
    in_order: bool = False
    threads: int = 0
    profile: Path | None = None
    optimized: Path | None = None
    entries: Mapping[str, str] = field(default_factory=dict)
    arena: bool = True
    pattern: bool = True
    dims: Mapping[str, int] = field(default_factory=dict)
    cuda: Cuda | None = field(default_factory=Cuda)
    is_partition: bool = False
    shares_workspace: bool = False
    limit: Limit | None = None

    def __post_init__(self) -> None:
        if type(self.threads) is not int or not 0 <= self.threads <= MOST_THREADS:
            raise SessionError(f"threads must be a whole number from 0 to {MOST_THREADS}, not {self.threads!r}.")


def make_session(
    model: Message | Path,
    device: Device,
    options: SessionSettings,
    *,
    pool: Any = None,
    captures: bool = False,
) -> Any:
    """An ``onnxruntime.InferenceSession`` of a model's message, or of a file as it stands.

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
    backend(device).configure(settings, options.cuda, captures)
    providers = backend(device).providers(options.cuda, pool, captures)
    is_shared = options.shares_workspace or options.limit is not None
    with _allocators.lock if is_shared else nullcontext():
        allocator = _allocators.register(options.limit) if is_shared else None
        if isinstance(model, Path):
            session = _create(str(model), settings, device, providers)
        else:
            lent = {name: held.value for name, held in model.lent.items()}
            for name, value in lent.items() if model.is_shared else ():
                settings.add_initializer(name, value)
            if lent and not model.is_shared:
                settings.add_external_initializers(list(lent), list(lent.values()))
            if model.folder is not None:
                settings.add_session_config_entry("session.model_external_initializers_file_folder_path", model.folder)
            try:
                with dropping(model.copies):
                    session = _create(model.data, settings, device, providers)
            except SessionError as error:
                if pool is not None and pool.refused is not None:
                    raise SessionError(f"onnxruntime can't load the model: {pool.refused}") from error
                raise
            session.memonger_lent = model.lent  # onnxruntime points into this memory without holding it
            session._model_bytes = None  # it would keep the message, weights and all, for a fallback that can't happen
        session.memonger_allocator = allocator  # so that it is shrunk as long as the session lives
        return session


def _create(model: str | bytes, settings: Any, device: Device, providers: list[Any]) -> Any:
    try:
        session = onnxruntime().InferenceSession(model, settings, providers=providers)
    except Exception as error:  # pybind exceptions share no base class
        raise SessionError(f"onnxruntime refuses the model: {str(error).strip()}") from error
    if device.provider not in session.get_providers():
        raise backend(device).unloaded()
    return session


RUN_ONCE: Mapping[str, str] = MappingProxyType({"session.intra_op.allow_spinning": "0"})
"""Config entries for a session that runs once or twice: else each of its threads spins for 40 ms once it is made."""

_OF_PARTITIONS = {"session.force_spinning_stop": "1"}
_SHARING = {"session.use_env_allocators": "1", "session.use_device_allocator_for_initializers": "1"}
"""Workspace from the allocator of all, weights not: what stays mustn't lie in a region that is to be given back."""


_AS_IT_STANDS = {"session.disable_quant_qdq": "1"}
"""For a model that isn't optimized: else each reader of a DequantizeLinear gets one of its own, at any level. These run
before all else, and in memory that nobody planned. What fuses them belongs to the levels that optimize."""


class _HostAllocators:
    """The allocator of host memory that sessions get which ask onnxruntime for the process's.

    That is the one registered last; sessions made before keep theirs, and one that no session has is gone with what it
    took (1.32.0). It takes what it is asked for and no more. Sessions without a limit share one, as long as none with a
    limit is made in between. Where somebody else has registered one before 1.32, they use that.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._current: Limit | None = None
        self._is_shared, self._is_the_only = False, False
        self._known: weakref.WeakSet[Limit] = weakref.WeakSet()

    def register(self, limit: Limit | None) -> Limit:
        """Make it one with this limit, or the one that all sessions without a limit share.

        Raises:
            SessionError: this onnxruntime can't have another one.
        """
        if self._current is not None and (self._is_shared if limit is None else limit is self._current):
            return self._current
        wanted = limit or Limit(None)
        self._keep_what_is_used()
        module = onnxruntime()
        where = module.OrtMemoryInfo("Cpu", module.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, module.OrtMemType.DEFAULT)
        settings = {"arena_extend_strategy": 1}
        if limit is not None:
            settings["max_dead_bytes_per_chunk"] = 1  # every piece is cut as asked for
        if wanted.nbytes is not None:
            settings["max_mem"] = wanted.nbytes
        try:
            module.create_and_register_allocator(where, module.OrtArenaCfg(settings))
        except RuntimeError as error:
            if wanted.nbytes is not None:
                raise SessionError(
                    f"{runtime_name()} has an allocator of host memory already, so that no limit can be held: take "
                    "onnxruntime 1.32 or later."
                ) from error
            self._is_the_only = True
        self._current, self._is_shared = wanted, limit is None
        self._known.add(wanted)
        return wanted

    def _keep_what_is_used(self) -> None:
        """Before another is registered: where sessions have the current one still, have what shrinks it."""
        current = None if self._current is None else weakref.ref(self._current)
        self._current = None
        used = None if current is None else current()
        if used is not None:
            used.shrinker = used.shrinker or _Shrinker()

    @property
    def is_shared(self) -> bool:
        """Whether the one of sessions without a limit is there."""
        return self._current is not None and self._is_shared

    def drop(self, limit: Limit) -> None:
        """Sessions that were made with this one are gone: have it give back what it took."""
        with self.lock:
            if limit is self._current:
                self.register(None)
            if self._is_the_only:
                self.shrink()

    def shrink(self) -> None:
        """Have all of them give back what no session has in use."""
        with self.lock:
            if self._current is not None:
                self._current.shrinker = self._current.shrinker or _Shrinker()
            shrinkers = [each.shrinker for each in self._known]
        for shrinker in shrinkers:
            if shrinker is not None:
                shrinker.shrink()


_allocators = _HostAllocators()


def making_sessions() -> AbstractContextManager[object]:
    """For as long as sessions are made that share a `Limit`: no other thread's get an allocator of their own then."""
    return _allocators.lock


def _copying_model() -> Message:
    """By the fields of ModelProto and what is in it, as nothing here knows onnx."""

    def field(number: int, content: bytes | int) -> bytes:
        return delimited(number, content) if isinstance(content, bytes) else varint(number << 3) + varint(content)

    shape = field(1, field(1, 1))  # one dimension, of size 1
    kind = field(1, field(1, ElementType.FLOAT) + field(2, shape))  # a tensor
    ends = (field(number, field(1, name) + field(2, kind)) for number, name in ((11, b"x"), (12, b"y")))
    node = field(1, b"x") + field(2, b"y") + field(4, b"Identity")
    graph = b"".join([field(1, node), field(2, b"copy"), *ends])
    return Message(field(1, 9) + field(7, graph) + field(8, field(2, 17)))


COPYING_MODEL = _copying_model()
"""A model of one node: ``y`` is a copy of ``x``, float32 of shape [1]."""


class _Shrinker:
    """A model of one node, at the end of whose runs the allocator that was registered last gives back what is free."""

    def __init__(self) -> None:
        self._lock, self._ends = threading.Lock(), np.zeros(2, np.float32)
        self._session = make_session(COPYING_MODEL, CPU, SessionSettings(threads=1, entries=_SHARING))
        self._binding, address = self._session.io_binding(), self._ends.ctypes.data
        bind_inputs(self._binding, [("x", ElementType.FLOAT, (1,), address)])
        bind_outputs(self._binding, [("y", ElementType.FLOAT, (1,), address + 4)])  # the allocator has nothing of it
        self._options = run_options({"memory.enable_memory_arena_shrinkage": "cpu:0"})

    def shrink(self) -> None:
        with self._lock:
            self._session.run_with_iobinding(self._binding, self._options)


def shares_host_memory() -> bool:
    """Whether there is an allocator of host memory that sessions share already, with what it took for their runs."""
    return _allocators.is_shared


def shrink_host_memory() -> None:
    """Give workspace on the host back to the system, but for regions in which some session has something."""
    _allocators.shrink()


def drop(limit: Limit) -> None:
    """Give back to the system what an allocator took whose sessions are gone."""
    _allocators.drop(limit)


def session_options(options: SessionSettings) -> Any:
    """The same as an ``onnxruntime.SessionOptions``."""
    module = onnxruntime()
    entries = {**(_OF_PARTITIONS if options.is_partition else {}), **options.entries}
    if options.level == "ORT_DISABLE_ALL":
        entries = {**_AS_IT_STANDS, **entries}
    if options.shares_workspace or options.limit is not None:
        entries = {**_SHARING, **entries}
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
    for key, value in entries.items():
        settings.add_session_config_entry(key, value)
    return settings


@cache
def _where(device: Device) -> Any:
    """A device as the binding inside onnxruntime's Python takes it."""
    return onnxruntime().OrtDevice.make(device.kind, device.index)._get_c_device()


Bound = Iterable[tuple[str, int, Sequence[int], int]]
"""Name, number of the type, shape, and bytes behind a base."""


def bind_outputs(binding: Any, tensors: Bound, base: int = 0, device: Device = CPU) -> None:
    """Let runs write outputs to addresses of ours, without what onnxruntime's Python does for each."""
    where, bind = _where(device), binding._iobinding.bind_output
    for name, dtype, shape, offset in tensors:
        bind(name, where, dtype, shape, base + offset)


def bind_inputs(binding: Any, tensors: Bound, base: int = 0, device: Device = CPU) -> None:
    """Let runs read inputs from addresses of ours, likewise."""
    where, bind = _where(device), binding._iobinding.bind_input
    for name, dtype, shape, offset in tensors:
        bind(name, where, dtype, shape, base + offset)


def run_options(entries: Mapping[str, str]) -> Any:
    """``onnxruntime.RunOptions`` with config entries."""
    options = onnxruntime().RunOptions()
    for key, value in entries.items():
        options.add_run_config_entry(key, value)
    return options


def wrap(value: Any) -> Any:
    """The public OrtValue around one of a session's raw ones."""
    return value if isinstance(value, onnxruntime().OrtValue) else onnxruntime().OrtValue(value)


def texts(array: np.ndarray) -> Any:
    """An OrtValue of strings, which onnxruntime's Python has no constructor for: a model gives them.

    Written field by field (https://github.com/onnx/onnx/blob/main/onnx/onnx.proto): the onnx package would take 9 MiB.

    Raises:
        TypeError: something else is in the array.
    """
    found = array.ravel().tolist()
    other = next((each for each in found if not isinstance(each, str | bytes)), None)
    if other is not None:
        raise TypeError(f"{type(other).__name__} is among its elements, not text alone.")

    def number(field: int, value: int) -> bytes:
        return varint(field << 3) + varint(value)

    name, kind = b"texts", int(ElementType.STRING)
    content = (delimited(6, each.encode() if isinstance(each, str) else each) for each in found)
    tensor = b"".join((*(number(1, size) for size in array.shape), number(2, kind), *content, delimited(8, name)))
    result = delimited(1, name) + delimited(2, delimited(1, number(1, kind)))
    graph = delimited(2, name) + delimited(5, tensor) + delimited(12, result)
    model = number(1, 10) + delimited(7, graph) + delimited(8, number(2, 21))
    session = make_session(Message(model), CPU, SessionSettings(threads=1))
    binding = session.io_binding()
    binding.bind_output(name.decode())
    session.run_with_iobinding(binding)
    return binding.get_outputs()[0]


MOST_NOTES = 1 << 15
"""Nodes run between two times that a thread's notes are emptied, which takes about a millisecond."""


class ThreadNotes(threading.local):
    """Nodes run in this thread since its notes were emptied."""

    nodes = 0


_NOTES = ThreadNotes()


def count_notes(nodes: int) -> None:
    """Say that a session which was profiled has run as many nodes in this thread; now and then empty its notes.

    A session's pool of threads notes the size of each parallel section of a profiled run, in the calling thread. It
    isn't told that the profile has ended, and notes those of all later runs (onnxruntime 1.31.1): 8 bytes each, without
    end. The next profiled run in that thread, of whatever session with a pool, empties the notes.
    """
    _NOTES.nodes += nodes
    if _NOTES.nodes > MOST_NOTES:
        _NOTES.nodes = 0
        empty_notes()


def empty_notes() -> None:
    """Empty this thread's notes: by a profiled run of a model of one node with a pool of two threads."""
    folder = ScratchFolder()
    try:
        session = make_session(COPYING_MODEL, CPU, SessionSettings(threads=2, profile=folder.path / "notes"))
        session.run(None, {"x": np.zeros(1, np.float32)})
        session.end_profiling()
    finally:
        folder.remove()
