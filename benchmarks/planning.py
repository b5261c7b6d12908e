"""How long planning takes as networks grow: ``python -m benchmarks.planning [--sizes N ...] [--networks NAME ...]``.

Chains of residual blocks of each size are planned for inference without a device, in a process of its own, from a file;
memory is the process's peak resident size. Training forms of models/ are loaded, differentiated, and planned without a
device, each step timed apart. Planning a step under a budget is timed by `benchmarks.recompute`.

For the CPU a network is planned for inference on two threads: without a budget, for a byte, which is refused, and for
the least that the refusal names. Planning runs the model: how often, and how long that took, is `Plan.spent`. Nodes
alone are those that ran by themselves, whole and on slices; the rest is onnxruntime's optimizer, and memonger itself.
"""

import argparse
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

import memonger
import models
from benchmarks import exports
from benchmarks.machine import HERE, Table, keep, stamp
from memonger.cli.worker import Worker, say
from memonger.errors import BudgetError

SIZES = (1_000, 10_000, 100_000)
NETWORKS = ("resnet18", "densenet121", "gpt", "lstm", "resnet200", "resnet1001")
ON_CPU = {
    "resnet50": (16,), "unet": (4,), "vit_l16": (1,), "gpt2 medium": (1,), "image decoder": (1, 4),
    "super-resolution": (2,),
}  # fmt: skip
LARGE = {
    "vit_l16": ("vit_b16", {"num_layers": 24, "heads": 16, "width": 1024}),
    "gpt2 medium": ("gpt2", {"num_layers": 24, "heads": 16, "width": 1024}),
}
CPU = Table(
    "network<17",
    "batch>5",
    "budget<9",
    "total MiB>9.1f",
    "seconds>8.1f",
    "runs of the model>18",
    "seconds in them>16.1f",
    "in nodes alone>15.1f",
    "the rest>9.1f",
)
CHAINS = Table(
    "nodes>8", "seconds>10.2f", "us/node>10.0f", "MiB over imports>18.0f", "KiB/node>10.1f", "arena/bound>13.4f"
)
TRAINING = Table(
    "network<14", "forward nodes>14", "training nodes>15", "load s>8.2f", "differentiate s>17.2f", "plan s>8.2f"
)


def residual_chain(nodes: int) -> onnx.ModelProto:
    """Blocks of Conv, Relu, Conv, Add and Relu, as in a residual network, until there are ``nodes`` nodes."""
    weight = helper.make_tensor("weight", TensorProto.FLOAT, [8, 8, 3, 3], np.full(576, 0.01, np.float32))
    steps, value = [], "x"
    while len(steps) + 5 <= nodes:
        i = len(steps)
        names = [f"v{i + k}" for k in range(5)]
        steps += [
            helper.make_node("Conv", [value, "weight"], [names[0]], name=f"conv{i}", pads=[1, 1, 1, 1]),
            helper.make_node("Relu", [names[0]], [names[1]], name=f"relu{i}"),
            helper.make_node("Conv", [names[1], "weight"], [names[2]], name=f"conv{i + 2}", pads=[1, 1, 1, 1]),
            helper.make_node("Add", [names[2], value], [names[3]], name=f"add{i}"),
            helper.make_node("Relu", [names[3]], [names[4]], name=f"relu{i + 4}"),
        ]
        value = names[4]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 8, 16, 16])]
    outputs = [helper.make_tensor_value_info(value, TensorProto.FLOAT, ["batch", 8, 16, 16])]
    graph = helper.make_graph(steps, f"chain{nodes}", inputs, outputs, [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def plan_alone(path: str) -> None:
    """Plan one model in this process and say what it took."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan, seconds = timed(lambda: memonger.search_plan(path, batch=4, device="none", mode="inference"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ratio = plan.arena_bytes / plan.lower_bound_bytes
    say({"nodes": len(plan.graph.nodes), "seconds": seconds, "kib": peak - before, "ratio": ratio})


def timed(make: Callable[[], Any]) -> tuple[Any, float]:
    """What a call returns, and its seconds."""
    begin = time.perf_counter()
    made = make()
    return made, time.perf_counter() - begin


def chain_row(size: int, folder: Path) -> str:
    """The row of a chain of so many nodes."""
    path = folder / f"{size}.onnx"
    onnx.save(residual_chain(size), path)
    with Worker("benchmarks.planning", ["--plan", str(path)], folder / "planning.err") as worker:
        said = worker.read()
    nodes, seconds, kib = said["nodes"], said["seconds"], said["kib"]
    return CHAINS.row(nodes, seconds, seconds / nodes * 1e6, kib / 1024, kib / nodes, said["ratio"])


def training_row(name: str) -> str:
    """The row of a network's training step."""
    model = models.build_ir(name, batch=2, training=True)
    optimizer = memonger.SGD(lr=0.1, momentum=0.9)
    loaded, loading = timed(lambda: memonger.load(model))
    training, differentiating = timed(lambda: memonger.differentiate(loaded, loss="loss", optimizer=optimizer))
    _, planning = timed(lambda: memonger.search_plan(training, device="none"))
    nodes = loaded.ir.graph.num_nodes(), training.ir.graph.num_nodes()
    return TRAINING.row(name, *nodes, loading, differentiating, planning)


def plan_for_cpu(path: str, batch: int) -> None:
    """Plan one model for the CPU in this process: freely, for the least that is found, for less; say what each took."""
    options: dict[str, Any] = {"batch": batch, "device": "cpu", "mode": "inference", "threads": 2}
    least = 0
    for name in ("none", "1 byte", "least"):
        budget = {"none": None, "1 byte": 1, "least": least}[name]
        begin, total, runs = time.perf_counter(), None, (None, None, None)
        try:
            plan = memonger.search_plan(path, **options, budget=budget)
            total, runs = plan.total_bytes / (1 << 20), (plan.spent.runs, plan.spent.seconds, plan.spent.alone)
        except BudgetError as error:  # it ran the model as often as the next one will
            least = error.smallest
        seconds = time.perf_counter() - begin
        say({"row": [name, total, seconds, *runs, None if total is None else seconds - runs[1] - runs[2]]})


def cpu_rows(name: str, batch: int, folder: Path) -> Iterator[str]:
    """The rows of a network for the CPU."""
    path = folder / "network.onnx"
    if name in exports.EXPORTS:
        exports.export(name, path)
    else:
        base, settings = LARGE.get(name, (name, {}))
        onnx.save(models.build(base, batch=None, **settings), path)
    with Worker("benchmarks.planning", ["--for-cpu", str(path), str(batch)], folder / "planning.err") as worker:
        for _ in range(3):
            yield CPU.row(name, batch, *worker.read()["row"])


def table(sizes: Sequence[int], networks: Sequence[str], on_cpu: Sequence[str]) -> Iterator[str]:
    """Lines of the table, as they are measured."""
    yield from stamp("planning", ["onnx", "onnx-ir", "numpy"])
    yield "\nInference without a device (load, lower, three orders, layout, verify)\n"
    yield CHAINS.heading
    with tempfile.TemporaryDirectory() as folder:
        yield from (chain_row(size, Path(folder)) for size in sizes)
    yield "\nTraining without a device, batch 2: the backward pass written, then planned\n"
    yield TRAINING.heading
    yield from map(training_row, networks)
    yield "\nInference on the CPU, two threads: without a budget, for 1 byte, and for the least that this names\n"
    yield CPU.heading
    for name in on_cpu:
        for batch in ON_CPU[name]:
            with tempfile.TemporaryDirectory() as folder:
                yield from cpu_rows(name, batch, Path(folder))


def main() -> None:
    """Measure; the table is kept where nothing was left out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", nargs="*", type=int, default=SIZES, metavar="N", help="nodes of the chains")
    parser.add_argument("--networks", nargs="*", choices=models.NAMES, default=NETWORKS, metavar="NAME")
    parser.add_argument("--on-cpu", nargs="*", choices=tuple(ON_CPU), default=tuple(ON_CPU), metavar="NAME")
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    parser.add_argument("--for-cpu", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.plan:
        plan_alone(asked.plan)
        return
    if asked.for_cpu:
        plan_for_cpu(asked.for_cpu[0], int(asked.for_cpu[1]))
        return
    given = tuple(asked.sizes), tuple(asked.networks), tuple(asked.on_cpu)
    whole = given == (SIZES, NETWORKS, tuple(ON_CPU))
    keep(table(*given), HERE / "planning.txt" if whole else None)


if __name__ == "__main__":
    main()
