"""A planned model beside stock onnxruntime: outputs, latency and peak memory, each session in a process of its own."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from memonger.cli.measure import Job, Measured, MeasuredSession, take_turns
from memonger.errors import MemongerError
from memonger.files import write_whole
from memonger.lowering.device_form import LEVELS
from memonger.model.load import load_as_is
from memonger.plan import Plan
from memonger.runtime import feeds as feeding
from memonger.runtime.session import Session
from memonger.units import format_size

ROUNDS = 5  # turns each session takes


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run.

    Attributes:
        runs: Timed runs of each session.
        seed: Of random inputs.
        threads: Threads within a node; 0 is the default.
        device: Where to run; None: the plan's own.
        cuda_graph: See `memonger.Session`.
    """

    runs: int = 30
    seed: int = 0
    threads: int = 0
    device: str | None = None
    cuda_graph: str = "auto"


@dataclass(frozen=True, slots=True)
class Result:
    """Outputs by name, the JSON record, and rows for a table where there was a comparison."""

    outputs: Mapping[str, Any]
    record: Mapping[str, Any]
    rows: tuple[Mapping[str, Any], ...] = ()
    verdict: str = ""


@dataclass(frozen=True, slots=True)
class _Difference:
    bitwise_equal: bool
    max_abs_diff: float | None
    notes: tuple[str, ...] = field(default=())


def run_alone(planned: Path, feeds: feeding.Feeds | None, settings: Settings) -> Result:
    """Run a planned model once."""
    plan = Plan.load(planned)
    given = feeds if feeds is not None else feeding.random_feeds(feeding.inputs_of(plan.model.graph), settings.seed)
    session = _session(plan, settings)
    outputs = session.run(given)
    record = {
        "model": str(planned), "device": str(session.device), "arena_bytes": plan.arena_bytes,
        "workspace_bytes": plan.workspace_bytes, "outputs": {name: _described(v) for name, v in outputs.items()},
    }  # fmt: skip
    if session.device.facts.has_graphs:
        record.update(cuda_graph=session.cuda_graph, why_no_cuda_graph=session.why_no_cuda_graph or None)
    return Result(outputs, record, verdict=_graph_verdict(session))


def _session(plan: Plan, settings: Settings) -> Session:
    return Session(plan, device=settings.device, intra_op_threads=settings.threads, cuda_graph=settings.cuda_graph)


def _graph_verdict(session: Session) -> str:
    if not session.device.facts.has_graphs:
        return ""
    return (
        "Runs are replayed as a CUDA graph." if session.cuda_graph else f"No CUDA graph: {session.why_no_cuda_graph}."
    )


def _described(value: Any) -> Any:
    return {"type": str(value.dtype), "shape": list(value.shape)} if isinstance(value, np.ndarray) else str(type(value))


def compare(
    planned: Path,
    stock: Path,
    feeds: feeding.Feeds | None,
    settings: Settings,
    folder: Path,
    tell: Callable[[str], None],
) -> Result:
    """Run a planned model, and a model on stock onnxruntime at the plan's own level and with default options.

    Args:
        planned: A planned model.
        stock: The model stock onnxruntime runs; the planned file itself is run as a plain ONNX file.
        feeds: Inputs; random numbers if None.
        settings: See `Settings`.
        folder: For what the processes exchange.
        tell: Called with each stage's name.
    """
    plan = Plan.load(planned)
    given = feeds if feeds is not None else feeding.random_feeds(feeding.inputs_of(plan.model.graph), settings.seed)
    if not all(isinstance(feed, np.ndarray) and feed.dtype.kind != "O" for feed in given.values()):
        raise MemongerError("--compare takes inputs that are arrays of numbers.")
    checked = _session(plan, settings)
    checked.run(given)  # checks the executed order
    graphs, device = _graph_verdict(checked), checked.device
    del checked
    np.savez(folder / "inputs.npz", **dict[str, Any](given))
    level = _level(plan, stock)
    jobs = _jobs(plan, {"planned": planned, "stock": stock}, str(device), settings, folder)
    jobs["stock"] = replace(jobs["stock"], level=level, dims=symbolic_sizes(stock, given))
    measured = measure_in_turns(jobs, folder, settings.runs, tell)
    outputs = {name: _read(folder / f"{name}.npz") for name in jobs}
    return _result(plan, planned, level, measured, outputs, graphs)


def _jobs(plan: Plan, models: Mapping[str, Path], device: str, settings: Settings, folder: Path) -> dict[str, Job]:
    """What each process runs: the plan, and stock onnxruntime with the plan's settings and with its own."""

    def job(name: str, *, model: str = "stock", **options: Any) -> Job:
        return Job(
            model=str(models[model]), outputs=str(folder / f"{name}.npz"), inputs=str(folder / "inputs.npz"),
            threads=settings.threads or plan.threads, device=device, weight_bytes=plan.parameter_bytes,
            planned=model == "planned", **options,
        )  # fmt: skip

    cuda = None if plan.stamp is None or plan.stamp.cuda is None else asdict(plan.stamp.cuda)
    return {
        "planned": job("planned", model="planned", cuda_graph=settings.cuda_graph),
        "stock": job("stock", cuda=cuda),
        "default": job("default"),
    }


def measure_in_turns(
    jobs: Mapping[str, Job], folder: Path, runs: int, tell: Callable[[str], None]
) -> dict[str, Measured]:
    """Measure each job in a process of its own; they take turns, `ROUNDS` each, until each has run ``runs`` times."""
    with ExitStack() as stack:
        workers = {}
        for name, job in jobs.items():
            tell(f"loading {name}")
            workers[name] = stack.enter_context(MeasuredSession(job, folder, name))
        tell("timing")
        take_turns(list(workers.values()), ROUNDS, -(-runs // ROUNDS))
        return {name: worker.result() for name, worker in workers.items()}


def symbolic_sizes(model: Path, feeds: feeding.Feeds) -> dict[str, int]:
    """The sizes that inputs give to a model's named dimensions.

    Told them, onnxruntime's optimizer sees the shapes that were planned for, and may fuse more: only then are the last
    bits of two runs to be compared.
    """
    loaded = load_as_is(model).ir
    sizes = {}
    for value in loaded.graph.inputs:
        feed = feeds.get(str(value.name))
        if value.shape is None or not isinstance(feed, np.ndarray) or len(value.shape) != feed.ndim:
            continue
        for dim, size in zip(value.shape, feed.shape, strict=True):
            if isinstance(dim, ir.SymbolicDim) and dim.value:
                sizes[dim.value] = size
    return sizes


def _level(plan: Plan, stock: Path) -> str:
    """The level at which stock onnxruntime runs the same kernels: a planned file is lowered already."""
    loaded = load_as_is(stock).ir
    if plan.stamp is None or any(key.startswith("memonger") for key in loaded.metadata_props):
        return LEVELS["disable"]
    return LEVELS[plan.stamp.level]


def _read(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def difference(mine: Mapping[str, np.ndarray], stock: Mapping[str, np.ndarray]) -> _Difference:
    """Whether two sets of outputs are equal bit for bit (NaNs with the same bits are), and the largest difference."""
    equal, largest, notes = True, 0.0, []
    for name, theirs in stock.items():
        ours = mine[name]
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return _Difference(
                False, None, (f"'{name}' is {ours.dtype}{ours.shape}, stock has {theirs.dtype}{theirs.shape}",)
            )
        if ours.tobytes() != theirs.tobytes():
            equal = False
            notes.append(name)
            if not np.array_equal(np.isnan(ours), np.isnan(theirs)):
                return _Difference(False, None, (f"'{name}' has other NaNs",))
            gap = np.abs(ours.astype(np.float64) - theirs.astype(np.float64))
            largest = max(largest, float(np.nanmax(gap, initial=0.0)))
    return _Difference(equal, largest, tuple(notes))


def _result(
    plan: Plan,
    planned: Path,
    level: str,
    measured: Mapping[str, Measured],
    outputs: Mapping[str, Mapping[str, np.ndarray]],
    graphs: str,
) -> Result:
    ours = measured["planned"]
    rows = [{"session": "planned", "latency_seconds": ours.latency_seconds, "peak_bytes": ours.peak_bytes}]
    sections = {}
    for name, title in (("stock", f"stock, {level}"), ("default", "stock, default options")):
        sections[name] = _section(ours, measured[name], difference(outputs["planned"], outputs[name]))
        rows.append({"session": title, **sections[name], "outputs": _outcome(sections[name])})
    record = {
        **sections["stock"], "model": str(planned), "device": plan.device, "level": level,
        "arena_bytes": plan.arena_bytes, "workspace_bytes": plan.workspace_bytes,
        "predicted_bytes": plan.predicted_bytes, "peak_bytes": ours.peak_bytes,
        "latency_seconds": ours.latency_seconds, "stock_session": sections["stock"],
        "default_session": sections["default"],
    }  # fmt: skip
    verdict = " ".join(filter(None, (_verdict(plan, ours, sections["stock"]), graphs)))
    return Result(outputs["planned"], record, tuple(rows), verdict)


def _section(ours: Measured, theirs: Measured, gap: _Difference) -> dict[str, Any]:
    ratio = ours.peak_bytes / theirs.peak_bytes if ours.peak_bytes is not None and theirs.peak_bytes else None
    return {
        "bitwise_equal": gap.bitwise_equal,
        "max_abs_diff": gap.max_abs_diff,
        "latency_seconds": theirs.latency_seconds,
        "latency_ratio": ours.latency_seconds / theirs.latency_seconds,
        "peak_bytes": theirs.peak_bytes,
        "peak_ratio": ratio,
    }


def _outcome(section: Mapping[str, Any]) -> str:
    if section["bitwise_equal"]:
        return "equal bit for bit"
    return "not comparable" if section["max_abs_diff"] is None else f"differ by {section['max_abs_diff']:.2g}"


def _verdict(plan: Plan, ours: Measured, section: Mapping[str, Any]) -> str:
    need = plan.workspace_bytes
    workspace = "workspace that was never measured" if need is None else f"{format_size(need)} of workspace"
    measured = "" if ours.peak_bytes is None else f", measured {format_size(ours.peak_bytes)}"
    arena = format_size(plan.arena_bytes)
    parts = f"{arena} of arena and {workspace}"
    if plan.stamp is not None and plan.stamp.cuda is not None:
        parts = f"{arena} of arena, {workspace} and {format_size(plan.input_bytes)} of inputs"
    return (
        f"The plan says {parts}{measured}. "
        f"Outputs against stock onnxruntime at the plan's own level: {_outcome(section)}."
    )


def save_outputs(outputs: Mapping[str, Any], path: Path) -> None:
    """Write outputs as an .npz.

    Raises:
        MemongerError: an output is no array, or the file can't be written.
    """
    strange = [name for name, value in outputs.items() if not isinstance(value, np.ndarray)]
    if strange:
        raise MemongerError(f"output '{strange[0]}' is no array and can't go into an .npz.")
    try:
        write_whole(path, lambda file: np.savez(file, **outputs))
    except OSError as error:
        raise MemongerError(f"{path} can't be written: {error.strerror or error}.") from error
