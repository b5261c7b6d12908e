"""Gradients of Resize."""

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import memonger
from tests.support.gradient_checks import check, parse, run
from tests.support.gradient_half import check_half


def resize(
    x: tuple[int, ...], y: tuple[int, ...], function: Any, sizes: bool = False, **settings: Any
) -> onnx.ModelProto:
    """Check one Resize. onnxruntime's own forward pass in float32 tells the gradient too: it is linear."""
    attributes = ", ".join(f'{k}="{v}"' if isinstance(v, str) else f"{k}={v}" for k, v in settings.items())
    shapes = [",".join(map(str, dims)) for dims in (x, y)]
    scales = ",".join(f"{m / n!r}" for n, m in zip(x, y, strict=True))
    constants, names = f"float[{len(x)}] scales = {{{scales}}}", "x, , scales"
    if sizes:
        constants, names = f"int64[{len(x)}] sizes = {{{shapes[1]}}}", "x, , , sizes"
    text = f"g (FLOAT[{shapes[0]}] x) => (FLOAT[{shapes[1]}] y) <{constants}> {{ y = Resize <{attributes}> ({names}) }}"
    precise = settings.get("mode") == "linear"  # onnx.reference: cubic weights in float32, ties of nearest its own way
    made = check(text, function, reference=True, differences=precise)
    generator = np.random.default_rng(0)
    feeds = {
        "x": generator.standard_normal(x).astype(np.float32),
        "y.grad": generator.standard_normal(y).astype(np.float32),
    }
    results = run(made, feeds)
    found, wanted = np.sum(results["x.grad"] * feeds["x"]), np.sum(results["y"] * feeds["y.grad"])
    assert found == pytest.approx(wanted, rel=1e-3, abs=1e-3)
    return made


def interpolate(mode: str, size: tuple[int, ...], align: bool | None = None) -> Any:
    return lambda x: torch.nn.functional.interpolate(x, size=size, mode=mode, align_corners=align)


@pytest.mark.parametrize("coordinates", ["asymmetric", "half_pixel", "pytorch_half_pixel", "half_pixel_symmetric"])
@pytest.mark.parametrize("size", [(8, 10), (12, 5), (8, 15)])
def test_nearest_by_whole_factors(size: tuple[int, int], coordinates: str) -> None:
    settings = {"mode": "nearest", "coordinate_transformation_mode": coordinates}
    settings["nearest_mode"] = "floor" if coordinates == "asymmetric" else "round_prefer_floor"
    made = resize((2, 3, 4, 5), (2, 3, *size), interpolate("nearest", size), **settings)
    assert "MatMul" not in {node.op_type for node in made.graph.node}


@pytest.mark.parametrize("mode", ["floor", "ceil", "round_prefer_floor", "round_prefer_ceil"])
@pytest.mark.parametrize("size", [(7, 3), (9, 8), (2, 13)])
def test_nearest_by_any_factor(size: tuple[int, int], mode: str) -> None:
    settings = {"mode": "nearest", "coordinate_transformation_mode": "half_pixel", "nearest_mode": mode}
    resize((2, 3, 4, 5), (2, 3, *size), None, sizes=True, **settings)


@pytest.mark.parametrize(
    ("size", "sizes"),
    [((8, 10), True), ((6, 7), True), ((3, 2), True), ((4, 11), True), ((8, 10), False), ((3, 15), False)],
)
def test_linear(size: tuple[int, int], sizes: bool) -> None:
    x, y, settings = (2, 3, 4, 5), (2, 3, *size), {"mode": "linear"}
    half = {"coordinate_transformation_mode": "pytorch_half_pixel"}
    corners = {"coordinate_transformation_mode": "align_corners"}
    resize(x, y, interpolate("bilinear", size, False), sizes, **settings, **half)
    resize(x, y, interpolate("bilinear", size, True), sizes, **settings, **corners)


@pytest.mark.parametrize("coordinates", ["asymmetric", "half_pixel", "half_pixel_symmetric"])
@pytest.mark.parametrize("size", [(8, 10), (7, 3)])
def test_linear_with_other_coordinates(size: tuple[int, int], coordinates: str) -> None:
    resize((2, 3, 4, 5), (2, 3, *size), None, mode="linear", coordinate_transformation_mode=coordinates, sizes=True)


@pytest.mark.parametrize("coordinates", ["half_pixel", "align_corners", "asymmetric"])
@pytest.mark.parametrize("size", [(8, 10), (7, 3)])
def test_cubic(size: tuple[int, int], coordinates: str) -> None:
    settings = {"mode": "cubic", "coordinate_transformation_mode": coordinates, "cubic_coeff_a": -0.75}
    align = {"half_pixel": False, "align_corners": True}.get(coordinates)
    function = None if align is None else interpolate("bicubic", size, align)
    resize((2, 3, 4, 5), (2, 3, *size), function, sizes=True, **settings)


def test_cubic_that_leaves_out_what_lies_outside() -> None:
    resize((1, 2, 4, 5), (1, 2, 6, 8), None, sizes=True, mode="cubic", exclude_outside=1)


@pytest.mark.parametrize(("x", "y"), [((2, 3, 5), (2, 3, 10)), ((1, 2, 3, 4, 2), (1, 2, 6, 4, 4))])
def test_nearest_of_other_ranks(x: tuple[int, ...], y: tuple[int, ...]) -> None:
    resize(x, y, interpolate("nearest", y[2:]), coordinate_transformation_mode="asymmetric", nearest_mode="floor")


def test_one_element_made_many() -> None:
    resize((2, 3, 1, 1), (2, 3, 4, 5), interpolate("bilinear", (4, 5), True), mode="linear",
           coordinate_transformation_mode="align_corners", sizes=True)  # fmt: skip


def test_many_made_one() -> None:
    resize((2, 3, 4, 5), (2, 3, 1, 1), None, mode="linear",
           coordinate_transformation_mode="pytorch_half_pixel", sizes=True)  # fmt: skip


def test_scales_that_do_not_give_whole_sizes() -> None:
    """The scale that is said counts, not the quotient of the sizes."""
    text = (
        "g (FLOAT[1,1,1,5] x) => (FLOAT[1,1,1,8] y) <float[4] scales = {1.0, 1.0, 1.0, 1.7}> "
        '{ y = Resize <mode="linear", coordinate_transformation_mode="half_pixel"> (x, , scales) }'
    )

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.interpolate(
            x, scale_factor=(1.0, 1.7), mode="bilinear", recompute_scale_factor=False
        )

    check(text, function, reference=True)


def test_scales_for_some_axes() -> None:
    text = (
        "g (FLOAT[1,2,3,5] x) => (FLOAT[1,2,6,10] y) <float[2] scales = {2.0, 2.0}> "
        '{ y = Resize <axes=[2,3], mode="linear"> (x, , scales) }'
    )
    check(text, interpolate("bilinear", (6, 10), False), reference=True)


def test_upsample_of_an_old_model() -> None:
    text = (
        "g (FLOAT[1,2,3,4] x) => (FLOAT[1,2,6,8] y) <float[4] scales = {1.0, 1.0, 2.0, 2.0}> "
        '{ y = Upsample <mode="nearest"> (x, scales) }'
    )
    made = memonger.differentiate(parse(text, "float", 9), wrt=["x"])
    dy = np.arange(96, dtype=np.float32).reshape(1, 2, 6, 8)
    feeds = {"x": np.zeros((1, 2, 3, 4), np.float32), "y.grad": dy}
    found = run(ir.to_proto(made.ir), feeds)["x.grad"]
    assert np.array_equal(found, dy.reshape(1, 2, 3, 2, 4, 2).sum((3, 5)))


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("setting", ["antialias=1", 'coordinate_transformation_mode="tf_crop_and_resize"'])
def test_smoothed_and_cropped(setting: str, mode: str) -> None:
    check(
        "g (FLOAT[1,2,6,7] x) => (FLOAT[1,2,3,4] y) "
        "<int64[4] sizes = {1, 2, 3, 4}, float[8] roi = {0.0, 0.0, 0.1, 0.2, 1.0, 1.0, 1.2, 0.7}> "
        f'{{ y = Resize <mode="{mode}", {setting}> (x, roi, , sizes) }}',
        None,
        reference=True,
    )


@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_resize_in_float16(mode: str) -> None:
    check_half(
        "g (FLOAT[1,2,3,4] x) => (FLOAT[1,2,6,8] y) <float[4] scales = {1.0, 1.0, 2.0, 2.0}> "
        f'{{ y = Resize <mode="{mode}"> (x, , scales) }}',
        wrt=["x"],
    )
