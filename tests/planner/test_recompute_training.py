"""Training with recomputation: three steps give the losses and the state of three steps without, bit for bit."""

import functools

import numpy as np
import pytest

import memonger
import models

pytest.importorskip("onnxruntime")

from tests.support.training_models import trained

NETWORKS = {
    "resnet18": {"image": 16, "width": 0.125, "batch": 64},
    "unet": {"image": 64, "width": 0.125, "batch": 2},
    "gpt": {"num_layers": 2, "width": 64, "seq_len": 32, "vocabulary": 100, "batch": 4},
    "lstm": {"seq_len": 4, "num_hidden": 32, "vocabulary": 50, "batch": 16, "dropout": 0.3},
}
BUDGETS = {"resnet18": 0.5, "unet": 0.7, "gpt": 0.4, "lstm": 0.9}
"""Parts of the peak with nothing recomputed."""
STEPS = 3
EFFORT = 200


@functools.cache
def _training(name: str) -> memonger.Model:
    model = memonger.load(models.build_ir(name, training=True, **NETWORKS[name]))
    return memonger.differentiate(model, loss="loss", optimizer=memonger.SGD(lr=0.05, momentum=0.9))


@functools.cache
def _plain(name: str) -> tuple[memonger.Plan, tuple[float, ...], dict[str, np.ndarray]]:
    plan = memonger.search_plan(_training(name), device="none", strategy="none", order="file")
    return plan, *trained(plan, STEPS)


def _same(plan: memonger.Plan, name: str) -> None:
    _, losses, state = _plain(name)
    found_losses, found_state = trained(plan, STEPS)
    assert found_losses == losses
    assert found_state.keys() == state.keys()
    for key, array in state.items():
        np.testing.assert_array_equal(found_state[key], array, err_msg=key)


@pytest.mark.parametrize(("name", "part"), BUDGETS.items())
def test_a_budget_changes_no_bit(name: str, part: float) -> None:
    plain, _, _ = _plain(name)
    budget = plain.total_bytes - plain.arena_bytes + int(plain.peak_bytes * part)
    plan = memonger.search_plan(_training(name), device="none", budget=budget, effort=EFFORT)
    assert plan.recomputed
    assert plan.total_bytes <= budget
    _same(plan, name)
