"""Pooling: forward and backward."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch.nn import functional

from benchmarks.formulations.harness import Case, Emitter

aten = torch.ops.aten


def max_cases(n: int, c: int, side: int, k: int, s: int, p: int) -> Iterator[Case]:
    """MaxPool with its indices, and the scatter of its gradient."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n, c, side, side), np.float32)
    tx = torch.from_numpy(x)
    y, where = functional.max_pool2d(tx, k, s, p, return_indices=True)
    flat = where.numpy() + (np.arange(n * c) * side * side).reshape(n, c, 1, 1)
    size, name = n * c * side * side, f"max {k}x{k}/{s} @{side}"

    def operator(outputs: int) -> Callable[..., str]:
        pool = {"kernel_shape": [k, k], "strides": [s, s], "pads": [p] * 4}
        return lambda op, x: op.many(outputs, "MaxPool", x, **pool)[0]

    def elements(op: Emitter, dy: str, index: str) -> str:
        base = op("ConstantOfShape", op.constant([size]))
        dx = op("ScatterElements", base, op.reshape(index, -1), op.reshape(dy, -1), reduction="add")
        return op.reshape(dx, n, c, side, side)

    def points(op: Emitter, dy: str, index: str) -> str:
        base = op("ConstantOfShape", op.constant([size]))
        dx = op("ScatterND", base, op.reshape(index, -1, 1), op.reshape(dy, -1), reduction="add")
        return op.reshape(dx, n, c, side, side)

    ways = {"with indices": operator(2), "without": operator(1)}
    yield Case("pool", f"{name} y", {"x": x}, lambda x: functional.max_pool2d(x, k, s, p), ways, "with indices")
    dy = rng.standard_normal(tuple(y.shape), np.float32)

    def backward(dy: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return aten.max_pool2d_with_indices_backward(dy, tx, [k] * 2, [s] * 2, [p] * 2, [1, 1], False, where)

    scatters = {"ScatterElements": elements, "ScatterND": points}
    yield Case("pool", f"{name} dx", {"dy": dy, "index": flat}, backward, scatters, "ScatterElements")


def average_cases(n: int, c: int, side: int) -> Iterator[Case]:
    """AveragePool 2x2/2."""
    rng = np.random.default_rng(0)
    half = side // 2
    x, dy = rng.standard_normal((n, c, side, side), np.float32), rng.standard_normal((n, c, half, half), np.float32)
    tx = torch.from_numpy(x)

    def resize(op: Emitter, dy: str) -> str:
        modes = {"mode": "nearest", "nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}
        return op("Resize", op.scale(dy, 0.25), "", op.floats([1, 1, 2, 2]), **modes)

    def transposed(op: Emitter, dy: str) -> str:
        return op("ConvTranspose", dy, op.floats(np.full((c, 1, 2, 2), 0.25)), group=c, strides=[2, 2])

    def matmul(op: Emitter, dy: str) -> str:
        spread = np.tile(np.repeat(np.eye(half), 2, axis=1), (1, 2)) / 4
        return op.reshape(op("MatMul", op.reshape(dy, n * c * half, half), op.floats(spread)), n, c, side, side)

    def pool(op: Emitter, x: str) -> str:
        return op("AveragePool", x, kernel_shape=[2, 2], strides=[2, 2])

    ways = {"Resize": resize, "ConvTranspose": transposed, "MatMul": matmul}
    yield Case(
        "pool",
        f"average 2x2/2 @{side} y",
        {"x": x},
        lambda x: functional.avg_pool2d(x, 2),
        {"operator": pool},
        "operator",
    )
    yield Case(
        "pool",
        f"average 2x2/2 @{side} dx",
        {"dy": dy},
        lambda dy: aten.avg_pool2d_backward(dy, tx, [2, 2], [2, 2], [0, 0], False, True, None),
        ways,
        "Resize",
    )


def global_cases(n: int, c: int, side: int) -> Iterator[Case]:
    """GlobalAveragePool."""
    dy = np.random.default_rng(0).standard_normal((n, c, 1, 1), np.float32)
    shape = n, c, side, side
    ways = {
        "Mul": lambda op, dy: op("Mul", dy, op.floats(np.full((side, side), side**-2))),
        "Expand": lambda op, dy: op("Expand", op.scale(dy, side**-2), op.constant(shape)),
    }
    run = {"torch": lambda dy: (dy / side**2).expand(shape).contiguous()}
    yield Case("pool", f"global average @{side} dx", {"dy": dy}, run["torch"], ways, "Mul")


def cases(batch: int) -> Iterator[Case]:
    """The pools of ResNet, VGG and DenseNet."""
    yield from max_cases(batch, 64, 112, 3, 2, 1)
    yield from max_cases(batch, 64, 112, 2, 2, 0)
    yield from average_cases(batch, 128, 56)
    yield from global_cases(batch, 512, 7)
