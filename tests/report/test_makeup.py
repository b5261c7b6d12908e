"""What a first run is told its memory is made of, and of which lever."""

import re

import numpy as np
import onnx
import pytest

import memonger
from memonger.report.makeup import makeup
from memonger.report.view import WEIGHT, View
from tests.support.stock import normal, parse


def _chain(layers: int, width: int) -> onnx.ModelProto:
    names = ["x", *(f"h{i}" for i in range(1, layers + 1))]
    steps = [f"{names[i]}r = Relu({names[i]}) {names[i + 1]} = MatMul({names[i]}r, w{i})" for i in range(layers)]
    model = parse(f"g (float[batch, {width}] x) => (float[batch, {width}] h{layers}) {{ {' '.join(steps)} }}")
    for i in range(layers):
        model.graph.initializer.append(onnx.numpy_helper.from_array(normal(i, width, width), f"w{i}"))
        model.graph.node[2 * i + 1].name = f"layer{i}/fc"
    return model


def test_the_largest_at_the_peak_are_named_by_the_node_they_belong_to() -> None:
    plan = memonger.search_plan(_chain(2, 16), batch=32, device="none", mode="inference")
    made = makeup(plan)
    assert [each.bytes for each in made.largest] == [2048, 2048, 2048, 1024, 1024]  # a step's two values, x, weights
    assert [each.words for each in made.largest[3:]] == [f"weights of layer{i}/fc 1.00 KiB" for i in range(2)]
    assert sum(each.bytes for each in made.largest) == plan.total_bytes
    assert made.lines[0].startswith("Largest at its peak: ")
    assert "Most of it is values (50 %)" in made.lever


def test_what_onnxruntime_named_is_called_after_its_reader() -> None:
    """Its optimizer writes the weights of a convolution in blocks of channels, under a name of its own."""
    pytest.importorskip("onnxruntime")
    model = parse("g (float[1, 16, 8, 8] x) => (float[1, 16, 8, 8] y) { a = Conv (x, w) y = Relu (a) }")
    model.graph.initializer.append(onnx.numpy_helper.from_array(normal(0, 16, 16, 1, 1), "w"))
    plan = memonger.search_plan(model, device="cpu", mode="inference")
    named = [one.name for one in View("", plan).rectangles if one.kind == WEIGHT]
    assert named == ["weights of y"]  # the node is fused, and named after what it gives
    assert "weights of y 1.00 KiB" in makeup(plan).lines[0]


def test_a_budget_that_is_named_can_be_held() -> None:
    pytest.importorskip("onnxruntime")
    model = _chain(4, 256)
    plan = memonger.search_plan(model, batch=1, device="cpu", mode="inference")
    named = re.search(r"budget='(\d+MiB)'", makeup(plan).lever)
    assert named is not None
    within = memonger.search_plan(model, batch=1, device="cpu", mode="inference", budget=named[1])
    assert within.window is not None
    assert within.total_bytes < plan.total_bytes
    assert "already" in makeup(within).lever or "values" in makeup(within).lever


def test_a_plan_below_its_weights_is_told_how_far_down_it_goes() -> None:
    """And the plan for that budget that nothing more is to be had."""
    pytest.importorskip("onnxruntime")
    model = _chain(8, 1024)
    plan = memonger.search_plan(model, batch=1, device="cpu", mode="inference", budget="24MiB")
    named = re.search(
        r"some stay in the plan's file already, and down to budget='(\d+MiB)' more of them can", makeup(plan).lever
    )
    assert named is not None
    least = memonger.search_plan(model, batch=1, device="cpu", mode="inference", budget=named[1])
    assert least.total_bytes < plan.total_bytes
    assert "and no more of them can" in makeup(least).lever


def test_training_is_told_of_a_budget_and_its_state_by_name() -> None:
    plan = memonger.search_plan(
        _chain(2, 16), batch=64, device="none", loss="mean_squared_error", optimizer=memonger.SGD(momentum=0.9)
    )
    made = makeup(plan)
    assert "computed again" in made.lever
    assert not re.search(r"\d+ [KM]iB", made.lever)  # nothing that wasn't tried
    assert np.all(np.diff([each.bytes for each in made.largest]) <= 0)
