"""The tables of memonger's predecessors beside its own: ``python -m benchmarks.planning.seeds`` renews docs/SEEDS.md.

Published figures are those of the projects' own pages, at the commits named. Ours are plans without a device for the
same networks and batches: nothing is allocated or run. It takes some minutes.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import onnx_ir as ir

import memonger
import models
from benchmarks.machine import MIB, machine
from models.optnet import as_double, build, unplanned_outputs

PAGE = Path(__file__).parents[2] / "docs" / "SEEDS.md"

Rows = Iterator[Sequence[object]]

INFERENCE = {
    "batch 1, double": {
        "alexnet": (6, 1.5), "vgg-A": (69, 31), "googlenet": (69, 31), "resnet 110 (cifar)": (16, 0.5),
    },
    "batch 128, float": {
        "alexnet": (397, 97), "vgg-A": (4386, 1960), "googlenet": (4390, 1993), "resnet 110 (cifar)": (1036, 32),
    },
}  # fmt: skip
"""OptNet's README: memory of the outputs before and after, in MB of 2^20 bytes."""

SAVED = {"alexnet": "75%", "vgg-A": "55%", "googlenet": "54%", "resnet 110 (cifar)": "97%"}
"""OptNet's README: the part of the outputs' memory that is saved, at batch 1."""

TRAINING = {"alexnet": (963, 816), "vgg-A": (5433, 4228), "googlenet": (6092, 4844), "resnet 110 (cifar)": (664, 428)}
"""OptNet's README: total memory before and after at batch 64, float, in the same MB."""

DENSENET = (
    ("0, original", 5453, 0.153),
    ("1, with OptNet", 3746, 0.153),
    ("2, shared gradients of inputs", 2969, 0.152),
    ("3, and shared concatenations", 2188, 0.155),
    ("4, and shared normalizations, computed again", 1655, 0.175),
)
"""The page of the efficient DenseNets: MB and seconds a batch of 64, a BC-100 on CIFAR-10."""


def main() -> None:
    """Plan everything and write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=PAGE, help="the page")
    page, begin = parser.parse_args().output, time.monotonic()
    text = page.read_text(encoding="utf-8")
    for name, head, rows in TABLES:
        print(f"{name} ...", file=sys.stderr, flush=True)
        text = _replaced(text, name, _table(head, rows()))
    made_on = f"{machine(('numpy', 'onnx-ir'))}; {time.monotonic() - begin:.0f} seconds for all plans."
    page.write_text(_replaced(text, "machine", [made_on]), encoding="utf-8")


def _replaced(text: str, name: str, lines: Iterable[str]) -> str:
    """The page with other lines below the comment of that name, up to the next empty one."""
    before, mark, rest = text.partition(f"<!-- {name} -->\n")
    if not mark:
        raise SystemExit(f"the page has no place for a table: <!-- {name} --> is missing.")
    _, _, after = rest.partition("\n\n")
    return "".join((before, mark, *(f"{line}\n" for line in lines), "\n", after))


def _table(head: str, rows: Rows) -> Iterator[str]:
    names = [name.strip() for name in head.split("|")]
    yield f"| {' | '.join(names)} |"
    yield f"|---|{'---:|' * (len(names) - 1)}"
    for row in rows:
        yield f"| {' | '.join(_shown(cell) for cell in row)} |"


def _shown(cell: object) -> str:
    """Text and published numbers as they are; ours with three digits or so."""
    if isinstance(cell, float):
        return f"{cell:,.{2 if cell < 10 else 1 if cell < 100 else 0}f}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


def _inference(kind: str, batch: int) -> Rows:
    for name, (before, after) in INFERENCE[kind].items():
        model = build(name, batch)
        plan = memonger.search_plan(as_double(model) if "double" in kind else model, mode="inference", device="none")
        sizes = {value: plan.graph.sizes[number] for number, value in enumerate(plan.graph.values)}
        own, planned = unplanned_outputs(model, sizes) / MIB, plan.arena_bytes / MIB
        bound = "yes" if plan.arena_bytes == plan.lower_bound_bytes else f"{plan.lower_bound_bytes / MIB:.1f}"
        yield (
            name, before, own, f"{after:g}", planned, SAVED[name], f"{1 - planned / own:.0%}", bound,
        )  # fmt: skip


def _training() -> Rows:
    for name, (before, after) in TRAINING.items():
        model = build(name, 64)
        kept, again = (
            memonger.search_plan(model, mode="training", device="none", strategy=strategy)
            for strategy in ("none", "sweep")
        )
        yield (
            name, before, after, f"{1 - after / before:.0%}", kept.total_bytes / MIB,
            f"{1 - kept.total_bytes / MIB / before:.0%}", again.total_bytes / MIB,
            f"{1 - again.total_bytes / MIB / before:.0%}", f"{again.overhead:+.0%}",
        )  # fmt: skip


def _densenet() -> Rows:
    for name, size, seconds in DENSENET:
        yield f"level {name}", size, f"{seconds / DENSENET[0][2] - 1:+.0%}"
    yield "PyTorch, naive", 2863, ""
    yield "PyTorch, efficient", 1605, f"{0.207 / 0.165 - 1:+.0%}"
    yield from _ours(models.build_ir("densenet_bc100", batch=64, training=True), ("none", "cheap", "sweep"), (0.4, 0.3))


def _windows() -> Rows:
    """Steps of one sample, whose concatenations are consecutive: the same networks with windows and without."""
    for layers in (6, 16, 31):
        model = models.build_ir("densenet_bc100", batch=1, training=True, blocks=(layers,) * 3)
        training = memonger.differentiate(model, loss="loss", optimizer=memonger.SGD(lr=0.1, momentum=0.9))
        largest = 0
        for strategy in ("none", "cheap"):
            without, plan = (
                memonger.search_plan(
                    training, device="none", strategy=strategy, sharing=memonger.Sharing(windows=windows)
                )
                for windows in (False, True)
            )
            largest = largest or without.arena_bytes
            yield (
                f"depth {6 * layers + 4}, `--strategy {strategy}`", without.arena_bytes / MIB, plan.arena_bytes / MIB,
                f"{without.arena_bytes / largest:.0%}", f"{plan.arena_bytes / largest:.0%}", f"{plan.overhead:+.0%}",
            )  # fmt: skip


def _deep() -> Rows:
    yield "published: 1,000 layers, all kept", "48 GB", ""
    yield "published: 1,000 layers, sublinear plan", "7 GB", "+30%"
    yield from _ours(_resnet(131, 196), ("none", "sweep"), (7 / 48, 0.1), "1,001 layers, ")


def _example() -> Rows:
    yield from _ours(_resnet(24, 36), ("none", "sweep"), (0.3,))


def _resnet(second: int, third: int) -> ir.Model:
    return models.build_ir("resnet200", batch=32, training=True, units=(3, second, third, 3))


def _ours(model: ir.Model, strategies: Sequence[str], parts: Sequence[float], prefix: str = "") -> Rows:
    """Totals of strategies, and of budgets that are parts of the first one's."""
    training = memonger.differentiate(model, loss="loss", optimizer=memonger.SGD(lr=0.1, momentum=0.9))
    totals = []
    for strategy in strategies:
        plan = memonger.search_plan(training, device="none", strategy=strategy)
        totals.append(plan.total_bytes)
        yield f"{prefix}`--strategy {strategy}`", plan.total_bytes / MIB, f"{plan.overhead:+.0%}"
    for part in parts:
        plan = memonger.search_plan(training, device="none", budget=int(totals[0] * part))
        yield f"{prefix}`--budget`, {part:.0%} of `none`", plan.total_bytes / MIB, f"{plan.overhead:+.0%}"


_OUTPUTS = (
    "network | before, published | before, ours | after, published | after, ours | saved, published | saved, ours | "
    "lower bound"
)
_TAKES = "what | MB | extra time"
TABLES = (
    ("inference double", _OUTPUTS, lambda: _inference("batch 1, double", 1)),
    ("inference float", _OUTPUTS, lambda: _inference("batch 128, float", 128)),
    (
        "training",
        "network | before, published | after, published | saved | all kept | saved | sweep | saved | extra cost",
        _training,
    ),
    ("densenet", _TAKES, _densenet),
    ("windows", "network | without, MB | with, MB | without, left | with, left | extra time", _windows),
    ("deep", _TAKES, _deep),
    ("example", _TAKES, _example),
)

if __name__ == "__main__":
    main()
