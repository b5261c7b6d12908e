"""Parameters that began equal and were stored once: separated by the modules that read them, or named in a warning."""

import io
import logging
import warnings

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import memonger
from memonger.errors import PlanError
from tests.support.training_steps import Stock


def _scoped(text: str, modules: dict[str, str]) -> onnx.ModelProto:
    """A model as text; by the output of each node, the module that PyTorch's exporter would say it is of."""
    made = onnx.parser.parse_model('<ir_version: 10, opset_import: ["": 20]> ' + text)
    for node in made.graph.node:
        if node.output[0] in modules:
            scopes = str(["", modules[node.output[0]], node.output[0]])
            node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=scopes)
    return made


NORMS = """g (float[2,4] x) => (float[2,4] y)
<float[4] "first.bias" = {0,0,0,0}, float[4] "norm.weight" = {1,1,1,1}, float[4] scale = {1,2,3,4}> {
    a = Add(x, "first.bias")  b = Mul(a, scale)  c = LayerNormalization(b, "norm.weight", "first.bias")
    d = Mul(c, scale)  e = LayerNormalization(d, "norm.weight", "first.bias")  f = Add(e, x)
    y = LayerNormalization(f, "norm.weight", "first.bias")
}"""
MODULES = {"a": "first", "b": "first", "c": "norm", "d": "second", "e": "other.norm", "f": "second", "y": "norm"}


def test_each_module_gets_its_own_and_one_that_runs_twice_keeps_one(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        made = memonger.separate_parameters(_scoped(NORMS, MODULES))
    inputs = {node.outputs[0].name: [v.name for v in node.inputs if v] for node in made.graph}
    assert inputs["a"] == ["x", "first.bias"]
    assert inputs["c"] == ["b", "norm.weight", "norm.bias"]
    assert inputs["e"] == ["d", "other.norm.weight", "other.norm.bias"]
    assert inputs["y"] == ["f", "norm.weight", "norm.bias"]
    assert inputs["b"][1] == inputs["d"][1] == "scale"
    assert "'scale' is one parameter with one gradient, read by 'first', 'second'" in caplog.text
    training = memonger.differentiate(made, loss="mean_squared_error").training
    assert training is not None
    names = ("first.bias", "norm.weight", "norm.bias", "other.norm.weight", "other.norm.bias", "scale")
    assert sorted(training.parameters) == sorted(names)


def test_what_is_meant_is_said_by_name(caplog: pytest.LogCaptureFixture) -> None:
    """A file that says nothing of modules is left alone, and a warning says what to do."""
    plain = _scoped(NORMS, {})
    with caplog.at_level(logging.WARNING):
        training = memonger.differentiate(plain, loss="mean_squared_error").training
    assert training is not None
    assert set(training.parameters) == {"first.bias", "norm.weight", "scale"}
    assert "'norm.weight' is one parameter with one gradient" in caplog.text
    caplog.clear()
    own = memonger.differentiate(memonger.separate_parameters(plain, ["norm.*"]), loss="mean_squared_error").training
    assert own is not None
    assert len(own.parameters) == 5
    one = memonger.differentiate(memonger.separate_parameters(_scoped(NORMS, MODULES), []), loss="mean_squared_error")
    assert one.training is not None
    assert len(one.training.parameters) == 3
    assert not caplog.text
    with pytest.raises(
        PlanError, match=r"'nurm\.weight', which is no parameter that is read more than once; there are "
    ):
        memonger.separate_parameters(plain, ["nurm.weight"])


def test_statistics_of_a_fresh_network_are_no_parameters() -> None:
    text = """g (float[2,4] x) => (float[2,4] y) <float[4] "a.weight" = {1,1,1,1}, float[4] "a.bias" = {0,0,0,0}> {
        h = BatchNormalization(x, "a.weight", "a.bias", "a.bias", "a.weight")
        y = BatchNormalization(h, "a.weight", "a.bias", "a.bias", "a.weight")
    }"""
    training = memonger.differentiate(
        memonger.to_training_mode(_scoped(text, {"h": "a", "y": "b"})), loss="mean_squared_error"
    ).training
    assert training is not None
    assert set(training.parameters) == {"a.weight", "a.bias", "b.weight", "b.bias"}
    assert set(training.statistics) == {f"{n}.running_{k}" for n in "ab" for k in ("mean", "var")}


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.second, self.other = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.other(self.second(torch.tanh(self.norm(self.first(x))))))


def test_a_fresh_network_as_pytorch_exports_it_trains_as_in_pytorch() -> None:
    torch.manual_seed(0)
    module, x, target = _Net(), torch.randn(3, 4), torch.randn(3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(module, (x,), dynamo=True, verbose=False)
    assert program is not None
    file = io.BytesIO()
    onnx.save(program.model_proto, file)
    stored = {tensor.name for tensor in program.model_proto.graph.initializer}
    assert len(stored & dict(module.named_parameters()).keys()) == 6, "this exporter stores no equal initializers once"
    made = memonger.differentiate(file.getvalue(), loss="mean_squared_error", optimizer=memonger.Adam(lr=0.01))
    stock, optimizer = Stock(made), torch.optim.Adam(module.parameters(), 0.01)
    name = program.model_proto.graph.input[0].name
    for number in range(3):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(module(x), target)
        loss.backward()
        optimizer.step()
        results = stock.step({name: x.numpy(), "target": target.numpy()}, number, learning_rate=0.01)
        np.testing.assert_allclose(results["loss"], loss.detach(), rtol=1e-5)
    for name, parameter in module.named_parameters():
        if parameter.dim() == 1:  # matrices are stored transposed, under other names
            np.testing.assert_allclose(stock.state[name], parameter.detach(), rtol=1e-4, atol=1e-5, err_msg=name)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.head(torch.tanh(self.table(x))))


def test_a_tied_head_that_the_exporter_stored_twice_is_named(caplog: pytest.LogCaptureFixture) -> None:
    module, x = _Tied(), torch.tensor([[1, 2, 3]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(module, (x,), dynamo=True, verbose=False)
    assert program is not None
    stored = [tensor.name for tensor in program.model_proto.graph.initializer if len(tensor.dims) == 2]
    assert len(stored) == 2, "this exporter stores no tied weights twice"
    with caplog.at_level(logging.WARNING):
        memonger.differentiate(program.model_proto, loss="mean_squared_error")
    assert "are each other's transpose, stored twice" in caplog.text
    assert all(f"'{name}'" in caplog.text for name in stored)
    caplog.clear()
    memonger.differentiate(memonger.from_torch(module, x), loss="mean_squared_error")
    assert "transpose" not in caplog.text


class _Folded(nn.Module):
    """Weights that the exporter transposes and puts into ONNX's order, and a matrix that is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.lstm = nn.Linear(6, 5), nn.LSTM(5, 4, batch_first=True)
        self.register_buffer("filters", torch.randn(7, 4))
        self.turned = nn.Parameter(torch.randn(3, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.linear(self.lstm(torch.tanh(self.linear(x)))[0], self.filters)  # type: ignore[arg-type]
        return y @ self.turned.t()


def test_what_the_exporter_turned_is_trained_or_named_and_buffers_are_neither(caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(_Folded(), (torch.randn(2, 3, 6),), dynamo=True, verbose=False)
    assert program is not None
    with caplog.at_level(logging.WARNING):
        made = memonger.differentiate(program.model_proto, loss="mean_squared_error")
    said = [record.getMessage() for record in caplog.records if record.name.startswith("memonger")]
    assert len(said) == 1
    assert "'turned' isn't trained" in said[0]
    assert made.training is not None
    shapes = [list(v.shape.numpy()) for v in made.ir.graph.inputs if v.name in made.training.parameters and v.shape]
    assert sorted(shapes) == [[1, 16, 4], [1, 16, 5], [1, 32], [5], [6, 5]]
