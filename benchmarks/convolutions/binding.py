"""Sessions on fixed memory: every value of a model is bound to an address on the device. Imports no PyTorch.

Everything runs as memonger runs it: ORT_DISABLE_ALL, every tensor static, weights as inputs, nodes in file order, every
value bound to memory that was touched before the clock starts and is reused once its last reader has run; a view has
its source's address.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from memonger.devices import CPU, Cuda, Device

VIEWS = {"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity"}

Array = np.ndarray
Run = Callable[[], object]


def expose(model: onnx.ModelProto) -> None:
    """Make every value that a node writes an output, with its inferred shape: only outputs can be bound.

    Raises:
        ValueError: a value has no shape; it names the operator.
    """
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True).graph
    values = {value.name: value for value in (*inferred.value_info, *inferred.output)}
    found = []
    for node in model.graph.node:
        for name in filter(None, node.output):
            if name not in values:
                raise ValueError(f"onnx infers no shape of what {node.op_type} writes")
            found.append(values[name])
    del model.graph.output[:]
    model.graph.output.extend(found)


@dataclass(frozen=True, slots=True)
class Value:
    """Type and shape of a value, and its home: the block it lies in, or the input that it is a view of."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    home: str

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def place(graph: onnx.GraphProto, keep: Sequence[str]) -> tuple[dict[str, Value], dict[str, int]]:
    """Every value of a graph that `expose` made, and the blocks to take with their bytes.

    Values of one size share a block where their lives do not overlap; those in ``keep`` live to the end.
    """
    values = {info.name: _value(info, info.name) for info in graph.input}
    infos = {info.name: info for info in graph.output}
    roots: dict[str, str] = {}
    for node in graph.node:
        if node.op_type in VIEWS:
            roots[node.output[0]] = roots.get(node.input[0], node.input[0])
    last = {roots.get(name, name): step for step, node in enumerate(graph.node) for name in node.input}
    last |= {roots.get(name, name): len(graph.node) for name in keep}
    blocks: dict[str, int] = {}
    free: dict[int, list[str]] = {}
    alive: dict[str, str] = {}
    for step, node in enumerate(graph.node):
        for name in filter(None, node.output):
            if name in roots:
                values[name] = _value(infos[name], values[roots[name]].home)
                continue
            size = _value(infos[name], "").size
            home = free[size].pop() if free.get(size) else f"block {len(blocks)}"
            blocks[home] = size
            alive[name] = home
            values[name] = _value(infos[name], home)
        for name in [name for name in alive if last.get(name, step) <= step]:
            free.setdefault(values[name].size, []).append(alive.pop(name))
    return values, blocks


def _value(info: onnx.ValueInfoProto, home: str) -> Value:
    kind = info.type.tensor_type
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem_type))
    return Value(dtype, tuple(dim.dim_value for dim in kind.shape.dim), home)


class Memory:
    """Memory of a device, by address; it stays taken as long as this object lives."""

    def __init__(self, device: Device = CPU) -> None:
        self.device = device
        self._held: dict[int, Any] = {}  # a numpy array on the CPU, else an OrtValue

    def take(self, size: int) -> int:
        """The address of so many bytes."""
        if self.device.kind == "cpu":
            memory = np.ones(size + 64, np.uint8)
            return self.put(memory[-memory.ctypes.data % 64 :][:size])
        found = ort.OrtValue.ortvalue_from_shape_and_type([size], np.uint8, self.device.kind, self.device.index)
        return self._hold(found.data_ptr(), found)

    def put(self, array: Array) -> int:
        """The address of an array: its own on the CPU, of a copy elsewhere."""
        if self.device.kind == "cpu":
            return self._hold(array.ctypes.data, array)
        found = ort.OrtValue.ortvalue_from_numpy(array, self.device.kind, self.device.index)
        return self._hold(found.data_ptr(), found)

    def _hold(self, address: int, memory: Any) -> int:
        self._held[address] = memory
        return address

    def read(self, address: int, value: Value) -> Array:
        """What lies there: itself on the CPU, a copy elsewhere."""
        held = self._held[address]
        array = held if isinstance(held, np.ndarray) else held.numpy()
        return array.reshape(-1).view(np.uint8)[: value.size].view(value.dtype).reshape(value.shape)


def providers(device: Device, tf32: bool = False) -> list[Any]:
    """onnxruntime's providers for a device; on CUDA cuDNN tries every algorithm it has, in all the memory it wants."""
    if device.kind == "cpu":
        return ["CPUExecutionProvider"]
    options = {"device_id": str(device.index), **Cuda("exhaustive", max_workspace=True, tf32=tf32).options()}
    return [(device.provider, options), "CPUExecutionProvider"]


def session_of(
    model: onnx.ModelProto, threads: int, on: Sequence[Any] = ("CPUExecutionProvider",), profile: Path | None = None
) -> ort.InferenceSession:
    """A session with memonger's options; with ``profile``, its runs are profiled into a file that begins so."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.add_session_config_entry("session.force_spinning_stop", "1")  # else its threads spin into PyTorch's time
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    return ort.InferenceSession(model.SerializeToString(), options, providers=list(on))


@dataclass(frozen=True, slots=True)
class Bound:
    """A session whose values all have an address. On CUDA ``run`` returns before the work is done; ``wait`` then."""

    run: Run
    wait: Run
    outputs: tuple[Callable[[], Array], ...]


def bind(
    session: ort.InferenceSession, graph: onnx.GraphProto, given: Mapping[str, int], wanted: Sequence[str],
    memory: Memory,
) -> Bound:  # fmt: skip
    """Bind a session of a graph that `expose` made: ``given`` are the addresses of its inputs."""
    values, blocks = place(graph, wanted)
    addresses = {**given, **{name: memory.take(size) for name, size in blocks.items()}}
    binding = session.io_binding()
    for bind_one, infos in ((binding.bind_input, graph.input), (binding.bind_output, graph.output)):
        for info in infos:
            value, device = values[info.name], memory.device
            bind_one(
                info.name, device.kind, device.index, value.dtype.type, value.shape, addresses[value.home]
            )  # by address: what is there has to stay
    options = ort.RunOptions()
    if memory.device.kind != "cpu":
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def run(_keep: object = memory) -> None:
        session.run_with_iobinding(binding, options)

    def read(name: str) -> Callable[[], Array]:
        return lambda: memory.read(addresses[values[name].home], values[name])

    return Bound(run, binding.synchronize_outputs, tuple(read(name) for name in wanted))


def foreign_nodes(profile: Path, provider: str) -> list[str]:
    """Operators of a profile that another provider ran, and copies between devices, each once: ``CPU: Col2Im``."""
    with profile.open() as file:
        events = (json.loads(line.rstrip().rstrip(",")) for line in file if line.startswith("{"))
        runs = [e["args"] for e in events if e.get("cat") == "Node" and e["name"].endswith("_kernel_time")]
    if not runs:
        raise ValueError(f"onnxruntime's profile {profile} tells of no node.")
    found = []
    for run in runs:
        if run["provider"] != provider:
            found.append(f"{run['provider'].removesuffix('ExecutionProvider')}: {run['op_name']}")
        elif run["op_name"].startswith("Memcpy"):
            found.append(run["op_name"])
    return list(dict.fromkeys(found))
