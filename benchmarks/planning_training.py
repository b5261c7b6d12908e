"""How planning time of training grows with the network: ``python -m benchmarks.planning_training``.

Pre-activation ResNets on 32 × 32 images, momentum included, batch 32, without a device. "alone" is
the sweep or the search from the graph to a schedule, "plan" all of `search_plan` with the model differentiated before.
"""

import time
from pathlib import Path

import memonger
import models
from benchmarks.machine import machine
from memonger import remat
from memonger.plan import graph_of
from memonger.remat.reduction import reduce

DEPTHS = (29, 110, 326, 1001)
BUDGET = 0.4
"""Part of the peak with nothing recomputed."""
HERE = Path(__file__).parent


def strategy_seconds(training: memonger.Model, name: str, budget: int | None) -> float:
    """Seconds of a strategy alone."""
    graph = graph_of(training.ir, training.training, None, None)
    begin = time.perf_counter()
    remat.STRATEGIES[name].run(remat.Request(graph, budget=budget))
    return time.perf_counter() - begin


def main() -> None:
    """Measure every depth and keep the table."""
    lines = [
        machine(["onnx", "onnx-ir", "numpy"]),
        "python -m benchmarks.planning_training",
        "seconds; budget: 40 % of the peak with nothing recomputed",
        "",
        f"{'depth':>6}{'nodes':>8}{'problem':>9}{'load':>7}{'differentiate':>15}{'sweep alone':>13}{'sweep plan':>12}"
        f"{'budget alone':>14}{'budget plan':>13}{'us/node':>9}{'overhead %':>12}",
    ]
    print("\n".join(lines))
    for depth in DEPTHS:
        units = {"depth": depth}
        begin = time.perf_counter()
        model = memonger.load(models.build_ir("resnet1001", batch=32, training=True, **units))
        loading = time.perf_counter() - begin
        begin = time.perf_counter()
        training = memonger.differentiate(model, loss="loss", optimizer=memonger.SGD(lr=0.1, momentum=0.9))
        differentiating = time.perf_counter() - begin
        swept = memonger.search_plan(training, device="none")
        budget = int(BUDGET * swept.peak_before_bytes)
        resting = swept.parameter_bytes + swept.input_bytes
        plan = memonger.search_plan(training, device="none", budget=budget + resting)
        nodes = training.ir.graph.num_nodes()
        alone = [strategy_seconds(training, *case) for case in (("sweep", None), ("budget", budget))]
        lines.append(
            f"{depth:6}{nodes:8}{problem_nodes(training):9}{loading:7.2f}{differentiating:15.2f}{alone[0]:13.2f}"
            f"{swept.planning_seconds:12.2f}{alone[1]:14.2f}{plan.planning_seconds:13.2f}"
            f"{plan.planning_seconds / nodes * 1e6:9.0f}{100 * plan.overhead:12.2f}"
        )
        print(lines[-1], flush=True)
    (HERE / "planning_training.txt").write_text("\n".join(lines) + "\n")


def problem_nodes(training: memonger.Model) -> int:
    """Nodes of the problem that is searched."""
    return reduce(graph_of(training.ir, training.training, None, None)).problem.nodes


if __name__ == "__main__":
    main()
