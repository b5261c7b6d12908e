"""Second derivatives: products with the Hessian, against PyTorch's, and what can't be differentiated twice."""

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import memonger
from memonger.errors import PlanError
from tests.support.gradient_checks import run

SHAPES = {"w1": (7, 5), "b1": (7,), "w2": (3, 7)}


def perceptron(activation: str) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]> g (float[6,5] x) => (float[6,3] y) {{
            h = Gemm<transB=1>(x, w1, b1)
            a = {activation}(h)
            y = Gemm<transB=1>(a, w2)
        }}"""
    )
    generator = np.random.default_rng(0)
    weights = {name: generator.standard_normal(shape).astype(np.float32) / 2 for name, shape in SHAPES.items()}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    return model, weights


def checked(model: memonger.Model, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    proto = ir.to_proto(model.ir)
    onnx.checker.check_model(proto, full_check=True)
    return run(proto, feeds)


@pytest.mark.parametrize("loss", ["softmax_cross_entropy", "mean_squared_error"])
@pytest.mark.parametrize(
    ("activation", "theirs"), [("Tanh", torch.tanh), ("Relu", torch.relu), ("Gelu", F.gelu), ("Sigmoid", torch.sigmoid)]
)
def test_products_with_the_hessian_are_pytorchs(activation: str, theirs: Callable[[Tensor], Tensor], loss: str) -> None:
    model, weights = perceptron(activation)
    generator = np.random.default_rng(1)
    vectors = {name: generator.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    x, target = (generator.standard_normal(shape).astype(np.float32) for shape in ((6, 5), (6, 3)))
    labels = target.argmax(1)
    twice = memonger.differentiate(memonger.differentiate(model, loss=loss))
    assert twice.training is not None
    feeds = {"labels": labels} if loss.startswith("softmax") else {"target": target}
    feeds |= {"x": x, **{f"{name}.grad.grad": vector for name, vector in vectors.items()}}
    found = checked(twice, feeds)
    p = {name: torch.from_numpy(array).requires_grad_() for name, array in weights.items()}
    y = theirs(torch.from_numpy(x) @ p["w1"].T + p["b1"]) @ p["w2"].T
    if loss.startswith("softmax"):
        value = F.cross_entropy(y, torch.from_numpy(labels))
    else:
        value = F.mse_loss(y, torch.from_numpy(target))
    gradients = torch.autograd.grad(value, list(p.values()), create_graph=True)
    product = sum((g * torch.from_numpy(vectors[name])).sum() for g, name in zip(gradients, p, strict=True))
    assert isinstance(product, Tensor)
    for name, expected in zip(p, torch.autograd.grad(product, list(p.values())), strict=True):
        output = twice.training.gradients[name]
        np.testing.assert_allclose(found[output], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["w1.grad"], gradients[0].detach(), rtol=1e-4, atol=1e-6)


def test_second_derivatives_by_inputs() -> None:
    """A sum of cubes has the Hessian 6·diag(x): by an input, three times over."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]> g (float[4] x) => (float l)
        { s = Mul(x, x) c = Mul(s, x) l = ReduceSum<keepdims=0>(c) }"""
    )
    once = memonger.differentiate(model, loss="l", wrt=["x"])
    twice = memonger.differentiate(once, wrt=["x"])
    assert twice.training is not None
    x, v = np.array([1, -2, 3, 0.5], np.float32), np.array([1, 2, 0, -1], np.float32)
    found = checked(twice, {"x": x, "x.grad.grad": v})
    np.testing.assert_allclose(found["x.grad"], 3 * x * x, rtol=1e-6)
    np.testing.assert_allclose(found[twice.training.gradients["x"]], 6 * x * v, rtol=1e-6)


def test_what_has_an_optimizer_or_no_rule_is_not_differentiated_twice() -> None:
    model, _ = perceptron("Tanh")
    step = memonger.differentiate(model, loss="mean_squared_error", optimizer=memonger.SGD())
    with pytest.raises(PlanError, match=r"differentiated before.*for second derivatives one without an optimizer"):
        memonger.differentiate(step)
    with pytest.raises(PlanError, match="differentiated before"):
        memonger.differentiate(memonger.differentiate(model, loss="mean_squared_error"), loss="loss")
    linear = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]> g (float[4] x, float[4] w) => (float l)
        { p = Mul(x, w) l = ReduceSum<keepdims=0>(p) }"""
    )
    once = memonger.differentiate(linear, loss="l", wrt=["x"])
    with pytest.raises(PlanError, match=r"no differentiable way from 'x\.grad' to any"):
        memonger.differentiate(once)
