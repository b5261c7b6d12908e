"""Gradients of pools."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from tests.support.gradient_checks import check, run
from tests.support.gradient_half import check_half

MAX = {1: torch.nn.functional.max_pool1d, 2: torch.nn.functional.max_pool2d, 3: torch.nn.functional.max_pool3d}
AVERAGE = {1: torch.nn.functional.avg_pool1d, 2: torch.nn.functional.avg_pool2d, 3: torch.nn.functional.avg_pool3d}


def pool(
    kind: str, x: tuple[int, ...], settings: dict[str, Any], function: Callable[..., Any] | None, y: tuple[int, ...]
) -> onnx.ModelProto:
    attributes = ", ".join(f'{k}="{v}"' if isinstance(v, str) else f"{k}={v}" for k, v in settings.items())
    shapes = [",".join(map(str, dims)) for dims in (x, y)]
    return check(
        f"g (FLOAT[{shapes[0]}] x) => (FLOAT[{shapes[1]}] y) {{ y = {kind} <{attributes}> (x) }}",
        function,
        draw=distinct,
        reference=kind == "AveragePool",
    )


def distinct(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers too far apart for the finite differences to change which is the largest."""
    return generator.permutation(int(np.prod(shape))).reshape(shape) / 10 - 2.0


def max_pool(x: tuple[int, ...], **settings: Any) -> onnx.ModelProto:
    rank = len(x) - 2
    pads = settings.get("pads", [0] * 2 * rank)[:rank]
    strides, dilations = settings.get("strides", [1] * rank), settings.get("dilations", [1] * rank)

    def function(x: torch.Tensor) -> torch.Tensor:
        return MAX[rank](x, settings["kernel_shape"], strides, pads, dilations, bool(settings.get("ceil_mode", 0)))

    return pool("MaxPool", x, settings, function, tuple(function(torch.zeros(x)).shape))


@pytest.mark.parametrize(
    ("x", "settings"),
    [
        ((2, 3, 6, 4), {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ((2, 3, 7, 5), {"kernel_shape": [2, 2], "strides": [2, 2]}),
        ((2, 3, 7, 6), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
        ((2, 3, 7, 6), {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
        ((2, 3, 7, 6), {"kernel_shape": [3, 2]}),
        ((2, 3, 7, 6), {"kernel_shape": [2, 2], "strides": [3, 3]}),
        ((2, 3, 7, 6), {"kernel_shape": [2, 3], "strides": [2, 2], "ceil_mode": 1}),
        ((2, 3, 8, 6), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1], "ceil_mode": 1}),
        ((2, 3, 8, 7), {"kernel_shape": [2, 3], "dilations": [2, 2]}),
        ((2, 3, 8, 7), {"kernel_shape": [3, 3], "dilations": [2, 1], "strides": [2, 2], "pads": [1, 1, 1, 1]}),
        ((2, 3, 9), {"kernel_shape": [3], "strides": [2], "pads": [1, 1]}),
        ((2, 2, 4, 5, 4), {"kernel_shape": [2, 3, 2], "strides": [2, 1, 2], "pads": [0, 1, 0, 0, 1, 0]}),
    ],
)
def test_max_pool(x: tuple[int, ...], settings: dict[str, Any]) -> None:
    max_pool(x, **settings)


@pytest.mark.parametrize("pads", [[0, 1, 1, 0], [1, 0, 0, 1]])
def test_max_pool_with_unequal_padding(pads: list[int]) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(x, [pads[1], pads[3], pads[0], pads[2]], value=-1e9)
        return torch.nn.functional.max_pool2d(padded, 2, 2)

    y = tuple(function(torch.zeros(2, 3, 7, 5)).shape)
    pool("MaxPool", (2, 3, 7, 5), {"kernel_shape": [2, 2], "strides": [2, 2], "pads": pads}, function, y)


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER", "VALID"])
def test_max_pool_that_finds_its_padding(auto_pad: str) -> None:
    y = (2, 3, 3, 3) if auto_pad == "VALID" else (2, 3, 4, 4)
    settings = {"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": auto_pad}
    pool("MaxPool", (2, 3, 8, 7), settings, None, y)


def test_max_pool_whose_indices_the_model_uses() -> None:
    check(
        "g (FLOAT[1,1,4] x) => (FLOAT[1,1,2] y, int64[1,1,2] i) { y, i = MaxPool <kernel_shape=[2], strides=[2]> (x) }",
        lambda x: torch.nn.functional.max_pool1d(x, 2, 2, return_indices=True),
        draw=distinct,
    )


def test_max_pool_with_indices_in_column_major_order() -> None:
    check(
        "g (FLOAT[1,2,4,5] x) => (FLOAT[1,2,3,4] y) { y = MaxPool <kernel_shape=[2,2], storage_order=1> (x) }",
        lambda x: torch.nn.functional.max_pool2d(x, 2, 1),
        draw=distinct,
    )


def test_indices_are_made_small_right_behind_the_pool() -> None:
    made = max_pool((2, 3, 6, 4), kernel_shape=[2, 2], strides=[2, 2])
    nodes = [node.op_type for node in made.graph.node]
    assert nodes[:2] == ["MaxPool", "Cast"]
    assert made.graph.node[1].attribute[0].i == onnx.TensorProto.INT32


def average_pool(x: tuple[int, ...], **settings: Any) -> onnx.ModelProto:
    rank = len(x) - 2
    pads, strides = settings.get("pads", [0] * 2 * rank)[:rank], settings.get("strides", [1] * rank)

    def function(x: torch.Tensor) -> torch.Tensor:
        include = bool(settings.get("count_include_pad", 0))
        return AVERAGE[rank](x, settings["kernel_shape"], strides, pads, bool(settings.get("ceil_mode", 0)), include)

    return pool("AveragePool", x, settings, function, tuple(function(torch.zeros(x)).shape))


AVERAGES: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 6, 4), {"kernel_shape": [2, 2], "strides": [2, 2]}),
    ((2, 3, 7, 5), {"kernel_shape": [2, 2], "strides": [2, 2]}),
    ((2, 3, 6, 9), {"kernel_shape": [3, 2], "strides": [3, 3]}),
    ((2, 3, 7, 6), {"kernel_shape": [3, 2]}),
    ((2, 3, 5, 4), {"kernel_shape": [5, 4]}),
    ((2, 3, 7, 6), {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
    ((2, 3, 7, 6), {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [2, 2]}),
    ((2, 3, 8, 6), {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [2, 2], "ceil_mode": 1}),
    ((2, 3, 8, 5), {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}),
    ((2, 3, 9), {"kernel_shape": [4], "strides": [2], "pads": [2, 2]}),
    ((2, 3, 2, 3), {"kernel_shape": [5, 6], "strides": [1, 2], "pads": [2, 3, 2, 3]}),
    ((2, 3, 4), {"kernel_shape": [7], "strides": [4], "pads": [3, 3]}),
    ((2, 3, 9), {"kernel_shape": [3], "strides": [3]}),
    ((2, 2, 4, 5, 4), {"kernel_shape": [2, 3, 2], "strides": [2, 1, 2], "pads": [0, 1, 0, 0, 1, 0]}),
]


@pytest.mark.parametrize("include", [0, 1])
@pytest.mark.parametrize(("x", "settings"), AVERAGES)
def test_average_pool(x: tuple[int, ...], settings: dict[str, Any], include: int) -> None:
    average_pool(x, **settings, count_include_pad=include)


def test_a_window_larger_than_the_image_takes_no_more_than_the_image() -> None:
    text = """g (FLOAT[2,3,2,3] x) => (FLOAT[2,3,1,1] y) {
        y = AveragePool <kernel_shape=[900,700], strides=[900,700], ceil_mode=1> (x) }"""
    made = check(text, lambda x: torch.nn.functional.avg_pool2d(x, (900, 700), ceil_mode=True), differences=False)
    assert "ConvTranspose" not in [node.op_type for node in made.graph.node]


@pytest.mark.parametrize("kernel", [[2, 2], [3, 2]])
def test_windows_side_by_side_are_repeated(kernel: list[int]) -> None:
    made = average_pool((2, 3, 6, 4), kernel_shape=kernel, strides=kernel)
    assert [node.op_type for node in made.graph.node] == ["AveragePool", "Mul", "Resize"]


@pytest.mark.parametrize("include", [0, 1])
@pytest.mark.parametrize(
    ("settings", "y"),
    [
        ({"kernel_shape": [2, 3], "dilations": [2, 2]}, (2, 3, 6, 3)),
        ({"kernel_shape": [2, 3], "dilations": [2, 1], "strides": [2, 2], "pads": [1, 0, 1, 2]}, (2, 3, 4, 4)),
        ({"kernel_shape": [2, 2], "strides": [2, 2], "pads": [0, 1, 1, 0]}, (2, 3, 4, 4)),
        ({"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "SAME_UPPER"}, (2, 3, 4, 4)),
        ({"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "SAME_LOWER"}, (2, 3, 4, 4)),
        ({"kernel_shape": [3, 2], "strides": [2, 2], "auto_pad": "VALID"}, (2, 3, 3, 3)),
    ],
)
def test_average_pool_in_forms_pytorch_lacks(settings: dict[str, Any], y: tuple[int, ...], include: int) -> None:
    """onnxruntime's own forward pass in float32 tells the gradient: it is linear."""
    settings = {**settings, "count_include_pad": include}
    model = pool("AveragePool", (2, 3, 8, 7), settings, None, y)
    generator = np.random.default_rng(0)
    x, dy = (generator.standard_normal(dims).astype(np.float32) for dims in ((2, 3, 8, 7), y))
    results = run(model, {"x": x, "y.grad": dy})
    assert np.sum(results["x.grad"] * x) == pytest.approx(np.sum(results["y"] * dy), rel=1e-4)


@pytest.mark.parametrize("x", [(2, 3, 4, 5), (2, 3, 7), (2, 3, 2, 3, 4), (1, 3, 1, 1)])
def test_global_average_pool(x: tuple[int, ...]) -> None:
    y = (*x[:2], *[1] * (len(x) - 2))
    shapes = [",".join(map(str, dims)) for dims in (x, y)]
    check(
        f"g (FLOAT[{shapes[0]}] x) => (FLOAT[{shapes[1]}] y) {{ y = GlobalAveragePool(x) }}",
        lambda x: x.mean(tuple(range(2, x.dim())), keepdim=True),
        reference=True,
    )


@pytest.mark.parametrize("x", [(2, 3, 4, 5), (2, 3, 7), (2, 3, 2, 3, 4)])
def test_global_max_pool(x: tuple[int, ...]) -> None:
    y = (*x[:2], *[1] * (len(x) - 2))
    shapes = [",".join(map(str, dims)) for dims in (x, y)]
    check(
        f"g (FLOAT[{shapes[0]}] x) => (FLOAT[{shapes[1]}] y) {{ y = GlobalMaxPool(x) }}",
        lambda x: x.amax(tuple(range(2, x.dim())), keepdim=True),
        draw=distinct,
        reference=True,
    )


@pytest.mark.parametrize("p", [1, 2, 3])
def test_lp_pool(p: int) -> None:
    text = f"g (FLOAT[2,3,7,6] x) => (FLOAT[2,3,3,2] y) {{ y = LpPool <kernel_shape=[3,3], strides=[2,2], p={p}> (x) }}"

    def function(x: torch.Tensor) -> torch.Tensor:
        return (9 * torch.nn.functional.avg_pool2d(x.abs() ** p, 3, 2)) ** (1 / p)

    check(text, function, reference=True)


@pytest.mark.parametrize(
    "text",
    [
        "g (FLOAT[1,2,4,4] x) => (FLOAT[1,2,2,2] y) { y = MaxPool <kernel_shape=[2,2], strides=[2,2]> (x) }",
        "g (FLOAT[1,2,4,4] x) => (FLOAT[1,2,3,3] y) { y = AveragePool <kernel_shape=[2,2]> (x) }",
        "g (FLOAT[1,2,4,4] x) => (FLOAT[1,2,2,2] y) { y = AveragePool <kernel_shape=[2,2], strides=[2,2]> (x) }",
        "g (FLOAT[1,2,4,4] x) => (FLOAT[1,2,1,1] y) { y = GlobalAveragePool(x) }",
    ],
)
def test_pools_in_float16(text: str) -> None:
    check_half(text, wrt=["x"])
