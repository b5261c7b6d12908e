"""One session for several plans of one model: one arena, one copy of the weights, the plan picked by the shapes."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import memonger
from memonger.runtime import process_memory
from memonger.runtime.program import alike, programs_alike
from tests.support import networks

BATCHES = (1, 8, 32)
WIDE = 16384  # weights of 9 MB: what a second copy takes stands out


def _model(width: int = 256, seed: int = 0) -> onnx.ModelProto:
    """Convolutions and a Reshape by a constant, then a large MatMul, whose weights onnxruntime prepacks."""
    rng = np.random.default_rng(seed)
    weights = {
        "k": rng.standard_normal((8, 3, 3, 3)).astype(np.float32),
        "w": rng.standard_normal((128, width)).astype(np.float32) / 11,
        "v": rng.standard_normal((width, 10)).astype(np.float32) / 16,
    }
    nodes = [
        helper.make_node("Conv", ["x", "k"], ["c"], name="conv", strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"], name="relu"),
        helper.make_node("Shape", ["r"], ["s"], name="shape", start=0, end=1),
        helper.make_node("Concat", ["s", "rest"], ["t"], name="concat", axis=0),
        helper.make_node("Reshape", ["r", "t"], ["f"], name="reshape"),
        helper.make_node("MatMul", ["f", "w"], ["h"], name="matmul"),
        helper.make_node("Tanh", ["h"], ["a"], name="tanh"),
        helper.make_node("MatMul", ["a", "v"], ["y"], name="matmul2"),
    ]
    weights["rest"] = np.array([128], np.int64)
    return networks.model_of(nodes, {"x": ["batch", 3, 8, 8]}, {"y": ["batch", 10]}, **weights)


def _x(batch: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((batch, 3, 8, 8)).astype(np.float32)


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_each_run_picks_its_plan(device: str) -> None:
    plans = [memonger.search_plan(_model(), batch=batch, device=device, mode="inference") for batch in BATCHES]
    session = memonger.Session(plans)
    assert session.arena.size == max(plan.arena_bytes for plan in plans)
    stock = networks.stock(_model(), "ORT_DISABLE_ALL" if device == "none" else "ORT_ENABLE_ALL")
    for seed, batch in enumerate((8, 1, 32, 1, 8, 32, 32, 1)):
        session.arena.fill(0xFF)
        expected = networks.run_stock(stock, {"x": _x(batch, seed)})
        assert networks.same_bits(session.run({"x": _x(batch, seed)}), expected)


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_plans_that_differ_in_shapes_share_one_runtime_session(device: str) -> None:
    plans = [memonger.search_plan(_model(), batch=batch, device=device, mode="inference") for batch in BATCHES]
    assert alike(plans) == [[0, 1, 2]]
    if device == "cpu":
        fed = [len(program.constants) for program in programs_alike(plans)[1]]
        assert fed == [1, 1, 1], "onnxruntime made the Reshape's target a constant, another in each plan"


def test_plans_of_other_structure_run_in_a_session_of_their_own() -> None:
    plans = [
        memonger.search_plan(_model(), batch=1, device="cpu", mode="inference"),
        memonger.search_plan(_model(), batch=8, device="none", mode="inference"),
    ]
    assert len(alike(plans)) == 2
    session = memonger.Session(plans)
    for batch, level in ((1, "ORT_ENABLE_ALL"), (8, "ORT_DISABLE_ALL")):
        expected = networks.run_stock(networks.stock(_model(), level), {"x": _x(batch, 3)})
        assert networks.same_bits(session.run({"x": _x(batch, 3)}), expected)


def test_other_weights_are_never_shared() -> None:
    plans = [
        memonger.search_plan(_model(seed=seed), batch=batch, device="none", mode="inference")
        for seed, batch in ((0, 1), (1, 8))
    ]
    session = memonger.Session(plans)
    for seed, batch in ((0, 1), (1, 8)):
        expected = networks.run_stock(networks.stock(_model(seed=seed), "ORT_DISABLE_ALL"), {"x": _x(batch, 5)})
        assert networks.same_bits(session.run({"x": _x(batch, 5)}), expected)


def test_plans_from_files_share_too(tmp_path: Path) -> None:
    paths = []
    for batch in BATCHES:
        paths.append(f"{tmp_path}/{batch}.onnx")
        memonger.search_plan(_model(), batch=batch, device="cpu", mode="inference").save(paths[-1])
    session = memonger.Session(paths)
    expected = networks.run_stock(networks.stock(_model()), {"x": _x(8, 1)})
    assert networks.same_bits(session.run({"x": _x(8, 1)}), expected)


def test_a_shape_without_a_plan_is_named() -> None:
    plans = [memonger.search_plan(_model(), batch=batch, device="none", mode="inference") for batch in (1, 8)]
    with pytest.raises(memonger.SessionError, match=r"no plan was made for .*\[4, 3, 8, 8\].*\[1, 3, 8, 8\]"):
        memonger.Session(plans).run({"x": _x(4, 0)})


def test_what_is_no_family_is_refused() -> None:
    plan = memonger.search_plan(_model(), batch=1, device="none", mode="inference")
    other = networks.model_of([helper.make_node("Relu", ["z"], ["q"], name="r")], {"z": [2]}, {"q": [2]})
    with pytest.raises(memonger.SessionError, match="at least one"):
        memonger.Session([])
    with pytest.raises(memonger.SessionError, match="plans 0 and 1 are for the same input shapes"):
        memonger.Session([plan, plan])
    with pytest.raises(memonger.SessionError, match="plan 1 is of another model"):
        memonger.Session([plan, memonger.search_plan(other, device="none", mode="inference")])


PROBE = """
import json, sys
import numpy as np
import memonger
from memonger.runtime import process_memory as memory
baseline = memory.settle()
session = memonger.Session(sys.argv[1:], check_order=False)
loaded = memory.settle() - baseline
peak = 0
for batch in (1, 8, 32):
    if any(f"/{batch}.onnx" in path for path in sys.argv[1:]):
        x = np.zeros((batch, 3, 8, 8), np.float32)
        before = memory.settle()
        peak = max(peak, memory.peak_over(before, lambda: session.run({"x": x}, copy=False)))
print(json.dumps([loaded, peak, session.arena.size]))
"""


@pytest.mark.skipif(not process_memory.is_measurable(), reason="this system doesn't account for memory")
def test_three_plans_take_the_arena_of_the_largest_and_the_weights_once(tmp_path: Path) -> None:
    mib = 1 << 20
    paths = {}
    for batch in BATCHES:
        paths[batch] = str(tmp_path / f"{batch}.onnx")
        memonger.search_plan(_model(width=WIDE), batch=batch, device="cpu", mode="inference", chunks="off").save(
            paths[batch]
        )

    def measured(batches: tuple[int, ...]) -> list[int]:
        command = [sys.executable, "-c", PROBE, *(paths[batch] for batch in batches)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found: list[int] = json.loads(done.stdout)
        return found

    weights = 128 * WIDE * 4 + WIDE * 10 * 4
    one, three = measured((32,)), measured(BATCHES)
    assert one[0] > weights
    assert three[0] - one[0] < 2 * mib, "loading two more plans adds no weights"
    assert three[2] == one[2], "the arena is the largest plan's"
    assert three[1] - one[1] < 2 * mib, "and a run takes no more than the largest plan's"
