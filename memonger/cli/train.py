"""A training plan run as training: losses, seconds of a step and memory, alone or beside stock onnxruntime."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from memonger.cli import compare as comparing
from memonger.cli import gradients, noise
from memonger.cli.measure_steps import STATE, MeasuredTrainer, StepsJob
from memonger.cli.settings import CommandResult, Settings
from memonger.cli.verdicts import Case, Ran, judge
from memonger.errors import MemongerError
from memonger.plan import Plan
from memonger.report.runs import format_seconds
from memonger.runtime import feeds as feeding
from memonger.runtime import program
from memonger.runtime.measure import Measured, read_arrays, write_arrays
from memonger.runtime.prepare import device_of
from memonger.runtime.prepared import Input
from memonger.runtime.trainer import check_labels
from memonger.runtime.weight_reader import Reading
from memonger.units import format_size

SHOWN = 12
"""Losses that are printed; of more the first and the last."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What a process that trained has to show: figures, the loss of each step, arrays by name, and what the last step
    read of weights that stay in the plan's file, or why that isn't held to the window."""

    measured: Measured
    losses: list[float]
    arrays: Mapping[str, np.ndarray]
    readings: Sequence[tuple[Reading | None, str, float | None]] = ()


def is_trained(plan: Plan) -> bool:
    """Whether a plan is one of training steps, with a loss; a backward pass without a loss runs like any model."""
    return plan.training is not None and plan.training.loss is not None


def inputs_of(plan: Plan) -> list[Input]:
    """What a step is given: the inputs that no session keeps or sets."""
    assert plan.training is not None
    own = {*plan.training.persistent, *plan.training.scalars.values()}
    return [value for value in program.inputs_of(plan.model.graph) if value.name not in own]


def random_batch(plan: Plan, seed: int) -> dict[str, np.ndarray]:
    """An array for each input of a step: as `feeding.random_feeds`, and class numbers among the classes."""
    assert plan.training is not None
    feeds, rng = feeding.random_feeds(inputs_of(plan), seed), np.random.default_rng(seed)
    for name, classes in plan.training.classes.items():
        if name in feeds:
            feeds[name] = rng.integers(0, classes, feeds[name].shape).astype(feeds[name].dtype)
    return feeds


def train(
    plan: Plan,
    planned: Path,
    stock: Path | None,
    feeds: feeding.Feeds | None,
    settings: Settings,
    steps: int,
    folder: Path,
    report_progress: Callable[[str], None],
) -> CommandResult:
    """Take steps as planned, each on the same batch.

    Args:
        plan: Of a training model with a loss.
        planned: Its file.
        stock: The training model that stock onnxruntime trains beside it; None: nothing does.
        feeds: The inputs of a step; random ones if None.
        settings: See `Settings`; of the steps ``warm_up`` aren't timed, if that leaves one that is.
        steps: How many to take, at least 3.
        folder: For what the processes exchange.
        report_progress: Called with each stage's name.
    """
    if settings.pad:
        raise MemongerError("--pad is not for training: rows that fill up would have a part in loss and gradients.")
    before = noise.load()
    given = feeds if feeds is not None else random_batch(plan, settings.seed)
    comparing.check_arrays(plan, given)
    assert plan.training is not None
    feeding.check_feeds(inputs_of(plan), given, "the model")
    check_labels(plan.training, given)
    write_arrays(folder / "inputs.npz", given)
    device, untimed = device_of(plan, settings.device), max(2, min(settings.warm_up, steps - 1))
    job = comparing.planned_job(StepsJob, plan, planned, device, settings, folder, untimed=untimed)
    others = {} if stock is None else comparing.stock_jobs(plan, job, stock, given, folder)
    jobs, timed = {"planned": job, **others}, max(1, steps - untimed)
    with comparing.in_turns(MeasuredTrainer, jobs, folder, timed, "steps", report_progress) as workers:
        for worker in workers.values():
            worker.save(with_state=stock is not None)  # which is compared
        trained = {
            name: Trained(worker.result(), worker.losses, read_arrays(Path(jobs[name].outputs)), worker.readings)
            for name, worker in workers.items()
        }
    result = _alone(plan, trained["planned"], str(device))
    if stock is None:
        return result
    what = "losses, outputs and the state after the last step"
    case = Case(plan, stock, given, device, settings, others["stock"].level, before, what)
    sessions = {
        name: Ran(each.measured, {"the losses": np.array(each.losses, np.float64), **each.arrays})
        for name, each in trained.items()
    }
    verdict = judge(case, sessions, report_progress)
    record = {**verdict.record, **result.record, "stock_losses": _numbers(trained["stock"].losses)}
    lines = (*result.lines, *verdict.lines)
    return replace(result, record=record, rows=verdict.rows, lines=lines, passed=verdict.passed, notes=verdict.notes)


def _alone(plan: Plan, trained: Trained, device: str) -> CommandResult:
    roles, ours = plan.training, trained.measured
    assert roles is not None
    outputs = {name: array for name, array in trained.arrays.items() if not name.startswith(STATE)}
    sums = gradients.summary(roles, outputs)
    record = {
        "device": device, "mode": "training", "steps": len(trained.losses),
        "losses": _numbers(trained.losses), "latency_seconds": ours.latency_seconds,
        "latency_p95_seconds": ours.p95_seconds,
        "peak_bytes": ours.peak_bytes, "total_bytes": plan.total_bytes, "arena_bytes": plan.arena_bytes,
        "workspace_bytes": plan.workspace_bytes, "parameter_bytes": plan.parameter_bytes,
        "input_bytes": plan.input_bytes, "gradients": sums,
    }  # fmt: skip
    timed = f"Seconds of a step: median {format_seconds(ours.latency_seconds)}, p95 {format_seconds(ours.p95_seconds)}."
    numbers = [f"{loss:.6g}" for loss in trained.losses]
    if len(numbers) > SHOWN:
        numbers = [*numbers[: SHOWN // 2], "...", *numbers[-SHOWN // 2 :]]
    lines = [f"Losses of {len(trained.losses)} steps on one batch: {' '.join(numbers)}", timed, memory_line(plan, ours)]
    for reading in trained.readings:  # of the one plan
        record.update(comparing.reading_record(*reading))
        lines += comparing.reading_lines(plan, *reading)
    lines += gradients.lines(sums, roles)
    shown = {name: outputs[name] for name in roles.outputs if name in outputs and name != roles.loss}
    return CommandResult(shown, record, lines=tuple(lines), saved=outputs)


def _numbers(losses: list[float]) -> list[float | None]:
    """Losses for JSON, which has neither NaN nor infinity."""
    return [loss if np.isfinite(loss) else None for loss in losses]


def memory_line(plan: Plan, ours: Measured) -> str:
    """The predicted total and what it consists of, beside what was measured."""
    sizes = (f"{name} {'not measured' if size is None else format_size(size)}" for name, size in plan.parts.items())
    said = f"The plan says {format_size(plan.total_bytes)} in all: {', '.join(sizes)}."
    if ours.peak_bytes is None:
        return said
    total = ours.peak_bytes + plan.kept_parameter_bytes + plan.input_bytes
    what = "arena and workspace" if plan.window is None else "arena, workspace and what passes through the window"
    return f"{said} Measured: {format_size(ours.peak_bytes)} for {what}, so {format_size(total)} in all."
