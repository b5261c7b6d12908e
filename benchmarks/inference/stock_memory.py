"""What stock onnxruntime is expected to take beside what it takes: ``python -m benchmarks.inference.stock_memory``.

Writes stock_memory.txt. Expected is `Plan.stock_bytes` less weights and inputs; measured is the second run of a stock
session with default options in a process of its own, over the loaded model (`memonger.runtime.process_memory`). Models
have the sizes that were planned for. Training models are whole steps, updates of SGD with momentum among their outputs,
run without onnxruntime's optimizer, as they are planned.
"""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

import memonger
import models
from benchmarks.machine import MIB, Table, chosen, keep, stamp
from memonger.ir.save import save_model
from memonger.runtime.feeds import random_feeds
from memonger.runtime.measure import MeasuredSession, RunJob
from memonger.runtime.program import inputs_of
from models.torch_exports import EXPORTS, export
from tests.support.networks import LIGHT, light

NETWORKS = ("resnet50", "densenet121", "googlenet", "mobilenet_v2", "vgg16", "unet", "gpt", "vit")
BATCHES = (1, 16)
LIGHTS = sorted(path.stem.removeprefix("light_") for path in LIGHT.glob("light_*.onnx"))
TRAINING = {"resnet18": 4, "densenet_bc100": 8, "unet": 1, "gpt": 8, "vit": 16}
TABLE = Table(
    "network<19", "what<11", "batch>6", "weights>9.1f", "plan>9.2f", "expected>10.2f", "measured>10.2f", "ratio>8.3f"
)  # fmt: skip
WITHIN = 0.15


def cases() -> Iterator[tuple[str, str, int]]:
    """Network, where it is from or what it is planned for, and batch."""
    for name in (*NETWORKS, *EXPORTS):
        yield from ((name, "inference", batch) for batch in BATCHES)
    yield from ((name, "onnx light", 1) for name in LIGHTS)
    yield from ((name, "training", batch) for name, batch in TRAINING.items())


def loaded(name: str, kind: str, batch: int, folder: Path) -> memonger.Model:
    """The network with its sizes."""
    if kind == "onnx light":
        return memonger.load(light(name))
    if kind == "training":
        model = memonger.load(models.build(name, batch=batch, training=True))
        return memonger.differentiate(model, loss="loss", optimizer=memonger.SGD(lr=0.1, momentum=0.9))
    if name in EXPORTS:
        export(name, folder / "given.onnx")
        return memonger.load(folder / "given.onnx", batch=batch)
    return memonger.load(models.build(name, batch=None, **({"image": 256} if name == "unet" else {})), batch=batch)


def measure(model: memonger.Model, training: bool, folder: Path) -> tuple[memonger.Plan, int]:
    """The plan, and the bytes that stock onnxruntime takes over the loaded model."""
    mode, strategy = ("training", "none") if training else ("inference", None)
    plan = memonger.search_plan(model, device="cpu", mode=mode, strategy=strategy)
    save_model(model.ir.clone(), folder / "model.onnx")
    np.savez(folder / "x.npz", **random_feeds(inputs_of(plan.model.graph)))
    level = "ORT_DISABLE_ALL" if training else "ORT_ENABLE_ALL"
    job = RunJob(str(folder / "model.onnx"), str(folder / "x.npz"), str(folder / "y.npz"), False, level)
    with MeasuredSession(job, folder, "stock") as worker:
        return plan, worker.loaded["peak_bytes"] or 0


def lines(only: Sequence[str]) -> Iterator[str]:
    """The table as it grows."""
    yield "What stock onnxruntime is expected to take on the CPU, beside weights and inputs, and what it takes: MiB"
    yield from stamp("inference.stock_memory", ("onnxruntime", "onnx", "numpy", "torch"))
    yield "plan: arena and workspace of memonger's plan; ratio: expected ÷ measured"
    yield ""
    yield TABLE.heading
    ratios: list[float] = []
    for name, kind, batch in cases():
        if name not in only and kind not in only:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            model = loaded(name, kind, batch, Path(scratch))
            plan, taken = measure(model, kind == "training", Path(scratch))
        assert plan.stock_bytes is not None
        assert plan.predicted_bytes is not None
        expected = plan.stock_bytes - plan.parameter_bytes - plan.input_bytes
        sizes = (size / MIB for size in (plan.parameter_bytes, plan.predicted_bytes, expected, taken))
        ratios.append(expected / taken)
        yield TABLE.row(name, kind, batch, *sizes, ratios[-1])
    near = sum(abs(ratio - 1) <= WITHIN for ratio in ratios)
    yield ""
    yield "torch pyramid has several outputs: onnxruntime's optimizer puts their branches into another order each time"
    yield f"{near} of {len(ratios)} within {WITHIN:.0%}; the ratio lies between {min(ratios):.3f} and {max(ratios):.3f}"


def main() -> None:
    """Measure everything and keep the table, or what is named."""
    known = dict.fromkeys(word for name, kind, _ in cases() for word in (name, kind))
    names, whole = chosen(__doc__, known)
    keep(lines(names), Path(__file__).with_suffix(".txt") if whole else None)


if __name__ == "__main__":
    main()
