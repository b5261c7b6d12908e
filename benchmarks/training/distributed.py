"""Training on several ranks beside PyTorch's DDP: ``python -m benchmarks.training.distributed`` writes distributed.txt.

All ranks are processes of one machine, of one thread each, with gloo between them. First: whether N ranks with batches
of B train as one with N·B. Then step time, memory of a rank and bytes sent beside PyTorch's DistributedDataParallel,
which takes turns; arenas with gradients in buckets and without; a sharded optimizer; and a rank that is killed.
"""

import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

import memonger
from benchmarks.machine import MIB, Table, accelerator, keep, stamp
from benchmarks.training.distributed_rank import batch, network
from models.rank_networks import LENGTH

EQUAL = Table(
    "network<10", "type<8", "ranks>6", "plan<16", "loss>10.1e", "weights>10.1e", "DDP: loss>11.1e", "weights>10.1e",
    "N ranks>9.1e", "one>8.1e", "DDP>8.1e", "one>8.1e", missing="-",
)  # fmt: skip
SPEED = Table(
    "network<8", "contestant<22", "ranks>6", "ms>8.1f", "÷ DDP>7.3f", "spread>8.2f", "grown>8.1f", "peak>8.1f",
    "sent>8.2f", "formula>8.2f", "overlap>8.2f",
)  # fmt: skip
ARENA = Table("network<8", "rows>5", "plan<22", "arena>8.2f", "total>8.2f", "bound>8.2f", "buckets>8")
SHARDS = Table("ranks>6", "kept>9.2f", "by formula>11.2f", "grown>8.1f", "peak>8.1f")
KILLS = Table("kill>5", "rank>5", "ended after s>14.2f", "named<6", "again from>11", "bits<5")
STEPS, TURNS, KILLED = 12, 3, 20
RATE, EPS = 1e-3, 1e-5


def plan_of(name: str, dtype: str, rows: int, path: Path, buckets: memonger.Buckets | None, **options: Any) -> Path:
    """A training plan in a file, for the device of this run."""
    example = torch.from_numpy(batch(name, dtype, 0, rows)["x"])
    model = memonger.from_torch(network(name, dtype), (example,), input_names=["x"], output_names=["scores"])
    if name.startswith("dense"):
        model = memonger.to_training_mode(model, sync_batch_norm=buckets is not None)
    training = memonger.differentiate(
        model, loss=memonger.SoftmaxCrossEntropy(), optimizer=memonger.Adam(lr=RATE, eps=EPS)
    )
    device = click.get_current_context().params["device"]
    plan = memonger.search_plan(
        training, buckets=buckets, chunks="off", threads=1, device=device, **({"strategy": "none"} | options)
    )
    plan.save(path)
    return path


def start(task: dict[str, Any], ranks: int, folder: Path) -> list[subprocess.Popen[str]]:
    """Start ranks; one alone gets no address of others. On GPUs each has one of its own, and NCCL between them."""
    task = task | {"device": click.get_current_context().params["device"]}
    file = folder / "task.json"
    file.write_text(json.dumps(task))
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    base = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    base |= {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.training.distributed_rank", str(file)],
            env=base | ({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)} if ranks > 1 else {}),
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip


def run(folder: Path, contestant: str, name: str, ranks: int, **task: Any) -> tuple[list[Any], dict[str, np.ndarray]]:
    """What each rank saw, and the weights in the end."""
    whole = {"contestant": contestant, "network": name, "rate": RATE, "eps": EPS, "out": str(folder / "out")} | task
    whole = {key: str(value) if isinstance(value, Path) else value for key, value in whole.items()}
    processes = start(whole, ranks, folder)
    said = [process.communicate()[1] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("\n".join(said))
    found = [json.loads((folder / f"out.{rank}.json").read_text()) for rank in range(ranks)]
    return found, dict(np.load(folder / "out.npz"))


def _apart(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """The largest difference of weights, over the largest weight of the tensor."""
    return max(float(abs(one[n] - other[n]).max() / abs(other[n]).max()) for n in other)


def _apart_losses(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


WAYS = {
    "kept": {"buckets": memonger.Buckets(first=20_000, rest=60_000)},
    "rematerialized": {"buckets": memonger.Buckets(first=20_000, rest=60_000, wait="last"), "strategy": "sweep"},
}
CASES = [
    (name, rows, dtype, ranks)
    for name, rows, dtypes in (
        ("small cnn", 2, ("float64", "float32")), ("small gpt", 2, ("float64", "float32")),
        ("dense", 8, ("float64", "float32")), ("densenet", 4, ("float32",)),
    )
    for dtype in dtypes
    for ranks in (2, 4)
]  # fmt: skip


def equal(folder: Path) -> Iterator[str]:
    """Whether N ranks train as one."""
    yield "N ranks with B rows against one with N·B, 5 steps of Adam: largest difference of losses, and of weights,"
    yield "each over the largest of its tensor; DDP: PyTorch's against PyTorch's one process. Behind that weights in"
    yield "float32 against PyTorch's one process in float64: of N ranks, of one, of DDP, of PyTorch's one process."
    yield "dense, a dense block, and densenet, DenseNet-BC of depth 40, have synchronized statistics. PyTorch's"
    yield "SyncBatchNorm refuses tensors of CPUs: DDP has no figures. onnxruntime has no convolution in float64."
    yield "densenet's weights are far from float64 in PyTorch too, in one process: judge it by its losses"
    yield EQUAL.heading
    for case in CASES:
        yield from _equal(folder, *case)
    yield ""


def _equal(folder: Path, name: str, rows: int, dtype: str, ranks: int) -> Iterator[str]:
    """Rows of one network in one type, for one number of ranks."""
    common = {"dtype": dtype, "rows": rows * ranks, "steps": 5}
    alone = run(
        folder, "memonger", name, 1, plan=plan_of(name, dtype, rows * ranks, folder / "one.onnx", None), **common
    )
    torch_alone = run(folder, "ddp", name, 1, **common)
    ddp = None if name.startswith("dense") else run(folder, "ddp", name, ranks, **common)
    ddp_apart: tuple[float | None, ...] = (None, None)
    if ddp is not None:
        mean = _mean([each["losses"] for each in ddp[0]])
        ddp_apart = _apart_losses(mean, torch_alone[0][0]["losses"]), _apart(ddp[1], torch_alone[1])
    exact = run(folder, "ddp", name, 1, **{**common, "dtype": "float64"})[1] if dtype == "float32" else None
    before: Any = None
    for words, options in WAYS.items():
        plan = plan_of(name, dtype, rows, folder / "part.onnx", **options)
        several = run(folder, "memonger", name, ranks, plan=plan, **common)
        losses = _apart_losses(several[0][0]["losses"], alone[0][0]["losses"])
        errors = [
            None if exact is None or each is None else _apart(each[1], exact)
            for each in (several, alone, ddp, torch_alone)
        ]
        row = EQUAL.row(name, dtype, ranks, words, losses, _apart(several[1], alone[1]), *ddp_apart, *errors)
        if before is not None:
            same = all(np.array_equal(several[1][n], before[1][n]) for n in before[1])
            row += "  the same bits as kept" if same else "  OTHER BITS than kept"
        yield row
        before = several


def _mean(losses: list[list[float]]) -> list[float]:
    return [statistics.fmean(each) for each in zip(*losses, strict=True)]


BUCKETS = {
    "next": memonger.Buckets(),
    "last": memonger.Buckets(wait="last"),
    "next, 4 MiB": memonger.Buckets(rest="4MiB"),
}


def speed(folder: Path, traces: Path | None) -> Iterator[str]:
    """Step time, memory and bytes beside DDP."""
    yield f"a step beside DDP: median of {STEPS - 2} steps in each of {TURNS} turns, ms, largest over smallest of the"
    yield "turns; MiB by which a rank has grown since its imports, after the last step and at most; MiB on the"
    yield "loopback device for a rank and step, and by formula (2(N-1)/N of the gradients); overlap: share of the"
    yield "collectives' time in which a segment ran; 4 ranks have 2 cores"
    yield SPEED.heading
    for name, rows in (("cnn", 8), ("gpt", 8)):
        plans = {way: plan_of(name, "float32", rows, folder / f"{way}.onnx", each) for way, each in BUCKETS.items()}
        gradients = sum(each.numel() * 4 for each in network(name, "float32").parameters())
        for ranks in (2, 4):
            common = {"dtype": "float32", "rows": rows * ranks, "steps": STEPS}
            turns: dict[str, list[Any]] = {"DDP": [], **{f"memonger, {way}": [] for way in plans}}
            for turn in range(TURNS):
                turns["DDP"].append(run(folder, "ddp", name, ranks, **common)[0])
                for way, plan in plans.items():
                    trace = turn == TURNS - 1
                    found, _ = run(folder, "memonger", name, ranks, plan=plan, trace=trace, **common)
                    turns[f"memonger, {way}"].append(found)
                    if trace and traces is not None and ranks == 2:
                        _join_traces(folder, traces / f"distributed-{name}-{way}.trace.json", ranks)
            times = {each: [_median(found) for found in all_found] for each, all_found in turns.items()}
            for each, found in turns.items():
                ms, last = statistics.median(times[each]), found[-1]
                share = None if each == "DDP" else _share(last)
                yield SPEED.row(
                    name, each, ranks, 1e3 * ms, ms / statistics.median(times["DDP"]),
                    max(times[each]) / min(times[each]),
                    max(one["grown"] for one in last) / MIB, max(one["peak"] for one in last) / MIB,
                    last[0]["sent"] / ranks / MIB, 2 * (ranks - 1) / ranks * gradients / MIB, share,
                )  # fmt: skip
    yield ""


def _share(found: list[Any]) -> float:
    """Of the time of all collectives that in which a segment ran."""
    return sum(one["overlap"] for one in found) / sum(one["collectives"] for one in found)


def _median(found: list[Any]) -> float:
    return statistics.median(statistics.median(one["seconds"][2:]) for one in found)


def _join_traces(folder: Path, path: Path, ranks: int) -> None:
    """The traces of all ranks as one."""
    events = [json.loads((folder / f"out.{rank}.trace.json").read_text())["traceEvents"] for rank in range(ranks)]
    path.write_text(json.dumps({"traceEvents": [each for one in events for each in one]}))


def arenas(folder: Path) -> Iterator[str]:
    """Arenas with buckets and without."""
    yield "the arena, MiB: gradients taken as soon as each is whole; in buckets whose updates begin when the next one"
    yield "is whole; in buckets that are all held until the last one is"
    yield ARENA.heading
    for name, rows in (("cnn", 8), ("cnn", 64), ("gpt", 8), ("gpt", 64)):
        ways = {"without buckets": None} | {f"buckets, {way}": each for way, each in BUCKETS.items()}
        for words, buckets in ways.items():
            plan = memonger.Plan.load(plan_of(name, "float32", rows, folder / "arena.onnx", buckets))
            number = len(plan.graph.collectives)
            yield ARENA.row(name, rows, words, plan.arena_bytes / MIB, plan.total_bytes / MIB,
                            plan.lower_bound_bytes / MIB, number)  # fmt: skip
    yield ""


def shards(folder: Path) -> Iterator[str]:
    """Memory with a sharded optimizer, and states of another number of ranks."""
    yield "gpt with Adam and a sharded optimizer: MiB that the rank with most keeps (parameters and optimizer state),"
    yield "by formula (parameters and 1/N of the state), and by which a rank has grown since its imports"
    yield SHARDS.heading
    plan = plan_of("gpt", "float32", 4, folder / "shards.onnx", BUCKETS["next"])
    parameters = sum(each.numel() * 4 for each in network("gpt", "float32").parameters())
    for ranks in (1, 2, 4):
        found, _ = run(folder, "memonger", "gpt", ranks, plan=plan, dtype="float32", rows=4 * ranks, steps=4,
                       shards=True, save=folder / f"by{ranks}", **{"by rank": True})  # fmt: skip
        most = max(found, key=lambda one: one["kept"])
        yield SHARDS.row(ranks, most["kept"] / MIB, parameters * (1 + 2 / ranks) / MIB, most["grown"] / MIB,
                         most["peak"] / MIB)  # fmt: skip
    common = {"plan": plan, "dtype": "float32", "rows": 8, "shards": True, "by rank": True}
    run(folder, "memonger", "gpt", 2, steps=6, load=folder / "by4", save=folder / "again", **common)
    one = run(folder, "memonger", "gpt", 2, steps=8, load=folder / "again", **common)[1]
    other = run(folder, "memonger", "gpt", 2, steps=8, load=folder / "by4", **common)[1]
    same = "the same bits" if all(np.array_equal(one[name], other[name]) for name in one) else "OTHER BITS"
    yield "saved by 4 ranks at step 4, loaded by 2: steps 5 to 8 at one go, and with a save and a start in between:"
    yield same
    yield ""


def kills(folder: Path) -> Iterator[str]:
    """A rank killed at random moments."""
    yield f"kill -9 of one of 2 ranks at {KILLED} random moments of a training of 150 steps that saves after each:"
    yield "seconds until the other has ended, whether its message names the rank, the step that the saved state goes on"
    yield "from, and whether the training that goes on from it ends with the weights of one that was not disturbed"
    yield KILLS.heading
    name, chance = "small cnn", random.Random(0)
    plan = plan_of(name, "float32", 4, folder / "kill.onnx", memonger.Buckets(first=20_000, rest=60_000))
    task = {"plan": plan, "dtype": "float32", "rows": 8, "steps": 150, "save every step": True, "timeout": 20}
    undisturbed = run(folder, "memonger", name, 2, save=folder / "plain.state", **task)[1]
    for number in range(KILLED):
        state = folder / "state.safetensors"
        state.unlink(missing_ok=True)
        whole = {"contestant": "memonger", "network": name, "rate": RATE, "eps": EPS, "out": str(folder / "out")}
        whole |= {key: str(v) if isinstance(v, Path) else v for key, v in task.items()} | {"save": str(state)}
        processes, victim = start(whole, 2, folder), chance.randrange(2)
        while not state.exists() and all(process.poll() is None for process in processes):
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 2.0))
        processes[victim].send_signal(signal.SIGKILL)
        began = time.monotonic()
        said = processes[1 - victim].communicate(timeout=120)[1]
        seconds = time.monotonic() - began
        processes[victim].communicate()
        step = _step_of(state)
        weights = run(folder, "memonger", name, 2, save=state, load=state, **task)[1] if step < 150 else None
        bits = "done" if weights is None else "same" if _same(weights, undisturbed) else "OTHER"
        ended = processes[1 - victim].returncode == 0
        named = "done" if ended else "yes" if f"rank {victim} has ended" in said else "NO"
        yield KILLS.row(number + 1, victim, seconds, named, step, bits)


def _same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in other)


def _step_of(state: Path) -> int:
    from safetensors import safe_open

    with safe_open(state, framework="np") as file:
        return int(json.loads(file.metadata()["memonger"])["step"])


PARTS = {"equal": equal, "arenas": arenas, "shards": shards, "kills": kills}


@click.command()
@click.option("--part", "parts", multiple=True, type=click.Choice([*PARTS, "speed"]), help="Only these; no file.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", help="cuda: on a GPU each.")
@click.option("--traces", type=click.Path(path_type=Path), help="A folder for Perfetto traces of two ranks.")
def main(parts: tuple[str, ...], device: str, traces: Path | None) -> None:
    """Measure, print and keep: in distributed.txt, or distributed.cuda.txt."""

    def lines() -> Iterator[str]:
        yield "Training on several ranks, beside PyTorch's DistributedDataParallel"
        yield from stamp("training.distributed", ("torch", "onnxruntime", "onnx", "numpy"))
        carrier = "gloo, a thread for each rank" if device == "cpu" else f"NCCL, {accelerator(0)} for each rank"
        yield f"one machine, {carrier}; gpt: {LENGTH} words a row"
        yield ""
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            for part in parts or ("equal", "speed", "arenas", "shards", "kills"):
                yield from speed(folder, traces) if part == "speed" else PARTS[part](folder)

    if traces is not None:
        traces.mkdir(exist_ok=True)
    keep(lines(), None if parts else Path(__file__).with_suffix(".txt" if device == "cpu" else ".cuda.txt"))


if __name__ == "__main__":
    main()
