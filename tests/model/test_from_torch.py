"""from_torch: the model computes what the module computes, and can still be trained."""

import functools
import json
import logging
import sys
from collections import Counter
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import memonger
from tests.support import networks

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from memonger.torch.exported import from_torch  # noqa: E402
from tests.support import torch_networks  # noqa: E402

nn = torch.nn


class Plain(nn.Module):  # type: ignore[misc,name-defined]
    """Batch normalization, every kind of Dropout, a frozen parameter, a buffer and a tensor of two names."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.channels = nn.Dropout2d(0.2)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.inside = nn.Dropout(0.3, inplace=True)
        self.nothing = nn.Dropout(0.0)
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.register_buffer("shift", torch.randn(8))

    def forward(self, x: "torch.Tensor") -> "torch.Tensor":
        x = self.channels(torch.relu(self.bn(self.conv(x)))).mean((2, 3))
        y = self.first(x) * 2
        self.inside(y)
        y = self.second(self.nothing(y)) * self.frozen + self.shift
        return nn.functional.dropout(y, 0.4, self.training)


def plain() -> Any:
    torch.manual_seed(0)
    return Plain()


@functools.cache
def exported_plain(training: bool = True) -> memonger.Model:
    return from_torch(plain().train(training), IMAGE)


IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def nodes(model: memonger.Model, op_type: str) -> list[ir.Node]:
    return [node for node in model.ir.graph if node.op_type == op_type]


def listed(model: memonger.Model) -> list[str]:
    return json.loads(model.ir.metadata_props["memonger.parameters"])


def ratios(model: memonger.Model) -> list[float]:
    """Ratios of its Dropout nodes, each of which has to be in inference form."""
    found = nodes(model, "Dropout")
    assert all(len(node.inputs) == 2 for node in found)
    return [round(float(node.inputs[1].const_value.numpy()), 6) for node in found]  # type: ignore[union-attr]


def run(model: memonger.Model, *feeds: "torch.Tensor") -> np.ndarray:
    session = networks.stock(ir.to_proto(model.ir))
    names = [value.name for value in session.get_inputs()]
    (output,) = session.run(None, {name: feed.numpy() for name, feed in zip(names, feeds, strict=True)})
    return output


def in_eval(module: Any, *feeds: "torch.Tensor") -> np.ndarray:
    with torch.no_grad():
        return module.eval()(*feeds).numpy()


# The nodes that have to survive the export with dropout, by network: BatchNormalization, Dropout. One network isn't
# exported, as others have its operators.
KEPT = {
    "resnet18": (8, 1), "mobilenet_v2": (13, 1), "googlenet": (0, 1), "unet": (6, 1),
    "lstm_cells": (0, 10), "lstm": (0, 1), "gru": (0, 1), "vit": (0, 5), "gpt": (0, 7), "gpt_fused": (0, 7),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_a_network_computes_what_it_computes_in_eval_and_keeps_what_it_is_trained_with(name: str) -> None:
    model, module = torch_networks.exported(name), torch_networks.build(name, torch_networks.DROPOUT)
    results = []
    for seed in (3, 4):
        x, _ = torch_networks.data(name, seed)
        results.append(run(model, x))
        np.testing.assert_allclose(results[-1], in_eval(module, x), rtol=1e-4, atol=2e-5)
    assert np.abs(results[0] - results[1]).max() > 1e-2
    assert listed(model) == [key for key, _ in module.named_parameters()]
    assert (len(nodes(model, "BatchNormalization")), len(ratios(model))) == KEPT[name]
    assert set(ratios(model)) == {torch_networks.DROPOUT}
    assert not {"SplitToSequence", "SequenceAt", "CastLike", "Identity"} & {node.op_type for node in model.ir.graph}
    check_weights(model, module)


def check_weights(model: memonger.Model, module: Any) -> None:
    """Parameters and buffers are there under their names, and batch normalization reads them."""
    weights = model.ir.graph.initializers
    for key, value in (*module.named_parameters(), *module.named_buffers()):
        if not key.endswith(("num_batches_tracked", "future")):  # one is never read, the other may be
            np.testing.assert_array_equal(weights[key].const_value.numpy(), value.detach().numpy())
    for node in nodes(model, "BatchNormalization"):
        names = [str(value.name) for value in node.inputs if value is not None]
        stem = names[1].removesuffix("weight")
        assert names[1:] == [f"{stem}{end}" for end in ("weight", "bias", "running_mean", "running_var")]
        assert "training_mode" not in node.attributes or node.attributes["training_mode"].as_int() == 0


def test_both_modes_give_the_same_model() -> None:
    operators = []
    for training in (False, True):
        model = exported_plain(training)
        assert sorted(ratios(model)) == [0.2, 0.3, 0.4]
        assert model.name == "Plain"
        np.testing.assert_allclose(run(model, IMAGE), in_eval(plain(), IMAGE), rtol=1e-4, atol=1e-5)
        operators.append([node.op_type for node in model.ir.graph])
    assert operators[0] == operators[1]


def test_no_dropout_is_no_node() -> None:
    module, (tokens, _) = torch_networks.build("gpt_fused"), torch_networks.data("gpt_fused")
    assert ratios(from_torch(module, tokens)) == []  # the exporter gives attention one anyway


class LearnedBias(nn.Module):  # type: ignore[misc,name-defined]
    """Fused attention with a bias that is trained, as BEiT, Swin and T5 have it."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.bias = nn.Linear(16, 48), nn.Parameter(torch.randn(2, 5, 5))

    def forward(self, x: "torch.Tensor") -> "torch.Tensor":
        q, k, v = self.project(x).reshape(3, 5, 3, 2, 8).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.bias)
        return y.transpose(1, 2).reshape(3, 5, 16)


def test_fused_attention_with_a_learned_bias_is_exported() -> None:
    torch.manual_seed(0)
    module, x = LearnedBias(), torch.randn(3, 5, 16)
    model = from_torch(module, x)
    assert listed(model) == ["bias", "project.weight", "project.bias"]
    np.testing.assert_allclose(run(model, x), in_eval(module, x), rtol=1e-5, atol=1e-6)


def test_the_padding_row_of_an_embedding_is_trained_as_in_pytorch() -> None:
    """No lookup reaches it, but the output layer that shares it does."""
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Embedding(7, 4, padding_idx=2), nn.Linear(4, 7, bias=False)), torch.tensor([[1, 2, 3]])
    module[1].weight = module[0].weight
    gradients = memonger.differentiate(from_torch(module, x, input_names=["x"], output_names=["y"]))
    dy = torch.randn(1, 3, 7)
    weight = module[0].weight
    feeds = {"x": x.numpy(), "y.grad": dy.numpy(), "0.weight": weight.detach().numpy()}
    session = networks.stock(ir.to_proto(gradients.ir))
    (own,) = session.run(["0.weight.grad"], {each.name: feeds[each.name] for each in session.get_inputs()})
    module(x).backward(dy)
    np.testing.assert_allclose(own, weight.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_attention_and_recurrent_layers_keep_their_dropout_in_eval() -> None:
    class Layers(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)
            self.lstm = nn.LSTM(8, 8, 2, dropout=0.2)

        def forward(self, x: "torch.Tensor") -> "torch.Tensor":
            return self.lstm(self.encoder(x))[0]

    module = Layers().eval()
    for parameter in module.parameters():
        parameter.requires_grad_(False)  # attention would take its fused path
    x = torch.randn(2, 5, 8)
    model = from_torch(module, x)
    assert sorted(ratios(model)) == [0.1] * 4 + [0.2]
    assert listed(model) == []
    np.testing.assert_allclose(run(model, x), in_eval(module, x), rtol=1e-4, atol=1e-5)


def test_parameters_are_told_from_frozen_ones_buffers_and_second_names() -> None:
    model = exported_plain()
    assert listed(model) == ["conv.weight", "bn.weight", "bn.bias", "first.weight", "first.bias", "second.bias"]
    weights = model.ir.graph.initializers
    assert {"frozen", "shift", "bn.running_mean", "bn.running_var"} <= set(weights)
    assert "second.weight" not in weights
    readers = [node for node, _ in weights["first.weight"].uses()]
    assert len(readers) == 2  # two layers, one tensor


def test_what_the_forward_pass_never_reads_is_not_listed() -> None:
    class Half(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: "torch.Tensor") -> "torch.Tensor":
            return self.used(x)

    assert listed(from_torch(Half(), torch.randn(2, 4))) == ["used.weight", "used.bias"]


def test_what_is_made_of_weights_is_not_folded() -> None:
    class Scaled(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.scale = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.ones(4, 1))

        def forward(self, x: "torch.Tensor") -> "torch.Tensor":
            return x @ (self.weight * self.scale.exp()).T

    model = from_torch(Scaled(), torch.randn(2, 4))
    assert listed(model) == ["weight", "scale"]
    assert Counter(node.op_type for node in model.ir.graph) == Counter(["Exp", "Mul", "Transpose", "MatMul"])


def test_the_module_is_left_as_it_was_and_the_model_is_not_bound_to_it() -> None:
    module = plain()
    module.bn.eval()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    flags, state = [part.training for part in module.modules()], torch.get_rng_state()
    model = from_torch(module, IMAGE)
    assert [part.training for part in module.modules()] == flags
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    result = run(model, IMAGE)
    module.train()(IMAGE).sum().backward()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    np.testing.assert_array_equal(run(model, IMAGE), result)


class Failing(Plain):
    """One whose forward raises halfway."""

    def forward(self, x: "torch.Tensor") -> "torch.Tensor":
        super().forward(x)
        raise KeyError("no such layer")


def test_a_failing_export_names_the_cause_and_leaves_the_flags() -> None:
    module = Failing()
    module.bn.eval()
    flags = [part.training for part in module.modules()]
    with pytest.raises(memonger.LoadError, match=r"Failing can't be exported .*KeyError.*no such layer"):
        from_torch(module, IMAGE)
    assert [part.training for part in module.modules()] == flags


def test_names_are_the_ones_asked_for() -> None:
    model = from_torch(plain(), (IMAGE,), input_names=["image"], output_names=["logits"])
    assert [value.name for value in (*model.ir.graph.inputs, *model.ir.graph.outputs)] == ["image", "logits"]
    assert [value.name for value in exported_plain().ir.graph.inputs] == ["x"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"input_names": ["a", "b"]}, "1 example inputs"),
        ({"input_names": "x"}, "not a str"),
        ({"output_names": ["a", "b"]}, "1 outputs"),
        ({"output_names": "y"}, "not a str"),
        ({"input_names": ["weight"]}, "'weight' is taken"),
        ({"output_names": ["input"]}, "'input' is taken"),
    ],
)
def test_names_that_do_not_fit(names: dict[str, Any], message: str) -> None:
    with pytest.raises(memonger.LoadError, match=message):
        from_torch(nn.Linear(4, 4), torch.zeros(2, 4), **names)


@pytest.mark.parametrize(
    ("module", "example", "message"),
    [
        (Plain, IMAGE, "class Plain is not a torch.nn.Module"),
        (torch.relu, IMAGE, "not a torch.nn.Module"),
        ("resnet50.pt", IMAGE, "A str is not a torch.nn.Module"),
        (nn.Linear(4, 4), None, "none was given"),
        (nn.Linear(4, 4), (), "none was given"),
        (nn.Linear(4, 4), 3, "not a int"),
        (nn.Linear(4, 4), {"x": IMAGE}, "not a dict"),
        (nn.Linear(4, 4), [np.zeros((2, 4))], "example 0 is a ndarray"),
        (nn.Linear(4, 4), torch.zeros(2, 5), "can't be exported"),
        (nn.Linear(4, 4), (torch.zeros(2, 4), torch.zeros(2, 4)), "can't be exported"),
    ],
)
def test_what_cannot_be_exported(module: Any, example: Any, message: str) -> None:
    with pytest.raises(memonger.LoadError, match=message):
        from_torch(module, example)


def test_a_dropout_that_pytorch_would_lose_is_an_error() -> None:
    layers, x = nn.RNN(4, 4, 2, dropout=0.5), torch.randn(3, 2, 4)
    with pytest.raises(memonger.LoadError, match=r"nn\.RNN with dropout=0\.5"):
        from_torch(layers, x)
    assert ratios(from_torch(layers.eval(), x)) == []


def test_batch_normalization_that_the_model_cannot_tell_apart_is_named(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4, momentum=None), nn.BatchNorm1d(4))
    module[0].eval()
    from_torch(module, torch.randn(2, 4))
    said = [record.getMessage() for record in caplog.records if record.name.startswith("memonger")]
    assert [text.split()[0] for text in said] == ["'0'", "'1'"]


def test_a_dynamic_batch_is_bound_later() -> None:
    model = from_torch(plain(), IMAGE, dynamic_batch=True)
    assert str(model.ir.graph.inputs[0].shape) == "[batch,3,8,8]"
    for batch in (1, 5):
        bound = memonger.load(model, batch=batch)
        x = torch.randn(batch, 3, 8, 8)
        assert listed(bound) == listed(model)
        assert sorted(ratios(bound)) == [0.2, 0.3, 0.4]
        np.testing.assert_allclose(run(bound, x), in_eval(plain(), x), rtol=1e-4, atol=1e-5)


def test_a_dynamic_batch_needs_an_example_of_two() -> None:
    with pytest.raises(memonger.LoadError, match="batch of 2 or more"):
        from_torch(plain(), IMAGE[:1], dynamic_batch=True)


def test_the_list_survives_a_file(tmp_path: Any) -> None:
    model = exported_plain()
    ir.save(model.ir, tmp_path / "plain.onnx")
    assert listed(memonger.load(tmp_path / "plain.onnx")) == listed(model)


@pytest.mark.parametrize("missing", ["torch", "onnxscript"])
def test_without_pytorch_the_packages_are_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(memonger.RuntimeUnavailableError, match=r"pip install 'memonger\[torch\]'"):
        from_torch(None, IMAGE)  # type: ignore[arg-type]


def test_nothing_is_printed_or_logged(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    torch_networks.ONNXRegistry.from_torchlib.cache_clear()  # what it logs, too
    with caplog.at_level(logging.INFO):
        from_torch(plain(), IMAGE)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("name", ["resnet18", "gpt", "lstm"])
def test_the_reference_is_the_same_at_every_call_and_in_either_precision(name: str) -> None:
    single, again = torch_networks.reference_step(name), torch_networks.reference_step(name)
    double = torch_networks.reference_step(name, dtype=torch.float64)
    assert list(single.gradients) == listed(torch_networks.exported(name))
    assert single.loss == pytest.approx(double.loss, rel=1e-4)
    for key, gradient in double.gradients.items():
        assert gradient.dtype == np.float64
        assert np.abs(gradient).max() > 0
        np.testing.assert_allclose(single.gradients[key], again.gradients[key], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(single.gradients[key], gradient, rtol=1e-3, atol=1e-3 * np.abs(gradient).max())


@pytest.mark.parametrize("optimizer", torch_networks.OPTIMIZERS)
def test_reference_training_moves_every_parameter(optimizer: str) -> None:
    start = dict(torch_networks.build("densenet").named_parameters())
    trained = torch_networks.reference_training("densenet", optimizer, steps=2)
    assert len(trained.losses) == 2
    assert all(np.abs(trained.parameters[key] - value.detach().numpy()).max() > 0 for key, value in start.items())
    assert trained.statistics


def test_it_is_a_function_each_time_it_is_looked_up() -> None:
    import memonger.torch

    assert memonger.torch.from_torch is memonger.torch.from_torch is from_torch
