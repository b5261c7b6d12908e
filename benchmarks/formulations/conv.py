"""Convolutions with one group: forward, input gradient (dx), weight gradient (dw)."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from benchmarks.formulations.harness import Case, Emitter, Formulation
from benchmarks.formulations.layers import Layer, dense, values
from benchmarks.formulations.winograd import winograd

WINOGRAD_CHANNELS = 128  # below, the transforms cost what the products save
ROWS = 784  # output pixels from which a product of images pays


def forward(layer: Layer, op: Emitter, x: str, w: str) -> str:
    """The operator itself."""
    return op("Conv", x, w, strides=[layer.stride] * 2, pads=[layer.pad] * 4, group=layer.groups)


def flipped(layer: Layer, op: Emitter, w: str) -> str:
    """[k, c, h, w] -> [c, k, h, w] with the taps in reverse: a product with a constant beats Slice and Gather."""
    taps = layer.kernel**2
    reverse = op("MatMul", op.reshape(w, layer.k * layer.c, taps), op.floats(np.eye(taps)[::-1]))
    return op.transpose(op.reshape(reverse, layer.k, layer.c, layer.kernel, layer.kernel), 1, 0, 2, 3)


def dx_transposed(layer: Layer, op: Emitter, dy: str, w: str) -> str:
    """ConvTranspose."""
    left = layer.side + 2 * layer.pad - layer.kernel - (layer.out - 1) * layer.stride
    return op(
        "ConvTranspose",
        dy,
        w,
        strides=[layer.stride] * 2,
        pads=[layer.pad] * 4,
        output_padding=[left] * 2,
        group=layer.groups,
    )


def dx_flipped(layer: Layer, op: Emitter, dy: str, w: str) -> str:
    """Stride 1: a convolution with the flipped taps."""
    return op("Conv", dy, flipped(layer, op, w), pads=[layer.kernel - 1 - layer.pad] * 4)


def dx_matmul(layer: Layer, op: Emitter, dy: str, w: str) -> str:
    """1x1, stride 1: a product for each image."""
    left = op.transpose(op.reshape(w, layer.k, layer.c), 1, 0)
    return op.reshape(
        op("MatMul", left, op.reshape(dy, layer.n, layer.k, layer.out**2)), layer.n, layer.c, layer.side, layer.side
    )


def dx_col2im(layer: Layer, op: Emitter, dy: str, w: str) -> str:
    """What ConvTranspose does inside, in two operators."""
    left = op.transpose(op.reshape(w, layer.k, layer.c * layer.kernel**2), 1, 0)
    columns = op("MatMul", left, op.reshape(dy, layer.n, layer.k, layer.out**2))
    shapes = op.constant([layer.side] * 2), op.constant([layer.kernel] * 2)
    return op("Col2Im", columns, *shapes, pads=[layer.pad] * 4, strides=[layer.stride] * 2)


def dx_parities(layer: Layer, op: Emitter, dy: str, w: str) -> str:
    """Stride 2: each parity of rows and columns is a convolution with the taps of that parity; then interleave."""
    half, turned, rows = layer.side // 2, op.transpose(w, 1, 0, 2, 3), []
    parities = [[k for k in range(layer.kernel - 1, -1, -1) if (k - parity - layer.pad) % 2 == 0] for parity in (0, 1)]
    for y, ys in enumerate(parities):
        columns = []
        for x, xs in enumerate(parities):
            part = op.slice(
                turned,
                [2, 3],
                [ys[0], xs[0]],
                [ys[-1] - 2 if ys[-1] > 1 else -99, xs[-1] - 2 if xs[-1] > 1 else -99],
                -2,
            )
            first, last = zip(
                *((((p + layer.pad - t[0]) // 2), (p + layer.pad - t[-1]) // 2) for p, t in ((y, ys), (x, xs))),
                strict=True,
            )
            pads = [-offset for offset in first] + [offset + half - layer.out for offset in last]
            columns.append(op.reshape(op("Conv", dy, part, pads=pads), layer.n, layer.c, half, half, 1))
        rows.append(op.reshape(op("Concat", *columns, axis=4), layer.n, layer.c, half, 1, layer.side))
    return op.reshape(op("Concat", *rows, axis=3), layer.n, layer.c, layer.side, layer.side)


def dw_channels_last(layer: Layer, op: Emitter, dy: str, x: str) -> str:
    """x with its channels last is an image of n channels and side*c columns, over which dy is the kernel: im2col then
    copies runs of kernel*c floats, where the other layouts copy runs of kernel floats."""
    end = max(layer.end, 0)
    image = op.reshape(op.transpose(x, 0, 2, 3, 1), 1, layer.n, layer.side, layer.side * layer.c)
    weight = op.transpose(dy, 1, 0, 2, 3)
    pads, steps = [layer.pad, layer.pad * layer.c, end, end * layer.c], [layer.stride, layer.stride * layer.c]
    taps = op.reshape(
        op("Conv", image, weight, pads=pads, dilations=steps), layer.k, *[layer.kernel + end - layer.end] * 2, layer.c
    )
    if end != layer.end:
        taps = op.slice(taps, [1, 2], [0, 0], [layer.kernel] * 2)
    return op.transpose(taps, 0, 3, 1, 2)


def dw_swapped(layer: Layer, op: Emitter, dy: str, x: str) -> str:
    """Stride 1: the same with x as the kernel over dy; gives the taps in reverse."""
    image = op.reshape(op.transpose(dy, 0, 2, 3, 1), 1, layer.n, layer.out, layer.out * layer.k)
    pad = layer.kernel - 1 - layer.pad
    taps = op("Conv", image, op.transpose(x, 1, 0, 2, 3), pads=[pad, pad * layer.k] * 2, dilations=[1, layer.k])
    taps = op.transpose(op.reshape(taps, layer.c, layer.kernel**2, layer.k), 2, 0, 1)
    reverse = op(
        "MatMul", op.reshape(taps, layer.k * layer.c, layer.kernel**2), op.floats(np.eye(layer.kernel**2)[::-1])
    )
    return op.reshape(reverse, layer.k, layer.c, layer.kernel, layer.kernel)


def dw_volume(layer: Layer, op: Emitter, dy: str, x: str) -> str:
    """A three-dimensional convolution over x as [1, n, c, side, side]."""
    end = max(layer.end, 0)
    image = op.reshape(x, 1, layer.n, layer.c, layer.side, layer.side)
    weight = op.reshape(op.transpose(dy, 1, 0, 2, 3), layer.k, layer.n, 1, layer.out, layer.out)
    taps = op(
        "Conv", image, weight, pads=[0, layer.pad, layer.pad, 0, end, end], dilations=[1, layer.stride, layer.stride]
    )
    return op.reshape(taps, layer.k, layer.c, layer.kernel, layer.kernel)


def product(op: Emitter, a: str, b: str, groups: int, rows: int, columns: int, depth: int) -> str:
    """[g, rows, depth] times [g, columns, depth] transposed -> [g, rows, columns], without a Transpose.

    A convolution of one input channel a group, without padding and strides, whose kernel is as wide as its image is run
    by onnxruntime as a product with the image as transposed operand (MlasConvPrepare, GemmDirect)."""
    image, weight = op.reshape(b, 1, groups, columns, depth), op.reshape(a, groups * rows, 1, 1, depth)
    return op.reshape(op("Conv", image, weight, group=groups), groups, rows, columns)


def _strided(layer: Layer, op: Emitter, x: str) -> str:
    return op.slice(x, [2, 3], [0, 0], [layer.side] * 2, layer.stride) if layer.stride > 1 else x


def dw_product(layer: Layer, op: Emitter, dy: str, x: str) -> str:
    """1x1: dy times x transposed, image by image, then summed; the operand with more channels is the filters."""
    x, pixels = _strided(layer, op, x), layer.out**2
    if layer.k >= layer.c:
        return op.reshape(op.sum(product(op, dy, x, layer.n, layer.k, layer.c, pixels), 0), layer.k, layer.c, 1, 1)
    return op.reshape(
        op.transpose(op.sum(product(op, x, dy, layer.n, layer.c, layer.k, pixels), 0), 1, 0), layer.k, layer.c, 1, 1
    )


def dw_one_matmul(layer: Layer, op: Emitter, dy: str, x: str) -> str:
    """1x1: one product over all pixels of all images."""
    left = op.reshape(op.transpose(dy, 1, 0, 2, 3), layer.k, -1)
    right = op.reshape(op.transpose(_strided(layer, op, x), 0, 2, 3, 1), -1, layer.c)
    return op.reshape(op("MatMul", left, right), layer.k, layer.c, 1, 1)


def dw_batched(layer: Layer, op: Emitter, dy: str, x: str) -> str:
    """1x1: MatMul with a Transpose, image by image, then summed."""
    right = op.transpose(op.reshape(_strided(layer, op, x), layer.n, layer.c, layer.out**2), 0, 2, 1)
    return op.reshape(
        op.sum(op("MatMul", op.reshape(dy, layer.n, layer.k, layer.out**2), right), 0), layer.k, layer.c, 1, 1
    )


def input_gradients(layer: Layer) -> tuple[dict[str, Callable[..., str]], str]:
    """The candidates, and the one the rule picks."""
    found: dict[str, Callable[..., str]] = {"ConvTranspose": dx_transposed}
    if layer.kernel == 1:
        if layer.stride > 1:
            return found, "ConvTranspose"
        return found | {"MatMul": dx_matmul, "Conv": dx_flipped}, "MatMul"
    found["Col2Im"] = dx_col2im
    if layer.stride > 1:
        return found | {"parities": dx_parities}, "Col2Im"
    found |= {"Conv": dx_flipped, "Winograd 2": partial(winograd, 2), "Winograd 4": partial(winograd, 4)}
    return found, "Winograd 2" if min(layer.c, layer.k) >= WINOGRAD_CHANNELS else "Conv"


def weight_gradients(layer: Layer) -> tuple[dict[str, Callable[..., str]], str]:
    """The candidates, and the one the rule picks."""
    if layer.kernel == 1:
        found = {"A·Bᵀ": dw_product, "one MatMul": dw_one_matmul, "MatMul": dw_batched}
        return found, "A·Bᵀ" if layer.out**2 >= ROWS else "one MatMul"
    found = {"channels last": dw_channels_last, "Conv3d": dw_volume}
    if layer.stride > 1:
        return found, "channels last"
    return found | {"swapped": dw_swapped}, "swapped" if layer.k < layer.c else "channels last"


def backward(layer: Layer, output: int) -> Callable[..., torch.Tensor]:
    """PyTorch's gradient of the input (0) or the weight (1)."""
    mask = [index == output for index in range(3)]
    step, pad = [layer.stride] * 2, [layer.pad] * 2

    def run(dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.convolution_backward(
            dy, x, w, None, step, pad, [1, 1], False, [0, 0], layer.groups, mask
        )[output]

    return run


def on(layer: Layer, candidates: dict[str, Callable[..., str]]) -> dict[str, Formulation]:
    """The candidates for one layer."""
    return {
        name: partial(each.func, *each.args, layer) if isinstance(each, partial) else partial(each, layer)
        for name, each in candidates.items()
    }


def layer_cases(
    group: str,
    layer: Layer,
    dx: tuple[dict[str, Callable[..., str]], str],
    dw: tuple[dict[str, Callable[..., str]], str],
) -> Iterator[Case]:
    """Forward, input gradient (unless the input is an image), weight gradient."""
    x, w, dy = values(layer).values()
    tx, tw = torch.from_numpy(x), torch.from_numpy(w)
    run = partial(torch.conv2d, stride=layer.stride, padding=layer.pad, groups=layer.groups)
    yield Case(group, f"y  {layer}", {"x": x, "w": w}, run, on(layer, {"Conv": forward}), "Conv")
    if layer.c > 3:
        yield Case(
            group,
            f"dx {layer}",
            {"dy": dy, "w": w},
            lambda dy, w: backward(layer, 0)(dy, tx, w),
            on(layer, dx[0]),
            dx[1],
        )
    yield Case(
        group, f"dw {layer}", {"dy": dy, "x": x}, lambda dy, x: backward(layer, 1)(dy, x, tw), on(layer, dw[0]), dw[1]
    )


def layers_of(network: torch.nn.Module, images: torch.Tensor) -> dict[Layer, int]:
    """The distinct convolutions of a network on square images, in the order they run, and how often each is there."""
    found: Counter[Layer] = Counter()

    def count(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], _: object) -> None:
        assert isinstance(module, torch.nn.Conv2d)
        n, c, side, _ = inputs[0].shape
        layer = Layer(n, c, module.out_channels, side, module.kernel_size[0], module.stride[0], module.groups)
        if module.padding != (layer.pad, layer.pad) or module.dilation != (1, 1):
            raise ValueError(f"{module} is none of the convolutions that {Layer.__name__} describes.")
        found[layer] += 1

    hooks = [m.register_forward_hook(count) for m in network.modules() if isinstance(m, torch.nn.Conv2d)]
    network(images)
    for hook in hooks:
        hook.remove()
    return dict(found)


def cases(batch: int) -> Iterator[Case]:
    """Every dense layer."""
    for layer in dense(batch):
        yield from layer_cases("conv", layer, input_gradients(layer), weight_gradients(layer))
