"""Gradients that are sums over many rows, beside sums in float64."""

import math

import numpy as np
import onnx
import onnx.parser
import pytest

import memonger

pytest.importorskip("onnxruntime", reason="sums run")


@pytest.mark.parametrize("shape", [(4096,), (4, 32, 32), (1, 4096), (4096, 2), (4099,), (63,), (2, 32)])
def test_the_gradient_of_a_bias_over_many_rows_is_near_that_in_float64(shape: tuple[int, ...]) -> None:
    dims = ",".join(map(str, (*shape, 24)))
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 18]> graph (float[{dims}] x) => (float[{dims}] y) <float[24] bias> '
        "{ shifted = Add(x, bias) y = Mul(shifted, shifted) }"
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(24, np.float32), "bias"))
    training = memonger.differentiate(model)
    assert training.training is not None
    (slope,) = training.training.output_gradients.values()
    generator = np.random.default_rng(0)
    x, dy = (generator.uniform(0.5, 1, (*shape, 24)).astype(np.float32) for _ in range(2))
    planned = memonger.search_plan(training, device="cpu", strategy="none", chunks="off")
    gradient = memonger.Session(planned).run({"x": x, slope: dy})["bias.grad"]
    expected = (2.0 * x.astype(np.float64) * dy).reshape(-1, 24).sum(0)
    has_blocks = any(math.prod(shape) % number == 0 for number in range(8, 65))
    np.testing.assert_allclose(gradient, expected, rtol=6e-7 if has_blocks else 1e-5)
