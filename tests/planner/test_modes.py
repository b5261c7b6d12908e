"""What a model is planned for where nobody says: training or inference."""

from typing import Any

import onnx
import pytest

import memonger
from memonger.ir.marks import FORCE, STAGE
from tests.support.planning_models import LOSS, chain, marked


def _plan(source: object, **options: Any) -> memonger.Plan:
    found: memonger.Plan = memonger.search_plan(source, device="none", **options)
    return found


def test_a_model_with_nothing_of_training_is_planned_for_inference() -> None:
    plan = _plan(chain())
    assert (plan.mode, plan.strategy, plan.training) == ("inference", "none", None)
    assert plan.notes == (
        "planned for inference, as the model has no gradients and no loss is given: loss=NAME plans its training step.",
    )


@pytest.mark.parametrize(
    ("key", "marks", "words"),
    [
        (STAGE, {"relu2": "True", "relu5": "late"}, "as 2 of its nodes carry marks"),
        (FORCE, {"relu2": "True"}, "as 1 of its nodes carries marks"),
        (FORCE, {"relu2": "False"}, "as 1 of its nodes carries marks"),
    ],
)
def test_marks_mean_training_by_the_sweep(key: str, marks: dict[str, str], words: str) -> None:
    plan = _plan(marked(chain(), key, marks))
    assert (plan.mode, plan.strategy) == ("training", "sweep")
    assert words in plan.notes[0]
    assert "mode='inference' plans it for inference" in plan.notes[0]


def test_a_mark_that_says_no_stage_is_none() -> None:
    assert _plan(marked(chain(), STAGE, {"relu2": "False"})).mode == "inference"


def test_a_mode_that_is_given_counts_and_needs_no_note() -> None:
    plan = _plan(marked(chain(), STAGE, {"relu2": "True"}), mode="inference")
    assert (plan.mode, plan.notes) == ("inference", ())
    assert _plan(chain(), mode="training", loss=LOSS).notes == ()


def test_without_a_loss_the_gradients_of_the_outputs_are_inputs_and_told() -> None:
    plan = _plan(chain(), mode="training")
    assert plan.notes == (
        "no loss is given, so the gradients of the outputs became inputs ('y.grad'): loss='softmax_cross_entropy' "
        "puts a loss into the model.",
    )
    assert "y.grad" in [value.name for value in plan.model.graph.inputs]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss": LOSS}, "as a loss is given"),
        ({"mirror": ["Relu"]}, "as mirror is given"),
        ({"strategy": "cheap"}, "as strategy 'cheap' is for training"),
    ],
)
def test_what_only_training_has_means_training(options: dict[str, Any], words: str) -> None:
    plan = _plan(chain(), **options)
    assert plan.mode == "training"
    assert words in plan.notes[0]


@pytest.mark.parametrize("options", [{"keep": ["relu2"], "budget": "1GiB"}, {"budget": "1GiB"}, {"strategy": "none"}])
def test_what_inference_has_too_does_not(options: dict[str, Any]) -> None:
    assert _plan(chain(), **options).mode == "inference"


def test_training_models_are_planned_for_training() -> None:
    training = memonger.differentiate(chain(), loss=LOSS)
    assert (_plan(training).mode, _plan(training).strategy) == ("training", "sweep")
    assert "as the model has gradients already" in _plan(training).notes[0]
    form = memonger.to_training_mode(chain())
    assert "as the model is in training form" in _plan(form, loss=None).notes[0]


def test_a_frontier_follows_the_same_rule() -> None:
    model = marked(chain(), STAGE, {"relu2": "True"})
    for source, mode in ((chain(), "inference"), (model, "training")):
        plans = memonger.pareto(source, points=2, device="none", effort=1000)
        assert {plan.mode for plan in plans} == {mode}


def test_the_functions_of_mirror_plans_are_for_training() -> None:
    assert memonger.get_cost(chain()) == _plan(chain(), mode="training", strategy="marks").peak_bytes
    mirrored = memonger.make_mirror_plan(chain(), 0)
    assert all(FORCE in node.metadata_props for node in mirrored.graph)


def test_an_open_batch_is_told_with_the_plan() -> None:
    model: onnx.ModelProto = chain()
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    plan = _plan(model, mode="inference")
    assert (plan.batch, plan.notes) == (1, ("the batch ('batch') has no size: it is 1, unless batch=N says another.",))
    assert (_plan(model, mode="inference", batch=3).batch, _plan(model, mode="inference", batch=1).notes) == (3, ())
