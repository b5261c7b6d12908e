"""One session in a process of its own, measured: ``python -m memonger.cli.measure JOB.json``.

The parent writes a line to start a round of runs and reads a line with their times; sessions that are compared take
turns this way, so that a machine that slows down slows all of them. The first line says what loading and running took.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from memonger.cli import cuda_probe
from memonger.devices import Cuda, Device, parse_device
from memonger.errors import MemongerError, SessionError
from memonger.runtime import ort, process_memory
from memonger.runtime.backend import backend
from memonger.runtime.session import Session


@dataclass(frozen=True, slots=True)
class Job:
    """What a measuring process runs.

    Attributes:
        model: Path of a planned model, or of a model for stock onnxruntime.
        inputs: An .npz with the inputs.
        outputs: Where to write the outputs, an .npz.
        planned: Whether to run it as planned. The order is not checked: whoever measures has done it.
        level: onnxruntime's optimization level for a stock session.
        threads: Threads within a node; 0 is onnxruntime's default.
        device: Where to run.
        arena: Whether a stock session's own CPU arena is on.
        pattern: Whether a stock session's own memory pattern is on.
        dims: Sizes of symbolic dimensions that a stock session is told, by name.
        cuda: Settings of the CUDA provider for a stock session, fields of `Cuda`; None leaves onnxruntime its own.
        cuda_graph: See `memonger.Session`.
        weight_bytes: What the weights take of a CUDA device, which isn't counted.
    """

    model: str
    inputs: str
    outputs: str
    planned: bool
    level: str = "ORT_ENABLE_ALL"
    threads: int = 0
    device: str = "cpu"
    arena: bool = True
    pattern: bool = True
    dims: Mapping[str, int] = field(default_factory=dict)
    cuda: Mapping[str, Any] | None = None
    cuda_graph: str = "auto"
    weight_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """What a session took: median seconds of a run, most bytes above the loaded model (None: not measurable)."""

    latency_seconds: float
    peak_bytes: int | None
    load_seconds: float


def _runner(job: Job, feeds: Mapping[str, np.ndarray]) -> Callable[[], Mapping[str, np.ndarray]]:
    device = parse_device(job.device)
    if job.planned:
        planned = Session(
            job.model, device=device, intra_op_threads=job.threads, check_order=False, cuda_graph=job.cuda_graph
        )
        copy = not device.is_host  # there a stock session copies its outputs to the host
        return lambda: planned.run(feeds, copy=copy)  # stock sessions hold their outputs once, too
    options = ort.Options(
        job.level,
        threads=job.threads,
        arena=job.arena,
        pattern=job.pattern,
        dims=job.dims,
        cuda=Cuda(**job.cuda) if job.cuda is not None else None,
    )
    stock = ort.make_session(Path(job.model), device, options)
    names = list(dict.fromkeys(ort.names_of(stock.get_outputs())))
    return lambda: dict(zip(names, stock.run(names, dict(feeds)), strict=True))


def serve(job: Job) -> None:
    """Measure in this process; rounds are asked for on standard input, answers go to standard output."""
    with np.load(job.inputs) as archive:
        feeds = {name: archive[name] for name in archive.files}
    device = parse_device(job.device)
    before = _in_use(device)
    begin = time.perf_counter()
    run = _runner(job, feeds)
    load_seconds = time.perf_counter() - begin
    peak = _peak(run) if before is None else _device_peak(run, device, before + job.weight_bytes)
    np.savez(job.outputs, **dict[str, Any](run()))
    _answer({"peak_bytes": peak, "load_seconds": load_seconds})
    for line in sys.stdin:
        _answer({"seconds": [_timed(run) for _ in range(int(line))]})


def _peak(run: Callable[[], object]) -> int | None:
    """The second run's peak over what was resident before the first: what a run in the long series takes."""
    if not process_memory.is_measurable():
        run()
        return None
    baseline = process_memory.settle()
    run()
    return process_memory.peak_over(baseline, run)


def _in_use(device: Device) -> int | None:
    """Bytes of a device in use, by its driver, once onnxruntime has its libraries there; None on the CPU."""
    if device.is_host:
        return None
    cuda_probe.run(device)
    return _used(device)


def _used(device: Device) -> int:
    room = backend(device).room()
    assert room is not None
    return room.total - room.free


def _device_peak(run: Callable[[], object], device: Device, baseline: int) -> int:
    """What is in use after some runs, over what was before the session was made: nothing given back is missed.

    Neither a plan's memory nor onnxruntime's arena shrinks. What an exhaustive search for algorithms took and gave back
    isn't counted.
    """
    for _ in range(3):
        run()
    backend(device).synchronize()
    return max(0, _used(device) - baseline)


def _timed(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _answer(content: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


class Worker:
    """The parent's end of a measuring process. To be used in a ``with`` statement.

    Raises:
        SessionError: the process failed; its last words are in the message.
    """

    def __init__(self, job: Job, folder: Path, name: str) -> None:
        path = folder / f"{name}.json"
        path.write_text(json.dumps(asdict(job)))
        self.errors = (folder / f"{name}.err").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "memonger.cli.measure", str(path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True,
        )  # fmt: skip
        self.seconds: list[float] = []
        self.loaded = self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        self.process.wait()
        self.errors.close()

    def round(self, runs: int) -> None:
        """Time some more runs."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{runs}\n")
        self.process.stdin.flush()
        self.seconds.extend(self._read()["seconds"])

    def result(self) -> Measured:
        """What was measured until now."""
        return Measured(statistics.median(self.seconds), self.loaded["peak_bytes"], self.loaded["load_seconds"])

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.errors.seek(0)
            words = self.errors.read().strip().splitlines()
            raise SessionError(f"the measuring process failed: {words[-1] if words else self.process.returncode}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def take_turns(workers: Sequence[Worker], rounds: int, runs: int) -> None:
    """Time every worker in turn, ``rounds`` times ``runs`` runs each."""
    for _ in range(rounds):
        for worker in workers:
            worker.round(runs)


if __name__ == "__main__":
    try:
        serve(Job(**json.loads(Path(sys.argv[1]).read_text())))
    except MemongerError as error:
        sys.exit(str(error))
