"""Plans for a CUDA device, on one or on the stand-in: networks of every family, training in budgets, the commands."""

import json
from pathlib import Path
from typing import Any

import onnx
import pytest

import memonger
import models
from memonger.graph.graph import ALIGNMENT
from tests.models.test_models import small
from tests.planner.test_networks_planned import ALIKE
from tests.support.command_line import invoke
from tests.support.cuda import ON_STAND_IN, needs_cuda, on_stand_in

pytestmark = needs_cuda
TRAINING: dict[str, Any] = {"loss": "loss", "optimizer": memonger.SGD(lr=0.1, momentum=0.9), "device": "cuda:0"}


def _checked(plan: memonger.Plan, path: Path) -> memonger.Plan:
    """The plan as a file gives it back: loading follows the bytes of every value."""
    plan.save(path)
    loaded = memonger.Plan.load(path)
    mine, theirs = ({one.graph.values[value]: at for value, at in one.offsets.items()} for one in (plan, loaded))
    assert mine == theirs
    assert loaded.host == plan.host
    assert loaded.stamp == plan.stamp
    return loaded


@pytest.mark.parametrize("name", [name for name in models.NAMES if name not in ALIKE])
def test_every_family_is_planned_at_the_lower_bound(name: str, tmp_path: Path) -> None:
    plan = _checked(memonger.search_plan(small(name), mode="inference", device="cuda:0"), tmp_path / "plan.onnx")
    assert plan.lower_bound_bytes <= plan.arena_bytes < plan.lower_bound_bytes + ALIGNMENT
    assert plan.stamp is not None
    assert plan.stamp.provider == "CUDAExecutionProvider"
    assert not plan.host, "a family of models/ that falls back to the host in part"
    assert plan.workspace_bytes is not None


STEPS = {
    "resnet18": {"image": 32, "width": 0.25, "batch": 16},
    "unet": {"image": 64, "width": 0.125, "batch": 2},
    "gpt": {"num_layers": 3, "width": 32, "seq_len": 64, "vocabulary": 50, "batch": 2},
}


@pytest.mark.parametrize("name", STEPS)
def test_a_training_step_is_planned_in_less_than_it_takes(name: str, tmp_path: Path) -> None:
    source = models.build_ir(name, training=True, **STEPS[name])
    none = _checked(memonger.search_plan(source, strategy="none", **TRAINING), tmp_path / "none.onnx")
    beside = none.parameter_bytes + none.input_bytes
    budget = beside + int(0.9 * (none.total_bytes - beside))
    held = _checked(memonger.search_plan(source, budget=budget, **TRAINING), tmp_path / "held.onnx")
    assert held.total_bytes <= budget < none.total_bytes
    if ON_STAND_IN:  # a device's own workspace may leave enough to gain by another order
        assert held.recomputed
    assert not none.host, "a step that falls back to the host in part"


@on_stand_in
def test_a_step_that_does_not_fit_without_a_plan_is_measured_under_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.build("gpt", training=True, **{**STEPS["gpt"], "batch": 16})
    plan = memonger.search_plan(model, chunks="off", **TRAINING)
    assert plan.peak_before_bytes is not None
    monkeypatch.setenv("FAKE_CUDA_MEMORY", str(plan.peak_before_bytes * 3 // 4))
    again = memonger.search_plan(model, chunks="off", **TRAINING)
    assert again.workspace == plan.workspace
    assert again.offsets == plan.offsets
    monkeypatch.setenv("FAKE_CUDA_MEMORY", str(plan.total_bytes))
    with pytest.raises(memonger.PlanError, match="doesn't fit cuda:0, not even with a plan: "):
        memonger.search_plan(model, chunks="off", **TRAINING)


def test_the_commands_plan_and_run(tmp_path: Path) -> None:
    source, planned = tmp_path / "model.onnx", tmp_path / "planned.onnx"
    onnx.save(small("mobilenet_v2"), source)
    made = invoke("plan", source, "--mode", "inference", "--device", "cuda", "-o", planned, "--json")
    assert made.exit_code == 0, made.output
    told = json.loads(made.stdout)
    assert told["device"] == "cuda:0"
    assert told["total_bytes"] >= told["arena_bytes"] + told["parameter_bytes"]
    ran = invoke("run", planned, "--json")
    assert ran.exit_code == 0, ran.output
    if not ON_STAND_IN:
        compared = invoke("run", planned, "--compare", "--runs", "2", "--json")
        assert compared.exit_code == 0, compared.output
        assert json.loads(compared.stdout)["bitwise_equal"]
