"""Plans in chunks for ranges of sizes: one layout, in which slices end with their axis; at each size stock's bits."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import memonger
from memonger.graph.ranged import at_sizes
from memonger.graph.verify import verify
from memonger.ir.values import nbytes
from memonger.shapes import open_dims
from memonger.shapes.ranges import shapes_at
from memonger.shapes.sizes import Sizes
from tests.support import networks
from tests.support.one_node_executor import run_poisoned
from tests.support.stock import normal

STEPS = (
    "Conv<pads=[1,1,1,1]>({0}, k)", "Relu({0})", "Sigmoid({0})", "Add({0}, x)", "Mul({0}, gain)", "Mul({0}, {1})",
    "MaxPool<kernel_shape=[3,3], pads=[1,1,1,1]>({0})", "Transpose<perm=[0,1,3,2]>({0})", "Softmax<axis=3>({0})",
    "Sub({0}, mean)", "MatMul({0}, turn)", "Reshape({0}, rows)", "Expand({0}, one)",
)  # fmt: skip
"""What a random graph is made of, each of an image; `BARRIERS` are read whole."""

BARRIERS = ("ReduceMean<keepdims=1>({0}, nought)", "CumSum({0}, first)")
"""Along the batch: no node of these runs in slices."""


def _graph(steps: list[int], barrier: int | None, side: int) -> onnx.ModelProto:
    text, values = "mean = ReduceMean<keepdims=1>(x, three) ", ["x", "x"]
    for number, step in enumerate(steps):
        text += f"v{number} = {STEPS[step].format(values[-1], values[-2])} "
        values.append(f"v{number}")
        if barrier is not None and number == len(steps) // 2:
            text += f"b = {BARRIERS[barrier].format(values[-1])} w = Add(b, {values[-1]}) "
            values.append("w")
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]> g (float[n,3,{side},{side}] x) => (float[n,3,{side},{side}] y)
        {{ {text} y = Neg({values[-1]}) }}"""
    )
    arrays = {
        "k": normal(0, 3, 3, 3, 3) / 4, "gain": normal(1, 3, 1, 1), "turn": normal(2, side, side) / 4,
        "nought": np.array([0]), "three": np.array([3]), "first": np.int64(0),
        "rows": np.array([0, 3, -1, side]), "one": np.array([3, 1, 1]),
    }  # fmt: skip
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(a), name) for name, a in arrays.items())
    return model


def at_size(plan: memonger.Plan, **sizes: int) -> memonger.Plan:
    """The plan with the shapes of one size, at the same offsets."""
    model = plan.model.clone()
    open_dims.put(model, Sizes(model), shapes_at(open_dims.largest(model, plan.ranges), plan.ranges, sizes))
    bytes_of = {str(v.name): nbytes(v) or 0 for node in model.graph for v in node.outputs}
    graph = at_sizes(plan.graph, {v: bytes_of[plan.graph.values[v]] for v in plan.offsets})
    return dataclasses.replace(plan, model=model, graph=graph)


@settings(max_examples=5)
@given(
    steps=st.lists(st.integers(0, len(STEPS) - 1), min_size=2, max_size=7),
    barrier=st.sampled_from([None, None, 0, 1]),
    side=st.sampled_from([4, 5, 8]),
    range_=st.sampled_from([(1, 4), (1, 7), (2, 8, 2), (3, 5)]),
    chunks=st.integers(2, 5),
    poisoned=st.integers(1, 5),
)
def test_each_size_gives_the_bits_of_stock_and_passes_the_checker(
    steps: list[int], barrier: int | None, side: int, range_: tuple[int, ...], chunks: int, poisoned: int
) -> None:
    assume(chunks <= range_[1])
    model = _graph(steps, barrier, side)
    options: dict[str, Any] = {"mode": "inference", "dims": {"n": range_}, "device": "cpu", "threads": 1}
    try:
        plan = memonger.search_plan(model, chunks=chunks, **options)
    except memonger.PlanError as error:
        if "nothing can run in chunks along that axis" not in str(error):
            raise
        return
    session, stock = memonger.Session(plan), networks.stock(model)
    assert plan.arena_bytes <= memonger.search_plan(model, chunks="off", **options).total_bytes
    for n in range(range_[0], range_[1] + 1, *range_[2:]):
        feeds = {"x": normal(n, n, 3, side, side)}
        expected = networks.run_stock(stock, feeds)
        session.arena.fill(0xFF)
        assert networks.same_bits(session.run(feeds), expected)
        here = at_size(plan, n=n)
        verify(here.graph, here.offsets, here.arena_bytes, here.alignment)
        if n == poisoned or n == range_[1]:
            assert networks.same_bits(run_poisoned(here, feeds), expected)


def test_a_range_of_batches_takes_what_its_largest_takes(tmp_path: Path) -> None:
    """Without being asked for; from a file, too."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]> g (float[n,3,32,32] x) => (float[n,96,1,1] y)
        { a = Conv<pads=[1,1,1,1]>(x, k) b = Relu(a) y = GlobalAveragePool(b) }"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(normal(0, 96, 3, 3, 3) / 4, "k"))
    options: dict[str, Any] = {"mode": "inference", "device": "cpu", "threads": 1, "max_overhead": 1e9}
    one, whole = memonger.search_plan(model, batch=16, **options), memonger.search_plan(model, chunks="off", batch=16)
    plan = memonger.search_plan(model, dims={"n": (1, 16)}, **options)
    assert plan.chunks
    assert plan.arena_bytes <= 1.1 * one.arena_bytes < whole.arena_bytes / 4
    plan.save(tmp_path / "planned.onnx")
    session, stock = memonger.Session(tmp_path / "planned.onnx"), networks.stock(model)
    for n in (16, 1, 7):
        feeds = {"x": normal(n, n, 3, 32, 32)}
        assert networks.same_bits(session.run(feeds), networks.run_stock(stock, feeds))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("w, y = LSTM<hidden_size=1>(x, i, r)", r"\(LSTM\) takes no slice without elements"),
        ("y = Reshape(x, joined)", "can't be cut along an axis of '.*': where the input is smaller"),
        ("y = Tanh(x)", r"has 'x', whose sizes vary along more than one axis"),
    ],
)
def test_what_cannot_be_cut_at_each_size_is_named(body: str, message: str) -> None:
    axis = 1 if "LSTM" in body else 0
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]> g (float[n,m,4] x) => (float[p,q,r] y) {{ {body} }}"""
    )
    arrays = {"i": normal(0, 1, 4, 4), "r": normal(1, 1, 4, 1), "joined": np.array([1, -1, 4])}
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(array, name) for name, array in arrays.items() if f"{name}" in body.split("(")[1]
    )
    with pytest.raises(memonger.PlanError, match=message):
        memonger.search_plan(model, mode="inference", device="cpu", dims={"n": (2, 4), "m": (2, 4)}, chunks=f"{axis}:2")
