"""Products of one weight as one product: what is joined, that both give the same, and when training steps take it."""

import functools
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import memonger
import models

pytest.importorskip("onnxruntime")

from memonger.lowering.lowered import portable
from memonger.model.load import load
from memonger.tiling import joining
from memonger.tiling.joining import JoinedProduct, joined_products
from tests.support import networks
from tests.support.stock import normal, parse
from tests.support.training_models import trained

BATCH, STEPS = 16, 4
JOINED = ".joined"


def _model(text: str, **arrays: np.ndarray) -> ir.Model:
    model = parse(text)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    return portable(load(model)).model


def _run(model: ir.Model) -> dict[str, np.ndarray]:
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto, full_check=True)
    feeds = {str(v.name): normal(number, *map(int, v.shape or ())) for number, v in enumerate(model.graph.inputs)}
    return networks.run_stock(networks.stock(proto, "ORT_DISABLE_ALL"), feeds)


def _parts(model: ir.Model) -> list[tuple[str, ...]]:
    """What is joined, once it is seen to give the same as the model."""
    joined, products = joined_products(model)
    expected, results = _run(model), _run(joined)
    assert [str(v.name) for v in joined.graph.outputs] == list(expected)
    for name, array in expected.items():
        np.testing.assert_allclose(results[name], array, rtol=1e-5, atol=1e-5)
    return [product.parts for product in products]


def test_products_of_one_weight_are_joined_whatever_their_rows() -> None:
    model = _model(
        """agraph (float[3,8] a, float[5,8] b, float[1,8] c) => (float[3,4] x, float[5,4] y, float[1,4] z) {
            [n1] x = Gemm(a, w, v)
            [n2] y = Gemm(b, w, v)
            [n3] z = Gemm(c, w, v)
        }""",
        w=normal(9, 8, 4), v=normal(8, 4),
    )  # fmt: skip
    assert _parts(model) == [("n1", "n2", "n3")]


@pytest.mark.parametrize(
    ("products", "rows"),
    [
        ("x = Gemm(a, w, v) [n2] y = Gemm(b, u, v)", 8),  # another weight
        ("x = Gemm(a, w, v) [n2] y = Gemm(b, w)", 8),  # nothing added
        ("x = Gemm(a, w, v) [n2] y = Gemm <alpha = 2.0> (b, w, v)", 8),  # another factor
        ("x = Gemm(a, w, c) [n2] y = Gemm(b, w, c)", 8),  # added row by row
        ("x = Gemm(a, w, v) [n2] y = Gemm <transA = 1> (b, w, v)", 8),  # columns
        ("x = MatMul(a, w) [n2] y = MatMul(b, w)", 200),  # many rows
    ],
)
def test_products_that_differ_in_more_than_their_rows_or_have_many_stay_apart(products: str, rows: int) -> None:
    kind = f"float[{rows},8]"
    model = _model(
        f"agraph ({kind} a, {kind} b, {kind} c) => ({kind} x, {kind} y) {{ [n1] {products} }}",
        w=normal(9, 8, 8), u=normal(7, 8, 8), v=normal(8, 8),
    )  # fmt: skip
    assert _parts(model) == []


def test_a_product_that_reads_another_waits_for_it() -> None:
    """Of a recurrent layer only the inputs' products are joined; its states depend on one another."""
    lines = "\n".join(
        f"[x{t}] p{t} = MatMul(i{t}, w)\n[h{t}] q{t} = MatMul(s{t}, u)\n[a{t}] s{t + 1} = Add(p{t}, q{t})"
        for t in range(4)
    )
    inputs = ", ".join(f"float[2,8] i{t}" for t in range(4))
    model = _model(
        f"agraph (float[2,8] s0, {inputs}) => (float[2,8] s4) {{\n{lines}\n}}", w=normal(9, 8, 8), u=normal(8, 8, 8)
    )
    assert _parts(model) == [("x0", "x1", "x2", "x3")]


def test_two_products_that_would_wait_for_each_other_are_not_both_joined() -> None:
    """a1 → b1 and b2 → a2: with both pairs joined each would need the other first."""
    model = _model(
        """agraph (float[2,8] i, float[2,8] j) => (float[2,8] x, float[2,8] y) {
            [a1] p = MatMul(i, w)
            [b2] q = MatMul(j, u)
            [b1] x = MatMul(p, u)
            [a2] y = MatMul(q, w)
        }""",
        w=normal(9, 8, 8), u=normal(8, 8, 8),
    )  # fmt: skip
    assert _parts(model) == [("a1", "a2")]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 2)), min_size=2, max_size=12))
def test_random_graphs_of_products_give_the_same(nodes: list[tuple[int, int, int]]) -> None:
    values, made = ["i0", "i1"], []
    for number, (one, other, weight) in enumerate(nodes):
        a, b = values[one % len(values)], values[other % len(values)]
        made += [
            helper.make_node("MatMul", [a, f"w{weight}"], [f"p{number}"], name=f"product{number}"),
            helper.make_node("Tanh", [f"p{number}"], [f"t{number}"], name=f"tanh{number}"),
            helper.make_node("Add", [f"t{number}", b], [f"v{number}"], name=f"add{number}"),
        ]
        values.append(f"v{number}")
    graph = helper.make_graph(
        made, "products",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [3, 4]) for name in ("i0", "i1")],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [3, 4]) for name in values[2:]],
        [numpy_helper.from_array(normal(weight, 4, 4) / 2, f"w{weight}") for weight in range(3)],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    parts = _parts(portable(load(model)).model)
    assert len({name for each in parts for name in each}) == sum(map(len, parts))


@functools.cache
def _training() -> memonger.Model:
    settings = {"seq_len": STEPS, "num_hidden": 32, "num_layers": 1, "vocabulary": 50, "dropout": 0.3, "batch": BATCH}
    model = memonger.load(models.build_ir("lstm", training=True, **settings))
    return memonger.differentiate(model, loss="loss", optimizer=memonger.SGD(lr=0.05, momentum=0.9))


def _search(**options: Any) -> memonger.Plan:
    return memonger.search_plan(_training(), device="cpu", threads=1, chunks="off", **options)


@functools.cache
def _plan(strategy: str = "none") -> memonger.Plan:
    return _search(strategy=strategy)


@functools.cache
def _apart() -> memonger.Plan:
    """The plan with nothing recomputed whose products stay apart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joining, "joined_products", lambda model, apart=(): (model, ()))
        return _search(strategy="none")


def _joined(plan: memonger.Plan) -> list[str]:
    return [name for name in plan.graph.nodes if name.endswith(JOINED)]


def _assert_same(one: memonger.Plan, other: memonger.Plan) -> None:
    (losses, state), (expected_losses, expected_state) = trained(one, 3), trained(other, 3)
    assert losses == expected_losses
    assert state.keys() == expected_state.keys()
    for key, array in expected_state.items():
        np.testing.assert_array_equal(state[key], array, err_msg=key)


def test_inputs_of_all_steps_are_one_product_where_nothing_is_recomputed() -> None:
    plan, apart = _plan(), _apart()
    assert _joined(plan)
    assert not _joined(apart)
    assert plan.total_bytes <= apart.total_bytes
    assert len(plan.graph.nodes) < len(apart.graph.nodes)
    _assert_same(plan, apart)


def test_steps_that_are_recomputed_have_the_same_bits_and_products_of_their_own() -> None:
    plan = _plan("sweep")
    assert plan.recomputed
    assert not _joined(plan)
    _assert_same(plan, _plan())


def test_a_budget_that_needs_no_recomputation_takes_joined_products() -> None:
    budget = _plan().total_bytes
    plan = _search(budget=budget, effort=500)
    assert _joined(plan)
    assert plan.total_bytes <= budget
    less = _search(budget=budget - 4096, effort=500)
    assert not _joined(less)


def test_products_that_give_other_bits_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel may take another path for another number of rows."""
    refused = list[str]()

    def differs(model: object, joined: object, product: JoinedProduct, check: object) -> bool:
        refused.append(product.name)
        return len(refused) == 1

    monkeypatch.setattr(joining, "_differs", differs)
    plan = _search(strategy="none")
    assert refused[0] not in _joined(plan)
    assert 0 < len(_joined(plan)) < len(_joined(_plan()))


def test_joined_products_that_take_more_memory_are_left() -> None:
    """Towers of one weight that isn't trained: one after the other they need room for one wide value, not for four."""
    towers = "\n".join(
        f"[up{t}] u{t} = MatMul(i{t}, w)\n[bend{t}] r{t} = Relu(u{t})\n[down{t}] d{t} = MatMul(r{t}, v)"
        for t in range(4)
    )
    inputs = ", ".join(f"float[16,8] i{t}" for t in range(4))
    forward = parse(
        f"agraph ({inputs}) => (float[16,4] y) {{\n{towers}\n[sum] d = Sum(d0, d1, d2, d3)\n[scale] y = Mul(d, s)\n}}"
    )
    arrays = {"w": normal(0, 8, 512), "v": normal(1, 512, 4), "s": normal(2, 4)}
    forward.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    step = memonger.differentiate(forward, loss="mean_squared_error", optimizer=memonger.SGD(lr=0.1), wrt=["s"])
    assert [len(each.parts) for each in joined_products(portable(step).model)[1]] == [4, 4]
    plan = memonger.search_plan(step, device="cpu", threads=1, strategy="none")
    assert not _joined(plan)
    roomy = memonger.search_plan(step, device="cpu", threads=1, budget=2 * plan.total_bytes + 16 * 512 * 4 * 4)
    assert _joined(roomy)
