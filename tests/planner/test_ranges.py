"""Plans for ranges of sizes: every size in them runs at the planned offsets, to the bits of stock onnxruntime."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

import memonger
from memonger.graph.ranged import at_sizes
from memonger.graph.verify import sharing_pairs, stays_within, verify
from memonger.report.summary import headline, plan_record
from memonger.runtime import ranged
from memonger.serving import export
from memonger.serving.serving import PlannedFleet
from tests.support import networks
from tests.support.command_line import invoke
from tests.support.stock import LEVELS

HEAD = """<ir_version: 10, opset_import: ["": 20]> g (float[n,3,side,side] x) => (float[n,c,h,w] y) {"""

STEPS = (
    'Conv<pads=[1,1,1,1]>({}, k)', "Relu({})", "Tanh({})", "Sigmoid({})", "Add({}, x)", "Mul({0}, {0})",
    "AveragePool<kernel_shape=[3,3], pads=[1,1,1,1]>({})", "Transpose<perm=[0,1,3,2]>({})",
    "Slice({}, nought, behind, third)", "Concat<axis=0>({0}, {0})", "MaxPool<kernel_shape=[2,2], ceil_mode=1>({})",
)  # fmt: skip
"""What a random graph is made of: each of an image; those that change its size are undone by `FIT`."""

FIT = 'shape{0} = Shape(x) fit{0} = Resize<mode="nearest">({1}, , , shape{0})'


def _graph(steps: Sequence[int], joined: Sequence[bool]) -> onnx.ModelProto:
    """A chain of steps, some joined with the value before by a sum."""
    text, value = "", "x"
    for number, (step, sums) in enumerate(zip(steps, joined, strict=True)):
        name = f"v{number}"
        text += f"{name} = {STEPS[step].format(value)} "
        if step >= len(STEPS) - 3:
            text += FIT.format(number, name) + " "
            name = f"fit{number}"
        if sums:
            text += f"s{number} = Add({name}, {value}) "
            name = f"s{number}"
        value = name
    model = onnx.parser.parse_model(f"{HEAD} {text} y = Identity({value}) }}")
    rng = np.random.default_rng(len(steps))
    arrays = {
        "k": rng.standard_normal((3, 3, 3, 3), np.float32) / 4, "nought": np.array([0]), "behind": np.array([-2]),
        "third": np.array([2]),
    }  # fmt: skip
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, name) for name, a in arrays.items())
    return model


@settings(max_examples=6)
@given(
    steps=st.lists(st.tuples(st.integers(0, len(STEPS) - 1), st.booleans()), min_size=2, max_size=8),
    device=st.sampled_from(["cpu", "none"]),
)
def test_every_size_runs_to_the_bits_of_stock(steps: list[tuple[int, bool]], device: str) -> None:
    model = _graph([step for step, _ in steps], [sums for _, sums in steps])
    plan = memonger.search_plan(model, mode="inference", dims={"n": (1, 4), "side": (4, 12)}, device=device)
    session = memonger.Session(plan)
    stock = networks.stock(model, LEVELS[device])
    for n in (4, 1, 3):
        for side in (12, 5, 4, 9):
            x = np.random.default_rng(n * side).standard_normal((n, 3, side, side), np.float32)
            session.arena.fill(0xFF)
            assert networks.same_bits(session.run({"x": x}), networks.run_stock(stock, {"x": x}))


def test_blocked_layouts_run_at_every_size() -> None:
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(
        f"""{HEAD} a = Conv<pads=[1,1,1,1]>(x, stem) b = Relu(a) c = MaxPool<kernel_shape=[2,2], strides=[2,2]>(b)
            d = Conv<pads=[1,1,1,1]>(c, more) e = Add(d, c) f = Relu(e) p = GlobalAveragePool(f) y = Mul(f, p) }}"""
    )
    for name, shape in (("stem", (32, 3, 3, 3)), ("more", (32, 32, 3, 3))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(rng.standard_normal(shape, np.float32) / 9, name))
    plan = memonger.search_plan(model, mode="inference", dims={"n": (1, 3), "side": (4, 16)}, device="cpu")
    assert any(op.startswith("com.microsoft.nchwc") for op in plan.graph.ops)
    session, stock = memonger.Session(plan), networks.stock(model)
    for n, side in ((3, 16), (1, 5), (2, 11), (3, 4)):
        x = rng.standard_normal((n, 3, side, side), np.float32)
        session.arena.fill(0xFF)
        assert networks.same_bits(session.run({"x": x}), networks.run_stock(stock, {"x": x}))


def _text(body: str, dims: str = "float[n,s] x") -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]> g ({dims}) => (float[a,b] y) {{ {body} }}"""
    )
    numbers = {"one": [1], "two": [2], "seven": [7], "sixteen": [16], "many": [400], "nought": [0]}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.array(n), name) for name, n in numbers.items())
    return model


FALLING = "s = Shape<start=1>(x) n = Shape<end=1>(x) left = Sub(sixteen, s) t = Concat<axis=0>(n, left) " + (
    "z = ConstantOfShape(t) e = Relu(x) y = Concat<axis=1>(e, z)"
)
"""Filled up to 16 columns: the filling is empty at the largest size."""

JUMPING = (
    "s = Shape<start=1>(x) n = Shape<end=1>(x) m = Mod(s, seven) l = Mul(m, many) t = Concat<axis=0>(n, l) "
    "z = ConstantOfShape(t) c = Cos(z) r = ReduceSum(c, one) wide = Tile(x, reps) w = Sin(wide) q = ReduceSum(w, one) "
    "a = Add(r, q) y = Add(a, x)"
)
"""A value of 400 (s mod 7) columns: at 6 and 13 it is larger than at any size that is measured."""


def _jumping(repeats: int) -> onnx.ModelProto:
    model = _text(JUMPING)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, repeats]), "reps"))
    return model


def _run_all(session: memonger.Session, model: onnx.ModelProto, shapes: Sequence[tuple[int, int]], level: str) -> None:
    stock = networks.stock(model, level)
    for n, s in shapes:
        x = np.random.default_rng(s).standard_normal((n, s), np.float32)
        session.arena.fill(0xFF)
        assert networks.same_bits(session.run({"x": x}), networks.run_stock(stock, {"x": x}))


def test_values_that_shrink_as_the_input_grows_have_room() -> None:
    model = _text(FALLING)
    plan = memonger.search_plan(model, mode="inference", dims={"n": (1, 3), "s": (1, 16)}, device="none")
    z = plan.graph.values.index("z")
    assert plan.graph.planned[z]
    assert plan.graph.sizes[z] == 3 * 15 * 4
    _run_all(memonger.Session(plan), model, [(3, 16), (3, 1), (1, 9), (2, 15)], "ORT_DISABLE_ALL")


def test_a_size_whose_values_are_larger_gets_a_layout_of_its_own_in_the_arena() -> None:
    model = _jumping(400)  # the tiled value leaves room
    plan = memonger.search_plan(model, mode="inference", dims={"n": (1, 3), "s": (1, 16)}, device="none")
    session = memonger.Session(plan)
    _run_all(session, model, [(3, 16), (2, 6), (3, 13), (1, 7), (2, 6)], "ORT_DISABLE_ALL")
    assert session.arena.size == plan.arena_bytes


def test_a_size_that_needs_more_than_the_arena_is_refused_with_the_bytes() -> None:
    plan = memonger.search_plan(_jumping(1), mode="inference", dims={"n": (1, 3), "s": (1, 16)}, device="none")
    session = memonger.Session(plan)
    with pytest.raises(memonger.SessionError, match=r"at n 3, s 13 the values need an arena of .* \([0-9,]+ bytes\)"):
        session.run({"x": np.ones((3, 13), np.float32)})
    assert session.run({"x": np.ones((3, 14), np.float32)})["y"].shape == (3, 14)


CHAIN = "a = MatMul(x, w) b = Tanh(a) c = Relu(b) d = Sigmoid(c) y = Add(d, b)"


def _chain() -> onnx.ModelProto:
    model = _text(CHAIN, "float[n,8] x")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((8, 6), np.float32), "w"))
    return model


@pytest.fixture(scope="module")
def plan() -> memonger.Plan:
    return memonger.search_plan(_chain(), mode="inference", dims={"n": (2, 10, 4)}, device="none")


def _x(n: int) -> dict[str, np.ndarray]:
    return {"x": np.ones((n, 8), np.float32)}


@pytest.mark.parametrize("n", [1, 4, 14])
def test_other_sizes_are_refused_with_the_range(plan: memonger.Plan, n: int) -> None:
    with pytest.raises(memonger.SessionError, match=rf"'n', is {n}, and the plan is for n 2 to 10 by 4"):
        memonger.Session(plan).run(_x(n))


def test_inputs_must_agree_and_have_the_planned_rank() -> None:
    model = _text("y = Add(x, z)", "float[n,2] x, float[n,2] z")
    session = memonger.Session(memonger.search_plan(model, mode="inference", dims={"n": (1, 4)}, device="none"))
    two, three = np.ones((2, 2), np.float32), np.ones((3, 2), np.float32)
    with pytest.raises(memonger.SessionError, match="'n' is 2 in one input and 3 in 'z'"):
        session.run({"x": two, "z": three})
    with pytest.raises(memonger.SessionError, match=r"'x' has shape \[2\]; .* it is \[4, 2\]"):
        session.run({"x": two[0], "z": two})
    with pytest.raises(memonger.SessionError, match=r"'x' has shape \[2, 3\]; .* only dimensions \[0\] change"):
        session.run({"x": np.ones((2, 3), np.float32), "z": two})


def test_few_shapes_stay_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranged, "KEPT", 3)
    monkeypatch.setattr(ranged, "KEPT_VALUES", 0)
    plan = memonger.search_plan(_chain(), mode="inference", dims={"n": (1, 9)}, device="none")
    session = memonger.Session(plan)
    for n in (*range(1, 10), 9, 1):
        assert session.run(_x(n))["y"].shape == (n, 6)
    (executable,) = session._context()._bindings(session._model)
    assert [shapes[-1] for shapes, _ in executable._bindings] == [(8, 8), (9, 8), (1, 8)]


def test_the_sizes_of_a_new_shape_are_read_once(plan: memonger.Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    session, read, key = memonger.Session(plan), list[object](), ranged.RangedProgram.key
    session.run(_x(2))  # whose order is compared with the plan
    monkeypatch.setattr(ranged.RangedProgram, "key", lambda *given: read.append(given) or key(*given))
    for n, times in ((6, 1), (6, 1), (10, 2), (2, 2)):
        session.run(_x(n))
        assert len(read) == times


def test_a_fleet_runs_it_at_every_size(plan: memonger.Plan) -> None:
    single = memonger.search_plan(_chain(), mode="inference", batch=3, device="none")
    session = memonger.Session(plan)
    with memonger.Fleet({"any": plan, "three": single}) as fleet:
        for n in (10, 2, 6):
            assert networks.same_bits(fleet["any"].run(_x(n)), session.run(_x(n)))
            fleet["three"].run(_x(3))
        with pytest.raises(memonger.SessionError, match="has no fixed shape: a pipeline can't keep it"):
            fleet.pipeline({"any": {}, "three": {"x": "y"}})


def test_outputs_are_written_to_arrays_of_the_shape_that_runs(plan: memonger.Plan) -> None:
    session, target = memonger.Session(plan), np.empty((6, 6), np.float32)
    assert session.run(_x(6), {"y": target})["y"] is target
    assert np.array_equal(target, session.run(_x(6))["y"])
    with pytest.raises(memonger.SessionError, match=r"output 'y' is float32\[2, 6\]"):
        session.run(_x(2), {"y": target})


def test_a_file_keeps_the_ranges_and_stock_runs_it_at_any_of_them(plan: memonger.Plan, tmp_path: Path) -> None:
    path = tmp_path / "planned.onnx"
    plan.save(path)
    read = memonger.Plan.load(path)
    assert read.ranges == plan.ranges
    assert read.offsets == plan.offsets
    assert "n 2 to 10 by 4" in repr(read)
    assert onnx.load(path).graph.input[0].type.tensor_type.shape.dim[0].dim_param == "n"
    again = tmp_path / "again.onnx"
    read.save(again)
    assert again.read_bytes() == path.read_bytes()
    for n in (6, 10, 2):
        assert networks.same_bits(
            memonger.Session(path).run(_x(n)), networks.run_stock(networks.stock(str(path)), _x(n))
        )


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"n": {"least": 2, "most": 10, "step": 4, "places": ["x[1]"]}}, "open dimensions"),
        ({"n": {"least": 2, "most": 10, "step": 4, "places": ["x[7]"]}}, "open dimensions"),
        ({"n": {"least": 2, "most": 10, "step": 4, "places": []}}, "open dimensions"),
        ({"m": {"least": 2, "most": 10, "step": 4, "places": ["x[0]"]}}, "open dimensions"),
        ({"n": {"least": 2, "most": 11, "step": 4, "places": ["x[0]"]}}, "range 'n' is 2 to 11"),
        ({"n": {"least": 2, "most": 1, "step": 4, "places": ["x[0]"]}}, "range 'n'"),
        ({"n": {"least": 2, "most": 2**40, "step": 1, "places": ["x[0]"]}}, "an integer from 1 to"),
        ({"n": {"least": -1, "most": 10, "step": 1, "places": ["x[0]"]}}, "an integer from 0 to"),
        ({"n": {"least": 2, "most": 10, "places": ["x[0]"], "equals": "m + 1"}}, "no sum of others"),
        ({"n": {"least": 2, "most": 10, "places": ["x[0]"], "equals": "n*("}}, "no sum of others"),
        ({"n": {"least": 2, "most": 10, "step": 0, "places": ["x[0]"]}}, "an integer from 1 to"),
        ({"n": [2, 10]}, "malformed"),
        ({"n": {"least": 2, "most": 14, "step": 4, "places": ["x[0]"]}}, "leaves the arena|writes"),
        ({}, "open dimensions|has no size|has an offset|size of value"),
    ],
)
def test_ranges_that_are_not_the_models_are_refused(
    plan: memonger.Plan, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    path = tmp_path / "planned.onnx"
    plan.save(path)
    model = onnx.load(path)
    (entry,) = (each for each in model.metadata_props if each.key == "memonger.plan")
    entry.value = json.dumps({**json.loads(entry.value), "ranges": changed})
    onnx.save(model, path)
    with pytest.raises(memonger.MemongerError, match=message):
        memonger.Plan.load(path)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"mode": "training"}, r"a range of sizes \(dims\) doesn't go with training"),
        ({"chunks": "strips:2"}, r"can't run in 2 strips: it reads no images"),
        ({"dims": {"n": (3, 2)}}, "ends before it begins: 3 to 2"),
        ({"dims": {"n": (0, 0)}}, "whole number from 1"),
        ({"dims": {"n": (1,)}}, "the smallest and the largest"),
        ({"dims": {"n": "1:2"}}, "not '1:2', which is no sum of others"),
        ({"dims": {"x[1]": (1, 8)}}, "'x\\[1\\]' is fixed"),
        ({"dims": {"m": (1, 8)}}, "no dimension named 'm'"),
        ({"device": "cuda"}, "nor with a CUDA device"),
    ],
)
def test_what_does_not_go_with_ranges_is_said(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(memonger.MemongerError, match=message):
        memonger.search_plan(_chain(), **{"mode": "inference", "dims": {"n": (1, 4)}, "device": "none", **keywords})


def test_what_takes_single_sizes_says_so(plan: memonger.Plan, tmp_path: Path) -> None:
    ranges = memonger.Options(dims={"n": (1, 4)}, device="none", mode="inference")
    for source, options in ((plan, None), (_chain(), ranges)):
        with pytest.raises(memonger.PlanError, match=r"planned for ranges of sizes .* which triton-python, .* serve"):
            export(source, "triton", tmp_path / "served", options=options)


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_of_several_plans_the_first_that_takes_the_shapes_runs(plan: memonger.Plan, device: str) -> None:
    """A plan for its sizes alone before those for ranges, in whatever order they are given."""
    made: Any = {"mode": "inference", "device": device}
    wide, single, narrow = (
        memonger.search_plan(_chain(), **made, dims={"n": (1, 12)}),
        memonger.search_plan(_chain(), **made, batch=3),
        memonger.search_plan(_chain(), **made, dims={"n": (8, 16, 4)}),
    )
    session, stock = memonger.Session([wide, single, narrow]), networks.stock(_chain(), LEVELS[device])
    assert repr(session) == f"<Session g on cpu: batch 3, n 1 to 12, n 8 to 16 by 4, arena {session.arena.size} B>"
    assert session.arena.size == max(one.arena_bytes for one in (wide, single, narrow))
    for n, picked in ((3, 0), (8, 1), (16, 2), (12, 1), (3, 0), (1, 1), (16, 2)):
        session.arena.fill(0xFF)
        assert session._model.checked(_x(n), None).plan == picked
        assert networks.same_bits(session.run(_x(n)), networks.run_stock(stock, _x(n)))
    with pytest.raises(memonger.SessionError, match=r"\[13, 8\].*plans for \[\{'x': \[3, 8\]\}, \{n 1 to 12\}, \{n 8"):
        session.run(_x(13))
    with pytest.raises(memonger.SessionError, match="plans 0 and 1 are for the same input shapes"):
        memonger.Session([wide, wide])


def test_a_frontier_of_ranges_holds_for_every_size() -> None:
    plans = memonger.pareto(_chain(), mode="inference", dims={"n": (1, 9)}, device="none")
    (only,) = plans
    assert only.ranges["n"].most == 9
    assert memonger.Session(only).run(_x(5))["y"].shape == (5, 6)


def test_a_model_is_exported_for_ranges_with_a_plan_of_each_batch(tmp_path: Path) -> None:
    model = _text("y = Relu(x)")
    options = memonger.Options(dims={"s": (2, 8)}, device="none")
    exported = export(model, "ray", tmp_path / "served", batches=[1, 4], options=options)
    assert any("for s 2 to 8, each for a batch of 1, 4" in note for note in exported.notes)
    files = sorted((tmp_path / "served").rglob("*.onnx"))
    fleet = PlannedFleet({"model": files})
    assert [memonger.Plan.load(file).batch for file in files] == [1, 4]
    for n, s in ((1, 8), (4, 2), (1, 3)):
        assert fleet.model().run({"x": np.ones((n, s), np.float32)})["y"].shape == (n, s)


def test_a_fleet_and_a_server_take_several_plans_with_ranges(plan: memonger.Plan, tmp_path: Path) -> None:
    single = memonger.search_plan(_chain(), mode="inference", batch=3, device="none")
    fleet = PlannedFleet({"both": [plan, single]})
    for n in (3, 10, 2):
        assert networks.same_bits(fleet.model().run(_x(n)), memonger.Session(plan if n != 3 else single).run(_x(n)))
    assert fleet.model().run(_x(5))["y"].shape == (5, 6), "filled up to 6"
    assert fleet.model().inputs[0]["shape"] == [-1, 8]
    assert fleet.fleet.memory().arenas == max(plan.arena_bytes, single.arena_bytes)
    exported = export([plan, single], "ray", tmp_path / "served")
    assert exported.estimate.activations == fleet.fleet.memory().arenas


@given(st.data())
@settings(max_examples=40)
def test_what_stays_within_a_layout_passes_the_checker(plan: memonger.Plan, data: st.DataObject) -> None:
    graph = plan.graph
    own = {v: data.draw(st.integers(0, graph.sizes[v] + 4)) // 4 * 4 for v in plan.offsets}
    if data.draw(st.booleans()):
        own = dict.fromkeys(own, min(own.values()))
    if stays_within(graph, sharing_pairs(graph, plan.offsets), own):
        verify(at_sizes(graph, own), plan.offsets, plan.arena_bytes, plan.alignment)
        verify(at_sizes(graph, own), ranged.RangedProgram(plan).moved_down(own), plan.arena_bytes, plan.alignment)


def test_the_headline_and_the_record_say_the_ranges(plan: memonger.Plan) -> None:
    record = plan_record(plan, "chain.onnx", None)
    assert record["ranges"] == {"n": [2, 10, 4]}
    assert headline(record)[0].endswith("That holds for every size: n 2 to 10 by 4.")
    assert record["unplanned_values"] == []


def test_ranges_are_given_on_the_command_line(tmp_path: Path) -> None:
    model, planned = tmp_path / "chain.onnx", tmp_path / "planned.onnx"
    onnx.save(_chain(), model)
    words = ["plan", str(model), "--dim", "n=2:11:4", "--device", "none", "--mode", "inference", "-o", str(planned)]
    done = invoke(*words)
    assert done.exit_code == 0, done.output
    assert memonger.Plan.load(planned).ranges["n"].most == 10
    np.savez(tmp_path / "x.npz", **_x(5))
    words = ["run", str(planned), "--inputs", str(tmp_path / "x.npz"), "--pad", "--runs", "1"]
    done = invoke(*words)
    assert done.exit_code == 0, done.output
    assert "[5, 6]" in done.output


def test_the_command_that_a_refusal_names_works_with_ranges(tmp_path: Path) -> None:
    nodes = [helper.make_node(kind, [f"v{n}"], [f"v{n + 1}"]) for n, kind in enumerate(["Exp", "Relu", "Softmax"])]
    onnx.save(networks.model_of(nodes, {"v0": ["rows", "n"]}, {"v3": ["rows", "n"]}), path := tmp_path / "model.onnx")
    words = ["plan", str(path), "--dim", "n=1:4096", "--dim", "rows=1:9:4", "--mode", "inference", "--budget", "200KiB"]
    refused = invoke(*words)
    assert refused.exit_code == 1
    hint = refused.output.partition(" that fits: memonger ")[2].split()
    assert "rows=1:9:4" in hint
    done = invoke(*hint)
    assert done.exit_code == 0, done.output
    assert "n 2844 fits 200 KiB" in done.output


@pytest.mark.parametrize("steps", [(0, 7, 3), (9, 0, 1), (5, 6, 8)])
def test_a_program_made_after_those_of_other_sizes_is_as_made_afresh(steps: tuple[int, ...]) -> None:
    model = _graph(steps, (True, False, True))
    dims = {"n": (1, 5), "side": (4, 16, 4)}
    plan = memonger.search_plan(model, mode="inference", dims=dims, device="none", chunks="off")
    used = ranged.RangedProgram(plan)
    for key in ((5, 16), (1, 4), (1, 8), (2, 8), (2, 16), (1, 4), (5, 16), (3, 12)):
        after, afresh = used.at(key), ranged.RangedProgram(plan).at(key)
        assert (after.planned, after.inputs) == (afresh.planned, afresh.inputs)
        assert after.output_shapes == afresh.output_shapes


def test_what_no_rule_tells_is_left_to_the_runtime_counted_at_the_largest_and_named() -> None:
    """An operator without a rule, and one whose sizes depend on data, each with what reads it."""
    model = _text(
        "w = Unsqueeze(x, one) p = ReduceMax<keepdims=1>(w, two) [mixed] m = com.microsoft.HyperConnectionPreMix(w, p) "
        "c = Relu(m) i = NonZero(x) t = Transpose(i) g = GatherND(x, t) s = ReduceSum<keepdims=1>(g) y = Mul(c, s)"
    )
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    plan = memonger.search_plan(model, mode="inference", dims={"n": (1, 4), "s": (2, 50)}, device="cpu")
    assert plan.graph.planned[plan.graph.values.index("p")]
    assert {"m", "c", "i", "t", "g"} <= set(plan.run_time)
    assert plan.run_time["m"] == 4 * 50 * 4
    assert plan.run_time["i"] == 4 * 50 * 2 * 8
    assert any("'mixed' (com.microsoft::HyperConnectionPreMix)" in note for note in plan.notes)
    session, stock = memonger.Session(plan), networks.stock(model)
    for n, s in ((4, 50), (1, 2), (3, 17)):
        x = np.random.default_rng(s).standard_normal((n, s), np.float32)
        assert networks.same_bits(session.run({"x": x}), networks.run_stock(stock, {"x": x}))


def test_a_size_computed_to_a_scalar_runs_at_every_size() -> None:
    model = _text(
        "s = Shape(x) q = ReduceProd<keepdims=0>(s) p = Reshape(q, m1) z = ConstantOfShape(p) f = Reshape(x, m1) "
        "a = Add(f, z) y = Unsqueeze(a, nought)"
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1]), "m1"))
    plan = memonger.search_plan(model, mode="inference", dims={"n": (1, 3), "s": (1, 16)}, device="none")
    _run_all(memonger.Session(plan), model, [(3, 16), (2, 6), (1, 1)], "ORT_DISABLE_ALL")


def _detector() -> onnx.ModelProto:
    """What was halved twice, enlarged again and joined to what was halved once: of sides that can be divided by 4."""
    rng, node = np.random.default_rng(0), helper.make_node
    half = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [2, 2]}
    return networks.model_of(
        [
            node("Conv", ["x", "w"], ["a"], name="first", **half), node("Conv", ["a", "v"], ["b"], **half),
            node("Resize", ["b", "", "scales"], ["u"], mode="nearest"),
            node("Concat", ["u", "a"], ["y"], name="join", axis=1),
        ],
        {"x": ["n", 3, "h", "w"]}, {"y": ["n", 8, "a", "b"]}, scales=np.array([1, 1, 2, 2], np.float32),
        w=rng.standard_normal((4, 3, 3, 3)).astype(np.float32), v=rng.standard_normal((4, 4, 3, 3)).astype(np.float32),
    )  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "none"])
def test_which_sizes_run_is_said(device: str) -> None:
    """Nothing is measured at sizes between those where a range of 16 to 64 is: they are noted."""
    wanted: dict[str, Any] = {"mode": "inference", "device": device}
    plan = memonger.search_plan(_detector(), dims={"n": (1, 8), "h": (16, 64), "w": (16, 64)}, **wanted)
    said = "It runs where h and w can be divided by 4: dims={'h': (16, 64, 4), 'w': (16, 64, 4)}."
    assert plan.notes[-1].endswith(said)
    with pytest.raises(memonger.MemongerError, match="doesn't run at n 1, h 18, w 16: node 'join'"):
        memonger.Session(plan).run({"x": np.ones((1, 3, 18, 16), np.float32)})
    with pytest.raises(memonger.MemongerError, match=r"divided by 4: dims=\{'h': \(20, 60, 4\), 'w': \(20, 60, 4\)\}"):
        memonger.search_plan(_detector(), dims={"n": (1, 8), "h": (18, 62), "w": (18, 62)}, **wanted)
    with pytest.raises(memonger.MemongerError, match=r"divided by 4: dims=\{'h': 20, 'w': 16\}"):
        memonger.search_plan(_detector(), dims={"n": 1, "h": 18, "w": 16}, **wanted)
    plan = memonger.search_plan(_detector(), dims={"n": (1, 8), "h": (16, 64, 4), "w": (16, 64, 8)}, **wanted)
    assert not any("runs where" in note for note in plan.notes)


@pytest.mark.parametrize("device", ["cpu", "none"])
def test_dimensions_that_have_to_be_the_same_are_named(device: str) -> None:
    model = networks.model_of(
        [helper.make_node("Add", ["k", "v"], ["y"])], {"k": ["p", 2], "v": ["q", 2]}, {"y": ["r", 2]}
    )
    with pytest.raises(memonger.MemongerError, match=r"It runs where q is p: dims=\{'q': 'p'\}"):
        memonger.search_plan(model, mode="inference", dims={"p": (2, 8), "q": (2, 8)}, device=device)
    assert memonger.search_plan(model, mode="inference", dims={"p": (2, 8), "q": "p"}, device=device).ranges


@pytest.mark.parametrize(
    ("nodes", "asked", "said"),
    [
        ("y = Add(a, b)", {"p": 3, "q": 4, "r": 5}, "It runs where q is p: dims={'q': 'p'}."),
        ("y = Add(b, c)", {"p": 3, "q": 4, "r": 5}, "It runs where r is q: dims={'r': 'q'}."),
        ("s = Add(a, b) y = Add(s, c)", {"p": 3, "q": 4, "r": 5}, "It runs where q and r are p: dims={'q': 'p', "),
        (
            "s = Concat<axis=0>(a, b) y = Add(s, c)",
            {"p": 3, "q": 4, "r": 9},
            "It runs where r is p + q: dims={'r': 'p + ",
        ),
        ("y = Add(c, table)", {"p": 3, "q": 4, "r": 9}, "It runs where r is 6: dims={'r': 6}."),
        ("y = Add(b, table)", {"p": 3, "q": (2, 4), "r": (2, 9)}, "It runs where q is 6: dims={'q': 6}."),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "none"])
def test_single_sizes_that_contradict_each_other_are_named(
    nodes: str, asked: dict[str, Any], said: str, device: str
) -> None:
    text = f'<ir_version: 9, opset_import: ["": 17]> g (float[p,2] a, float[q,2] b, float[r,2] c) => (y) {{ {nodes} }}'
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((6, 2), np.float32), "table"))
    with pytest.raises(memonger.MemongerError) as refusal:
        memonger.search_plan(model, mode="inference", dims=asked, device=device)
    assert said in str(refusal.value)
    answer = eval(str(refusal.value).rpartition("dims=")[2].rstrip("."))
    assert memonger.search_plan(model, mode="inference", dims={**asked, **answer}, device=device)


_ROWS_OF_SIXTEEN = """<ir_version: 9, opset_import: ["": 17]> g (float[n,8] x) => (y)
    <int64[1] sixteen = {16}, int64[1] eight = {8}, int64[2] joined = {0, -1}> {
        s = Shape<start=0, end=1>(x) rows = Div(s, sixteen) wanted = Concat<axis=0>(rows, sixteen, eight)
        r = Relu(x) apart = Reshape(r, wanted) y = Reshape(apart, joined) }"""


@pytest.mark.parametrize(("asked", "said"), [((64, 67), "is 64: dims={'n': 64}"), ((60, 67), "is 64: dims={'n': 64}"),
                                             ((60, 90), "can be divided by 16: dims={'n': (64, 80, 16)}")])  # fmt: skip
@pytest.mark.parametrize("device", ["cpu", "none"])
def test_of_a_range_with_one_size_that_runs_it_is_named(asked: tuple[int, int], said: str, device: str) -> None:
    model = onnx.parser.parse_model(_ROWS_OF_SIXTEEN)
    with pytest.raises(memonger.MemongerError, match=re.escape(f"It runs where n {said}.")):
        memonger.search_plan(model, mode="inference", dims={"n": asked}, device=device)


def test_a_single_size_whose_run_fails_gets_the_next_that_runs() -> None:
    """ONNX's inference sees nothing wrong: the shape that is reshaped to is computed."""
    model = onnx.parser.parse_model(_ROWS_OF_SIXTEEN)
    with pytest.raises(memonger.MemongerError, match=r"(?s)run failed.* can be divided by 16: dims=\{'n': 80\}"):
        memonger.search_plan(model, mode="inference", dims={"n": 65}, device="cpu")


def test_a_constant_image_is_resized_to_every_size() -> None:
    """Of inputs without a rank onnxruntime follows the sizes to none at all, and refuses the model (1.32.0)."""
    model = networks.model_of(
        [
            helper.make_node("Shape", ["x"], ["s"], start=2), helper.make_node("Div", ["s", "two"], ["half"]),
            helper.make_node("Concat", ["front", "half"], ["sizes"], axis=0),
            helper.make_node("Resize", ["image", "", "", "sizes"], ["y"], mode="linear"),
        ],
        {"x": ["n", 3, "h", "w"]}, {"y": [1, 2, "a", "b"]},
        two=np.array([2]), front=np.array([1, 2]), image=np.arange(32, dtype=np.float32).reshape(1, 2, 4, 4),
    )  # fmt: skip
    plan = memonger.search_plan(model, mode="inference", dims={"n": (1, 2), "h": (8, 12), "w": (8, 12)})
    session = memonger.Session(plan)
    for shape in ((1, 3, 8, 12), (2, 3, 11, 9)):
        feed = {"x": np.ones(shape, np.float32)}
        assert networks.same_bits(session.run(feed), networks.run_stock(networks.stock(model), feed))


def test_plans_for_inputs_of_other_ranks_share_a_session() -> None:
    model = networks.model_of([helper.make_node("Relu", ["x"], ["y"])], {"x": None}, {"y": None})
    feeds = [{"x": np.ones(shape, np.float32)} for shape in ((2, 3), (2, 3, 4))]
    session = memonger.Session([memonger.search_plan(model, mode="inference", inputs=feed) for feed in feeds])
    assert [session.run(feed)["y"].shape for feed in feeds] == [(2, 3), (2, 3, 4)]


def test_attention_of_the_standard_runs_at_every_size() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 11, opset_import: ["": 23]> g (float[1,s,64] q, float[1,s,64] k, float[1,s,64] v)
            => (float[1,s,64] y) { y = Attention<q_num_heads=4, kv_num_heads=4>(q, k, v) }"""
    )
    plan = memonger.search_plan(model, mode="inference", dims={"s": (1, 8)})
    session, stock = memonger.Session(plan), networks.stock(model)
    for s in (8, 1, 5):
        feeds = {name: np.random.default_rng(s).standard_normal((1, s, 64), np.float32) for name in "qkv"}
        assert networks.same_bits(session.run(feeds), networks.run_stock(stock, feeds))


BODIES = {
    "branches of one shape": (
        "go = ReduceMax<keepdims=0>(x) c = Equal(go, go) "
        "b = If(c) <then_branch = t () => (float[a,b] u) { u = Relu(x) }, "
        "else_branch = e () => (float[a,b] v) { v = Neg(x) }> y = Sin(b)",
        ["b"], [],
    ),
    "branches of two shapes": (
        "go = ReduceMax<keepdims=0>(x) c = Equal(go, go) "
        "b = If(c) <then_branch = t () => (float[a,b] u) { u = Concat<axis=0>(x, x) }, "
        "else_branch = e () => (float[a,b] v) { v = Neg(x) }> y = Sin(b)",
        [], ["b"],
    ),
    "turns that keep a shape": (
        "go = Constant<value = bool {1}>() three = Constant<value_int = 3>() "
        "k, l = Loop(three, go, x) <body = b (int64 i, bool d, float[n,s] v) => (bool d2, float[n,s] v2, float[s] u) {"
        " d2 = Identity(d) v2 = Add(v, x) u = ReduceSum<keepdims=0>(v2, nought) }> m = ReduceSum(l, nought) "
        "n = Squeeze(m, nought) y = Add(k, n)",
        ["k"], ["l"],
    ),
    "elements of a sequence": (
        "z = Constant<value_floats = [0.0]>() s0 = ReduceSum<keepdims=0>(x, nought) "
        "k, l = Scan<num_scan_inputs = 1, body = b (float[s] h, float[s] v) => (float[s] h2, float[s] u) {"
        " h2 = Add(h, v) u = Tanh(h2) }>(s0, x) m = Unsqueeze(k, nought) y = Add(l, m)",
        ["k", "l"], [],
    ),
}  # fmt: skip
"""Nodes with bodies: what of them is planned, and what is left to the runtime."""


@pytest.mark.parametrize("kind", BODIES)
def test_nodes_with_bodies_are_planned_as_far_as_their_sizes_are_told(kind: str) -> None:
    text, planned, left = BODIES[kind]
    model = _text(text)
    plan = memonger.search_plan(model, mode="inference", dims={"n": (1, 4), "s": (4, 20)}, device="none")
    graph = plan.graph
    assert all(graph.planned[graph.values.index(name)] for name in planned)
    assert not any(graph.planned[graph.values.index(name)] for name in left)
    _run_all(memonger.Session(plan), model, [(4, 20), (1, 4), (3, 9)], "ORT_DISABLE_ALL")
