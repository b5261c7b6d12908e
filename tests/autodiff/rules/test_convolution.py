"""Gradients of Conv and ConvTranspose.

The shapes of the tests about formulations are on both sides of the bounds in `memonger.autodiff.rules.convolution`.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import onnx
import pytest
import torch

from tests.support.gradient_checks import check
from tests.support.gradient_half import check_half
from tests.support.reference_kernels import CONVOLUTIONS, TRANSPOSED, padding


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
    kind: str,
    x: tuple[int, ...],
    w: tuple[int, ...],
    y: tuple[int, ...],
    bias: int,
    function: Callable[..., Any] | None,
    settings: dict[str, Any],
    wrt: list[str] | None,
) -> onnx.ModelProto:
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


@pytest.mark.parametrize(
    ("x", "w"), [((2, 3, 9), (4, 3, 3)), ((2, 3, 5, 4), (4, 3, 3, 3)), ((1, 2, 3, 3, 3), (2, 2, 2, 2, 2))]
)
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


@pytest.mark.parametrize(("x", "w"), [((2, 13, 4, 4), (12, 13, 1, 1)), ((1, 30, 4, 4), (7, 30, 1, 1))])
def test_a_pointwise_weight_over_small_images_is_one_product(x: tuple[int, ...], w: tuple[int, ...]) -> None:
    made = conv(x, w)
    assert (kinds(made)["MatMul"], kinds(made)["Gemm"]) == (1, 1)
    assert kinds(made)["Conv"] == 1


@pytest.mark.parametrize(
    ("x", "w", "settings"),
    [
        ((1, 2, 4, 3), (40, 2, 3, 3), {"pads": [1, 1, 1, 1]}),
        ((2, 3, 4, 4), (50, 3, 3, 2), {"pads": [2, 0, 1, 1], "strides": [2, 1]}),
        ((2, 2, 5, 5), (40, 2, 2, 2), {"dilations": [2, 3]}),
        ((1, 2, 9), (16, 2, 3), {"strides": [3]}),
        ((1, 2, 3, 3, 2), (40, 2, 2, 2, 2), {}),
    ],
)
def test_a_weight_with_many_outputs_is_one_product(
    x: tuple[int, ...], w: tuple[int, ...], settings: dict[str, Any]
) -> None:
    made = conv(x, w, wrt=["w"], **settings)
    assert (kinds(made)["Gemm"], kinds(made)["Conv"]) == (1, 2)


@pytest.mark.parametrize("strides", [[1, 1], [2, 2]])
@pytest.mark.parametrize(("n", "c", "k"), [(2, 3, 4), (2, 4, 3), (1, 3, 4), (1, 4, 3)])
def test_a_pointwise_weight_over_large_images_is_a_product_an_image(n: int, c: int, k: int, strides: list[int]) -> None:
    side = 28 * strides[0]
    made = conv((n, c, side, side), (k, c, 1, 1), strides=strides)
    assert kinds(made)["Conv"] == 2
    large = n * min(c, k) * 28 * 28
    assert not [t for t in made.graph.node if t.op_type == "Transpose" and size_of(made, t.output[0]) >= large]


@pytest.mark.parametrize(("channels", "products"), [(20, 1), (60, 0)])
def test_a_pointwise_weight_that_is_small_beside_images_is_a_product_an_image(channels: int, products: int) -> None:
    made = conv((2, channels, 8, 8), (channels, channels, 1, 1), wrt=["w"])
    assert kinds(made)["Conv"] == 1 + products
    assert kinds(made)["Transpose"] == (0 if products else 2)


def size_of(model: onnx.ModelProto, name: str) -> int:
    for value in [*model.graph.value_info, *model.graph.output]:
        if value.name == name:
            return math.prod(dim.dim_value for dim in value.type.tensor_type.shape.dim)
    raise AssertionError(f"no value {name}")


FLIPPED: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((1, 2, 28, 28), (3, 2, 3, 3), {"pads": [1, 1, 1, 1]}),
    ((1, 2, 30, 29), (3, 2, 3, 2), {"pads": [2, 0, 1, 1]}),
    ((1, 2, 28, 28), (3, 2, 3, 3), {"pads": [4, 4, 4, 4], "dilations": [2, 3]}),
    ((1, 4, 28, 28), (6, 2, 3, 3), {"pads": [1, 1, 1, 1], "group": 2}),
    ((1, 3, 28, 28), (3, 1, 3, 3), {"pads": [1, 1, 1, 1], "group": 3}),
    ((1, 3, 28, 28), (6, 1, 5, 5), {"pads": [2, 2, 2, 2], "group": 3}),
    ((1, 1, 28, 28), (1, 1, 3, 1), {}),
    ((1, 2, 800), (3, 2, 5), {"pads": [2, 2]}),
    ((1, 2, 9, 9, 10), (3, 2, 2, 3, 3), {"pads": [1, 1, 1, 0, 1, 1]}),
]


@pytest.mark.parametrize(("x", "w", "settings"), FLIPPED)
def test_at_strides_1_the_gradient_is_a_convolution(
    x: tuple[int, ...], w: tuple[int, ...], settings: dict[str, Any]
) -> None:
    assert "ConvTranspose" not in kinds(conv(x, w, wrt=["x"], **settings))


def test_padding_as_wide_as_the_window_is_left_to_conv_transpose() -> None:
    made = conv((1, 2, 28, 28), (3, 2, 3, 3), pads=[3, 3, 3, 3], wrt=["x"])
    assert kinds(made)["ConvTranspose"] == 1


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("pads", [[1, 1, 1, 1], [0, 2, 1, 0]])
def test_a_weight_to_fewer_channels_comes_from_rows_of_the_output_gradient(pads: list[int], group: int) -> None:
    made = conv((2, 6, 7, 6), (4, 6 // group, 3, 3), pads=pads, group=group, wrt=["w"])
    last = [node for node in made.graph.node if node.op_type == "Conv"][-1]
    steps = next(list(a.ints) for a in last.attribute if a.name == "dilations")
    assert steps == [1, 4 // group]


@pytest.mark.parametrize("group", [1, 2])
def test_a_dilated_weight_comes_from_a_convolution_of_one_rank_more(group: int) -> None:
    made = conv((2, 4, 9, 9), (6, 4 // group, 3, 3), dilations=[2, 2], group=group, wrt=["w"])
    last = [node for node in made.graph.node if node.op_type == "Conv"][-1]
    assert next(list(a.ints) for a in last.attribute if a.name == "strides") == [1, 2, 2]


@pytest.mark.parametrize(
    ("x", "w", "settings"),
    [
        ((2, 3, 9, 8), (3, 1, 3, 3), {"pads": [1, 1, 1, 1]}),
        ((2, 3, 9, 8), (6, 1, 3, 2), {"pads": [0, 1, 2, 0]}),
        ((2, 3, 9, 8), (3, 1, 3, 1), {"pads": [1, 0, 1, 0]}),
        ((1, 3, 9, 8), (3, 1, 1, 1), {}),
        ((2, 3, 11, 12), (3, 1, 3, 3), {"dilations": [2, 3], "pads": [1, 2, 0, 3]}),
        ((2, 3, 11), (3, 1, 4), {"pads": [2, 1]}),
        ((2, 3, 11), (6, 1, 3), {"dilations": [3]}),
    ],
)
def test_a_depthwise_weight_is_summed_column_by_column(
    x: tuple[int, ...], w: tuple[int, ...], settings: dict[str, Any]
) -> None:
    made = conv(x, w, group=3, wrt=["w"], **settings)
    assert kinds(made)["Conv"] == 1 + w[-1]
    assert "Transpose" not in kinds(made)


@pytest.mark.parametrize(
    ("x", "w", "settings"),
    [
        ((2, 3, 9, 8), (6, 1, 3, 2), {"strides": [2, 3], "pads": [0, 1, 2, 0]}),
        ((2, 3, 9, 8), (3, 1, 2, 3), {"strides": [4, 2]}),
        ((1, 3, 11, 12), (3, 1, 3, 3), {"dilations": [2, 3], "strides": [2, 1], "pads": [1, 2, 0, 3]}),
        ((2, 3, 11), (3, 1, 4), {"strides": [3], "pads": [2, 1]}),
        ((2, 2, 5, 4, 5), (2, 1, 2, 2, 2), {"strides": [1, 2, 2]}),
    ],
)
def test_a_depthwise_weight_at_strides_is_one_convolution(
    x: tuple[int, ...], w: tuple[int, ...], settings: dict[str, Any]
) -> None:
    made = conv(x, w, group=x[1], wrt=["w"], **settings)
    last = [node for node in made.graph.node if node.op_type == "Conv"][-1]
    assert kinds(made)["Conv"] == 2
    assert next(a.i for a in last.attribute if a.name == "group") == x[0] * x[1]


@pytest.mark.parametrize("kind", ["Conv", "ConvTranspose"])
def test_convolutions_in_float16(kind: str) -> None:
    y = "1,3,4,4" if kind == "Conv" else "1,2,8,8"
    x, w = ("1,2,6,6", "3,2,3,3") if kind == "Conv" else ("1,2,6,6", "2,2,3,3")
    text = f"g (FLOAT[{x}] x, FLOAT[{w}] w) => (FLOAT[{y}] y) {{ y = {kind}(x, w) }}"
    check_half(text, wrt=["x", "w"])
