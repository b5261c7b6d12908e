"""load: sources, functions, versions, dimensions and shape arithmetic."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import memonger
from memonger.ir.values import all_values, static_shape
from tests.support.stock import normal, parse, planned_as_stock, planned_names, run_stock

CHAIN = "g (float[N, 8] x) => (float[N, 8] y) { a = Relu(x)  b = Sigmoid(a)  y = Neg(b) }"
FIXED = CHAIN.replace("[N,", "[4,")
WEIGHTED = "g (float[N, 2] x) => (float[N, 2] y) <float[2] w = {1, 2}> { a = Mul(x, w)  y = Neg(a) }"


def _shape(model: memonger.Model, name: str) -> tuple[int, ...] | None:
    return static_shape(next(v for v in all_values(model.ir.graph) if v.name == name))


def _plan_and_run(source: object) -> np.ndarray:
    plan = memonger.search_plan(source, batch=4, device="cpu", mode="inference")
    return memonger.Session(plan).run({"x": normal(0, 4, 8)})["y"]


def test_every_kind_of_source_gives_the_same_plan_and_stays_unchanged(tmp_path: Path) -> None:
    proto = parse(CHAIN)
    data = proto.SerializeToString()
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    model = ir.from_proto(proto)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    results = [_plan_and_run(source) for source in (path, str(path), data, proto, model, memonger.load(proto, batch=4))]
    assert all(np.array_equal(results[0], other) for other in results)
    assert np.array_equal(results[0], run_stock(proto, {"x": normal(0, 4, 8)}, "ORT_ENABLE_ALL")["y"])
    assert path.read_bytes() == data
    assert proto.SerializeToString() == data
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


@pytest.mark.parametrize("ir_version", [3, 8])
def test_given_models_with_weights_functions_and_old_versions_stay_unchanged(ir_version: int) -> None:
    text = "g (float[N, 2] x, float[2] w) => (float[N, 2] y) <float[2] w = {1, 2}> { a = Mul(x, w)  y = Neg(a) }"
    proto = parse(text, ir_version=ir_version, opset=9)
    model = ir.from_proto(proto)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    memonger.load(model, batch=4)
    memonger.search_plan(model, batch=4, device="cpu", mode="inference")
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_nodes_in_any_order_are_sorted_and_the_given_model_is_not() -> None:
    proto = parse(FIXED)
    proto.graph.node.reverse()
    model = ir.from_proto(proto)
    for source in (proto, model):
        loaded = memonger.load(source)
        assert [node.op_type for node in loaded.ir.graph] == ["Relu", "Sigmoid", "Neg"]
    assert [node.op_type for node in model.graph] == ["Neg", "Sigmoid", "Relu"]
    planned_as_stock(parse(FIXED), [{"x": normal(0, 4, 8)}, {"x": normal(1, 4, 8)}])


def test_a_node_whose_subgraph_reads_a_later_value_is_moved_behind_it() -> None:
    model = parse(
        "g (bool c, float[4] x) => (float[4] y) { a = Relu(x)  y = If(c) <"
        "then_branch = t () => (float[4] o) { o = Neg(a) }, else_branch = e () => (float[4] p) { p = Exp(a) }> }"
    )
    model.graph.node.reverse()
    assert [node.op_type for node in memonger.load(model).ir.graph] == ["Relu", "If"]


FUNCTIONS = """<ir_version: 8, opset_import: ["": 17, "local": 1]>
g (float[N, 4] x) => (float[N, 4] y) { a = local.Outer(x)  b = local.Inner(a)  y = local.Outer <alpha = 0.3> (b) }
<domain: "local", opset_import: ["": 17, "com.microsoft": 1]>
Inner (x) => (y) { t = com.microsoft.Gelu(x)  y = Tanh(t) }
<domain: "local", opset_import: ["": 17, "local": 1]>
Outer <alpha: float = 0.1> (x) => (y) { t = local.Inner(x)  y = LeakyRelu <alpha: float = @alpha> (t) }
"""


def test_functions_are_inlined_nested_and_called_twice_with_domains_of_their_own() -> None:
    model = onnx.parser.parse_model(FUNCTIONS)
    loaded = memonger.load(model, batch=2)
    assert [node.op_type for node in loaded.ir.graph] == [
        "Gelu", "Tanh", "LeakyRelu", "Gelu", "Tanh", "Gelu", "Tanh", "LeakyRelu",
    ]  # fmt: skip
    alphas = [node.attributes.get_float("alpha") for node in loaded.ir.graph if node.op_type == "LeakyRelu"]
    assert alphas == pytest.approx([0.1, 0.3])
    plan = memonger.search_plan(model, batch=2, device="cpu", mode="inference")
    x = normal(0, 2, 4)
    stock = run_stock(model, {"x": x}, "ORT_ENABLE_ALL")["y"]
    assert np.array_equal(memonger.Session(plan).run({"x": x})["y"], stock)


def test_a_function_in_another_opset_runs_where_its_operators_are_the_same_in_both() -> None:
    """skl2onnx writes KNNImputer so."""
    model = onnx.parser.parse_model(FUNCTIONS.replace('["": 17, "com.microsoft": 1]', '["": 14, "com.microsoft": 1]'))
    plan = memonger.search_plan(model, batch=2, device="cpu", mode="inference")
    x = normal(0, 2, 4)
    assert np.array_equal(memonger.Session(plan).run({"x": x})["y"], run_stock(model, {"x": x}, "ORT_ENABLE_ALL")["y"])


def test_a_function_in_another_opset_is_refused_where_an_operator_has_lost_an_attribute() -> None:
    text = FUNCTIONS.replace('["": 17, "com.microsoft": 1]', '["": 12, "com.microsoft": 1]')
    text = text.replace("y = Tanh(t)", "u = Unsqueeze <axes = [0]> (t)  y = Squeeze <axes = [0]> (u)")
    with pytest.raises(memonger.LoadError, match=r"'Inner' is in version 12 .* in 17, where Unsqueeze has no 'axes'"):
        memonger.load(onnx.parser.parse_model(text), batch=2)


def test_calls_of_functions_may_leave_outputs_out() -> None:
    text = """<ir_version: 8, opset_import: ["": 17, "local": 1]>
    g (float[2, 4] x) => (float[2, 4] y) { a, "" = local.Both(x)  y, "" = local.Both(a) }
    <domain: "local", opset_import: ["": 17, "local": 1]>
    Both (x) => (y, z) { y, z = local.Inner(x) }
    <domain: "local", opset_import: ["": 17]>
    Inner (x) => (y, z) { y = Tanh(x)  z = Shape(y) }"""
    planned_as_stock(onnx.parser.parse_model(text), [{"x": normal(0, 2, 4)}, {"x": normal(1, 2, 4)}])


def test_functions_that_call_themselves_are_refused() -> None:
    text = FUNCTIONS.replace("com.microsoft.Gelu(x)", "local.Outer(x)").replace('"com.microsoft"', '"local"')
    with pytest.raises(memonger.LoadError, match=r"can't be inlined.*Cyclic"):
        memonger.load(onnx.parser.parse_model(text), batch=2)


def test_initializers_that_old_files_list_as_inputs_are_no_inputs() -> None:
    text = "g (float[N, 2] x, float[2] w) => (float[N, 2] y) <float[2] w = {1, 2}> { y = Mul(x, w) }"
    loaded = memonger.load(parse(text, opset=9, ir_version=3), batch=4)
    assert [value.name for value in loaded.ir.graph.inputs] == ["x"]
    assert loaded.ir.ir_version == 10


def test_newer_files_initializers_that_callers_may_override_stay_inputs() -> None:
    text = "g (float[4, 2] x, float[2] w) => (float[4, 2] y) <float[2] w = {1, 2}> { a = Mul(x, w)  y = Neg(a) }"
    model = parse(text, ir_version=4, opset=9)
    plans = planned_as_stock(model, [{"x": normal(0, 4, 2)}, {"x": normal(0, 4, 2), "w": normal(1, 2)}])
    assert [value.name for value in plans["none"].model.graph.inputs] == ["x", "w"]


@pytest.mark.parametrize("opset", [1, 5, 6])
def test_opsets_that_onnxruntime_has_no_kernels_for_are_raised(opset: int) -> None:
    consumed = "consumed_inputs = [0, 0, 0, 1, 1], " if opset < 6 else ""
    text = (
        "g (float[N, 3, 4, 4] x, float[3] s, float[4, 4] w) => (float[N, 3, 4, 4] y) "
        "<float[3] s = {1, 2, 3}, float[4, 4] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7}> {"
        "a = Mul <broadcast = 1> (x, w)"
        f"b = BatchNormalization <{consumed}is_test = 1> (a, s, s, s, s)  c = Dropout <is_test = 1> (b)  y = Relu(c) }}"
    )
    model = parse(text, opset, ir_version=3)
    plan = memonger.search_plan(model, batch=2, device="none", mode="inference")
    assert plan.model.opset_imports[""] == 7
    assert [value.name for value in plan.model.graph.inputs] == ["x"]
    s, w = np.array([1, 2, 3], np.float32).reshape(1, 3, 1, 1), np.arange(16).reshape(4, 4) % 9 + 1
    for seed in (0, 1):
        x = normal(seed, 2, 3, 4, 4)
        expected = np.maximum((x * w - s) / np.sqrt(s + 1e-5) * s + s, 0)
        np.testing.assert_allclose(memonger.Session(plan).run({"x": x})["y"], expected, rtol=1e-5, atol=1e-6)


def test_a_raised_model_still_finds_its_external_data(tmp_path: Path) -> None:
    model = parse("g (float[N, 64] x) => (float[N, 64] y) { y = Add <broadcast = 1> (x, w) }", 6, ir_version=4)
    weight = normal(3, 64)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    path = tmp_path / "old.onnx"
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    plan = memonger.search_plan(path, batch=2, device="none", mode="inference")
    x = normal(0, 2, 64)
    assert np.array_equal(memonger.Session(plan).run({"x": x})["y"], x + weight)


def test_the_default_domain_may_be_spelled_out() -> None:
    model = parse(FIXED)
    model.opset_import[0].domain = "ai.onnx"
    for node in model.graph.node:
        node.domain = "ai.onnx"
    planned_as_stock(model, [{"x": normal(0, 4, 8)}, {"x": normal(1, 4, 8)}])


def test_dimensions_are_bound_by_name_by_place_and_by_batch() -> None:
    text = "g (float[B, S, 3] x, float[B, S, 3] z) => (float[B, S, 3] y) { a = Add(x, z)  y = Relu(a) }"
    for given in ({"B": 2, "S": 5}, {"x[0]": 2, "z[0]": 2, "S": 5}, {"x[0]": 2, "x[1]": 5, "z[0]": 2, "z[1]": 5}):
        assert _shape(memonger.load(parse(text), dims=given), "y") == (2, 5, 3)
    assert _shape(memonger.load(parse(text), batch=2, dims={"S": 5}), "y") == (2, 5, 3)
    assert _shape(memonger.load(parse(text), batch=2, dims={"S": 5, "x[2]": 3}), "a") == (2, 5, 3)


def test_batch_binds_each_open_first_dimension_and_a_name_overrides_it() -> None:
    text = "g (float[B, 3] x, float[K, 3] z) => (float[M, 3] y) { a = Concat <axis = 0> (x, z)  y = Relu(a) }"
    assert _shape(memonger.load(parse(text), batch=4), "y") == (8, 3)
    assert _shape(memonger.load(parse(text), batch=4, dims={"K": 1}), "y") == (5, 3)


def test_dimensions_without_a_name_are_bound_by_place_or_batch() -> None:
    model = parse(CHAIN)
    model.graph.input[0].type.tensor_type.shape.dim[0].Clear()
    assert _shape(memonger.load(model, dims={"x[0]": 3}), "y") == (3, 8)
    assert _shape(memonger.load(model, batch=3), "y") == (3, 8)
    model.graph.input[0].type.tensor_type.shape.dim[1].Clear()
    with pytest.raises(memonger.LoadError, match=r"dimension 1 of input 'x' \(without a name\).*dims=\{'x\[1\]': 64\}"):
        memonger.load(model)


def test_an_open_batch_is_one_and_told() -> None:
    model = memonger.load(parse(CHAIN))
    assert (model.batch, _shape(model, "y")) == (1, (1, 8))
    assert model.notes == ("the batch ('N') has no size: it is 1, unless batch=N says another.",)
    model = memonger.load(parse(CHAIN), batch=1)
    assert (model.batch, model.notes) == (1, ())
    model = memonger.load(parse(CHAIN), dims={"N": 3})
    assert (model.batch, model.notes) == (None, ())


TWO = "g (float[{}, 4] x, float[{}, 4] z) => (float[A, 4] y, float[B, 4] w) {{ y = Relu(x)  w = Relu(z) }}"


def test_of_several_open_first_dimensions_one_has_to_be_called_as_a_batch() -> None:
    model = memonger.load(parse(TWO.format("batch_size", "tokens")), dims={"tokens": 5})
    assert (_shape(model, "y"), _shape(model, "w")) == ((1, 4), (5, 4))
    for first in ("batch_size", "words"):
        with pytest.raises(memonger.LoadError, match="dimension 0 of input 'z'" if first == "batch_size" else "'x'"):
            memonger.load(parse(TWO.format(first, "tokens")))
    with pytest.raises(memonger.LoadError, match="dimension 0 of input 'z'"):
        memonger.load(parse(TWO.format("words", "tokens")), dims={"words": 5})


def test_given_input_shapes_bind_what_is_open() -> None:
    assert _shape(memonger.load(parse(CHAIN), input_shapes={"x": (5, 8)}), "y") == (5, 8)
    model = parse(CHAIN)
    model.graph.input[0].type.tensor_type.ClearField("shape")
    assert _shape(memonger.load(model, input_shapes={"x": (5, 8)}), "y") == (5, 8)
    with pytest.raises(memonger.LoadError, match="'x' has no shape at all"):
        memonger.load(model)


def test_the_batch_of_a_fixed_model_can_only_be_its_own() -> None:
    fixed = parse(FIXED)
    assert memonger.load(fixed, batch=4).batch == 4
    with pytest.raises(memonger.LoadError, match=r"the batch can't be 2.*'x' has 4"):
        memonger.load(fixed, batch=2)


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ({"M": 3, "N": 2}, r"no dimension named 'M'; it has 'N'"),
        ({"N": 2, "x[1]": 9}, r"x\[1\] is 8 in the model and can't be set to 9"),
        ({"N": -1}, "'N' must be a whole number, 0 or more, not -1"),
        ({"y[0]": 2}, r"no dimension named 'y\[0\]'"),
    ],
)
def test_sizes_that_cannot_be_are_refused(dims: dict[str, int], message: str) -> None:
    with pytest.raises(memonger.LoadError, match=message):
        memonger.load(parse(CHAIN), dims=dims)


def test_sizes_declared_for_another_batch_are_not_believed() -> None:
    text = "g (float[N, 8] x) => (float[1, 8] y) <float[1, 8] a> { a = Relu(x)  b = Sigmoid(a)  y = Neg(b) }"
    plans = planned_as_stock(parse(text), [{"x": normal(0, 4, 8)}, {"x": normal(1, 4, 8)}], batch=4)
    assert all(_sizes(plan) == {128} for plan in plans.values())


def _sizes(plan: memonger.Plan) -> set[int]:
    return {plan.graph.sizes[value] for value in plan.offsets}


def test_shapes_that_a_body_declares_wrongly_are_not_believed() -> None:
    wrong = helper.make_tensor_value_info("h", TensorProto.INT64, [])  # a vector: onnxruntime warns, and runs it
    branches = [
        helper.make_graph(
            [
                helper.make_node("Cast", ["x"], ["h"], to=TensorProto.INT64),
                helper.make_node("Cast", ["h"], [name], to=TensorProto.FLOAT),
            ],
            name,
            [],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)],
            value_info=[wrong],
        )
        for name in ("then", "other")
    ]
    node = helper.make_node("If", ["c"], ["y"], then_branch=branches[0], else_branch=branches[1])
    inputs = [
        helper.make_tensor_value_info("c", TensorProto.BOOL, []),
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [4]),
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    opsets = [helper.make_opsetid("", 17)]
    model = helper.make_model(helper.make_graph([node], "g", inputs, outputs), ir_version=9, opset_imports=opsets)
    loaded = memonger.load(model)
    assert static_shape(loaded.graph.outputs[0]) == (4,)
    feeds = {"c": np.array(True), "x": np.linspace(-2, 2, 4, dtype=np.float32)}
    run = memonger.Session(memonger.search_plan(model)).run(feeds)["y"]
    np.testing.assert_array_equal(run, run_stock(model, feeds, "ORT_ENABLE_ALL")["y"])


def test_declared_sizes_count_where_inference_knows_nothing() -> None:
    node = helper.make_node("SampleOp", ["x"], ["a"], domain="com.microsoft")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 8]) for name in ("x", "y", "a")]
    graph = helper.make_graph([node, helper.make_node("Neg", ["a"], ["y"])], "g", values[:1], values[1:2])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    with pytest.raises(memonger.PlanError, match=r"type of value 'a'.*SampleOp.*device='cpu'.*value_info"):
        memonger.search_plan(model, device="none", mode="inference")
    model.graph.value_info.append(values[2])
    assert planned_names(memonger.search_plan(model, device="none", mode="inference")) == {"a", "y"}


SHAPE_ARITHMETIC = {
    "Reshape": "s = Shape(x)  i = Constant <value_ints = [0]> ()  n = Gather(s, i)"
    "  m = Constant <value_ints = [-1]> ()  t = Concat <axis = 0> (n, m)  a = Reshape(x, t)",
    "Slice": "s = Shape(x)  i = Constant <value_ints = [0]> ()  j = Constant <value_ints = [1]> ()"
    "  n = Slice(s, i, j)  m = Constant <value_ints = [12]> ()  t = Concat <axis = 0> (n, m)  a = Reshape(x, t)",
    "Cast, Mul": "s = Shape(x)  i = Constant <value_int = 0> ()  n = Gather(s, i)  f = Cast <to = 6> (n)"
    "  k = Constant <value = int32 {3}> ()  p = Mul(f, k)  q = Cast <to = 7> (p)  z = Constant <value_ints = [0]> ()"
    "  u = Unsqueeze(q, z)  m = Constant <value_ints = [4]> ()  t = Concat <axis = 0> (u, m)  a = Reshape(x, t)",
    "ConstantOfShape": "s = Shape(x)  o = ConstantOfShape <value = float[1] {1}> (s)  a = Add(x, o)",
    "Expand": "s = Shape(x)  o = Constant <value_floats = [1.0]> ()  e = Expand(o, s)  a = Add(x, e)",
    "Range": "s = Shape <start = 0, end = 1> (x)  n = Squeeze(s)  z = Constant <value_int = 0> ()"
    "  d = Constant <value_int = 1> ()  r = Range(z, n, d)  f = Cast <to = 1> (r)  g = ReduceSum <keepdims = 0> (f)"
    "  a = Mul(x, g)",
    "Where": "s = Shape(x)  k = Constant <value_ints = [-1, 3, 4]> ()  z = Constant <value_ints = [0, 0, 0]> ()"
    "  c = Less(k, z)  t = Where(c, s, k)  a = Reshape(x, t)",
    "Div": "s = Shape(x)  i = Constant <value_int = 0> ()  n = Gather(s, i)  k = Constant <value_int = 2> ()"
    "  h = Div(n, k)  z = Constant <value_ints = [0]> ()  u = Unsqueeze(h, z)  m = Constant <value_ints = [-1]> ()"
    "  t = Concat <axis = 0> (u, m)  a = Reshape(x, t)",
    "Size": "n = Size(x)  z = Constant <value_ints = [0]> ()  u = Unsqueeze(n, z)  a = Reshape(x, u)",
}


@pytest.mark.parametrize("body", SHAPE_ARITHMETIC.values(), ids=SHAPE_ARITHMETIC)
def test_shape_arithmetic_is_static_once_the_inputs_are(body: str) -> None:
    model = parse(f"g (float[N, 3, 4] x) => (float y) {{ {body}  b = Relu(a)  y = ReduceSum <keepdims = 0> (b) }}")
    loaded = memonger.load(model, batch=2)
    assert [v.name for v in all_values(loaded.ir.graph) if v.name and static_shape(v) is None] == []
    feeds = [{"x": normal(seed, 2, 3, 4)} for seed in (0, 1)]
    plans = planned_as_stock(model, feeds, batch=2)
    assert all({"a", "b"} & planned_names(plan) for plan in plans.values())
    reference = ReferenceEvaluator(model).run(None, feeds[0])[0]
    np.testing.assert_allclose(memonger.Session(plans["none"]).run(feeds[0])["y"], reference, rtol=1e-5)


def test_contradicting_shapes_and_types_are_refused_with_the_operator() -> None:
    with pytest.raises(memonger.LoadError, match=r"contradict.*Add.*Incompatible dimensions"):
        memonger.load(parse("g (float[2, 8] x, float[3, 9] z) => (float[2, 8] y) { y = Add(x, z) }"))
    with pytest.raises(memonger.LoadError, match=r"contradict.*Neg.*elem type"):
        memonger.load(parse("g (float[2] x) => (int64[2] y) { y = Neg(x) }"))


def test_loading_the_same_model_for_two_batches_shares_nothing() -> None:
    loaded = memonger.load(parse(WEIGHTED), batch=2)
    again = memonger.load(parse(WEIGHTED), batch=7)
    assert (_shape(loaded, "y"), _shape(again, "y")) == ((2, 2), (7, 2))
