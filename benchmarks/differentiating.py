"""How long writing the backward pass takes: ``python -m benchmarks.differentiating`` writes differentiating.txt.

Training forms of models/ with a loss and an optimizer; loading is timed apart. The last column is a plan of the result
without a device.
"""

import time
from pathlib import Path

import memonger
import models
from benchmarks.machine import machine

NETWORKS: dict[str, dict[str, int]] = {
    "resnet18": {},
    "densenet121": {},
    "gpt": {},
    "lstm": {},
    "resnet200": {},
    "resnet1001": {},
}
HERE = Path(__file__).parent


def main() -> None:
    """Measure every network and keep the table."""
    lines = [
        machine(["onnx", "onnx-ir", "numpy"]),
        "python -m benchmarks.differentiating",
        "",
        f"{'network':14}{'forward nodes':>14}{'training nodes':>15}{'load s':>8}{'differentiate s':>17}{'plan s':>8}",
    ]
    for name, options in NETWORKS.items():
        model = models.build_ir(name, batch=2, training=True, **options)
        begin = time.perf_counter()
        loaded = memonger.load(model)
        loading = time.perf_counter() - begin
        begin = time.perf_counter()
        training = memonger.differentiate(loaded, loss="loss", optimizer=memonger.SGD(lr=0.1, momentum=0.9))
        differentiating = time.perf_counter() - begin
        begin = time.perf_counter()
        memonger.search_plan(training, device="none")
        planning = time.perf_counter() - begin
        nodes = loaded.ir.graph.num_nodes(), training.ir.graph.num_nodes()
        lines.append(f"{name:14}{nodes[0]:14}{nodes[1]:15}{loading:8.2f}{differentiating:17.2f}{planning:8.2f}")
        print(lines[-1], flush=True)
    (HERE / "differentiating.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
