"""The memory measurement, against needs that are known."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from onnx import helper

import memonger
from memonger.runtime import process_memory
from memonger.runtime.measure import Measured, MeasuredSession, RunJob, take_turns
from tests.support import networks

MIB = 1 << 20
pytestmark = pytest.mark.skipif(not process_memory.is_measurable(), reason="this system doesn't account for memory")

PROBE = """
import json, sys
import numpy as np
from memonger.runtime import process_memory as memory
need = int(sys.argv[1]) << 20
littered = [np.ones(100_000) for _ in range(300)]  # 240 MB in blocks the C library keeps when they are freed
del littered
baseline = memory.settle()
def work():
    block = np.ones(need, np.uint8)
    return int(block[-1])
print(json.dumps([memory.peak_over(baseline, work), memory.peak_over(baseline, lambda: None)]))
"""


@pytest.mark.parametrize("need", [16, 200])
def test_a_known_need_is_measured_despite_freed_memory(need: int) -> None:
    done = subprocess.run([sys.executable, "-c", PROBE, str(need)], capture_output=True, text=True, check=True)
    measured, nothing = json.loads(done.stdout)
    assert abs(measured - need * MIB) < MIB
    assert nothing < MIB


def _measure(folder: Path, model: Path, planned: bool, **options: bool) -> Measured:
    job = RunJob(str(model), str(folder / "x.npz"), str(folder / "y.npz"), planned, "ORT_DISABLE_ALL", **options)
    with MeasuredSession(job, folder, "job") as worker:
        take_turns([worker], 1, 2)
        return worker.result()


def test_runs_of_a_model_whose_need_is_known(tmp_path: Path) -> None:
    """Three MatMuls in a row by a 64×64 matrix, each result 32 MiB: two of them alive at a time, no scratch that grows.

    Without an arena of its own onnxruntime takes exactly that; the plan says so beforehand.
    """
    rows = 32 * MIB // (64 * 4)
    weights = {f"w{i}": np.full((64, 64), 1 / 64, np.float32) for i in range(3)}
    nodes = [helper.make_node("MatMul", [a, f"w{i}"], [b], name=f"m{i}") for i, (a, b) in enumerate(("xa", "ab", "by"))]
    model = networks.model_of(nodes, {"x": [rows, 64]}, {"y": [rows, 64]}, **weights)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    np.savez(tmp_path / "x.npz", x=np.ones((rows, 64), np.float32))
    plan = memonger.search_plan(model, device="cpu", mode="inference", chunks="off")
    assert plan.arena_bytes == 64 * MIB
    plan.save(tmp_path / "planned.onnx")
    stock = _measure(tmp_path, tmp_path / "model.onnx", planned=False, arena=False, pattern=False)
    ours = _measure(tmp_path, tmp_path / "planned.onnx", planned=True)
    assert stock.peak_bytes is not None
    assert ours.peak_bytes is not None
    assert abs(stock.peak_bytes - 64 * MIB) < 3 * MIB
    assert plan.predicted_bytes == 64 * MIB
    assert abs(ours.peak_bytes - 64 * MIB) < MIB


def test_scratch_of_several_steps_takes_the_largest_alone(tmp_path: Path) -> None:
    """LRN takes scratch as large as its input: 8 MiB at first, then 24. Left alone the runtime keeps 32.

    What the plan expects stock onnxruntime to take is measured, too.
    """
    nodes = [
        helper.make_node("LRN", ["x"], ["a"], name="small", size=3),
        helper.make_node("Concat", ["a", "a", "a"], ["b"], name="concat", axis=0),
        helper.make_node("LRN", ["b"], ["y"], name="large", size=3),
    ]
    model = networks.model_of(nodes, {"x": [8, 32, 64, 128]}, {"y": [24, 32, 64, 128]})
    np.savez(tmp_path / "x.npz", x=np.ones((8, 32, 64, 128), np.float32))
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    plan = memonger.search_plan(model, device="cpu", level="disable", mode="inference", chunks="off")
    stock = _measure(tmp_path, tmp_path / "model.onnx", planned=False)
    assert stock.peak_bytes is not None
    assert plan.stock_bytes is not None
    assert stock.peak_bytes == pytest.approx(plan.stock_bytes - plan.input_bytes, rel=0.05)
    assert plan.workspace_bytes is not None
    assert plan.workspace_bytes > 24 * MIB
    plan.save(tmp_path / "planned.onnx")
    ours = _measure(tmp_path, tmp_path / "planned.onnx", planned=True)
    assert ours.peak_bytes is not None
    assert plan.predicted_bytes is not None
    assert abs(ours.peak_bytes - plan.predicted_bytes) < 3 * MIB
