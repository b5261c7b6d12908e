"""One rank of `benchmarks.training.distributed`: trains as it is told, and writes what it saw as JSON.

RANK=0 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python -m benchmarks.training.distributed_rank TASK.json
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from models.rank_networks import LENGTH, NETWORKS, WORDS


def network(name: str, dtype: str) -> nn.Module:
    """A network with the same first weights whenever it is made."""
    torch.manual_seed(0)
    return NETWORKS[name]().to(getattr(torch, dtype))


def batch(name: str, dtype: str, step: int, rows: int) -> dict[str, np.ndarray]:
    """All rows of a step: inputs, the same float32 numbers in each type, and labels."""
    generator = np.random.default_rng(step)
    if name.endswith("gpt"):
        words = generator.integers(0, WORDS, (rows, LENGTH + 1))
        return {"x": words[:, :-1].copy(), "labels": words[:, 1:].reshape(-1).copy()}
    x = generator.standard_normal((rows, 64) if name == "dense" else (rows, 3, 32, 32)).astype("float32")
    return {"x": x.astype(dtype), "labels": generator.integers(0, 10, rows)}


def part(whole: dict[str, np.ndarray], rank: int, size: int) -> dict[str, np.ndarray]:
    """A rank's rows."""
    return {name: np.ascontiguousarray(np.array_split(array, size)[rank]) for name, array in whole.items()}


def resident(kind: str = "VmRSS") -> int:
    """Bytes of this process in memory, now or at most."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(kind))
    return int(line.split()[1]) << 10


def sent() -> int:
    """Bytes that went through the loopback device so far, of all processes."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def _memonger(task: dict[str, Any], seen: dict[str, Any]) -> Iterator[float]:
    """Steps of a planned file."""
    import memonger
    from memonger.distributed.trace import Trace

    seen["base"] = resident()
    session = memonger.DistributedTrainingSession(
        task["plan"], shard_optimizer=task.get("shards", False), intra_op_threads=1, timeout=task.get("timeout", 300)
    )
    if task.get("load") and Path(task["load"]).exists():
        session.load(task["load"])
    if task.get("trace"):
        session.trace = Trace(session.rank)
    while True:
        given = batch(task["network"], task["dtype"], session.steps, task["rows"])
        seen["step"] = session.steps
        began = time.perf_counter()
        loss = session.step(part(given, session.rank, session.size))
        seen["seconds"].append(time.perf_counter() - began)
        if task.get("save") and (session.steps == task["steps"] or task.get("save every step")):
            session.save(task["save"], by_rank=task.get("by rank", False))
        seen["weights"] = lambda: {name: session._weights.array(name) for name in session._roles[0].parameters}
        seen["kept"] = session._weights.nbytes + session._state.nbytes
        seen["session"] = session
        yield loss


def _ddp(task: dict[str, Any], seen: dict[str, Any]) -> Iterator[float]:
    """Steps of PyTorch's DistributedDataParallel, or of one process without it."""
    import torch.distributed as dist

    seen["base"] = resident()
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    where = torch.device(task["device"], int(os.environ.get("LOCAL_RANK", 0)) if task["device"] == "cuda" else None)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    model = network(task["network"], task["dtype"]).to(where)
    whole: nn.Module = model
    if size > 1:
        dist.init_process_group("nccl" if where.type == "cuda" else "gloo")
        whole = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=task["rate"], eps=task["eps"])
    step = 0
    while True:
        given = part(batch(task["network"], task["dtype"], step, task["rows"]), rank, size)
        began = time.perf_counter()
        x, labels = (torch.from_numpy(given[key]).to(where) for key in ("x", "labels"))
        loss = nn.functional.cross_entropy(whole(x), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        seen["seconds"].append(time.perf_counter() - began)
        step += 1
        seen["step"] = step
        seen["weights"] = lambda: {name: each.detach().cpu().numpy() for name, each in model.named_parameters()}
        yield float(loss)


def main(task: dict[str, Any]) -> None:
    """Train, and write what was seen."""
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", 0))
    seen: dict[str, Any] = {"seconds": [], "step": 0}
    run = (_ddp if task["contestant"] == "ddp" else _memonger)(task, seen)
    losses, before = [], 0
    for number, loss in enumerate(run):
        losses.append(loss)
        if number == 1:
            before = sent()  # of a step like any other
        if seen["step"] + (task["contestant"] != "ddp") >= task["steps"]:
            break
    result = {
        "losses": losses, "seconds": seen["seconds"], "grown": resident() - seen["base"],
        "peak": resident("VmHWM") - seen["base"], "sent": (sent() - before) / max(1, len(losses) - 2),
        "kept": seen.get("kept", 0),
    }  # fmt: skip
    if rank == 0:
        np.savez(f"{task['out']}.npz", **seen["weights"]())
    session = seen.get("session")
    if session is not None and session.trace is not None:
        session.trace.save(f"{task['out']}.{rank}.trace.json")
        result["overlap"] = session.trace.overlap()
        result["collectives"] = sum(b - a for track, _, a, b in session.trace.stretches if track == "collectives") / 1e9
    Path(f"{task['out']}.{rank}.json").write_text(json.dumps(result))
    if session is not None:
        session.close()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
