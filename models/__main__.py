"""`python -m models NAME -o FILE`: write a reference network."""

import ast
import os
import sys
from pathlib import Path
from typing import Any

import click
import onnx_ir as ir

import models

_EXTERNAL_BYTES = 1 << 30
"""Models whose weights are larger keep them in FILE.data: one protobuf message holds less than 2 GiB."""


def _batch(_context: click.Context, _parameter: click.Parameter, text: str) -> int | None:
    if text == "any":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise click.BadParameter("give a positive number, or 'any' for a symbolic dimension")
    return int(text)


def _settings(_context: click.Context, _parameter: click.Parameter, texts: tuple[str, ...]) -> dict[str, object]:
    """Read NAME=VALUE pairs, values as Python literals."""
    settings: dict[str, object] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            settings[name] = ast.literal_eval(value)
        except (SyntaxError, ValueError) as error:
            raise click.BadParameter(f"{text!r} is not NAME=VALUE with a number, True, False, None or tuple") from error
    return settings


def _list(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if not wanted or context.resilient_parsing:
        return
    for name in models.NAMES:
        click.echo(f"{name}: " + ", ".join(f"{key}={value}" for key, value in models.options(name).items()))
    context.exit()


@click.command()
@click.argument("name")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="File; NAME.onnx if not given.")
@click.option("--batch", default="1", callback=_batch, metavar="N|any", help="Batch size, or a symbolic dimension.")
@click.option("--image", type=click.IntRange(min=1), help="Height and width of images.")
@click.option("--training", is_flag=True, help="Batch statistics, dropout, labels and a loss.")
@click.option("--seed", default=0, type=click.IntRange(min=0), help="Seed of weights and dropout masks.")
@click.option("--option", "settings", multiple=True, callback=_settings, metavar="NAME=VALUE", help="See --list.")
@click.option("--list", is_flag=True, is_eager=True, expose_value=False, callback=_list, help="Names and options.")
def main(name: str, output: Path | None, image: int | None, settings: dict[str, Any], **common: Any) -> None:
    """Write the reference network NAME as an ONNX model."""
    chosen = settings if image is None else {**settings, "image": image}
    try:
        model = models.build_ir(name, **common, **chosen)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    path = output or Path(f"{name}.onnx")
    count = models.parameter_count(model)
    ir.save(model, os.fspath(path), external_data=f"{path.name}.data" if 4 * count > _EXTERNAL_BYTES else None)
    click.echo(f"{path}: {count:,} parameters, {model.graph.num_nodes():,} nodes", err=True)


if __name__ == "__main__":
    sys.exit(main())
