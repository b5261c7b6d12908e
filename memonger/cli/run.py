"""The command ``run``."""

from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from memonger.cli import compare as comparing
from memonger.cli.differences import Tolerance
from memonger.cli.options import ONLY_PLANNING
from memonger.cli.output import Screen, print_json, progress_bar, read_inputs
from memonger.cli.planning import search_plan
from memonger.files import temporary_folder
from memonger.model.load import load_as_is
from memonger.plan_file import KEY
from memonger.report import runs as tables


def run(
    model: Path, outputs: Path | None, compare: bool, against: Path | None, as_json: bool, quiet: bool, **flags: Any
) -> None:
    """Run a model as planned, planning it first if it has no plan, and print what came out.

    The exit status is 1 if a comparison fails.
    """
    feeds = read_inputs(flags["inputs"])
    tolerance = Tolerance(flags.pop("atol"), flags.pop("rtol"))
    if not compare and not tolerance.is_exact:
        raise click.UsageError("--atol and --rtol are for --compare.")
    own = {name: flags.pop(name) for name in ("runs", "warm_up", "seed", "cuda_graph")}
    settings = comparing.Settings(tolerance=tolerance, threads=flags["threads"], device=flags["device"], **own)
    with temporary_folder() as folder:
        planned = _planned(model, folder, quiet, flags)
        with progress_bar(quiet, f"Running {model.name}") as tell:
            if compare:
                result = comparing.compare(planned, against or model, feeds, settings, folder, tell)
            else:
                result = comparing.run_alone(planned, feeds, settings)
        if outputs is not None:
            comparing.save_outputs(result.outputs, outputs)
    if as_json:
        print_json({**result.record, "model": str(model)})
    else:
        _print(result)
    if not result.passed:
        raise click.exceptions.Exit(1)


def _print(result: comparing.Result) -> None:
    console = Screen()
    console.print(tables.outputs_table(result.outputs))
    if result.rows:
        title = "Planned against stock onnxruntime"
        console.print(tables.comparison_table(result.rows, title, "run", "outputs"))
        console.print(tables.COMPARISON_NOTE, style="dim")
    for line in result.lines:
        console.print(line)


def _planned(model: Path, folder: Path, quiet: bool, flags: dict[str, Any]) -> Path:
    """The model itself if it has a plan, else a planned file in the folder."""
    loaded = load_as_is(model).ir
    if KEY in loaded.metadata_props:
        _refuse_planning_options(model)
        return model
    del loaded
    planned = folder / "planned.onnx"
    search_plan(model, quiet, **flags).save(planned)
    return planned


def _refuse_planning_options(model: Path) -> None:
    """A model that has a plan is not planned again: options of planning would have no effect."""
    context = click.get_current_context()
    for parameter in context.command.params:
        given = context.get_parameter_source(str(parameter.name)) is ParameterSource.COMMANDLINE
        if given and parameter.name in ONLY_PLANNING:
            raise click.UsageError(f"{model} has a plan already, which {parameter.opts[0]} can't change.")
