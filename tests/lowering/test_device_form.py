"""The device form: what onnxruntime's optimizer makes of a model, in one order."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from memonger.devices import CPU
from memonger.ir.model import Model
from memonger.ir.values import static_shape
from memonger.lowering import cpu_convolutions
from memonger.lowering.device_form import LoweringSettings, device_form, forget_below_zero
from memonger.model.load import load


@pytest.mark.skipif(cpu_convolutions.block_size() == 1, reason="this machine has no blocked layout")
def test_branches_that_leave_a_blocked_layout_have_one_order() -> None:
    """Four outputs, each behind a node that onnxruntime inserts in the order of addresses."""
    outputs = [f"y{number}" for number in range(4)]
    text = f"""<ir_version: 10, opset_import: ["": 20]>
        g (float[1,32,4,4] x) => ({", ".join(f"float[1,32,4,4] {name}" for name in outputs)}) {{
            x1 = Conv <kernel_shape=[1,1]> (x, w) {"".join(f"{name} = Conv (x1, w) " for name in outputs)} }}"""
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros((32, 32, 1, 1), np.float32), "w"))
    lowered = [device_form(load(proto), CPU, LoweringSettings(threads=1)).model for _ in range(4)]
    assert sum(node.op_type == "ReorderOutput" for node in lowered[0].graph) == len(outputs)
    assert len({tuple(str(node.name) for node in model.graph) for model in lowered}) == 1


@pytest.mark.parametrize(
    ("call", "outputs", "operator"),
    [
        ("y = Dropout <seed = 3> (h)", "float[2,3] y", "Identity"),
        ("y, mask = Dropout (h)", "float[2,3] y", "Identity"),
        ("y, mask = Dropout (h)", "float[2,3] y, bool[2,3] mask", "Dropout"),
        ("y = Dropout (h, ratio, yes)", "float[2,3] y", "Dropout"),
    ],
)
def test_an_output_that_nothing_is_dropped_from_has_no_mask(call: str, outputs: str, operator: str) -> None:
    text = f"""<ir_version: 10, opset_import: ["": 20]>
        g (float[2,3] x) => ({outputs}) <float ratio = {{0.5}}, bool yes = {{1}}> {{ h = Relu (x) {call} }}"""
    lowered = device_form(load(onnx.parser.parse_model(text)), CPU, LoweringSettings(threads=1)).model
    assert [node.op_type for node in lowered.graph] == ["Relu", operator]


def test_sizes_below_zero_that_onnxruntime_infers_in_branches_are_open() -> None:
    """A plan's file, where -1 stands for a size that is open, would be taken for another model's."""
    text = """<ir_version: 10, opset_import: ["": 20]>
        g (float[5] x, bool b) => (float[n] y) { y = If (b) <then_branch = t () => (float[-1] p) { p = Neg (x) },
            else_branch = e () => (float[5] q) { q = Relu (x) }> }"""
    model = Model(ir.from_proto(onnx.parser.parse_model(text)), "model")
    assert forget_below_zero(model)
    sizes = {str(node.outputs[0].name): static_shape(node.outputs[0]) for node in model.ir.graph.all_nodes()}
    assert sizes == {"y": None, "p": None, "q": (5,)}
    assert not forget_below_zero(model)


def test_bodies_have_no_names_of_values_around_them() -> None:
    """onnxruntime makes a Split of these, here and in the body, calls what both give alike, and doesn't read that."""
    apart = "a{0} = Gather <axis = 1> ({1}, zero) b{0} = Gather <axis = 1> ({1}, one) c{0} = Sub (a{0}, b{0})"
    text = f"""<ir_version: 10, opset_import: ["": 20]>
        g (float[5,2] x, int64 n) => (float[5] y) <int64 zero = {{0}}, int64 one = {{1}}, bool yes = {{1}}> {{
            {apart.format("", "x")}
            y = Loop (n, yes, c) <body = t (int64 i, bool go, float[5] d) => (bool on, float[5] f) {{
                h = Exp (x) {apart.format("2", "h")} f = Add (d, c2) on = Identity (go) }}> }}"""
    lowered = device_form(load(onnx.parser.parse_model(text)), CPU, LoweringSettings(threads=1)).model
    splits = [node for node in lowered.graph.all_nodes() if node.op_type == "Split"]
    assert len(splits) == 2
    assert len({value.name for node in splits for value in node.outputs}) == 4
