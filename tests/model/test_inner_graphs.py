"""Which bodies are found in a model, in which order, and what they say themselves that counts."""

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import memonger
from memonger.ir.values import graphs, inner_graphs
from tests.support import networks
from tests.support.stock import parse

NESTED = """g (float[2] x, bool c) => (float[2] y, float[2] z) {
    y = If(c) <then_branch = a () => (float[2] p) {
            p = If(c) <then_branch = b () => (float[2] q) { q = Neg(x) },
                       else_branch = d () => (float[2] r) { r = Abs(x) }> },
        else_branch = e () => (float[2] s) { s = Exp(x) }>
    t = Relu(y)
    z = If(c) <then_branch = f () => (float[2] u) { u = Neg(t) }, else_branch = h () => (float[2] v) { v = Abs(t) }>
}"""


@pytest.mark.parametrize("text", [NESTED, "g (float[2] x) => (float[2] y) { y = Neg(x) }"])
def test_bodies_are_found_as_onnx_ir_finds_them(text: str) -> None:
    model = ir.from_proto(parse(text, opset=18))
    assert list(graphs(model)) == list(model.graphs())
    assert list(inner_graphs(model.graph)) == list(model.graph.subgraphs())


def test_bodies_in_bodies_come_before_their_neighbours() -> None:
    names = [graph.name for graph in graphs(ir.from_proto(parse(NESTED, opset=18)))]
    assert names == ["g", "a", "b", "d", "e", "f", "h"]


@pytest.mark.parametrize("device", ["cpu", "none"])
@pytest.mark.parametrize("dims", [{"n": 5}, {"n": (2, 9)}], ids=["one", "range"])
def test_a_scan_keeps_the_shape_that_it_says_a_turn_returns(dims: dict[str, Any], device: str) -> None:
    """A Loop's result has none by inference, nor has what is computed of it: onnxruntime refuses to run the Scan."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[n,4] x, bool c) => (float[n,4] y, float[4] last) <int64 three={3}, float[4] z={0,0,0,0}> {
            last, y = Scan<num_scan_inputs=1, body=b (float[4] s, float[4] r) => (float[4] so, float[4] o) {
                q = Loop<body=turn (int64 i, bool ci, float[4] a) => (bool co, float[4] ao) {
                    co = Identity(ci)
                    ao = If<then_branch=t () => (float[4] w) { w = Add(a, r) },
                            else_branch=e () => (float[4] w) { w = Mul(a, r) }>(c)
                }>(three, c, s)
                so = Add(q, r) o = Relu(so) }>(z, x) }""")
    plan = memonger.search_plan(model, mode="inference", dims=dims, device=device)
    feed = {"x": np.arange(20, dtype=np.float32).reshape(5, 4), "c": np.array(True)}
    assert networks.same_bits(memonger.Session(plan).run(feed), networks.run_stock(networks.stock(model), feed))
