"""Gradients of cross-entropy losses inside models."""

from typing import Any

import numpy as np
import onnx
import pytest
import torch

from tests.support.gradient_checks import check
from tests.support.gradient_half import check_half

SHAPES = [(4, 5), (2, 3, 4), (2, 3, 4, 2), (1, 4), (1, 3, 2, 2)]
LABELS = np.random.default_rng(1).integers(0, 3, 24)


def loss(
    kind: str, x: tuple[int, ...], weighted: bool = False, log_prob: bool = False, labels: np.ndarray | None = None,
    **settings: Any,
) -> onnx.ModelProto:  # fmt: skip
    """Check one loss node against PyTorch's function."""
    y = (x[0], *x[2:])
    shapes = [",".join(map(str, dims)) for dims in (x, y)]
    attributes = ", ".join(f'{k}="{v}"' if isinstance(v, str) else f"{k}={v}" for k, v in settings.items())
    reduction, ignore = settings.get("reduction", "mean"), settings.get("ignore_index", -100)

    def function(x: torch.Tensor, labels: torch.Tensor, w: torch.Tensor | None = None) -> Any:
        log = torch.log_softmax(x, 1) if kind == "SoftmaxCrossEntropyLoss" else x
        value = torch.nn.functional.nll_loss(log, labels.long(), w, ignore_index=ignore, reduction=reduction)
        return [value, log] if log_prob else value

    third, name = (f", FLOAT[{x[1]}] w", ", w") if weighted else ("", "")
    second, output = (f", FLOAT[{shapes[0]}] p", ", p") if log_prob else ("", "")
    return check(
        f"g (FLOAT[{shapes[0]}] x, int64[{shapes[1]}] labels{third}) => "
        f"(FLOAT[{shapes[1] if reduction == 'none' else ''}] l{second}) "
        f"{{ l{output} = {kind} {f'<{attributes}>' if attributes else ''} (x, labels{name}) }}",
        function,
        given={"labels": LABELS[: int(np.prod(y))].reshape(y) if labels is None else labels},
        wrt=["x"],
        draw=lambda generator, shape: generator.uniform(0.2, 2.0, shape),
    )


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("x", SHAPES)
@pytest.mark.parametrize("kind", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
def test_reductions(kind: str, x: tuple[int, ...], reduction: str) -> None:
    loss(kind, x, reduction=reduction)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("x", [(4, 5), (2, 3, 4)])
@pytest.mark.parametrize("kind", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
def test_weights_of_classes(kind: str, x: tuple[int, ...], reduction: str) -> None:
    loss(kind, x, weighted=True, reduction=reduction)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignored", [2, -100, -1, 255])
@pytest.mark.parametrize("kind", ["SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"])
def test_a_class_that_is_ignored(kind: str, ignored: int, weighted: bool, reduction: str) -> None:
    """Also where it is no class."""
    labels = np.array([[0, ignored, 1, ignored], [1, 0, ignored, 0]])
    loss(kind, (2, 3, 4), weighted, labels=labels, ignore_index=ignored, reduction=reduction)


@pytest.mark.parametrize("x", [(4, 5), (2, 3, 4)])
def test_log_probabilities_that_the_model_uses_too(x: tuple[int, ...]) -> None:
    loss("SoftmaxCrossEntropyLoss", x, log_prob=True)


def test_the_attributes_left_out() -> None:
    loss("SoftmaxCrossEntropyLoss", (4, 5))


def test_labels_of_32_bits() -> None:
    check(
        "g (FLOAT[4,5] x, int32[4] labels) => (FLOAT[] l) { l = SoftmaxCrossEntropyLoss (x, labels) }",
        lambda x, labels: torch.nn.functional.cross_entropy(x, labels.long()),
        given={"labels": np.array([0, 4, 2, 2])},
    )


def test_weights_that_are_trained() -> None:
    check(
        "g (FLOAT[4,5] x, int64[4] labels, FLOAT[5] w) => (FLOAT[] l) { l = SoftmaxCrossEntropyLoss (x, labels, w) }",
        None,
        given={"labels": np.array([0, 4, 2, 2])},
        draw=lambda generator, shape: generator.uniform(0.2, 2.0, shape),
    )


@pytest.mark.parametrize("settings", [{}, {"ignore_index": 1}, {"reduction": "none"}])
def test_the_gradient_is_written_in_three_passes_over_the_scores(settings: dict[str, Any]) -> None:
    """The probabilities, times what the row weighs, and that taken off at the label."""
    made = loss("SoftmaxCrossEntropyLoss", (4, 5), **settings)
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in made.graph.value_info}
    shapes["x.grad"] = [4, 5]
    large = [node.op_type for node in made.graph.node if shapes.get(node.output[0]) == [4, 5]]
    assert large == ["LogSoftmax", "Exp", "Mul", "ScatterElements"]


def test_cross_entropy_in_float16() -> None:
    check_half(
        "g (FLOAT[4,5] x, int64[4] labels) => (FLOAT[] l) { l = SoftmaxCrossEntropyLoss (x, labels) }",
        {"labels": np.array([0, 4, 2, 2])},
        wrt=["x"],
    )
