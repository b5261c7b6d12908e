"""Memory and time of real training steps against their plans: ``python -m benchmarks.recompute_run [--only NAME]...``.

Writes recompute_run.txt and .json. Every plan runs in a process of its own; the plans of a network take turns for their
times. Memory is the process's own pages over what was resident with the libraries loaded. Predicted are arena, scratch,
parameters with optimizer state, and inputs.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import memonger
import models
from benchmarks.machine import machine
from benchmarks.training_step import line_of, start, timed
from memonger.errors import BudgetError
from memonger.model.model import Model
from memonger.model.values import nbytes
from memonger.runtime import process_memory
from memonger.runtime.feeds import inputs_of

HERE = Path(__file__).parent
MIB = 1 << 20
THREADS, STEPS, ROUNDS, SHARE = 2, 3, 3, 0.4
PLANS = ("none", "sweep", "40 %")


@dataclass(frozen=True, slots=True)
class Network:
    """A network as it is trained: its batch, what differs from the builder's defaults, and the labels' range."""

    batch: int
    classes: int
    settings: Mapping[str, Any] = field(default_factory=dict)


NETWORKS: Mapping[str, Network] = {
    "gpt": Network(8, 1000, {"num_layers": 6, "width": 256, "seq_len": 256}),
    "resnet50": Network(8, 1000),
    "unet": Network(1, 2, {"image": 256}),
    "densenet_bc100": Network(64, 10),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One plan of one network; bytes and seconds.

    Attributes:
        network: Its name.
        plan: ``none``, ``sweep``, or the budget.
        arena: Of the plan.
        scratch: The most any kernel takes.
        held: Parameters, optimizer state and inputs.
        nodes: Steps of the plan.
        rest: Bytes resident after loading, parameters and statistics left out: the runtime's own graph, bindings.
        peak: Resident during a step, over what was before the session.
        seconds: Of a step, median.
        overhead: Extra cost in parts of one pass, of the nodes' times as measured when planning.
        losses: Of the first steps.
    """

    network: str
    plan: str
    arena: int
    scratch: int
    held: int
    nodes: int
    rest: int
    peak: int
    seconds: float
    overhead: float
    losses: list[float]

    @property
    def predicted(self) -> int:
        """What a step was to take."""
        return self.arena + self.scratch + self.held


def made(name: str) -> Model:
    """The training step of a network."""
    network = NETWORKS[name]
    built = models.build_ir(name, batch=network.batch, training=True, **network.settings)
    return memonger.differentiate(built, loss="loss", optimizer=memonger.SGD(lr=0.01, momentum=0.9))


def planned(source: Model, kind: str, none: memonger.Plan | None) -> memonger.Plan:
    """The plan of one kind; a budget is counted from the plan that recomputes nothing, or the smallest one found."""
    options: dict[str, Any] = {"strategy": kind}
    if none is not None and kind.endswith("%"):
        beside = none.parameter_bytes + none.input_bytes
        options = {"budget": beside + int(float(kind.split()[0]) / 100 * (none.required_bytes - beside))}
    search = partial(memonger.search_plan, source, device="cpu", threads=THREADS)
    try:
        plan: memonger.Plan = search(**options)
    except BudgetError as error:
        plan = search(budget=error.smallest)
    return plan


def random_inputs(plan: memonger.Plan, classes: int) -> dict[str, np.ndarray]:
    """Normal numbers, or integers below ``classes``, for what a step takes."""
    known, rng = plan.training, np.random.default_rng(0)
    assert known is not None
    held, found = {*known.persistent, *known.scalars.values()}, {}
    for value in inputs_of(plan.model.graph):
        assert value.shape is not None
        assert value.dtype is not None
        if value.name not in held:
            floating = value.dtype.is_floating_point()
            array = rng.standard_normal(value.shape) if floating else rng.integers(0, classes, value.shape)
            found[value.name] = array.astype(value.dtype.numpy())
    return found


def serve(path: str, inputs: str) -> None:
    """One plan in this process: losses and memory first, then the seconds of a step for each line read."""
    import onnxruntime  # noqa: F401  # before the baseline: the libraries themselves aren't counted

    import memonger.training_session

    with np.load(inputs) as archive:
        feeds = {name: archive[name] for name in archive.files}
    baseline = process_memory.settle() - sum(feed.nbytes for feed in feeds.values())
    trainer = memonger.TrainingSession(path, intra_op_threads=THREADS, check_order=False)
    loaded = process_memory.settle() - baseline
    losses = [trainer.step(feeds)]
    process_memory.reset_peak()
    losses += [trainer.step(feeds) for _ in range(STEPS - 1)]
    print(
        json.dumps({"losses": losses, "loaded": loaded, "peak": process_memory.resident().peak - baseline}), flush=True
    )
    for _ in sys.stdin:
        begin = time.perf_counter()
        trainer.step(feeds)
        print(time.perf_counter() - begin, flush=True)


def measure(name: str, folder: Path) -> list[Row]:
    """Plan a network in each way, and run the plans in turns."""
    source = made(name)
    plans: dict[str, memonger.Plan] = {}
    for kind in PLANS:
        plans[kind] = planned(source, kind, plans.get("none"))
        plans[kind].save(folder / f"{kind}.onnx")
        print(f"{name}: {kind} planned in {plans[kind].planning_seconds:.0f} s", file=sys.stderr, flush=True)
    inputs = folder / "inputs.npz"
    np.savez(inputs, **dict[str, Any](random_inputs(plans["none"], NETWORKS[name].classes)))
    workers, said = {}, {}
    for kind in PLANS:
        path = str(folder / f"{kind}.onnx")
        workers[kind] = start(f"import benchmarks.recompute_run as r; r.serve({path!r}, {str(inputs)!r})", {})
        said[kind] = json.loads(line_of(workers[kind]))
    turns = [{kind: timed(worker) for kind, worker in workers.items()} for _ in range(ROUNDS)]
    for worker in workers.values():
        worker.communicate()
    return [
        _row(name, kind, plan, said[kind], statistics.median(turn[kind] for turn in turns))
        for kind, plan in plans.items()
    ]


def _row(name: str, kind: str, plan: memonger.Plan, said: Mapping[str, Any], seconds: float) -> Row:
    return Row(
        network=name,
        plan=kind,
        arena=plan.arena_bytes,
        scratch=plan.workspace_bytes or 0,
        held=plan.parameter_bytes + plan.input_bytes,
        nodes=len(plan.graph.nodes),
        rest=said["loaded"] - _written(plan),
        peak=said["peak"],
        seconds=seconds,
        overhead=plan.overhead,
        losses=said["losses"],
    )


def _written(plan: memonger.Plan) -> int:
    """Bytes that are written when a session is made: parameters and statistics. Optimizer state is zero pages."""
    known = plan.training
    assert known is not None
    kept = {*known.parameters, *known.statistics}
    return sum(nbytes(value) or 0 for value in plan.model.graph.inputs if value.name in kept)


def table(rows: Sequence[Row]) -> str:
    """The rows as text, with what they mean above."""
    none = {row.network: row for row in rows if row.plan == "none"}
    lines = [
        "Training steps of plans with recomputation: MiB resident, seconds",
        machine(["onnxruntime", "onnx-ir", "numpy"]) + f", {THREADS} threads",
        "python -m benchmarks.recompute_run",
        "",
        "held: parameters, optimizer state, inputs; predicted: arena, scratch, held; measured: a process's own pages",
        f"{PLANS[-1]}: a budget of that part of the peak with scratch, or the smallest one found where that is more",
        "rest: what loading left resident beyond parameters and state; it grows with the nodes (KiB a node beside)",
        "apart: measured over predicted; without rest: the same without that",
        "time: over the time of none; predicted time: 1 and the plan's overhead, of node times measured when planning",
        f"losses: of {STEPS} steps, bit for bit those of none",
        "",
        f"{'network':15}{'plan':6}{'nodes':>6}{'arena':>8}{'scratch':>8}{'held':>8}{'predicted':>10}{'measured':>9}"
        f"{'apart':>8}{'rest':>7}{'KiB/node':>9}{'without rest':>13}{'s/step':>8}{'time':>7}{'predicted':>10}  losses",
    ]
    for row in rows:
        first = none[row.network]
        same = "equal" if row.losses == first.losses else f"DIFFER: {row.losses} {first.losses}"
        lines.append(
            f"{row.network:15}{row.plan:6}{row.nodes:6}{row.arena / MIB:8.1f}{row.scratch / MIB:8.1f}"
            f"{row.held / MIB:8.1f}{row.predicted / MIB:10.1f}{row.peak / MIB:9.1f}{row.peak / row.predicted - 1:+8.1%}"
            f"{row.rest / MIB:7.1f}{row.rest / 1024 / row.nodes:9.1f}{(row.peak - row.rest) / row.predicted - 1:+13.1%}"
            f"{row.seconds:8.3f}{row.seconds / first.seconds:7.3f}{1 + row.overhead:10.3f}  {same}"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure the networks named, or all; what was measured is written beside this file after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", default=[], choices=list(NETWORKS), metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="the two fastest networks")
    asked = parser.parse_args()
    names = asked.only or (["densenet_bc100", "gpt"] if asked.quick else list(NETWORKS))
    rows: list[Row] = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(name, Path(folder))
        print("\n".join(table(rows).splitlines()[-len(PLANS) :]), file=sys.stderr, flush=True)
        missing = [other for other in NETWORKS if other not in {row.network for row in rows}]
        text = table(rows) + (f"not run: {', '.join(missing)}\n" if missing else "")
        (HERE / "recompute_run.txt").write_text(text)
        (HERE / "recompute_run.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print(text, end="")


if __name__ == "__main__":
    main()
