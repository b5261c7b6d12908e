"""A planned model beside stock onnxruntime: outputs, latency and peak memory, each session in a process of its own."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import onnx_ir as ir

from memonger.cli import gradients, noise
from memonger.cli.differences import each_array
from memonger.cli.output import done_of
from memonger.cli.settings import CommandResult, Settings
from memonger.cli.verdicts import Case, Ran, judge
from memonger.devices import Device
from memonger.errors import MemongerError, system_checked
from memonger.files import write_whole
from memonger.graph.schedule import drop_copies
from memonger.ir.maps import maps_of
from memonger.ir.save import save_model
from memonger.lowering.device_form import LEVELS
from memonger.model.kept_state import fullest
from memonger.model.load import load_as_is
from memonger.plan import Plan
from memonger.plan_file import is_planned
from memonger.report.runs import format_seconds
from memonger.runtime import feeds as feeding
from memonger.runtime.measure import Measured, MeasuredSession, RunJob, latency, read_arrays, take_turns, write_arrays
from memonger.runtime.padding import Padding, cut, filled_up
from memonger.runtime.program import inputs_of, program_of
from memonger.runtime.ranged import RangedProgram
from memonger.runtime.session import Session
from memonger.runtime.weight_reader import Reading
from memonger.shapes.ranges import DimRange
from memonger.units import format_size
from memonger.words import listed, option

J = TypeVar("J", bound=RunJob)
W = TypeVar("W", bound=MeasuredSession)

LONGEST = 10.0  # seconds that the runs of a model that isn't compared may take
ROUNDS = 5  # turns each session takes
SLOW = 0.25
"""Of a run's time what it may wait for the disk before that is said."""


def run_alone(plan: Plan, feeds: feeding.Feeds | None, settings: Settings) -> CommandResult:
    """Run a planned model, and time it in this process for no longer than `LONGEST` seconds."""
    given = inputs_for(plan, feeds, settings)
    session = _session(plan, settings)
    outputs = session.run(given)
    seconds = _timed(lambda: session.run(given, copy=not session.device.is_host), settings)
    median, p95 = latency(seconds)
    record = {
        **_figures(plan), "device": str(session.device), "runs": len(seconds), "warm_up": settings.warm_up,
        "latency_seconds": median, "latency_p95_seconds": p95,
        "outputs": {name: _described(v) for name, v in outputs.items()},
    }  # fmt: skip
    if session.device.facts.has_graphs:
        record.update(cuda_graph=session.cuda_graph, why_no_cuda_graph=session.why_no_cuda_graph or None)
    timed = (
        f"{len(seconds)} runs: median {format_seconds(median)}, p95 {format_seconds(p95)}. "
        f"A run takes {_parts(plan)}, as planned; --compare measures it beside stock onnxruntime."
    )
    lines = [*gradients_of(plan, outputs), timed, *filter(None, [_graph_verdict(session)])]
    for reader in session.weight_readers:  # of the one plan
        said = reader.said
        record.update(reading_record(*said))
        lines += reading_lines(plan, *said)
    return CommandResult(shown_of(plan, outputs), record, lines=tuple(lines), saved=outputs)


def shown_of(plan: Plan, outputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The outputs that a table is about: of a differentiated model the forward model's own."""
    return outputs if plan.training is None else {name: outputs[name] for name in plan.training.outputs}


def gradients_of(plan: Plan, outputs: Mapping[str, Any]) -> list[str]:
    """What there is to say of the gradients among outputs."""
    return [] if plan.training is None else gradients.lines(gradients.summary(plan.training, outputs), plan.training)


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
    """The inputs given, or random ones: of the largest sizes, with room in a state that grows for one run."""
    inputs = inputs_of(plan.model.graph)
    if feeds is not None:
        return feeds
    if plan.ranges and plan.state:
        shapes = fullest(plan.model, plan.state, plan.ranges)
        inputs = tuple(replace(one, shape=shapes.get(one.name, one.shape)) for one in inputs)
    return feeding.random_feeds(inputs, settings.seed)


def _session(plan: Plan, settings: Settings) -> Session:
    return Session(
        plan, device=settings.device, intra_op_threads=settings.threads, cuda_graph=settings.cuda_graph,
        pad=settings.pad,
    )  # fmt: skip


def _graph_verdict(session: Session) -> str:
    if not session.device.facts.has_graphs:
        return ""
    return (
        "Runs are replayed as a CUDA graph." if session.cuda_graph else f"No CUDA graph: {session.why_no_cuda_graph}."
    )


def reading_record(last: Reading | None, why_not: str, speed: float | None) -> dict[str, Any]:
    """What was read of weights that stay in a plan's file, in the last run; ``speed``: the disk's, bytes a second."""
    read = None if last is None else {**asdict(last), "disk_speed": speed}
    return {"weights_read": read, "why_no_window": why_not or None}


def reading_lines(plan: Plan, last: Reading | None, why_not: str, speed: float | None) -> Iterator[str]:
    """The same in sentences."""
    if why_not:
        yield f"How much of the weights is in memory isn't held to the plan's window here: {why_not}."
    elif last is not None:
        disk = f"{format_size(last.disk_bytes)} from the disk" if last.disk_bytes else "nothing from the disk"
        if speed:
            alone = format_seconds(last.nbytes / speed)
            disk += f", which gives {format_size(round(speed))} a second ({alone} for all of it)"
        written = f" {format_size(last.written_bytes)} of them were written." if last.written_bytes else ""
        named = 0 if plan.window is None else len(plan.window.weights)
        what = " and ".join(["weights"] * (named > len(plan.values_in_file)) + ["values"] * bool(plan.values_in_file))
        yield (
            f"The last run had {format_size(last.nbytes)} of {what} pass through memory: {disk}; all else came from "
            f"the system's cache.{written}"
        )
        if last.waited > SLOW * last.seconds:
            yield (
                f"The disk is what the run waits for: {format_seconds(last.waited)} of {format_seconds(last.seconds)}. "
                f"A larger {option('budget')} keeps more of the weights in memory."
            )
        window = 0 if plan.window is None else plan.window.nbytes
        if last.most_bytes > window:
            yield (
                f"Steps were faster than what drops weights behind them: {format_size(last.most_bytes)} were in "
                f"memory at once, of a window of {format_size(window)}."
            )


def _described(value: Any) -> Any:
    return {"type": str(value.dtype), "shape": list(value.shape)} if isinstance(value, np.ndarray) else str(type(value))


def compare(
    plan: Plan,
    planned: Path,
    stock: Path,
    feeds: feeding.Feeds | None,
    settings: Settings,
    folder: Path,
    report_progress: Callable[[str], None],
) -> CommandResult:
    """Run a planned model, and a model on stock onnxruntime at the plan's own level and with default options.

    Args:
        plan: A plan.
        planned: Its file.
        stock: The model stock onnxruntime runs; the planned file itself is run as a plain ONNX file.
        feeds: Inputs; random numbers if None.
        settings: See `Settings`.
        folder: For what the processes exchange.
        report_progress: Called with each stage's name.
    """
    before, given = noise.load(), inputs_for(plan, feeds, settings)
    check_arrays(plan, given)
    checked = _session(plan, settings)
    checked.run(given)  # checks the executed order
    graphs, device = _graph_verdict(checked), checked.device
    del checked
    given, shapes = filled(plan, given, settings)
    write_arrays(folder / "inputs.npz", given)
    job = planned_job(RunJob, plan, planned, device, settings, folder)
    jobs = {"planned": job, **stock_jobs(plan, job, stock, given, folder)}
    runs = -(-settings.runs // ROUNDS) * ROUNDS
    with in_turns(MeasuredSession, jobs, folder, runs, "runs", report_progress, settings.warm_up) as workers:
        measured = {name: worker.result() for name, worker in workers.items()}
    sessions = {name: Ran(measured[name], cut(read_arrays(folder / f"{name}.npz"), shapes)) for name in jobs}
    is_source = not is_planned(load_as_is(stock).ir)
    level = jobs["stock"].level
    case = Case(plan, stock, given, device, settings, level, before, is_source=is_source and device.is_host)
    verdict, outputs = judge(case, sessions, report_progress), sessions["planned"].arrays
    notes = (*_source_note(plan, is_source), *_chunks_note(plan, planned, stock), *verdict.notes)
    lines = (*gradients_of(plan, outputs), _prediction(plan, measured["planned"]), graphs, *verdict.lines)
    record = {**verdict.record, **_figures(plan), "runs": runs}
    return replace(
        verdict, outputs=shown_of(plan, outputs), record=record, lines=tuple(filter(None, lines)), saved=outputs,
        notes=notes,
    )  # fmt: skip


def _source_note(plan: Plan, is_source: bool) -> tuple[str, ...]:
    """That stock onnxruntime ran the plan's own nodes, as the model that was planned wasn't there."""
    if is_source:
        return ()
    planned = "that was planned" if plan.source_file is None else plan.source_file.path
    why = "isn't known" if plan.source_file is None else "isn't there, or has changed since"
    return (
        f"the model {planned} {why}: stock onnxruntime ran the planned file's own nodes, which its optimizer made. "
        "--against MODEL compares with the model.",
    )


def _chunks_note(plan: Plan, planned: Path, stock: Path) -> tuple[str, ...]:
    """That stock onnxruntime ran the plan's own chunks, where it did."""
    if not plan.chunks or planned != stock:
        return ()
    return ("stock onnxruntime ran the planned file, whose nodes run in chunks: --against MODEL is beside the model.",)


def _figures(plan: Plan) -> dict[str, Any]:
    return {
        "device": plan.device, "arena_bytes": plan.arena_bytes, "workspace_bytes": plan.workspace_bytes,
        "predicted_bytes": plan.predicted_bytes,
    }  # fmt: skip


def filled(
    plan: Plan, feeds: feeding.Feeds, settings: Settings
) -> tuple[feeding.Feeds, Mapping[str, tuple[int, ...]] | None]:
    """The inputs filled up to the plan's sizes where that is asked for, and the shapes of outputs if it was done."""
    if not settings.pad:
        return feeds, None
    padding = Padding([program_of(plan)], [plan.batch], {0: RangedProgram(plan)} if plan.ranges else None)
    smaller = padding.find(feeds)
    return (feeds, None) if smaller is None else (filled_up(smaller, feeds), smaller.outputs)


def check_arrays(plan: Plan, feeds: feeding.Feeds) -> None:
    """What goes to the measuring processes and comes back is arrays of numbers or text, or lists of such arrays.

    Raises:
        MemongerError: an input or an output isn't.
    """
    arrays = (one for feed in feeds.values() for one in (feed if isinstance(feed, list) else [feed]))
    if not all(isinstance(one, np.ndarray) for one in arrays):
        raise MemongerError("--compare takes inputs that are arrays of numbers or text, or lists of them.")
    strange = next((value for value in plan.model.graph.outputs if not _is_of_tensors(value.type)), None)
    if strange is not None:
        raise MemongerError(
            f"--compare takes outputs that are tensors, or sequences of them: '{strange.name}' is {strange.type}. "
            "Without --compare the plan runs."
        )


def _is_of_tensors(kind: ir.TypeProtocol | None) -> bool:
    return isinstance(kind.elem_type if isinstance(kind, ir.SequenceType) else kind, ir.TensorType)


def planned_job(
    kind: type[J], plan: Plan, planned: Path, device: Device, settings: Settings, folder: Path, **options: Any
) -> J:
    """What the process of the plan runs."""
    return kind(
        model=str(planned), inputs=str(folder / "inputs.npz"), outputs=str(folder / "planned.npz"), planned=True,
        threads=settings.threads or plan.threads, device=str(device), cuda_graph=settings.cuda_graph,
        weight_bytes=plan.resident_parameter_bytes, **options,
    )  # fmt: skip


def stock_jobs(plan: Plan, job: J, stock: Path, given: feeding.Feeds, folder: Path) -> dict[str, J]:
    """Beside the plan's ``job``: stock onnxruntime with the plan's level and settings, and with its own."""
    cuda = None if plan.stamp is None or plan.stamp.cuda is None else asdict(plan.stamp.cuda)
    default = replace(
        job, model=str(stock), outputs=str(folder / "default.npz"), planned=False, weight_bytes=plan.parameter_bytes
    )
    # Of a planned file the nodes are its kernels already
    level = "disable" if plan.stamp is None or is_planned(load_as_is(stock).ir) else plan.stamp.level
    same = replace(
        default, outputs=str(folder / "stock.npz"), cuda=cuda, level=LEVELS[level],
        dims=symbolic_sizes(stock, given, plan.ranges),
    )  # fmt: skip
    return {"stock": same, "default": default}


@contextmanager
def in_turns(
    kind: Callable[[J, Path, str], W],
    jobs: Mapping[str, J],
    folder: Path,
    runs: int,
    what: str,
    report_progress: Callable[[str], None],
    warm_up: int = 0,
) -> Iterator[dict[str, W]]:
    """Each job in a process of its own, which has been timed; they have taken turns, `ROUNDS` each if there are as many
    runs.

    Args:
        kind: Starts a process.
        jobs: What they run, by name.
        folder: For what they exchange.
        runs: How many of each are timed.
        what: What these are called.
        report_progress: Called with each stage's name.
        warm_up: How many come before.
    """
    with ExitStack() as stack:
        workers = dict[str, W]()
        for name, job in jobs.items():
            report_progress(f"loading {name}")
            workers[name] = kind(job, folder, name)
            stack.enter_context(workers[name])
        report_progress("timing")
        for worker in workers.values() if warm_up else ():
            worker.times(warm_up)
        turns, begin = min(ROUNDS, runs), time.monotonic()
        for turn in range(turns):
            done = runs * turn // turns
            report_progress(f"timing: {done_of(done, runs, what, begin)}")
            take_turns(list(workers.values()), 1, runs * (turn + 1) // turns - done)
        yield workers


def symbolic_sizes(
    model: Path, feeds: feeding.Feeds, ranges: Mapping[str, DimRange] = MappingProxyType({})
) -> dict[str, int]:
    """The sizes that inputs give to a model's named dimensions.

    Told them, onnxruntime's optimizer sees the shapes that were planned for, and may fuse more: only then are the last
    bits of two runs to be compared. Dimensions with a range of sizes stay open in the plan, and so here.
    """
    left_open = {place for one in ranges.values() for place in one.places}
    loaded = load_as_is(model).ir
    sizes: dict[str, set[int]] = {}
    for value in loaded.graph.inputs:
        feed = feeds.get(str(value.name))
        if value.shape is None or not isinstance(feed, np.ndarray) or len(value.shape) != feed.ndim:
            continue
        for axis, (dim, size) in enumerate(zip(value.shape, feed.shape, strict=True)):
            if isinstance(dim, ir.SymbolicDim) and dim.value and f"{value.name}[{axis}]" not in left_open:
                sizes.setdefault(dim.value, set()).add(size)
    return {name: one for name, (one, *others) in sizes.items() if not others}  # '?' isn't one dimension


def stock_model(model: Path, planned: Path, plan: Plan, folder: Path) -> Path:
    """What stock onnxruntime runs beside a plan where nothing is said: the user's model, as it is.

    Of a planned file it is what was planned, where that is there and hasn't changed. Else, and of a model that was
    differentiated to be planned, it is the planned model with every node once and in no order: what is recomputed is
    the plan's own doing.
    """
    source = None if plan.source_file is None else plan.source_file.found(planned.parent)
    given = source if is_planned(load_as_is(model).ir) else model
    if given is not None:
        read = load_as_is(given)
        names = {str(value.name) for value in read.ir.graph.inputs}
        if names.isdisjoint(maps_of(read.ir, read.name)):
            usable = given
        else:  # what inputs come as between processes are tables
            save_model(read.ir, usable := folder / "of_tables.onnx")
        if all(value.name in names for value in plan.model.graph.inputs):
            return usable
    if not plan.recomputed:
        return planned
    path = folder / "every_node_once.onnx"
    once = load_as_is(planned).ir
    drop_copies(once)
    save_model(once, path)
    return path


def _parts(plan: Plan) -> str:
    """What a run takes, in words."""
    need = plan.workspace_bytes
    parts = [f"{format_size(plan.arena_bytes)} of arena"]
    parts.append("a workspace that was never measured" if need is None else f"{format_size(need)} of workspace")
    if plan.run_time_bytes:
        parts.append(f"{format_size(plan.run_time_bytes)} for values sized at run time")
    if plan.stamp is not None and plan.stamp.cuda is not None:
        parts.append(f"{format_size(plan.input_bytes)} of inputs")
    return listed(parts)


_NEAR = 0.05
"""By how much more than planned may be measured before it is said that it is the whole process that is measured."""


def _prediction(plan: Plan, ours: Measured) -> str:
    says = "For the largest sizes the plan says" if plan.ranges else "The plan says"
    if ours.peak_bytes is None:
        return f"{says} {_parts(plan)}."
    measured = f"Measured: {format_size(ours.peak_bytes)}"
    if plan.window is not None:
        measured += f", with what passes through the window of {format_size(plan.window.nbytes)}"
    elif plan.predicted_bytes is not None and ours.peak_bytes > (1 + _NEAR) * plan.predicted_bytes:
        measured += " of the process, with what onnxruntime and Python take of their own for a run"
    return f"{says} {_parts(plan)}. {measured}."


def save_outputs(outputs: Mapping[str, Any], path: Path) -> None:
    """Write outputs as an .npz; the arrays of a sequence ``y`` as ``y[0]``, ``y[1]`` and so on.

    Raises:
        MemongerError: an output is no array, or the file can't be written.
    """
    outputs = each_array(outputs)
    strange = [name for name, value in outputs.items() if not isinstance(value, np.ndarray)]
    if strange:
        raise MemongerError(f"output '{strange[0]}' is no array and can't go into an .npz.")
    with system_checked(MemongerError, f"{path} can't be written"):
        write_whole(path, lambda file: np.savez(file, **outputs))
