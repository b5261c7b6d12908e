"""Gradients of Softmax and LogSoftmax."""

import numpy as np
import pytest
import torch

from tests.support.gradient_checks import check
from tests.support.gradient_half import check_half


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2])
@pytest.mark.parametrize(("kind", "function"), [("Softmax", torch.softmax), ("LogSoftmax", torch.log_softmax)])
def test_softmax_along_any_axis(kind: str, function: object, axis: int) -> None:
    check(
        f"g (FLOAT[3,4,5] x) => (FLOAT[3,4,5] y) {{ y = {kind} <axis={axis}> (x) }}",
        lambda x: function(x, axis),  # type: ignore[operator]
    )


@pytest.mark.parametrize(("kind", "function"), [("Softmax", torch.softmax), ("LogSoftmax", torch.log_softmax)])
def test_softmax_is_along_the_last_axis_if_nothing_is_said(kind: str, function: object) -> None:
    text = f"g (FLOAT[3,5] x) => (FLOAT[3,5] y) {{ y = {kind}(x) }}"
    check(text, lambda x: function(x, -1))  # type: ignore[operator]


@pytest.mark.parametrize("kind", ["Softmax", "LogSoftmax"])
def test_softmax_in_float16(kind: str) -> None:
    check_half(f"g (FLOAT[3,5] x) => (FLOAT[3,5] y) {{ y = {kind}(x) }}", wrt=["x"])


@pytest.mark.parametrize(
    ("axis", "shape", "y"), [(1, "4,1", (4, 1)), (-1, "4,3", (4, 3)), (0, "2,5", (2, 5)), (1, "3,2", (3, 2))]
)
def test_a_few_numbers_gathered_from_log_softmax(axis: int, shape: str, y: tuple[int, ...]) -> None:
    """Gathered along the axis, with repeats, or along another, or from some of the rows."""
    along = 1 if shape == "3,2" else axis
    indices = np.random.default_rng(0).integers(0, 4, y)
    check(
        f"g (FLOAT[4,5] x, int64[{shape}] i) => (FLOAT[{shape}] y) "
        f"{{ l = LogSoftmax <axis={axis}> (x) y = GatherElements <axis={along}> (l, i) }}",
        lambda x, i: torch.log_softmax(x, axis).gather(along, i),
        given={"i": indices},
    )


def test_the_gradient_of_picked_log_probabilities_reads_the_scores_gradient_once() -> None:
    made = check(
        "g (FLOAT[4,5] x, int64[4,1] i) => (FLOAT[4,1] y) { l = LogSoftmax(x) y = GatherElements <axis=1> (l, i) }",
        lambda x, i: torch.log_softmax(x, 1).gather(1, i),
        given={"i": np.array([[0], [4], [2], [2]])},
    )
    large = [node.op_type for node in made.graph.node if node.op_type in ("Exp", "Mul", "Sub", "ConstantOfShape")]
    assert large == ["Exp", "Mul"]
