"""Sessions of one model in this process: what each takes of the device by its driver's account, then turns for time."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.training.side_by_side import turns
from benchmarks.training.side_by_side.devices import Watch, used_bytes
from memonger.devices import Cuda, parse_device

WARM, ROUNDS, TURN = 3, 5, 0.08
Feeds = Mapping[str, np.ndarray]


class Stock:
    """Stock onnxruntime on the device, inputs and outputs there.

    Args:
        path: The model.
        feeds: Its inputs.
        device: ``cuda:N``.
        options: Of the provider, on top of its own.
        cuda: The settings of a plan, to be used as they are; None leaves onnxruntime its own.
    """

    def __init__(
        self, path: Path, feeds: Feeds, device: str, options: Mapping[str, str] | None = None, cuda: Cuda | None = None
    ) -> None:
        import onnxruntime

        index = parse_device(device).index
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 4
        settings.use_deterministic_compute = cuda is not None and cuda.deterministic
        given = {"device_id": str(index), **(cuda.options() if cuda else {}), **(options or {})}
        providers = [("CUDAExecutionProvider", given), "CPUExecutionProvider"]
        self.session = onnxruntime.InferenceSession(str(path), settings, providers=providers)
        if "CUDAExecutionProvider" not in self.session.get_providers():
            raise RuntimeError("onnxruntime fell back to the CPU: its CUDA provider couldn't be loaded")
        self.binding, self.given = self.session.io_binding(), dict[str, Any]()
        for name, array in feeds.items():
            self.given[name] = onnxruntime.OrtValue.ortvalue_from_numpy(array, "cuda", index)
            self.binding.bind_ortvalue_input(name, self.given[name])
        for output in self.session.get_outputs():
            self.binding.bind_output(output.name, "cuda", index)

    def run(self) -> None:
        """Once; done when this returns."""
        self.session.run_with_iobinding(self.binding)
        self.binding.synchronize_outputs()

    def outputs(self) -> list[np.ndarray]:
        """What the last run computed."""
        return [np.asarray(array) for array in self.binding.copy_outputs_to_cpu()]


class Planned:
    """A plan's session; it is warmed up from arrays of the host, so that its copies of inputs are there, too."""

    def __init__(self, path: Path, feeds: Feeds, device: str, graph: str) -> None:
        import onnxruntime

        import memonger

        self.session = memonger.Session(path, device=device, cuda_graph=graph)
        self.found = self.session.run(feeds)
        index = parse_device(device).index
        self.given = {
            name: onnxruntime.OrtValue.ortvalue_from_numpy(array, "cuda", index) for name, array in feeds.items()
        }

    def run(self) -> None:
        """Once; done when this returns."""
        self.found = self.session.run(self.given, copy=False)

    def outputs(self) -> list[np.ndarray]:
        """What the last run computed, in the order of the model's outputs."""
        return [np.asarray(value.numpy()) for value in self.found.values()]


def contest(makers: Mapping[str, Callable[[], Any]], device: str) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Make one after the other, then let them take turns.

    The first session of a process takes the code of cuDNN and cuBLAS, too: so one is made before all others, and ended.

    Returns: the sessions that could be made; and of each ``taken`` (bytes of the device that stay in use), ``peak``
    (bytes, the most seen every 5 ms), ``milliseconds`` of a run (median of the turns), or ``failed``. Of the first one
    also ``taken_first``: what the one before all others had taken.
    """
    index = parse_device(device).index
    made, rows = dict[str, Any](), dict[str, dict[str, Any]]()
    first, taken_first = next(iter(makers)), None
    with suppress(Exception):  # what can't be made says so below
        taken_first = _warm(makers[first], index)[1]["taken"]
    for name, make in makers.items():
        gc.collect()
        try:
            made[name], rows[name] = _warm(make, index)
        except Exception as error:  # its row says why
            rows[name] = {"failed": " ".join(str(error).split())[:200]}
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(ROUNDS):
        for name, session in made.items():
            times[name].append(_turn(session))
    rows[first]["taken_first"] = taken_first
    for name, found in times.items():
        rows[name]["milliseconds"] = round(statistics.median(found) * 1e3, 4)
    return made, rows


def _warm(make: Callable[[], Any], index: int) -> tuple[Any, dict[str, Any]]:
    """A session that has run, and what it took; where it fails none of it stays."""
    with Watch(index) as watch:
        session = make()
        for _ in range(WARM):
            session.run()
        return session, {"peak": watch.peak(), "taken": used_bytes(index) - watch.before}


def _turn(session: Any) -> float:
    """Median seconds of a run."""
    times, until = list[float](), time.perf_counter() + TURN
    while len(times) < 2 or time.perf_counter() < until:
        begin = time.perf_counter()
        session.run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def same_bits(mine: list[np.ndarray], theirs: list[np.ndarray]) -> bool:
    """Whether all outputs are alike to the last bit."""
    return len(mine) == len(theirs) and all(
        a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in zip(mine, theirs, strict=True)
    )


def apart(mine: list[np.ndarray], theirs: list[np.ndarray]) -> float:
    """The largest difference over the largest magnitude, of the output where that is most."""
    pairs = zip(mine, theirs, strict=True)
    return max(turns.apart(one.astype(np.float64), other.astype(np.float64)) for one, other in pairs)


def feeds_of(path: Path, tokens: int) -> dict[str, np.ndarray]:
    """Seeded inputs: noise, and whole numbers below ``tokens``."""
    import onnx

    rng, feeds = np.random.default_rng(0), {}
    for value in onnx.load(path, load_external_data=False).graph.input:
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            feeds[value.name] = rng.standard_normal(shape, np.float32)
        else:
            dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            feeds[value.name] = rng.integers(0, tokens, shape).astype(dtype)
    return feeds
