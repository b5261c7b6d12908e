"""How near plans of every network are to their lower bound: ``python -m benchmarks.arenas [--networks NAME ...]``.

The networks of models/, planned without a device at three batches: for inference, and for training with SGD and
momentum, with nothing recomputed and with strategy "cheap". A plan's bound is the most bytes that are live at one step
of its order: no arena is smaller.
"""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context

import onnx_ir as ir

import memonger
import models
from benchmarks.machine import HERE, MIB, Table, keep, stamp

BATCHES = (1, 4, 16)
KINDS: Mapping[str, str] = {"inference": "none", "training": "none", "training, cheap": "cheap"}
"""What is planned, and the strategy."""

TABLE = Table(
    "network<16", "batch>6", *(cell for kind in KINDS for cell in (f"{kind}>18.2f", "÷ bound>9.4f", "s>7.1f"))
)


def planned(name: str, batch: int, kind: str) -> tuple[int, int, float]:
    """Bytes of the arena, its lower bound, and seconds to plan a loaded and differentiated network."""
    model: ir.Model | memonger.Model = models.build_ir(name, batch=batch, training=kind != "inference")
    if kind != "inference":
        optimizer = memonger.SGD(lr=0.1, momentum=0.9)
        model = memonger.differentiate(memonger.load(model), loss="loss", optimizer=optimizer)
    begin = time.perf_counter()
    plan = memonger.search_plan(model, device="none", strategy=KINDS[kind])
    return plan.arena_bytes, plan.lower_bound_bytes, time.perf_counter() - begin


def rows(names: Sequence[str], jobs: int) -> Iterator[str]:
    """A row for each network and batch, then how many are at their bound."""
    cases = [*product(names, BATCHES, KINDS)]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        results = pool.map(planned, *zip(*cases, strict=True))
        at_bound, worst = 0, 1.0
        for name, batch in product(names, BATCHES):
            cells = list[object]()
            for _ in KINDS:
                arena, bound, seconds = next(results)
                cells += [arena / MIB, arena / bound, seconds]
                at_bound, worst = at_bound + (arena == bound), max(worst, arena / bound)
            yield TABLE.row(name, batch, *cells)
    yield f"\nat their bound: {at_bound} of {len(cases)}; the furthest: {worst:.4f}"


def table(names: Sequence[str], jobs: int) -> Iterator[str]:
    """Lines of the table, as they are measured."""
    yield "Arenas of every network beside their lower bounds: MiB, arena ÷ bound, seconds to plan"
    yield from stamp(f"arenas --jobs {jobs}", ["onnx", "onnx-ir", "numpy"])
    yield from ("", TABLE.heading)
    yield from rows(names, jobs)


def main() -> None:
    """Plan; the table is kept where no network was left out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--networks", nargs="*", choices=models.NAMES, default=models.NAMES, metavar="NAME")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    asked = parser.parse_args()
    whole = tuple(asked.networks) == models.NAMES
    keep(table(asked.networks, asked.jobs), HERE / "arenas.txt" if whole else None)


if __name__ == "__main__":
    main()
