"""The plan under which a training step is calibrated that would take far more without one."""

from collections import Counter
from typing import Any

import onnx
import onnx_ir as ir
import pytest

import memonger
from memonger.ir.model import Model
from memonger.lowering import calibrate, first_plan
from memonger.lowering.first_plan import FirstPlan
from memonger.planner.search_plan import prepare
from tests.support import training_models
from tests.support.planning_models import chain

pytest.importorskip("onnxruntime")

STEP = memonger.Options(device="cpu", mode="training", loss="softmax_cross_entropy", optimizer=memonger.SGD(lr=0.1))


class _Runs:
    """Calibrating runs: what each was under, and what it showed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.under, self.shown = list[FirstPlan | None](), list[calibrate.CalibratingRun]()
        run = calibrate.run

        def noted(*given: Any) -> tuple[calibrate.CalibratingRun, ...]:
            self.under.append(given[8])
            self.shown += run(*given)
            return tuple(self.shown[-1:])

        monkeypatch.setattr(calibrate, "run", noted)


@pytest.mark.parametrize("model", [chain(24), training_models.classifier()])
def test_nodes_show_what_they_show_without_it(model: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = _Runs(monkeypatch)
    without = prepare(model, STEP).lowered
    monkeypatch.setattr(first_plan, "FEW", 0)
    monkeypatch.setattr(first_plan, "WELL_OVER", 0.0)
    under = prepare(model, STEP).lowered
    assert [one is None for one in runs.under] == [True, False]
    before, after = without.calibration, under.calibration
    assert before is not None
    assert after is not None
    assert runs.shown[1].tensors == runs.shown[0].tensors
    assert after.workspace == before.workspace
    names = [str(node.name) for node in under.model.graph]
    assert [str(node.name) for node in without.model.graph] == names
    assert sorted(after.seconds or {}) == sorted(before.seconds or {}) == sorted(names)


def test_a_step_that_takes_well_over_it_runs_under_it_and_has_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, plans = _Runs(monkeypatch), [memonger.search_plan(chain(24), options=STEP)]
    monkeypatch.setattr(first_plan, "FEW", 0)
    plans += [memonger.search_plan(chain(layers), options=STEP) for layers in (24, 1)]
    assert [one is None for one in runs.under] == [True, False, True]  # one layer has nothing to compute again
    first = runs.under[1]
    assert first is not None
    assert first.unplanned_bytes >= 2 * first.arena_bytes
    (whole,), (order,) = runs.shown[0].orders, runs.shown[1].orders
    assert Counter(name in first.again for name in order) == {False: len(whole), True: len(first.again)}
    assert plans[1].graph.nodes == plans[0].graph.nodes
    assert plans[1].offsets == plans[0].offsets


def test_a_run_that_fails_under_it_is_made_without(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = _Runs(monkeypatch)
    plan = memonger.search_plan(chain(24), options=STEP)
    monkeypatch.setattr(first_plan, "FEW", 0)
    inferred = first_plan.infer_once

    def wrong(model: Model) -> None:
        inferred(model)
        value = next(v for node in model.ir.graph for v in node.outputs if v.name == "h3")
        value.shape = ir.Shape([7, 7])

    monkeypatch.setattr(first_plan, "infer_once", wrong)
    assert memonger.search_plan(chain(24), options=STEP).offsets == plan.offsets
    assert len(runs.shown) == 2
    assert runs.under[1] is not None
    assert runs.under[2] is None
