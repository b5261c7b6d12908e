"""Softmax, cross entropy and embeddings."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from benchmarks.formulations.harness import Case, Emitter

aten = torch.ops.aten


def softmax_cases(shape: tuple[int, ...]) -> Iterator[Case]:
    """Softmax over the last axis of attention scores."""
    dy = np.random.default_rng(0).standard_normal(shape, np.float32)
    y = torch.softmax(torch.from_numpy(dy), -1).numpy().copy()
    name = "x".join(map(str, shape))

    def inner(op: Emitter, dy: str, y: str) -> str:
        return op("Mul", y, op("Sub", dy, op.sum(op("Mul", dy, y), 3, keep=True)))

    def outer(op: Emitter, dy: str, y: str) -> str:
        p = op("Mul", dy, y)
        return op("Sub", p, op("Mul", y, op.sum(p, 3, keep=True)))

    softmax = {"operator": lambda op, x: op("Softmax", x, axis=-1)}
    yield Case("rows", f"softmax y  {name}", {"x": dy}, partial(torch.softmax, dim=-1), softmax, "operator")
    ways = {"y (dy - sum)": inner, "p - y sum(p)": outer}
    backward = aten._softmax_backward_data
    yield Case(
        "rows",
        f"softmax dx {name}",
        {"dy": dy, "y": y},
        lambda dy, y: backward(dy, y, -1, torch.float32),
        ways,
        "y (dy - sum)",
        2e-3,
    )


def entropy_cases(rows: int, classes: int) -> Iterator[Case]:
    """The mean cross entropy of logits and the logits' gradient."""
    rng = np.random.default_rng(0)
    logits, labels = rng.standard_normal((rows, classes), np.float32), rng.integers(0, classes, rows)

    def run(z: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log = aten._log_softmax(z, 1, False)
        loss, weight = aten.nll_loss_forward(log, labels, None, 1, -100)
        dlog = aten.nll_loss_backward(torch.ones(()), log, labels, None, 1, -100, weight)
        return loss, aten._log_softmax_backward_data(dlog, log, 1, torch.float32)

    def finish(op: Emitter, p: str, log: str, flat: str) -> tuple[str, str]:
        loss = op("Neg", op("ReduceMean", log, op.constant([0]), keepdims=0))
        spread = op.reshape(op.scale(p, 1 / rows), rows * classes)
        minus = op.floats(np.full(rows, -1 / rows))
        return loss, op.reshape(op("ScatterElements", spread, flat, minus, reduction="add"), rows, classes)

    def softmax(op: Emitter, z: str, labels: str) -> tuple[str, str]:
        flat = op("Add", labels, op.constant(np.arange(rows) * classes))
        p = op("Softmax", z, axis=1)
        return finish(op, p, op("Log", op("Gather", op.reshape(p, rows * classes), flat)), flat)

    def log_softmax(op: Emitter, z: str, labels: str) -> tuple[str, str]:
        flat = op("Add", labels, op.constant(np.arange(rows) * classes))
        log = op("LogSoftmax", z, axis=1)
        return finish(op, op("Exp", log), op("Gather", op.reshape(log, rows * classes), flat), flat)

    ways = {"LogSoftmax": log_softmax, "Softmax": softmax}
    yield Case("rows", f"cross entropy {rows}x{classes}", {"z": logits, "l": labels}, run, ways, "LogSoftmax", 2e-2)


def embedding_cases(words: int, width: int, tokens: int) -> Iterator[Case]:
    """The gradient of Gather by rows."""
    rng = np.random.default_rng(0)
    index, dy = rng.integers(0, words, tokens), rng.standard_normal((tokens, width), np.float32)

    def points(op: Emitter, dy: str, index: str) -> str:
        base = op("ConstantOfShape", op.constant([words, width]))
        return op("ScatterND", base, op.reshape(index, tokens, 1), dy, reduction="add")

    def elements(op: Emitter, dy: str, index: str) -> str:
        base = op("ConstantOfShape", op.constant([words, width]))
        wide = op("Expand", op.reshape(index, tokens, 1), op.constant([tokens, width]))
        return op("ScatterElements", base, wide, dy, axis=0, reduction="add")

    name = f"embedding dw {words}x{width} of {tokens}"
    ways = {"ScatterND": points, "ScatterElements": elements}
    run = aten.embedding_dense_backward
    yield Case("rows", name, {"dy": dy, "i": index}, lambda dy, i: run(dy, i, words, -1, False), ways, "ScatterND")


def cases(batch: int) -> Iterator[Case]:
    """The shapes of a small GPT, and of an image network's loss."""
    yield from softmax_cases((batch, 6, 128, 128))
    yield from softmax_cases((batch // 2, 12, 256, 256))
    yield from entropy_cases(batch, 1000)
    yield from entropy_cases(512, 8000)
    yield from entropy_cases(128, 50257)
    yield from embedding_cases(8000, 384, 1024)
    yield from embedding_cases(50257, 768, 512)
