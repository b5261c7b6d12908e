"""The loss scale: doubled after many good steps, halved after an overflow, saved with the state."""

from pathlib import Path

import numpy as np
import pytest

import memonger
from memonger.errors import SessionError
from memonger.runtime.state import GOOD_STEPS, LARGEST, LEAST, LossScale
from tests.support.training_steps import batch, model, net


def test_it_doubles_after_2000_steps_in_a_row_and_halves_after_an_overflow() -> None:
    scale = LossScale(8.0)
    for _ in range(GOOD_STEPS - 1):
        scale = scale.after(True)
    assert scale.factor == 8.0
    assert scale.after(True) == LossScale(16.0)
    assert scale.after(False) == LossScale(4.0)
    assert LossScale(LEAST).after(False).factor == LEAST
    assert LossScale(LARGEST, GOOD_STEPS - 1).after(True).factor == LARGEST


def _session() -> memonger.TrainingSession:
    mixed = memonger.to_mixed_precision(memonger.to_training_mode(model(net())), "float16")
    loss = memonger.SoftmaxCrossEntropy(reduction="sum")  # at 2^16 its gradients overflow
    plans = [
        memonger.search_plan(
            memonger.differentiate(mixed, loss=loss, optimizer=memonger.AdamW(lr=0.01), accumulate=accumulate),
            threads=1,
            chunks="off",
        )
        for accumulate in ("apply", "add")
    ]
    return memonger.TrainingSession(plans[0], accumulation=plans[1])


@pytest.fixture(scope="module")
def session() -> memonger.TrainingSession:
    return _session()


def test_a_step_that_overflows_changes_nothing_and_training_goes_on_bit_for_bit_from_a_state(
    session: memonger.TrainingSession, tmp_path: Path
) -> None:
    assert session.loss_scale == 2.0**16
    before = session.state_dict()
    assert np.isfinite(session.step([batch(0), batch(1)]))
    assert (session.steps, session.skipped_steps, session.loss_scale) == (0, 1, 2.0**15)
    assert all((array == before[name]).all() for name, array in session.state_dict().items())
    while session.steps < 2:
        session.step([batch(0), batch(1)])
    assert session.loss_scale < 2.0**15
    session.save(tmp_path / "state")
    scale = session.loss_scale
    losses = [session.step(batch(seed)) for seed in range(4)]
    after, good = session.state_dict(), session._scale
    session.step(batch(7))
    session.load(tmp_path / "state")
    assert session.loss_scale == scale
    assert [session.step(batch(seed)) for seed in range(4)] == losses
    assert all((array == after[name]).all() for name, array in session.state_dict().items())
    assert session._scale == good


def test_a_state_without_a_scale_begins_with_the_first_one_and_one_with_a_wrong_scale_is_refused(
    session: memonger.TrainingSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(session, "_scale", None)
        session.save(tmp_path / "plain")
    session.load(tmp_path / "plain")
    assert session.loss_scale == 2.0**16
    with monkeypatch.context() as patch:
        wrong = LossScale(1.0)
        object.__setattr__(wrong, "factor", 0.0)
        patch.setattr(session, "_scale", wrong)
        session.save(tmp_path / "wrong")
    with pytest.raises(SessionError, match="its loss scale is out of range"):
        session.load(tmp_path / "wrong")


def test_a_portable_plan_in_16_bits_says_on_the_cpu_what_to_do() -> None:
    """onnxruntime's Casts run out of order, and a node could fail on what they overwrote: nothing is run."""
    training = memonger.to_training_mode(model(net()))
    plan = memonger.search_plan(
        training, loss="softmax_cross_entropy", optimizer=memonger.SGD(lr=0.1), precision="float16", device="none"
    )
    with pytest.raises(memonger.SessionError, match="doesn't run the planned order") as e:
        memonger.TrainingSession(plan)
    assert "Plan the model for this device (device='cpu')" in str(e.value)
