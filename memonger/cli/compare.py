"""A planned model beside stock onnxruntime: outputs, latency and peak memory, each session in a process of its own."""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from memonger.cli import first_difference, noise
from memonger.cli.differences import Difference, Tolerance, difference
from memonger.cli.first_difference import FirstDifference
from memonger.cli.measure import Job, Measured, MeasuredSession, latency, take_turns
from memonger.errors import MemongerError
from memonger.files import write_whole
from memonger.lowering.device_form import LEVELS
from memonger.model.load import load_as_is
from memonger.model.values import dense
from memonger.plan import Plan
from memonger.report.runs import format_seconds
from memonger.runtime import feeds as feeding
from memonger.runtime.session import Session
from memonger.units import format_size

LONGEST = 10.0  # seconds that the runs of a model that isn't compared may take
ROUNDS = 5  # turns each session takes


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run.

    Attributes:
        runs: Timed runs of each session.
        warm_up: Runs of each session before those.
        tolerance: What outputs may differ by.
        seed: Of random inputs.
        threads: Threads within a node; 0 is the default.
        device: Where to run; None: the plan's own.
        cuda_graph: See `memonger.Session`.
    """

    runs: int = 30
    warm_up: int = 3
    tolerance: Tolerance = field(default_factory=Tolerance)
    seed: int = 0
    threads: int = 0
    device: str | None = None
    cuda_graph: str = "auto"


@dataclass(frozen=True, slots=True)
class Result:
    """What a command that runs has to show.

    Attributes:
        outputs: By name.
        record: For ``--json``.
        rows: For a table, where there was a comparison.
        lines: To be printed below, one sentence or more each.
        passed: False where a comparison found a difference that isn't allowed.
    """

    outputs: Mapping[str, Any]
    record: Mapping[str, Any]
    rows: tuple[Mapping[str, Any], ...] = ()
    lines: tuple[str, ...] = ()
    passed: bool = True


def run_alone(planned: Path, feeds: feeding.Feeds | None, settings: Settings) -> Result:
    """Run a planned model, and time it in this process for no longer than `LONGEST` seconds."""
    plan = Plan.load(planned)
    given = inputs_for(plan, feeds, settings)
    session = _session(plan, settings)
    outputs = session.run(given)
    seconds = _timed(lambda: session.run(given, copy=not session.device.is_host), settings)
    times = latency(seconds)
    record = {
        "model": str(planned), "device": str(session.device), "arena_bytes": plan.arena_bytes,
        "workspace_bytes": plan.workspace_bytes, "predicted_bytes": plan.predicted_bytes, "runs": len(seconds),
        "warm_up": settings.warm_up, "latency_seconds": times.median, "latency_p95_seconds": times.p95,
        "outputs": {name: _described(v) for name, v in outputs.items()},
    }  # fmt: skip
    if session.device.facts.has_graphs:
        record.update(cuda_graph=session.cuda_graph, why_no_cuda_graph=session.why_no_cuda_graph or None)
    timed = (
        f"{len(seconds)} runs: median {format_seconds(times.median)}, p95 {format_seconds(times.p95)}. "
        f"A run takes {_parts(plan)}, as planned; --compare measures it beside stock onnxruntime."
    )
    return Result(outputs, record, lines=(timed, *filter(None, [_graph_verdict(session)])))


def _timed(run: Callable[[], object], settings: Settings) -> list[float]:
    """Seconds of each run: as many as are asked for, fewer where they take too long."""
    for _ in range(settings.warm_up):
        run()
    seconds: list[float] = []
    until = time.perf_counter() + LONGEST
    while len(seconds) < settings.runs and (not seconds or time.perf_counter() < until):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return seconds


def inputs_for(plan: Plan, feeds: feeding.Feeds | None, settings: Settings) -> feeding.Feeds:
    """The inputs given, or random ones."""
    return feeds if feeds is not None else feeding.random_feeds(feeding.inputs_of(plan.model.graph), settings.seed)


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
    before, plan = noise.load(), Plan.load(planned)
    given = inputs_for(plan, feeds, settings)
    check_numbers(plan, given)
    checked = _session(plan, settings)
    checked.run(given)  # checks the executed order
    graphs, device = _graph_verdict(checked), checked.device
    del checked
    np.savez(folder / "inputs.npz", **dict[str, Any](given))
    level = level_of(plan, stock)
    jobs = _jobs(plan, {"planned": planned, "stock": stock}, str(device), settings, folder)
    jobs["stock"] = replace(jobs["stock"], level=level, dims=symbolic_sizes(stock, given))
    measured = measure_in_turns(jobs, folder, settings, tell)
    outputs = {name: _read(folder / f"{name}.npz") for name in jobs}
    gaps = {name: difference(outputs["planned"], outputs[name], settings.tolerance) for name in ("stock", "default")}
    sections = {name: section(measured["planned"], measured[name], gap) for name, gap in gaps.items()}
    where = None
    if not gaps["stock"].passed:
        tell("finding the first node that differs")
        where = first_difference.find(plan, stock, given, device, settings.threads, settings.tolerance)
    record = _record(plan, planned, level, measured["planned"], sections)
    record.update(runs=settings.runs, warm_up=settings.warm_up, **verdict_record(gaps["stock"], settings, where))
    noisy, stock_at = noise_line(sections, before), f"stock onnxruntime's at the plan's own level ({level})"
    record["noise"] = {**asdict(before), "warning": noisy or None}
    told = verdict(gaps["stock"], settings.tolerance, stock_at, first_difference.explain(plan, where))
    lines = (_prediction(plan, measured["planned"]), graphs, noisy, told)
    rows = (own_row(measured["planned"]), *stock_rows(sections))
    return Result(outputs["planned"], record, rows, tuple(filter(None, lines)), gaps["stock"].passed)


def check_numbers(plan: Plan, feeds: feeding.Feeds) -> None:
    """What goes to the measuring processes and comes back is arrays of numbers.

    Raises:
        MemongerError: an input or an output isn't.
    """
    if not all(isinstance(feed, np.ndarray) and feed.dtype.kind != "O" for feed in feeds.values()):
        raise MemongerError("--compare takes inputs that are arrays of numbers.")
    strange = next((v for v in plan.model.graph.outputs if not dense(v) or v.dtype == ir.DataType.STRING), None)
    if strange is not None:
        kind = strange.type if strange.dtype != ir.DataType.STRING else "text"
        raise MemongerError(f"--compare takes outputs that are tensors of numbers: '{strange.name}' is {kind}.")


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
    jobs: Mapping[str, Job], folder: Path, settings: Settings, tell: Callable[[str], None]
) -> dict[str, Measured]:
    """Measure each job in a process of its own; they take turns, `ROUNDS` each, until each has run often enough."""
    with ExitStack() as stack:
        workers = {}
        for name, job in jobs.items():
            tell(f"loading {name}")
            workers[name] = stack.enter_context(MeasuredSession(job, folder, name))
        tell("timing")
        for worker in workers.values():
            worker.times(settings.warm_up)
        take_turns(list(workers.values()), ROUNDS, -(-settings.runs // ROUNDS))
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


def level_of(plan: Plan, stock: Path) -> str:
    """The level at which stock onnxruntime runs the same kernels: a planned file is lowered already."""
    loaded = load_as_is(stock).ir
    if plan.stamp is None or any(key.startswith("memonger") for key in loaded.metadata_props):
        return LEVELS["disable"]
    return LEVELS[plan.stamp.level]


def _read(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def section(ours: Measured, theirs: Measured, gap: Difference) -> dict[str, Any]:
    """What a comparison with one stock session found, for JSON."""
    ratio = ours.peak_bytes / theirs.peak_bytes if ours.peak_bytes is not None and theirs.peak_bytes else None
    return {
        "bitwise_equal": gap.bitwise_equal,
        "max_abs_diff": gap.max_abs_diff,
        "max_rel_diff": gap.max_rel_diff,
        "latency_seconds": theirs.latency_seconds,
        "latency_p95_seconds": theirs.p95_seconds,
        "latency_ratio": ours.latency_seconds / theirs.latency_seconds,
        "latency_ratio_range": noise.ratio_range(ours.turns, theirs.turns),
        "peak_bytes": theirs.peak_bytes,
        "peak_ratio": ratio,
    }


def own_row(ours: Measured) -> dict[str, Any]:
    """The planned session's row of the table."""
    return {
        "session": "planned", "latency_seconds": ours.latency_seconds, "latency_p95_seconds": ours.p95_seconds,
        "peak_bytes": ours.peak_bytes,
    }  # fmt: skip


def stock_rows(sections: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of stock sessions."""
    titles = {"stock": "stock, same level", "default": "stock, default"}
    return [{"session": titles[name], **section} for name, section in sections.items()]


def _record(
    plan: Plan, planned: Path, level: str, ours: Measured, sections: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    return {
        **sections["stock"], "model": str(planned), "device": plan.device, "level": level,
        "arena_bytes": plan.arena_bytes, "workspace_bytes": plan.workspace_bytes,
        "predicted_bytes": plan.predicted_bytes, "peak_bytes": ours.peak_bytes,
        "latency_seconds": ours.latency_seconds, "latency_p95_seconds": ours.p95_seconds,
        "stock_session": sections["stock"], "default_session": sections["default"],
    }  # fmt: skip


def verdict_record(gap: Difference, settings: Settings, where: FirstDifference | None) -> dict[str, Any]:
    """Whether the comparison passed, and by what measure, for JSON."""
    return {
        "passed": gap.passed, "atol": settings.tolerance.atol, "rtol": settings.tolerance.rtol,
        "first_difference": None if where is None else asdict(where),
    }  # fmt: skip


def noise_line(sections: Mapping[str, Mapping[str, Any]], before: noise.Load) -> str:
    """How far the latency ratios can be trusted, where that isn't far; of the session whose ratio moved most."""
    moved = max(sections.values(), key=lambda one: one["latency_ratio_range"][1] - one["latency_ratio_range"][0])
    return noise.warning(moved["latency_ratio"], moved["latency_ratio_range"], before)


def verdict(gap: Difference, tolerance: Tolerance, stock: str, where: str) -> str:
    """PASSED or FAILED, by what measure, and ``where``; ``stock`` says what it was compared with."""
    if gap.bitwise_equal:
        return f"PASSED: outputs are identical, bit for bit, to {stock}."
    apart = gap.why or f"the largest difference is {gap.max_abs_diff:.2g}, {gap.max_rel_diff:.2g} of stock's number"
    if gap.passed:
        return f"PASSED: outputs are within {tolerance} of {stock}; {apart}."
    names = ", ".join(f"'{name}'" for name in gap.names[:3]) + (" and others" if len(gap.names) > 3 else "")
    verb = "is" if len(gap.names) == 1 else "are"
    beyond = f"{verb} not identical, bit for bit, to" if tolerance.is_exact else f"{verb} further than {tolerance} from"
    return f"FAILED: {names} {beyond} {stock}; {apart}. {where}"


def _parts(plan: Plan) -> str:
    """What a run takes, in words."""
    need = plan.workspace_bytes
    parts = [f"{format_size(plan.arena_bytes)} of arena"]
    parts.append("a workspace that was never measured" if need is None else f"{format_size(need)} of workspace")
    if plan.stamp is not None and plan.stamp.cuda is not None:
        parts.append(f"{format_size(plan.input_bytes)} of inputs")
    return ", ".join(parts[:-1]) + f" and {parts[-1]}"


def _prediction(plan: Plan, ours: Measured) -> str:
    measured = "" if ours.peak_bytes is None else f" Measured: {format_size(ours.peak_bytes)}."
    return f"The plan says {_parts(plan)}.{measured}"


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
