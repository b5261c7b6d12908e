"""Single images in strips of rows, beside plans without: the table of ``benchmarks.chunks --strips``."""

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx

import models
from benchmarks.chunks.budgets import Race
from benchmarks.chunks.plans import Planner, Wish
from benchmarks.machine import MIB, Record, Table, progress, stamp
from memonger.runtime.worker import WorkerError

NETWORKS = ("mobilenet_v2", "resnet50", "densenet121", "googlenet", "unet")
PIXELS = (224, 512)
COUNTS = (2, 4, 8, 16)
COLUMNS = Table(
    "network<13", "pixels>6", "strips>7", "arena>8.2f", "workspace>10.2f", "ratio>7.3f", "FLOPs>+8.1%", "run MiB>9.1f",
    "ms>8.1f", "time>7.3f", "bits<7", "plan s>7.1f", "nodes>6", "bands<10",
)  # fmt: skip


def measure_strips(record: Record, threads: int) -> None:
    """Measure the networks and sizes of images that aren't there, and print the lines of each."""
    names = [f"{name} {pixels}" for name in NETWORKS for pixels in PIXELS]
    for row_name in progress(names, record, record.rows.__contains__):
        name, pixels = row_name.split()
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            onnx.save(models.build(name, batch=None, image=int(pixels)), folder / "model.onnx")
            record.add(row_name, {"lines": list(_lines(name, int(pixels), threads, folder))})
        print(*record.rows[row_name]["lines"], sep="\n", flush=True)


def strip_lines(record: Record, threads: int) -> Iterator[str]:
    """The table of what was measured."""
    yield "Inference of a single image in strips of rows (chunks='strips:N')"
    yield from stamp("chunks --strips", ("onnxruntime", "onnx", "numpy"))
    yield "arena, workspace: MiB, planned; ratio: both, over the plan without strips; FLOPs: what is computed more;"
    yield "run: MiB that a run takes over the loaded model; time: over that plan's, both taking turns,"
    yield f"{threads} thread; bits: against that plan; bands: nodes of each."
    yield from ("", COLUMNS.heading)
    for row in record.rows.values():
        yield from row["lines"]


def _lines(name: str, pixels: int, threads: int, folder: Path) -> Iterator[str]:
    model = str(folder / "model.onnx")
    with Planner(folder) as planner, Race(folder, threads) as race:
        plain = planner.plan(Wish(model, 1, threads, "off", keep=str(folder / "plain.onnx")))
        yield _line(name, pixels, "off", plain, plain, race.against("plain"))
        for count in COUNTS:
            try:
                plan = planner.plan(Wish(model, 1, threads, f"strips:{count}", keep=str(folder / "way.onnx")))
                yield _line(name, pixels, str(count), plan, plain, race.against("way"))
            except WorkerError as error:
                yield f"{name:<13}{pixels:>6}{count:>7}  {error}"


def _line(
    name: str, pixels: int, strips: str, plan: Mapping[str, Any], plain: Mapping[str, Any], run: Mapping[str, Any]
) -> str:
    return COLUMNS.row(
        name, pixels, strips, plan["arena"] / MIB, (plan["peak"] - plan["arena"]) / MIB, plan["peak"] / plain["peak"],
        plan["flops"] / plain["flops"] - 1, run["peak"] / MIB, run["seconds"] * 1e3, run["ratio"], run["bits"],
        plan["seconds"], plan["nodes"], ", ".join(str(band["nodes"]) for band in plan["chunks"]),
    )  # fmt: skip
