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
from torch import Tensor, nn

LENGTH, WORDS = 32, 2000  # of a sentence, and of the vocabulary


class Convolutions(nn.Module):
    """Convolutions of 3 × 3 on 32 × 32 images, without batch statistics, and ten classes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = (width, 2 * width, 4 * width, 8 * width)
        layers: list[nn.Module] = []
        before = 3
        for number in widths:
            layers += [nn.Conv2d(before, number, 3, padding=1), nn.ReLU()]
            layers += [nn.Conv2d(number, number, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            before = number
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(before * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of a batch of images."""
        return self.classifier(self.features(x).flatten(1))


class Products(nn.Module):
    """The same with each convolution as nine products, since onnxruntime has no kernel for one in float64."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        pairs = zip((3, *widths), widths, strict=False)
        self.kernels = nn.ParameterList(torch.randn(3, 3, a, b) * (2 / (9 * a)) ** 0.5 for a, b in pairs)
        self.biases = nn.ParameterList(torch.zeros(b) for b in widths)
        self.classifier = nn.Linear(widths[-1], 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of a batch of images."""
        x = x.permute(0, 2, 3, 1)
        for kernel, bias in zip(self.kernels, self.biases, strict=True):
            rows, height, width, _ = x.shape
            wide = nn.functional.pad(x, (0, 0, 1, 1, 1, 1))
            shifted = [(wide[:, i : i + height, j : j + width] @ kernel[i, j]) for i in range(3) for j in range(3)]
            x = (sum(shifted[1:], shifted[0]) + bias).relu()
            x = x.reshape(rows, height // 2, 2, width // 2, 2, -1).mean((2, 4))
        return self.classifier(x.mean((1, 2)))


class Block(nn.Module):
    """Causal attention and a perceptron, each behind a normalization."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """The next activations."""
        rows, length, width = x.shape
        parts = self.mixed(self.norm1(x)).reshape(rows, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1)) * (width // self.heads) ** -0.5 + mask
        x = x + self.joined((scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, length, width))
        return x + self.narrow(self.wide(self.norm2(x)).relu())


class Language(nn.Module):
    """A GPT: the next of `WORDS` words at each of `LENGTH` places."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), -1e4).triu(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the next word, a row for each place."""
        y = self.words(x) + self.places
        for block in self.blocks:
            y = block(y, self.mask)
        return self.head(self.norm(y)).flatten(0, 1)


class Dense(nn.Module):
    """A dense block over rows of 64 numbers: each layer reads all before it, normalized over the batch."""

    def __init__(self, depth: int = 6, growth: int = 16) -> None:
        super().__init__()
        widths = [64 + growth * number for number in range(depth)]
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for width in widths)
        self.layers = nn.ModuleList(nn.Linear(width, growth) for width in widths)
        self.classifier = nn.Linear(widths[-1] + growth, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of a batch of rows."""
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = torch.cat([x, layer(norm(x).relu())], 1)
        return self.classifier(x)


class Layer(nn.Module):
    """A bottleneck and a convolution of 3 × 3, whose channels join those it read."""

    def __init__(self, before: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(before), nn.BatchNorm2d(4 * growth)
        self.conv1 = nn.Conv2d(before, 4 * growth, 1, bias=False)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """All channels so far."""
        return torch.cat([x, self.conv2(self.norm2(self.conv1(self.norm1(x).relu())).relu())], 1)


class DenseNet(nn.Module):
    """DenseNet-BC for images of 32 × 32, as `models.densenet` has it (Huang et al. 2017)."""

    def __init__(self, depth: int, growth: int = 12) -> None:
        super().__init__()
        channels = 2 * growth
        layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
        for block in range(3):
            for _ in range((depth - 4) // 6):
                layers.append(Layer(channels, growth))
                channels += growth
            layers += [nn.BatchNorm2d(channels), nn.ReLU()]
            if block < 2:
                layers += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
                channels //= 2
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of a batch of images."""
        return self.classifier(self.features(x).mean((2, 3)))


NETWORKS = {
    "dense": Dense, "densenet": lambda: DenseNet(40), "cnn": lambda: Convolutions(64), "gpt": lambda: Language(256, 4),
    "small cnn": lambda: Products((16, 32, 64)), "small gpt": lambda: Language(32, 2),
}  # fmt: skip


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
