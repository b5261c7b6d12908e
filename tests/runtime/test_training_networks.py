"""Whole networks exported from PyTorch against autograd, in training mode: loss, every gradient, optimizer steps.

Both are held against PyTorch in float64. A float32 gradient is off by rounding in every layer behind it, and how much
that matters differs from parameter to parameter; PyTorch's own float32 error is the measure. Ours may be `FACTOR` times
as large, or `FLOOR` relative to the gradient's norm.
"""

import functools

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import memonger
from tests.support import torch_networks as reference
from tests.support.torch_steps import relative_errors, steps

FACTOR = 8.0
FLOOR = 2e-5

ALIKE = ("densenet", "gru")
"""Of operators that others have; tests/autodiff/rules has each of them alone."""

torch = pytest.importorskip("torch")


@functools.cache
def _training(name: str, optimizer: object = None) -> memonger.Model:
    model = memonger.to_training_mode(reference.exported(name), dropout=False)
    return memonger.differentiate(model, loss="softmax_cross_entropy", optimizer=optimizer)


def _optimizer(name: str) -> object:
    kind, settings = reference.OPTIMIZERS[name]
    return {"SGD": memonger.SGD, "Adam": memonger.Adam, "AdamW": memonger.AdamW}[kind.__name__](**settings)


def _feeds(name: str, trainer: memonger.TrainingSession, seed: int) -> dict[str, np.ndarray]:
    inputs = reference.data(name, seed)
    return {value.name: tensor.numpy() for value, tensor in zip(trainer.inputs, inputs, strict=True)}


def _close(found: dict[str, np.ndarray], single: dict[str, np.ndarray], truth: dict[str, np.ndarray]) -> None:
    """Compare each tensor with the truth, allowing what PyTorch's float32 needs."""
    worst = max(relative_errors(single, truth).values())
    for name, error in relative_errors(found, truth).items():
        assert error <= max(FLOOR, FACTOR * worst), (
            f"{name}: off by {error:.1e}; PyTorch's float32 is within {worst:.1e}"
        )


@pytest.mark.parametrize("name", [name for name in reference.NETWORKS if name not in ALIKE])
def test_loss_and_every_gradient_agree_with_autograd(name: str) -> None:
    training = _training(name)
    trainer = memonger.TrainingSession(memonger.search_plan(training, threads=1))
    loss = trainer.step(_feeds(name, trainer, 0))
    truth, single = reference.reference_step(name, dtype=torch.float64), reference.reference_step(name)
    assert loss == pytest.approx(truth.loss, rel=1e-5)
    outputs = trainer.outputs()
    gradients = {key: outputs[f"{key}.grad"] for key in truth.gradients}
    _close(gradients, single.gradients, truth.gradients)


@pytest.mark.parametrize(("name", "optimizer"), [("resnet18", "nesterov"), ("gpt", "adamw")])
def test_five_optimizer_steps_stay_together(name: str, optimizer: str) -> None:
    trainer = memonger.TrainingSession(memonger.search_plan(_training(name, _optimizer(optimizer)), threads=1))
    losses = [trainer.step(_feeds(name, trainer, seed)) for seed in range(5)]
    truth = reference.reference_training(name, optimizer, dtype=torch.float64)
    single = reference.reference_training(name, optimizer)
    apart = max(abs(a - b) for a, b in zip(single.losses, truth.losses, strict=True))
    np.testing.assert_allclose(losses, truth.losses, rtol=1e-4, atol=FACTOR * apart)
    state = trainer.state_dict()
    _close({key: state[key] for key in truth.parameters}, single.parameters, truth.parameters)
    if truth.statistics:
        _close({key: state[key] for key in truth.statistics}, single.statistics, truth.statistics)


def test_the_truth_is_float64_where_a_module_casts_to_float32() -> None:
    class Casting(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x).float() + torch.full((4,), 1 / 3)
            return y.to(torch.float32).softmax(1, dtype=torch.float32)

    module = Casting(3, 4).double()
    x = torch.randn(2, 3)
    ((_, scores),) = steps(module, [(x, torch.tensor([0, 1]))])
    y = np.exp(x.double().numpy() @ module.weight.detach().numpy().T + module.bias.detach().numpy())
    np.testing.assert_allclose(scores.detach().numpy(), y / y.sum(1, keepdims=True), rtol=1e-14)
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize("name", [name for name in reference.NETWORKS if name not in ALIKE])
def test_the_training_model_is_standard_and_passes_the_full_check(name: str) -> None:
    proto = ir.to_proto(_training(name, _optimizer("adamw" if name in ("lstm", "gpt") else "nesterov")).ir)
    onnx.checker.check_model(proto, full_check=True)
    assert {node.domain for node in proto.graph.node} <= {"", "ai.onnx"}
    inferred = onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)
    known = {value.name for value in (*inferred.graph.value_info, *inferred.graph.output, *inferred.graph.input)}
    assert {output for node in proto.graph.node for output in node.output if output} <= known
