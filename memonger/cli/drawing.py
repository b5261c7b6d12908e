"""The command ``draw``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from memonger.cli.output import print_result
from memonger.files import write_whole
from memonger.model.load import load
from memonger.report.drawing import DrawingSettings, drawing, rendered
from memonger.report.memory_count import planned_file

PICTURES = ("svg", "png", "pdf")
TEXTS = ("dot", "gv")


def draw(
    model: Path, output: Path | None, dot: bool, batch: int | None, dims: Mapping[str, int], as_json: bool, **flags: Any
) -> None:
    """Write a picture of a model or a plan."""
    form = _form(output, dot)
    if output is None and as_json:
        raise click.UsageError("--json is for a drawing in a file: name it with -o.")
    loaded = planned_file(model)
    if not isinstance(loaded, Path | str) and (batch is not None or dims):
        raise click.UsageError(f"{model} has a plan, for sizes that --batch and --dim can't change.")
    made = drawing(
        load(loaded, batch=batch, dims=dims) if isinstance(loaded, Path | str) else loaded, DrawingSettings(**flags)
    )
    if output is None:
        click.echo(made.text, nl=False)
        return
    content = made.text.encode() if form in TEXTS else rendered(made.text, form)
    write_whole(output, lambda target: target.write(content))
    record = {"model": str(model), "output": str(output), "format": form, "steps": made.steps, "drawn": made.drawn}
    lines = [f"Wrote {output}: {made.drawn} of {made.steps} steps."]
    if made.drawn < made.steps and not flags["around"]:
        lines.append("Draws those around the worst step: --max-nodes N draws more, --around NAME others.")
    print_result(as_json, record, *lines)


def _form(output: Path | None, dot: bool) -> str:
    form = "" if output is None else output.suffix.lstrip(".").lower()
    if dot or output is None:
        return "dot"
    if form not in (*PICTURES, *TEXTS):
        known = ", ".join(f".{each}" for each in (*PICTURES, *TEXTS))
        raise click.UsageError(f"-o {output}: a drawing's name ends in {known}; --dot writes DOT under any name.")
    return form
