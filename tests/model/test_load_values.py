"""Values that are special to a planner: subgraphs, sizes only the run can tell, odd inputs and outputs.

Every model here is planned with and without a device and runs like stock onnxruntime, bit for bit.
"""

from pathlib import Path

import numpy as np
import onnx
import pytest

import memonger
from tests.support import networks
from tests.support.stock import normal, parse, planned_as_stock, planned_names

TWO_BY_EIGHT = [{"x": normal(0, 2, 8)}, {"x": normal(1, 2, 8)}]


def _reads(plan: memonger.Plan, op: str) -> set[str]:
    graph = plan.graph
    return {graph.values[v] for step, name in enumerate(graph.ops) if name == op for v in graph.reads[step]}


def test_if_keeps_what_its_branches_capture() -> None:
    model = parse(
        "g (float[2, 8] x, bool c) => (float[2, 8] y) { a = Relu(x)  n = Neg(x)  m = Exp(n)  y = If(c) <"
        "then_branch = t () => (float[2, 8] o) { o = Add(a, m) }, else_branch = e () => (float[2, 8] p) {"
        "q = Exp(n)  p = Sub(q, a) }> }"
    )
    feeds = [{"x": normal(seed, 2, 8), "c": np.array(c)} for seed, c in ((0, True), (0, False), (1, False))]
    plans = planned_as_stock(model, feeds)
    for plan in plans.values():
        assert {"a", "n", "m", "c"} <= _reads(plan, "If")
        assert {"a", "n", "m"} <= planned_names(plan)


def test_nested_subgraphs_keep_what_the_innermost_captures() -> None:
    model = parse(
        "g (float[2, 8] x, bool c) => (float[2, 8] y) { a = Relu(x)  b = Sigmoid(a)  d = Neg(x)  e = Tanh(d)"
        "z = If(c) <then_branch = t () => (float[2, 8] o) { o = If(c) <"
        "then_branch = tt () => (float[2, 8] oo) { oo = Mul(a, e) }, else_branch = te () => (float[2, 8] op) {"
        "op = Identity(e) }> }, else_branch = f () => (float[2, 8] p) { p = Neg(a) }>  y = Add(z, b) }"
    )
    feeds = [{"x": normal(seed, 2, 8), "c": np.array(c)} for seed, c in ((0, True), (1, True), (0, False))]
    for plan in planned_as_stock(model, feeds).values():
        assert {"a", "e", "c"} <= _reads(plan, "If")


LOOP = (
    "g (float[2, 8] x, int64 n) => (float[2, 8] y, float[M, 2, 8] s) { a = Relu(x)  b = Tanh(x)"
    "t = Constant <value = bool {1}> ()  r, s = Loop(n, t, a) <body = l (int64 i, bool k, float[2, 8] v) => "
    "(bool k2, float[2, 8] w, float[2, 8] u) { k2 = Identity(k)  w = Mul(v, b)  u = Neg(w) }>  y = Add(r, b) }"
)


def test_loop_keeps_what_its_body_captures_and_what_it_collects_stays_with_the_runtime() -> None:
    feeds = [{"x": normal(seed, 2, 8), "n": np.array(n)} for seed, n in ((0, 3), (1, 5), (0, 0))]
    for plan in planned_as_stock(parse(LOOP), feeds).values():
        assert {"a", "b", "n"} <= _reads(plan, "Loop")
        assert "b" in planned_names(plan)
        assert "s" not in planned_names(plan)


def test_scan_keeps_what_its_body_captures() -> None:
    model = parse(
        "g (float[4, 8] x, float[8] h) => (float[8] f, float[4, 8] y) { a = Relu(x)  b = Tanh(h)"
        "f, s = Scan <num_scan_inputs = 1, body = l (float[8] v, float[8] e) => (float[8] w, float[8] u) {"
        "w = Add(v, e)  u = Mul(w, b) }> (h, a)  y = Neg(s) }"
    )
    feeds = [{"x": normal(seed, 4, 8), "h": normal(seed + 2, 8)} for seed in (0, 1)]
    for plan in planned_as_stock(model, feeds).values():
        assert {"a", "b"} <= _reads(plan, "Scan")
        assert "a" in planned_names(plan)


RUN_TIME_SIZED = {
    "NonZero": ("g (float[2, 8] x) => (int64[2, M] i, float[2, 8] y) { a = Relu(x)  i = NonZero(a)  y = Neg(a) }", "i"),
    "Unique": ("g (float[2, 8] x) => (float[M] n) { a = Relu(x)  u = Unique(a)  n = Neg(u) }", "u"),
    "Compress": (
        "g (float[2, 8] x) => (float[K, 8] y) { z = Constant <value = float {0}> ()"
        "  s = ReduceSum <keepdims = 0> (x, i)  c = Greater(s, z)  a = Tanh(x)  b = Compress <axis = 0> (a, c)"
        "  y = Neg(b) }",
        "b",
    ),
    "sequences": (
        "g (float[2, 8] x) => (seq(float[1, 8]) q, float[A, B] y) { a = Relu(x)  q = SplitToSequence <axis = 0> (a)"
        "  b = ConcatFromSequence <axis = 0> (q)  y = Neg(b) }",
        "q",
    ),
}


@pytest.mark.parametrize(("text", "held"), RUN_TIME_SIZED.values(), ids=RUN_TIME_SIZED)
def test_sizes_only_the_run_can_tell_stay_with_the_runtime(text: str, held: str) -> None:
    model = parse(text)
    if " i)" in text:
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "i"))
    for plan in planned_as_stock(model, TWO_BY_EIGHT).values():
        assert held not in planned_names(plan)
        assert "a" in planned_names(plan)


def test_a_reshape_to_a_shape_that_is_fed_stays_with_the_runtime() -> None:
    model = parse("g (float[2, 8] x, int64[2] s) => (float[A, B] y) { a = Relu(x)  b = Reshape(a, s)  y = Neg(b) }")
    feeds = [{"x": normal(seed, 2, 8), "s": np.array(s)} for seed, s in ((0, [4, 4]), (1, [8, 2]))]
    for plan in planned_as_stock(model, feeds, inputs=feeds[0]).values():
        assert planned_names(plan) == {"a"}


def test_a_size_declared_for_a_fed_shape_is_not_believed() -> None:
    model = parse("g (float[2, 8] x, int64[2] s) => (float[4, 4] y) { a = Relu(x)  b = Reshape(a, s)  y = Neg(b) }")
    feeds = [{"x": normal(seed, 2, 8), "s": np.array(s)} for seed, s in ((0, [4, 4]), (1, [8, 2]))]
    for plan in planned_as_stock(model, feeds, inputs=feeds[0]).values():
        assert planned_names(plan) == {"a"}


def test_a_size_declared_where_a_default_decides_is_believed() -> None:
    """Old exporters list every initializer among the inputs, the targets of reshapes too."""
    model = parse(
        "g (float[2, 8] x, int64[2] s) => (float[4, 4] y) <int64[2] s = {4, 4}, float[4, 4] b>"
        "{ a = Relu(x)  b = Reshape(a, s)  y = Neg(b) }"
    )
    plans = planned_as_stock(model, TWO_BY_EIGHT)
    assert planned_names(plans["none"]) == {"a", "b", "y"}
    with pytest.raises(memonger.SessionError, match="shape"):
        memonger.Session(plans["none"]).run({**TWO_BY_EIGHT[0], "s": np.array([8, 2])})


def test_text_stays_with_the_runtime() -> None:
    model = parse(
        "g (string[3] x, float[3] z) => (string[3] y, float[3] w) { y = Identity(x)  a = Relu(z)  w = Neg(a) }"
    )
    feeds = [{"x": np.array(["a", "", text], object), "z": normal(seed, 3)} for seed, text in ((0, "é"), (1, "b"))]
    for plan in planned_as_stock(model, feeds).values():
        assert planned_names(plan) == {"a", "w"}


def test_an_unused_dropout_mask() -> None:
    model = parse("g (float[2, 8] x) => (float[2, 8] y) { a, mask = Dropout(x)  b = Relu(a)  y = Sigmoid(b) }")
    planned_as_stock(model, TWO_BY_EIGHT)


def test_a_dropout_mask_that_is_an_output() -> None:
    model = parse("g (float[2, 8] x) => (float[2, 8] y, bool[2, 8] mask) { a = Tanh(x)  y, mask = Dropout(a) }")
    planned_as_stock(model, TWO_BY_EIGHT)


def _lstm(outputs: str, declared: str) -> onnx.ModelProto:
    model = parse(
        f"g (float[5, 1, 4] x) => ({declared}) {{ a = Tanh(x)  {outputs} = LSTM <hidden_size = 3> (a, w, r) }}"
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(normal(8, 1, 12, 4), "w"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(normal(9, 1, 12, 3), "r"))
    return model


@pytest.mark.parametrize(
    ("outputs", "declared"),
    [
        (", h, c", "float[1, 1, 3] h, float[1, 1, 3] c"),
        ("y, , c", "float[5, 1, 1, 3] y, float[1, 1, 3] c"),
        (", , c", "float[1, 1, 3] c"),
        ("y", "float[5, 1, 1, 3] y"),
    ],
)
def test_outputs_left_out_at_any_place(outputs: str, declared: str) -> None:
    plans = planned_as_stock(_lstm(outputs, declared), [{"x": normal(seed, 5, 1, 4)} for seed in (0, 1)])
    assert all("" not in plan.graph.values for plan in plans.values())


def test_inputs_left_out_in_the_middle() -> None:
    model = parse("g (float[2, 8] x, float h) => (float[2, 8] y) { a = Tanh(x)  y = Clip(a, , h) }")
    planned_as_stock(model, [{"x": normal(seed, 2, 8), "h": np.array(0.1, np.float32)} for seed in (0, 1)])


def test_tensors_without_elements() -> None:
    model = parse(
        "g (float[2, 0] x, float[2, 4] w) => (float[2, 4] y, float[2, 0] z) {"
        "z = Relu(x)  c = Concat <axis = 1> (z, w)  y = Neg(c) }"
    )
    feeds = [{"x": normal(seed, 2, 0), "w": normal(seed, 2, 4)} for seed in (0, 1)]
    assert all("z" not in planned_names(plan) for plan in planned_as_stock(model, feeds).values())


def test_a_model_of_nothing_but_empty_tensors() -> None:
    model = parse("g (float[2, 0] x) => (float[2, 0] y) { z = Relu(x)  y = Neg(z) }")
    plans = planned_as_stock(model, [{"x": normal(0, 2, 0)}] * 2, differs=False)
    assert all(plan.arena_bytes == 0 for plan in plans.values())


def test_scalars() -> None:
    model = parse("g (float x) => (float y) { a = Exp(x)  b = Neg(a)  y = Tanh(b) }")
    planned_as_stock(model, [{"x": np.array(value, np.float32)} for value in (0.5, -1.5)])


def test_a_value_that_is_input_and_output() -> None:
    model = parse("g (float[2, 8] x) => (float[2, 8] x, float[2, 8] y) { y = Relu(x) }")
    planned_as_stock(model, TWO_BY_EIGHT)


def test_a_model_that_only_hands_its_input_on() -> None:
    model = parse("g (float[2, 8] x) => (float[2, 8] x) { unused = Relu(x) }")
    planned_as_stock(model, TWO_BY_EIGHT)


def test_an_initializer_that_is_an_output() -> None:
    model = parse("g (float[2] x) => (float[2] c, float[2] y) <float[2] c = {1, 2}> { a = Add(x, c)  y = Neg(a) }")
    planned_as_stock(model, [{"x": normal(seed, 2)} for seed in (0, 1)])


def test_a_constant_node_that_is_an_output() -> None:
    model = parse(
        "g (float[2] x) => (float[2] c, float[2] y) { c = Constant <value = float[2] {1, 2}> ()  y = Add(x, c) }"
    )
    planned_as_stock(model, [{"x": normal(seed, 2)} for seed in (0, 1)])


def test_a_constant_that_is_an_output_and_captured_by_a_subgraph() -> None:
    model = parse(
        "g (float[2] x, bool b) => (float[2] c, float[2] y) { c = Constant <value = float[2] {1, 2}> ()  y = If(b) <"
        "then_branch = t () => (float[2] o) { o = Add(x, c) }, else_branch = e () => (float[2] p) { p = Sub(x, c) }> }"
    )
    planned_as_stock(model, [{"x": normal(seed, 2), "b": np.array(seed == 0)} for seed in (0, 1)])


def test_a_value_listed_as_two_outputs() -> None:
    model = parse("g (float[2, 8] x) => (float[2, 8] y, float[2, 8] z, float[2, 8] y) { y = Relu(x)  z = Neg(y) }")
    planned_as_stock(model, TWO_BY_EIGHT)


def test_a_value_read_twice_by_one_node_and_again_in_a_subgraph() -> None:
    model = parse(
        "g (float[2, 8] x, bool c) => (float[2, 8] y) { a = Relu(x)  b = Mul(a, a)  y = If(c) <"
        "then_branch = t () => (float[2, 8] o) { o = Add(a, b) }, else_branch = e () => (float[2, 8] p) {"
        "p = Sub(b, a) }> }"
    )
    feeds = [{"x": normal(0, 2, 8), "c": np.array(c)} for c in (True, False)]
    for plan in planned_as_stock(model, feeds).values():
        assert {"a", "b"} <= _reads(plan, "If")


def test_an_output_that_views_another_output() -> None:
    model = parse(
        "g (float[2, 8] x) => (float[2, 8] a, float[16] b, float[16] y) { a = Relu(x)"
        "s = Constant <value_ints = [16]> ()  b = Reshape(a, s)  y = Neg(b) }"
    )
    planned_as_stock(model, TWO_BY_EIGHT)


def test_windows_of_pooling_that_begin_in_the_padding_are_not_counted() -> None:
    """ONNX's inference counts them before set 22, nobody computes them; indices are as large as what they point at."""
    window = "kernel_shape = [2, 2], strides = [2, 2], pads = [1, 1, 1, 1], ceil_mode = 1"
    model = parse(
        "g (float[1, 2, 7, 7] x) => (float[1, 2, H, W] y, float[1, 2, H, W] z, int64[1, 2, H, W] k) {"
        f"a, i = MaxPool <{window}> (x)  b = AveragePool <{window}> (x)  y = Relu(a)  z = Exp(b)  k = Neg(i) }}"
    )
    planned_as_stock(model, [{"x": normal(seed, 1, 2, 7, 7)} for seed in (0, 1)])


def test_a_short_time_transform_without_the_attribute_is_one_sided() -> None:
    """ONNX's inference takes it as two-sided: the product behind it would contradict it."""
    model = parse(
        "g (float[1, 24] x) => (float[1, W, 1] y) <float[8] window = {0.1, 0.3, 0.7, 1, 1, 0.7, 0.3, 0.1},"
        "float[5, 1] w = {1, 2, 3, 4, 5}> {"
        "h = Constant <value_int = 4> ()  s = STFT(x, h, window)  p = ReduceSumSquare <axes = [3], keepdims = 0> (s)"
        "a = Sqrt(p)  y = MatMul(a, w) }"
    )
    planned_as_stock(model, [{"x": normal(seed, 1, 24)} for seed in (0, 1)])


def test_half_precision_needs_a_plan_for_the_device() -> None:
    half = parse("g (float16[2, 8] x) => (float16[2, 8] y) { a = Tanh(x)  b = Exp(a)  y = Neg(b) }")
    feeds = [{"x": normal(seed, 2, 8).astype(np.float16)} for seed in (0, 1)]
    planned_as_stock(half, feeds, devices=["cpu"])
    with pytest.raises(memonger.SessionError, match=r"InsertedPrecisionFreeCast.*device='cpu'"):
        memonger.Session(memonger.search_plan(half, device="none", mode="inference")).run(feeds[0])


def test_a_planned_file_of_each_plan_runs_the_same(tmp_path: Path) -> None:
    model = parse(LOOP)
    feed = {"x": normal(0, 2, 8), "n": np.array(3)}
    for device, plan in planned_as_stock(model, [feed, {"x": normal(1, 2, 8), "n": np.array(2)}]).items():
        path = tmp_path / f"{device}.onnx"
        plan.save(path)
        again = memonger.Plan.load(path)
        mine, theirs = memonger.Session(plan).run(feed), memonger.Session(again).run(feed)
        assert all(np.array_equal(mine[name], theirs[name]) for name in mine)


def test_a_model_that_hands_on_what_it_is_given_has_a_budget_and_a_frontier() -> None:
    model = networks.model_of([], {"x": ["N", 4]}, {"x": ["N", 4]})
    plan = memonger.search_plan(model, mode="inference", batch=3)
    points = memonger.pareto(model, mode="inference", batch=3)
    assert [point.total_bytes for point in points] == [plan.total_bytes]
    with pytest.raises(memonger.BudgetError, match=f"none below {plan.total_bytes} bytes can work"):
        memonger.search_plan(model, mode="inference", batch=3, budget=plan.total_bytes - 1)
    assert memonger.fit(model, memory=3 * plan.total_bytes).size == 9
