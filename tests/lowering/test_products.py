"""Products of one weight as one product: what is joined, what stays apart, and that both give the same."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

pytest.importorskip("onnxruntime")

from memonger.lowering.lowered import portable
from memonger.model.load import load
from memonger.tiling.joining import joined_products
from tests.support import networks
from tests.support.stock import normal, parse


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
    "second",
    ["Gemm(b, u, v)", "Gemm(b, w)", "Gemm <alpha = 2.0> (b, w, v)", "Gemm(b, w, whole)", "Gemm <transA = 1> (b, w, v)"],
    ids=["another weight", "nothing added", "another factor", "added row by row", "columns"],
)
def test_products_that_differ_in_more_than_their_rows_stay_apart(second: str) -> None:
    model = _model(
        f"""agraph (float[8,8] a, float[8,8] b, float[8,8] whole) => (float[8,8] x, float[8,8] y) {{
            [n1] x = Gemm(a, w, v)
            [n2] y = {second}
        }}""",
        w=normal(9, 8, 8), u=normal(7, 8, 8), v=normal(8, 8),
    )  # fmt: skip
    assert _parts(model) == []


def test_what_is_added_row_by_row_keeps_products_apart_even_where_it_is_the_same() -> None:
    model = _model(
        """agraph (float[8,8] a, float[8,8] b, float[8,8] c) => (float[8,8] x, float[8,8] y) {
            [n1] x = Gemm(a, w, c)
            [n2] y = Gemm(b, w, c)
        }""",
        w=normal(9, 8, 8),
    )  # fmt: skip
    assert _parts(model) == []


def test_products_of_many_rows_stay_apart() -> None:
    model = _model(
        """agraph (float[200,8] a, float[200,8] b) => (float[200,4] x, float[200,4] y) {
            [n1] x = MatMul(a, w)
            [n2] y = MatMul(b, w)
        }""",
        w=normal(9, 8, 4),
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
