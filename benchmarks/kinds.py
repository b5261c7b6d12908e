"""Networks of many kinds beside PyTorch on the CPU: ``python -m benchmarks.kinds [--only NAME]... [--resume]``.

Each is exported by `memonger.from_torch`, differentiated, and held against PyTorch in float64, as PyTorch's own float32
is: the gradients of five batches, and the losses of three steps of AdamW. Then it takes these steps in a plan at half
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

STEPS, BATCHES, SHARE = 3, 5, 0.5
OPTIMIZER: Mapping[str, float] = {"lr": 1e-3, "weight_decay": 0.01}
OPTIONS: Mapping[str, Any] = {"threads": 1, "chunks": "off"}
EPSILON = 2.0**-24  # float32 rounds by that much: a smaller error is none
ENOUGH, ALIKE = 0.75, 1.1
TABLE = Table(
    "network<18", "tensors>7", "nearer>8.0%", "alike>7.0%", "twice>7.0%", "mean ÷>8.2f", "worst ÷>9.2f", "ours>10.1e",
    "PyTorch>9.1e", "ours>10.1e", "PyTorch>9.1e", "KiB>9.0f", "of it>7.0%", "again>7", "bits<6",
)  # fmt: skip
PACKAGES = ("onnxruntime", "onnx", "numpy", "torch", "transformers")

Batches = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Row:
    """One network.

    Attributes:
        tensors: Parameters with a gradient.
        batches: Whose gradients were compared.
        nearer: Parameters whose gradient is off by no more than PyTorch's.
        alike: By no more than `ALIKE` times as much.
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
    batches: int
    nearer: int
    alike: int
    twice: int
    mean: float
    worst: tuple[float, str]
    errors: tuple[float, float]
    apart: tuple[float, float]
    peak: int
    share: float
    again: int
    same: bool


def peer(name: str, data: Batches, dtype: torch.dtype) -> list[float]:
    """PyTorch's losses of steps."""
    module = build(name).to(dtype)
    return [loss for loss, _ in steps(module, data, torch.optim.AdamW(module.parameters(), **OPTIMIZER))]


def peer_gradients(name: str, data: Batches, dtype: torch.dtype) -> Iterator[dict[str, np.ndarray]]:
    """PyTorch's gradients of each batch, by the first weights."""
    module = build(name).to(dtype)
    for _ in steps(module, data):
        parts = ((key, parameter.grad) for key, parameter in module.named_parameters())
        yield {key: gradient.numpy().copy() for key, gradient in parts if gradient is not None}


def own_gradients(model: memonger.Model, data: Batches) -> Iterator[dict[str, np.ndarray]]:
    """Ours, likewise."""
    gradients = memonger.differentiate(model, loss=memonger.SoftmaxCrossEntropy())
    session = memonger.TrainingSession(memonger.search_plan(gradients, strategy="none", **OPTIONS))
    for x, labels in data:
        session.step({"x": x.numpy(), "labels": labels.numpy()})
        yield {key.removesuffix(".grad"): array for key, array in session.outputs().items()}


def errors(model: memonger.Model, name: str, data: Batches) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Of each batch, our parameters' errors and PyTorch's."""
    truths, singles = (peer_gradients(name, data, dtype) for dtype in (torch.float64, torch.float32))
    triples = zip(own_gradients(model, data), singles, truths, strict=True)
    return [(relative_errors(ours, truth), relative_errors(theirs, truth)) for ours, theirs, truth in triples]


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
    drawn = batches(name, module(example).shape, max(STEPS, BATCHES))
    model, loss, data = forward(build(name), example), memonger.SoftmaxCrossEntropy(), drawn[:STEPS]
    pairs = errors(model, name, drawn[:BATCHES])
    ratios = {
        key: geometric_mean(max(ours[key], EPSILON) / max(theirs[key], EPSILON) for ours, theirs in pairs)
        for key in pairs[0][1]
    }
    truths, singles = (peer(name, data, dtype) for dtype in (torch.float64, torch.float32))
    plans = planned(memonger.differentiate(model, loss=loss, optimizer=memonger.AdamW(**OPTIMIZER)))
    (losses, session), (others, other) = (train(plan, data) for plan in plans)
    states = session.state_dict(), other.state_dict()
    return Row(
        tensors=len(ratios), batches=len(pairs), nearer=sum(ratio <= 1 for ratio in ratios.values()),
        alike=sum(ratio <= ALIKE for ratio in ratios.values()),
        twice=sum(ratio <= 2 for ratio in ratios.values()), mean=geometric_mean(ratios.values()),
        worst=max((ratio, key) for key, ratio in ratios.items()),
        errors=(max(max(ours.values()) for ours, _ in pairs), max(max(theirs.values()) for _, theirs in pairs)),
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
    shares = (row[key] / tensors for key in ("nearer", "alike", "twice"))
    return TABLE.row(
        name, tensors, *shares, row["mean"], row["worst"][0], *row["errors"],
        *row["apart"], row["peak"] / KiB, row["share"], row["again"], "same" if row["same"] else "DIFFER",
    )  # fmt: skip


def summary(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """How many networks hold what."""
    done = [row for row in rows.values() if "failed" not in row]
    tensors, nearer, alike, twice = (sum(row[key] for row in done) for key in ("tensors", "nearer", "alike", "twice"))
    mean = geometric_mean(row["mean"] for row in done for _ in range(row["tensors"]))
    enough = sum(row["nearer"] >= ENOUGH * row["tensors"] for row in done)
    same, half = sum(row["same"] for row in done), sum(row["share"] <= SHARE for row in done)
    yield f"networks that train: {len(done)} of {len(rows)}; at half of the peak: {half}; the same bits: {same}"
    yield f"gradients off by no more than PyTorch's: {nearer / tensors:.1%} of {tensors}; 3 in 4 in {enough} networks"
    yield f"by no more than {ALIKE} times as much: {alike / tensors:.1%}; twice as much: {twice / tensors:.1%}"
    yield f"error over PyTorch's, geometric mean: {mean:.3f}"


LEGEND = f"""
Error of a parameter's gradient: norm of the difference from PyTorch in float64, over the norm there, or over 1e-3 of
the largest norm in the network where that is more. What is below 2^-24 counts as that. Beside PyTorch's in float32: the
geometric mean over {BATCHES} batches, as rounding errors of one batch are one draw for the whole network.
tensors: parameters with a gradient; nearer: those with an error of at most that of PyTorch in float32; alike: of at
most {ALIKE} times that; twice: of at most twice that; mean, worst ÷: errors over PyTorch's
ours, PyTorch: the largest error
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
    parser.add_argument("--resume", action="store_true", help="keep rows of kinds.json that didn't fail")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    asked = parser.parse_args()
    record = Record(None if asked.only else HERE / "kinds.json", asked.resume)
    names = [name for name in asked.only or NETWORKS if record.rows.get(name, {}).get("batches") != BATCHES]
    with ProcessPoolExecutor(asked.jobs, get_context("spawn")) as pool:
        running = {pool.submit(judged, name): name for name in names}
        for done in as_completed(running):
            record.add(running[done], done.result())
            print(line(running[done], done.result()), flush=True)
    rows = {name: record.rows[name] for name in NETWORKS if name in record.rows}
    keep(lines(rows, asked.jobs), HERE / "kinds.txt" if rows.keys() == NETWORKS.keys() else None)


if __name__ == "__main__":
    main()
