"""Differentiation as a whole: what is reached, summed, left out and refused, whatever the operators are."""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import memonger
from memonger.autodiff.registry import RULES, gradient
from tests.support.gradient_checks import check, gradients, parse, run

LINEAR = (
    "g (float[4,3] x) => (float[4,2] y) <float[3,2] w = {1, 2, 3, 4, 5, 6}, float[2] b = {1, 2}>"
    "{ xw = MatMul(x, w) y = Add(xw, b) }"
)
TWO_LAYERS = (
    "g (float[4,3] x) => (float loss, float[4,3] hidden)"
    "<float[3] scale_in = {1, 2, 3}, float[3] scale_out = {4, 5, 6}>"
    "{ a = Mul(x, scale_in) hidden = Tanh(a) c = Mul(hidden, scale_out) loss = ReduceMean <keepdims=0> (c) }"
)


def differentiated(text: str, opset: int = 20, **options: Any) -> onnx.ModelProto:
    made = ir.to_proto(memonger.differentiate(parse(text, "float", opset), **options).ir)
    onnx.checker.check_model(made, full_check=True)
    return made


def given(model: onnx.ModelProto) -> set[str]:
    """The gradients that a model gives."""
    return {value.name.removesuffix(".grad") for value in model.graph.output if value.name.endswith(".grad")}


# What is reached.


def test_outputs_are_the_forward_ones_then_a_gradient_for_each_parameter() -> None:
    model = differentiated(LINEAR)
    assert [v.name for v in model.graph.output] == ["y", "w.grad", "b.grad"]
    assert [v.name for v in model.graph.input] == ["x", "y.grad", "w", "b"]


def test_a_loss_of_the_model_is_differentiated_by_its_name() -> None:
    model = differentiated(TWO_LAYERS, loss="loss")
    assert given(model) == {"scale_in", "scale_out"}
    x = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    scales = {i.name: onnx.numpy_helper.to_array(i) for i in model.graph.initializer if i.name.startswith("scale")}
    found = run(model, {"x": x, **scales})
    tensors = [torch.from_numpy(scales[name]).requires_grad_() for name in ("scale_in", "scale_out")]
    (torch.tanh(torch.from_numpy(x) * tensors[0]) * tensors[1]).mean().backward()
    for name, tensor in zip(("scale_in", "scale_out"), tensors, strict=True):
        assert tensor.grad is not None
        np.testing.assert_allclose(found[f"{name}.grad"], tensor.grad.numpy(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"wrt": ["x"]}, {"x"}),
        ({"wrt": ["scale_*"]}, {"scale_in", "scale_out"}),
        ({"wrt": ["x", "*_out"]}, {"x", "scale_out"}),
        ({"wrt": "scale_in"}, {"scale_in"}),
        ({"frozen": ["*_in"]}, {"scale_out"}),
        ({"wrt": ["*"], "frozen": ["scale_out", "x"]}, {"scale_in"}),
    ],
)
def test_names_and_patterns_choose_what_to_differentiate_by(options: dict[str, Any], expected: set[str]) -> None:
    assert given(differentiated(TWO_LAYERS, loss="loss", **options)) == expected


def test_behind_what_is_frozen_no_gradient_is_written() -> None:
    def differentiated_nodes(**options: Any) -> set[str]:
        made = differentiated(TWO_LAYERS, loss="loss", **options)
        return {node.name.split("/")[1] for node in made.graph.node if node.name.startswith("grad/")}

    assert differentiated_nodes() == {"Mul_a", "Tanh_hidden", "Mul_c", "ReduceMean_loss"}
    assert differentiated_nodes(frozen=["scale_in"]) == {"Mul_c", "ReduceMean_loss"}


def test_an_output_that_the_loss_does_not_hang_on_gets_no_gradient() -> None:
    text = (
        "g (float[3] x) => (float loss, float[3] aside) <float[3] w = {1, 2, 3}, float[3] v = {1, 2, 3}>"
        "{ p = Mul(x, w) loss = ReduceSum <keepdims=0> (p) q = Mul(x, v) aside = Exp(q) }"
    )
    model = differentiated(text, loss="loss")
    assert given(model) == {"w"}
    assert {v.name for v in model.graph.output} == {"loss", "aside", "w.grad"}


def test_what_nobody_reads_is_not_in_the_graph() -> None:
    """The gradients of constants, of inputs, of the first layer's input."""
    for options in ({"loss": "loss"}, {"loss": "loss", "frozen": ["scale_in"]}, {"loss": "loss", "wrt": ["x"]}):
        model = differentiated(TWO_LAYERS, **options)
        read = {name for node in model.graph.node for name in node.input} | {v.name for v in model.graph.output}
        assert all(read & set(node.output) for node in model.graph.node)
        assert {i.name for i in model.graph.initializer} <= read


# What is summed.


def test_a_parameter_read_in_two_places_gets_the_sum() -> None:
    check(
        "g (FLOAT[4,3] x, FLOAT[3,3] w) => (FLOAT[4,3] y) { a = MatMul(x, w) t = Transpose(w) y = MatMul(a, t) }",
        lambda x, w: x @ w @ w.T,
    )


def test_a_value_read_by_several_nodes_gets_the_sum() -> None:
    check(
        "g (FLOAT[4,3] x) => (FLOAT[4,3] y, FLOAT[4,3] z)"
        "{ a = Exp(x) b = Mul(a, x) c = Sub(b, a) y = Mul(c, a) z = Neg(a) }",
        lambda x: ((x.exp() * x - x.exp()) * x.exp(), -x.exp()),
    )


def test_an_output_that_is_read_on_gets_its_own_gradient_too() -> None:
    check("g (FLOAT[3] x) => (FLOAT[3] y, FLOAT[3] z) { y = Exp(x) z = Mul(y, x) }", lambda x: (x.exp(), x.exp() * x))


def test_an_input_that_is_an_output_gets_its_own_gradient_too() -> None:
    model = differentiated("g (float[3] x) => (float[3] x, float[3] z) { z = Mul(x, x) }", wrt=["x"])
    x, dx, dz = (np.array(numbers, np.float32) for numbers in ([1, 2, 3], [10, 20, 30], [1, 1, 2]))
    found = run(model, {"x": x, "x.grad": dx, "z.grad": dz})
    np.testing.assert_array_equal(found["x.grad#2"], dx + 2 * x * dz)


def test_a_bias_gets_the_sum_over_what_broadcasting_repeated() -> None:
    check(
        "g (FLOAT[2,3,4] x, FLOAT[3,1] b, FLOAT c) => (FLOAT[2,3,4] y) { s = Add(x, b) y = Mul(s, c) }",
        lambda x, b, c: (x + b) * c,
    )


def test_what_does_not_change_with_an_input_is_left_out_of_its_gradient() -> None:
    found = gradients(
        "g (float[3] x) => (float[3] y) { whole = Floor(x) size = Shape(x) many = Cast <to=1> (size)"
        "bits = Greater(x, whole) soft = Cast <to=1> (bits) p = Mul(x, whole) q = Mul(p, many) y = Add(q, soft) }",
        {"x": np.array([1.5, 2.5, -0.5])},
    )
    np.testing.assert_array_equal(found["x"], [3, 6, -3])


@pytest.mark.parametrize(("float_type", "dtype"), [("double", np.float64), ("float16", np.float16)])
def test_gradients_are_of_the_type_of_what_they_belong_to(float_type: str, dtype: type) -> None:
    text = "g (FLOAT[2,3] x, FLOAT[3] w) => (FLOAT[2,3] y) { a = Mul(x, w) y = Tanh(a) }"
    found = gradients(text, {"x": np.ones((2, 3)), "w": np.zeros(3)}, float_type=float_type)
    assert {v.dtype for v in found.values()} == {np.dtype(dtype)}


def test_a_gradient_takes_another_name_where_its_own_is_taken() -> None:
    parsed = parse("g (float[3] x) => (float[3] y) <float[3] w = {1, 2, 3}> { t = Mul(x, w) y = Exp(t) }", "float", 20)
    parsed.graph.node[0].output[0] = parsed.graph.node[1].input[0] = "w.grad"
    model = ir.to_proto(memonger.differentiate(parsed).ir)
    names = [name for node in model.graph.node for name in node.output]
    assert len(set(names)) == len(names)
    assert [v.name for v in model.graph.output] == ["y", "w.grad#2"]


# What is refused.


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (TWO_LAYERS, {"loss": "cost"}, r"no loss 'cost'.*softmax_cross_entropy.*one number \('loss'\)"),
        (TWO_LAYERS, {"loss": "hidden"}, "'hidden' can't be the loss: .*not one floating-point number"),
        (TWO_LAYERS, {"loss": "loss", "wrt": ["scale_mid"]}, "wrt names 'scale_mid', which is no input or initializer"),
        (TWO_LAYERS, {"loss": "loss", "frozen": ["q*"]}, r"frozen names 'q\*', which is no input or initializer"),
        (TWO_LAYERS, {"loss": "loss", "frozen": ["*"]}, "nothing to differentiate by"),
        (
            "g (int64[3] i, float[5] x) => (float[3] y) { y = Gather(x, i) }",
            {"wrt": ["i"]},
            "'i' is int64: only floating-point tensors have gradients",
        ),
        ("g (int64[3] i) => (int64[3] y) { y = Neg(i) }", {}, "nothing to differentiate by"),
        (
            "g (float[3] x) => (float y) { r = Round(x) y = ReduceSum <keepdims=0> (r) }",
            {"loss": "y", "wrt": ["x"]},
            "no differentiable way from 'y' to any parameter.*'x'",
        ),
        (
            "g (float[3] x, float[3] z) => (float y) { y = ReduceSum <keepdims=0> (x) }",
            {"loss": "y", "wrt": ["z"]},
            "no differentiable way from 'y' to any parameter.*'z'",
        ),
    ],
)
def test_what_cannot_be_differentiated_is_named(text: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(memonger.PlanError, match=f"(?s){message}"):
        differentiated(text, **options)


def test_an_operator_without_a_rule_is_named_and_what_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RULES, "Tanh")
    with pytest.raises(memonger.PlanError) as error:
        differentiated(TWO_LAYERS, loss="loss")
    message = str(error.value)
    assert "operator Tanh (domain 'ai.onnx', opset 20, node 'Tanh_hidden')" in message
    assert "between the loss and 'scale_in': freeze those" in message
    assert "cut the model before 'hidden'" in message


@pytest.mark.parametrize("body", ["p = Exp(w)", "p = Identity(x)"])
def test_a_branch_that_reads_a_parameter_is_no_way_around_its_gradient(body: str) -> None:
    """The If has no input that changes with the parameter: its branch reads that from around it."""
    text = (
        "g (float[3] x, bool c) => (float[3] y) <float[3] w = {1, 2, 3}>"
        f"{{ a = Mul(x, w) b = If (c) <then_branch = t () => (float[3] p) {{ {body} }},"
        " else_branch = e () => (float[3] q) { q = Neg(x) }> y = Add(a, b) }"
    )
    if "w" in body:
        with pytest.raises(memonger.PlanError, match=r"operator If .*node 'If_b'.*'w'"):
            differentiated(text)
    else:
        assert given(differentiated(text)) == {"w"}


def test_an_operator_without_a_rule_is_no_hindrance_where_nothing_behind_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(RULES, "Tanh")
    assert given(differentiated(TWO_LAYERS, loss="loss", frozen=["scale_in"])) == {"scale_out"}


def test_a_training_model_is_not_differentiated_again() -> None:
    with pytest.raises(memonger.PlanError, match="differentiated before"):
        memonger.differentiate(differentiated(TWO_LAYERS, loss="loss"), loss="loss")


def test_a_second_rule_for_an_operator_raises() -> None:
    with pytest.raises(ValueError, match="operator Relu has a gradient rule already"):
        gradient("Relu")(lambda op, node, dy: dy)
    with pytest.raises(ValueError, match="operator Shape is without a gradient"):
        gradient("Shape")(lambda op, node, dy: dy)


# Function bodies and older operator sets.


BODIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "HardSwish": torch.nn.functional.hardswish,
    "Mish": torch.nn.functional.mish,
    "Softsign": torch.nn.functional.softsign,
    "Selu": torch.nn.functional.selu,
    "Shrink": torch.nn.functional.hardshrink,
}


@pytest.mark.parametrize("op_type", BODIES)
def test_an_operator_without_a_rule_is_written_out_as_its_function_body(
    op_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(RULES, op_type, raising=False)
    training = check(
        f"g (FLOAT[5,4] x) => (FLOAT[5,4] y) {{ y = {op_type}(x) }}", BODIES[op_type], reference=True
    )  # fmt: skip
    assert op_type not in {node.op_type for node in training.graph.node}
    assert not training.functions


def test_a_body_whose_constants_are_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In single precision: the standard's body has a constant of that type."""
    monkeypatch.delitem(RULES, "MeanVarianceNormalization", raising=False)
    x = np.random.default_rng(0).standard_normal((2, 3, 4)).astype(np.float32)
    found = gradients(
        "g (float[2,3,4] x) => (float[2,3,4] y) { m = MeanVarianceNormalization <axes=[0, 2]> (x) y = Mul(m, x) }",
        {"x": x},
    )
    tensor = torch.from_numpy(x).requires_grad_()
    centered = tensor - tensor.mean((0, 2), True)
    (centered / centered.square().mean((0, 2), True).sqrt() * tensor).sum().backward()
    assert tensor.grad is not None
    np.testing.assert_allclose(found["x"], tensor.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_a_body_that_reckons_with_shapes() -> None:
    check(
        "g (FLOAT[5,4] x) => (FLOAT[3,6] y) <int64[2] dims = {3, 6}> { y = CenterCropPad(x, dims) }",
        lambda x: torch.nn.functional.pad(x[1:4], [1, 1]),
        reference=True,
    )


def test_a_body_is_left_alone_where_nothing_flows_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(RULES, "Mish")
    text = (
        "g (float[3] x) => (float[3] y) <float[3] v = {1, 2, 3}, float[3] w = {1, 2, 3}>"
        "{ a = Mul(x, v) m = Mish(a) y = Mul(m, w) }"
    )
    assert "Mish" in {node.op_type for node in differentiated(text, frozen=["v"]).graph.node}
    assert "Mish" not in {node.op_type for node in differentiated(text).graph.node}


OLDER: dict[str, tuple[int, str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "Softmax of flattened rows": (
        11,
        "FLOAT[2,3,4] y) { y = Softmax(x)",
        lambda x: x.reshape(2, 12).softmax(1).reshape(2, 3, 4),
    ),
    "Softmax over the last axis": (13, "FLOAT[2,3,4] y) { y = Softmax(x)", lambda x: x.softmax(-1)),
    "ReduceSum by attribute": (11, "FLOAT[2,4] y) { y = ReduceSum <axes=[1], keepdims=0> (x)", lambda x: x.sum(1)),
    "ReduceMean by attribute": (17, "FLOAT[2,3,1] y) { y = ReduceMean <axes=[-1]> (x)", lambda x: x.mean(-1, True)),
    "Unsqueeze by attribute": (9, "FLOAT[2,1,3,4] y) { y = Unsqueeze <axes=[1]> (x)", lambda x: x[:, None]),
    "Squeeze by attribute": (
        11,
        "FLOAT[2,3,4] y) { u = Unsqueeze <axes=[1]> (x) y = Squeeze <axes=[1]> (u)",
        lambda x: x.clone(),
    ),
    "Clip by attribute": (9, "FLOAT[2,3,4] y) { y = Clip <min=-0.5, max=0.5> (x)", lambda x: x.clamp(-0.5, 0.5)),
    "Slice by attribute": (9, "FLOAT[2,2,4] y) { y = Slice <starts=[1], ends=[3], axes=[1]> (x)", lambda x: x[:, 1:3]),
    "Split by attribute": (
        11,
        "FLOAT[2,1,4] y, FLOAT[2,2,4] z) { y, z = Split <axis=1, split=[1, 2]> (x)",
        lambda x: torch.split(x, [1, 2], 1),
    ),
    "Pad by attribute": (
        9,
        "FLOAT[2,3,7] y) { y = Pad <pads=[0, 0, 1, 0, 0, 2], value=1.0> (x)",
        lambda x: torch.nn.functional.pad(x, [1, 2], value=1.0),
    ),
    "Pow": (11, "FLOAT[2,3,4] y) { y = Pow(x, x)", lambda x: x**x),
}  # fmt: skip


@pytest.mark.parametrize("name", OLDER)
def test_older_operator_sets_are_raised(name: str) -> None:
    opset, body, function = OLDER[name]
    training = check(
        f"g (FLOAT[2,3,4] x) => ({body} }}",
        function,
        opset=opset,
        draw=lambda generator, shape: generator.uniform(0.1, 1.0, shape),
        reference="Clip" in name,  # onnxruntime has none in float64 for that operator set
    )
    assert [(o.domain, o.version) for o in training.opset_import] == [("", 20)]


def test_initializers_that_older_models_list_as_inputs_are_parameters() -> None:
    model = parse(
        "g (float[4,3] x, float[3] w = {1, 2, 3}) => (float[4,3] y) { y = Mul(x, w) }", "float", 9
    )  # fmt: skip
    model.ir_version = 3
    assert given(ir.to_proto(memonger.differentiate(model).ir)) == {"w"}


# What stays as it was.


@pytest.mark.parametrize("opset", [9, 13, 20])
def test_marks_stay_on_their_nodes(opset: int) -> None:
    axes = "<axes=[1], keepdims=0>" if opset == 9 else "<keepdims=0>"
    inputs = "(b)" if opset == 9 else "(b, axes)"
    model = parse(
        "g (float[4,3] x) => (float[4] y) <float[3] w = {1, 2, 3}, int64[1] axes = {1}>"
        f"{{ a = Mul(x, w) b = Tanh(a) y = ReduceSum {axes} {inputs} }}",
        "float",
        opset,
    )
    for node, stage in zip(model.graph.node, ("True", "stage 2", "True"), strict=True):
        node.metadata_props.add(key="mirror_stage", value=stage)
    made = ir.to_proto(memonger.differentiate(model).ir)
    stages = {n.output[0]: p.value for n in made.graph.node for p in n.metadata_props if p.key == "mirror_stage"}
    assert stages == {"a": "True", "b": "stage 2", "y": "True"}


def test_forward_outputs_are_bit_for_bit_what_they_were() -> None:
    model = parse(TWO_LAYERS, "float", 20)
    x = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    before, made = run(model, {"x": x}), differentiated(TWO_LAYERS, loss="loss")
    weights = {i.name: onnx.numpy_helper.to_array(i) for i in model.graph.initializer}
    after = run(made, {"x": x, **weights})
    assert {name: value.tobytes() for name, value in before.items()} == {n: after[n].tobytes() for n in before}


def test_the_model_that_was_given_is_not_changed() -> None:
    model = parse(TWO_LAYERS, "float", 20)
    before = model.SerializeToString()
    loaded = memonger.load(model)
    inside = ir.to_proto(loaded.ir).SerializeToString(deterministic=True)
    memonger.differentiate(model, loss="loss")
    memonger.differentiate(loaded, loss="loss")
    assert model.SerializeToString() == before
    assert ir.to_proto(loaded.ir).SerializeToString(deterministic=True) == inside


@pytest.mark.parametrize("text", [LINEAR, TWO_LAYERS])
def test_the_same_model_gives_the_same_bytes(text: str) -> None:
    first, second = (differentiated(text).SerializeToString(deterministic=True) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("kind", ["FLOAT8E4M3FN", "FLOAT8E5M2FNUZ", "FLOAT8E8M0", "FLOAT4E2M1"])
@pytest.mark.parametrize("operator", ["Cast", "QuantizeLinear"])
def test_types_without_arithmetic_are_refused_where_a_gradient_needs_it(kind: str, operator: str) -> None:
    number = onnx.TensorProto.DataType.Value(kind)
    narrow = f"Cast <to = {number}> (a)" if operator == "Cast" else f"QuantizeLinear <output_dtype = {number}> (a, s)"
    model = onnx.parser.parse_model(
        '<ir_version: 11, opset_import: ["": 24]> g (float[2] x) => (float[4] y) <float[2] w = {1, 2}, float s = {1}>'
        f" {{ a = Mul(x, w)  b = {narrow}  c = Concat <axis = 0> (b, b)  y = Cast <to = 1> (c) }}"
    )
    with pytest.raises(memonger.MemongerError):
        memonger.differentiate(model, loss="mean_squared_error")


def test_a_node_that_could_not_run_is_refused_by_name() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 18]> g (float[2] x) => (float[2] y)'
        " <float[2] w = {1, 2}, float[2] low = {0, 1}> { a = Mul(x, w)  [the_clip] y = Clip(a, low) }"
    )
    with pytest.raises(memonger.PlanError, match="the_clip"):
        memonger.differentiate(model)
