"""Inference side by side with stock onnxruntime: ``python -m benchmarks.inference`` writes inference.txt, .json, .png.

Every session runs in a process of its own; the sessions of a row take turns, so that latencies are compared within
minutes of each other. Memory is what a run takes over the loaded model (`memonger.runtime.process_memory`).
"""

import json
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import onnx

import memonger
import models
from benchmarks.exports import EXPORTS, export
from benchmarks.machine import HERE, MIB, Table, geometric_mean, pyplot, stamp
from memonger.cli.compare import symbolic_sizes
from memonger.cli.differences import difference
from memonger.cli.measure import MeasuredSession, RunJob, take_turns
from memonger.devices import CPU
from memonger.runtime import ort
from memonger.runtime.feeds import inputs_of

NETWORKS = ("resnet50", "densenet121", "googlenet", "mobilenet_v2", "vgg16", "unet", "gpt", "vit")
IMAGE = {"unet": 256}
BATCHES = (1, 16)
ROUNDS, RUNS_SECONDS = 5, 0.6  # turns a session takes, and about how long each is


@dataclass(frozen=True, slots=True)
class Row:
    """One network at one batch; bytes and seconds. ``bound_ratio`` is arena over lower bound; ``predicted`` is what the
    plan says a run takes."""

    network: str
    batch: int
    arena: int
    predicted: int
    bound_ratio: float
    equal: bool
    seconds: dict[str, float]
    peak: dict[str, int]


KINDS = {
    "default": {},
    "no arena": {"arena": False},
    "no pattern": {"pattern": False},
}


def write(name: str, path: Path) -> None:
    """Write a network with a symbolic batch."""
    if name in EXPORTS:
        export(name, path)
        return
    options = {"image": IMAGE[name]} if name in IMAGE else {}
    onnx.save(models.build(name, batch=None, **options), path)


def random_inputs(plan: memonger.Plan, seed: int) -> dict[str, np.ndarray]:
    """Normal numbers, or tokens below 1000."""
    rng, feeds = np.random.default_rng(seed), {}
    for value in inputs_of(plan.model.graph):
        assert value.shape is not None
        assert value.dtype is not None
        floating = value.dtype.is_floating_point()
        array = rng.standard_normal(value.shape) if floating else rng.integers(0, 1000, value.shape)
        feeds[value.name] = array.astype(value.dtype.numpy())
    return feeds


def measure(name: str, model: Path, batch: int, folder: Path) -> Row:
    """Plan and measure one network at one batch."""
    plan = memonger.search_plan(model, batch=batch, device="cpu", mode="inference")
    planned, inputs = folder / "planned.onnx", folder / "inputs.npz"
    plan.save(planned)
    feeds = random_inputs(plan, seed=0)
    memonger.Session(plan).run(feeds)  # checks the executed order
    np.savez(inputs, **feeds)
    jobs = {"planned": RunJob(str(planned), str(inputs), str(folder / "planned.npz"), True)}
    for kind, options in KINDS.items():
        jobs[kind] = RunJob(str(model), str(inputs), str(folder / f"{kind}.npz"), False, **options)
    with ExitStack() as stack:
        workers = {kind: stack.enter_context(MeasuredSession(job, folder, kind)) for kind, job in jobs.items()}
        take_turns(list(workers.values()), 1, 2)
        once = min(statistics.median(worker.seconds) for worker in workers.values())
        runs = max(1, math.ceil(RUNS_SECONDS / once))
        take_turns(list(workers.values()), ROUNDS, runs)
        results = {kind: worker.result() for kind, worker in workers.items()}
    outputs = {"planned": dict(np.load(folder / "planned.npz")), "stock": stock_outputs(model, inputs)}
    return Row(
        network=name,
        batch=batch,
        arena=plan.arena_bytes,
        predicted=plan.predicted_bytes or plan.arena_bytes,
        bound_ratio=plan.arena_bytes / plan.lower_bound_bytes,
        equal=difference(outputs["planned"], outputs["stock"]).bitwise_equal,
        seconds={kind: result.latency_seconds for kind, result in results.items()},
        peak={kind: result.peak_bytes or 0 for kind, result in results.items()},
    )


def stock_outputs(model: Path, inputs: Path) -> dict[str, np.ndarray]:
    """Outputs of stock onnxruntime at the plan's level, told the same shapes: else its optimizer fuses less."""
    feeds = dict(np.load(inputs))
    options = ort.SessionSettings("ORT_ENABLE_ALL", dims=symbolic_sizes(model, feeds))
    session = ort.make_session(model, CPU, options)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


COLUMNS = Table(
    "network<16", "batch>6", "default>9.1f", "no arena>9.1f", "no patt.>9.1f", "planned>9.1f", "÷default>9.3f",
    "predicted>10.1f", "error>+8.1%", "arena÷bound>12.4f", "ms>9.1f", "time>7.3f", "÷no arena>10.3f", "outputs<6",
)  # fmt: skip


def line(row: Row) -> str:
    """A line of the table."""
    peak, seconds = {kind: size / MIB for kind, size in row.peak.items()}, row.seconds
    ratio, predicted = peak["planned"] / peak["default"], row.predicted / MIB
    return COLUMNS.row(
        row.network, row.batch, peak["default"], peak["no arena"], peak["no pattern"], peak["planned"], ratio,
        predicted, peak["planned"] / predicted - 1, row.bound_ratio, seconds["planned"] * 1e3,
        seconds["planned"] / seconds["default"], seconds["planned"] / seconds["no arena"],
        "equal" if row.equal else "DIFFER",
    )  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    """The rows as text, with geometric means below."""
    memory = geometric_mean(row.peak["planned"] / row.peak["default"] for row in rows)
    time = geometric_mean(row.seconds["planned"] / row.seconds["default"] for row in rows)
    lines = [
        "Inference on the CPU: what a run takes over the loaded model in MiB, and latency, planned against stock",
        *stamp("inference", ("onnxruntime", "onnx", "numpy", "torch")),
        "",
        "default: stock onnxruntime as it comes; no arena: enable_cpu_mem_arena off; no patt.: enable_mem_pattern off",
        "predicted: arena + workspace, from the plan; error: measured over predicted; time: planned over default",
        "outputs: planned against stock onnxruntime told the same shapes, at the same optimization level, bit for bit",
        "",
        COLUMNS.heading,
        *map(line, rows),
        "",
        f"geometric means: memory {memory:.3f}, time {time:.3f} of stock onnxruntime's default",
    ]
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Memory of each kind of session as a share of stock's default, the prediction as a mark."""
    figure, axes = pyplot().subplots(2, 1, figsize=(11, 8), layout="constrained", sharey=True)
    for axis, batch in zip(axes, BATCHES, strict=True):
        chosen = [row for row in rows if row.batch == batch]
        places = np.arange(len(chosen))
        for index, kind in enumerate(("default", "no pattern", "no arena", "planned")):
            heights = [row.peak[kind] / row.peak["default"] for row in chosen]
            axis.bar(places + (index - 1.5) * 0.2, heights, 0.2, label=kind if kind == "planned" else f"stock, {kind}")
        predicted = [row.predicted / row.peak["default"] for row in chosen]
        axis.plot(places + 0.3, predicted, "k_", markersize=11, markeredgewidth=2, label="predicted")
        axis.set_xticks(places, [_label(row) for row in chosen])
        axis.tick_params("x", labelsize=8)
        axis.set_title(f"batch {batch}: memory a run takes over the loaded model, stock's default = 1")
        axis.grid(axis="y", alpha=0.3)
        axis.set_axisbelow(True)
    axes[0].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    figure.savefig(path, dpi=100)


def _label(row: Row) -> str:
    size = row.peak["default"] / MIB
    return f"{row.network.replace(' ', chr(10))}\n{size:.0f} MiB" if size >= 10 else f"{row.network}\n{size:.1f} MiB"


def main(only: Sequence[str]) -> None:
    """Measure everything, or the networks named, and keep table, figures and plot."""
    rows = []
    for name in only or (*NETWORKS, *EXPORTS):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            write(name, folder / "model.onnx")
            for batch in BATCHES:
                rows.append(measure(name, folder / "model.onnx", batch, folder))
                print(line(rows[-1]), file=sys.stderr)
    text = table(rows)
    print(text, end="")
    if not only:
        (HERE / "inference.txt").write_text(text)
        (HERE / "inference.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        plot(rows, HERE / "inference.png")


if __name__ == "__main__":
    main(sys.argv[1:])
