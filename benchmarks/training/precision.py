"""Mixed precision beside float32: ``python -m benchmarks.training.precision [-o FILE]``.

Three tables. Memory: the arena that a training step needs by its plan, in the portable form and in the CPU's.
Training: losses of the same batches with the same masks, the digits of scikit-learn and a small GPT on the bytes of
this project's documentation. Time: steps in processes of their own that take turns.
"""

import argparse
import importlib.util
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import memonger
import models
from benchmarks.machine import MIB, ROOT, Table, keep, stamp
from memonger.cli.measure_steps import MeasuredTrainer, StepsJob
from memonger.cli.train import random_batch
from memonger.runtime.measure import take_turns

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
EPOCHS = 12  # of the digits
SEEDS, GPT_SEEDS = 5, 2
MOVED = "float32 moved"
MEMORY = Table("network<16", "batch>6", "form<9", "float32>9.1f", "float16>9.1f", "/ f32>7.2f",
               "bfloat16>9.1f", "/ f32>7.2f")  # fmt: skip
TRAINING = Table(
    "training<10", "type<14", "steps>6", "seeds>6", "last loss>10.5f", "spread>8.5f", "/ f32>8.4f", "least>8.4f",
    "most>8.4f", "test>9.4f", "left out>9", "scale>9.0f",
)  # fmt: skip
TIME = Table("network<16", "type<9", "ms a step>10.1f", "/ f32>7.2f", "arena MiB>10.1f", "peak MiB>9.1f")


def digits() -> Any:
    """The module of the example."""
    spec = importlib.util.spec_from_file_location("digits", ROOT / "examples" / "digits.py")
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


@dataclass(frozen=True, slots=True)
class Learnt:
    """A training run.

    Attributes:
        losses: Of each step.
        test: Accuracy on digits, or loss on pages, that weren't seen; in float32.
        skipped: Steps left out because a gradient overflowed.
        scale: Of the loss at the end; 0 for a type that needs none.
    """

    losses: Sequence[float]
    test: float
    skipped: int = 0
    scale: float = 0.0

    @property
    def last(self) -> float:
        """Mean loss of the last steps."""
        return statistics.fmean(self.losses[-LAST:])


def moved(network: onnx.ModelProto, seed: int) -> onnx.ModelProto:
    """The network with every weight changed by about a millionth: how far training goes apart by itself."""
    generator = np.random.default_rng(seed)
    for tensor in network.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        if array.dtype == np.float32 and array.size > 1:
            noise = 1 + 1e-6 * generator.standard_normal(array.shape, np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array * noise, tensor.name))
    return network


def digit_images() -> list[np.ndarray]:
    """Images to train and to test with, and the labels of each."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    data = load_digits()
    images = (data.images[:, None] / 16).astype(np.float32)
    return list(train_test_split(images, data.target.astype(np.int64), test_size=0.2, random_state=0))


def digit_batches(seed: int) -> Iterator[tuple[dict[str, np.ndarray], float]]:
    """Batches as the example draws them, with the learning rate of each."""
    seen, _, labels, _ = digit_images()
    generator = np.random.default_rng(seed)
    for epoch in range(EPOCHS):
        rate = 0.1 * 0.5 * (1 + np.cos(np.pi * epoch / EPOCHS))
        yield from ((batch, rate) for batch in digits().batches(seen, labels, generator))


def train_digits(kind: str, seed: int) -> Learnt:
    """As the example trains."""
    network, (_, test, _, truth) = digits().network(seed), digit_images()
    session = memonger.TrainingSession(memonger.search_plan(
        memonger.to_training_mode(moved(network, seed) if kind == MOVED else network, batch=digits().BATCH),
        loss="softmax_cross_entropy", optimizer=memonger.SGD(lr=0.1, momentum=0.9, weight_decay=1e-4),
        precision=_precision(kind), chunks="off", threads=1,
    ), random_key=seed)  # fmt: skip
    losses = [session.step(batch, learning_rate=rate) for batch, rate in digit_batches(seed)]
    parts = [test[at : at + digits().BATCH] for at in range(0, len(test), digits().BATCH)]
    scores = np.concatenate([session.evaluate({"image": part}, pad=True)["scores"] for part in parts])
    return Learnt(losses, float(np.mean(scores.argmax(1) == truth)), session.skipped_steps, session.loss_scale)


def train_digits_in_torch(kind: str, seed: int) -> Learnt:
    """The same network, weights and batches under PyTorch's autocast; other masks of Dropout."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    layers = [
        layer
        for inputs, outputs in ((1, 16), (16, 32), (32, 64))
        for layer in (nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())
    ]
    tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, 10)]
    module = nn.Sequential(*layers[:6], nn.MaxPool2d(2), *layers[6:], *tail)
    arrays = {each.name: onnx.numpy_helper.to_array(each) for each in digits().network(seed).graph.initializer}
    for name, parameter in zip(("conv1", "conv2", "conv3", "weight"), [0, 3, 7, 13], strict=True):
        module[parameter].weight.data = torch.from_numpy(arrays[name].copy())
    module[13].bias.data.zero_()
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    losses = []
    for batch, rate in digit_batches(seed):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=kind.endswith("bfloat16")):
            scores = module(torch.from_numpy(batch["image"]))
        loss = nn.functional.cross_entropy(scores.float(), torch.from_numpy(batch["labels"]))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    _, test, _, truth = digit_images()
    with torch.inference_mode():
        return Learnt(losses, float(np.mean(module.eval()(torch.from_numpy(test)).numpy().argmax(1) == truth)))


def train_gpt(kind: str, seed: int) -> Learnt:
    """On bytes of the documentation."""
    pages = sorted((ROOT / "docs").glob("*.md"))
    seen, held = (np.frombuffer(b"".join(p.read_bytes() for p in part), np.uint8) for part in (pages[2:], pages[:2]))
    network = models.build("gpt", batch=None, seed=seed, training=False, seq_len=LENGTH, vocabulary=256)
    session = memonger.TrainingSession(memonger.search_plan(
        memonger.to_training_mode(moved(network, seed) if kind == MOVED else network, batch=BATCH),
        loss=memonger.SoftmaxCrossEntropy(axis=-1), optimizer=memonger.AdamW(lr=1e-3), precision=_precision(kind),
        chunks="off", threads=1,
    ), random_key=seed)  # fmt: skip

    def drawn(text: np.ndarray, generator: np.random.Generator) -> dict[str, np.ndarray]:
        rows = [text[at : at + LENGTH + 1] for at in generator.integers(0, len(text) - LENGTH - 1, BATCH)]
        whole = np.stack(rows).astype(np.int64)
        return {session.inputs[0].name: whole[:, :-1], "labels": whole[:, 1:]}

    generator = np.random.default_rng(seed)
    losses = [session.step(drawn(seen, generator)) for _ in range(STEPS)]
    tests = []
    for _ in range(20):
        batch = drawn(held, generator)
        labels = batch.pop("labels")
        (scores,) = session.evaluate(batch).values()
        shifted = scores - scores.max(-1, keepdims=True)
        logs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        tests.append(-np.take_along_axis(logs, labels[..., None], -1).mean())
    return Learnt(losses, float(np.mean(tests)), session.skipped_steps, session.loss_scale)


def _precision(kind: str) -> Any:
    return kind if kind in PRECISIONS else None


def training() -> Iterator[str]:
    """What is learnt."""
    yield f"Training on the CPU: mean loss of the last {LAST} steps; accuracy or loss, in float32, of what wasn't seen"
    yield TRAINING.heading
    kinds = ("float32", MOVED, "float16", "bfloat16")
    torch_kinds = ("torch float32", "torch bfloat16")
    for name, seeds, runs in (
        ("digits", SEEDS, dict.fromkeys(kinds, train_digits) | dict.fromkeys(torch_kinds, train_digits_in_torch)),
        ("gpt", GPT_SEEDS, dict.fromkeys(kinds, train_gpt)),
    ):
        base: list[Learnt] = []
        for kind, run in runs.items():
            ends = [run(kind, seed) for seed in range(seeds)]
            base = ends if kind.endswith("float32") else base
            ratios = [end.last / own.last for end, own in zip(ends, base, strict=True)]
            yield TRAINING.row(
                name, kind, len(ends[0].losses), seeds, statistics.fmean(end.last for end in ends),
                statistics.stdev(end.last for end in ends), statistics.fmean(ratios), min(ratios), max(ratios),
                statistics.fmean(end.test for end in ends), f"{sum(end.skipped for end in ends)}",
                ends[-1].scale or None,
            )  # fmt: skip
    yield "Last loss and test: means over seeds (of weights, batches and Dropout); / f32: mean of the ratios by seed."
    yield f"{MOVED}: float32 again, each weight changed by a millionth: so far apart is what rounds otherwise."
    yield "torch bfloat16: PyTorch's autocast, convolutions too, against PyTorch's float32 with the same masks."


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
                job = StepsJob(
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
    command = f"training.precision --tables {' '.join(names)} --threads {threads}"
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
    parser.add_argument(
        "-o", "--output", type=Path, default=Path(__file__).with_suffix(".txt"), help="written if all are made"
    )
    asked = parser.parse_args()
    keep(lines(asked.tables, asked.threads), asked.output if tuple(asked.tables) == TABLES else None)


if __name__ == "__main__":
    main()
