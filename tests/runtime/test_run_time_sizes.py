"""Values whose size only a run can tell: counted as runs showed them, and held to a limit where a budget is set."""

import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import memonger
from memonger.allocation.buffers import Buffer
from memonger.allocation.onnxruntime_arena import region_bytes
from memonger.plan import LIMIT_MARGIN
from memonger.report.summary import headline, plan_record
from memonger.runtime import process_memory
from memonger.units import MiB
from tests.support import networks
from tests.support.command_line import invoke

N, TIMES = 100_000, 24


def _picking() -> onnx.ModelProto:
    """What is above zero, repeated: half of the elements of random numbers, all of positive ones."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]> g (float[{N}] x) => (float y) {{
            c = Greater(x, zero) [pick] a = Compress(x, c) b = Unsqueeze(a, one) t = Tile(b, times) u = Sqrt(t)
            y = ReduceSum<keepdims=0>(u) }}"""
    )
    held = {"zero": np.float32(0), "one": np.array([1]), "times": np.array([1, TIMES])}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in held.items())
    return model


def _looping() -> onnx.ModelProto:
    """A loop whose body takes 800 KB at once in each turn, and which keeps a number of each."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]> g (float[500] x, int64 n) => (float[s] y, float[500] z) {
            go = Constant<value = bool {1}>() [turns] z, y = Loop(n, go, x) <body = b (int64 i, bool c, float[500] v)
                => (bool c2, float[500] v2, float u) {
                c2 = Identity(c) big = Tile(v, reps) root = Sqrt(big) u = ReduceSum<keepdims=0>(root) v2 = Identity(v)
            }> }"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([200]), "reps"))
    return model


def _finding() -> onnx.ModelProto:
    """All that is above zero, as an output whose size a run decides."""
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]> g (float[{N}] x) => (float[n] y) {{
            r = Relu(x) i = NonZero(r) t = Transpose(i) v = GatherND(x, t) w = Sqrt(v) y = Exp(w) }}"""
    )


CARRIED = 1 << 20


def _carrying(returned: str) -> onnx.ModelProto:
    """Loops one after the other, each of which hands a weight of 4 MiB around and returns it, or a copy, to nobody."""
    copied = "z = Sub(u, u) keep = GreaterOrEqual(u, z) t = Compress(u, keep)" if returned == "t" else ""
    loops = "".join(
        f"""[loop{k}] r{k + 1}, w{k + 1} = Loop(n, go, r{k}, w)
            <body = b{k} (int64 i, bool c, float[4] v, float[m] u) => (bool c2, float[4] v2, float[m] {returned})
            {{ c2 = Identity(c) v2 = Neg(v) {copied} }}>"""
        for k in range(4)
    )
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]> g (float[4] x, int64 n) => (float[4] y) {{
            r0 = Neg(x) go = Constant<value = bool {{1}}>() {loops} y = Neg(r4) }}"""
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(CARRIED, np.float32), "w"))
    return model


GROWTH = """
import sys
import numpy as np, memonger
from memonger.runtime import process_memory
session, feeds = memonger.Session(sys.argv[1]), {"x": np.ones(4, np.float32), "n": np.array(5)}
print(process_memory.peak_over(process_memory.settle(), lambda: [session.run(feeds) for _ in range(3)]))
assert (session.run(feeds)["y"] == 1).all()
"""


@pytest.mark.parametrize(
    ("returned", "at_once"), [("u", 1), ("t", 6.25)]
)  # copies of three loops, and in the last two, zeros and a mask
def test_what_loops_return_to_nobody_counts_to_the_end_of_a_run(returned: str, at_once: int, tmp_path: Path) -> None:
    plan = _plan(_carrying(returned), inputs={"x": np.ones(4, np.float32), "n": np.array(5)})
    assert plan.predicted_bytes is not None
    if not process_memory.is_measurable():
        return
    plan.save(tmp_path / "planned.onnx")
    command = [sys.executable, "-c", GROWTH, str(tmp_path / "planned.onnx")]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert plan.predicted_bytes == pytest.approx(4 * CARRIED * at_once, rel=0.05)
    assert int(told.stdout) == pytest.approx(plan.predicted_bytes, rel=0.1)


HALF = {"x": np.random.default_rng(0).standard_normal(N, np.float32)}
ALL = {"x": np.abs(HALF["x"])}
OF_ALL = N * 4 * (TIMES * 2)  # two values of that size at once
TURNS: dict[str, Any] = {"x": np.ones(500, np.float32), "n": np.array(3)}


def _plan(model: onnx.ModelProto, **keywords: Any) -> memonger.Plan:
    return memonger.search_plan(model, mode="inference", device="cpu", **keywords)


@cache
def _limited() -> memonger.Plan:
    return _plan(_picking(), budget="12MiB")


@cache
def _free() -> memonger.Plan:
    return _plan(_picking())


def test_they_are_counted_as_the_calibrating_run_saw_them() -> None:
    half, everything = _free(), _plan(_picking(), inputs=ALL)
    assert everything.run_time_bytes == pytest.approx(OF_ALL, rel=0.05)
    assert half.run_time_bytes == pytest.approx(OF_ALL / 2, rel=0.05)
    assert everything.total_bytes == everything.arena_bytes + everything.run_time_bytes + (
        (everything.workspace_bytes or 0) + everything.parameter_bytes + everything.input_bytes
    )
    assert everything.run_time["t"] == N * 4 * TIMES
    (note,) = everything.notes
    assert "only a run can tell the size of 4 values, which 'pick' (Compress) decides" in note
    assert memonger.count_memory(everything).after.total == everything.total_bytes  # type: ignore[union-attr]


def test_a_body_counts_with_what_its_nodes_take_at_once() -> None:
    plan = _plan(_looping(), inputs=TURNS)
    assert plan.workspace_bytes == pytest.approx(2 * 100_000 * 4, rel=0.01)


def test_a_budget_that_they_do_not_fit_is_refused_and_the_one_named_works() -> None:
    for model, inputs in ((_picking(), None), (_looping(), TURNS)):
        with pytest.raises(memonger.BudgetError) as raised:
            _plan(model, budget="512KiB", inputs=inputs)
        plan = _plan(model, budget=raised.value.smallest, inputs=inputs)
        assert plan.total_bytes + LIMIT_MARGIN == raised.value.smallest


def test_a_budget_holds_for_what_was_measured_and_a_run_that_needs_more_ends_in_an_error(tmp_path: Path) -> None:
    plan = _limited()
    assert plan.limit is not None
    assert plan.total_bytes - plan.run_time_bytes - (plan.workspace_bytes or 0) + plan.limit <= 12 * MiB
    assert "the budget holds for inputs like those that were measured" in plan.notes[-1]
    path = tmp_path / "planned.onnx"
    plan.save(path)
    assert memonger.Plan.load(path).limit == plan.limit
    stock = networks.run_stock(networks.stock(_picking()), HALF)
    for session in (memonger.Session(plan), memonger.Session(path)):
        before = process_memory.settle()
        for _ in range(2):
            assert networks.same_bits(session.run(HALF), stock)
            with pytest.raises(memonger.SessionError, match=r"than its limit.*node '\w+' asked for more"):
                session.run(ALL)
        assert networks.same_bits(session.run(HALF), stock)
        session.release()
        assert networks.same_bits(session.run(HALF), stock)
        assert process_memory.settle() - before < 12 * MiB


def test_the_measured_inputs_run_under_the_smallest_budget() -> None:
    for model, inputs in ((_picking(), ALL), (_looping(), TURNS), (_finding(), HALF)):
        smallest = _plan(model, inputs=inputs).total_bytes + LIMIT_MARGIN
        session = memonger.Session(_plan(model, inputs=inputs, budget=smallest))
        stock = networks.run_stock(networks.stock(model), inputs)
        kept = [session.run(inputs) for _ in range(3)]  # what they are given is the caller's
        assert all(networks.same_bits(results, stock) for results in kept)


def test_a_loop_of_more_turns_than_the_limit_holds_ends_in_an_error() -> None:
    session = memonger.Session(_plan(_looping(), budget="1MiB", inputs=TURNS))
    assert session.run({**TURNS, "n": np.array(50)})["y"].shape == (50,)
    with pytest.raises(memonger.SessionError, match="needs more memory than its limit"):
        session.run({**TURNS, "n": np.array(2_000)})
    assert session.run(TURNS)["y"].shape == (3,)


def test_a_fleet_with_a_limit_holds_it() -> None:
    plan = _free()
    with pytest.raises(memonger.SessionError, match="'a' doesn't fit"):
        memonger.Fleet({"a": plan}, limit="8MiB")
    with memonger.Fleet({"a": plan, "b": _plan(_looping(), inputs=TURNS)}, limit="20MiB") as fleet:
        taken = fleet.memory().total
        assert taken > plan.total_bytes - plan.input_bytes + 800_000  # each of them has what it takes for itself
        stock = networks.run_stock(networks.stock(_picking()), HALF)
        assert networks.same_bits(fleet["a"].run(HALF), stock)
        with pytest.raises(memonger.SessionError, match="needs more memory than its limit"):
            fleet["a"].run(ALL)
        assert fleet["b"].run(TURNS)["y"].shape == (3,)
        assert networks.same_bits(fleet["a"].run(HALF), stock)


def test_sessions_without_a_limit_are_not_held_to_that_of_others() -> None:
    limited, free = memonger.Session(_limited()), memonger.Session(_free())
    stock = networks.run_stock(networks.stock(_picking()), ALL)
    with pytest.raises(memonger.SessionError, match="needs more memory than its limit"):
        limited.run(ALL)
    assert networks.same_bits(free.run(ALL), stock)
    made: list[memonger.Session] = []
    plans = [_limited(), _free()] * 2
    threads = [threading.Thread(target=lambda p=plan: made.append(memonger.Session(p))) for plan in plans]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for session in made:
        assert networks.same_bits(session.run(HALF), networks.run_stock(networks.stock(_picking()), HALF))


def test_a_budget_without_a_device_is_held_by_the_session() -> None:
    plan = memonger.search_plan(_picking(), mode="inference", device="none", budget="8MiB")
    assert "they aren't counted" in plan.notes[0]
    assert "isn't measured. A run that needs more than" in plan.notes[1]
    session = memonger.Session(plan)
    with pytest.raises(memonger.SessionError, match="needs more memory than its limit"):
        session.run(ALL)


def test_they_have_a_line_of_their_own(tmp_path: Path) -> None:
    plan = _limited()
    record = plan_record(plan, "picking.onnx", None)
    assert (record["run_time_bytes"], record["limit_bytes"]) == (plan.run_time_bytes, plan.limit)
    assert "sized at run time" in headline(record)[0]
    model = tmp_path / "picking.onnx"
    onnx.save(_picking(), model)
    words = ["plan", str(model), "--device", "cpu", "--mode", "inference", "--budget", "12MiB"]
    done = invoke(*words)
    assert "to spare for inputs like those that were measured" in " ".join(done.output.split())


def test_a_region_is_as_large_as_its_pieces_need() -> None:
    assert region_bytes([]) == 0
    one_after_another = [Buffer(0, 1000, 0, 2), Buffer(1, 512, 2, 4)]
    assert region_bytes(one_after_another) == 1024
    in_between = [Buffer(0, 256, 0, 2), Buffer(1, 256, 1, 4), Buffer(2, 512, 2, 4)]
    assert region_bytes(in_between) == 1024  # 768 bytes are alive at once, and a piece of 256 is in the way


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_a_first_run_keeps_nothing_of_the_turns_of_a_loop(device: str) -> None:
    """onnxruntime's profiler would keep 2.8 KB of each node of each turn as long as the session lives."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]> g (float[4] x, int64 n) => (float[4] z) {
            go = Constant<value = bool {1}>() [turns] z = Loop(n, go, x) <body = b (int64 i, bool c, float[4] v)
                => (bool c2, float[4] v2) { c2 = Identity(c) v2 = Neg(v) }> }"""
    )
    x = np.arange(4, dtype=np.float32)
    plan = memonger.search_plan(model, mode="inference", device=device, inputs={"x": x, "n": np.array(3)})
    session = memonger.Session(plan)
    before = process_memory.settle()
    assert np.array_equal(session.run({"x": x, "n": np.array(20_001)})["z"], -x)
    process_memory.give_back()
    assert process_memory.resident().now - before < 20 * MiB
