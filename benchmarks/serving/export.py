"""What serving stacks gain from an exported file alone: ``python -m benchmarks.serving.export`` writes export.txt.

For each network the original and what ``memonger export`` writes are loaded as each stack loads them, every one in a
process of its own. Memory is what a run takes over the loaded model (`memonger.runtime.process_memory`); Triton is its
ONNX Runtime backend's session options, read from the exported configuration. OpenVINO's columns need
``pip install 'memonger[openvino]'``.
"""

import importlib.util
import itertools
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import memonger
import models
from benchmarks.machine import MIB, Table, chosen, geometric_mean, keep, stamp
from benchmarks.networks import random_inputs
from memonger.runtime import process_memory
from memonger.runtime.program import inputs_of
from memonger.runtime.worker import Worker, WorkerError, say, serve_times
from memonger.serving import export
from tests.support.export_models import loader

NETWORKS = ("resnet50", "densenet121", "googlenet", "mobilenet_v2", "vgg16", "unet", "gpt", "vit")
OPTIONS: dict[str, dict[str, object]] = {"unet": {"image": 256}}
BATCH = 1
HAS_OPENVINO = importlib.util.find_spec("openvino") is not None
LEVELS = {0: "ORT_ENABLE_ALL", 2: "ORT_DISABLE_ALL"}  # Triton's numbers

COLUMNS = {
    "original": "the original, every option as it comes: what Triton, too, does with it",
    "lean": "the original, with the memory options that exports set: no arena",
    "file": "the exported file alone, every option as it comes",
    "ort": "target onnxruntime, its loader: planned order, nothing fused",
    "ort all": "the same at ORT_ENABLE_ALL: the order may be another",
    "triton": "target triton, from a portable plan",
    "triton+": "target triton, from a plan of level extended",
    "session": "target triton-python, ray, bentoml and kserve: the arena",
    "ov": "OpenVINO, the original",
    "ov file": "target openvino",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One network: bytes over the loaded model and seconds of a run by column; what was predicted, by column; the share
    of neighbouring operators that OpenVINO runs in the planned order."""

    network: str
    peaks: dict[str, int]
    seconds: dict[str, float]
    predicted: dict[str, int]
    kept: float | None


def stock_session(model: Path, **settings: Any) -> Callable[[Any], object]:
    """Stock onnxruntime with some session options."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    for key, value in settings.items():
        setattr(options, key, value)
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return lambda feeds: session.run(None, feeds)


def triton_session(folder: Path) -> Callable[[Any], object]:
    """Stock onnxruntime with the options that Triton's backend reads from an exported configuration."""
    import onnxruntime

    (config,) = folder.glob("*/config.pbtxt")
    text = config.read_text()
    found = dict(re.findall(r'key: "([^"]+)"\s+value \{\s+string_value: "([^"]+)"', text))
    level = re.search(r"level: (\d)", text)
    return stock_session(
        config.parent / "1" / "model.onnx",
        graph_optimization_level=getattr(onnxruntime.GraphOptimizationLevel, LEVELS[int(level[1]) if level else 0]),
        enable_cpu_mem_arena=found["enable_mem_arena"] == "1",
        enable_mem_pattern=found["enable_mem_pattern"] == "1",
    )


def openvino_model(model: Path) -> Callable[[Any], object]:
    """OpenVINO on a model as it comes, in the model's precision."""
    import openvino

    compiled = openvino.Core().compile_model(model, "CPU", {"NUM_STREAMS": "1", "INFERENCE_PRECISION_HINT": "f32"})
    return lambda feeds: compiled(feeds)


def runner(column: str, folder: Path) -> Callable[[Any], object]:
    """What runs the model of a column."""
    original = folder / "original.onnx"
    match column:
        case "original":
            return stock_session(original)
        case "lean":
            return stock_session(original, enable_cpu_mem_arena=False)
        case "file":
            return stock_session(folder / "ort" / "model.planned.onnx")
        case "ort":
            session = loader(folder / "ort").session()
            return lambda feeds: session.run(None, feeds)
        case "ort all":
            fused = loader(folder / "ort").session("ORT_ENABLE_ALL")
            return lambda feeds: fused.run(None, feeds)
        case "triton" | "triton+":
            return triton_session(folder / column)
        case "session":
            planned = memonger.Session(folder / "planned.onnx", check_order=False)
            return lambda feeds: planned.run(feeds, copy=False)
        case "ov":
            return openvino_model(original)
    compiled = loader(folder / "ov file").compiled()
    return lambda feeds: compiled(feeds)


def work(column: str, folder: Path) -> None:
    """Measure one column in this process: say the peak, then the times that are asked for."""
    with np.load(folder / "inputs.npz") as archive:
        feeds = {name: archive[name] for name in archive.files}
    run = runner(column, folder)
    baseline = process_memory.settle()
    run(feeds)
    say({"peak": process_memory.peak_over(baseline, lambda: run(feeds))})
    serve_times(lambda: run(feeds))


def measured(column: str, folder: Path) -> tuple[int, float]:
    """Peak and seconds of one column, in a process of its own."""
    with Worker("benchmarks.serving.export", ["--work", column, str(folder)], folder / "work.err") as worker:
        try:
            return worker.read()["peak"], min(worker.times(3))
        except WorkerError as error:
            raise SystemExit(f"{column}: {error}") from None


def measure(network: str, folder: Path) -> Row:
    """Plan, export and measure one network."""
    model = models.build(network, batch=BATCH, **OPTIONS.get(network, {}))
    onnx.save(model, folder / "original.onnx")
    portable = memonger.search_plan(model, mode="inference", device="none")
    extended = memonger.search_plan(model, mode="inference", device="cpu", level="extended")
    device = memonger.search_plan(model, mode="inference", device="cpu")
    np.savez(folder / "inputs.npz", **random_inputs(inputs_of(portable.model.graph)))
    device.save(folder / "planned.onnx")
    exports = {
        "ort": export(portable, "onnxruntime", folder / "ort", name="m"),
        "triton": export(portable, "triton", folder / "triton", name="m"),
        "triton+": export(extended, "triton", folder / "triton+", name="m"),
        "session": export(device, "triton-python", folder / "session", name="m"),
        "ov file": export(portable, "openvino", folder / "ov file", name="m"),
    }
    found = {column: measured(column, folder) for column in COLUMNS if HAS_OPENVINO or not column.startswith("ov")}
    return Row(
        network=network,
        peaks={column: peak for column, (peak, _) in found.items()},
        seconds={column: seconds for column, (_, seconds) in found.items()},
        predicted={c: e.estimate.activations + e.estimate.workspace for c, e in exports.items() if c != "ov file"},
        kept=order_kept(folder / "ov file") if HAS_OPENVINO else None,
    )


def order_kept(folder: Path) -> float:
    """The share of operators that OpenVINO runs after one that the plan, too, runs earlier."""
    planned = [node.name for node in onnx.load(folder / "model.onnx", load_external_data=False).graph.node]
    place = {name: index for index, name in enumerate(planned)}
    operators = []
    for operator in loader(folder).compiled().get_runtime_model().get_ordered_ops():
        info = operator.get_rt_info()
        names = [n for n in str(info["originalLayersNames"].value).split(",") if n in place] if info else []
        if names:
            operators.append((int(str(info["execOrder"].value)), max(place[name] for name in names)))
    run = [at for _, at in sorted(operators)]
    return sum(a < b for a, b in itertools.pairwise(run)) / max(1, len(run) - 1)


def table(rows: Sequence[Row]) -> list[str]:
    """Each column's memory; in the geometric mean its ratio to the original's, and to what was predicted."""
    columns = [column for column in COLUMNS if column in rows[0].peaks]
    cells = Table("MiB over the loaded model<26", *(f"{column}>10.2f" for column in columns), "kept>7.0%")
    ratios = Table("<26", *(f"{column}>10.3f" for column in columns))
    predicted = [
        geometric_mean(r.peaks[c] / r.predicted[c] for r in rows) if c in rows[0].predicted else None for c in columns
    ]
    lines = [
        cells.heading,
        *(cells.row(row.network, *(row.peaks[c] / MIB for c in columns), row.kept) for row in rows),
        ratios.row("memory ÷ original", *(_over_original([row.peaks for row in rows], c) for c in columns)),
        ratios.row("time ÷ original", *(_over_original([row.seconds for row in rows], c) for c in columns)),
        ratios.row("memory ÷ predicted", *predicted),
        "",
        *(f"{column:10}{COLUMNS[column]}" for column in columns),
    ]
    if rows[0].kept is not None:
        lines.append(
            f"{'kept':10}OpenVINO's operators that run after one the plan, too, runs earlier; by chance: docs/EXPORT.md"
        )
    return lines


def _over_original(figures: Sequence[Mapping[str, float]], column: str) -> float:
    """The geometric mean of a column's figures over those of the original on the same runtime."""
    base = "ov" if column.startswith("ov") else "original"
    return geometric_mean(of[column] / of[base] for of in figures)


def main() -> None:
    """Measure networks; writes the table if it is all of them."""
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], Path(sys.argv[3]))
        return
    networks, whole = chosen(__doc__, NETWORKS)
    rows = []
    for network in networks:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(network, Path(folder)))
        print(network, {c: round(p / MIB, 2) for c, p in rows[-1].peaks.items()}, rows[-1].kept, flush=True)
    packages = ["onnxruntime", *(["openvino"] if HAS_OPENVINO else [])]
    lines = [f"Batch {BATCH}", *stamp("serving.export", packages), "", *table(rows)]
    keep(lines, Path(__file__).with_suffix(".txt") if whole else None)


if __name__ == "__main__":
    main()
