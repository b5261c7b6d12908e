"""BatchNormalization in training, and LayerNormalization: forward and backward."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from benchmarks.formulations.harness import Array, Case, Emitter

EPSILON = 1e-5
IMAGES = ((64, 112), (64, 56), (256, 56), (128, 28), (512, 28), (256, 14), (1024, 14), (512, 7), (2048, 7))
ROWS = ((1024, 384), (2048, 768))
PIXELS = 784  # from which one convolution a channel and image is the fastest dot product
aten = torch.ops.aten
Shape = tuple[int, int, int]  # images, channels, side


def affine(op: Emitter, x: str, scale: str, bias: str, channels: int) -> str:
    """x * scale + bias for each channel in one pass: inference BatchNormalization with mean 0, variance 1."""
    zero, one = op.floats(np.zeros(channels)), op.floats(np.ones(channels))
    return op("BatchNormalization", x, scale, bias, zero, one, epsilon=0.0)


def dots(shape: Shape, op: Emitter, a: str, b: str) -> str:
    """sum(a * b) for each channel: every image of every channel is a group, b the kernel (`conv.product`)."""
    n, c, side = shape
    image, kernel = op.reshape(a, 1, n * c, side, side), op.reshape(b, n * c, 1, side, side)
    return op.sum(op.reshape(op("Conv", image, kernel, group=n * c), n, c), 0)


def multiplied(shape: Shape, op: Emitter, a: str, b: str) -> str:
    """sum(a * b) for each channel, the plain way."""
    return op.sum(op("Mul", a, b), 0, 2, 3)


def batch_operator(shape: Shape, op: Emitter, x: str, g: str, b: str) -> tuple[str, str, str]:
    """The operator itself; momentum 0 gives the batch's statistics."""
    c = shape[1]
    zero, one = op.floats(np.zeros(c)), op.floats(np.ones(c))
    return op.many(3, "BatchNormalization", x, g, b, zero, one, training_mode=1, momentum=0.0, epsilon=EPSILON)  # type: ignore[return-value]


def batch_moments(shape: Shape, op: Emitter, x: str, g: str, b: str) -> tuple[str, str, str]:
    """Mean of the squares less the square of the mean (which cancels), then the inference operator."""
    n, _, side = shape
    mean = op.scale(op.sum(x, 0, 2, 3), 1 / (n * side**2))
    variance = op("Sub", op.scale(dots(shape, op, x, x), 1 / (n * side**2)), op("Mul", mean, mean))
    return op("BatchNormalization", x, g, b, mean, variance, epsilon=EPSILON), mean, variance


def batch_centred(shape: Shape, op: Emitter, x: str, g: str, b: str) -> tuple[str, str, str]:
    """Squares of x less its mean."""
    n, c, side = shape
    mean = op.scale(op.sum(x, 0, 2, 3), 1 / (n * side**2))
    centred = op("Sub", x, op.reshape(mean, c, 1, 1))
    variance = op.scale(dots(shape, op, centred, centred), 1 / (n * side**2))
    return op("BatchNormalization", x, g, b, mean, variance, epsilon=EPSILON), mean, variance


def batch_backward(
    shape: Shape, how: str, op: Emitter, dy: str, x: str, g: str, mean: str, inverse: str
) -> tuple[str, str, str]:
    """dx = a dy + k x + k0 with a, k, k0 of [C]: two sums, then three or four passes."""
    n, c, side = shape
    dot, form = how.split(", ")
    db = op.sum(dy, 0, 2, 3)
    raw = {"dots": dots, "mul": multiplied}[dot](shape, op, dy, x)
    dg = op("Mul", op("Sub", raw, op("Mul", mean, db)), inverse)
    a = op("Mul", g, inverse)
    k = op.scale(op("Mul", op("Mul", a, inverse), dg), -1 / (n * side**2))
    k0 = op("Sub", op.scale(op("Mul", a, db), -1 / (n * side**2)), op("Mul", k, mean))
    if form == "affine":
        line = affine(op, x, k, k0, c)
    else:
        line = op("Add", op("Mul", x, op.reshape(k, c, 1, 1)), op.reshape(k0, c, 1, 1))
    return op("Add", op("Mul", dy, op.reshape(a, c, 1, 1)), line), dg, db


def batch_cases(batch: int) -> Iterator[Case]:
    """BatchNormalization at the shapes of ResNet."""
    rng = np.random.default_rng(0)
    for c, side in IMAGES:
        shape = batch, c, side
        x = rng.standard_normal((batch, c, side, side), np.float32) * 2 + 1
        dy = rng.standard_normal((batch, c, side, side), np.float32)
        g, b = rng.random(c, np.float32) + 0.5, rng.standard_normal(c, np.float32)
        running = torch.zeros(c), torch.ones(c)

        def forward(x: torch.Tensor, g: torch.Tensor, b: torch.Tensor, r: object = running) -> tuple[torch.Tensor, ...]:
            y, mean, inverse = aten.native_batch_norm(x, g, b, *r, True, 0.1, EPSILON)
            return y, mean, inverse**-2 - EPSILON

        def backward(
            dy: torch.Tensor, x: torch.Tensor, g: torch.Tensor, m: torch.Tensor, i: torch.Tensor, r: object = running
        ) -> tuple[torch.Tensor, ...]:
            return aten.native_batch_norm_backward(dy, x, g, *r, m, i, True, EPSILON, [True] * 3)

        ways = {"operator": batch_operator, "moments": batch_moments, "centred": batch_centred}
        candidates = {name: partial(way, shape) for name, way in ways.items()}
        name = f"{batch}x{c}x{side}x{side}"
        yield Case("norm", f"batch y  {name}", {"x": x, "g": g, "b": b}, forward, candidates, "operator", 2e-3)
        mean, variance = x.mean((0, 2, 3), np.float64), x.var((0, 2, 3), np.float64)
        statistics = {"m": mean.astype(np.float32), "i": ((variance + EPSILON) ** -0.5).astype(np.float32)}
        forms = ("dots, affine", "mul, affine", "dots, plain", "mul, plain")
        rule = "dots, affine" if side**2 >= PIXELS else "mul, affine"
        candidates = {form: partial(batch_backward, shape, form) for form in forms}
        yield Case(
            "norm", f"batch dx {name}", {"dy": dy, "x": x, "g": g, **statistics}, backward, candidates, rule, 2e-3
        )


def layer_operator(op: Emitter, x: str, g: str, b: str) -> tuple[str, ...]:
    """The operator itself, with its mean and inverse deviation."""
    return op.many(3, "LayerNormalization", x, g, b, axis=-1, epsilon=EPSILON)


def layer_backward(
    width: int, products: bool, op: Emitter, dy: str, x: str, g: str, mean: str, inverse: str
) -> tuple[str, str, str]:
    """dx = i (dy g - mean(dy g) - xh mean(dy g xh)); the means as products with the vector g / width, or as sums."""
    xh = op("Mul", op("Sub", x, mean), inverse)
    turned = op("Mul", dy, xh)
    scaled = op("Mul", dy, g)
    if products:
        column = op.reshape(op.scale(g, 1 / width), width, 1)
        first, second = op("MatMul", dy, column), op("MatMul", turned, column)
    else:
        first, second = (op("ReduceMean", each, op.constant([1])) for each in (scaled, op("Mul", scaled, xh)))
    away = op("Add", op("Mul", xh, op("Mul", second, inverse)), op("Mul", first, inverse))
    return op("Sub", op("Mul", scaled, inverse), away), op.sum(turned, 0), op.sum(dy, 0)


def layer_cases() -> Iterator[Case]:
    """LayerNormalization of rows."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape, np.float32)

    for rows, width in ROWS:
        x, g, b, dy = normal(rows, width) + 1, normal(width), normal(width), normal(rows, width)
        tb, size = torch.from_numpy(b), [width]
        _, mean, inverse = aten.native_layer_norm(torch.from_numpy(x), size, torch.from_numpy(g), tb, EPSILON)

        def forward(*v: torch.Tensor, size: list[int] = size) -> tuple[torch.Tensor, ...]:
            return aten.native_layer_norm(v[0], size, v[1], v[2], EPSILON)

        def backward(*v: torch.Tensor, size: list[int] = size, tb: torch.Tensor = tb) -> tuple[torch.Tensor, ...]:
            dy, x, g, m, i = v
            return aten.native_layer_norm_backward(dy, x, size, m, i, g, tb, [True] * 3)

        yield Case(
            "norm",
            f"layer y  {rows}x{width}",
            {"x": x, "g": g, "b": b},
            forward,
            {"operator": layer_operator},
            "operator",
        )
        candidates = {"products": partial(layer_backward, width, True), "sums": partial(layer_backward, width, False)}
        inputs = {"dy": dy, "x": x, "g": g, "m": mean.numpy(), "i": inverse.numpy()}
        yield Case("norm", f"layer dx {rows}x{width}", inputs, backward, candidates, "products", 2e-3)


def cases(batch: int) -> Iterator[Case]:
    """Both."""
    yield from batch_cases(batch)
    yield from layer_cases()
