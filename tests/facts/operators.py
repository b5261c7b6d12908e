"""Where onnxruntime runs each operator, in which element types, and which of its values lie on the host.

One session for each example and type, in a process of its own that is started again behind an example that kills it:
``python -m tests.facts.operators --device cuda:0 --start N`` prints one line of JSON for each from the N-th on.
"""

import ctypes
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import click
import ml_dtypes
import numpy as np
import onnx
import onnxruntime

from memonger.devices import Device, parse_device
from tests.facts.device import CPU, CUDA, prepare, short
from tests.facts.examples import EXAMPLES, Example, element_type

SECONDS = 600  # for a process: one that takes longer hangs
TOLERANCE = {"f16": 2e-2, "bf16": 1e-1}  # of the CPU's values; single precision's includes TF32
TOLERANCE_ELSE = 5e-3


@dataclass(frozen=True, slots=True)
class Placed:
    """What became of one example in one type.

    Attributes:
        where: ``CUDA``; ``CPU``; ``mixed``, a function whose parts run on both; ``none``, no kernel anywhere;
            ``-``, the standard doesn't allow the type at that opset; ``refused``, and `error` says why; ``died``.
        inputs, outputs: Indices of those that lie on the host, of a node on CUDA.
        error: Why it couldn't be made, or couldn't run.
        difference: Largest difference from the CPU provider's values, relative to the largest value; None where not
            compared.
    """

    example: int
    type: str
    where: str
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    error: str = ""
    difference: float | None = None

    @property
    def label(self) -> str:
        return EXAMPLES[self.example].label

    @property
    def wrong(self) -> bool:
        """Whether the values are not the CPU's."""
        return self.difference is not None and not self.difference <= TOLERANCE.get(self.type, TOLERANCE_ELSE)


def cases() -> tuple[tuple[int, str], ...]:
    """(example, type) in the order they are tried."""
    return tuple((i, dtype) for i, example in enumerate(EXAMPLES) for dtype in example.types)


def options() -> Any:
    """Session options: nothing optimized, in file order, silent, with the placement recorded."""
    settings = onnxruntime.SessionOptions()
    settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    settings.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED
    settings.log_severity_level = 4
    settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    return settings


def providers(device: Device) -> list[Any]:
    return [(CUDA, {"device_id": device.index}), CPU] if device.kind == "cuda" else [CPU]


def place(number: int, dtype: str, device: Device, compare: bool) -> Placed:
    """Make a session of one example, look where it was put, and run it."""
    example = EXAMPLES[number]
    arrays = example.arrays(dtype)
    model = example.model(arrays).SerializeToString()
    try:
        session = onnxruntime.InferenceSession(model, options(), providers=providers(device))
    except Exception as error:  # pybind exceptions share no base class
        return Placed(number, dtype, _refusal(str(error)), error=short(error, 600))
    where = _where(session)
    host = _host_values(session, example) if where != "CPU" else ((), ())
    error, difference = "", None
    try:
        found = _run(session, example.feeds(arrays))
    except Exception as failure:  # likewise
        error = short(failure, 600)
    if compare and where != "CPU" and not error:
        with suppress(Exception):  # the CPU has no kernel for the type
            difference = _difference(found, _run(_on_cpu(model), example.feeds(arrays)))
    return Placed(number, dtype, where, *host, error, difference)


def _where(session: Any) -> str:
    found = {part.ep_name for part in session.get_provider_graph_assignment_info()}
    if len(found) > 1:
        return "mixed"
    return "CUDA" if found == {CUDA} else "CPU"


def placed_at(model: onnx.ModelProto, settings: Any, where: list[Any]) -> str:
    """`Placed.where` of a model of one node, which isn't run."""
    try:
        return _where(onnxruntime.InferenceSession(model.SerializeToString(), settings, providers=where))
    except Exception as error:  # pybind exceptions share no base class
        return _refusal(str(error))


def _refusal(message: str) -> str:
    if "INVALID_GRAPH" in message:
        return "-"
    return "none" if "NOT_IMPLEMENTED" in message or "Provider type for" in message else "refused"


def _host_values(session: Any, example: Example) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Indices of the node's inputs and outputs that the session wants or leaves on the host."""
    inputs = [
        int(value.name[1:])
        for value, memory in zip(session.get_inputs(), session.get_input_memory_infos(), strict=True)
        if memory.name != "Cuda"
    ]
    outputs = [
        number
        for number, memory in enumerate(session.get_output_memory_infos())
        if memory.name != "Cuda" and number < example.outputs
    ]
    return tuple(inputs), tuple(outputs)


@cache
def _on_cpu(model: bytes) -> Any:
    return onnxruntime.InferenceSession(model, options(), providers=[CPU])


def _run(session: Any, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    ort = onnxruntime.OrtValue
    given = {
        k: ort.ortvalue_from_numpy_with_onnx_type(np.ascontiguousarray(a), element_type(a)) for k, a in feeds.items()
    }
    return [_numpy(value) for value in session.run_with_ort_values(None, given)]


def _numpy(value: Any) -> np.ndarray:
    if value.data_type() != "tensor(bfloat16)":
        return value.numpy()
    count = int(np.prod(value.shape()))
    return np.frombuffer(ctypes.string_at(value.data_ptr(), 2 * count), ml_dtypes.bfloat16).reshape(value.shape())


def _difference(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        if a.shape != b.shape:
            return float("inf")
        x, y = a.astype(np.float64), b.astype(np.float64)
        if x.size:
            scale = max(float(np.nanmax(np.abs(y))), 1e-30)
            worst = max(worst, float(np.max(np.abs(np.nan_to_num(x) - np.nan_to_num(y)))) / scale)
    return worst


def sweep(device: str, compare: bool) -> Iterator[Placed]:
    """All cases, whatever some of them do to the process."""
    start, total = 0, len(cases())
    while start < total:
        for placed in _process(device, compare, start):
            yield placed
            start += 1
        if start < total:
            yield Placed(*cases()[start], "died")
            start += 1


def _process(device: str, compare: bool, start: int) -> Iterator[Placed]:
    command = [sys.executable, "-m", __spec__.name, "--device", device, "--start", str(start)]
    command += ["--compare"] if compare else []
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        output = result.stdout
    except subprocess.TimeoutExpired as late:
        output = (late.stdout or b"").decode() if isinstance(late.stdout, bytes) else late.stdout or ""
    for line in output.splitlines():
        if line.startswith("{") and line.endswith("}"):
            fields = json.loads(line)
            yield Placed(**{**fields, "inputs": tuple(fields["inputs"]), "outputs": tuple(fields["outputs"])})


@click.command()
@click.option("--device", required=True)
@click.option("--start", default=0)
@click.option("--compare", is_flag=True)
def main(device: str, start: int, compare: bool) -> None:
    """Print what becomes of each case from --start on, one line each."""
    prepare()
    for number, dtype in cases()[start:]:
        click.echo(json.dumps(asdict(place(number, dtype, parse_device(device), compare))))


if __name__ == "__main__":
    main()
