"""Processes that each hold one engine's ways to compute a convolution and its gradients, and run them when asked.

PyTorch and onnxruntime never share a process: each loads CUDA libraries of its own. A process that dies or hangs costs
one figure, not the table. A request is a line of JSON, and so is its answer:

    prepare   one run: its error against float64 and about how long it takes, or why it can't run
    time      seconds of a run, from so many in a row; ``missing`` where nothing is prepared by that name
    check     whether the device is there, and what it is
    truth     (PyTorch) the result in float64, into a file
    clear     forget what was prepared
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.convolutions.layers import Layer, values
from memonger.cli.worker import Worker, WorkerError, reason, serve
from memonger.devices import Device, parse_device
from memonger.errors import RuntimeUnavailableError

ABOUT = 3  # runs that the first guess of a time is taken from
START_TIMEOUT = 120.0  # seconds for an engine to be loaded
OPERANDS = {"y": ("x", "w"), "dx": ("dy", "w"), "dw": ("dy", "x")}
TUNED = {
    "MALLOC_MMAP_MAX_": "0",  # fresh pages are slow on virtual machines
    "MALLOC_TRIM_THRESHOLD_": str(1 << 60),
    "OMP_WAIT_POLICY": "passive",  # as onnxruntime's threads here: those that spin take time from others, and stall
}

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Engine:
    """What a process runs: ``torch`` or ``onnxruntime``, on a device. ``search`` (torch, CUDA): cudnn.benchmark."""

    kind: str
    device: str
    threads: int
    tf32: bool = False
    search: bool = True


class Contestant:
    """An engine's process, started when first asked, and again after it was lost."""

    def __init__(self, engine: Engine, errors: Path) -> None:
        self.engine, self.errors = engine, errors
        self.worker: Worker | None = None

    def ask(self, request: Mapping[str, object], timeout: float) -> Answer:
        """Its answer.

        Raises:
            WorkerError: it ended, or took longer than ``timeout`` seconds once it was started. The next request starts
                a fresh process.
            RuntimeUnavailableError: its device isn't there.
        """
        if self.worker is None:
            environment = TUNED if self.engine.kind == "torch" else {}
            settings = json.dumps(asdict(self.engine))
            self.worker = Worker("benchmarks.convolutions.engines", [settings], self.errors, environment)
            self.ask({"do": "check"}, START_TIMEOUT)
        try:
            answer = self.worker.ask(request, timeout)
        except WorkerError:
            self.close()
            raise
        if "unavailable" in answer:
            raise RuntimeUnavailableError(answer["unavailable"])
        return answer

    def close(self) -> None:
        """End the process."""
        if self.worker is not None:
            self.worker.end(parting=0.0)
        self.worker = None


@dataclass(frozen=True, slots=True)
class Ready:
    """Something that can run. ``wait`` returns when the runs before are done, which on a GPU are ``queued``.

    The clock is the wall's, but for one thread on the CPU the processor's, which leaves out what other programs took.
    """

    run: Callable[[], object]
    wait: Callable[[], object]
    read: Callable[[], np.ndarray]
    queued: bool
    clock: Callable[[], float]

    def seconds(self, runs: int) -> float:
        """Of one run: the mean of so many queued ones, else the median. A quarter as many go before, uncounted."""
        self._run(max(1, runs // 4))
        if self.queued:
            return self._run(runs) / runs
        return statistics.median(self._run(1) for _ in range(runs))

    def _run(self, runs: int) -> float:
        begin = self.clock()
        for _ in range(runs):
            self.run()
        self.wait()
        return self.clock() - begin


def error_of(found: np.ndarray, truth: np.ndarray) -> float:
    """The norm of the difference over the norm of the truth."""
    return float(np.linalg.norm((found - truth).ravel()) / np.linalg.norm(truth.ravel()))


class _Server:
    """Keeps what was prepared, by name, and the current layer's values."""

    def __init__(self, engine: Engine, device: Device) -> None:
        self.engine, self.device = engine, device
        self.ready: dict[str, Ready] = {}
        self.queued = device.kind != "cpu"
        self.clock = time.thread_time if engine.threads == 1 and not self.queued else time.perf_counter
        self.layer: Layer | None = None
        self.arrays: dict[str, np.ndarray] = {}

    def answer(self, request: Mapping[str, Any]) -> Answer:
        kind = request["do"]
        if kind == "time":
            ready = self.ready.get(request["name"])
            return {"missing": True} if ready is None else {"seconds": ready.seconds(request["runs"])}
        if kind == "check":
            return self.check()
        if kind == "clear":
            self.ready.clear()
            return {}
        self._take(Layer(**request["layer"]))
        return self.truth(request) if kind == "truth" else self._prepare(request)

    def _take(self, layer: Layer) -> None:
        if layer != self.layer:
            self.ready.clear()
            self.arrays = values(layer)
            self.layer = layer
            self.changed()

    def _prepare(self, request: Mapping[str, Any]) -> Answer:
        try:
            ready, foreign = self.prepare(request)
        except RuntimeUnavailableError:
            raise
        except Exception as error:  # engines raise kinds of their own
            return {"refused": reason(error)}
        if foreign:
            return {"refused": f"not on the device: {', '.join(foreign)}"}
        error = error_of(ready.read(), np.load(request["truth"], mmap_mode="r"))
        self.ready[request["name"]] = ready
        return {"seconds": ready.seconds(ABOUT), "error": error}

    def check(self) -> Answer:
        raise NotImplementedError

    def truth(self, request: Mapping[str, Any]) -> Answer:
        raise NotImplementedError

    def prepare(self, request: Mapping[str, Any]) -> tuple[Ready, list[str]]:
        raise NotImplementedError

    def changed(self) -> None:
        """The layer is another."""


class _Torch(_Server):
    """PyTorch eager's own kernels, on contiguous tensors."""

    def __init__(self, engine: Engine, device: Device) -> None:
        super().__init__(engine, device)
        import torch

        torch.set_num_threads(engine.threads)
        torch.backends.cudnn.benchmark = engine.search
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = engine.tf32
        self.torch = torch
        self.tensors: dict[str, Any] = {}

    def check(self) -> Answer:
        cuda = self.torch.cuda
        if self.device.kind != "cuda":
            return {"device": str(self.device)}
        if self.device.index >= cuda.device_count():
            raise RuntimeUnavailableError(
                f"PyTorch {self.torch.__version__} finds no {self.device}: the driver or a PyTorch built for CUDA is "
                "missing (`nvidia-smi` shows the driver), or measure on the CPU: --device cpu."
            )
        name, cudnn = cuda.get_device_name(self.device.index), self.torch.backends.cudnn.version()
        return {"device": f"{self.device} ({name}, CUDA {self.torch.version.cuda}, PyTorch's cuDNN {cudnn})"}

    def changed(self) -> None:
        self.tensors = {name: self.torch.from_numpy(array).to(str(self.device)) for name, array in self.arrays.items()}

    def _call(self, quantity: str, tensors: Mapping[str, Any]) -> Any:
        layer, (x, w, dy) = self.layer, (tensors[name] for name in ("x", "w", "dy"))
        assert layer is not None
        if quantity == "y":
            return self.torch.conv2d(x, w, None, layer.stride, layer.pad, 1, layer.groups)
        output = ("dx", "dw").index(quantity)
        mask, step, pad = [output == 0, output == 1, False], [layer.stride] * 2, [layer.pad] * 2
        return self.torch.ops.aten.convolution_backward(
            dy, x, w, None, step, pad, [1, 1], False, [0, 0], layer.groups, mask
        )[output]

    def truth(self, request: Mapping[str, Any]) -> Answer:
        cudnn = self.torch.backends.cudnn
        cudnn.benchmark = False  # one run: not worth the search
        exact = self._call(request["quantity"], {name: value.double() for name, value in self.tensors.items()})
        cudnn.benchmark = self.engine.search
        np.save(request["path"], exact.cpu().numpy())
        return {}

    def prepare(self, request: Mapping[str, Any]) -> tuple[Ready, list[str]]:
        quantity = request["quantity"]
        wait = partial(self.torch.cuda.synchronize, self.device.index) if self.queued else _nothing
        ready = Ready(
            lambda: self._call(quantity, self.tensors),
            wait,
            lambda: self._call(quantity, self.tensors).cpu().numpy(),
            self.queued,
            self.clock,
        )
        return ready, []


def _nothing() -> None:
    pass


class _Onnxruntime(_Server):
    """Models on fixed memory, see `benchmarks.convolutions.binding`."""

    def __init__(self, engine: Engine, device: Device) -> None:
        super().__init__(engine, device)
        from benchmarks.convolutions import binding

        self.binding = binding
        self.memory = binding.Memory(device)
        self.given: dict[str, int] = {}

    def check(self) -> Answer:
        import onnx

        from memonger.runtime.ort import check_device

        check_device(self.device)  # which loads CUDA's libraries, too
        model = onnx.parser.parse_model(
            '<ir_version: 10, opset_import: ["": 20]> g (float[2] a) => (float[2] b) {b = Abs(a)}'
        )
        self._session(model, None)
        return {}

    def _session(self, model: Any, profile: Path | None) -> Any:
        on = self.binding.providers(self.device, self.engine.tf32)
        session = self.binding.session_of(model, self.engine.threads, on, profile)
        if self.device.provider not in session.get_providers():
            from memonger.runtime.cuda import missing

            raise missing.unloaded(self.device)
        return session

    def changed(self) -> None:
        self.memory = self.binding.Memory(self.device)
        self.given = {name: self.memory.put(array) for name, array in self.arrays.items()}

    def prepare(self, request: Mapping[str, Any]) -> tuple[Ready, list[str]]:
        import onnx

        model = onnx.load(request["model"])
        memory = self.binding.Memory(self.device)
        with tempfile.TemporaryDirectory() as folder:
            session = self._session(model, Path(folder) / "profile")
            bound = self.binding.bind(session, model.graph, self.given, [request["output"]], memory)
            bound.run()
            bound.wait()
            foreign = self.binding.foreign_nodes(Path(session.end_profiling()), self.device.provider)
        return Ready(bound.run, bound.wait, bound.outputs[0], self.queued, self.clock), foreign


def main() -> None:
    """Answer requests to the engine that the command line describes."""
    engine = Engine(**json.loads(sys.argv[1]))
    server = (_Torch if engine.kind == "torch" else _Onnxruntime)(engine, parse_device(engine.device))

    def answer(request: Mapping[str, Any]) -> Answer:
        try:
            return server.answer(request)
        except RuntimeUnavailableError as error:
            return {"unavailable": str(error)}

    serve(answer)


if __name__ == "__main__":
    main()
