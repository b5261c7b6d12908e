"""training.step_shares: every node of every segment is in the profile of each step, and only later steps count."""

from pathlib import Path

import onnx
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

import memonger
from benchmarks.training import step_shares
from memonger.runtime.profile import NodeRun
from tests.support.training_steps import batch, differentiated, model, net


def test_every_node_is_profiled_in_every_step(tmp_path: Path) -> None:
    memonger.search_plan(differentiated(model(net()))).save(tmp_path / "planned.onnx")
    session = memonger.TrainingSession(tmp_path / "planned.onnx")
    found, seconds = step_shares.profiles(session, batch(0))
    ran = sorted(run.name for runs in found for run in runs)
    nodes = [node.name for node in onnx.load(tmp_path / "planned.onnx").graph.node]
    assert ran == sorted(nodes * step_shares.STEPS)
    assert seconds > 0


def test_the_first_half_of_the_steps_and_outliers_do_not_count() -> None:
    half = step_shares.STEPS // 2
    times = [9.0] * half + [50.0] + [2.0] * (half - 1)
    runs = [NodeRun("a", "Mul", seconds, ()) for seconds in times]
    runs += [NodeRun(name, "Add", 1.0, ()) for name in "bc" for _ in range(step_shares.STEPS)]
    assert step_shares.by_operator(runs) == {"Mul": 2.0, "Add": 2.0}
