"""command: ``memonger export``."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from memonger.export import TARGETS, Exported, export
from memonger.export.package import describe
from memonger.units import in_full


def record_of(exported: Exported) -> dict[str, Any]:
    """What ``--json`` prints; sizes are bytes."""
    estimate = exported.estimate
    return {
        "target": exported.target,
        "output": str(exported.folder),
        "name": exported.name,
        "instances": estimate.instances,
        "parameter_bytes": estimate.parameters,
        "input_bytes": estimate.inputs,
        "activation_bytes": estimate.activations,
        "scratch_bytes": estimate.scratch,
        "instance_bytes": estimate.instance_bytes,
        "total_bytes": estimate.total_bytes,
        "files": list(exported.files),
        "notes": list(exported.notes),
    }


def register(group: click.Group) -> Callable[..., None]:
    """Add the command to a group."""

    @group.command(name="export")
    @click.argument("planned", type=click.Path(path_type=Path), nargs=-1, required=True)
    @click.option("--target", required=True, metavar="NAME", help=f"One of {', '.join(TARGETS)}.")
    @click.option("--output", "-o", type=click.Path(path_type=Path), required=True, help="The folder to make.")
    @click.option("--name", help="The model's name for the server; left out: the file's.")
    @click.option(
        "--instances",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        metavar="N",
        help="Requests served at a time, each in memory of its own.",
    )
    @click.option("--force", is_flag=True, help="Replace an earlier export.")
    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
    def command(
        planned: tuple[Path, ...], target: str, output: Path, name: str | None, instances: int, force: bool,
        as_json: bool,
    ) -> None:  # fmt: skip
        """Write what a serving stack loads from PLANNED files.

        Several are plans of one model for different batches.
        """
        exported = export(planned, target, output, name=name, instances=instances, force=force)
        for note in exported.notes:
            click.echo(f"memonger: note: {note}", err=True)
        if as_json:
            click.echo(json.dumps(record_of(exported)))
            return
        estimate = exported.estimate
        click.echo(f"Wrote {output} for {target}: {', '.join(exported.files)}.")
        click.echo(f"Predicted for one instance: {in_full(estimate.instance_bytes)} ({describe(estimate)}).")
        click.echo(f"In all, {estimate.instances}: {in_full(estimate.total_bytes)}.")

    return command
