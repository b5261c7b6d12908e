"""Activations and element-wise operators: which pass over memory costs what."""

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch.nn import functional

from benchmarks.formulations.harness import Array, Case, Emitter

aten = torch.ops.aten
BIG = 3e38  # times a float above 1/BIG: at least one
ROOT = math.sqrt(2 / math.pi)


def positive(op: Emitter, y: str) -> str:
    """1 where y > 0, else 0: HardSigmoid is one fast pass where Greater and Cast are two slow ones."""
    return op("HardSigmoid", y, alpha=BIG, beta=0.0)


def cast(op: Emitter, mask: str) -> str:
    """A mask of booleans as floats."""
    return op("Cast", mask, to=1)


RELU = {
    "HardSigmoid": lambda op, y, dy: op("Mul", dy, positive(op, y)),
    "Greater Cast": lambda op, y, dy: op("Mul", dy, cast(op, op("Greater", y, op.floats(0)))),
    "Where": lambda op, y, dy: op("Where", op("Greater", y, op.floats(0)), dy, op.floats(0)),
    "Sign": lambda op, y, dy: op("Mul", dy, op("Sign", y)),
}
RELU6 = {
    "distance": lambda op, y, dy: op(
        "Mul", dy, op("HardSigmoid", op("Abs", op("Sub", y, op.floats(3))), alpha=-BIG / 10, beta=BIG / 10 * 3)
    ),
    "product": lambda op, y, dy: op("Mul", dy, positive(op, op("Mul", y, op("Sub", op.floats(6), y)))),
    "And Cast": lambda op, y, dy: op(
        "Mul", dy, cast(op, op("And", op("Greater", y, op.floats(0)), op("Less", y, op.floats(6))))
    ),
}
SIGMOID = {
    "dy (y - y y)": lambda op, y, dy: op("Mul", dy, op("Sub", y, op("Mul", y, y))),
    "dy y (1 - y)": lambda op, y, dy: op("Mul", op("Mul", dy, y), op("Sub", op.floats(1), y)),
}
TANH = {
    "dy - dy y y": lambda op, y, dy: op("Sub", dy, op("Mul", dy, op("Mul", y, y))),
    "dy (1 - y y)": lambda op, y, dy: op("Mul", dy, op("Sub", op.floats(1), op("Mul", y, y))),
}


def silu_backward(op: Emitter, x: str, dy: str) -> str:
    """dy (s + x s (1 - s))."""
    s = op("Sigmoid", x)
    return op("Mul", dy, op("Add", s, op("Mul", op("Mul", x, s), op("Sub", op.floats(1), s))))


def hardswish_backward(op: Emitter, x: str, dy: str) -> str:
    """dy (clip(x/6 + 1/2) + x/6 where |x| < 3)."""
    inside = op("HardSigmoid", op("Abs", x), alpha=-BIG / 10, beta=BIG / 10 * 3)
    slope = op("HardSigmoid", x, alpha=1 / 6, beta=0.5)
    return op("Mul", dy, op("Add", slope, op("Mul", op.scale(x, 1 / 6), inside)))


def gelu(op: Emitter, x: str) -> str:
    """x (1 + erf(x / sqrt(2))) / 2."""
    return op("Mul", op.scale(x, 0.5), op("Add", op("Erf", op.scale(x, 0.5**0.5)), op.floats(1)))


def gelu_backward(op: Emitter, x: str, dy: str) -> str:
    """dy (cdf + x pdf)."""
    cdf = op("Add", op.scale(op("Erf", op.scale(x, 0.5**0.5)), 0.5), op.floats(0.5))
    pdf = op("Exp", op.scale(op("Mul", x, x), -0.5))
    return op("Mul", dy, op("Add", cdf, op("Mul", op.scale(x, ROOT / 2), pdf)))


def _sigmoid(op: Emitter, x: str, square: str) -> str:
    line = op("Add", op.scale(square, 2 * 0.044715 * ROOT), op.floats(2 * ROOT))
    return op("Sigmoid", op("Mul", x, line))


def gelu_tanh(op: Emitter, x: str) -> str:
    """(1 + tanh(u)) / 2 is the sigmoid of 2u."""
    return op("Mul", x, _sigmoid(op, x, op("Mul", x, x)))


def gelu_tanh_backward(op: Emitter, x: str, dy: str) -> str:
    """y = x s(v): dy s (1 + x v' (1 - s))."""
    square = op("Mul", x, x)
    s = _sigmoid(op, x, square)
    slope = op("Mul", x, op("Add", op.scale(square, 6 * 0.044715 * ROOT), op.floats(2 * ROOT)))
    return op("Mul", dy, op("Mul", s, op("Add", op("Mul", slope, op("Sub", op.floats(1), s)), op.floats(1))))


def activation_cases(shape: tuple[int, ...]) -> Iterator[Case]:
    """Activations; PyTorch's backward kernels take what ours take."""
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal(shape, np.float32) * 3, rng.standard_normal(shape, np.float32)

    def case(name: str, source: Array, run: Callable[..., torch.Tensor], ways: dict[str, Callable[..., str]]) -> Case:
        inputs = {"x": source} if name.endswith(" y") else {"x": source, "dy": dy}
        return Case("pointwise", name, inputs, run, ways, next(iter(ways)))

    def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
        return functional.gelu(x, approximate="tanh")

    yield case("relu dx", np.maximum(x, 0), lambda y, dy: aten.threshold_backward(dy, y, 0), RELU)
    yield case("relu6 dx", np.clip(x, 0, 6), lambda y, dy: aten.hardtanh_backward(dy, y, 0, 6), RELU6)
    yield case("sigmoid dx", 1 / (1 + np.exp(-x)), lambda y, dy: aten.sigmoid_backward(dy, y), SIGMOID)
    yield case("tanh dx", np.tanh(x), lambda y, dy: aten.tanh_backward(dy, y), TANH)
    yield case("silu y", x, functional.silu, {"Sigmoid Mul": lambda op, x: op("Mul", x, op("Sigmoid", x))})
    yield case("silu dx", x, lambda x, dy: aten.silu_backward(dy, x), {"composed": silu_backward})
    yield case("hardswish y", x, functional.hardswish, {"HardSwish": lambda op, x: op("HardSwish", x)})
    yield case("hardswish dx", x, lambda x, dy: aten.hardswish_backward(dy, x), {"composed": hardswish_backward})
    yield case("gelu y", x, functional.gelu, {"Gelu": lambda op, x: op("Gelu", x), "composed": gelu})
    yield case("gelu dx", x, lambda x, dy: aten.gelu_backward(dy, x), {"composed": gelu_backward})
    operator = {"Gelu": lambda op, x: op("Gelu", x, approximate="tanh"), "composed": gelu_tanh}
    yield case("gelu tanh y", x, tanh_gelu, operator)
    composed = {"composed": gelu_tanh_backward}
    yield case("gelu tanh dx", x, lambda x, dy: aten.gelu_backward(dy, x, approximate="tanh"), composed)


def elementary_cases(shape: tuple[int, ...]) -> Iterator[Case]:
    """Broadcasts, sums and moves of one tensor."""
    rng = np.random.default_rng(0)
    n, c, h, w = shape
    x, y = rng.standard_normal(shape, np.float32), rng.standard_normal(shape, np.float32)
    s, nc = rng.random((c, 1, 1), np.float32), rng.random((n, c, 1, 1), np.float32)

    def case(name: str, inputs: dict[str, Array], run: Callable[..., torch.Tensor], way: Callable[..., str]) -> Case:
        return Case("pointwise", f"{name} @{h}", inputs, run, {name: way}, name, 2e-3)

    def moved(*perm: int) -> tuple[Callable[..., torch.Tensor], Callable[..., str]]:
        return lambda t: t.permute(*perm).contiguous(), lambda op, x: op.transpose(x, *perm)

    one, two = {"x": x}, {"x": x, "y": y}
    yield case("Add", two, lambda x, y: x + y, lambda op, x, y: op("Add", x, y))
    yield case("Sum", two, lambda x, y: x + y, lambda op, x, y: op("Sum", x, y))
    yield case("Mul [c,1,1]", {"x": x, "s": s}, lambda x, s: x * s, lambda op, x, s: op("Mul", x, s))
    yield case("Mul [n,c,1,1]", {"x": x, "s": nc}, lambda x, s: x * s, lambda op, x, s: op("Mul", x, s))
    yield case("Mul scalar", one, lambda x: x * 2, lambda op, x: op.scale(x, 2))
    yield case("Relu", one, torch.relu, lambda op, x: op("Relu", x))
    yield case("ReduceSum 0,2,3", one, lambda x: x.sum((0, 2, 3)), lambda op, x: op.sum(x, 0, 2, 3))
    yield case("Transpose 1023", one, *moved(1, 0, 2, 3))
    yield case("Transpose 0231", one, *moved(0, 2, 3, 1))
    yield case("Transpose 0132", one, *moved(0, 1, 3, 2))
    yield case("Pad 1", one, lambda x: functional.pad(x, (1, 1, 1, 1)), lambda op, x: op.pad(x, 0, 0, 1, 1, 0, 0, 1, 1))
    yield case(
        "Slice",
        one,
        lambda x: x[:, :, 1:-1, 1:-1].contiguous(),
        lambda op, x: op.slice(x, [2, 3], [1, 1], [h - 1, w - 1]),
    )
    yield case("Concat 1", two, lambda x, y: torch.cat((x, y), 1), lambda op, x, y: op("Concat", x, y, axis=1))


def cases(batch: int) -> Iterator[Case]:
    """Activations within the cache; single operators within and beyond it."""
    yield from activation_cases((batch, 64, 56, 56))
    yield from elementary_cases((batch, 64, 56, 56))
    yield from elementary_cases((batch, 192, 112, 112))
