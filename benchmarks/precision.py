"""Mixed precision beside float32: ``python -m benchmarks.precision [-o FILE]``.

Three tables. Memory: the arena that a training step needs by its plan, in the portable form and in the CPU's.
Training: losses of the same batches with the same masks, the digits of scikit-learn and a small GPT on the bytes of
this project's documentation. Time: steps in processes of their own that take turns.
"""

import argparse
import importlib.util
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import memonger
import models
from benchmarks.machine import HERE, MIB, Table, keep, stamp
from memonger.cli.measure import take_turns
from memonger.cli.measure_steps import Job, MeasuredTrainer
from memonger.cli.train import random_batch

TABLES = ("memory", "training", "time")
PRECISIONS = (None, "float16", "bfloat16")
NETWORKS = {
    "digits": (64, {}),
    "resnet50": (4, {"image": 128}),
    "densenet_bc100": (4, {}),
    "unet": (1, {"image": 128}),
    "vit": (8, {}),
    "gpt": (8, {}),
}
CONVOLUTIONS = ("unet",)
ROUNDS, RUNS = 5, 4
STEPS = 300  # of the GPT
LAST = 20  # steps whose mean loss is compared
BATCH, LENGTH = 16, 64
MEMORY = Table("network<16", "batch>6", "form<9", "float32>9.1f", "float16>9.1f", "/ f32>7.2f",
               "bfloat16>9.1f", "/ f32>7.2f")  # fmt: skip
TRAINING = Table(
    "training<10", "type<9", "steps>6", "last loss>10.5f", "/ f32>8.4f", "test>9.4f", "left out>9", "scale>9.0f"
)
TIME = Table("network<16", "type<9", "ms a step>10.1f", "/ f32>7.2f", "arena MiB>10.1f", "peak MiB>9.1f")


def digits() -> Any:
    """The module of the example."""
    spec = importlib.util.spec_from_file_location("digits", HERE.parent / "examples" / "digits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def forward(name: str) -> tuple[onnx.ModelProto, int]:
    """A network in inference form, and the batch."""
    batch, options = NETWORKS[name]
    if name == "digits":
        return digits().network(), batch
    return models.build(name, batch=None, seed=0, training=False, **options), batch


def plan(name: str, precision: str | None, device: str, threads: int = 0) -> memonger.Plan:
    """The plan of a training step with AdamW, nothing recomputed."""
    network, batch = forward(name)
    loss = memonger.SoftmaxCrossEntropy(axis=-1 if name == "gpt" else 1)
    return memonger.search_plan(
        memonger.to_training_mode(network, batch=batch), loss=loss, optimizer=memonger.AdamW(), precision=precision,
        device=device, strategy="none", chunks="off", threads=threads,
    )  # fmt: skip


def memory() -> Iterator[str]:
    """What plans say."""
    yield "Arena of a training step by its plan, MiB, nothing recomputed"
    yield MEMORY.heading
    for name, (batch, _) in NETWORKS.items():
        for device, form in (("none", "portable"), ("cpu", "CPU")):
            sizes = [plan(name, each, device).arena_bytes / MIB for each in PRECISIONS if _has_products(name, each)]
            cells = [cell for size in sizes[1:] for cell in (size, size / sizes[0])]
            yield MEMORY.row(name, batch, form, sizes[0], *cells)


def _has_products(name: str, precision: str | None) -> bool:
    """Whether there is anything to compute in that type: up to operator set 21 convolutions aren't in bfloat16."""
    return precision != "bfloat16" or name not in CONVOLUTIONS


def train_digits(precision: str | None, epochs: int = 12) -> tuple[list[float], float, memonger.TrainingSession]:
    """As the example trains: losses, the accuracy on digits that weren't seen, and the session."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    example, data = digits(), load_digits()
    images = (data.images[:, None] / 16).astype(np.float32)
    seen, test, labels, truth = train_test_split(images, data.target.astype(np.int64), test_size=0.2, random_state=0)
    session = memonger.TrainingSession(memonger.search_plan(
        memonger.to_training_mode(example.network(), batch=example.BATCH), loss="softmax_cross_entropy",
        optimizer=memonger.SGD(lr=0.1, momentum=0.9, weight_decay=1e-4), precision=precision, chunks="off",
    ))  # fmt: skip
    generator, losses = np.random.default_rng(0), []
    for epoch in range(epochs):
        rate = 0.1 * 0.5 * (1 + np.cos(np.pi * epoch / epochs))
        losses += [session.step(b, learning_rate=rate) for b in example.batches(seen, labels, generator)]
    right = []
    for at in range(0, len(test), example.BATCH):
        part = {"image": test[at : at + example.BATCH]}
        right += list(session.evaluate(part, pad=True)["scores"].argmax(1) == truth[at : at + example.BATCH])
    return losses, float(np.mean(right)), session


def train_gpt(precision: str | None) -> tuple[list[float], float, memonger.TrainingSession]:
    """On bytes of the documentation: losses, the loss on pages that weren't seen, and the session."""
    pages = sorted((HERE.parent / "docs").glob("*.md"))
    seen, held = (np.frombuffer(b"".join(p.read_bytes() for p in part), np.uint8) for part in (pages[2:], pages[:2]))
    network = models.build("gpt", batch=None, seed=0, training=False, seq_len=LENGTH, vocabulary=256)
    session = memonger.TrainingSession(memonger.search_plan(
        memonger.to_training_mode(network, batch=BATCH), loss=memonger.SoftmaxCrossEntropy(axis=-1),
        optimizer=memonger.AdamW(lr=1e-3), precision=precision, chunks="off",
    ))  # fmt: skip

    def drawn(text: np.ndarray, generator: np.random.Generator) -> dict[str, np.ndarray]:
        rows = [text[at : at + LENGTH + 1] for at in generator.integers(0, len(text) - LENGTH - 1, BATCH)]
        whole = np.stack(rows).astype(np.int64)
        return {session.inputs[0].name: whole[:, :-1], "labels": whole[:, 1:]}

    generator = np.random.default_rng(0)
    losses = [session.step(drawn(seen, generator)) for _ in range(STEPS)]
    tests = []
    for _ in range(20):
        batch = drawn(held, generator)
        labels = batch.pop("labels")
        (scores,) = session.evaluate(batch).values()
        shifted = scores - scores.max(-1, keepdims=True)
        logs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        tests.append(-np.take_along_axis(logs, labels[..., None], -1).mean())
    return losses, float(np.mean(tests)), session


def training() -> Iterator[str]:
    """What is learnt."""
    yield f"Training on the CPU: mean loss of the last {LAST} steps; accuracy or loss, in float32, of what wasn't seen"
    yield TRAINING.heading
    runs: Mapping[str, Callable[[str | None], Any]] = {"digits": train_digits, "gpt": train_gpt}
    for name, run in runs.items():
        base = None
        for precision in PRECISIONS:
            losses, test, session = run(precision)
            last = statistics.fmean(losses[-LAST:])
            base = base or last
            yield TRAINING.row(
                name, precision or "float32", len(losses), last, last / base, test, session.skipped_steps,
                session.loss_scale,
            )  # fmt: skip


def time(threads: int) -> Iterator[str]:
    """What steps take."""
    yield f"Time of a step on the CPU, nothing recomputed, {threads} threads: medians of {ROUNDS} turns of {RUNS} steps"
    yield TIME.heading
    for name in ("resnet50", "gpt"):
        with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
            folder, workers, plans = Path(scratch), list[MeasuredTrainer](), []
            for number, precision in enumerate(PRECISIONS):
                made = plan(name, precision, "cpu", threads)
                plans.append(made)
                made.save(folder / f"{number}.onnx")
                np.savez(folder / f"{number}.npz", **dict[str, Any](random_batch(made, 0)))
                job = Job(
                    str(folder / f"{number}.onnx"), str(folder / f"{number}.npz"), "", planned=True, untimed=2,
                    threads=threads, weight_bytes=made.parameter_bytes,
                )  # fmt: skip
                workers.append(stack.enter_context(MeasuredTrainer(job, folder, str(number))))
            take_turns(workers, ROUNDS, RUNS)
            results = [worker.result() for worker in workers]
        for precision, made, result in zip(PRECISIONS, plans, results, strict=True):
            yield TIME.row(
                name, precision or "float32", 1e3 * result.latency_seconds,
                result.latency_seconds / results[0].latency_seconds, made.arena_bytes / MIB,
                None if result.peak_bytes is None else result.peak_bytes / MIB,
            )  # fmt: skip


def lines(names: Sequence[str], threads: int) -> Iterator[str]:
    """The tables as they grow."""
    yield "Mixed precision beside float32"
    command = f"precision --tables {' '.join(names)} --threads {threads}"
    yield from stamp(command, ("onnxruntime", "onnx", "numpy"))
    tables = {"memory": memory, "training": training, "time": partial(time, threads)}
    for name in names:
        yield ""
        yield from tables[name]()


def main() -> None:
    """Measure all of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("-o", "--output", type=Path, default=HERE / "precision.txt", help="written if all are made")
    asked = parser.parse_args()
    keep(lines(asked.tables, asked.threads), asked.output if tuple(asked.tables) == TABLES else None)


if __name__ == "__main__":
    main()
