"""Low-rank adapters: what they compute, what is trained, and what is written back."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

import memonger
from memonger.errors import PlanError
from tests.support import networks
from tests.support.training_models import batch, classifier

RANK, ALPHA = 3, 6.0


def run(model: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    return np.asarray(networks.stock(model).run(None, {"x": x})[0])


def sentences() -> onnx.ModelProto:
    """Products as exporters write them: of stacks of rows, with a Transpose, a weight read twice, one in a Gather."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]>
        g (float[2,5,8] x) => (float[2,5,8] y, float[2,5,8] z) {
            turned = Transpose<perm=[1,0]>("turned.weight")
            h = MatMul(x, turned)
            once = MatMul(h, "twice.weight")
            both = MatMul(once, "twice.weight")
            number = Constant<value = int64 {1}>()
            row = Gather("shared.weight", number)
            t = MatMul(both, "shared.weight")
            z = Tanh(t)
            y = Add(both, row)
        }"""
    )
    generator = np.random.default_rng(3)
    for name in ("turned.weight", "twice.weight", "shared.weight"):
        array = generator.standard_normal((8, 8)).astype(np.float32) * 0.3
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


class Adapted(nn.Module):
    """The classifier of `tests.support.training_models` with adapters beside its first two weights, in PyTorch."""

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        super().__init__()
        self.values = {name: torch.from_numpy(array.copy()) for name, array in tensors.items()}
        for name, value in self.values.items():
            value.requires_grad_("lora" in name)

    def linear(self, x: Tensor, name: str) -> Tensor:
        v = self.values
        y = x @ v[f"{name}.weight"].T
        if f"{name}.weight.lora_A" in v:
            y = y + ALPHA / RANK * (x @ v[f"{name}.weight.lora_A"] @ v[f"{name}.weight.lora_B"])
        return y

    def forward(self, x: Tensor) -> Tensor:
        first = torch.relu(self.linear(x, "first") + self.values["first.bias"])
        return self.linear(torch.relu(self.linear(first, "hidden") + self.values["first.bias"]), "last")


def contents(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def test_adapters_train_as_in_pytorch_and_merge_into_the_users_file(tmp_path: Path) -> None:
    adapted = memonger.add_lora(classifier(), RANK, ["first.weight", "hidden.*"], alpha=ALPHA)
    module = Adapted(contents(adapted.proto))
    names = [f"{layer}.weight.lora_{matrix}" for layer in ("first", "hidden") for matrix in "AB"]
    assert all(not module.values[name].any() for name in names if name.endswith("B"))
    optimizer = torch.optim.Adam([module.values[name] for name in names], 0.02)
    made = memonger.differentiate(adapted, loss="softmax_cross_entropy", optimizer=memonger.Adam(0.02))
    assert made.training is not None
    assert made.training.parameters == tuple(names)
    assert len(made.training.state) == 2 * len(names)
    trainer = memonger.TrainingSession(memonger.search_plan(made))
    for step in range(5):
        feeds = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(torch.from_numpy(feeds["x"])), torch.from_numpy(feeds["labels"]))
        loss.backward()
        optimizer.step()
        assert trainer.step(feeds) == pytest.approx(float(loss.detach()), rel=2e-5)
    for name in names:
        np.testing.assert_allclose(trainer.state_dict()[name], module.values[name].detach(), rtol=1e-3, atol=2e-5)
    x = batch(99)["x"]
    expected = module(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(trainer.evaluate({"x": x})["y"], expected, rtol=1e-4, atol=1e-5)
    for number, model in enumerate((classifier(), None, adapted)):
        path = tmp_path / f"{number}.onnx"
        trainer.export(path, model)
        exported = onnx.load(path)
        np.testing.assert_allclose(run(exported, x), expected, rtol=1e-4, atol=1e-5)
        assert sorted(contents(exported)) == sorted(contents(classifier()))
        assert [n.op_type for n in exported.graph.node] == [n.op_type for n in classifier().graph.node]
    np.testing.assert_array_equal(contents(exported)["last.weight"], contents(classifier())["last.weight"])


def test_what_exporters_write_is_adapted_and_comes_back() -> None:
    plain, x = sentences(), np.random.default_rng(1).standard_normal((2, 5, 8)).astype(np.float32)
    made = memonger.add_lora(plain, 2, alpha=1, seed=4)
    adapted = made.proto
    onnx.checker.check_model(adapted, full_check=True)
    arrays = contents(adapted)
    assert sorted(n for n in arrays if "lora_A" in n) == ["turned.weight.lora_A", "twice.weight.lora_A"]
    np.testing.assert_allclose(run(adapted, x), run(plain, x), rtol=1e-6)
    generator = np.random.default_rng(5)
    for tensor in adapted.graph.initializer:
        if tensor.name.endswith("lora_B"):
            array = generator.standard_normal(tuple(tensor.dims)).astype(np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    arrays = contents(adapted)
    turned = arrays["turned.weight"].T + arrays["turned.weight.lora_A"] @ arrays["turned.weight.lora_B"] / 2
    twice = arrays["twice.weight"] + arrays["twice.weight.lora_A"] @ arrays["twice.weight.lora_B"] / 2
    expected = x @ turned @ twice @ twice + arrays["shared.weight"][1]
    np.testing.assert_allclose(run(adapted, x), expected, rtol=1e-4, atol=1e-4)
    merged = memonger.merge_lora(adapted).proto
    np.testing.assert_allclose(run(merged, x), expected, rtol=1e-4, atol=1e-4)
    assert [n.op_type for n in merged.graph.node] == [n.op_type for n in memonger.load(plain).proto.graph.node]
    assert [v.name for v in merged.graph.output] == ["y", "z"]
    again = contents(memonger.add_lora(plain, 2, "twice*", seed=4).proto)
    np.testing.assert_array_equal(again["twice.weight.lora_A"], arrays["twice.weight.lora_A"])
    assert again["twice.weight.lora_A"].std() == pytest.approx(0.5, rel=0.5)


def test_adapters_in_mixed_precision_merge_into_float32_weights(tmp_path: Path) -> None:
    adapted = memonger.add_lora(classifier(), RANK, "hidden*")
    mixed = memonger.to_mixed_precision(adapted, "bfloat16")
    made = memonger.differentiate(mixed, loss="softmax_cross_entropy", optimizer=memonger.Adam(0.02))
    trainer, x = memonger.TrainingSession(memonger.search_plan(made)), batch(99)["x"]
    for step in range(2):
        trainer.step(batch(step))
    scores = trainer.evaluate({"x": x})["y"]
    for number, model in enumerate((classifier(), None)):
        trainer.export(tmp_path / f"{number}.onnx", model)
        np.testing.assert_allclose(run(onnx.load(tmp_path / f"{number}.onnx"), x), scores, rtol=1e-4, atol=1e-5)
    assert not np.allclose(scores, run(classifier(), x), atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, r"rank of adapters must be a whole number, 1 or more, not 0"),
        ({"rank": 2, "alpha": -1.0}, r"alpha must be a finite number above 0"),
        (
            {"rank": 2, "pattern": "frist.weight"},
            r"'frist\.weight', which is no weight .* Did you mean 'first\.weight'",
        ),
        ({"rank": 2, "pattern": ["first*", "first.bias"]}, r"pattern names 'first\.bias'"),
        ({"rank": 8, "pattern": "last*"}, r"rank 8 is above the smaller side of 'last\.weight', which is \[5, 24\]"),
    ],
)
def test_wrong_adapters_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        memonger.add_lora(classifier(), **options)


def test_adapters_are_added_once_and_first() -> None:
    adapted = memonger.add_lora(classifier(), 2)
    with pytest.raises(PlanError, match="has adapters already"):
        memonger.add_lora(adapted, 2)
    with pytest.raises(PlanError, match="has no adapters"):
        memonger.merge_lora(classifier())
    with pytest.raises(PlanError, match="in training form already"):
        memonger.add_lora(memonger.to_training_mode(classifier()), 2)


def test_a_frozen_backbone_costs_no_gradient_no_state_and_no_kept_activation() -> None:
    """Eight layers under a head: with them frozen the step takes what inference takes, and the head's own tensors."""
    rows, width, depth = 64, 48, 8
    layers = [f'h{k} = Gemm(t{k}, "body.{k}")\n t{k + 1} = Tanh(h{k})' for k in range(depth)]
    text = "\n".join(["t0 = Identity(x)", *layers])
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]>
        g (float[{rows},{width}] x) => (float[{rows},4] y) {{
            {text}
            y = Gemm(t{depth}, "head")
        }}"""
    )
    generator = np.random.default_rng(0)
    for name, shape in {**{f"body.{k}": (width, width) for k in range(depth)}, "head": (width, 4)}.items():
        array = generator.standard_normal(shape).astype(np.float32) * 0.2
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))

    def planned(**options: Any) -> memonger.Plan:
        optimizer = memonger.Adam(0.01)
        made = memonger.differentiate(model, loss="softmax_cross_entropy", optimizer=optimizer, **options)
        return memonger.search_plan(made, strategy="none", chunks="off")

    frozen, whole = planned(frozen=["body.*"]), planned()
    inference = memonger.search_plan(model, mode="inference", chunks="off")
    activation = rows * width * 4
    assert frozen.training is not None
    assert frozen.training.parameters == ("head",)
    assert frozen.training.state == ("head.exp_avg", "head.exp_avg_sq")
    assert frozen.arena_bytes <= inference.arena_bytes + activation
    assert whole.arena_bytes >= frozen.arena_bytes + (depth - 2) * activation
    assert whole.parameter_bytes - frozen.parameter_bytes >= 2 * depth * width * width * 4
