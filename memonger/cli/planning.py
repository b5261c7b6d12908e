"""The commands that make plans and training models: ``plan``, ``pareto`` and ``differentiate``."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from memonger.cli.command import given_again
from memonger.cli.options import ONLY_PLANNING
from memonger.cli.output import Screen, print_json, print_line, print_lines, print_notes, progress_bar, read_inputs
from memonger.devices import Cuda
from memonger.errors import PlanError
from memonger.graph.liveness import Sharing
from memonger.ir.model import Model
from memonger.ir.save import save_model
from memonger.options import Options
from memonger.plan import LIMIT_MARGIN, Plan, is_sized_at_run_time
from memonger.planner import search_plan as planner
from memonger.planner.changes import Changes
from memonger.report import text
from memonger.report.chunks import CHUNKS_NOTE, chunks_lines, chunks_table
from memonger.report.makeup import makeup
from memonger.report.runs import format_seconds
from memonger.report.summary import details_table, headline, plan_figures, plan_record
from memonger.runtime import disk
from memonger.units import format_size

if TYPE_CHECKING:
    from memonger.autodiff.updates import Optimizer


def plan(
    model: Path, output: Path | None, weights: str, annotated: Path | None, report: Path | None, details: bool,
    as_json: bool, quiet: bool, **flags: Any,
) -> None:  # fmt: skip
    """Plan a model, write what is asked for, and print the plan's figures."""
    is_source = weights == "source"
    made = search_plan(model, quiet, weights="auto" if is_source else weights, **flags)
    if output is not None:
        made.save(output, weights="source" if is_source else "own")
    if annotated is not None:
        made.annotated.save(annotated)
    if report is not None:
        made.report(report, title=model.name)
    written = None if output is None else str(output)
    if as_json:
        print_json(plan_record(made, str(model), written))
        return
    _print_plan(made, plan_figures(made, str(model), written), details)
    console = Screen()
    if output is not None and made.window is not None:
        data = max(output.parent.glob(f"{output.name}.*.data"), key=lambda file: file.stat().st_mtime, default=output)
        speed = disk.speed(str(data))
        if speed is not None:
            took, size, a_second = made.read_bytes / speed, format_size(made.read_bytes), format_size(round(speed))
            what = f"{size} a run at {a_second} a second: {format_seconds(took)} where the disk has to give all of it"
            console.print(f"Reading through the window costs {what}.", soft_wrap=True)
    if output is not None:
        trains = made.training is not None and made.training.loss is not None
        kind = "DistributedTrainingSession" if made.graph.collectives else "TrainingSession"
        train, run = f"Train it: memonger.{kind}('{output}')", f"Run it: memonger run {output} --compare"
        console.print(f"Wrote {output}. {train if trains else run}", soft_wrap=True)
    elif annotated is None and report is None:
        console.print(f"Keep it: {keeping(model)}", soft_wrap=True)
    if annotated is not None:
        again = "with --strategy marks and the same loss it gives this plan again"
        console.print(f"Wrote {annotated}: {again}.", soft_wrap=True)
    if report is not None:
        console.print(f"Wrote {report}: open it in a browser.", soft_wrap=True)


def _print_plan(made: Plan, record: dict[str, Any], details: bool) -> None:
    console = Screen()
    print_lines(console, (*headline(record), *chunks_lines(made)))
    if made.mode == "training":
        console.print(text.recomputation_line(record))
    if made.budget is not None:
        room = made.budget - made.total_bytes
        held = f"holds, with {format_size(room)} to spare" if room >= 0 else f"is exceeded by {format_size(-room)}"
        if is_sized_at_run_time(made.model):
            measured = made.workspace is not None
            held += " for inputs like those that were measured" if measured else "; a run that needs more is an error"
        console.print(f"The budget of {format_size(made.budget)} {held}.")
    if record["unplanned_values"]:
        count = len(record["unplanned_values"])
        console.print(f"Values of a size or type that can't be planned, left to the runtime: {count}.")
    if details:
        if record["passes"]:
            console.print(text.passes_table(record["passes"]))
        if made.outcome is not None and made.outcome.candidates:
            console.print(text.candidates_table(made.outcome.candidates))
        console.print(details_table(record, made.lower_bound_bytes))
        if made.chunks:
            console.print(chunks_table(record["chunks"]))
            console.print(CHUNKS_NOTE)
    print_lines(console, (*makeup(made).lines, *text.memory_picture(made)))
    console.print(text.planned_line(record, details))


def keeping(model: Path) -> str:
    """The command that writes the plan of a model, with the flags of this command that say how to plan."""
    given = given_again(click.get_current_context(), _OF_RUNS)
    return f"memonger plan {given} -o {shlex.quote(f'{model.stem}.planned.onnx')}"


_OF_RUNS = (
    "outputs", "compare", "against", "steps", "runs", "warm_up", "seed", "cuda_graph", "pad", "atol", "rtol", "details",
    "as_json", "quiet", "force",
)  # fmt: skip
"""Parameters that have no effect on a plan."""


def search_plan(model: Path, quiet: bool, **flags: Any) -> Plan:
    """The plan of a model for the flags of the command line; notes on it are printed."""
    source, options = source_and_options(model, flags)
    with wrong_usage():
        options.check_budget()
    with progress_bar(quiet, f"Planning {model.name}") as report_progress:
        made = planner.search_plan(source, options=options, progress=report_progress)
    print_notes(made.notes)
    return made


def pareto(model: Path, points: int, budgets: tuple[int, ...], as_json: bool, quiet: bool, **flags: Any) -> None:
    """Plan a model for several budgets and print a table of the plans."""
    source, options = source_and_options(model, flags)
    with wrong_usage():
        options.for_budgets()
    with progress_bar(quiet, f"Planning {model.name}") as report_progress:
        plans = planner.pareto(source, points=points, budgets=budgets, options=options, progress=report_progress)
    print_notes([note for each in plans for note in each.notes])
    if as_json:
        print_json([plan_record(each, str(model), None) for each in plans])
        return
    records = [plan_figures(each, str(model), None) for each in plans]
    console = Screen()
    console.print(text.frontier_table(records))
    if records and records[0]["stock_bytes"] is not None:
        console.print(f"Stock onnxruntime is expected to take about {format_size(records[0]['stock_bytes'])}.")
    console.print(f"Make one of them: {_plan_of(model, plans, records)}", soft_wrap=True)


def _plan_of(model: Path, plans: Sequence[Plan], records: Sequence[Mapping[str, Any]]) -> str:
    """The command that makes a plan of the frontier: the one in the middle, with the flags of this command."""
    record, planned = records[len(records) // 2], plans[len(plans) // 2]
    spare = LIMIT_MARGIN if is_sized_at_run_time(planned.model) else 0  # which a budget keeps, and no total has
    given = given_again(click.get_current_context(), ("points", "budgets", "as_json", "quiet"))
    moves = record["window"] or record["host_weights"]
    is_asked = record["recomputed_nodes"] or moves or any(each["chunks"] for each in records)
    size = (record["budget_bytes"] if moves else None) or record["total_bytes"] + spare  # mapped, it has none
    budget = f" --budget {size}B" if is_asked else ""
    return f"memonger plan {given}{budget} -o {shlex.quote(f'{model.stem}.planned.onnx')}"


def write_differentiated(model: Path, output: Path, **flags: Any) -> None:
    """Write a model and its backward pass as one model."""
    from memonger.autodiff.differentiate import differentiate
    from memonger.autodiff.mixed_precision import to_mixed_precision

    optimizer, wrt, precision = _optimizer(flags), flags.pop("wrt") or None, flags.pop("precision")
    read = _changes(flags).made(model, flags.pop("batch"), flags.pop("dims"))
    if precision is not None:
        read = to_mixed_precision(read, precision)
    training = differentiate(read, optimizer=optimizer, wrt=wrt, **flags)
    print_notes(training.notes)
    save_model(training.ir.clone(), output)
    print_line(f"Wrote {output}: {training.ir.graph.num_nodes()} nodes. Plan it: memonger plan {output}")


def refuse_planning_options(model: Path, *others: str) -> None:
    """A model that has a plan is not planned again: options of planning, and ``others``, would have no effect."""
    context = click.get_current_context()
    for parameter in context.command.params:
        given = context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
        if given and parameter.name in (*ONLY_PLANNING, *others):
            flag = parameter.opts[0]
            raise click.UsageError(
                f"{model} has a plan already, which {flag} can't change: give the model that it was made from."
            )


def source_and_options(model: Path, flags: dict[str, Any]) -> tuple[Path | Model, Options]:
    """What to plan, and the options of the plan; contradictions among them are wrong usage of the command."""
    changes = _changes(flags)
    sizes = {key: flags.pop(key) for key in ("batch", "dims")} if changes else {}
    options = options_of(flags, model)
    return (changes.made(model, **sizes) if sizes else model), options


def _changes(flags: dict[str, Any]) -> Changes:
    """What the flags ask to be done to the model first, taken out of them."""
    return Changes(flags.pop("train_mode", False), *(flags.pop("lora", None) or ()))


def options_of(flags: dict[str, Any], *models: Path) -> Options:
    """The options of plans of these models; contradictions among them are wrong usage of the command."""
    optimizer, inputs = _optimizer(flags), read_inputs(flags.pop("inputs"), *models)
    sharing = Sharing(
        inplace=not flags.pop("no_inplace"), views=not flags.pop("no_views"), reuse=not flags.pop("no_reuse")
    )
    cuda = Cuda(
        convolution_search=flags.pop("cuda_search"),
        max_workspace=not flags.pop("small_workspace"),
        tf32=not flags.pop("no_tf32"),
        deterministic=not flags.pop("no_deterministic"),
    )
    with wrong_usage():
        if flags.get("buckets") is not None:
            from memonger.graph.collectives import Buckets

            flags["buckets"] = Buckets(**flags["buckets"])
        return Options(**flags, sharing=sharing, cuda=cuda, optimizer=optimizer, inputs=inputs)


@contextmanager
def wrong_usage() -> Iterator[None]:
    """What options are told is wrong usage of the command."""
    try:
        yield
    except PlanError as error:
        raise click.UsageError(str(error)) from error


def _optimizer(flags: dict[str, Any]) -> "Optimizer | None":
    """The optimizer that the flags ask for, taken out of them. Settings that aren't given are PyTorch's defaults."""
    name = flags.pop("optimizer", None)
    values = {key: flags.pop(key, None) for key in ("lr", "momentum", "weight_decay")}
    settings = {key: value for key, value in values.items() if value is not None}
    if name is None and settings:
        raise click.UsageError(
            f"--{next(iter(settings)).replace('_', '-')} is for an --optimizer: add one, as --optimizer sgd."
        )
    if "momentum" in settings and name != "sgd":
        raise click.UsageError("--momentum is for --optimizer sgd: take that, or leave it out.")
    bits = flags.pop("optimizer_bits", None)
    if bits is not None and name not in ("adam", "adamw"):
        raise click.UsageError("--optimizer-bits is for --optimizer adam or adamw: take one of these, or leave it out.")
    if bits is not None:
        settings["bits"] = bits
    if name is None:
        return None
    from memonger.autodiff.optimizers import NAMES

    return NAMES[name](**settings)
