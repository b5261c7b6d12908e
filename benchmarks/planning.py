"""How planning time and memory grow with the number of nodes: ``python benchmarks/planning.py``.

Each size is planned without a device in a process of its own, from a file; memory is the process's peak resident size.
"""

import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

import memonger

SIZES = (1_000, 10_000, 100_000)
HERE = Path(__file__).parent


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


def measure(path: str) -> None:
    """Plan one model and print what it took."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    plan = memonger.search_plan(path, batch=4, device="none", mode="inference")
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        json.dumps(
            {
                "nodes": len(plan.graph.nodes),
                "seconds": seconds,
                "mib": (peak - before) / 1024,
                "ratio": plan.arena_bytes / plan.lower_bound_bytes,
            }
        )
    )


def main() -> None:
    """Measure every size and keep the table."""
    lines = [
        "Planning without a device (load, lower, three orders, layout, verify)",
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, onnx {onnx.__version__}, "
        f"numpy {np.__version__}; command: python benchmarks/planning.py",
        "",
        f"{'nodes':>8} {'seconds':>9} {'us/node':>9} {'MiB over imports':>17} {'KiB/node':>9} {'arena/bound':>12}",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for size in SIZES:
            path = str(Path(folder) / f"{size}.onnx")
            onnx.save(residual_chain(size), path)
            done = subprocess.run([sys.executable, __file__, path], capture_output=True, text=True, check=True)
            row = json.loads(done.stdout)
            per_node = row["seconds"] / row["nodes"] * 1e6
            kib = row["mib"] * 1024 / row["nodes"]
            lines.append(
                f"{row['nodes']:>8} {row['seconds']:>9.2f} {per_node:>9.0f} {row['mib']:>17.0f} {kib:>9.1f} "
                f"{row['ratio']:>12.4f}"
            )
    text = "\n".join(lines) + "\n"
    (HERE / "planning.txt").write_text(text)
    print(text, end="")


if __name__ == "__main__":
    measure(sys.argv[1]) if len(sys.argv) > 1 else main()
