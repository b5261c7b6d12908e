"""What a training model looks like and says of itself: names, order, roles; and what is refused when it is read."""

import json
import logging
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import memonger
from memonger.errors import PlanError
from memonger.ir import training_roles
from memonger.ir.training_roles import KEY, Training
from tests.support import networks
from tests.support.gradient_checks import run
from tests.support.training_steps import Stock, batch, differentiated, model, net

HEAD = '<ir_version: 10, opset_import: ["": 20]>'


def _parsed(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f"{HEAD} {text}")


def _made(source: Any, **options: Any) -> tuple[onnx.ModelProto, Training]:
    made = memonger.differentiate(source, **options)
    proto = ir.to_proto(made.ir)
    onnx.checker.check_model(proto, full_check=True)
    roles = memonger.load(proto).training  # as a file says it
    assert roles is not None
    return proto, roles


def _inputs(proto: onnx.ModelProto) -> list[str]:
    return [value.name for value in proto.graph.input]


def _outputs(proto: onnx.ModelProto) -> list[str]:
    return [value.name for value in proto.graph.output]


def test_roles_of_a_training_step() -> None:
    made = differentiated(model(net()), optimizer=memonger.Adam(), clip_norm=1.0)
    proto = ir.to_proto(made.ir)
    roles = made.training
    named = ["0.weight", "1.weight", "1.bias", "3.weight", "3.bias"]
    statistics = ["1.running_mean", "1.running_var"]
    state = [f"{name}.{kind}" for name in reversed(named) for kind in ("exp_avg", "exp_avg_sq")]
    assert roles is not None
    assert (roles.loss, roles.outputs) == ("loss", ("y",))
    assert (list(roles.parameters), list(roles.statistics)) == (named, statistics)
    assert sorted(roles.state) == sorted(state)
    assert roles.scalars == {"learning_rate": "learning_rate", "step": "step"}
    assert (roles.gradients, roles.accumulated, roles.output_gradients) == ({}, {}, {})
    assert roles.updates == {name: f"{name}.next" for name in (*named, *statistics, *state)}
    assert _inputs(proto)[:2] == ["x", "labels"]
    assert set(_inputs(proto)[2:4]) == {"step", "learning_rate"}
    assert _inputs(proto)[4:] == [*roles.parameters, *roles.statistics, *roles.state]
    assert _outputs(proto)[:5] == ["y", "1.running_mean.next", "1.running_var.next", "loss", "gradient_norm"]
    assert set(_outputs(proto)[5:]) == {f"{name}.next" for name in (*named, *state)}
    assert roles.persistent == (*roles.parameters, *roles.statistics, *roles.state)


def test_roles_of_gradients_alone() -> None:
    text = "g (float[3] x) => (float[3] y, float[3] z) <float[3] w = {1.0, 2.0, 3.0}> { y = Mul(x, w) z = Exp(y) }"
    proto, roles = _made(_parsed(text))
    assert _inputs(proto) == ["x", "y.grad", "z.grad", "w"]
    assert _outputs(proto) == ["y", "z", "w.grad"]
    assert roles == Training(
        outputs=("y", "z"),
        parameters=("w",),
        gradients={"w": "w.grad"},
        output_gradients={"y": "y.grad", "z": "z.grad"},
    )
    _, roles = _made(_parsed(text), wrt=["w", "x"])
    assert roles.parameters == ("w",)
    assert roles.gradients == {"w": "w.grad", "x": "x.grad"}


def test_parameters_are_inputs_with_their_weights_as_defaults() -> None:
    proto, _ = _made(_parsed("g (float[3] x) => (float[3] y) <float[3] w = {1.0, 2.0, 3.0}> { y = Mul(x, w) }"))
    x, dy = np.array([1, 2, 3], np.float32), np.ones(3, np.float32)
    np.testing.assert_array_equal(run(proto, {"x": x, "y.grad": dy})["y"], [1, 4, 9])
    np.testing.assert_array_equal(run(proto, {"x": x, "y.grad": dy, "w": x[::-1].copy()})["y"], [3, 4, 3])


def test_an_input_with_a_default_is_a_parameter_too() -> None:
    source = _parsed("g (float[3] x, float[3] w = {1.0, 2.0, 3.0}) => (float[3] y) { y = Mul(x, w) }")
    assert [tensor.name for tensor in source.graph.initializer] == ["w"]
    proto, roles = _made(source)
    assert _inputs(proto) == ["x", "y.grad", "w"]
    assert roles.parameters == ("w",)


def test_no_rule_takes_a_parameters_content_for_a_constant() -> None:
    """A scale of ones and a shift of zeros, as layers begin, are no reason for a simpler gradient."""
    text = """g (float[8,2] x) => (float[8,2] y)
        <float[2] s = {1.0, 1.0}, float[2] b = {0.0, 0.0}, float[2] m = {0.0, 0.0}, float[2] v = {1.0, 1.0}>
        { y = BatchNormalization(x, s, b, m, v) }"""
    made = memonger.differentiate(memonger.to_training_mode(_parsed(text)))
    proto = ir.to_proto(made.ir)
    generator = np.random.default_rng(0)
    x, dy = (generator.standard_normal((8, 2)).astype(np.float32) for _ in range(2))
    s, b = np.array([2.0, -0.5], np.float32), np.array([3.0, 1.0], np.float32)
    results = run(proto, {"x": x, "y.grad": dy, "s": s, "b": b})
    normal = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)
    np.testing.assert_allclose(results["s.grad"], (dy * normal).sum(0), rtol=1e-4)
    np.testing.assert_allclose(results["b.grad"], dy.sum(0), rtol=1e-4)


def test_what_the_loss_does_not_hang_on_stays_an_initializer(caplog: pytest.LogCaptureFixture) -> None:
    text = """g (float[3] x) => (float l, float[3] y) <float[3] w = {1.0, 2.0, 3.0}, float[3] idle = {1.0, 1.0, 1.0}>
        { p = Mul(x, w) l = ReduceSum<keepdims=0>(p) y = Mul(p, idle) }"""
    with caplog.at_level(logging.INFO, logger="memonger.autodiff.differentiate"):
        proto, roles = _made(_parsed(text), loss="l", optimizer=memonger.SGD())
    assert "no gradient and no update for what the loss doesn't depend on: idle." in caplog.text
    assert roles.parameters == ("w",)
    assert _inputs(proto) == ["x", "learning_rate", "w"]
    assert "idle" in {tensor.name for tensor in proto.graph.initializer}


def test_no_way_from_the_loss_to_a_parameter_is_an_error() -> None:
    text = """g (float[3] x) => (float l) <float[3] w = {1.0, 2.0, 3.0}>
        { p = Mul(x, w) q = Floor(p) l = ReduceSum<keepdims=0>(q) }"""
    with pytest.raises(PlanError, match=r"no differentiable way from 'l' to any parameter \('w'\)"):
        memonger.differentiate(_parsed(text), loss="l")


def test_one_gradient_for_two_parameters_is_two_outputs() -> None:
    text = "g (float[3] a, float[3] b) => (float[3] y) { y = Add(a, b) }"
    proto, roles = _made(_parsed(text), wrt=["a", "b"])
    dy = np.array([1, 2, 3], np.float32)
    results = run(proto, {"a": dy, "b": dy, "y.grad": dy})
    np.testing.assert_array_equal(results["a.grad"], dy)
    np.testing.assert_array_equal(results["b.grad"], dy)
    assert _outputs(proto) == ["y", "a.grad", "b.grad"]
    assert roles.gradients == {"a": "a.grad", "b": "b.grad"}


def test_a_parameter_whose_gradient_is_the_seed_itself() -> None:
    """An initializer that is an output, and a loss that is a parameter passed on."""
    text = "g (float[3] x) => (float[3] y, float w) <float w = {2.0}> { y = Mul(x, w) }"
    proto, _ = _made(_parsed(text), loss="w")
    np.testing.assert_array_equal(run(proto, {"x": np.ones(3, np.float32)})["w.grad"], 1.0)
    text = "g (float[3] x) => (float l) <float w = {2.0}> { l = Identity(w) }"
    stock = Stock(memonger.differentiate(_parsed(text), loss="l", optimizer=memonger.SGD(0.5)))
    stock.step({"x": np.ones(3, np.float32)})
    np.testing.assert_array_equal(stock.state["w"], 1.5)


def test_outputs_that_function_bodies_compute_are_differentiated() -> None:
    """What has no rule is written out as its body, and the body's result is then the output."""
    text = """g (float[2,3,4] x) => (float[2,3,4] y) <float[3,1] w = {1.0, 2.0, 3.0}>
        { p = Mul(x, w) y = MeanVarianceNormalization<axes=[0,2]>(p) }"""
    proto, _ = _made(_parsed(text))
    assert _outputs(proto) == ["y", "w.grad"]
    proto, roles = _made(_parsed(text), loss="mean_squared_error", optimizer=memonger.SGD())
    assert _outputs(proto) == ["y", "loss", "w.next"]
    assert roles.loss == "loss"
    loss = (
        text.replace("(float[2,3,4] y)", "(float l)")
        .replace("y = ", "q = ")
        .replace(
            "(p) }", "(p) r = Mul(q, q) s = MeanVarianceNormalization<axes=[0,1,2]>(r) l = ReduceSum<keepdims=0>(s) }"
        )
    )
    proto, roles = _made(_parsed(loss), loss="l")
    assert _outputs(proto) == ["l", "w.grad"]
    assert roles.loss == "l"


def test_names_that_are_taken_are_not_taken_again() -> None:
    text = """g (float[2,3] x) => (float[2,3] y) <float[3] w = {1.0, 2.0, 3.0}>
        { "w.next" = Mul(x, w) loss = Exp("w.next") "w.momentum" = Mul(loss, loss) y = Mul("w.momentum", x) }"""
    proto, roles = _made(_parsed(text), loss="mean_squared_error", optimizer=memonger.SGD(momentum=0.9))
    assert roles.loss == "loss#2"
    assert roles.state == ("w.momentum#2",)
    assert roles.updates == {"w": "w.next#2", "w.momentum#2": "w.momentum#2.next"}
    assert _outputs(proto) == ["y", "loss#2", "w.momentum#2.next", "w.next#2"]


def test_a_forward_value_that_is_a_gradient_keeps_its_name() -> None:
    """The gradient of a sum of products is the other factor."""
    text = "g (float[3] x, float[3] b) => (float[3] y, float[3] e) { e = Exp(b) y = Mul(x, e) }"
    proto, _ = _made(_parsed(text), wrt=["x"])
    assert _outputs(proto) == ["y", "e", "x.grad"]


def test_inputs_that_an_optimizer_trains_persist() -> None:
    text = "g (float[3] x, float[3] w) => (float[3] y) { y = Mul(x, w) }"
    _, roles = _made(_parsed(text), wrt=["w"], loss="mean_squared_error", optimizer=memonger.SGD())
    assert roles.parameters == ("w",)
    assert roles.updates == {"w": "w.next"}


def test_a_second_time_is_an_error() -> None:
    source = _parsed("g (float[3] x) => (float[3] y) <float[3] w = {1.0, 2.0, 3.0}> { y = Mul(x, w) }")
    for options in ({}, {"loss": "mean_squared_error", "optimizer": memonger.SGD()}):
        made = memonger.differentiate(source, **options)  # type: ignore[arg-type]
        with pytest.raises(PlanError, match="it was differentiated before" if options else "no differentiable way"):
            memonger.differentiate(made)


def test_a_model_of_integers_has_nothing_to_begin_at() -> None:
    text = "g (float[3] x) => (int64[1] y) <float[3] w = {1.0, 2.0, 3.0}> { p = Mul(x, w) y = ArgMax<axis=0>(p) }"
    with pytest.raises(PlanError, match="no floating-point output to differentiate"):
        memonger.differentiate(_parsed(text))


def test_older_opsets_are_raised() -> None:
    source = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 11]> g (float[2,3] x) => (float[2,3] y) <float[3] w = {1.0, 2.0, 3.0}> '
        "{ p = Mul(x, w) y = Softmax<axis=1>(p) }"
    )
    proto, _ = _made(source, loss="softmax_cross_entropy", optimizer=memonger.SGD())
    assert proto.opset_import[0].version == 20
    assert set(_outputs(proto)) == {"y", "loss", "w.next"}


def test_steps_of_an_optimized_session_are_the_same_after_a_bad_one() -> None:
    """onnxruntime folds and merges what it can at load; a NaN may stay nowhere."""
    made = differentiated(model(net()), optimizer=memonger.SGD(0.1, momentum=0.9))
    plain, optimized = Stock(made), Stock(made)
    optimized.session = networks.stock(optimized.model)
    bad = batch(0)
    bad["x"][0] = np.nan
    for number in range(3):
        kept = dict(optimized.state)
        optimized.step(bad, number)
        optimized.state = kept
        optimized.step(batch(number), number)
        plain.step(batch(number), number)
    for name, array in plain.state.items():
        np.testing.assert_allclose(optimized.state[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


GOOD: dict[str, Any] = {
    "format": 1,
    "loss": "l",
    "outputs": ["l"],
    "parameters": ["w"],
    "updates": {"w": "w.next"},
    "scalars": {"learning_rate": "r"},
}


def _reads(**changes: Any) -> Training | None:
    source = _parsed(
        "g (float[2] w, float r, float[3] v) => (float l, float[2] w.next, float[2] a) "
        "{ l = Identity(r) w.next = Exp(w) a = Exp(w) }".replace("w.next", '"w.next"')
    )
    content = {key: value for key, value in {**GOOD, **changes}.items() if value != "absent"}
    loaded = memonger.load(source).ir.clone()
    loaded.metadata_props[KEY] = json.dumps(content)
    return training_roles.read(loaded, "model")


def test_metadata_is_read_as_it_was_written() -> None:
    found = _reads()
    assert found == Training(
        loss="l", outputs=("l",), parameters=("w",), updates={"w": "w.next"}, scalars={"learning_rate": "r"}
    )
    assert found is not None
    loaded = memonger.load(
        _parsed("g (float[2] w, float r) => (float l, float[2] n) { l = Neg(r) n = Exp(w) }")
    ).ir.clone()
    other = Training(loss="l", updates={"w": "n"}, state=("w",), gradients={"r": "l"}, output_gradients={"l": "r"})
    training_roles.write(loaded, other)
    assert training_roles.read(loaded, "model") == other


def test_a_model_without_is_no_training_model() -> None:
    assert training_roles.read(memonger.load(_parsed("g (float x) => (float y) { y = Neg(x) }")).ir, "model") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "is not in format 1"),
        ({"format": "absent"}, "is not in format 1"),
        ({"nonsense": 1}, "malformed at 'nonsense'"),
        ({"loss": 3}, "malformed at 'loss'"),
        ({"parameters": "w"}, "malformed at 'parameters'"),
        ({"parameters": [1]}, "malformed at 'parameters'"),
        ({"updates": ["w"]}, "malformed at 'updates'"),
        ({"updates": {"w": 1}}, "malformed at 'updates'"),
        ({"parameters": ["u"]}, "names the input 'u', which it doesn't have"),
        ({"statistics": ["u"]}, "names the input 'u'"),
        ({"scalars": {"step": "u"}}, "names the input 'u'"),
        ({"updates": {"u": "a"}}, "names the input 'u'"),
        ({"updates": {"w": "u"}}, "names the output 'u', which it doesn't have"),
        ({"loss": "u"}, "names the output 'u'"),
        ({"gradients": {"w": "u"}}, "names the output 'u'"),
        ({"outputs": ["l", "u"]}, "names the output 'u'"),
        ({"updates": {"v": "w.next"}}, "'w.next' can't be written over 'v': their types or shapes differ"),
        ({"updates": {"w": "a", "r": "a"}}, "types or shapes differ|one output over two inputs"),
    ],
)
def test_metadata_that_is_wrong_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        _reads(**changes)


def test_metadata_that_is_no_json_is_refused() -> None:
    loaded = memonger.load(_parsed("g (float x) => (float y) { y = Neg(x) }")).ir.clone()
    for text in ("{", "[]", "[" * 100000):
        loaded.metadata_props[KEY] = text
        with pytest.raises(PlanError, match=r"is not valid JSON|is not in format 1"):
            training_roles.read(loaded, "model")


def test_roles_are_read_once_for_each_model() -> None:
    body = "{ y = Mul(x, w) z = ReduceSum<keepdims=0>(y) }"
    forward = memonger.load(_parsed(f"g (float[2] x) => (float[2] y, float z) <float[2] w = {{1.0, 2.0}}> {body}"))
    made = memonger.differentiate(forward, loss="z")
    assert forward.training is None
    assert not forward.is_differentiated
    assert made.is_differentiated
    assert made.training is made.training
    copy = made.clone()
    assert copy.training == made.training
    assert copy.training is not made.training
    assert (copy.name, copy.batch) == (made.name, made.batch)
    assert copy.graph is copy.ir.graph is not made.graph
