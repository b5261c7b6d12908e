"""Which bodies are found in a model, and in which order."""

import onnx_ir as ir
import pytest

from memonger.ir.values import graphs, inner_graphs
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
