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
from memonger.graph import ranged
from memonger.graph.ranged import at_sizes
from memonger.graph.verify import verify
from memonger.ir.values import nbytes
from memonger.runtime import ranged as runtime_ranged
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
    share=st.sampled_from([-1.0, 1e9]),
)
def test_each_size_gives_the_bits_of_stock_and_passes_the_checker(
    steps: list[int], barrier: int | None, side: int, range_: tuple[int, ...], chunks: int, poisoned: int, share: float
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
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ranged, "SHARE", share)
        session, stock = memonger.Session(plan), networks.stock(model)
    for n in [*range(range_[0], range_[1] + 1, *range_[2:]), range_[0]]:
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
        """<ir_version: 10, opset_import: ["": 20]> g (float[n,3,24,24] x) => (float[n,96,1,1] y)
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
        feeds = {"x": normal(n, n, 3, 24, 24)}
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


def test_small_sizes_run_without_the_nodes_of_empty_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a session of their own, where those nodes would take a part of the time that counts."""
    plan = memonger.search_plan(
        _graph([0, 1, 6, 0], None, 8), mode="inference", dims={"n": (1, 16)}, device="cpu", chunks=16
    )
    feeds = {"x": normal(0, 16, 3, 8, 8)}
    whole = memonger.Session(plan, check_order=False)
    assert [len(engine.programs[0].order) for engine in whole.engines] == [129, 17]
    monkeypatch.setattr(ranged, "SHARE", 1e9)
    monkeypatch.setattr(runtime_ranged, "KEPT", 2)
    monkeypatch.setattr(runtime_ranged, "KEPT_VALUES", 0)
    one = memonger.Session(plan)
    assert len(one.engines) == 1
    monkeypatch.setattr(ranged, "SHARE", -1.0)
    few = memonger.Session(plan)
    for n in (16, 1, 2, 3, 16, 2, 1):
        given = {"x": feeds["x"][:n]}
        few.arena.fill(0xFF)
        assert networks.same_bits(few.run(given), one.run(given))


@pytest.mark.parametrize("n", [4, (1, 5)])
def test_the_batch_is_cut_where_the_image_has_the_range(n: int | tuple[int, int]) -> None:
    """A slice that begins at byte 0 lies in its whole at each size, the others don't."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]> g (float[n,3,side,side] x) => (float[n,3,side,side] y)
        { a = CumSum(x, first) b = MaxPool<kernel_shape=[3,3], pads=[1,1,1,1]>(a) c = Add(b, x)
          d = Conv<pads=[1,1,1,1]>(c, k) e = CumSum(d, first) y = Neg(e) }"""
    )
    arrays = {"k": normal(0, 3, 3, 3, 3) / 4, "first": np.array(0)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    plan = memonger.search_plan(model, mode="inference", device="cpu", dims={"n": n, "side": (4, 12)}, chunks=2)
    assert plan.chunks
    session, stock = memonger.Session(plan), networks.stock(model)
    for images, side in ((4, 12), (4, 5), *(((1, 12), (5, 12), (3, 7)) if n != 4 else ())):
        feeds = {"x": normal(images * side, images, 3, side, side)}
        session.arena.fill(0xFF)
        assert networks.same_bits(session.run(feeds), networks.run_stock(stock, feeds))


IMAGES = (
    "Conv<pads=[1,1,1,1]>({0}, k)", "Conv<pads=[2,0,2,0], kernel_shape=[5,1]>({0}, tall)", "Relu({0})",
    "Add({0}, {1})", "MaxPool<kernel_shape=[3,3], pads=[1,1,1,1]>({0})", "Sigmoid({0})",
    "Conv<pads=[1,1,1,1], strides=[2,1]>({0}, k)", "GlobalAveragePool({0})",
)  # fmt: skip
"""What random networks of images are made of; rows may become fewer, and once one."""


@settings(max_examples=4)
@given(
    steps=st.lists(st.integers(0, len(IMAGES) - 2), min_size=2, max_size=6),
    ends=st.booleans(),
    range_=st.sampled_from([(1, 3), (2, 6, 2)]),
    strips=st.integers(2, 4),
)
def test_strips_of_images_for_a_range_of_batches(
    steps: list[int], ends: bool, range_: tuple[int, ...], strips: int
) -> None:
    text, values, heights = "v = Conv<pads=[1,1,1,1]>(x, first) ", ["v", "v"], [24, 24]
    for number, step in enumerate([*steps, len(IMAGES) - 1] if ends else steps):
        other = values[-2] if heights[-2] == heights[-1] else values[-1]
        text += f"v{number} = {IMAGES[step].format(values[-1], other)} "
        values.append(f"v{number}")
        heights.append(-(-heights[-1] // 2) if "strides" in IMAGES[step] else heights[-1])
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]> g (float[n,3,24,12] x) => (float[n,16,a,b] y)
        {{ {text} y = Neg({values[-1]}) }}"""
    )
    arrays = {
        "first": normal(0, 16, 3, 3, 3) / 4, "k": normal(1, 16, 16, 3, 3) / 8, "tall": normal(2, 16, 16, 5, 1) / 8
    }  # fmt: skip
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, name) for name, a in arrays.items() if name in text)
    options: dict[str, Any] = {"mode": "inference", "dims": {"n": range_}, "device": "cpu", "threads": 1}
    try:
        plan = memonger.search_plan(model, chunks=f"strips:{strips}", **options)
    except memonger.PlanError as error:
        if "can't run in" not in str(error):
            raise
        return
    session, stock = memonger.Session(plan), networks.stock(model)
    for n in range(range_[0], range_[1] + 1, *range_[2:]):
        feeds, here = {"x": normal(n, n, 3, 24, 12)}, at_size(plan, n=n)
        expected = networks.run_stock(stock, feeds)
        session.arena.fill(0xFF)
        assert networks.same_bits(session.run(feeds), expected)
        verify(here.graph, here.offsets, here.arena_bytes, here.alignment)
        assert networks.same_bits(run_poisoned(here, feeds), expected)


def test_a_range_of_batches_of_images_runs_in_strips() -> None:
    """Without being asked for: the batch alone would leave an image whole. Where heights vary images stay whole."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]> g (float[n,3,h,128] x) => (float[n,3,i,128] y)
        { a = Conv<pads=[1,1,1,1]>(x, k) b = Relu(a) c = Conv<pads=[1,1,1,1]>(b, l) d = Relu(c)
          y = Conv<pads=[1,1,1,1]>(d, m) }"""
    )
    for name, shape in {"k": (32, 3, 3, 3), "l": (32, 32, 3, 3), "m": (3, 32, 3, 3)}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(normal(0, *shape) / 8, name))
    options: dict[str, Any] = {"mode": "inference", "device": "cpu", "threads": 1, "max_overhead": 1e9}
    ranges: dict[str, Any] = {"n": (1, 3), "h": 128}
    plan, whole = (memonger.search_plan(model, dims=ranges, chunks=chunks, **options) for chunks in ("auto", "off"))
    assert {band.axis for band in plan.chunks} == {2}
    assert plan.arena_bytes < whole.arena_bytes / 4
    session, stock = memonger.Session(plan), networks.stock(model)
    for n in (3, 1, 2):
        feeds = {"x": normal(n, n, 3, 128, 128)}
        assert networks.same_bits(session.run(feeds), networks.run_stock(stock, feeds))
    with pytest.raises(memonger.PlanError, match=r"can't run in 4 strips: .* of which more than the number of images"):
        memonger.search_plan(model, batch=1, dims={"h": (64, 256)}, chunks="strips:4", **options)
