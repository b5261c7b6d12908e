"""Steps of a training model on a stock session, every update fed back as an input; and the same in PyTorch."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from torch import nn

import memonger
from memonger.ir.training_roles import Training
from tests.support import networks

Arrays = dict[str, np.ndarray]

BATCH, FEATURES, HIDDEN, CLASSES = 8, 6, 10, 4


def net(seed: int = 0) -> nn.Module:
    """Two layers with a normalization between, and no bias before it: its gradient would be rounding errors alone."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(FEATURES, HIDDEN, bias=False), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
    ).train()


def model(module: nn.Module, batch: int = BATCH) -> onnx.ModelProto:
    """The same network as ONNX in inference form, with its weights, under its names."""
    made = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]>
        g (float[{batch},{FEATURES}] x) => (float[{batch},{CLASSES}] y) {{
            a = Gemm<transB=1>(x, "0.weight")
            b = BatchNormalization("a", "1.weight", "1.bias", "1.running_mean", "1.running_var")
            c = Relu(b)
            y = Gemm<transB=1>(c, "3.weight", "3.bias")
        }}"""
    )
    for name, tensor in module.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            made.graph.initializer.append(onnx.numpy_helper.from_array(tensor.numpy().copy(), name))
    return made


def batch(seed: int, size: int = BATCH) -> Arrays:
    """Inputs and labels."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((size, FEATURES)).astype(np.float32) * 2 + 1
    return {"x": x, "labels": generator.integers(0, CLASSES, size)}


class Stock:
    """A training model on a stock session, with its state.

    Attributes:
        model: The model, checked.
        roles: What it says of itself.
        state: Content of every persistent input.
    """

    def __init__(self, made: memonger.Model, state: Arrays | None = None) -> None:
        self.model = ir.to_proto(made.ir)
        onnx.checker.check_model(self.model, full_check=True)
        assert {node.domain for node in self.model.graph.node} <= {""}
        self.roles: Training = made.training or Training()
        self.session = networks.stock(self.model, "ORT_DISABLE_ALL", threads=1)
        defaults = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in self.model.graph.initializer}
        inputs = {v.name: v.type.tensor_type for v in self.model.graph.input}
        self.state = {}
        for name in [name for name in self.roles.persistent if name in inputs]:
            kind = onnx.helper.tensor_dtype_to_np_dtype(inputs[name].elem_type)
            zeros = np.zeros([dim.dim_value for dim in inputs[name].shape.dim], kind)
            self.state[name] = (state or {}).get(name, defaults.get(name, zeros))

    def step(self, feeds: Arrays, number: int = 0, **scalars: float) -> Arrays:
        """All outputs of one step; what is updated is kept."""
        given = {**feeds, **self.state}
        for role, value in {"step": number, "random_key": 0, **scalars}.items():
            if role in self.roles.scalars:
                kind = np.int64 if role == "step" else np.uint32 if role == "random_key" else np.float32
                given[self.roles.scalars[role]] = np.array(value, kind)
        names = [output.name for output in self.session.get_outputs()]
        results = dict(zip(names, self.session.run(None, given), strict=True))
        self.state.update({old: results[new] for old, new in self.roles.updates.items() if old in self.state})
        return results


def torch_steps(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[Arrays],
    *,
    clip_norm: float | None = None,
    micro: int = 1,
) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of steps, each over ``micro`` of the batches."""
    losses, norms = [], []
    for start in range(0, len(batches), micro):
        optimizer.zero_grad()
        for feeds in batches[start : start + micro]:
            loss = nn.functional.cross_entropy(module(torch.from_numpy(feeds["x"])), torch.from_numpy(feeds["labels"]))
            (loss / micro).backward()
            losses.append(float(loss.detach()))
        if clip_norm is not None:
            norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), clip_norm)))
        optimizer.step()
    return losses, norms


def assert_equal(stock: Stock, module: nn.Module, tolerance: float = 2e-5) -> None:
    """Parameters and statistics agree."""
    for name, tensor in module.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            np.testing.assert_allclose(stock.state[name], tensor.numpy(), rtol=tolerance, atol=tolerance, err_msg=name)


def twin(seed: int = 0) -> tuple[nn.Module, onnx.ModelProto]:
    """The network twice, with the same weights."""
    module = net(seed)
    return copy.deepcopy(module), model(module)


def differentiated(source: Any, **options: Any) -> memonger.Model:
    """The training model of a network in inference form."""
    return memonger.differentiate(memonger.to_training_mode(source), loss="softmax_cross_entropy", **options)
