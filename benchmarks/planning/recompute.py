"""Recomputation in every network of models/: ``python -m benchmarks.planning.recompute [--only NAME]...``.

Writes recompute.json as the networks come, then recompute.txt and .png. Each network is a whole training step (loss,
backward pass, SGD with momentum) at the batch of the papers, planned without a device: nothing is allocated or run.
Networks are planned in ``--jobs`` processes at a time, one thread each. ``--only`` plans the networks named again and
leaves the others as they are; ``--resume`` plans what is missing in recompute.json;
``--quick`` plans four small networks with a tenth of the effort and writes nothing.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import memonger
import models
from benchmarks.machine import MIB, Table, pyplot, stamp
from memonger.devices import parse_device
from memonger.errors import PlanError
from memonger.graph.costs import INTENSITY
from memonger.graph.liveness import ALIGNMENT
from memonger.ir import training_roles
from memonger.ir.emitter import collecting_later
from memonger.lowering.lowered import portable
from memonger.plan import BasePlan, graph_of, input_bytes, parameter_bytes
from memonger.schedule import EFFORT, Request
from memonger.schedule.decide import decide
from memonger.schedule.marks import place
from memonger.schedule.recompute import frontier
from memonger.schedule.solution import Solution

GIB = 1 << 30
LEVELS = ("none", "cheap", "block", "sqrt", "log", "sweep")
PERCENT = (50, 30, 20, 10)
PLOTTED = ("resnet50", "resnet1001", "densenet_bc100", "mobilenet_v2", "gpt2", "unet")
QUICK = ("densenet_bc100", "googlenet", "unet", "vgg16")
ORDER = "best"
SMALLEST = "smallest"


@dataclass(frozen=True, slots=True)
class Network:
    """A network as it is planned.

    Attributes:
        batch: Its batch.
        settings: What differs from the builder's defaults.
        totals: Further budgets, as parts of everything the step takes: parameters, optimizer state and inputs too.
    """

    batch: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    totals: tuple[float, ...] = ()


NETWORKS: Mapping[str, Network] = {
    "resnet50": Network(32),
    "resnet101": Network(32),
    "resnet152": Network(32),
    "resnet200": Network(32),
    "resnet1001": Network(32, totals=(7 / 48,)),
    "densenet121": Network(32),
    "densenet201": Network(32),
    "densenet_bc100": Network(64, totals=(0.3,)),
    "mobilenet_v2": Network(64),
    "vgg16": Network(64),
    "googlenet": Network(64),
    "unet": Network(4),
    "lstm": Network(32, {"seq_len": 100, "num_hidden": 1024, "num_layers": 4}),
    "gpt2": Network(8),
    "vit_b16": Network(32),
}
LONGEST = ("resnet1001", "lstm", "resnet200")
"""Begun first, so that no process is left with one of them at the end."""


@dataclass(frozen=True, slots=True)
class Row:
    """One plan; bytes and seconds.

    Attributes:
        network: Its name.
        case: A strategy, a budget in percent of the peak (``50 %``) or of everything (``30 % of all``), or
            ``smallest``.
        nodes: Of the training step, without recomputation.
        base: Parameters, optimizer state and inputs.
        required: Arena and ``base``.
        overhead: Extra cost over the cost of one pass.
        again: Steps that run a node again.
        cpu: Seconds of the processor; ``seconds`` are the clock's. Loading and differentiating aren't in them.
        prepared: Clock's seconds for building, differentiating and lowering the model; the same for all its rows.
        failed: Why there is no plan, if there is none: the other figures are 0 then.
    """

    network: str
    case: str
    nodes: int
    base: int
    prepared: float
    peak: int = 0
    arena: int = 0
    bound: int = 0
    required: int = 0
    overhead: float = 0.0
    again: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    failed: str | None = None


def prepare(name: str, effort: int) -> Request:
    """Build, differentiate and lower a network; what its strategies are asked."""
    network = NETWORKS[name]
    with collecting_later():
        built = models.build_ir(name, batch=network.batch, training=True, **network.settings)
        source = memonger.differentiate(built, loss="loss", optimizer=memonger.SGD(lr=0.1, momentum=0.9))
        return request_of(source, effort)


def request_of(source: memonger.Model, effort: int) -> Request:
    """What strategies are asked of a model, planned for no device."""
    with collecting_later():
        name, model = source.name, portable(source).model
        placed, known = place(source.ir, model, name), training_roles.read(model, name)
        return Request(
            graph=graph_of(model, known, None, None),
            base=parameter_bytes(model, known, parse_device("none")) + input_bytes(model, known),
            stages=placed.stages,
            forced=placed.forced,
            effort=effort,
        )


def plan_row(empty: Row, plan: Callable[[], Solution]) -> Row:
    """The row of a case, timed; the plan is checked."""
    begin, used = time.perf_counter(), time.process_time()
    try:
        with collecting_later():
            found = plan()
        failed = None
    except PlanError as error:
        found, failed = None, str(error)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - used
    if found is None:
        return replace(empty, failed=failed, seconds=seconds, cpu=cpu)
    made = BasePlan(graph=found.graph, offsets=found.offsets, arena_bytes=found.arena_bytes, alignment=ALIGNMENT)
    made.verify()
    return replace(
        empty, peak=made.peak_bytes, arena=made.arena_bytes, bound=made.lower_bound_bytes,
        required=empty.base + found.total_bytes, overhead=made.overhead,
        again=len(made.recomputed), seconds=seconds, cpu=cpu,
    )  # fmt: skip


def budgets(name: str) -> list[str]:
    """The budgets a network is planned for."""
    return [f"{percent} %" for percent in PERCENT] + [f"{100 * part:.1f} % of all" for part in NETWORKS[name].totals]


def rows_of(name: str, effort: int) -> Iterator[Row]:
    """All cases of a network, as they are planned: strategies, falling budgets, the smallest one."""
    begin = time.perf_counter()
    request = prepare(name, effort)
    empty = Row(name, "", len(request.graph.nodes), request.base, time.perf_counter() - begin)
    none = empty
    for level in LEVELS:
        row = plan_row(replace(empty, case=level), partial(decide, request, level, ORDER))
        none = row if level == "none" else none
        yield row
    failed: str | None = None
    limits = {case: budget_of(case, none) for case in budgets(name)}
    for case in sorted(limits, key=lambda case: -limits[case]):
        row = replace(empty, case=case, failed=f"not tried, as {failed} failed")
        if failed is None:
            asked = replace(request, budget=limits[case])
            row = plan_row(replace(row, failed=None), partial(decide, asked, "budget", ORDER))
            failed = None if row.failed is None else case
        yield row
    yield plan_row(replace(empty, case=SMALLEST), lambda: frontier(request, 0, ORDER)[-1])


def planned(name: str, effort: int) -> list[Row]:
    """All cases of a network; that without recomputation is the first."""
    return list(rows_of(name, effort))


def budget_of(case: str, none: Row) -> int:
    """Bytes of a case like ``50 %`` (of the peak, and what lies beside the arena) or ``30 % of all``."""
    share = float(case.split(" ")[0]) / 100
    return int(share * none.required) if case.endswith("of all") else none.base + int(share * none.peak)


COLUMNS = Table(
    "network<15", "nodes>7", "strategy<14", "peak>10.1f", "%>8.1f", "arena>10.1f", "÷bound>8.4f", "all>10.1f", "%>8.1f",
    "overhead>9.2f", "again>8", "seconds>8.2f", "cpu>8.2f",
)  # fmt: skip


def line(row: Row, none: Row) -> str:
    """One line of the table."""
    head = row.network, row.nodes, row.case
    if row.failed is not None:
        return f"{COLUMNS.row(*head):38}{row.failed.partition('. The smallest')[0]:63}{row.seconds:8.2f}{row.cpu:8.2f}"
    return COLUMNS.row(
        *head, row.peak / MIB, 100 * row.peak / none.peak, row.arena / MIB, row.arena / row.bound, row.required / MIB,
        100 * row.required / none.required, 100 * row.overhead, row.again, row.seconds, row.cpu,
    )  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    """The rows, in the networks' order, with what they mean above and the published figures below."""
    none = {row.network: row for row in rows if row.case == "none"}
    ordered = [row for name in NETWORKS for row in rows if row.network == name]
    took = sum(row.seconds for row in rows) + sum(row.prepared for row in none.values())
    lines = [
        "Recomputation in training steps, planned without a device: MiB, percent, seconds",
        *stamp("planning.recompute", ["numpy", "onnx-ir"]),
        f"seconds of all plans and of making the models: {took:.0f}",
        "",
        "peak: live bytes of the arena at the worst step, and percent of it with nothing recomputed (none)",
        "÷bound: arena over the lower bound of its schedule",
        "all: arena, parameters, optimizer state and inputs; percent as before",
        "overhead: extra cost in percent of one pass. Costs are estimates: bytes moved, or FLOPs at "
        f"{INTENSITY} a byte",
        "again: steps that run a node again. seconds, cpu: search and layout; loading and differentiating are below",
        "50 %: a budget of that part of the peak; % of all: of all; smallest: the least the search found",
        "",
        COLUMNS.heading,
    ]
    before = None
    for row in ordered:
        lines += [""] if before not in (None, row.network) else []
        lines.append(line(row, none[row.network]))
        before = row.network
    lines += ["", *networks_text(none), "", *published(rows)]
    return "\n".join(lines) + "\n"


def networks_text(none: Mapping[str, Row]) -> Iterator[str]:
    """What each network was: batch, settings, parameters, and how long making its training step took."""
    yield "networks: batch, other settings than the builder's, parameters with optimizer state and inputs, preparation"
    for name in (name for name in NETWORKS if name in none):
        network, row = NETWORKS[name], none[name]
        settings = ", ".join(f"{key}={value}" for key, value in network.settings.items())
        yield (f"{name:15}{network.batch:5}  {settings:42}{row.base / MIB:9.1f} MiB{row.prepared:8.1f} s")


def published(rows: Sequence[Row]) -> Iterator[str]:
    """Published figures, with ours at the same memory beside."""
    of = {(row.network, row.case): row for row in rows}
    yield "published, measured seconds: memory → overhead; ours are estimated costs of our networks at that ratio"
    yield "  Chen et al. 2016, 1000-layer ResNet: 48 GB → 7 GB (14.6 %) at +30 %"
    yield from beside(of, "resnet1001", ["14.6 % of all"])
    yield "  Pleiss et al. 2017, DenseNet-BC-100: to 30 % at +14 %"
    yield from beside(of, "densenet_bc100", ["30.0 % of all"])
    yield "  Zhao et al. 2023 (Rockmate), activations of GPT and ResNets: to 50 to 20 % at +10 to 20 %"
    for name in ("gpt2", "resnet50", "resnet101"):
        yield from beside(of, name, ["50 %", "30 %", "20 %"])


def beside(of: Mapping[tuple[str, str], Row], name: str, wanted: Sequence[str]) -> Iterator[str]:
    """Our figures for some cases of a network."""
    none = of.get((name, "none"))
    for case in wanted:
        row = of.get((name, case))
        if none is None or row is None:
            continue
        if row.failed is not None:
            yield f"    {name}: no plan for {case}"
        else:
            every = case.endswith("of all")
            part = row.required / none.required if every else row.peak / none.peak
            size = f"{none.required / GIB:.2f} GiB → {row.required / GIB:.2f} GiB with parameters"
            what = "everything" if every else "the peak"
            yield f"    {name}: to {100 * part:.1f} % of {what} at {100 * row.overhead:+.2f} % ({size})"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Overhead against peak of six networks: budgets as a line, the other strategies as marks."""
    of = {(row.network, row.case): row for row in rows if row.failed is None}
    figure, axes = pyplot().subplots(2, 3, figsize=(12, 7.5), layout="constrained")
    for axis, name in zip(axes.flat, PLOTTED, strict=True):
        none = of[name, "none"]
        budget = [row for (network, case), row in of.items() if network == name and case not in LEVELS[1:]]
        budget.sort(key=lambda row: row.peak)
        points = [(100 * row.peak / none.peak, 100 * row.overhead) for row in budget]
        axis.plot(*zip(*points, strict=True), "o-", color="black", markersize=4, label="budget")
        for mark, case in zip("v^sDP", LEVELS[1:], strict=True):
            row = of.get((name, case))
            if row is not None:
                axis.plot(100 * row.peak / none.peak, 100 * row.overhead, mark, markersize=8, alpha=0.75, label=case)
        axis.set_title(f"{name}, batch {NETWORKS[name].batch}: {none.peak / GIB:.2f} GiB", fontsize=11)
        axis.set_xlim(0, 105)
        axis.set_ylim(bottom=-1)
        axis.set_xlabel("peak, % of that without recomputation")
        axis.set_ylabel("extra cost, % of one pass")
        axis.grid(alpha=0.3)
    axes.flat[0].legend(fontsize=9)
    figure.savefig(path, dpi=100)


def main() -> None:
    """Plan, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", default=[], choices=list(NETWORKS), metavar="NAME")
    parser.add_argument("--resume", action="store_true", help="keep what recompute.json has")
    parser.add_argument("--quick", action="store_true", help="small networks, a tenth of the effort; nothing written")
    parser.add_argument("--effort", type=int, default=EFFORT, help="of each search (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="networks planned at a time (default: %(default)s)")
    asked = parser.parse_args()
    names = asked.only or list(QUICK if asked.quick else NETWORKS)
    effort = asked.effort // 10 if asked.quick else asked.effort
    file = Path(__file__).with_suffix(".json")
    keep = file.is_file() and not asked.quick and (asked.resume or bool(asked.only))
    rows = [Row(**row) for row in json.loads(file.read_text())] if keep else []
    done = {row.network for row in rows} if asked.resume else set()
    names = sorted((name for name in names if name not in done), key=lambda name: name not in LONGEST)
    with ProcessPoolExecutor(asked.jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        for future in as_completed([pool.submit(planned, name, effort) for name in names]):
            new = future.result()
            rows = [row for row in rows if row.network != new[0].network] + new
            print("\n".join(line(row, new[0]) for row in new), file=sys.stderr, flush=True)
            if not asked.quick:
                file.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    text = table(rows)
    print(text, end="")
    if not asked.quick:
        (Path(__file__).with_suffix(".txt")).write_text(text)
        if {row.network for row in rows}.issuperset(PLOTTED):
            plot(rows, Path(__file__).with_suffix(".png"))


if __name__ == "__main__":
    main()
