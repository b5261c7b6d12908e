"""Strips of images give what the whole gives: operator by operator, in random chains, and in the blocked layout."""

from itertools import pairwise
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

pytest.importorskip("onnxruntime")

import memonger
from memonger.errors import BudgetError, PlanError
from memonger.ir.marks import OVERLAP, STRIP, before_chunks
from memonger.lowering.lowered import portable
from memonger.model.load import load
from memonger.plan_records import Spent
from memonger.schedule import recompute
from memonger.tiling.axes import row_rules, rows_of_tokens
from memonger.tiling.candidates import InSlices
from memonger.tiling.cutting import Refusal, SliceCopy, Slicing
from memonger.tiling.row_search import larger_late
from memonger.tiling.slice_check import SeenAlone, SliceCheck
from memonger.tiling.slices import exits_of, row_band, rows_in
from memonger.tiling.writer import in_slices
from tests.support import networks
from tests.support.image_networks import KINDS, Choose, ImageNetwork, judge, needs_own, rows_of_all
from tests.support.one_node_executor import run_poisoned
from tests.support.stock import normal, parse


def _run(model: ir.Model, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return networks.run_stock(networks.stock(ir.to_proto(model), "ORT_DISABLE_ALL"), feeds)


def _choices(data: st.DataObject) -> Choose:
    return lambda choices: data.draw(st.sampled_from(choices))


def _in_strips(data: st.DataObject, chain: ImageNetwork) -> None:
    """Some nodes of a chain in strips give what the whole gives, and compute each row once, if they aren't marked."""
    model = portable(load(chain.model())).model
    rules = row_rules(model)
    begin = data.draw(st.integers(0, len(rules) - 1))
    most = next((n for n in range(begin, len(rules)) if isinstance(rules[n], Refusal)), len(rules))
    end = data.draw(st.integers(begin, most))
    tiled = {n: rule for n, rule in list(zip(model.graph, rules, strict=True))[begin:end] if isinstance(rule, Slicing)}
    if not tiled or needs_own(tiled):
        return
    heights = [rows_in(value, tiled) for value in exits_of(tiled)]
    rows, height = min(heights), max(heights)
    count = data.draw(st.integers(2, min(6, rows)))
    again = {str(node.name) for node in tiled if data.draw(st.integers(0, 3)) == 0}
    for node in (node for node in tiled if node.name in again):
        node.metadata_props[OVERLAP] = "1"
    made = in_slices(model, [row_band(begin, end, tiled, -(-height // count))], rules).model
    assert not any(OVERLAP in node.metadata_props for node in made.graph)
    onnx.checker.check_model(ir.to_proto(made), full_check=True)
    copies: dict[str, list[tuple[int, int]]] = {}
    for node in made.graph:
        mark = node.metadata_props.get(STRIP, "")
        if "." in mark:
            copies.setdefault(before_chunks(node), []).append(tuple(map(int, mark.split("."))))  # type: ignore[arg-type]
    for name, own in copies.items():
        assert own[0][0] == 0
        assert all(one[1] == other[0] or (name in again and one[1] > other[0]) for one, other in pairwise(own))
    whole, strips = _run(model, chain.feeds), _run(made, chain.feeds)
    near = 1e-2 if any(node.op_type == "Cast" for node in chain.nodes) else 1e-4
    for name in whole:
        np.testing.assert_allclose(strips[name], whole[name], rtol=near, atol=near)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, deadline=None, derandomize=True, phases=[Phase.generate])
@given(data=st.data())
def test_each_operator_on_strips_gives_what_it_gives_whole(kind: str, data: st.DataObject) -> None:
    chain = ImageNetwork(_choices(data), data.draw(st.sampled_from([4, 7, 10, 12])))
    chain.grow(kind)
    if chain.nodes:
        _in_strips(data, chain)


@settings(max_examples=40, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.data())
def test_strips_of_random_chains_give_what_the_whole_gives(data: st.DataObject) -> None:
    chain = ImageNetwork(_choices(data), data.draw(st.integers(5, 16)))
    for _ in range(data.draw(st.integers(2, 8))):
        chain.grow()
    if chain.nodes:
        _in_strips(data, chain)


@settings(max_examples=8, deadline=None, derandomize=True, phases=[Phase.generate])
@given(st.data())
def test_plans_of_random_networks_in_strips_give_stocks_bits(data: st.DataObject) -> None:
    """`python -m benchmarks.trust.strips` tries many more."""
    network = ImageNetwork(_choices(data), data.draw(st.integers(30, 50)), data.draw(st.sampled_from([1, 2])))
    for _ in range(data.draw(st.integers(3, 9))):
        network.grow()
    for device in ("cpu", "none") if network.nodes else ():
        verdict, said = judge(network, data.draw(st.integers(2, 6)), device)
        assert verdict not in ("differs", "dies early"), said


def _unet(batch: int = 1) -> onnx.ModelProto:
    """Two levels, whose larger one is read again at the end: the peak is in the last nodes."""
    text = f"""g (float[{batch}, 3, 96, 32] x) => (float[{batch}, 2, 96, 32] y) {{
        a = Conv <pads = [1, 1, 1, 1]> (x, w0) ra = Relu (a) p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (ra)
        b = Conv <pads = [1, 1, 1, 1]> (p, w1) rb = Relu (b) u = ConvTranspose <strides = [2, 2]> (rb, w2)
        j = Concat <axis = 1> (ra, u) c = Conv <pads = [1, 1, 1, 1]> (j, w3) rc = Relu (c) y = Conv (rc, w4) }}"""
    model = parse(text, opset=20, ir_version=10)
    shapes = ((16, 3, 3, 3), (32, 16, 3, 3), (32, 16, 2, 2), (16, 32, 3, 3), (2, 16, 1, 1))
    for number, shape in enumerate(shapes):
        model.graph.initializer.append(numpy_helper.from_array(normal(number, *shape), f"w{number}"))
    return model


def _plan(model: onnx.ModelProto, device: str = "cpu", **options: Any) -> memonger.Plan:
    return memonger.search_plan(model, mode="inference", device=device, threads=1, **options)


@pytest.mark.parametrize("device", ["cpu", "none"])
def test_a_plan_in_strips_is_stocks_to_the_bit_in_less_memory(device: str) -> None:
    model = _unet()
    made, whole = _plan(model, device, chunks="strips:5"), _plan(model, device, chunks="off")
    assert made.arena_bytes < 0.6 * whole.arena_bytes
    assert {(band.axis, band.slices) for band in made.chunks} == {(2, (5,))}
    nodes = [node for node in made.model.graph if STRIP in node.metadata_props]
    assert any(node.domain == "com.microsoft.nchwc" for node in nodes) == (device == "cpu")
    feeds = {"x": normal(7, 1, 3, 96, 32)}
    expected = networks.run_stock(
        networks.stock(model, "ORT_DISABLE_ALL" if device == "none" else "ORT_ENABLE_ALL"), feeds
    )
    assert networks.same_bits(memonger.Session(made).run(feeds), expected)
    if device == "cpu":  # else sessions of single nodes optimize them
        assert networks.same_bits(run_poisoned(made, feeds), expected)


@pytest.mark.parametrize("device", ["cpu", "none"])
def test_of_a_batch_each_image_runs_in_strips_by_itself(device: str) -> None:
    """Four images take what one does, that one itself, and all results: with AVX2 before a last node that stays whole
    and behind it."""
    made, one = _plan(_unet(4), device, chunks="strips:6"), _plan(_unet(), device, chunks="strips:6")
    image, results = 3 * 96 * 32 * 4, 4 * 2 * 96 * 32 * 4
    assert made.arena_bytes < one.arena_bytes + image + 2 * results + 4096
    assert [(band.axis, band.slices) for band in made.chunks] == [(0, (4,)), *[(2, (6,))] * 4]
    feeds = {"x": normal(7, 4, 3, 96, 32)}
    expected = networks.run_stock(
        networks.stock(_unet(4), "ORT_DISABLE_ALL" if device == "none" else "ORT_ENABLE_ALL"), feeds
    )
    assert networks.same_bits(memonger.Session(made).run(feeds), expected)
    if device == "cpu":
        assert networks.same_bits(run_poisoned(made, feeds), expected)


@pytest.mark.parametrize("dims", [(24, 12, 12), (4096,)])
def test_volumes_are_cut_along_their_depth_and_sequences_along_time(dims: tuple[int, ...]) -> None:
    last, half, pads = str(list(dims))[1:-1], str([dim // 2 for dim in dims])[1:-1], [1] * 2 * len(dims)
    text = f"""g (float[1, 2, {last}] x) => (float[1, 1, {half}] y) {{
        a = Conv <pads = {pads}> (x, w0) b = Relu (a) c = Conv <pads = {pads}> (b, w1)
        p = MaxPool <kernel_shape = {[2] * len(dims)}, strides = {[2] * len(dims)}> (c)
        y = Conv <pads = {pads}> (p, w2) }}"""
    model = parse(text, opset=20, ir_version=10)
    for number, shape in enumerate(((16, 2), (16, 16), (1, 16))):
        weight = normal(number, *shape, *[3] * len(dims))
        model.graph.initializer.append(numpy_helper.from_array(weight, f"w{number}"))
    made, whole = _plan(model, chunks="strips:4"), _plan(model, chunks="off")
    assert made.arena_bytes < 0.6 * whole.arena_bytes
    feeds = {"x": normal(7, 1, 2, *dims)}
    assert networks.same_bits(memonger.Session(made).run(feeds), networks.run_stock(networks.stock(model), feeds))


def _tall(pooled: bool = False) -> onnx.ModelProto:
    """Convolutions of an image that is tall enough to pay, and maybe a gate that needs all of it, with one in a row."""
    gate = "m = GlobalAveragePool (c) n = Sigmoid (m) c2 = Mul (c, n)" if pooled else "c2 = Add (c, a)"
    text = f"""g (float[1, 3, 192, 256] x) => (float[1, 1, 192, 256] y) {{
        a = Conv <pads = [1, 1, 1, 1]> (x, w0) b = Relu (a) c = Conv <pads = [1, 1, 1, 1]> (b, w1) {gate}
        d = Conv <pads = [1, 1, 1, 1]> (c2, w1) e = Relu (d) f = Conv <pads = [1, 1, 1, 1]> (e, w2) y = Relu (f) }}"""
    model = parse(text, opset=20, ir_version=10)
    for number, shape in enumerate(((16, 3, 3, 3), (16, 16, 3, 3), (1, 16, 3, 3))):
        model.graph.initializer.append(numpy_helper.from_array(normal(number, *shape), f"w{number}"))
    return model


def test_strips_are_found_without_being_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _tall()
    made, whole = _plan(model, max_overhead=1.0), _plan(model, chunks="off")
    assert made.total_bytes < 0.7 * whole.total_bytes
    assert {band.axis for band in made.chunks} == {2}
    feeds = {"x": normal(7, 1, 3, 192, 256)}
    expected = networks.run_stock(networks.stock(model), feeds)
    assert networks.same_bits(memonger.Session(made).run(feeds), expected)
    monkeypatch.setattr("memonger.graph.session_memory.MANY_STRIPS", 0)
    shared = memonger.Session(made)  # slices of one form share a session now
    assert networks.same_bits(shared.run(feeds), expected)
    assert networks.same_bits(shared.run(feeds), expected)
    monkeypatch.undo()
    again = _plan(model, max_overhead=1.0)
    assert ir.to_proto(again.model).SerializeToString() == ir.to_proto(made.model).SerializeToString()
    assert again.offsets == made.offsets


@pytest.mark.parametrize("device", ["cpu", "none"])
def test_what_needs_the_whole_image_stands_between_two_bands(device: str) -> None:
    model = _tall(pooled=True)
    made, whole = _plan(model, device, chunks="strips:8"), _plan(model, device, chunks="off")
    assert len(made.chunks) == 2
    assert made.arena_bytes < 0.75 * whole.arena_bytes
    feeds = {"x": normal(7, 1, 3, 192, 256)}
    assert networks.same_bits(memonger.Session(made).run(feeds), memonger.Session(whole).run(feeds))


def test_attention_in_an_image_network_runs_by_rows_of_its_queries() -> None:
    """Keys and values are read whole: what computes them comes before, wherever the file has it."""
    text = """g (float[1, 4, 16, 16] x) => (float[1, 4, 16, 16] y) {
        h = Conv <pads = [1, 1, 1, 1]> (x, w0) t = Transpose <perm = [0, 2, 3, 1]> (h) r = Reshape (t, tokens)
        a = MatMul (r, w1) b = Reshape (a, heads) q = Transpose <perm = [0, 2, 1, 3]> (b)
        c = MatMul (r, w2) d = Reshape (c, heads) k = Transpose <perm = [0, 2, 3, 1]> (d)
        s = MatMul (q, k) p = Softmax (s)
        e = MatMul (r, w3) f = Reshape (e, heads) v = Transpose <perm = [0, 2, 1, 3]> (f)
        o = MatMul (p, v) m = Transpose <perm = [0, 2, 1, 3]> (o) n = Reshape (m, image)
        i = Transpose <perm = [0, 3, 1, 2]> (n) j = Add (i, h) y = Conv <pads = [1, 1, 1, 1]> (j, w4) }"""
    model = parse(text, opset=20, ir_version=10)
    for number, shape in enumerate(((32, 4, 3, 3), (32, 32), (32, 32), (32, 32), (4, 32, 3, 3))):
        model.graph.initializer.append(numpy_helper.from_array(normal(number, *shape) / 8, f"w{number}"))
    for name, dims in (("tokens", (1, 256, 32)), ("heads", (1, 256, 4, 8)), ("image", (1, 16, 16, 32))):
        model.graph.initializer.append(numpy_helper.from_array(np.array(dims, np.int64), name))
    made, whole = _plan(model, chunks="strips:8", allow_rounding=True), _plan(model, chunks="off")
    assert made.arena_bytes < 0.3 * whole.arena_bytes
    feeds = {"x": normal(7, 1, 4, 16, 16)}
    expected = networks.run_stock(networks.stock(model), feeds)["y"]
    np.testing.assert_allclose(memonger.Session(made).run(feeds)["y"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", "none"])
def test_a_state_of_one_channel_goes_with_strips(device: str) -> None:
    """Its rows are stretches of it, which are read before any strip writes over them."""
    text = """g (float[1, 1, 48, 64] x, float[1, 1, 48, 64] h) => (float[1, 1, 48, 64] y, float[1, 1, 48, 64] next) {
        a = Conv <pads = [1, 1, 1, 1]> (x, w0) b = Conv <pads = [1, 1, 1, 1]> (h, w0) c = Add (a, b) d = Relu (c)
        next = Conv <pads = [1, 1, 1, 1]> (d, w1) y = Relu (next) }"""
    model = parse(text, opset=20, ir_version=10)
    for number, shape in enumerate(((32, 1, 3, 3), (1, 32, 3, 3))):
        model.graph.initializer.append(numpy_helper.from_array(normal(number, *shape), f"w{number}"))
    made, whole = (_plan(model, device, state={"h": "next"}, chunks=chunks) for chunks in ("strips:4", "off"))
    assert made.arena_bytes < 0.6 * whole.arena_bytes
    sessions = memonger.Session(made), memonger.Session(whole)
    for run in range(3):
        x = {"x": normal(run + 5, 1, 1, 48, 64)}
        assert networks.same_bits(*(session.run(x) for session in sessions))


def test_a_budget_is_held_by_strips() -> None:
    model = _tall()
    whole = _plan(model, chunks="off")
    budget = whole.total_bytes - whole.arena_bytes // 2
    made = _plan(model, budget=budget)
    assert made.total_bytes <= budget
    assert {band.axis for band in made.chunks} == {2}


def test_rows_that_are_soon_computed_are_computed_again_rather_than_joined() -> None:
    """An image of 96 channels that 16 make: what a window of 3 shares with the next isn't kept, nor the rest copied."""
    text = """g (float[1, 3, 128, 256] x) => (float[1, 16, 128, 256] y) {
        a = Conv <pads = [1, 1, 1, 1]> (x, w0) b = Relu (a) c = Conv (b, w1) d = Relu (c)
        e = Conv <pads = [1, 1, 1, 1], group = 96> (d, w2) f = Relu (e) y = Conv (f, w3) }"""
    model = parse(text, opset=20, ir_version=10)
    for number, shape in enumerate(((16, 3, 3, 3), (96, 16, 1, 1), (96, 1, 3, 3), (16, 96, 1, 1))):
        model.graph.initializer.append(numpy_helper.from_array(normal(number, *shape), f"w{number}"))
    plan, whole = _plan(model, max_overhead=1.0), _plan(model, chunks="off")
    assert plan.arena_bytes < 0.5 * whole.arena_bytes
    rows: dict[str, list[tuple[int, int]]] = {}
    for node in plan.model.graph:
        if "." in (mark := node.metadata_props.get(STRIP, "")):
            rows.setdefault(before_chunks(node), []).append(tuple(map(int, mark.split("."))))  # type: ignore[arg-type]
    shared = {name: {a[1] - b[0] for a, b in pairwise(own)} for name, own in rows.items()}
    assert any(more == {2} for more in shared.values())
    feeds = {"x": normal(7, 1, 3, 128, 256)}
    np.testing.assert_array_equal(
        memonger.Session(plan).run(feeds)["y"], networks.run_stock(networks.stock(model), feeds)["y"]
    )


def test_what_cannot_run_in_strips_says_why() -> None:
    text = "g (float[4, 300] x) => (float[4, 300] y) { y = Relu (x) }"
    with pytest.raises(PlanError, match="can't run in 4 strips: it reads no images"):
        _plan(parse(text, opset=20, ir_version=10), chunks="strips:4")
    with pytest.raises(PlanError, match="can't run in 97 strips: its images have 96 rows at most"):
        _plan(_unet(), chunks="strips:97")
    text = """g (float[1, 2, 9, 9] x) => (float[1, 2, 9, 9] y) {
        s = Constant <value_ints = [1, 2, 81]> () f = Constant <value_ints = [1, 2, 9, 9]> ()
        r = Reshape (x, s) m = Softmax (r) y = Reshape (m, f) }"""
    with pytest.raises(PlanError, match=r"can't run in 4 strips: node '.*' \(Reshape\) mixes the rows of an image"):
        _plan(parse(text, opset=20, ir_version=10), chunks="strips:4")
    with pytest.raises(PlanError, match="pareto takes chunks='auto' or chunks='off'"):
        memonger.pareto(_unet(), chunks="strips:2", mode="inference")  # type: ignore[call-arg]


def test_an_image_lower_than_a_window_is_cut_all_the_same() -> None:
    """Of 3 rows each window of 7 reads all: nothing is kept but the image, and padding is at its border."""
    text = "g (float[1, 1, 3, 8] x) => (float[1, 1, 3, 8] y) { y = Conv <pads = [3, 3, 3, 3]> (x, w) }"
    model = parse(text, opset=20, ir_version=10)
    model.graph.initializer.append(numpy_helper.from_array(normal(1, 1, 1, 7, 7), "w"))
    lowered = portable(load(model)).model
    made = in_slices(lowered, [rows_of_all(lowered, 1)], row_rules(lowered)).model
    feeds = {"x": normal(2, 1, 1, 3, 8)}
    whole = networks.run_stock(networks.stock(model), feeds)
    np.testing.assert_allclose(_run(made, feeds)["y"], whole["y"], rtol=1e-5, atol=1e-5)


def test_other_bits_in_strips_are_refused_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that gives other bits stays whole; with leave it doesn't, and a note says so."""
    (band,) = _plan(_unet(), chunks="strips:4").chunks

    def seen(tiles: InSlices, *_: object) -> SeenAlone:
        own = [tiles.cut.graph.nodes[one.begin : one.end] for one in tiles.bands]
        return SeenAlone({band.last: 1e-7} if any(band.last in names for names in own) else {})

    monkeypatch.setattr(InSlices, "seen", seen)
    assert band.last not in {one.last for one in _plan(_unet(), chunks="strips:4").chunks}
    assert "by up to 1.0e-07" in _plan(_unet(), chunks="strips:4", allow_rounding=True).notes[-1]


def test_a_refused_budget_names_what_strips_with_the_same_bits_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many numbers of strips give other bits: here all but two."""

    def seen(tiles: InSlices, *_: object) -> SeenAlone:
        fine = [band for band in tiles.bands if band.counts[0] > 2]
        return SeenAlone({name: 1e-7 for band in fine for name in tiles.cut.graph.nodes[band.begin : band.end]})

    monkeypatch.setattr(InSlices, "seen", seen)
    with pytest.raises(BudgetError) as refused:
        _plan(_unet(), budget="1KiB")
    assert refused.value.smallest < _plan(_unet(), chunks="off").total_bytes
    held = _plan(_unet(), budget=refused.value.smallest)
    assert held.total_bytes <= refused.value.smallest
    assert {count for band in held.chunks for count in band.slices} == {2}


def test_where_nodes_are_many_a_refused_budget_names_what_strips_take_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would run again isn't looked for there, which takes longer than all else: nothing of the search runs."""
    model = _tall()
    monkeypatch.setattr(recompute, "_MANY", 8)
    monkeypatch.setattr(recompute.Budgets, "search", None)
    monkeypatch.setattr(recompute.Budgets, "_search", None)
    with pytest.raises(BudgetError) as refused:
        _plan(model, budget="1KiB")
    held = _plan(model, budget=refused.value.smallest)
    assert held.total_bytes == refused.value.smallest
    assert held.chunks
    assert not held.recomputed


def test_strips_that_keep_all_cores_busy_may_be_the_whole_image() -> None:
    """Of 8 rows and 2 a quarter as high, two cores take 8 at a time: that is one strip, which is none."""
    text = """g (float[1, 64, 8, 2048] x) => (float[1, 64, 8, 2048] y) <float[4] by = {1, 1, 4, 1}> {
        a = Conv (x, w) b = Relu (a) p = MaxPool <kernel_shape = [4, 1], strides = [4, 1]> (b) q = Conv (p, w)
        r = Resize <mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor"> (q, , by)
        s = Add (r, b) y = Conv (s, w)
    }"""
    model = parse(text, opset=20, ir_version=10)
    model.graph.initializer.append(numpy_helper.from_array(normal(1, 64, 64, 1, 1), "w"))
    plan = memonger.search_plan(model, device="cpu", mode="inference", threads=2)
    assert all(count > 1 for band in plan.chunks for count in band.slices)


@pytest.mark.parametrize("kind", [ir.DataType.UINT8, ir.DataType.FLOAT, ir.DataType.BOOL])
def test_a_number_without_axes_is_drawn_as_an_array(kind: ir.DataType) -> None:
    """A zero point of a quantized model is one."""
    value = ir.Value(name="zero", type=ir.TensorType(kind), shape=ir.Shape([]))
    drawn = SliceCheck(1, Spent())._random(value, 0)
    assert isinstance(drawn, np.ndarray)
    assert (drawn.shape, drawn.dtype) == ((), kind.numpy())


@pytest.mark.parametrize(
    ("body", "order"),
    [
        ("a = Conv (x, w) u = Resize (a, , twice) b = Relu (x) c = Conv (b, w) y = Concat <axis = 2> (u, c)", "abcuy"),
        # what follows in the same size goes with it, and what is read by others isn't waited for
        ("a = Conv (x, w) u = Resize (a, , twice) r = Relu (u) b = Relu (x) c = Conv (b, w) y = Concat <axis=2> (r, c)",
         "abcury"),
        ("a = Relu (x) u = Resize (a, , twice) b = Relu (u) c = Conv (b, w) y = Concat <axis = 2> (u, c)", "aubcy"),
        # nothing gets larger, or what it is made of would wait, too
        ("a = Relu (x) b = Sin (x) c = Conv (b, w) y = Concat <axis = 2> (a, c)", "abcy"),
        ("u = Resize (x, , twice) b = Relu (x) c = Conv (b, w) y = Concat <axis = 2> (u, c)", "bcuy"),
    ],
)  # fmt: skip
def test_what_gets_larger_is_made_right_before_it_is_read(body: str, order: str) -> None:
    model = parse(f"g (float[1, 2, 4, 4] x) => (float[1, 2, H, W] y) <float[4] twice = {{1, 1, 2, 1}}> {{ {body} }}")
    model.graph.initializer.append(numpy_helper.from_array(normal(0, 2, 2, 1, 1), "w"))
    nodes = list(load(onnx.shape_inference.infer_shapes(model)).ir.graph)
    late = larger_late(nodes, range(len(nodes)))
    assert "".join(str(nodes[step].outputs[0].name) for step in late) == order


def test_which_values_are_tokens_of_an_image() -> None:
    """Those between an image and the next, or before the first; not what nothing makes an image of again."""
    model = parse(
        """g (float[1, 2, 6, 4] x, float[1, 24, 2] z) => (float[1, 2, 6, 4] y, float[1, 24, 2] v)
        <int64[3] flat = {1, 2, 24}, int64[4] image = {1, 2, 6, 4}> {
            a = Conv <kernel_shape = [1, 1]> (x, w)  b = Reshape (a, flat)  c = Transpose <perm = [0, 2, 1]> (b)
            d = Add (c, z)  e = Transpose <perm = [0, 2, 1]> (d)  f = Reshape (e, image)
            y = Conv <kernel_shape = [1, 1]> (f, w)  g = Reshape (y, flat)  v = Transpose <perm = [0, 2, 1]> (g)
        }"""
    )
    model.graph.initializer.append(numpy_helper.from_array(normal(0, 2, 2, 1, 1), "w"))
    loaded = load(onnx.shape_inference.infer_shapes(model)).ir
    tokens = {str(value.name): axis for value, axis in rows_of_tokens(loaded).items()}
    assert {name: tokens[name] for name in "bcdez"} == {"b": 2, "c": 1, "d": 1, "e": 2, "z": 1}
    assert not {"f", "g", "v"} & tokens.keys()
    rules = {str(node.outputs[0].name): rule for node, rule in zip(loaded.graph, row_rules(loaded), strict=True)}
    assert {name for name, rule in rules.items() if isinstance(rule, Slicing)} == set("abcdefy")
    assert "gives no image with the rows of its input, nor what one is made of" in str(rules["g"])
    stretched = rules["f"]
    assert isinstance(stretched, Slicing)
    assert stretched.copy(2, 5).inputs == {0: (8, 20)}
    flat = rules["b"]
    assert isinstance(flat, Slicing)
    assert flat.copy(8, 18) == SliceCopy((8, 20), (8, 20), {0: (2, 5)})
