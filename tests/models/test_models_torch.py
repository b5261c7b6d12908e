"""The reference networks against PyTorch: the same weights give the same logits."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import models
from tests.support import networks

torch = pytest.importorskip("torch")
nn = torch.nn
functional = torch.nn.functional


class Weights:
    """The initializers of a model, and the operators of its networks on them, in PyTorch."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.tensors = {t.name: torch.from_numpy(numpy_helper.to_array(t).copy()) for t in model.graph.initializer}
        self.unread = set(self.tensors)

    def __getitem__(self, name: str) -> Any:
        self.unread.discard(name)
        return self.tensors[name]

    def conv(self, x: Any, name: str, stride: int = 1, groups: int = 1) -> Any:
        weight = self[f"{name}.weight"]
        return functional.conv2d(x, weight, stride=stride, padding=weight.shape[2] // 2, groups=groups)

    def bn(self, x: Any, name: str) -> Any:
        norm = nn.BatchNorm2d(x.shape[1]).eval()
        norm.load_state_dict({**norm.state_dict(), **{key: self[f"{name}.{key}"] for key in STATISTICS}})
        return norm(x)

    def linear(self, x: Any, name: str) -> Any:
        return functional.linear(x, self[f"{name}.weight"], self[f"{name}.bias"])

    def has(self, name: str) -> bool:
        return f"{name}.weight" in self.tensors


STATISTICS = ("weight", "bias", "running_mean", "running_var")


def resnet18(w: Weights, x: Any) -> Any:
    x = functional.relu(w.bn(w.conv(x, "stem/conv", 2), "stem/bn"))
    x = functional.max_pool2d(x, 3, 2, 1)
    for stage, unit in itertools.product((1, 2, 3, 4), (1, 2)):
        at = f"stage{stage}/unit{unit}"
        stride = 2 if stage > 1 and unit == 1 else 1
        y = functional.relu(w.bn(w.conv(x, f"{at}/conv1", stride), f"{at}/bn1"))
        y = w.bn(w.conv(y, f"{at}/conv2"), f"{at}/bn2")
        if w.has(f"{at}/shortcut.conv"):
            x = w.bn(w.conv(x, f"{at}/shortcut.conv", stride), f"{at}/shortcut.bn")
        x = functional.relu(x + y)
    return w.linear(x.mean((2, 3)), "classifier")


def densenet(w: Weights, x: Any) -> Any:
    x = functional.relu(w.bn(w.conv(x, "stem/conv", 2), "stem/bn"))
    x = functional.max_pool2d(x, 3, 2, 1)
    for block, layer in itertools.product((1, 2), (1, 2, 3)):
        at = f"block{block}/layer{layer}"
        y = w.conv(functional.relu(w.bn(x, f"{at}/bn1")), f"{at}/conv1")
        y = w.conv(functional.relu(w.bn(y, f"{at}/bn2")), f"{at}/conv2")
        x = torch.cat([x, y], 1)
        if (block, layer) == (1, 3):
            x = w.conv(functional.relu(w.bn(x, "transition1/bn")), "transition1/conv")
            x = functional.avg_pool2d(x, 2)
    x = functional.relu(w.bn(x, "final/bn"))
    return w.linear(x.mean((2, 3)), "classifier")


def mobilenet_v2(w: Weights, x: Any) -> Any:
    def layer(x: Any, at: str, stride: int = 1, groups: int = 1) -> Any:
        return functional.relu6(w.bn(w.conv(x, f"{at}/conv", stride, groups), f"{at}/bn"))

    x = layer(x, "stem", 2)
    units, strides = (1, 2, 3, 4, 3, 3, 1), (1, 2, 2, 2, 1, 2, 1)
    for stage, unit in [(s, u) for s, count in enumerate(units) for u in range(count)]:
        at = f"stage{stage + 1}/unit{unit + 1}"
        y = layer(x, f"{at}/expand") if w.has(f"{at}/expand/conv") else x
        y = layer(y, f"{at}/depthwise", strides[stage] if unit == 0 else 1, y.shape[1])
        y = w.bn(w.conv(y, f"{at}/project/conv"), f"{at}/project/bn")
        x = y if unit == 0 else x + y
    return w.linear(layer(x, "head").mean((2, 3)), "classifier")


def gpt(w: Weights, tokens: Any) -> Any:
    """Two blocks of four heads, attention by PyTorch's own function."""
    table = w["embedding.weight"]
    x = table[tokens] + w["position.weight"]

    def norm(x: Any, at: str) -> Any:
        return functional.layer_norm(x, x.shape[-1:], w[f"{at}.weight"], w[f"{at}.bias"])

    def affine(x: Any, at: str) -> Any:
        return x @ w[f"{at}.weight"] + w[f"{at}.bias"]

    for layer in ("layer0", "layer1"):
        qkv = affine(norm(x, f"{layer}/norm1"), f"{layer}/attention/qkv").chunk(3, -1)
        heads = [part.unflatten(-1, (4, -1)).transpose(1, 2) for part in qkv]
        y = functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + affine(y, f"{layer}/attention/out")
        y = functional.gelu(affine(norm(x, f"{layer}/norm2"), f"{layer}/mlp/fc"), approximate="tanh")
        x = x + affine(y, f"{layer}/mlp/out")
    return norm(x, "norm") @ table.T


def run(model: onnx.ModelProto, outputs: list[str], feeds: dict[str, Any]) -> Iterator[Any]:
    session = networks.stock(model, threads=1)
    return iter(session.run(outputs, {name: np.asarray(tensor) for name, tensor in feeds.items()}))


def image() -> Any:
    return torch.from_numpy(np.random.default_rng(7).standard_normal((2, 3, 64, 64), np.float32))


@pytest.mark.parametrize(
    ("name", "settings", "network"),
    [
        ("resnet18", {"width": 0.5}, resnet18),
        ("densenet121", {"blocks": (3, 3), "growth": 8}, densenet),
        ("mobilenet_v2", {}, mobilenet_v2),
    ],
)
def test_image_network_equals_pytorch(name: str, settings: dict[str, Any], network: Callable[..., Any]) -> None:
    model = models.build(name, batch=2, image=64, **settings)
    weights, x = Weights(model), image()
    expected = network(weights, x)
    (logits,) = run(model, ["logits"], {"image": x})
    assert not weights.unread
    np.testing.assert_allclose(logits, expected.detach(), rtol=1e-4, atol=1e-5)


def test_gpt_equals_pytorch() -> None:
    model = models.build("gpt", batch=2, num_layers=2, width=64, seq_len=16, vocabulary=50)
    weights, tokens = Weights(model), torch.from_numpy(np.random.default_rng(7).integers(0, 50, (2, 16)))
    expected = gpt(weights, tokens)
    (logits,) = run(model, ["logits"], {"tokens": tokens})
    assert not weights.unread
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


def torch_lstm(weights: Weights, num_layers: int, width: int) -> Any:
    """Return PyTorch's own LSTM with the model's weights: its gates are in, forget, transform, out."""
    lstm = nn.LSTM(width, width, num_layers, batch_first=True)
    state = {}
    for layer in range(num_layers):
        for ours, theirs in (("i2h", "ih"), ("h2h", "hh")):
            for kind in ("weight", "bias"):
                in_gate, transform, forget, out = weights[f"layer{layer}/{ours}.{kind}"].chunk(4)
                state[f"{kind}_{theirs}_l{layer}"] = torch.cat([in_gate, forget, transform, out])
    lstm.load_state_dict(state)
    return lstm


def test_lstm_equals_pytorch() -> None:
    batch, seq_len, width, num_layers = 3, 6, 24, 2
    model = models.build("lstm", batch=batch, seq_len=seq_len, num_hidden=width, num_layers=num_layers, vocabulary=20)
    weights, generator = Weights(model), np.random.default_rng(7)
    tokens = torch.from_numpy(generator.integers(0, 20, (batch, seq_len)))
    c, h = torch.from_numpy(generator.standard_normal((2, num_layers, batch, width), np.float32))
    with torch.no_grad():
        hidden, (last_h, last_c) = torch_lstm(weights, num_layers, width)(weights["embedding.weight"][tokens], (h, c))
    expected = [weights.linear(hidden.transpose(0, 1).flatten(0, 1), "decoder"), last_h[1], last_c[0]]
    feeds = {"tokens": tokens}
    feeds |= {f"layer{layer}/init_{key}": state[layer] for layer in range(2) for key, state in (("c", c), ("h", h))}
    results = run(model, ["logits", "layer1/last_h", "layer0/last_c"], feeds)
    assert not weights.unread
    for ours, theirs in zip(results, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_training_loss_equals_pytorch() -> None:
    model = models.build("resnet18", batch=2, image=64, width=0.25, training=True)
    weights, x, labels = Weights(model), image(), torch.tensor([3, 5])
    weights.bn = lambda x, name: functional.batch_norm(  # type: ignore[method-assign]
        x, None, None, weights[f"{name}.weight"], weights[f"{name}.bias"], training=True
    )
    expected = functional.cross_entropy(resnet18(weights, x), labels)
    (loss,) = run(model, ["loss"], {"image": x, "labels": labels})
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
