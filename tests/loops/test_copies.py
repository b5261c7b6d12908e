"""Large images that are read again much later are computed again: same results, and nothing waits for them."""

import math

import onnx_ir as ir
import pytest

pytest.importorskip("onnxruntime")

from memonger.loops.copies import with_copies
from memonger.model.load import load
from tests.support.stock import normal, parse, run_stock, same

SKIPS = """
    g (float[1, 3, 32, 32] x, float[16, 3, 3, 3] w, float[16, 16, 3, 3] v, float[16, 32, 3, 3] u)
        => (float[1, 16, 32, 32] y) {
        a = Conv <pads = [1, 1, 1, 1]> (x, w)  b = Relu (a)
        p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (b)
        c = Conv <pads = [1, 1, 1, 1]> (p, v)  d = Relu (c)  e = Conv <pads = [1, 1, 1, 1]> (d, v)  f = Relu (e)
        h = Resize <mode = "nearest"> (f, , twice)  j = Concat <axis = 1> (h, b)
        y = Conv <pads = [1, 1, 1, 1]> (j, u)
    }
"""


TWO_SKIPS = """
    g (float[1, 3, 32, 32] x, float[16, 3, 3, 3] w, float[16, 16, 3, 3] v, float[16, 48, 3, 3] u)
        => (float[1, 16, 32, 32] y) {
        a = Conv <pads = [1, 1, 1, 1]> (x, w)  b = Relu (a)  c = Conv <pads = [1, 1, 1, 1]> (b, v)  d = Relu (c)
        p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (d)
        e = Conv <pads = [1, 1, 1, 1]> (p, v)  f = Relu (e)  i = Conv <pads = [1, 1, 1, 1]> (f, v)  k = Relu (i)
        h = Resize <mode = "nearest"> (k, , twice)  j = Concat <axis = 1> (h, d, b)
        y = Conv <pads = [1, 1, 1, 1]> (j, u)
    }
"""
"""The second image that waits is made of the first."""


def _loaded(text: str = SKIPS) -> ir.Model:
    model = parse(text, opset=17)
    model.graph.initializer.append(
        ir.serde.serialize_tensor(ir.tensor([1.0, 1.0, 2.0, 2.0], dtype=ir.DataType.FLOAT, name="twice"))
    )
    return load(model).ir


def test_an_image_that_waits_is_computed_again() -> None:
    model = _loaded()
    made = with_copies(model, dict.fromkeys((str(node.name) for node in model.graph), 1.0), 2.0, 1 << 17)
    assert made is not None
    copy, seconds = made
    assert seconds == 2
    assert [node.op_type for node in copy.graph].count("Conv") == 5
    (join,) = (node for node in copy.graph if node.op_type == "Concat")
    chain, steps = join.inputs[1], {value: n for n, node in enumerate(copy.graph) for value in node.outputs}
    assert chain is not None
    assert str(chain.name).startswith("b.again")
    assert steps[chain] == steps[join.outputs[0]] - 1
    dims = {"x": (1, 3, 32, 32), "w": (16, 3, 3, 3), "v": (16, 16, 3, 3), "u": (16, 32, 3, 3)}
    feeds = {name: normal(seed, *shape) for seed, (name, shape) in enumerate(dims.items())}
    want, got = (run_stock(ir.serde.serialize_model(each), feeds, "ORT_ENABLE_ALL") for each in (model, copy))
    assert same(got["y"], want["y"])


def test_a_second_image_behind_one_that_is_computed_again_reads_that() -> None:
    """Nothing is computed a third time, nor does the second wait for the first as it was."""
    model = _loaded(TWO_SKIPS)
    made = with_copies(model, dict.fromkeys((str(node.name) for node in model.graph), 1.0), 4.0, 1 << 17)
    assert made is not None
    copy, seconds = made
    assert seconds == 4, "each of the four nodes once"
    assert [node.op_type for node in copy.graph].count("Conv") == 5 + 2
    again = {str(v.name).split(".")[0]: v for node in copy.graph for v in node.outputs if ".again" in str(v.name)}
    assert again.keys() == set("abcd")
    (join,) = (node for node in copy.graph if node.op_type == "Concat")
    assert list(join.inputs[1:]) == [again["d"], again["b"]]
    second = again["c"].producer()
    assert second is not None
    assert second.inputs[0] is again["b"]
    steps = {node: step for step, node in enumerate(copy.graph)}
    pool = next(node for node in copy.graph if node.op_type == "MaxPool")
    assert min(steps[v.producer()] for v in again.values()) > steps[pool], "only where they are read"  # type: ignore[index]
    dims = {"x": (1, 3, 32, 32), "w": (16, 3, 3, 3), "v": (16, 16, 3, 3), "u": (16, 48, 3, 3)}
    feeds = {name: normal(seed, *shape) for seed, (name, shape) in enumerate(dims.items())}
    want, got = (run_stock(ir.serde.serialize_model(each), feeds, "ORT_ENABLE_ALL") for each in (model, copy))
    assert same(got["y"], want["y"])


def test_a_second_image_whose_own_nodes_take_too_long_is_kept() -> None:
    model = _loaded(TWO_SKIPS)
    made = with_copies(model, dict.fromkeys((str(node.name) for node in model.graph), 1.0), 3.0, 1 << 17)
    assert made is not None
    (join,) = (node for node in made[0].graph if node.op_type == "Concat")
    assert made[1] == 2
    assert [str(v.name).split(".")[1:] for v in join.inputs[1:] if v is not None] == [[], ["again"]]


@pytest.mark.parametrize(("most_seconds", "whole"), [(1.0, 1 << 17), (math.inf, 1 << 21)])
def test_what_takes_too_long_or_is_small_is_kept(most_seconds: float, whole: int) -> None:
    model = _loaded()
    assert with_copies(model, dict.fromkeys((str(node.name) for node in model.graph), 1.0), most_seconds, whole) is None
