"""Gradients of normalizations."""

import math

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import memonger
from memonger.autodiff.rules import normalization
from tests.support.gradient_checks import check, parse, run
from tests.support.gradient_half import check_half

IMAGES = [(4, 3), (2, 3, 5), (2, 3, 4, 5), (2, 3, 10, 11), (1, 3, 12, 10), (2, 2, 3, 5, 8)]


def dims(*numbers: int) -> str:
    return ",".join(map(str, numbers))


def has_no_kernel(x: tuple[int, ...]) -> bool:
    """Whether the gradient has a convolution, for which onnxruntime has no float64 kernel."""
    return math.prod(x[2:]) >= normalization.LARGE_IMAGE


def positive(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return generator.uniform(0.5, 2.0, shape)


@pytest.mark.parametrize("x", IMAGES)
def test_batch_normalization_by_running_statistics(x: tuple[int, ...]) -> None:
    c = x[1]
    check(
        f"g (FLOAT[{dims(*x)}] x, FLOAT[{c}] s, FLOAT[{c}] b, FLOAT[{c}] m, FLOAT[{c}] v) => (FLOAT[{dims(*x)}] y) "
        "{ y = BatchNormalization <epsilon=0.01> (x, s, b, m, v) }",
        lambda x, s, b, m, v: torch.nn.functional.batch_norm(x, m, v, s, b, False, 0.1, 0.01),
        draw=positive,
        wrt=["x", "s", "b"],
        reference=has_no_kernel(x),
    )


def test_batch_normalization_by_statistics_that_are_computed() -> None:
    check(
        "g (FLOAT[2,3,4] x, FLOAT[3] s, FLOAT[3] b, FLOAT[3] m, FLOAT[3] v) => (FLOAT[2,3,4] y) "
        "{ y = BatchNormalization <epsilon=0.01> (x, s, b, m, v) }",
        None,
        draw=positive,
    )


@pytest.mark.parametrize("wanted", ["x", "s", "b", "m", "v"])
def test_batch_normalization_by_one_input(wanted: str) -> None:
    check(
        "g (FLOAT[2,3,4] x, FLOAT[3] s, FLOAT[3] b, FLOAT[3] m, FLOAT[3] v) => (FLOAT[2,3,4] y) "
        "{ y = BatchNormalization(x, s, b, m, v) }",
        None,
        draw=positive,
        wrt=[wanted],
    )


@pytest.mark.parametrize("x", IMAGES)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_batch_normalization_in_training(x: tuple[int, ...], momentum: float) -> None:
    c = x[1]
    check(
        f"g (FLOAT[{dims(*x)}] x, FLOAT[{c}] s, FLOAT[{c}] b, FLOAT[{c}] m, FLOAT[{c}] v) => (FLOAT[{dims(*x)}] y) "
        f"{{ y, nm, nv = BatchNormalization <training_mode=1, momentum={momentum}, epsilon=0.01> (x, s, b, m, v) }}",
        lambda x, s, b, m, v: torch.nn.functional.batch_norm(x, None, None, s, b, True, 0.1, 0.01),
        wrt=["x", "s", "b"],
        reference=has_no_kernel(x),
    )


@pytest.mark.parametrize("wanted", ["x", "s", "b"])
def test_batch_normalization_in_training_by_one_input(wanted: str) -> None:
    check(
        "g (FLOAT[2,3,4] x, FLOAT[3] s, FLOAT[3] b, FLOAT[3] m, FLOAT[3] v) => (FLOAT[2,3,4] y) "
        "{ y, nm, nv = BatchNormalization <training_mode=1> (x, s, b, m, v) }",
        lambda x, s, b, m, v: torch.nn.functional.batch_norm(x, None, None, s, b, True),
        wrt=[wanted],
    )


RUNNING = (
    "g (FLOAT[2,3,4] x, FLOAT[3] s, FLOAT[3] b, FLOAT[3] m, FLOAT[3] v) => (FLOAT[2,3,4] y, FLOAT[3] nm, FLOAT[3] nv) "
    "{ y, nm, nv = BatchNormalization <training_mode=1, momentum=0.75> (x, s, b, m, v) }"
)


def test_running_statistics_stay_what_the_operator_says() -> None:
    model = parse(RUNNING, "float", 20)
    made = ir.to_proto(memonger.differentiate(model, wrt=["x", "s", "b"]).ir)
    generator = np.random.default_rng(0)
    feeds = {v.name: generator.uniform(0.5, 2.0, shape_of(v)).astype(np.float32) for v in made.graph.input}
    plain, trained = run(model, feeds), run(made, feeds)
    x = feeds["x"]
    assert np.allclose(trained["nm"], 0.75 * feeds["m"] + 0.25 * x.mean((0, 2)), atol=1e-6)
    assert np.allclose(trained["nv"], 0.75 * feeds["v"] + 0.25 * x.var((0, 2)), atol=1e-6)
    for name in ("y", "nm", "nv"):
        assert np.allclose(trained[name], plain[name], atol=1e-6)


def shape_of(value: onnx.ValueInfoProto) -> list[int]:
    return [dim.dim_value for dim in value.type.tensor_type.shape.dim]


@pytest.mark.parametrize("x", [(2, 3, 5), (2, 3, 4, 5), (2, 3, 10, 12), (1, 3, 4, 5), (2, 2, 3, 4, 5)])
def test_instance_normalization(x: tuple[int, ...]) -> None:
    c = x[1]
    check(
        f"g (FLOAT[{dims(*x)}] x, FLOAT[{c}] s, FLOAT[{c}] b) => (FLOAT[{dims(*x)}] y) "
        "{ y = InstanceNormalization <epsilon=0.01> (x, s, b) }",
        lambda x, s, b: torch.nn.functional.instance_norm(x, None, None, s, b, True, 0.1, 0.01),
        reference=True,
    )


def group_norm(x: tuple[int, ...], groups: int, opset: int = 21) -> onnx.ModelProto:
    """Until opset 21 scale and bias are the groups', and onnx computes in single precision."""
    c = x[1] if opset >= 21 else groups
    each = x[1] // c

    def function(x: torch.Tensor, s: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.group_norm(x, groups, s.repeat_interleave(each), b.repeat_interleave(each), 0.01)

    precision = ", stash_type=11" if opset >= 21 else ""
    return check(
        f"g (FLOAT[{dims(*x)}] x, FLOAT[{c}] s, FLOAT[{c}] b) => (FLOAT[{dims(*x)}] y) "
        f"{{ y = GroupNormalization <num_groups={groups}, epsilon=0.01{precision}> (x, s, b) }}",
        function,
        opset=opset,
        reference=True,
    )


@pytest.mark.parametrize("opset", [20, 21])
@pytest.mark.parametrize(
    ("x", "groups"), [((3, 4, 2, 3), 2), ((3, 4, 5), 1), ((3, 4, 5), 4), ((1, 1, 5), 1), ((2, 4, 10, 11), 2)]
)
def test_group_normalization(x: tuple[int, ...], groups: int, opset: int) -> None:
    group_norm(x, groups, opset)


def test_group_normalization_keeps_one_image_for_the_backward_pass() -> None:
    """The normalized image is what its gradients read, not the input too."""
    made = group_norm((3, 4, 5, 6), 2)
    views = {"x", *(node.output[0] for node in made.graph.node if node.op_type == "Reshape" and node.input[0] == "x")}
    readers = [node.name for node in made.graph.node if views.intersection(node.input)]
    assert readers
    assert not [name for name in readers if name.startswith("grad/")]


@pytest.mark.parametrize(("axis", "scale"), [(-1, "5"), (2, "5"), (1, "4,5"), (0, "3,4,5"), (-2, "4,5")])
@pytest.mark.parametrize("bias", [True, False])
def test_layer_normalization(axis: int, scale: str, bias: bool) -> None:
    shape = [int(n) for n in scale.split(",")]
    third, name = (f", FLOAT[{scale}] b", ", b") if bias else ("", "")
    check(
        f"g (FLOAT[3,4,5] x, FLOAT[{scale}] s{third}) => (FLOAT[3,4,5] y) "
        f"{{ y = LayerNormalization <axis={axis}, epsilon=0.01> (x, s{name}) }}",
        lambda x, s, b=None: torch.nn.functional.layer_norm(x, shape, s, b, 0.01),
    )


@pytest.mark.parametrize("wanted", ["x", "s", "b"])
def test_layer_normalization_by_one_input(wanted: str) -> None:
    check(
        "g (FLOAT[3,5] x, FLOAT[5] s, FLOAT[5] b) => (FLOAT[3,5] y) { y = LayerNormalization(x, s, b) }",
        lambda x, s, b: torch.nn.functional.layer_norm(x, [5], s, b),
        wrt=[wanted],
    )


@pytest.mark.parametrize("axis", [-1, 1])
def test_rms_normalization(axis: int) -> None:
    scale = [4, 5] if axis == 1 else [5]
    check(
        f"g (FLOAT[3,4,5] x, FLOAT[{dims(*scale)}] s) => (FLOAT[3,4,5] y) "
        f"{{ y = RMSNormalization <axis={axis}, epsilon=0.01> (x, s) }}",
        lambda x, s: torch.nn.functional.rms_norm(x, scale, s, 0.01),
        opset=23,
    )


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_lp_normalization(p: int, axis: int) -> None:
    check(
        f"g (FLOAT[3,4,5] x) => (FLOAT[3,4,5] y) {{ y = LpNormalization <axis={axis}, p={p}> (x) }}",
        lambda x: torch.nn.functional.normalize(x, p, axis),
    )


@pytest.mark.parametrize(("x", "size"), [((2, 6, 3, 4), 5), ((2, 4, 3, 1), 1), ((1, 7, 2, 2), 3), ((2, 3, 4, 4), 5)])
def test_lrn(x: tuple[int, ...], size: int) -> None:
    check(
        f"g (FLOAT[{dims(*x)}] x) => (FLOAT[{dims(*x)}] y) "
        f"{{ y = LRN <size={size}, alpha=0.3, beta=0.7, bias=1.5> (x) }}",
        lambda x: torch.nn.functional.local_response_norm(x, size, 0.3, 0.7, 1.5),
        reference=True,
    )


@pytest.mark.parametrize("size", [2, 4])
def test_lrn_over_an_even_number_of_channels(size: int) -> None:
    check(
        f"g (FLOAT[2,6,3,4] x) => (FLOAT[2,6,3,4] y) {{ y = LRN <size={size}, alpha=0.3> (x) }}", None, reference=True
    )


@pytest.mark.parametrize(
    ("text", "wrt"),
    [
        (
            "g (FLOAT[2,3,12,10] x, FLOAT[3] s, FLOAT[3] b, FLOAT[3] m, FLOAT[3] v) => (FLOAT[2,3,12,10] y) "
            "{ y, nm, nv = BatchNormalization <training_mode=1> (x, s, b, m, v) }",
            ["x", "s", "b"],
        ),
        (
            "g (FLOAT[3,6] x, FLOAT[6] s, FLOAT[6] b) => (FLOAT[3,6] y) { y = LayerNormalization(x, s, b) }",
            ["x", "s", "b"],
        ),
    ],
)
def test_normalizations_in_float16(text: str, wrt: list[str]) -> None:
    check_half(text, wrt=wrt)
