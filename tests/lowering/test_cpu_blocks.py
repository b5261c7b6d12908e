"""Images that are joined where they lie in blocks of channels."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

import memonger
from memonger.devices import CPU
from memonger.ir.operators import operator_name
from memonger.lowering import cpu_convolutions
from memonger.lowering.device_form import LoweringSettings, device_form
from memonger.model.load import load
from tests.support.stock import normal, parse, run_stock, same

pytestmark = pytest.mark.skipif(cpu_convolutions.block_size() == 1, reason="this machine has no blocked layout")

LEVEL = """
    p = Conv <pads = [1, 1, 1, 1]> (x, w0)  d = Conv <pads = [1, 1, 1, 1], strides = [2, 2]> (p, w1)
    u = ConvTranspose <strides = [2, 2]> (d, t0)  j = Concat <axis = 1> (u, p)
    y = Conv <pads = [1, 1, 1, 1]> (j, w2)
"""
"""What a U-Net does at a level: it joins what it makes larger again with what was there before."""


def _model(body: str = LEVEL, results: str = "float[1,32,16,16] y") -> onnx.ModelProto:
    model = parse(f"g (float[1,3,16,16] x) => ({results}) {{ {body} }}", opset=20)
    shapes = {"w0": (32, 3, 3, 3), "w1": (32, 32, 3, 3), "t0": (32, 32, 2, 2), "w2": (32, 64, 3, 3)}
    for number, (name, shape) in enumerate(shapes.items()):
        model.graph.initializer.append(numpy_helper.from_array(normal(number, *shape) / np.float32(8), name))
    return model


def _operators(model: ir.Model) -> list[str]:
    return [operator_name(node).removeprefix("com.microsoft.nchwc::") for node in model.graph]


def test_what_was_in_blocks_is_joined_in_blocks() -> None:
    model, feeds = _model(), {"x": normal(9, 1, 3, 16, 16)}
    plan = memonger.search_plan(model, chunks="off")
    assert _operators(plan.model) == [
        "Conv", "Conv", "ReorderOutput", "ConvTranspose", "ReorderInput", "Concat", "Conv", "ReorderOutput"
    ]  # fmt: skip
    plan.verify()
    want = run_stock(model, feeds, "ORT_ENABLE_ALL")
    assert same(memonger.Session(plan).run(feeds)["y"], want["y"])


@pytest.mark.parametrize("results", ["float[1,64,16,16] j", "float[1,64,16,16] z"])
def test_what_is_read_otherwise_too_is_joined_as_it_was(results: str) -> None:
    model = _model(f"{LEVEL} z = Neg (j)", f"float[1,32,16,16] y, {results}")
    found = _operators(device_form(load(model), CPU, LoweringSettings(threads=1)).model)
    assert found.index("Concat") < found.index("ReorderInput")
