"""Plans of many models for several batches, budgets and devices, several at a time: `plan_all`."""

import dataclasses
import importlib
import itertools
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing import parent_process
from pathlib import Path
from types import ModuleType
from typing import Any, Unpack, get_args

import onnx_ir as ir

from memonger.errors import MemongerError, PlanError, RuntimeUnavailableError
from memonger.files import SETTINGS, add_json, check_outside, new_folder
from memonger.ir.model import Model
from memonger.ir.save import as_proto
from memonger.model.load import Source, load_as_is
from memonger.option_names import Engine
from memonger.options import Keywords, Options, combine, takes_options
from memonger.planner import cache
from memonger.planner.search_plan import search_plan
from memonger.units import MOST_THREADS, in_bytes, whole
from memonger.words import check_choice, either, on_the_command_line, option

SUFFIX = ".planned.onnx"

_ENDED = (
    "the process that planned it was ended from outside, as systems do where memory runs out: plan for a smaller "
    "batch, or use a larger machine."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A plan of a fleet, or why there is none.

    Attributes:
        name: The model's.
        batch: The batch asked for; None: the model's own.
        budget: As it was asked for: a size or a percentage; None: no budget.
        device: As it was asked for.
        budget_bytes: The budget.
        mode: What the model was planned for.
        total_bytes: See `memonger.Plan.total_bytes`; None where there is no plan.
        arena_bytes: See `memonger.Plan.arena_bytes`.
        overhead: See `memonger.Plan.overhead`.
        recomputed_nodes: How many steps compute again what was dropped.
        seconds: What planning and writing took.
        file: The planned file, where one was written.
        error: Why there is no plan.
        notes: Those of the plan.
    """

    name: str
    batch: int | None = None
    budget: str | None = None
    device: str | None = None
    budget_bytes: int | None = None
    mode: str | None = None
    total_bytes: int | None = None
    arena_bytes: int | None = None
    overhead: float | None = None
    recomputed_nodes: int | None = None
    seconds: float = 0.0
    file: Path | None = None
    error: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Task:
    """A plan to be made, by this process or another.

    Attributes:
        row: What is known of it before.
        source: The model.
        options: Of the plan.
        train_mode: Whether the model is turned into its training form first.
        file: Where the plan is written; None: nowhere.
        kept: The folder of plans that were made before; see `memonger.planner.cache`.
        in_flags: Whether messages name flags.
    """

    row: Row
    source: Any
    options: Options
    train_mode: bool
    file: Path | None
    kept: str | None
    in_flags: bool


Numbered = tuple[int, Row]
Run = Callable[[Sequence[_Task]], Iterator[Numbered]]
Rows = Callable[[Sequence[_Task]], list[Row]]
Budget = tuple[str, float | None, int | None]
"""As it was asked for, as a fraction, and in bytes; one of those two is None."""


@takes_options()
def plan_all(
    models: Sequence[str | Path] | Mapping[str, Source | Model],
    *,
    batches: Sequence[int] = (),
    budgets: Sequence[float | str] = (),
    devices: Sequence[str] = (),
    jobs: int | None = None,
    engine: Engine = "joblib",
    output: str | Path | None = None,
    force: bool = False,
    train_mode: bool = False,
    options: Options | None = None,
    **keywords: Unpack[Keywords],
) -> tuple[Row, ...]:
    """Plan many models, each for every batch with every budget on every device, several at a time.

    The plans are those of `memonger.search_plan`, however many are made at a time. A model that can't be planned stops
    no other: its rows say why. With ``MEMONGER_CACHE`` plans that were made before, by a call that was ended, say, are
    taken from that folder.

    Args:
        models: Files, which are called as they are without their ending; or models by name.
        batches: In place of ``batch``.
        budgets: In place of ``budget``: sizes, or percentages such as ``70%``, of the total that a model takes where
            nothing is recomputed and nothing runs in chunks.
        devices: In place of ``device``.
        jobs: How many plans are made at a time. None: one, in this process; with Ray as many as it has processors for.
        engine: ``joblib``: processes of this machine. ``ray``: the cluster that the environment names, or Ray on this
            machine; ``output``, ``MEMONGER_CACHE`` and the models are then on a file system that all its machines have.
        output: The folder to make, of a planned file for each plan, and memonger.json with these rows: there whole, or
            not at all.
        force: Replace a folder that memonger wrote.
        train_mode: Turn BatchNormalization and Dropout into their training form first; see
            `memonger.to_training_mode`.
        options: A record of options to start from; keywords given beside it replace its fields.
        keywords: The fields of `Options`.

    Returns: a row a plan, by model, batch, device and budget, in the order in which these were given.

    Raises:
        PlanError: there is no model, or two of one name; an option has a value it can't take.
        PlanFileError: the folder is there already, or can't be written.
        RuntimeUnavailableError: the engine isn't installed.
        TypeError: a keyword is no option.
    """
    run, read = _run_by(engine, jobs), _named(models)
    sources = {name: source if run is _here else _portable(name, source) for name, source in read.items()}
    sizes = {_budget(budget)[1:]: _budget(budget) for budget in budgets}
    chosen = combine(options, {**keywords, **({"budget": 0} if sizes else {})})  # as each of the tasks will have one
    chosen.check_budget()
    settings = [
        dataclasses.replace(chosen, progress=None, batch=batch, device=device)
        for batch in dict.fromkeys(batches) or [chosen.batch]
        for device in dict.fromkeys(devices) or [chosen.device]
    ]
    tasks = [_task(*one, setting, train_mode) for one in sources.items() for setting in settings]
    shares = any(share is not None for _, share, _ in sizes.values())
    numbers, total = itertools.count(1), len(tasks) * (len(sizes) or 1) + len(tasks) * shares

    def rows_of(some: Sequence[_Task]) -> list[Row]:
        """Their rows, in their order; who asked is told of each that is done."""
        found = dict[int, Row]()
        for number, row in run(some):
            found[number] = row
            if chosen.progress is not None:
                chosen.progress(f"{next(numbers)} of {total}: {row.name}")
        return [found[number] for number in range(len(some))]

    if output is None:
        return tuple(rows_of(_with_budgets(rows_of, tasks, sizes.values())))
    check_outside([Path(one) for one in read.values() if isinstance(one, str | Path)], Path(output))
    with new_folder(Path(output), force) as folder:
        rows = rows_of(_with_files(_with_budgets(rows_of, tasks, sizes.values()), folder))
        rows = [dataclasses.replace(row, file=row.file and row.file.relative_to(folder)) for row in rows]
        add_json(folder / SETTINGS, {"plans": [row_record(row) for row in rows]})
    return tuple(dataclasses.replace(row, file=row.file and Path(output) / row.file) for row in rows)


def row_record(row: Row) -> dict[str, Any]:
    """A row as JSON has it."""
    return {**dataclasses.asdict(row), "file": row.file and str(row.file)}


def _named(models: object) -> dict[str, Any]:
    """The models by name.

    Raises:
        PlanError: there is none; two of one name; a name that can't be a file's; models in memory without names.
    """
    if isinstance(models, str | bytes) or not isinstance(models, Sequence | Mapping) or not models:
        raise PlanError(f"models must be files, as ['a.onnx', 'b.onnx'], or models by name, not {models!r}.")
    named = dict[str, Any]()
    for one in models if not isinstance(models, Mapping) else ():
        if not isinstance(one, str | Path):
            raise PlanError(
                f"a model in memory is given with a name, as {{'resnet': model}}, not {type(one).__name__}."
            )
        name = Path(one).name.removesuffix(".onnx")
        if name in named:
            hint = either(" Or give them by name: {'NAME': 'FILE'}.", "")
            raise PlanError(f"{named[name]} and {one} would both be '{name}': rename one.{hint}")
        named[name] = one
    named = named or dict(models)
    for name in named:
        if not isinstance(name, str) or not name.strip(".") or set(name) & set("/\\\0"):
            raise PlanError(f"{name!r} can't name a model: its plans are files of that name.")
    return named


_PERCENT = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?) ?%")


def _budget(budget: float | str) -> Budget:
    """A budget from a size or a percentage.

    Raises:
        PlanError: it is neither a size nor a percentage.
    """
    match = _PERCENT.fullmatch(budget) if isinstance(budget, str) else None
    if match is None:
        return str(budget), None, in_bytes("budget", budget, PlanError)
    if not 0 < float(match[1]) <= 100:
        raise PlanError(f"budget: {budget!r} is no percentage above 0 and up to 100.")
    return str(budget), float(match[1]) / 100, None


def _portable(name: str, source: Any) -> Any:
    """A model as another process finds it: where it lies, or as bytes.

    Raises:
        LoadError, PlanFileError: a model in memory can't be made bytes.
    """
    if isinstance(source, str | Path):
        return Path(source).absolute()
    if isinstance(source, ir.Model):
        return as_proto(load_as_is(source).ir, name).SerializeToString()
    return dataclasses.replace(source, ir=_portable(name, source.ir)) if isinstance(source, Model) else source


def _task(name: str, source: Any, options: Options, train_mode: bool) -> _Task:
    """A plan with the options' own budget."""
    kept = os.environ.get(cache.FOLDER)
    device, budget = (None if one is None else str(one) for one in (options.device, options.budget))
    row = Row(name=name, batch=options.batch, device=device, budget=budget, budget_bytes=options.budget_bytes)
    kept = str(Path(kept).expanduser().absolute()) if kept else None
    return _Task(row, source, options, train_mode, None, kept, either("", "flags") == "flags")


def _with_budgets(rows_of: Rows, tasks: Sequence[_Task], budgets: Collection[Budget]) -> list[_Task]:
    """Each task with every budget. Where one is a percentage, all are planned first with nothing recomputed."""
    if not budgets:
        return list(tasks)
    whole = [task.row for task in tasks]
    if any(share is not None for _, share, _ in budgets):
        nothing: Any = {"strategy": "none", "mirror": (), "chunks": "off", "budget": None}
        plain = [dataclasses.replace(task.options, **nothing) for task in tasks]
        whole = rows_of([dataclasses.replace(task, options=one) for task, one in zip(tasks, plain, strict=True)])
    return [_budgeted(task, row, *budget) for task, row in zip(tasks, whole, strict=True) for budget in budgets]


def _budgeted(task: _Task, whole: Row, budget: str, share: float | None, size: int | None) -> _Task:
    """A task with a budget, of the total in a row where that is a percentage, or with the error in that row."""
    row = dataclasses.replace(task.row, budget=budget)
    if share is not None:
        if whole.total_bytes is None:
            return dataclasses.replace(task, row=dataclasses.replace(row, error=whole.error))
        size = int(share * whole.total_bytes)
    row = dataclasses.replace(row, budget_bytes=size)
    return dataclasses.replace(task, row=row, options=dataclasses.replace(task.options, budget=size))


def _with_files(tasks: Sequence[_Task], folder: Path) -> list[_Task]:
    """Each task with its file: by the model's name, or in a folder of that name, by all that has several values."""
    rows = [task.row for task in tasks]
    if len({row.name for row in rows}) == len(rows):
        return [dataclasses.replace(task, file=folder / f"{task.row.name}{SUFFIX}") for task in tasks]
    several = [key for key in ("batch", "device", "budget") if len({getattr(row, key) for row in rows}) > 1]

    def path(row: Row) -> Path:
        said = {"batch": f"batch{row.batch}", "device": str(row.device), "budget": str(row.budget)}
        name = "_".join(said[key] for key in several).replace("%", "percent")
        return folder / row.name / f"{re.sub(r'[^A-Za-z0-9._-]', '', name)}{SUFFIX}"

    return [dataclasses.replace(task, file=path(task.row)) for task in tasks]


def _run_by(engine: Engine, jobs: int | None) -> Run:
    """What runs tasks.

    Raises:
        PlanError: there is no such engine, or it can't do so many at a time.
        RuntimeUnavailableError: it isn't installed.
    """
    check_choice("engine", engine, get_args(Engine), PlanError)
    jobs = None if jobs is None else whole("jobs", jobs, 1, MOST_THREADS, PlanError)
    if engine == "joblib" and jobs in (None, 1):
        return _here
    try:
        package = importlib.import_module(engine)
    except ImportError as error:
        extra = {"joblib": "jobs", "ray": "ray"}[engine]
        raise RuntimeUnavailableError(
            f"several plans at a time need {engine} ({error}): pip install 'memonger[{extra}]'; or make one after the "
            f"other: {option('jobs', 1)}."
        ) from error
    return lambda tasks: (_in_processes if engine == "joblib" else _on_ray)(package, tasks, jobs)


def _here(tasks: Sequence[_Task]) -> Iterator[Numbered]:
    return ((number, _planned(task)) for number, task in enumerate(tasks))


def _in_processes(joblib: ModuleType, tasks: Sequence[_Task], jobs: int | None) -> Iterator[Numbered]:
    """In processes of this machine. Where one is ended from outside, what is left is done one after the other."""
    left = dict(enumerate(tasks))

    def run(some: Mapping[int, _Task]) -> Iterator[Numbered]:
        parallel = joblib.Parallel(n_jobs=max(2, jobs or 2), return_as="generator_unordered", batch_size=1)
        found: Iterator[Numbered] = parallel(joblib.delayed(_elsewhere)(*one) for one in some.items())
        return found

    try:
        for number, row in run(dict(left)):
            del left[number]
            yield number, row
    except BrokenProcessPool:
        for number, task in left.items():
            try:
                yield from run({number: task})
            except BrokenProcessPool:
                yield number, dataclasses.replace(task.row, error=_ENDED)
    finally:
        if parent_process() is not None:  # as it ends, multiprocessing waits for these processes, which idle for 300 s
            importlib.import_module("joblib.externals.loky").get_reusable_executor().shutdown()


def _on_ray(ray: ModuleType, tasks: Sequence[_Task], jobs: int | None) -> Iterator[Numbered]:
    """On Ray's cluster. A worker that is ended from outside is an error of its own row."""
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    work = ray.remote(num_cpus=1, max_retries=0)(_elsewhere)
    pending, running = list(enumerate(tasks))[::-1], dict[Any, int]()
    while pending or running:
        while pending and len(running) < (jobs or len(tasks)):
            number, task = pending.pop()
            running[work.remote(number, task)] = number
        for done in ray.wait(list(running))[0]:
            number = running.pop(done)
            try:
                yield ray.get(done)
            except ray.exceptions.RayError:
                yield number, dataclasses.replace(tasks[number].row, error=_ENDED)


def _elsewhere(number: int, task: _Task) -> Numbered:
    """A task in a process of its own, whose environment names no folder of kept plans, or an earlier one."""
    os.environ.pop(cache.FOLDER, None)
    if task.kept is not None:
        os.environ[cache.FOLDER] = task.kept
    return number, _planned(task)


def _planned(task: _Task) -> Row:
    """Make a plan and write it; what is raised is noted in its row, whatever it is: no model stops the others."""
    begin, row, chosen = time.perf_counter(), task.row, task.options
    if row.error is not None:
        return row
    try:
        with on_the_command_line() if task.in_flags else nullcontext():
            is_portable = isinstance(task.source, Model) and isinstance(task.source.ir, bytes)
            source = dataclasses.replace(task.source, ir=load_as_is(task.source.ir).ir) if is_portable else task.source
            if task.train_mode:
                from memonger.autodiff.training_mode import to_training_mode

                source = to_training_mode(source, batch=chosen.batch, dims=chosen.sizes)
                chosen = dataclasses.replace(chosen, batch=None, dims=None)
            plan = search_plan(source, options=chosen)
            if task.file is not None:
                task.file.parent.mkdir(exist_ok=True)
                plan.save(task.file)
    except MemongerError as error:
        row = dataclasses.replace(row, error=str(error))
    except Exception as error:
        row = dataclasses.replace(row, error=f"{type(error).__name__}: {error}")
    else:
        row = dataclasses.replace(
            row,
            mode=plan.mode,
            total_bytes=plan.total_bytes,
            arena_bytes=plan.arena_bytes,
            overhead=plan.overhead,
            recomputed_nodes=len(plan.recomputed),
            file=task.file,
            notes=plan.notes,
        )
    return dataclasses.replace(row, seconds=time.perf_counter() - begin)
