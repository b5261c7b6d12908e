"""What kernels are known to ask for is what onnxruntime says that they asked for."""

import onnx_ir as ir
import pytest

pytest.importorskip("onnxruntime")

from memonger.graph import kernels
from memonger.lowering import calibrate
from memonger.model.load import load
from tests.support.stock import parse

MODEL = """g (float[2, 8, 20, 20] x, float[1, 8, 6, 6] s, float[3, 8, 40, 40] l, float[8, 4, 3, 3] halves,
    float[8, 8, 3, 3] w, float[16, 1, 3, 3] grouped, float[64, 8, 3, 3] many, float[4, 8, 1, 1] point,
    float[8, 4, 2, 2] up) => (float[2, 64, 7, 7] y) {
    plain = Conv <pads = [1, 1, 1, 1]> (x, w)
    strided = Conv <strides = [3, 3], kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, many)
    depthwise = Conv <group = 8> (x, grouped)
    in_groups = Conv <group = 2> (l, halves)
    pointwise = Conv (x, point)
    halved = Conv <strides = [2, 2]> (x, point)
    alone = Conv <pads = [1, 1, 1, 1]> (s, w)
    wide = Conv (s, many)
    larger = ConvTranspose <strides = [2, 2]> (x, up)
    normal = LRN <size = 5> (x)
    y = Relu (strided)
}"""


@pytest.mark.parametrize("threads", [1, 2])
def test_workspace_is_what_was_asked_for(threads: int) -> None:
    proto = parse(MODEL, opset=17)
    model = load(proto).ir
    outputs = [node.outputs[0] for node in model.graph if not node.outputs[0].is_graph_output()]
    model.graph.outputs.extend(outputs)
    for node in model.graph:
        node.name = node.outputs[0].name
    seen = calibrate.measured(model, threads)
    assert seen is not None
    known = {str(node.name): sum(kernels.workspace(node, threads)) for node in model.graph}
    assert {name: size for name, size in known.items() if size} == {n: size for n, size in seen.items() if size}
    assert len(seen) > 5


def test_a_loop_hands_on_what_it_carries_in_two_buffers() -> None:
    scan = parse(
        """g (float[4] h, float[9, 4] x) => (float[4] l, float[9, 4] y) {
            l, y = Scan <num_scan_inputs = 1, body = b (float[4] s, float[4] i) => (float[4] t, float[4] o) {
                t = Add (s, i)  o = Neg (t)
            }> (h, x)
        }""",
        opset=17,
    )
    (node,) = load(scan).ir.graph
    assert isinstance(node, ir.Node)
    assert (kernels.workspace(node, 1), kernels.turns(node)) == ([16, 16], 9)
