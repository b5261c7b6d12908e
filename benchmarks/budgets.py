"""Budgets as promises: ``python -m benchmarks.budgets [--effort N] [--only NAME]... [-o FILE]``.

Twelve networks, for inference and for a training step (loss, backward pass, SGD with momentum), each planned for nine
budgets without a device: nine searches of their own, and one sweep over all nine. A plan above its budget would be an
exceeding one; an inversion is a pair of neighbouring budgets of which the smaller has the larger total or the cheaper
plan.
"""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

import memonger
import models
from benchmarks.machine import Table, keep, stamp
from benchmarks.recompute import request_of
from memonger.errors import BudgetError
from memonger.schedule import Request, decide
from memonger.schedule.decide import Solution

PERCENT = (100, 90, 80, 70, 60, 50, 40, 30, 20)
NETWORKS: Mapping[str, Mapping[str, Any]] = {
    "resnet18": {"batch": 8}, "resnet50": {"batch": 4}, "resnet110": {"batch": 16}, "densenet121": {"batch": 4},
    "densenet_bc100": {"batch": 16}, "mobilenet_v2": {"batch": 8}, "vgg16": {"batch": 4}, "googlenet": {"batch": 8},
    "unet": {"batch": 1, "image": 256}, "lstm": {"batch": 8}, "gpt": {"batch": 8}, "vit": {"batch": 16},
}  # fmt: skip
COLUMNS = Table(
    "network<16", "mode<10", "nodes>7", "plain MiB>11.1f", "least MiB>11.1f", "held>6", "refused>9", "exceeding>11",
    "inversions>12", "in a sweep>12", "seconds>9.1f",
)  # fmt: skip


def requested(name: str, mode: str, effort: int) -> Request:
    """A network for one mode."""
    training = mode == "training"
    model = memonger.load(models.build_ir(name, training=training, **NETWORKS[name]))
    if training:
        model = memonger.differentiate(model, loss="loss", optimizer=memonger.SGD(lr=0.1, momentum=0.9))
    return request_of(model, effort)


def inversions(solutions: Sequence[Solution]) -> int:
    """Neighbours, by falling budget, of which the second has the larger total or the cheaper plan."""
    return sum(
        after.total_bytes > before.total_bytes or after.cost < before.cost
        for before, after in itertools.pairwise(solutions)
    )


def row(name: str, mode: str, effort: int) -> str:
    """Plan one network for all budgets."""
    begin = time.perf_counter()
    request = requested(name, mode, effort)
    plain = decide.decide(request, "none", "best")
    budgets = [request.base + plain.total_bytes * percent // 100 for percent in PERCENT]
    alone, exceeding = list[Solution](), 0
    for budget in budgets:
        try:
            found = decide.decide(replace(request, budget=budget), "budget", "best")
        except BudgetError:
            continue
        alone.append(found)
        exceeding += request.base + found.total_bytes > budget
    frontier = decide.frontier(request, 0, "best", budgets)
    fitting = [[each for each in frontier if request.base + each.total_bytes <= budget] for budget in budgets]
    swept = [each[0] for each in fitting if each]
    return COLUMNS.row(
        name, mode, len(request.graph.nodes), (request.base + plain.total_bytes) / 2**20,
        (request.base + frontier[-1].total_bytes) / 2**20, len(alone), len(budgets) - len(alone), exceeding,
        inversions(alone), inversions(swept), time.perf_counter() - begin,
    )  # fmt: skip


def lines(names: Sequence[str], effort: int, command: str) -> Iterator[str]:
    """The table."""
    yield "Nine budgets, 100 % to 20 % of the arena that nothing recomputed takes, beside parameters, state and inputs"
    yield from stamp(command, ["numpy", "onnx-ir"])
    yield "plain: total with nothing recomputed; least: smallest total found"
    yield "held, refused: budgets a plan was found for, and not; exceeding: plans above their budget"
    yield "inversions: a smaller budget with a larger total or a cheaper plan, in searches of their own; and in a sweep"
    yield from ("", COLUMNS.heading)
    for name, mode in itertools.product(names, ("inference", "training")):
        yield row(name, mode, effort)


@click.command()
@click.option("--effort", type=click.IntRange(1), default=100_000, show_default=True, help="Of each search.")
@click.option("--only", multiple=True, type=click.Choice(list(NETWORKS)), help="May be repeated.")
@click.option("-o", "output", type=click.Path(path_type=Path), help="Write the table here.")
def main(effort: int, only: tuple[str, ...], output: Path | None) -> None:
    """Print the table."""
    keep(lines(only or list(NETWORKS), effort, f"budgets --effort {effort}"), output)


if __name__ == "__main__":
    main()
