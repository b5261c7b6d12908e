"""The command ``export``."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from memonger.cli.output import print_notes, print_result, progress_bar
from memonger.cli.planning import options_of, refuse_planning_options
from memonger.serving import export as write
from memonger.serving import form
from memonger.serving.package import describe
from memonger.units import in_full


def export(
    models: tuple[Path, ...], target: str, output: Path, name: str | None, instances: int, force: bool,
    as_json: bool, quiet: bool, batches: tuple[int, ...], arenas: int | None, limit: int | None, wait: float | None,
    **flags: Any,
) -> None:  # fmt: skip
    """Write what a serving stack loads, of a model without a plan after planning it."""
    options = None
    with progress_bar(quiet, f"Exporting {models[0].name}") as report_progress:
        if models[0].is_dir() or form.has_plan(models[0]):
            refuse_planning_options(models[0], "device", "batches", "threads", "inputs")
        else:
            options = replace(options_of(flags, models[0]), progress=report_progress)
        exported = write(
            models, target, output, name=name, instances=instances, force=force, batches=batches, options=options,
            arenas=arenas, limit=limit, wait=wait,
        )  # fmt: skip
    print_notes(exported.notes)
    estimate = exported.estimate
    record = {  # sizes are bytes
        "target": exported.target, "output": str(exported.folder), "name": exported.name,
        "models": list(exported.models), "instances": estimate.instances, **estimate.record(),
        "files": list(exported.files), "notes": list(exported.notes),
    }  # fmt: skip
    together = [f"Models in one arena: {', '.join(exported.models)}."] if len(exported.models) > 1 else []
    print_result(
        as_json, record,
        f"Wrote {output} for {target}: {', '.join(exported.files)}.", *together,
        f"Predicted for one instance: {in_full(estimate.instance_bytes)} ({describe(estimate)}).",
        f"In all, {estimate.instances}: {in_full(estimate.total_bytes)}.",
    )  # fmt: skip
