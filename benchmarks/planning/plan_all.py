"""Plans of a fleet: ``python -m benchmarks.planning.plan_all [--jobs N ...] [--effort N] [--only NAME] [-o FILE]``.

Training steps of ten networks, each for four batches and five budgets, 200 plans without a device and 40 that the
percentages are of. Every number of jobs begins without kept plans, and then runs
again with what it kept (``MEMONGER_CACHE``), refusals included. All runs must give the same rows.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import onnx

import memonger
import models
from benchmarks.machine import Table, keep, stamp
from memonger.planner.cache import FOLDER

_SMALL = {"image": 64, "width": 0.25}
NETWORKS: Mapping[str, Mapping[str, Any]] = {
    "resnet18": _SMALL, "resnet34": _SMALL, "mobilenet_v2": {"image": 64}, "googlenet": {"image": 64}, "unet": _SMALL,
    "densenet_bc100": {"blocks": (8, 8, 8)}, "resnet110": {"depth": 56}, "lstm": {"seq_len": 16},
    "vit": {"image": 64, "num_layers": 4},
    "gpt": {"num_layers": 4, "width": 128, "seq_len": 64, "vocabulary": 500},
}  # fmt: skip
BATCHES = (4, 8, 16, 32)
BUDGETS = ("100%", "90%", "80%", "70%", "60%")
COLUMNS = Table("jobs>4", "kept before>12", "seconds>9.1f", "ratio>8.2f", "plans>7", "no plan>9", "rows<8")


def timed(files: Sequence[Path], jobs: int, kept: Path, effort: int) -> tuple[float, list[tuple[Any, ...]]]:
    """Seconds of one run, from the call to the last planned file, and what the rows say."""
    os.environ[FOLDER] = str(kept)
    with TemporaryDirectory() as folder:
        begin = time.perf_counter()
        rows = memonger.plan_all(
            files, batches=BATCHES, budgets=BUDGETS, devices=["none"], jobs=jobs, output=Path(folder, "planned"),
            loss="loss", effort=effort,
        )  # fmt: skip
        seconds = time.perf_counter() - begin
    figures = ("name", "batch", "budget", "total_bytes", "arena_bytes", "overhead")
    return seconds, [tuple(getattr(row, figure) for figure in figures) for row in rows]


def lines(names: Sequence[str], jobs: Sequence[int], effort: int) -> Iterator[str]:
    """The table, as it is measured."""
    plans = len(names) * len(BATCHES) * len(BUDGETS)
    yield f"{plans} plans of training steps: small networks at batch 4, 8, 16 and 32, five budgets each, no device"
    yield from stamp(f"planning.plan_all --effort {effort}", ["numpy", "onnx-ir", "joblib"])
    yield "seconds: of the whole call, with planned files written; ratio: to the first line; no plan: budgets not held"
    yield "densenet_bc100 has three blocks of 8 layers here, resnet110 a depth of 56"
    yield from ("", COLUMNS.heading)
    first: tuple[float, list[tuple[Any, ...]]] | None = None
    with TemporaryDirectory() as folder:
        files = [Path(folder, f"{name}.onnx") for name in names]
        for path, name in zip(files, names, strict=True):
            onnx.save(models.build(name, batch=None, training=True, **NETWORKS[name]), path)
        for number in jobs:
            for kept in ("no", "yes"):
                seconds, rows = timed(files, number, Path(folder, f"kept{number}"), effort)
                first = first or (seconds, rows)
                failed = sum(row[3] is None for row in rows)
                same = "the same" if rows == first[1] else "others"
                yield COLUMNS.row(number, kept, seconds, seconds / first[0], len(rows), failed, same)


@click.command()
@click.option("--jobs", multiple=True, type=click.IntRange(1), default=(1, 2), show_default=True)
@click.option("--effort", type=click.IntRange(1), default=5_000, show_default=True, help="Of each search.")
@click.option("--only", multiple=True, type=click.Choice(list(NETWORKS)), help="May be repeated.")
@click.option("-o", "output", type=click.Path(path_type=Path), help="Write the table here.")
def main(jobs: tuple[int, ...], effort: int, only: tuple[str, ...], output: Path | None) -> None:
    """Print the table."""
    keep(lines(only or list(NETWORKS), jobs, effort), output)


if __name__ == "__main__":
    main()
