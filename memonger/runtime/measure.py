"""One session in a process of its own, measured: ``python -m memonger.runtime.measure JOB.json``.

The first answer says what loading and running took, then rounds of runs are asked for (see `memonger.runtime.worker`).
Sessions that are compared take turns, so that a machine that slows down slows all of them.
"""

import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from memonger.devices import Cuda, Device, parse_device
from memonger.errors import MemongerError
from memonger.ir.element_types import ElementType
from memonger.runtime import feeds as feeding
from memonger.runtime import ort, process_memory
from memonger.runtime.backend import backend
from memonger.runtime.session import Session
from memonger.runtime.worker import Worker, WorkerError, say, serve_times


@dataclass(frozen=True, slots=True)
class RunJob:
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
    """What a session took.

    Attributes:
        latency_seconds: Median seconds of a run.
        peak_bytes: Most bytes above the loaded model; None where that can't be measured.
        p95_seconds: 95 of 100 runs took no longer.
        turns: Median seconds of the runs of each of its turns.
    """

    latency_seconds: float
    peak_bytes: int | None
    p95_seconds: float
    turns: tuple[float, ...]


_TYPES = "memonger.types"
"""A member of archives: types of the arrays that numpy has no name for, as bfloat16. They are kept as integers."""


_LISTS = "memonger.lists"
"""Another: how many arrays the sequences have. Each array is a member, called by its number and the sequence."""


def _member(number: int, name: str) -> str:
    return f"{_LISTS}/{number}/{name}"


def write_arrays(path: str | Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays, and lists of them, that another process reads by `read_arrays`.

    Text is numpy's own there, which needs no pickling.
    """
    lists = {name: one for name, one in arrays.items() if isinstance(one, list)}
    arrays = {name: one for name, one in arrays.items() if name not in lists}
    arrays |= {_member(number, name): array for name, one in lists.items() for number, array in enumerate(one)}
    arrays = {name: array.astype(str) if array.dtype.hasobject else array for name, array in arrays.items()}
    odd = {name: array for name, array in arrays.items() if array.dtype.kind == "V"}
    types = {name: ElementType.from_numpy(array.dtype).name for name, array in odd.items()}
    kept = {name: np.require(array, requirements="C").view(f"u{array.dtype.itemsize}") for name, array in odd.items()}
    lengths = json.dumps({name: len(one) for name, one in lists.items()})
    records = {_TYPES: np.array(json.dumps(types)), _LISTS: np.array(lengths)}
    np.savez(path, **dict[str, Any]({**arrays, **kept, **records}))


def read_arrays(path: str | Path) -> dict[str, Any]:
    """The arrays of an .npz that one of the processes wrote for another, by name, and lists of them."""
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    types = json.loads(str(arrays.pop(_TYPES, "{}")))
    lengths = json.loads(str(arrays.pop(_LISTS, "{}")))
    found = {name: a.view(ElementType[types[name]].numpy()) if name in types else a for name, a in arrays.items()}
    lists = {name: [found.pop(_member(number, name)) for number in range(length)] for name, length in lengths.items()}
    return {**found, **lists}


def _runner(job: RunJob, feeds: Mapping[str, Any]) -> Callable[[], Mapping[str, Any]]:
    device = parse_device(job.device)
    if job.planned:
        planned = Session(
            job.model, device=device, intra_op_threads=job.threads, check_order=False, cuda_graph=job.cuda_graph
        )
        copy = not device.is_host  # there a stock session copies its outputs to the host
        if planned.state:
            kept = planned.state  # by the names of the outputs that it was
            return lambda: planned.run(feeds) | {kept[name]: array for name, array in planned.state_dict().items()}
        return lambda: planned.run(feeds, copy=copy)  # stock sessions hold their outputs once, too
    options = ort.SessionSettings(
        job.level,
        threads=job.threads,
        arena=job.arena,
        pattern=job.pattern,
        dims=job.dims,
        cuda=Cuda(**job.cuda) if job.cuda is not None else None,
    )
    stock = ort.make_session(Path(job.model), device, options)
    kinds = {value.type for value in (*stock.get_inputs(), *stock.get_outputs())}
    if not kinds.isdisjoint(_WITHOUT_NUMPY):
        return lambda: feeding.run_bound(stock, feeds)
    names = list(dict.fromkeys(output.name for output in stock.get_outputs()))
    maps = {value.name for value in stock.get_outputs() if value.type.startswith("seq(map(")}
    return lambda: {
        # of a list of dictionaries (``ZipMap``) the table that a planned session gives where nothing is copied
        name: np.array([list(row.values()) for row in result], np.float32) if name in maps else result
        for name, result in zip(names, stock.run(names, dict(feeds)), strict=True)
    }


_WITHOUT_NUMPY = ("tensor(bfloat16)", "tensor(float8e4m3fn)", "tensor(float8e5m2)")


def serve(job: RunJob) -> None:
    """Measure in this process: say what loading and the first runs took, then the seconds of as many as are asked."""
    feeds, device = read_arrays(job.inputs), parse_device(job.device)
    before = in_use(device)
    resident = process_memory.settle() if process_memory.is_measurable() else None
    run = _runner(job, feeds)
    loaded = None if resident is None else process_memory.settle() - resident
    peak = _peak(run) if before is None else device_peak(run, device, before + job.weight_bytes)
    write_arrays(job.outputs, run())
    say({"peak_bytes": peak, "loaded_bytes": loaded})
    serve_times(run)


def _peak(run: Callable[[], object]) -> int | None:
    """The second run's peak over what was resident before the first: what a run in the long series takes."""
    if not process_memory.is_measurable():
        run()
        return None
    baseline = process_memory.settle()
    run()
    return process_memory.peak_over(baseline, run)


def in_use(device: Device) -> int | None:
    """Bytes of a device in use, by its driver, once onnxruntime has its libraries there; None on the CPU."""
    if device.is_host:
        return None
    from memonger.runtime.probe import session_of_probe  # takes onnx, as no session of a planned file does

    session_of_probe(device).run(["y"], {"x": np.ones((1, 4, 8, 8), np.float32)})
    return _used(device)


def _used(device: Device) -> int:
    room = backend(device).room()
    assert room is not None
    return room.total - room.free


def device_peak(run: Callable[[], object], device: Device, baseline: int) -> int:
    """What is in use after some runs, over what was before the session was made: nothing given back is missed.

    Neither a plan's memory nor onnxruntime's arena shrinks. What an exhaustive search for algorithms took and gave back
    isn't counted.
    """
    for _ in range(3):
        run()
    backend(device).synchronize()
    return max(0, _used(device) - baseline)


class MeasuredSession(Worker):
    """The parent's end of a process that runs a `RunJob`. To be used in a ``with`` statement.

    Raises:
        SessionError: the process failed; its reason is in the message.
    """

    def __init__(self, job: Any, folder: Path, name: str, *, module: str = "memonger.runtime.measure") -> None:
        path = folder / f"{name}.json"
        path.write_text(json.dumps(asdict(job)))
        super().__init__(module, [str(path)], folder / f"{name}.err")
        self.turns: list[list[float]] = []
        try:
            self.loaded = self.read()
        except WorkerError:
            self.end()
            raise

    def read(self, seconds: float = math.inf) -> dict[str, Any]:
        """See `Worker.read`."""
        try:
            return super().read(seconds)
        except WorkerError as error:
            raise WorkerError(f"the measuring process failed: {error}") from None

    @property
    def seconds(self) -> list[float]:
        """Of every timed run."""
        return [seconds for turn in self.turns for seconds in turn]

    def round(self, runs: int) -> None:
        """Time some more runs: one turn."""
        self.turns.append(self.times(runs))

    def result(self) -> Measured:
        """What was measured until now."""
        median, p95 = latency(self.seconds)
        turns = tuple(statistics.median(turn) for turn in self.turns)
        return Measured(median, self.loaded["peak_bytes"], p95, turns)


def latency(seconds: Sequence[float]) -> tuple[float, float]:
    """Of the seconds of several runs the median, and what 95 of 100 don't exceed."""
    return statistics.median(seconds), float(np.percentile(seconds, 95))


def take_turns(workers: Sequence[MeasuredSession], rounds: int, runs: int) -> None:
    """Time every worker in turn, ``rounds`` times ``runs`` runs each."""
    for _ in range(rounds):
        for worker in workers:
            worker.round(runs)


if __name__ == "__main__":
    try:
        serve(RunJob(**json.loads(Path(sys.argv[1]).read_text())))
    except MemongerError as error:
        say({"failed": str(error)})
