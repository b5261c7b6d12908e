"""Gradients of Conv and ConvTranspose.

The shapes of the tests about formulations are on both sides of the bounds in `memonger.gradients.convolution`.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import onnx
import pytest
import torch

from tests.gradient_checks import check
from tests.gradient_half import check_half
from tests.reference_kernels import CONVOLUTIONS, TRANSPOSED, padding


def dims(*numbers: int) -> str:
    return ",".join(map(str, numbers))


def conv(
    x: tuple[int, ...], w: tuple[int, ...], bias: bool = False, wrt: list[str] | None = None, **settings: Any
) -> onnx.ModelProto:
    """Check one Conv with explicit pads."""
    rank = len(x) - 2
    strides, dilations = settings.get("strides", [1] * rank), settings.get("dilations", [1] * rank)
    pads, group = settings.get("pads", [0] * 2 * rank), settings.get("group", 1)

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        return CONVOLUTIONS[rank](padding(x, pads), w, b, strides, 0, dilations, group)

    y = function(torch.zeros(x), torch.zeros(w)).shape
    return _check("Conv", x, w, tuple(y), w[0] if bias else 0, function, settings, wrt)


def transposed(x: tuple[int, ...], w: tuple[int, ...], bias: bool = False, **settings: Any) -> onnx.ModelProto:
    """Check one ConvTranspose with explicit pads."""
    rank = len(x) - 2
    strides, dilations = settings.get("strides", [1] * rank), settings.get("dilations", [1] * rank)
    pads, group = settings.get("pads", [0] * 2 * rank), settings.get("group", 1)
    extra = settings.get("output_padding", [0] * rank)

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        y = TRANSPOSED[rank](x, w, None, strides, 0, 0, group, dilations)
        y = padding(y, [-p for p in pads[:rank]] + [e - p for e, p in zip(extra, pads[rank:], strict=True)])
        return y if b is None else y + b.reshape(-1, *[1] * rank)

    y = function(torch.zeros(x), torch.zeros(w)).shape
    return _check("ConvTranspose", x, w, tuple(y), y[1] if bias else 0, function, settings, None)


def _check(
    kind: str, x: tuple[int, ...], w: tuple[int, ...], y: tuple[int, ...], bias: int, function: Callable[..., Any] | None,
    settings: dict[str, Any], wrt: list[str] | None,
) -> onnx.ModelProto:  # fmt: skip
    attributes = ", ".join(f'{k}="{v}"' if isinstance(v, str) else f"{k}={v}" for k, v in settings.items())
    third, name = (f", FLOAT[{bias}] b", ", b") if bias else ("", "")
    return check(
        f"g (FLOAT[{dims(*x)}] x, FLOAT[{dims(*w)}] w{third}) => (FLOAT[{dims(*y)}] y) "
        f"{{ y = {kind} {f'<{attributes}>' if attributes else ''} (x, w{name}) }}",
        function,
        reference=True,
        wrt=wrt,
    )


def kinds(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


CASES: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 7, 6), (4, 3, 3, 3), {"pads": [1, 1, 1, 1]}),
    ((2, 3, 7, 6), (4, 3, 3, 2), {}),
    ((2, 3, 7, 6), (4, 3, 3, 3), {"pads": [2, 0, 1, 1]}),
    ((2, 3, 8, 7), (4, 3, 3, 3), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ((2, 3, 9, 8), (4, 3, 2, 3), {"strides": [3, 2]}),
    ((2, 3, 9, 8), (4, 3, 2, 2), {"strides": [4, 3], "pads": [0, 1, 0, 1]}),
    ((2, 3, 9, 8), (4, 3, 3, 3), {"dilations": [2, 2], "pads": [2, 1, 2, 1]}),
    ((2, 3, 9, 8), (4, 3, 3, 2), {"dilations": [2, 1]}),
    ((2, 3, 9, 11), (4, 3, 2, 3), {"dilations": [1, 3], "strides": [2, 2], "pads": [1, 2, 0, 1]}),
    ((2, 4, 7, 6), (6, 2, 3, 3), {"group": 2, "pads": [1, 1, 1, 1]}),
    ((2, 4, 8, 7), (6, 2, 3, 3), {"group": 2, "strides": [2, 2], "pads": [0, 1, 1, 1]}),
    ((2, 4, 9, 7), (6, 2, 3, 2), {"group": 2, "dilations": [1, 2]}),
    ((2, 4, 7, 6), (4, 1, 3, 3), {"group": 4, "pads": [1, 1, 1, 1]}),
    ((2, 4, 7, 6), (4, 1, 3, 3), {"group": 4, "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ((2, 3, 7, 6), (6, 1, 3, 3), {"group": 3, "pads": [1, 1, 1, 1]}),
    ((2, 4, 9, 7), (4, 1, 3, 3), {"group": 4, "dilations": [2, 2], "pads": [2, 2, 2, 2]}),
    ((2, 3, 5, 4), (4, 3, 1, 1), {}),
    ((2, 3, 5, 4), (4, 3, 1, 1), {"strides": [2, 2]}),
    ((2, 3, 5, 4), (4, 3, 1, 1), {"pads": [1, 1, 1, 1]}),
    ((2, 4, 5, 4), (6, 2, 1, 1), {"group": 2}),
    ((2, 3, 4, 4), (4, 3, 4, 4), {}),
    ((2, 3, 4, 4), (4, 3, 3, 3), {"pads": [3, 3, 3, 3]}),
    ((1, 3, 7, 6), (4, 3, 3, 3), {"pads": [1, 1, 1, 1]}),
    ((2, 1, 7, 6), (4, 1, 3, 3), {}),
    ((2, 3, 9), (4, 3, 3), {"pads": [1, 1]}),
    ((2, 3, 9), (4, 3, 3), {"strides": [2], "pads": [0, 1]}),
    ((2, 3, 9), (4, 3, 3), {"dilations": [2], "pads": [4, 0]}),
    ((2, 4, 9), (4, 1, 4), {"group": 4, "pads": [3, 0]}),
    ((2, 3, 5), (4, 3, 1), {}),
    ((2, 3, 4, 5, 4), (2, 3, 2, 3, 2), {"pads": [1, 0, 1, 0, 1, 1]}),
    ((2, 3, 5, 5, 6), (4, 3, 2, 3, 2), {"strides": [2, 1, 3]}),
    ((2, 3, 5, 5, 6), (4, 3, 2, 2, 3), {"dilations": [2, 1, 2]}),
    ((2, 4, 4, 5, 4), (2, 2, 2, 3, 2), {"group": 2}),
    ((2, 3, 3, 4, 3), (4, 3, 1, 1, 1), {"strides": [2, 1, 2]}),
]


@pytest.mark.parametrize(("x", "w", "settings"), CASES)
def test_conv(x: tuple[int, ...], w: tuple[int, ...], settings: dict[str, Any]) -> None:
    conv(x, w, **settings)


@pytest.mark.parametrize(("x", "w"), [((2, 3, 9), (4, 3, 3)), ((2, 3, 5, 4), (4, 3, 3, 3)), ((1, 2, 3, 3, 3), (2, 2, 2, 2, 2))])
def test_conv_with_a_bias(x: tuple[int, ...], w: tuple[int, ...]) -> None:
    conv(x, w, bias=True)


@pytest.mark.parametrize("auto_pad", ["SAME_UPPER", "SAME_LOWER", "VALID"])
@pytest.mark.parametrize(("stride", "kernel"), [(1, 3), (1, 2), (2, 3), (2, 2), (3, 2), (2, 4)])
def test_conv_that_finds_its_padding(auto_pad: str, stride: int, kernel: int) -> None:
    total = 0 if auto_pad == "VALID" else [max(0, (-(-n // stride) - 1) * stride + kernel - n) for n in (7, 8)]
    small = [t // 2 for t in total] if total else [0, 0]
    large = [t - t // 2 for t in total] if total else [0, 0]
    pads = [*large, *small] if auto_pad == "SAME_LOWER" else [*small, *large]

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(padding(x, pads), w, None, stride)

    y = tuple(function(torch.zeros(2, 3, 7, 8), torch.zeros(4, 3, kernel, kernel)).shape)
    settings = {"auto_pad": auto_pad, "strides": [stride] * 2}
    _check("Conv", (2, 3, 7, 8), (4, 3, kernel, kernel), y, 0, function, settings, None)


TRANSPOSED_CASES: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((2, 3, 4, 5), (3, 4, 3, 3), {}),
    ((2, 3, 4, 5), (3, 4, 3, 3), {"pads": [1, 1, 1, 1]}),
    ((2, 3, 4, 5), (3, 4, 3, 2), {"pads": [1, 0, 0, 1]}),
    ((2, 3, 4, 5), (3, 4, 2, 2), {"strides": [2, 2]}),
    ((2, 3, 4, 5), (3, 4, 3, 3), {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]}),
    ((2, 3, 4, 5), (3, 4, 4, 4), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    ((2, 3, 4, 5), (3, 4, 2, 2), {"strides": [3, 3], "output_padding": [2, 0]}),
    ((2, 3, 4, 5), (3, 2, 3, 3), {"dilations": [2, 2], "pads": [1, 2, 1, 1]}),
    ((2, 3, 4, 5), (3, 2, 3, 3), {"dilations": [2, 3], "strides": [2, 2]}),
    ((2, 4, 4, 5), (4, 3, 3, 3), {"group": 2, "strides": [2, 2]}),
    ((2, 4, 4, 5), (4, 1, 3, 3), {"group": 4, "pads": [1, 1, 1, 1]}),
    ((2, 4, 4, 5), (4, 2, 3, 3), {"group": 4, "dilations": [1, 2]}),
    ((2, 3, 4, 5), (3, 4, 1, 1), {}),
    ((2, 3, 5), (3, 4, 4), {"strides": [2], "pads": [1, 1]}),
    ((2, 3, 3, 4, 3), (3, 2, 2, 2, 3), {"strides": [2, 1, 2]}),
]


@pytest.mark.parametrize(("x", "w", "settings"), TRANSPOSED_CASES)
def test_conv_transpose(x: tuple[int, ...], w: tuple[int, ...], settings: dict[str, Any]) -> None:
    transposed(x, w, **settings)


def test_conv_transpose_with_a_bias() -> None:
    transposed((2, 3, 4, 5), (3, 4, 3, 3), bias=True)


@pytest.mark.parametrize("auto_pad", ["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"])
@pytest.mark.parametrize("size", [5, 6, 7, 8, 9])
def test_conv_transpose_of_a_given_size(auto_pad: str, size: int) -> None:
    missing = max(0, 8 - size)
    begin = missing // 2 if auto_pad == "SAME_UPPER" else missing - missing // 2

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.conv_transpose1d(x, w, stride=2)
        return padding(y, [-begin, size + begin - 8])

    settings = {"auto_pad": auto_pad, "strides": [2], "output_shape": [size]}
    _check("ConvTranspose", (2, 3, 3), (3, 2, 4), (2, 2, size), 0, function, settings, None)


@pytest.mark.parametrize(("auto_pad", "begin"), [("SAME_UPPER", 0), ("SAME_LOWER", 1)])
def test_conv_transpose_that_finds_its_padding(auto_pad: str, begin: int) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return padding(torch.nn.functional.conv_transpose1d(x, w, stride=2), [-begin, begin - 1])

    settings = {"auto_pad": auto_pad, "strides": [2]}
    _check("ConvTranspose", (2, 3, 3), (3, 2, 3), (2, 2, 6), 0, function, settings, None)
