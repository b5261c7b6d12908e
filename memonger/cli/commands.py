"""The command line: the one place that prints. Results go to standard output, progress and errors to standard error."""

import errno
import json
import logging
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import click
import numpy as np
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from memonger import __version__
from memonger.autodiff.differentiate import differentiate
from memonger.autodiff.optimizers import SGD, Adam, AdamW, Optimizer
from memonger.autodiff.training_mode import to_training_mode
from memonger.cli import export as exporting
from memonger.cli.options import AS_JSON, DIMS, LOWERING, MODE, MODEL, ONLY_PLANNING, PLANNING, QUIET, TRAINING, options
from memonger.devices import GRAPHS, Cuda
from memonger.errors import MemongerError
from memonger.graph.liveness import Sharing
from memonger.layout import allocate, check_layout, lower_bound
from memonger.layout.minimalloc_csv import read_problem, write_solution
from memonger.model import training_roles
from memonger.model.load import load, load_as_is
from memonger.model.model import Model
from memonger.model.save import save_model
from memonger.plan import Plan
from memonger.plan_file import KEY
from memonger.planning.search_plan import pareto, search_plan
from memonger.remat import STRATEGIES
from memonger.report import text
from memonger.report.summary import plan_record

STAGES = 7


class _Command(click.Command):
    """Turns what a user can meet into one line on standard error and exit status 1."""

    def invoke(self, ctx: click.Context) -> Any:
        logging.getLogger("onnx_ir").setLevel(logging.ERROR)  # memonger says itself what is wrong with a model
        try:
            return super().invoke(ctx)
        except MemongerError as error:
            _fail(str(error))
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # whoever read the output has enough; click ends quietly
            _fail(f"{error.filename or 'the output'}: {error.strerror or error}.")


class _Group(click.Group):
    command_class = _Command


def _fail(message: str) -> NoReturn:
    click.echo(f"memonger: {message}", err=True)
    sys.exit(1)


@contextmanager
def _progress(quiet: bool, title: str) -> Iterator[Callable[[str], None]]:
    """A bar on standard error that a stage's name moves on; nothing where standard error is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as progress:
        task = progress.add_task(title, total=STAGES)
        seen = set[str]()

        def tell(stage: str) -> None:
            new = stage.partition(":")[0] not in seen
            seen.add(stage.partition(":")[0])
            progress.update(task, description=f"{title}: {stage}", advance=int(new))

        yield tell


def _read_inputs(path: Path | None) -> dict[str, np.ndarray] | None:
    if path is None:
        return None
    try:
        if not zipfile.is_zipfile(path):
            raise MemongerError(f"{path} is not an .npz of input arrays: write one with numpy.savez.")
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise MemongerError(f"{path} is not an .npz of input arrays: {str(error).rstrip('.')}.") from error


def _search(model: Path, quiet: bool, **flags: Any) -> Plan:
    with _planning(model, quiet, flags) as (source, chosen):
        plan: Plan = search_plan(source, **chosen)
    _tell(plan.notes)
    return plan


def _tell(notes: Sequence[str]) -> None:
    for note in dict.fromkeys(notes):
        click.echo(f"memonger: note: {note}", err=True)


@contextmanager
def _planning(model: Path, quiet: bool, flags: dict[str, Any]) -> Iterator[tuple[Path | Model, dict[str, Any]]]:
    """What to plan and the keyword arguments for it, with progress shown meanwhile."""
    _check_strategy(flags.get("strategy"), flags.get("budget") is not None, bool(flags.get("mirror")))
    sharing = Sharing(
        inplace=not flags.pop("no_inplace"), views=not flags.pop("no_views"), reuse=not flags.pop("no_reuse")
    )
    optimizer = _optimizer(flags)
    cuda = Cuda(
        convolution_search=flags.pop("cuda_search"),
        max_workspace=not flags.pop("small_workspace"),
        tf32=not flags.pop("no_tf32"),
        deterministic=not flags.pop("no_deterministic"),
    )
    turned = flags.pop("train_mode", False)
    with _progress(quiet, f"Planning {model.name}") as tell:
        inputs = _read_inputs(flags.pop("inputs"))
        source: Path | Model = model
        if turned:
            source = to_training_mode(model, batch=flags.pop("batch"), dims=flags.pop("dims"))
        yield (
            source,
            {**flags, "sharing": sharing, "progress": tell, "inputs": inputs, "optimizer": optimizer, "cuda": cuda},
        )


def _check_strategy(strategy: str | None, budget: bool, mirror: bool) -> None:
    chosen = STRATEGIES.get(strategy or "")
    if chosen and chosen.takes_budget and not budget:
        raise click.UsageError(f"--strategy {strategy} needs a --budget, such as 4GiB.")
    if budget and chosen and not chosen.takes_budget:
        names = " and ".join(name for name, each in STRATEGIES.items() if each.takes_budget)
        raise click.UsageError(f"--strategy {strategy} takes no --budget: {names} do.")
    if mirror and (budget or (chosen and not chosen.heeds_marks)):
        names = ", ".join(name for name, each in STRATEGIES.items() if each.heeds_marks)
        raise click.UsageError(f"--mirror goes with --strategy {names}; the others decide by themselves.")


def _optimizer(flags: dict[str, Any]) -> Optimizer | None:
    """The optimizer of the flags, which are taken out; PyTorch's defaults where one isn't given."""
    name = flags.pop("optimizer", None)
    given = {key: flags.pop(key, None) for key in ("lr", "momentum", "weight_decay")}
    chosen = {key: value for key, value in given.items() if value is not None}
    if name is None and chosen:
        raise click.UsageError(f"--{next(iter(chosen)).replace('_', '-')} is for an --optimizer.")
    if "momentum" in chosen and name != "sgd":
        raise click.UsageError("--momentum is for --optimizer sgd.")
    kinds: dict[str, Callable[..., Optimizer]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}
    return None if name is None else kinds[name](**chosen)


def _print_json(record: Any) -> None:
    click.echo(json.dumps(record))


def _plan(model: Path, output: Path | None, annotated: Path | None, as_json: bool, quiet: bool, **flags: Any) -> None:
    if output is not None and annotated is not None and output.resolve() == annotated.resolve():
        raise click.UsageError("-o and --annotated name one file.")
    plan = _search(model, quiet, **flags)
    if output is not None:
        plan.save(output)
    if annotated is not None:
        save_model(plan.annotated, annotated)
    record = plan_record(plan, str(model), None if output is None else str(output))
    if as_json:
        _print_json(record)
        return
    console = Console()
    if plan.outcome is not None and plan.outcome.candidates:
        console.print(text.candidates_table(plan.outcome.candidates))
    console.print(text.plan_table(record))
    if record["recomputed_nodes"]:
        console.print(text.recomputation_line(record), markup=False, soft_wrap=True)
    console.print(f"{record['nodes']} steps. Live bytes at each, up to the arena's size:", markup=False)
    console.print(f"[{text.memory_curve(plan)}]", markup=False)
    held = record["unplanned_values"]
    if held:
        console.print(f"{len(held)} values stay with the runtime (their size or type can't be planned).", markup=False)
    console.print(f"Planned in {plan.planning_seconds:.2f} s.", markup=False)
    if output is not None:
        known = plan.training
        trains = known is not None and known.loss is not None
        what = (
            f"Train it: memonger.TrainingSession('{output}')" if trains else f"Run it: memonger run {output} --compare"
        )
        console.print(f"Wrote {output}. {what}", markup=False, soft_wrap=True)
    if annotated is not None:
        again = "with --strategy marks and the same loss it gives this plan again"
        console.print(f"Wrote {annotated}: {again}.", markup=False, soft_wrap=True)


_PLAN_OPTIONS = options(
    MODEL,
    MODE,
    click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the planned model here."),
    click.option(
        "--annotated",
        type=click.Path(path_type=Path),
        help="Write MODEL here with force_mirroring, the decision, on every node.",
    ),
    *PLANNING,
    *TRAINING,
    AS_JSON,
    QUIET,
)


@click.command(cls=_Command, name="memonger-plan")
@click.version_option(__version__)
@_PLAN_OPTIONS
def plan(**arguments: Any) -> None:
    """Plan the memory of MODEL.

    The plan is the order its nodes run in, and the byte of one arena at which every value lies.
    """
    _plan(**arguments)


@click.group(cls=_Group, name="memonger")
@click.version_option(__version__)
def main() -> None:
    """Plans the memory of a neural network before it runs."""


@main.command(name="plan")
@_PLAN_OPTIONS
def plan_command(**arguments: Any) -> None:
    """Plan the memory of MODEL.

    The plan is the order its nodes run in, and the byte of one arena at which every value lies.
    """
    _plan(**arguments)


@main.command(name="pareto")
@options(
    MODEL,
    MODE,
    click.option("--points", type=click.IntRange(1), default=8, metavar="N", show_default=True,
                 help="Budgets that are tried."),
    *LOWERING,
    *TRAINING,
    AS_JSON,
    QUIET,
)  # fmt: skip
def pareto_command(model: Path, points: int, as_json: bool, quiet: bool, **flags: Any) -> None:
    """Show in how little memory MODEL runs, and what it costs.

    A plan a line, none better than another in both.
    """
    with _planning(model, quiet, flags) as (source, chosen):
        plans = pareto(source, points=points, **chosen)
    _tell([note for each in plans if isinstance(each, Plan) for note in each.notes])
    records = [plan_record(plan, str(model), None) for plan in plans if isinstance(plan, Plan)]
    if as_json:
        _print_json(records)
        return
    console = Console()
    console.print(text.frontier_table(records))
    console.print(
        f"Make one of them: memonger plan {model} --budget SIZE -o PLANNED.onnx", markup=False, soft_wrap=True
    )


@main.command(name="differentiate")
@options(
    MODEL,
    click.option(
        "-o", "--output", type=click.Path(path_type=Path), required=True, help="Write the training model here."
    ),
    *DIMS,
    *TRAINING,
    click.option("--wrt", multiple=True, metavar="PATTERN", help="Differentiate by these; default: the parameters."),
    click.option("--frozen", multiple=True, metavar="PATTERN", help="Leave these parameters as they are."),
)
def differentiate_command(model: Path, output: Path, **flags: Any) -> None:
    """Write MODEL and its backward pass as one model."""
    optimizer = _optimizer(flags)
    batch, dims = flags.pop("batch"), flags.pop("dims")
    turn = to_training_mode if flags.pop("train_mode") else load
    wrt = flags.pop("wrt") or None
    training_roles = differentiate(turn(model, batch=batch, dims=dims), optimizer=optimizer, wrt=wrt, **flags)
    save_model(training_roles.ir.clone(), output)
    click.echo(f"Wrote {output}: {training_roles.ir.graph.num_nodes()} nodes. Plan it: memonger plan {output}")


@main.command()
@MODEL
@AS_JSON
def inspect(model: Path, as_json: bool) -> None:
    """Show what a MODEL holds, and its plan if it has one."""
    loaded, name = load_as_is(model)
    planned = Plan.load(model) if KEY in loaded.metadata_props else None
    if as_json:
        record: dict[str, Any] = text.model_record(loaded, name)
        record["plan"] = None if planned is None else plan_record(planned, name, str(model))
        _print_json(record)
        return
    console = Console()
    console.print(text.model_table(loaded, name))
    console.print(text.operator_table(loaded))
    if planned is None:
        console.print(f"It has no plan: make one with memonger-plan {model} -o PLANNED.onnx", markup=False)
        return
    console.print(text.plan_table(plan_record(planned, name, str(model))))
    console.print(f"Live bytes up to the arena: [{text.memory_curve(planned)}]", markup=False)
    console.print(text.largest_table(planned))


@main.command()
@MODEL
@AS_JSON
def verify(model: Path, as_json: bool) -> None:
    """Check the plan in MODEL with an independent checker.

    The exit status is 0 if it holds.
    """
    planned = Plan.load(model)
    record = {
        "model": str(model), "verified": True, "values": len(planned.offsets), "steps": len(planned.graph.nodes),
        "arena_bytes": planned.arena_bytes, "lower_bound_bytes": planned.lower_bound_bytes,
    }  # fmt: skip
    if as_json:
        _print_json(record)
    else:
        click.echo(
            f"{model}: the plan holds. {record['values']} values over {record['steps']} steps in "
            f"{record['arena_bytes']} bytes (lower bound {record['lower_bound_bytes']})."
        )


def _refuse_planning_options(model: Path) -> None:
    """A plan that is there already isn't made anew."""
    context = click.get_current_context()
    for parameter in context.command.params:
        given = context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
        if given and parameter.name in ONLY_PLANNING:
            raise click.UsageError(f"{model} has a plan already, which {parameter.opts[0]} can't change.")


@main.command()
@options(
    MODEL,
    *PLANNING,
    click.option("--outputs", type=click.Path(path_type=Path), help="Write the outputs to this .npz."),
    click.option("--compare", is_flag=True, help="Compare outputs, latency and memory with stock onnxruntime."),
    click.option("--against", type=click.Path(path_type=Path), help="Model for the stock sessions; MODEL if left out."),
    click.option(
        "--cuda-graph",
        type=click.Choice(GRAPHS),
        default="auto",
        show_default=True,
        help="Capture runs on a CUDA device once and replay them; auto: where that can be.",
    ),
    click.option("--runs", type=click.IntRange(1), default=30, show_default=True, help="Timed runs of each session."),
    click.option("--seed", type=int, default=0, show_default=True, help="Seed of random inputs."),
    AS_JSON,
    QUIET,
)
def run(
    model: Path, outputs: Path | None, compare: bool, against: Path | None, runs: int, seed: int, as_json: bool,
    quiet: bool, cuda_graph: str, **flags: Any,
) -> None:  # fmt: skip
    """Run MODEL as planned; one without a plan is planned first.

    Inputs are random numbers unless --inputs names an .npz. With --compare each session runs in a process of its own.
    """
    from memonger.cli import compare as comparing

    loaded, _ = load_as_is(model)
    feeds = _read_inputs(flags["inputs"])
    with tempfile.TemporaryDirectory(prefix="memonger-") as scratch:
        planned = model
        if KEY in loaded.metadata_props:
            _refuse_planning_options(model)
        else:
            planned = Path(scratch) / "planned.onnx"
            mode = "training" if training_roles.KEY in loaded.metadata_props else "inference"
            _search(model, quiet, mode=mode, **flags).save(planned)
        del loaded
        settings = comparing.Settings(
            runs=runs, seed=seed, threads=flags["threads"], device=flags["device"], cuda_graph=cuda_graph
        )
        with _progress(quiet, f"Running {model.name}") as tell:
            if compare:
                stock = against if against is not None else model
                result = comparing.compare(planned, stock, feeds, settings, Path(scratch), tell)
            else:
                result = comparing.run_alone(planned, feeds, settings)
        if outputs is not None:
            comparing.save_outputs(result.outputs, outputs)
    if as_json:
        _print_json({**result.record, "model": str(model)})
        return
    console = Console()
    console.print(text.outputs_table(result.outputs))
    if result.rows:
        console.print(text.comparison_table(result.rows))
        console.print(text.COMPARISON_NOTE, markup=False, style="dim")
    if result.verdict:
        console.print(result.verdict, markup=False)


@main.command()
@click.argument("problem", type=click.Path(path_type=Path))
@click.option("--capacity", type=click.IntRange(1), metavar="BYTES", help="Fail if more is needed.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the offsets here.")
@AS_JSON
def pack(problem: Path, capacity: int | None, output: Path | None, as_json: bool) -> None:
    """Lay out the buffers of a CSV file.

    PROBLEM is in MiniMalloc's format, a header and one row a buffer: id,lower,upper,size.
    """
    buffers = read_problem(problem)
    layout = allocate(buffers.buffers)
    check_layout(buffers.buffers, layout)
    bound = lower_bound(buffers.buffers)
    if capacity is not None and layout.size > capacity:
        raise MemongerError(
            f"{problem} was packed into {layout.size} bytes, {layout.size - capacity} over the capacity of {capacity} "
            f"(lower bound {bound})."
        )
    if output is not None:
        write_solution(output, buffers, layout)
    record = {
        "problem": str(problem), "buffers": len(layout.offsets), "arena_bytes": layout.size,
        "lower_bound_bytes": bound, "output": None if output is None else str(output),
    }  # fmt: skip
    if as_json:
        _print_json(record)
    else:
        click.echo(f"{len(layout.offsets)} buffers in {layout.size} bytes (lower bound {bound}).")


exporting.register(main)


if __name__ == "__main__":
    main()
