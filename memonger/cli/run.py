"""The command ``run``."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from memonger.cli import compare as comparing
from memonger.cli import train as training
from memonger.cli.differences import Tolerance
from memonger.cli.output import Screen, print_json, print_lines, print_notes, progress_bar, read_inputs
from memonger.cli.planning import keeping, refuse_planning_options, search_plan
from memonger.cli.settings import Settings
from memonger.files import temporary_folder
from memonger.ir import training_roles
from memonger.model.load import load_as_is
from memonger.plan import Plan
from memonger.plan_file import is_planned
from memonger.report import runs as tables
from memonger.report.makeup import makeup


def run(
    model: Path,
    outputs: Path | None,
    compare: bool,
    against: Path | None,
    steps: int,
    as_json: bool,
    quiet: bool,
    **flags: Any,
) -> None:
    """Run a model as planned, planning it first if it has no plan, and print what came out.

    The exit status is 1 if a comparison fails.
    """
    feeds = read_inputs(flags["inputs"], model)
    tolerance = Tolerance(flags.pop("atol"), flags.pop("rtol"))
    if not compare and not tolerance.is_exact:
        raise click.UsageError("--atol and --rtol are for --compare: add that, or leave them out.")
    own = {name: flags.pop(name) for name in ("runs", "warm_up", "seed", "cuda_graph", "pad")}
    if own["pad"] and feeds is None:
        raise click.UsageError("--pad is for --inputs that have fewer rows than the plan's batch.")
    if own["pad"]:
        flags["inputs"] = None  # no shapes to plan for
    settings = Settings(tolerance=tolerance, threads=flags["threads"], device=flags["device"], **own)
    with temporary_folder() as folder:
        planned = _planned(model, folder, quiet, flags)
        with progress_bar(quiet, f"Running {model.name}") as report_progress:
            plan = Plan.load(planned)
            stock = (against or comparing.stock_model(model, planned, plan, folder)) if compare else None
            made_of = makeup(plan) if planned != model else None
            if training.is_trained(plan):
                result = training.train(plan, planned, stock, feeds, settings, steps, folder, report_progress)
            elif stock is not None:
                result = comparing.compare(plan, planned, stock, feeds, settings, folder, report_progress)
            else:
                result = comparing.run_alone(plan, feeds, settings)
        if outputs is not None:
            comparing.save_outputs(result.outputs if result.saved is None else result.saved, outputs)
    if as_json:
        print_json({**result.record, "model": str(model), **(asdict(made_of) if made_of is not None else {})})
    else:
        console, trains = Screen(), result.record.get("mode") == "training"
        if result.outputs:
            console.print(tables.outputs_table(result.outputs))
        if result.rows:
            unit, compared, loaded = ("step", "results", "session") if trains else ("run", "outputs", "model")
            console.print(tables.comparison_table(result.rows, unit, compared))
            console.print(tables.comparison_note(unit, loaded), style="dim")
        for line in result.lines:
            console.print(line)
        if made_of is not None:
            print_lines(console, made_of.lines)
            console.print(f"Keep the plan: {keeping(model)}", soft_wrap=True)
        print_notes(() if quiet else result.notes)
    if not result.passed:
        raise click.exceptions.Exit(1)


def _planned(model: Path, folder: Path, quiet: bool, flags: dict[str, Any]) -> Path:
    """The model itself if it has a plan, else a planned file in the folder."""
    loaded = load_as_is(model).ir
    if is_planned(loaded):
        refuse_planning_options(model)
        return model
    if training_roles.KEY in loaded.metadata_props:
        flags["inputs"] = None  # what a step is given isn't all that a calibrating run takes: state is missing
    del loaded
    planned = folder / "planned.onnx"
    search_plan(model, quiet, **flags).save(planned)
    return planned
