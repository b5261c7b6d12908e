"""Models in training form: batch statistics as PyTorch moves them, and Dropout that drops."""

import logging
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import memonger
import models
from memonger.autodiff.training_mode import statistics_of
from memonger.errors import PlanError
from memonger.ir import training_roles
from tests.support.training_steps import Stock, assert_equal, batch, differentiated, model, net, torch_steps, twin

HEAD = '<ir_version: 10, opset_import: ["": 20]>'


def _norm(dims: str, count: int, *, opset: int = 20, attributes: str = "", tail: str = "") -> onnx.ModelProto:
    """One BatchNormalization of random weights, as a model in inference form."""
    made = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": {opset}]> g (float[{dims}] x) => (float[{dims}] y) '
        f"{{ y = BatchNormalization{attributes}(x, scale, bias, mean, var) {tail} }}"
    )
    generator = np.random.default_rng(0)
    for name in ("scale", "bias", "mean", "var"):
        array = (generator.random(count) + 0.5).astype(np.float32)
        made.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return made


def _torch_norm(source: onnx.ModelProto, kind: type[nn.Module], **options: Any) -> nn.Module:
    weights = {
        tensor.name: torch.from_numpy(np.array(onnx.numpy_helper.to_array(tensor)))
        for tensor in source.graph.initializer
    }
    layer = kind(len(weights["scale"]), **options).train()
    names = {"weight": "scale", "bias": "bias", "running_mean": "mean", "running_var": "var"}
    layer.load_state_dict({**layer.state_dict(), **{ours: weights[name] for ours, name in names.items()}})
    return layer


def _outputs(made: memonger.Model, **feeds: np.ndarray) -> dict[str, np.ndarray]:
    stock = Stock(made)
    return stock.step(feeds)


@pytest.mark.parametrize(
    ("dims", "kind"),
    [("6,3", nn.BatchNorm1d), ("4,3,5", nn.BatchNorm1d), ("2,3,4,5", nn.BatchNorm2d), ("2,3,2,2,3", nn.BatchNorm3d)],
)
@pytest.mark.parametrize("opset", [20, 14, 9, 7])
def test_batch_and_running_statistics_are_pytorchs(dims: str, kind: type[nn.Module], opset: int) -> None:
    source = _norm(dims, 3, opset=opset)
    layer = _torch_norm(source, kind)
    x = np.random.default_rng(1).standard_normal([int(d) for d in dims.split(",")]).astype(np.float32) * 3 + 1
    results = _outputs(memonger.to_training_mode(source), x=x)
    np.testing.assert_allclose(results["y"], layer(torch.from_numpy(x)).detach().numpy(), atol=2e-5)
    np.testing.assert_allclose(results["mean.next"], layer.running_mean.numpy(), rtol=1e-5)
    np.testing.assert_allclose(results["var.next"], layer.running_var.numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    ("attributes", "momentum", "theirs"),
    [("", None, 0.1), ("<momentum=0.7>", None, 0.3), ("<momentum=0.7>", 0.5, 0.5), ("", 0.0, 1.0), ("", 1.0, 0.0)],
)
def test_momentum_is_the_nodes_or_the_one_given(attributes: str, momentum: float | None, theirs: float) -> None:
    source = _norm("4,3,5", 3, attributes=attributes)
    layer = _torch_norm(source, nn.BatchNorm1d, momentum=theirs)
    x = np.random.default_rng(1).standard_normal((4, 3, 5)).astype(np.float32)
    results = _outputs(memonger.to_training_mode(source, momentum=momentum), x=x)
    layer(torch.from_numpy(x))
    np.testing.assert_allclose(results["mean.next"], layer.running_mean.numpy(), atol=1e-6)
    np.testing.assert_allclose(results["var.next"], layer.running_var.numpy(), rtol=1e-5)


def test_epsilon_stays() -> None:
    source = _norm("4,3,5", 3, attributes="<epsilon=0.5>")
    x = np.random.default_rng(1).standard_normal((4, 3, 5)).astype(np.float32)
    expected = _torch_norm(source, nn.BatchNorm1d, eps=0.5)(torch.from_numpy(x)).detach().numpy()
    np.testing.assert_allclose(_outputs(memonger.to_training_mode(source), x=x)["y"], expected, atol=1e-5)


def test_statistics_are_followed_over_steps_and_parameters_too() -> None:
    module, forward_model = twin()
    stock = Stock(differentiated(forward_model, optimizer=memonger.SGD(0.1)))
    batches = [batch(k) for k in range(5)]
    for feeds in batches:
        stock.step(feeds)
    torch_steps(module, torch.optim.SGD(module.parameters(), 0.1), batches)
    assert_equal(stock, module)
    assert stock.roles.statistics == ("1.running_mean", "1.running_var")
    assert stock.roles.parameters == ("0.weight", "1.weight", "1.bias", "3.weight", "3.bias")


def test_what_the_result_says_of_itself() -> None:
    made = memonger.to_training_mode(_norm("4,3,5", 3))
    roles = made.training
    assert roles == training_roles.Training(
        outputs=("y",), updates={"mean": "mean.next", "var": "var.next"}, statistics=("mean", "var")
    )
    assert [str(v.name) for v in made.ir.graph.inputs] == ["x"]
    onnx.checker.check_model(ir.to_proto(made.ir), full_check=True)
    trained = memonger.differentiate(ir.to_proto(made.ir), loss="mean_squared_error")  # what a file keeps is enough
    assert (trained.training or training_roles.Training()).parameters == ("scale", "bias")


def test_the_source_stays_as_it_was() -> None:
    loaded = memonger.load(_norm("4,3,5", 3))
    before = ir.to_proto(loaded.ir).SerializeToString(deterministic=True)
    memonger.to_training_mode(loaded)
    assert ir.to_proto(loaded.ir).SerializeToString(deterministic=True) == before


def test_the_forward_model_inside_is_the_inference_form() -> None:
    from memonger.model import forward_model

    made = differentiated(model(net()), optimizer=memonger.SGD())
    inside = forward_model.extract(made.ir, "model")
    assert inside is not None
    assert [node.op_type for node in inside.graph] == ["Gemm", "BatchNormalization", "Relu", "Gemm"]
    assert not any(node.attributes.get_int("training_mode", 0) for node in inside.graph)


@pytest.mark.parametrize("dims", ["1,3", "1,3,1,1"])
def test_one_value_a_channel_is_an_error(dims: str) -> None:
    with pytest.raises(PlanError, match=r"'BatchNormalization_y' has one value for each channel .*batch="):
        memonger.to_training_mode(_norm(dims, 3))


def test_a_layer_that_runs_twice_moves_its_statistics_twice() -> None:
    source = _norm("4,3,5", 3, tail="")
    source.graph.node.append(
        onnx.helper.make_node("BatchNormalization", ["y", "scale", "bias", "mean", "var"], ["z"], name="again")
    )
    source.graph.output[0].name = "z"
    layer = _torch_norm(source, nn.BatchNorm1d)
    x = np.random.default_rng(1).standard_normal((4, 3, 5)).astype(np.float32)
    made = memonger.to_training_mode(source)
    results = _outputs(made, x=x)
    expected = layer(layer(torch.from_numpy(x)))
    np.testing.assert_allclose(results["z"], expected.detach().numpy(), atol=2e-5)
    np.testing.assert_allclose(results["mean.next"], layer.running_mean.numpy(), rtol=1e-5)
    np.testing.assert_allclose(results["var.next"], layer.running_var.numpy(), rtol=1e-5)
    assert [str(v.name) for v in made.ir.graph.outputs] == ["z", "mean.next", "var.next"]


def test_layers_that_share_equal_statistics_get_their_own() -> None:
    """Exporters write equal tensors once; and one that is zero everywhere may be a bias too."""
    source = onnx.parser.parse_model(
        f"""{HEAD} g (float[8,2] x) => (float[8,2] z)
        <float[2] s = {{1.0, 2.0}}, float[2] t = {{3.0, 4.0}},
         float[2] zero = {{0.0, 0.0}}, float[2] one = {{1.0, 1.0}}> {{
            [first] y = BatchNormalization(x, s, zero, zero, one)
            [second] z = BatchNormalization(y, t, zero, zero, one)
        }}"""
    )
    made = memonger.to_training_mode(source)
    roles = made.training
    assert roles is not None
    assert roles.statistics == ("first.running_mean", "one", "second.running_mean", "second.running_var")
    x = np.random.default_rng(1).standard_normal((8, 2)).astype(np.float32) + 3
    results = _outputs(made, x=x)
    np.testing.assert_allclose(results["first.running_mean.next"], 0.1 * x.mean(0), rtol=1e-5)
    np.testing.assert_allclose(results["one.next"], 0.9 + 0.1 * x.var(0, ddof=1), rtol=1e-5)
    np.testing.assert_allclose(results["second.running_mean.next"], 0, atol=1e-6)
    np.testing.assert_allclose(results["second.running_var.next"], 0.9 + 0.1 * 8 / 7 * np.array([1, 4]), rtol=1e-4)
    trained = memonger.differentiate(made, loss="mean_squared_error")
    assert (trained.training or training_roles.Training()).parameters == ("s", "t", "zero")


def test_statistics_that_are_constants_become_tensors_that_persist() -> None:
    source = onnx.parser.parse_model(
        f"""{HEAD} g (float[8,2] x) => (float[8,2] y) <float[2] s = {{1.0, 2.0}}, float[2] b = {{0.0, 0.5}}> {{
            m = Constant<value_floats=[0.0, 1.0]>()
            v = Constant<value_floats=[1.0, 2.0]>()
            y = BatchNormalization(x, s, b, m, v)
        }}"""
    )
    stock = Stock(memonger.differentiate(memonger.to_training_mode(source), loss="mean_squared_error"))
    assert stock.roles.statistics == ("m", "v")
    np.testing.assert_array_equal(stock.state["v"], [1, 2])


def test_statistics_that_are_computed_are_an_error() -> None:
    source = _norm("4,3,5", 3)
    source.graph.node.insert(0, onnx.helper.make_node("Exp", ["var"], ["computed"]))
    source.graph.node[1].input[4] = "computed"
    with pytest.raises(PlanError, match=r"the running var of BatchNormalization '.*' is computed"):
        memonger.to_training_mode(source)


DROP = f"""{HEAD} g (float[16,512] x) => (float[16,512] y)
<float[512] w = {{{", ".join(["1.0"] * 512)}}}, float ratio = {{0.25}}, float zero = {{0.0}}, bool off = {{0}}> {{
    a = Mul(x, w)
    b = Dropout(a, ratio)
    c = Dropout(b, zero)
    d = Dropout(c, ratio, off)
    y = Mul(d, w)
}}"""


def test_dropouts_drop_and_those_of_ratio_zero_are_gone() -> None:
    made = memonger.to_training_mode(onnx.parser.parse_model(DROP))
    drops = [node for node in made.ir.graph if node.op_type == "Dropout"]
    assert [str(node.outputs[0].name) for node in drops] == ["b", "d"]
    assert all(node.inputs[2] is not None and bool(node.inputs[2].const_value.numpy()) for node in drops)
    x = np.ones((16, 512), np.float32)
    y = _outputs(memonger.differentiate(made), x=x, **{"y.grad": x})["y"]
    np.testing.assert_allclose(np.unique(y), [0, 1 / 0.75**2], rtol=1e-6)
    assert abs((y != 0).mean() - 0.75**2) < 0.03


def test_dropouts_stay_where_they_are_not_wanted() -> None:
    made = memonger.to_training_mode(onnx.parser.parse_model(DROP), dropout=False)
    assert sum(node.op_type == "Dropout" for node in made.ir.graph) == 3
    x = np.random.default_rng(0).standard_normal((16, 512)).astype(np.float32)
    np.testing.assert_array_equal(_outputs(made, x=x)["y"], x)


@pytest.mark.parametrize("opset", [7, 10, 12])
def test_dropouts_of_older_opsets_keep_their_ratio(opset: int) -> None:
    attribute = "<ratio=0.25>" if opset < 12 else ""
    ratio = "" if opset < 12 else ", r"
    source = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": {opset}]> g (float[16,512] x) => (float[16,512] y) '
        f"<float[1] w = {{1.0}}, float r = {{0.25}}> {{ a = Mul(x, w) y = Dropout{attribute}(a{ratio}) }}"
    )
    x = np.ones((16, 512), np.float32)
    made = memonger.differentiate(memonger.to_training_mode(source), wrt=["w"])
    y = _outputs(made, x=x, **{"y.grad": x})["y"]
    np.testing.assert_allclose(np.unique(y), [0, 1 / 0.75], rtol=1e-6)


def test_a_dropout_whose_mode_is_an_input_is_an_error() -> None:
    source = onnx.parser.parse_model(
        f"{HEAD} g (float[4] x, bool on) => (float[4] y) <float r = {{0.5}}> {{ y = Dropout(x, r, on) }}"
    )
    with pytest.raises(PlanError, match=r"Dropout 'Dropout_y' drops is the input 'on'"):
        memonger.to_training_mode(source)


def test_other_normalizations_stay() -> None:
    source = onnx.parser.parse_model(
        f"""{HEAD} g (float[2,2,4] x) => (float[2,2,4] y) <float[2] s = {{1.0, 2.0}}, float[2] b = {{0.0, 0.5}}>
        {{ y = InstanceNormalization(x, s, b) }}"""
    )
    made = memonger.to_training_mode(source)
    assert [node.op_type for node in made.ir.graph] == ["InstanceNormalization"]


def test_a_model_with_nothing_to_turn_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    source = onnx.parser.parse_model(
        f"{HEAD} g (float[2] x) => (float[2] y) <float[2] w = {{1.0, 2.0}}> {{ y = Mul(x, w) }}"
    )
    memonger.to_training_mode(source)
    assert "neither BatchNormalization nor Dropout" in caplog.text
    caplog.clear()
    memonger.to_training_mode(_norm("4,3,5", 3))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_training_by_inference_statistics_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    memonger.differentiate(_norm("4,3,5", 3), loss="mean_squared_error")
    assert "1 BatchNormalization are in inference form, 'BatchNormalization_y' first" in caplog.text
    caplog.clear()
    memonger.differentiate(memonger.to_training_mode(_norm("4,3,5", 3)), loss="mean_squared_error")
    memonger.differentiate(_norm("4,3,5", 3))
    assert not caplog.text


def test_a_second_time_is_an_error() -> None:
    with pytest.raises(PlanError, match="in training form already"):
        memonger.to_training_mode(memonger.to_training_mode(_norm("4,3,5", 3)))


def test_a_momentum_that_cannot_be() -> None:
    with pytest.raises(PlanError, match=r"momentum .* must be 0 to 1, not 1\.5"):
        memonger.to_training_mode(_norm("4,3,5", 3), momentum=1.5)


def test_models_built_in_training_form_have_statistics_too() -> None:
    built = models.build("densenet_bc100", batch=2, training=True, blocks=(1, 1), growth=4)
    found = statistics_of(memonger.load(built).ir)
    norms = [node for node in built.graph.node if node.op_type == "BatchNormalization"]
    assert found == {node.input[k]: node.output[k - 2] for node in norms for k in (3, 4)}
    made = memonger.differentiate(built, loss="loss", optimizer=memonger.SGD(0.01))
    roles = made.training
    assert roles is not None
    assert set(roles.statistics) == set(found)
    assert {name: roles.updates[name] for name in found} == found
    assert not set(found) & set(roles.parameters)
    assert roles.outputs == ("loss",)


def test_statistics_of_a_training_form_are_onnxs_own() -> None:
    source = onnx.parser.parse_model(
        f"""{HEAD} g (float[8,2] x) => (float l, float[2] m.next, float[2] v.next)
        <float[2] s = {{1.0, 2.0}}, float[2] b = {{0.0, 0.5}}, float[2] m = {{-0.0, 2.0}}, float[2] v = {{1.0, 3.0}}> {{
            y, "m.next", "v.next" = BatchNormalization<training_mode=1, momentum=0.75>(x, s, b, m, v)
            l = ReduceSum<keepdims=0>(y)
        }}""".replace("m.next,", '"m.next",')
        .replace("float[2] m.next", 'float[2] "m.next"')
        .replace("float[2] v.next", 'float[2] "v.next"')
    )
    stock = Stock(memonger.differentiate(source, loss="l", optimizer=memonger.SGD()))
    x = np.random.default_rng(0).standard_normal((8, 2)).astype(np.float32)
    results = stock.step({"x": x})
    np.testing.assert_allclose(results["m.next"], 0.75 * np.array([0, 2]) + 0.25 * x.mean(0), rtol=1e-5)
    np.testing.assert_allclose(results["v.next"], 0.75 * np.array([1, 3]) + 0.25 * x.var(0), rtol=1e-5)
    assert [str(o.name) for o in stock.model.graph.output][:3] == ["l", "m.next", "v.next"]
