"""Does a feeder hold what it said? Readers that are fast, slow and failing, loaders, and a thousand epochs.

python -m benchmarks.serving.feeder [-o benchmarks/serving/feeder.txt]

Each line is a process of its own. *said*: `Room.total_bytes`, before anything is read. *held*: the most by the feeder's
own account. *process*: the most that the process's own memory grew, by the operating system's account. *grown*: how
much more there was beside what is held after the last epoch than after the tenth part of them. *threads*: those that
are left. *errors*: epochs that ended with one, each of which named the sample that failed.
"""

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx

import memonger
import memonger.feeding
from benchmarks.machine import MIB, Table, keep, stamp
from memonger.runtime import process_memory
from memonger.runtime.worker import Worker, say

COLUMNS = Table(
    "case<46", "limit MiB>10.2f", "stay>6d", "said MiB>10.2f", "held MiB>10.2f", "process MiB>13.2f", "epochs>8d",
    "samples/s>11.0f", "errors>8d", "grown KiB>11.0f", "threads>9d",
)  # fmt: skip
IMAGE = {"image": ((3, 64, 64), "float32"), "labels": ((), "int64")}
SMALL = {"image": ((8, 8), "uint8"), "labels": ((), "int64")}


@dataclass(frozen=True)
class Case:
    """A reader, a limit, and how many epochs are fed."""

    limit: int
    count: int
    epochs: int
    reader: Callable[[int], Iterator[Any]]
    samples: Any = None
    loader: bool = False
    trains: bool = False


def _read(number: int) -> Iterator[Any]:
    yield {"image": np.full((3, 64, 64), number, np.float32), "labels": number}


def _read_small(number: int) -> Iterator[Any]:
    yield {"image": np.full((8, 8), number % 256, np.uint8), "labels": number}


def _read_slowly(number: int) -> Iterator[Any]:
    time.sleep(0.002)
    yield from _read(number)


def _fail_often(number: int) -> Iterator[Any]:
    if np.random.default_rng().random() < 1 / 300:
        raise OSError(f"file {number} is broken")
    yield from _read(number)


CASES = {
    "all of 1,000 images fit": Case(96 * MIB, 1000, 10, _read),
    "half of them": Case(32 * MIB, 1000, 10, _read),
    "few of them": Case(8 * MIB, 1000, 10, _read),
    "half of them, 2 ms to read one": Case(32 * MIB, 1000, 5, _read_slowly),
    "half of them, 1 in 300 reads fails": Case(32 * MIB, 1000, 50, _fail_often),
    "few of them, 1 in 300 reads fails": Case(8 * MIB, 1000, 50, _fail_often),
    "half of them, a TrainingSession's steps": Case(32 * MIB, 1000, 5, _read, trains=True),
    "a PyTorch DataLoader of them, 2 workers": Case(16 * MIB, 1000, 5, _read, loader=True),
    "all of 2,000 small ones, a thousand epochs": Case(MIB, 2000, 1000, _read_small, SMALL),
    "half of them, a thousand epochs": Case(MIB // 8, 2000, 1000, _read_small, SMALL),
    "1,000 epochs of images, each left after a batch": Case(8 * MIB, 1000, 1000, _read),
}


NETWORK = """<ir_version: 10, opset_import: ["": 20]> net (float[N,3,64,64] image) => (float[N,1000] scores) {
    y = Conv<pads=[1,1,1,1], strides=[2,2]>(image, filters)  r = Relu(y)  p = GlobalAveragePool(r)
    f = Flatten(p)  scores = Gemm(f, weight)
}"""


def _step() -> Callable[[memonger.feeding.Batch], object]:
    """The step of a training session, which has run."""
    model = onnx.parser.parse_model(NETWORK)
    for name, shape in (("filters", (16, 3, 3, 3)), ("weight", (16, 1000))):
        array = np.random.default_rng(0).standard_normal(shape).astype(np.float32) / 8
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    plan = memonger.search_plan(model, batch=32, loss="softmax_cross_entropy", optimizer=memonger.SGD(lr=0.01))
    trainer = memonger.TrainingSession(plan)
    trainer.step({"image": np.zeros((32, 3, 64, 64), np.float32), "labels": np.zeros(32, np.int64)})
    return trainer.step


class _Images:
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, number: int) -> Any:
        return next(_read(number))


def _feeder(case: Case) -> memonger.Feeder:
    samples = case.samples or IMAGE
    config = memonger.FeederConfig(cpu_limit=case.limit, samples=samples, preferred_batch=32)
    if not case.loader:
        last: Any = "drop" if case.trains else "keep"
        return memonger.Feeder(config, case.reader, range(case.count), shuffle=True, last_batch=last)
    import torch

    return memonger.Feeder.from_loader(config, torch.utils.data.DataLoader(_Images(), 32, num_workers=2))


def _fed(feeder: memonger.Feeder, number: int, left: bool, step: Callable[..., object]) -> tuple[int, int]:
    """Feeds an epoch; how many samples came, and whether one failed."""
    seen = 0
    try:
        for batch in feeder.epoch(number):
            seen += batch.size
            first = batch["image"].reshape(batch.size, -1)[:, 0]
            assert np.array_equal(first, batch["labels"].astype(first.dtype))
            step(batch)
            if left:
                break
    except memonger.FeedError as error:
        if str(error) != f"sample {error.identity} can't be read: OSError: file {error.identity} is broken":
            raise
        return seen, 1
    return seen, 0


def work(name: str) -> None:
    """Measure one case, in this process."""
    case, left = CASES[name], "left" in name
    feeder = _feeder(case)
    step = _step() if case.trains else len
    _fed(_feeder(Case(4 * MIB, 64, 1, _read)), 0, False, len)  # what is imported and started once
    before, threads, grown, counts = (
        process_memory.settle(),
        threading.active_count(),
        list[int](),
        list[tuple[int, int]](),
    )
    begin = time.perf_counter()

    def feed() -> None:
        for number in range(case.epochs):
            counts.append(_fed(feeder, number, left, step))
            if number + 1 in (max(1, case.epochs // 10), case.epochs):
                grown.append(process_memory.settle() - feeder.held_bytes)

    taken = process_memory.peak_over(before, feed)
    seen, errors = map(sum, zip(*counts, strict=True))
    say({
        "stay": feeder.room.cached_samples, "said": feeder.room.total_bytes, "held": feeder.peak_bytes, "taken": taken,
        "rate": seen / (time.perf_counter() - begin), "errors": errors, "grown": grown[-1] - grown[0],
        "threads": threading.active_count() - threads,
    })  # fmt: skip


def _lines() -> Iterator[str]:
    yield from stamp("serving.feeder", ["memonger", "numpy", "torch"])
    yield COLUMNS.heading
    for name, case in CASES.items():
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            made = stack.enter_context(Worker("benchmarks.serving.feeder", ["--work", name], folder / "errors")).read()
        sizes = (case.limit / MIB, made["stay"], made["said"] / MIB, made["held"] / MIB, made["taken"] / MIB)
        yield COLUMNS.row(
            name, *sizes, case.epochs, made["rate"], made["errors"], made["grown"] / 1024, made["threads"]
        )


@click.command()
@click.option("--work", "case", type=click.Choice(list(CASES)), hidden=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the table here.")
def main(case: str | None, output: Path | None) -> None:
    """Feed each case in a process of its own."""
    if case is not None:
        work(case)
    else:
        keep(_lines(), output)


if __name__ == "__main__":
    main()
