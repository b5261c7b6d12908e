"""Training steps side by side with PyTorch eager on the CPU: ``python -m benchmarks.training_step [NETWORK ...]``.

Writes training_step.txt and .json. The same network, weights, batch, optimizer (SGD with momentum) and number of
threads; each in a process of its own, and they take turns. "tuned" is PyTorch again, its memory never given back to
the system (MALLOC_MMAP_MAX_=0, no trimming): fresh pages are slow on virtual machines. Peak memory is the process's own
pages over what was resident before the network was made: parameters, optimizer state, gradients and activations.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import machine

KINDS = ("torch", "tuned", "memonger")
THREADS, ROUNDS, STEPS, WARM = 2, 5, 1, 2
RATE, MOMENTUM = 0.01, 0.9
HERE = Path(__file__).parent
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """One network: seconds of a step, bytes, the first losses, and what the plan said it would take."""

    network: str
    batch: int
    torch_seconds: float
    tuned_seconds: float
    seconds: float
    torch_peak: int
    tuned_peak: int
    peak: int
    predicted: int
    arena: int
    losses: list[float]
    torch_losses: list[float]


def prepare(network: str, path: Path) -> dict[str, int]:
    """Export, differentiate and plan a network into ``path``; the figures of the plan."""
    import torch

    import memonger
    from benchmarks.torch_models import CASES

    torch.manual_seed(0)
    case = CASES[network]
    inputs, _ = case.data()
    model = memonger.to_training_mode(memonger.from_torch(case.make(), inputs))
    optimizer = memonger.SGD(lr=RATE, momentum=MOMENTUM)
    plan = memonger.search_plan(
        memonger.differentiate(model, loss="softmax_cross_entropy", optimizer=optimizer), threads=THREADS
    )
    plan.save(path)
    return {
        "predicted": plan.arena_bytes + (plan.workspace_bytes or 0) + plan.parameter_bytes,
        "arena": plan.arena_bytes,
    }


def serve(kind: str, network: str, path: str) -> None:
    """One of the two, in this process: losses and peak first, then seconds for each line read."""
    import onnxruntime  # noqa: F401  # both before the baseline: the libraries themselves aren't counted
    import torch

    from benchmarks.torch_models import CASES
    from memonger.runtime import process_memory

    torch.set_num_threads(THREADS)

    inputs, labels = CASES[network].data()
    baseline = process_memory.settle()
    step = _planned_step(path, inputs, labels) if kind == "memonger" else _torch_step(network, inputs, labels)
    losses = [step() for _ in range(WARM)]
    process_memory.reset_peak()
    losses += [step() for _ in range(2)]
    peak = max(0, process_memory.resident().peak - baseline)
    print(json.dumps({"losses": losses, "peak": peak}), flush=True)
    for _ in sys.stdin:
        begin = time.perf_counter()
        for _ in range(STEPS):
            step()
        print((time.perf_counter() - begin) / STEPS, flush=True)


def _torch_step(network: str, inputs: Any, labels: Any) -> Any:
    import torch

    from benchmarks.torch_models import CASES

    torch.manual_seed(0)
    module = CASES[network].make().train()
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE, momentum=MOMENTUM)

    def step() -> float:
        loss = torch.nn.functional.cross_entropy(module(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def _planned_step(path: str, inputs: Any, labels: Any) -> Any:
    import memonger

    trainer = memonger.TrainingSession(path, intra_op_threads=THREADS, check_order=False)
    names = [value.name for value in trainer.inputs if value.name != "labels"]
    feeds = {names[0]: inputs.numpy(), "labels": labels.numpy()}
    return lambda: trainer.step(feeds)


def measure(network: str, folder: Path) -> Row:
    """Both in turns."""
    from benchmarks.torch_models import CASES

    path = folder / f"{network}.onnx"
    code = (
        f"import benchmarks.training_step as t, json; print(json.dumps(t.prepare({network!r}, t.Path({str(path)!r}))))"
    )
    figures = json.loads(
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    )
    workers = {kind: _worker(kind, network, path) for kind in KINDS}
    said = {kind: json.loads(line_of(worker)) for kind, worker in workers.items()}
    seconds: dict[str, list[float]] = {kind: [] for kind in workers}
    for _ in range(ROUNDS):
        for kind, worker in workers.items():
            seconds[kind].append(timed(worker))
    for worker in workers.values():
        worker.communicate()
    best = {kind: statistics.median(times) for kind, times in seconds.items()}
    return Row(
        network, CASES[network].batch, best["torch"], best["tuned"], best["memonger"],
        said["torch"]["peak"], said["tuned"]["peak"], said["memonger"]["peak"],
        figures["predicted"], figures["arena"], said["memonger"]["losses"], said["torch"]["losses"],
    )  # fmt: skip


def _worker(kind: str, network: str, path: Path) -> "subprocess.Popen[str]":
    code = f"import benchmarks.training_step as t; t.serve({kind!r}, {network!r}, {str(path)!r})"
    return start(code, {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 60)} if kind == "tuned" else {})


def start(code: str, environment: Mapping[str, str]) -> "subprocess.Popen[str]":
    """A process that runs this code and answers to lines with lines."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def timed(worker: "subprocess.Popen[str]") -> float:
    """Ask for seconds."""
    assert worker.stdin is not None
    worker.stdin.write("\n")
    worker.stdin.flush()
    return float(line_of(worker))


def line_of(worker: "subprocess.Popen[str]") -> str:
    """Its next answer."""
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if not line:
        raise SystemExit(f"a worker ended early with status {worker.wait()}")
    return line


def table(rows: list[Row]) -> str:
    """The rows as text, with what they were measured on."""
    lines = [
        machine(["torch", "onnxruntime", "onnx"]) + f", {THREADS} threads",
        "python -m benchmarks.training_step",
        "",
        f"{'':20}{'seconds a step':^31}{'':2}{'peak MiB':^31}",
        f"{'network':14}{'batch':>6}{'torch':>8}{'tuned':>8}{'ours':>8}{'ratio':>7}  {'torch':>8}{'tuned':>8}"
        f"{'ours':>8}{'ratio':>7}{'predicted':>11}{'arena':>8}{'loss apart':>12}",
    ]
    for row in rows:
        apart = abs(row.losses[0] - row.torch_losses[0]) / abs(row.torch_losses[0])
        lines.append(
            f"{row.network:14}{row.batch:6}{row.torch_seconds:8.3f}{row.tuned_seconds:8.3f}{row.seconds:8.3f}"
            f"{row.seconds / row.tuned_seconds:7.3f}  {row.torch_peak / MIB:8.1f}{row.tuned_peak / MIB:8.1f}"
            f"{row.peak / MIB:8.1f}{row.peak / row.torch_peak:7.3f}{row.predicted / MIB:11.1f}{row.arena / MIB:8.1f}"
            f"{apart:12.1e}"
        )
    plain, tuned = (
        _mean([r.seconds / s for r, s in zip(rows, times, strict=True)])
        for times in ([r.torch_seconds for r in rows], [r.tuned_seconds for r in rows])
    )
    process_memory = _mean([r.peak / r.torch_peak for r in rows])
    lines += [
        "",
        f"geometric means: time {plain:.3f} of torch, {tuned:.3f} of torch tuned (the ratio above); "
        f"memory {process_memory:.3f} of torch",
    ]
    return "\n".join(lines) + "\n"


def _mean(ratios: list[float]) -> float:
    return math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))


def main() -> None:
    """Measure the networks named, or all; all are written beside this file."""
    from benchmarks.torch_models import CASES

    names = sys.argv[1:] or list(CASES)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            print(f"{name} ...", file=sys.stderr)
            rows.append(measure(name, Path(folder)))
            print(table(rows[-1:]).splitlines()[-3])
    print(table(rows))
    if len(names) == len(CASES):
        (HERE / "training_step.txt").write_text(table(rows))
        (HERE / "training_step.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
