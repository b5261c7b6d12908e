"""Networks of many kinds beside PyTorch on the CPU: ``python -m benchmarks.kinds [--only NAME]... [--resume]``.

Each is exported by `memonger.from_torch`, differentiated, and held against PyTorch in float64, as PyTorch's own float32
is: the gradients of one batch, and the losses of three steps of AdamW. Then it takes the same steps in a plan at half
of the peak. Nothing is dropped, batch normalization is by batches. Rows are kept in kinds.json as they come:
``--resume`` measures what is missing or failed, in ``--jobs`` processes of one thread each.
"""

import argparse
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import memonger
from benchmarks.kind_networks import NETWORKS, batches, build
from benchmarks.machine import HERE, Table, geometric_mean, keep, stamp
from benchmarks.record import Record
from memonger.errors import BudgetError
from memonger.units import KiB
from tests.support.torch_steps import relative_errors, steps

STEPS, SHARE = 3, 0.5
OPTIMIZER: Mapping[str, float] = {"lr": 1e-3, "weight_decay": 0.01}
OPTIONS: Mapping[str, Any] = {"threads": 1, "chunks": "off"}
EPSILON = 2.0**-24  # float32 rounds by that much: a smaller error is none
ENOUGH = 0.75
TABLE = Table(
    "network<18", "tensors>7", "nearer>8.0%", "twice>7.0%", "mean ÷>8.2f", "worst ÷>9.2f", "ours>10.1e", "PyTorch>9.1e",
    "ours>10.1e", "PyTorch>9.1e", "KiB>9.0f", "of it>7.0%", "again>7", "bits<6",
)  # fmt: skip
PACKAGES = ("onnxruntime", "onnx", "numpy", "torch", "transformers")

Batches = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Row:
    """One network.

    Attributes:
        tensors: Parameters with a gradient.
        nearer: Those whose gradient is off by no more than PyTorch's.
        twice: By no more than twice as much.
        mean: Our error over PyTorch's, geometric mean of all.
        worst: The largest of these, and whose.
        errors: The largest of a gradient: ours and PyTorch's.
        apart: The largest of a loss: likewise.
        peak: Bytes, with nothing recomputed.
        share: The other plan's peak as a part of it.
        again: Nodes that run again there.
        same: Whether losses, parameters, statistics and moments are the same bits.
    """

    tensors: int
    nearer: int
    twice: int
    mean: float
    worst: tuple[float, str]
    errors: tuple[float, float]
    apart: tuple[float, float]
    peak: int
    share: float
    again: int
    same: bool


def peer(name: str, data: Batches, dtype: torch.dtype) -> tuple[list[float], dict[str, np.ndarray]]:
    """PyTorch's losses, and the gradients of the first step."""
    module, losses, gradients = build(name).to(dtype), list[float](), dict[str, np.ndarray]()
    for loss, _ in steps(module, data, torch.optim.AdamW(module.parameters(), **OPTIMIZER)):
        losses.append(loss)
        if len(losses) == 1:
            found = ((key, parameter.grad) for key, parameter in module.named_parameters())
            gradients = {key: gradient.numpy().copy() for key, gradient in found if gradient is not None}
    return losses, gradients


def train(plan: memonger.Plan, data: Batches) -> tuple[list[float], memonger.TrainingSession]:
    """Losses, and the session."""
    session = memonger.TrainingSession(plan)
    return [session.step({"x": x.numpy(), "labels": labels.numpy()}) for x, labels in data], session


def forward(module: nn.Module, example: Tensor) -> memonger.Model:
    """The exported model in training form."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own deprecations
        model = memonger.from_torch(module, example, input_names=["x"], output_names=["scores"])
    normalizes = any(isinstance(part, _BatchNorm) for part in module.modules())
    return memonger.to_training_mode(model, dropout=False) if normalizes else model


def largest_apart(losses: Sequence[float], truth: Sequence[float]) -> float:
    """The largest relative difference."""
    return max(abs(loss - true) / true for loss, true in zip(losses, truth, strict=True))


def planned(training: memonger.Model) -> tuple[memonger.Plan, memonger.Plan]:
    """Nothing recomputed; and half of that peak beside all that isn't the arena, or the least the search found."""
    plan = partial(memonger.search_plan, training, **OPTIONS)
    whole = plan(strategy="none")
    budget = whole.total_bytes - whole.arena_bytes + int(SHARE * whole.peak_bytes)
    while True:
        try:
            return whole, plan(budget=budget)
        except BudgetError as error:  # the least that was found isn't always found again
            budget = error.smallest


def measure(name: str) -> Row:
    """A network's row.

    Raises:
        MemongerError: it can't be exported, differentiated or planned.
        KeyError: a parameter of PyTorch's has no gradient.
    """
    torch.set_num_threads(1)
    module = build(name)
    example = batches(name, (1, 1), 1)[0][0]
    data = batches(name, module(example).shape, STEPS)
    model, loss = forward(build(name), example), memonger.SoftmaxCrossEntropy()
    gradients = memonger.differentiate(model, loss=loss)
    _, session = train(memonger.search_plan(gradients, strategy="none", **OPTIONS), data[:1])
    found = {key.removesuffix(".grad"): array for key, array in session.outputs().items()}
    truths, truth = peer(name, data, torch.float64)
    singles, single = peer(name, data, torch.float32)
    ours, theirs = relative_errors(found, truth), relative_errors(single, truth)
    ratios = {key: max(ours[key], EPSILON) / max(theirs[key], EPSILON) for key in truth}
    plans = planned(memonger.differentiate(model, loss=loss, optimizer=memonger.AdamW(**OPTIMIZER)))
    (losses, session), (others, other) = (train(plan, data) for plan in plans)
    states = session.state_dict(), other.state_dict()
    return Row(
        tensors=len(ratios), nearer=sum(ratio <= 1 for ratio in ratios.values()),
        twice=sum(ratio <= 2 for ratio in ratios.values()), mean=geometric_mean(ratios.values()),
        worst=max((ratio, key) for key, ratio in ratios.items()),
        errors=(max(ours.values()), max(theirs.values())),
        apart=(largest_apart(losses, truths), largest_apart(singles, truths)),
        peak=plans[0].peak_bytes, share=plans[1].peak_bytes / plans[0].peak_bytes, again=len(plans[1].recomputed),
        same=losses == others and all(np.array_equal(array, states[1][key]) for key, array in states[0].items()),
    )  # fmt: skip


def judged(name: str) -> dict[str, Any]:
    """The row of a network, or why there is none."""
    try:
        return asdict(measure(name))
    except Exception as error:  # whatever an export may raise: the row says what
        return {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:100]}


def line(name: str, row: Mapping[str, Any]) -> str:
    """A line of the table."""
    if "failed" in row:
        return f"{TABLE.row(name)}  {row['failed']}"
    tensors = row["tensors"]
    return TABLE.row(
        name, tensors, row["nearer"] / tensors, row["twice"] / tensors, row["mean"], row["worst"][0], *row["errors"],
        *row["apart"], row["peak"] / KiB, row["share"], row["again"], "same" if row["same"] else "DIFFER",
    )  # fmt: skip


def summary(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """How many networks hold what."""
    done = [row for row in rows.values() if "failed" not in row]
    tensors, nearer, twice = (sum(row[key] for row in done) for key in ("tensors", "nearer", "twice"))
    mean = geometric_mean(row["mean"] for row in done for _ in range(row["tensors"]))
    enough = sum(row["nearer"] >= ENOUGH * row["tensors"] for row in done)
    same, half = sum(row["same"] for row in done), sum(row["share"] <= SHARE for row in done)
    yield f"networks that train: {len(done)} of {len(rows)}; at half of the peak: {half}; the same bits: {same}"
    yield f"gradients off by no more than PyTorch's: {nearer / tensors:.1%} of {tensors}; 3 in 4 in {enough} networks"
    yield f"by no more than twice as much: {twice / tensors:.1%}; error over PyTorch's, geometric mean: {mean:.3f}"


LEGEND = f"""
Error of a parameter's gradient, of one batch: norm of the difference from PyTorch in float64, over the norm there, or
over 1e-3 of the largest norm in the network where that is more. What is below 2^-24 counts as that.
tensors: parameters with a gradient; nearer: those with an error of at most that of PyTorch in float32; twice: of at
most twice that; mean, worst ÷: errors over PyTorch's; ours, PyTorch: the largest error
ours, PyTorch again: the largest relative error of the losses of {STEPS} steps of AdamW
KiB: peak with nothing recomputed; of it: peak of a plan at half of that, or at the least that was found; again: nodes
that run again there; bits: its losses, parameters, statistics and moments beside those with nothing recomputed
"""


def lines(rows: Mapping[str, Mapping[str, Any]], jobs: int) -> Iterator[str]:
    """The table."""
    yield "Networks of many kinds, tiny and with seeded weights, trained on the CPU beside PyTorch"
    yield from stamp(f"kinds --jobs {jobs}", PACKAGES)
    yield from LEGEND.splitlines()
    yield ""
    yield TABLE.heading
    yield from (line(name, row) for name, row in rows.items())
    yield ""
    yield from summary(rows)


def main() -> None:
    """Measure what is asked for, and write the table where no network is left out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", choices=NETWORKS, metavar="NAME")
    parser.add_argument("--resume", action="store_true", help="keep the rows of kinds.json that didn't fail")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    asked = parser.parse_args()
    record = Record(None if asked.only else HERE / "kinds.json", asked.resume)
    names = [name for name in asked.only or NETWORKS if "failed" in record.rows.get(name, {"failed": ""})]
    with ProcessPoolExecutor(asked.jobs, get_context("spawn")) as pool:
        running = {pool.submit(judged, name): name for name in names}
        for done in as_completed(running):
            record.add(running[done], done.result())
            print(line(running[done], done.result()), flush=True)
    rows = {name: record.rows[name] for name in NETWORKS if name in record.rows}
    keep(lines(rows, asked.jobs), HERE / "kinds.txt" if rows.keys() == NETWORKS.keys() else None)


if __name__ == "__main__":
    main()
