"""Checks of memory: scratch and what counts it, the external allocator, the provider's own arena, loading."""

import contextlib
import ctypes
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from memonger.devices import Device
from memonger.runtime.profile import read_workspace
from tests.facts.device import Driver, DriverError, Wish, bind, driver, open_session, place
from tests.facts.fact import HOLDS, SEEN, Fact, judged

MIB = 1 << 20
CHANNELS, SIDE = 64, 56
STATISTICS = "session.collect_node_memory_stats_to_file"


@dataclass
class External:
    """An allocator of ours in place of the provider's arena, and what it was asked for."""

    unit: Driver
    asked: list[int] = field(default_factory=list)
    """Sizes, in order; freed ones negative."""
    refused: int = 0
    """How often the driver refused. The runtime gets a null pointer then."""
    _live: dict[int, int] = field(default_factory=dict)
    _hold: list[Any] = field(default_factory=list)

    def options(self) -> dict[str, str]:
        """Provider options that put it in place. The object must outlive the session."""
        self._hold = [
            ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t)(self._allocate),
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._free),
            ctypes.CFUNCTYPE(None)(lambda: None),
        ]
        names = ("gpu_external_alloc", "gpu_external_free", "gpu_external_empty_cache")
        return {n: str(ctypes.cast(f, ctypes.c_void_p).value) for n, f in zip(names, self._hold, strict=True)}

    def _allocate(self, size: int) -> int:
        try:
            address = self.unit.allocate(size)
        except DriverError:
            self.refused += 1
            return 0
        self._live[address] = size
        self.asked.append(size)
        return address

    def _free(self, address: int | None) -> None:
        if address in self._live:
            self.asked.append(-self._live.pop(address))
            with contextlib.suppress(DriverError):  # while a stream is captured
                self.unit.free(address)

    def peak(self) -> int:
        """The most bytes out at once since `asked` was last cleared."""
        now = most = 0
        for size in self.asked:
            now += size
            most = max(most, now)
        return most


def convolutions(count: int = 3) -> onnx.ModelProto:
    """Convolutions in a row, each of which a cuDNN plan may want workspace for."""
    weights = np.random.default_rng(0).standard_normal((CHANNELS, CHANNELS, 3, 3)).astype(np.float32) / 24
    names = ["x", *(f"v{i}" for i in range(count - 1)), "y"]
    nodes = [
        helper.make_node("Conv", [names[i], f"w{i}"], [names[i + 1]], name=f"conv{i}", pads=[1] * 4)
        for i in range(count)
    ]
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [8, CHANNELS, SIDE, SIDE]) for n in (*names[1:], "x")]
    weighted = [numpy_helper.from_array(weights, f"w{i}") for i in range(count)]
    made = helper.make_graph(nodes, "convolutions", info[-1:], info[:-1], weighted)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def _bound(session: Any, device: Device) -> Any:
    like = np.zeros((8, CHANNELS, SIDE, SIDE), np.float32)
    x = np.random.default_rng(1).standard_normal(like.shape).astype(np.float32)
    outputs = {value.name: place(device, like) for value in session.get_outputs()}
    return bind(session, device, {"x": place(device, like, x)}, outputs)


def check_external_allocator(device: Device) -> Iterator[Fact]:
    """The provider's options gpu_external_alloc, _free and _empty_cache."""
    unit, model = driver(device), convolutions()
    external = External(unit)
    session = open_session(model, device, Wish(options=external.options()))
    weights = sum(numpy_helper.to_array(t).nbytes for t in model.graph.initializer)
    loaded = sum(external.asked)
    yield judged(
        "an external allocator (functions of ours by address) gets what loading takes: the weights, to the byte",
        f"{loaded:,} bytes in {len(external.asked)} calls, weights {weights:,}",
        loaded == weights,
    )
    binding = _bound(session, device)
    session.run_with_iobinding(binding)
    unit.wait()
    external.asked.clear()
    session.run_with_iobinding(binding)
    unit.wait()
    yield judged(
        "with all values bound, a run asks it for scratch alone, and gives all of it back",
        f"second run: {', '.join(f'{n:+,}' for n in external.asked) or 'nothing asked'}",
        sum(external.asked) == 0,
    )
    yield from _statistics(device, model, external.peak())
    external.asked.clear()
    del binding, session
    yield judged(
        "closing the session gives the weights back",
        f"{-sum(external.asked):,} of {weights:,} bytes",
        -sum(external.asked) == weights,
    )


def _statistics(device: Device, model: onnx.ModelProto, scratch: int) -> Iterator[Fact]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "memory.csv"
        session = open_session(model, device, Wish(entries={STATISTICS: str(path)}))
        session.run_with_iobinding(_bound(session, device))
        del session
        counted = max(read_workspace(path).values(), default=0) if path.is_file() else 0
    yield judged(
        "node memory statistics see no scratch of kernels on CUDA",
        f"the largest they say {counted:,}; the allocator saw {scratch:,} at once",
        counted < scratch,
        told=scratch > 0,
    )


def check_fixed_region(device: Device) -> Iterator[Fact]:
    """Scratch served from one region of ours, whatever asks for it."""
    unit, model = driver(device), convolutions()
    seen: list[str] = []
    for search in ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"):
        for most in ("1", "0"):
            external = External(unit)
            chosen = {"cudnn_conv_algo_search": search, "cudnn_conv_use_max_workspace": most, **external.options()}
            session = open_session(model, device, Wish(options=chosen))
            external.asked.clear()
            session.run_with_iobinding(_bound(session, device))
            unit.wait()
            first = external.peak()
            external.asked.clear()
            session.run_with_iobinding(_bound(session, device))
            unit.wait()
            seen.append(
                f"{search}, cudnn_conv_use_max_workspace {most}: first run {first:,}, later {external.peak():,}"
            )
            del session
    yield Fact("most scratch at once of three 3x3 convolutions, by cuDNN option (bytes)", "\n".join(seen), SEEN)


def check_provider_arena(device: Device) -> Iterator[Fact]:
    """What the provider's own arena takes from the device."""
    seen = []
    for strategy in ("kNextPowerOfTwo", "kSameAsRequested"):
        unit = driver(device)
        unit.wait()
        before = unit.used()
        session = open_session(convolutions(), device, Wish(options={"arena_extend_strategy": strategy}))
        loaded = unit.used() - before
        binding = _bound(session, device)
        bound = unit.used() - before - loaded
        session.run_with_iobinding(binding)
        unit.wait()
        grown = unit.used() - before - loaded - bound
        seen.append(f"{strategy}: {loaded / MIB:.1f} MiB at load, {grown / MIB:.1f} MiB more in the first run")
        del session, binding
    yield Fact("what a session with all values bound takes from the device, by arena_extend_strategy", "\n".join(seen))
    yield from _limit(device)


def _limit(device: Device) -> Iterator[Fact]:
    claim = "gpu_mem_limit below the weights is an error when the session is made"
    try:
        open_session(convolutions(), device, Wish(options={"gpu_mem_limit": "1000"}))
    except Exception as error:  # pybind exceptions share no base class
        yield Fact(claim, " ".join(str(error).split())[:200], HOLDS)
    else:
        yield judged(claim, "no error", False)


def check_loading(device: Device) -> Iterator[Fact]:
    """Weights on the way to the device."""
    open_session(convolutions(1), device)  # what the first session of a process takes is not theirs
    yield _resident("weights given by add_external_initializers", device, _lent)
    yield _resident("weights in a file beside the model", device, _filed)
    external, weights = External(driver(device)), np.arange(4096 * 4096, dtype=np.float32).reshape(4096, 4096)
    session = open_session(_copied(weights), device, Wish(options=external.options()))
    loaded = sum(external.asked)
    yield judged(
        "weights that nothing but MemcpyFromHost reads stay on the host: loading takes no byte of the device for them",
        f"{loaded:,} bytes of {weights.nbytes:,}",
        loaded == 0,
    )
    x, outputs = np.zeros((1, 4096), np.float32), {"y": np.zeros((1, 4096), np.float32), "c": np.zeros_like(weights)}
    places = {name: place(device, like) for name, like in outputs.items()}
    session.run_with_iobinding(bind(session, device, {"x": place(device, x)}, places))
    driver(device).wait()
    is_same = np.array_equal(driver(device).read(places["c"].address, weights), weights)
    yield judged("a run copies them to where the copy is bound", f"the same bytes there: {is_same}", is_same)


def _copied(weights: np.ndarray) -> onnx.ModelProto:
    """The product, whose weight a node copies from the host."""
    model = _one_product(weights)
    model.graph.node[0].input[1] = "c"
    model.graph.node.insert(0, helper.make_node("MemcpyFromHost", ["w"], ["c"], name="copy"))
    model.graph.output.append(helper.make_tensor_value_info("c", TensorProto.FLOAT, [4096, 4096]))
    return model


def _resident(what: str, device: Device, make: Callable[[Path, Device], Any]) -> Fact:
    with tempfile.TemporaryDirectory() as folder:
        before = _private()
        session = make(Path(folder), device)
        after = _private()
    size = 64 * MIB
    held = after - before
    del session
    return judged(
        f"{what} (64 MiB) leave no copy on the host once they are on the device",
        f"{held / MIB:.0f} MiB more of the process's own pages",
        held < size,
        told=driver(device).is_real,
    )


def _private() -> int:
    """The process's own pages that are resident, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def _one_product(weights: np.ndarray | None) -> onnx.ModelProto:
    """x times a matrix of 64 MiB."""
    shapes = {"x": [1, 4096], "y": [1, 4096]}
    info = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()}
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="product")
    made = helper.make_graph([node], "product", [info["x"]], [info["y"]])
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    if weights is not None:
        model.graph.initializer.append(numpy_helper.from_array(weights, "w"))
    else:
        tensor = model.graph.initializer.add(name="w", data_type=TensorProto.FLOAT, dims=[4096, 4096])
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="weights.data")
    return model


def _lent(folder: Path, device: Device) -> tuple[Any, Any]:
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    path = folder / "weights.npy"
    np.save(path, np.zeros((4096, 4096), np.float32))
    value = onnxruntime.OrtValue.ortvalue_from_numpy(np.load(path, mmap_mode="r"))
    settings.add_external_initializers(["w"], [value])
    providers = [("CUDAExecutionProvider", {"device_id": device.index}), "CPUExecutionProvider"]
    message = _one_product(None).SerializeToString()
    return onnxruntime.InferenceSession(message, settings, providers=providers), value


def _filed(folder: Path, device: Device) -> Any:
    path = folder / "model.onnx"
    onnx.save(_one_product(np.zeros((4096, 4096), np.float32)), path, save_as_external_data=True, size_threshold=1024)
    return open_session(str(path), device)
